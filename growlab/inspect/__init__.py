"""Can a network grow, how much of it, and how exactly: one network's report and the matrix over whole libraries."""

from growlab.inspect.examine import METHODS, USUAL, Report, examine
from growlab.inspect.matrix import matrix, matrix_table
from growlab.inspect.sources import expand, load

__all__ = ["METHODS", "USUAL", "Report", "examine", "expand", "load", "matrix", "matrix_table"]

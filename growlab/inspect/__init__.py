"""Report which parts of a network can grow and how exactly, for one network or for whole libraries."""

from growlab.inspect.examine import METHODS, USUAL, Report, examine, matrix, matrix_table
from growlab.inspect.hub import expand, load

__all__ = ["METHODS", "USUAL", "Report", "examine", "expand", "load", "matrix", "matrix_table"]

"""Can a network grow, how much of it, and how exactly: one network's report and the matrix over whole libraries."""

from growlab.survey.examine import METHODS, USUAL, Report, examine
from growlab.survey.matrix import matrix, matrix_table
from growlab.survey.sources import expand, load

__all__ = ["METHODS", "USUAL", "Report", "examine", "expand", "load", "matrix", "matrix_table"]

"""Read run folders and turn them into tables and figures.

    from growlab.lab.analysis import load_runs, markdown, summarise
    print(markdown(summarise(load_runs(["runs"]))))

Figures are in `growlab.lab.analysis.figures`, a separate import because they need matplotlib. Nothing here
imports torch or Lightning.
"""

from growlab.lab.analysis.results import Group, Run, load_runs
from growlab.lab.analysis.tables import Row, markdown, summarise

__all__ = ["Group", "Row", "Run", "load_runs", "markdown", "summarise"]

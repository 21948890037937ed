"""Reads run folders and makes tables and figures of them; never trains.

    from growlab.lab.analysis import load_runs, summarise, markdown
    print(markdown(summarise(load_runs(["runs"]))))

Figures are in `growlab.lab.analysis.figures`, imported on their own because they bring in matplotlib. Nothing
here imports torch or Lightning (`growlab.grower.cost` does, and is imported where it is needed).
"""

from growlab.lab.analysis.results import Group, Run, load_runs
from growlab.lab.analysis.table_text import markdown
from growlab.lab.analysis.tables import Row, summarise

__all__ = ["Group", "Row", "Run", "load_runs", "markdown", "summarise"]

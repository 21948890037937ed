"""Read run folders and make tables and figures of them.

    from growlab.lab.analysis import load_runs, markdown, summarise
    print(markdown(summarise(load_runs(["runs"]))))

Figures are in `growlab.lab.analysis.figures`, imported on their own because they bring in matplotlib. Nothing
here imports torch or Lightning.
"""

from growlab.lab.analysis.results import Group, Run, load_runs
from growlab.lab.analysis.tables import Row, markdown, summarise

__all__ = ["Group", "Row", "Run", "load_runs", "markdown", "summarise"]

"""Predict from short probes whether growing pays for a network and a budget."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from growlab.lab.planner.probes import FULL, Candidate, Problem, Settings
    from growlab.lab.planner.report import paragraph, table
    from growlab.lab.planner.search import Planned, plan
    from growlab.lab.planner.verdict import Gain, Growing, Smaller, Trial, Verdict

__all__ = ["FULL", "Candidate", "Gain", "Growing", "Planned", "Problem", "Settings", "Smaller", "Trial"]
__all__ += ["Verdict", "paragraph", "plan", "table"]
# Imported when they are used: help and errors of `growlab plan` need not wait for torch.
_MODULES = {
    "probes": ("FULL", "Candidate", "Problem", "Settings"),
    "report": ("paragraph", "table"),
    "search": ("Planned", "plan"),
    "verdict": ("Gain", "Growing", "Smaller", "Trial", "Verdict"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"growlab.lab.planner.{module}"), name)
    raise AttributeError(f"module 'growlab.lab.planner' has no attribute {name!r}")

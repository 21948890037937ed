"""Does growing pay for a network and a budget? Probes, laws of loss over cost, and one of three verdicts."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from growlab.lab.planner.problem import WHOLE, Candidate, Problem, Settings
    from growlab.lab.planner.report import paragraph, table
    from growlab.lab.planner.search import Planned, plan
    from growlab.lab.planner.verdict import Gain, Growing, Smaller, Trial, Verdict

__all__ = [
    "WHOLE",
    "Candidate",
    "Gain",
    "Growing",
    "Planned",
    "Problem",
    "Settings",
    "Smaller",
    "Trial",
    "Verdict",
    "paragraph",
    "plan",
    "table",
]

# Imported when they are used: help and errors of `growlab plan` need not wait for torch.
_MODULES = {
    "problem": "WHOLE Candidate Problem Settings",
    "report": "paragraph table",
    "search": "Planned plan",
    "verdict": "Gain Growing Smaller Trial Verdict",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'growlab.lab.planner' has no attribute {name!r}")
    return getattr(importlib.import_module(f"growlab.lab.planner.{_HOMES[name]}"), name)

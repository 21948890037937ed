"""Does growing pay for a network and a budget? Probes, laws of loss over cost, and one of three verdicts."""

from growlab.plan.problem import WHOLE, Candidate, Problem, Settings
from growlab.plan.report import paragraph, table
from growlab.plan.search import Planned, plan
from growlab.plan.verdict import Gain, Growing, Smaller, Trial, Verdict

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

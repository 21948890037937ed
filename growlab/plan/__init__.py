"""Odds before training: is a smaller network better for a budget, and does growing pay for a full one?"""

from growlab.plan.odds import Advice, Case, Check, advise, check, read_cases

__all__ = ["Advice", "Case", "Check", "advise", "check", "read_cases"]

"""Scores of the advice on the second round of blind pairs: notebooks/results/blind_second.

`python -m tests.docs.blind_second` prints the section of the page guide/measured.md.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from textwrap import fill

from tests.command_line import ROOT
from tests.docs.stated import MEASURED, Stated

FOLDER = ROOT / "notebooks" / "results" / "blind_second"
SIZES = ("full", "smaller", "grown")
NAMES = {"full": "full", "smaller": "half", "grown": "grown"}
RULES = {"the advice of `growlab plan`": "choice", **{f"always {NAMES[arm]}": arm for arm in SIZES}, "a coin": "coin"}
# Samples per parameter to which the test refers.
MOST = 10.5


@dataclass(frozen=True)
class Outcome:
    """Results of a pair: its row of pairs.csv, and means over seeds by network.

    Attributes:
        pair: row of `pairs.csv`.
        accuracy: test accuracy in percent.
        error: test error, for text test loss.
    """

    pair: Mapping[str, str]
    accuracy: Mapping[str, float]
    error: Mapping[str, float]

    def points(self, rule: str) -> float:
        """Accuracy below the best network's."""
        best = max(self.accuracy.values())
        return best - (fmean(self.accuracy.values()) if rule == "coin" else self.accuracy[self.arm(rule)])

    def lost(self, rule: str) -> float:
        """Error above the best network's, relative to it."""
        best = min(self.error.values())
        return (fmean(self.error.values()) if rule == "coin" else self.error[self.arm(rule)]) / best - 1

    def arm(self, rule: str) -> str:
        """Network that a rule trains."""
        return self.pair["choice"] if rule == "choice" else rule

    @property
    def missed(self) -> list[float]:
        """Squared differences of the choice's odds and the outcome."""
        choice = self.pair["choice"]
        others = [arm for arm in SIZES if arm != choice]
        return [(float(self.pair[f"odds_{arm}"]) - (self.error[choice] < self.error[arm])) ** 2 for arm in others]


@cache
def outcomes(within: bool = True) -> tuple[Outcome, ...]:
    """Pairs with at most ten samples per parameter, or the others."""
    with (FOLDER / "pairs.csv").open(encoding="utf-8") as pairs, (FOLDER / "arms.csv").open(encoding="utf-8") as arms:
        lines, rows = list(csv.DictReader(pairs)), list(csv.DictReader(arms))
    found = []
    for line in lines:
        if (float(line["ratio"]) <= MOST) != within:
            continue
        own = {arm: [row for row in rows if (row["pair"], row["arm"]) == (line["pair"], arm)] for arm in SIZES}
        accuracy = {arm: 100 * fmean(float(row["test_accuracy"]) for row in own[arm]) for arm in SIZES}
        loss = {arm: fmean(float(row["test_loss"]) for row in own[arm]) for arm in SIZES}
        error = loss if line["kind"] == "language" else {arm: 1 - value / 100 for arm, value in accuracy.items()}
        found.append(Outcome(line, accuracy, error))
    return tuple(found)


def pair_lines() -> list[tuple[str, ...]]:
    """Network, samples per parameter, mean accuracies and choice of each pair."""
    return [
        (
            one.pair["family"],
            f"{float(one.pair['ratio']):.3g}",
            *(f"{one.accuracy[arm]:.1f}" for arm in SIZES),
            NAMES[one.pair["choice"]],
        )
        for one in (*outcomes(), *outcomes(within=False))
    ]


def rule_lines() -> list[tuple[str, ...]]:
    """Each rule: mean and largest points below the best, and mean error above the best, up to ten samples and beyond."""
    lines = []
    for name, rule in RULES.items():
        values = []
        for within in (True, False):
            points = [one.points(rule) for one in outcomes(within)]
            lost = 100 * fmean(one.lost(rule) for one in outcomes(within))
            values += [f"{fmean(points):.1f}", f"{max(points):.1f}", f"{lost:.0f}"]
        lines.append((name, *values))
    return lines


def scores() -> tuple[str, ...]:
    """Right choices, Brier score, and expected and realised error above the best, of the pairs of the test."""
    found = outcomes()
    right = sum(one.lost("choice") == 0 for one in found)
    expected = fmean(float(one.pair[f"regret_{one.pair['choice']}"]) for one in found)
    realised = fmean(one.lost("choice") for one in found)
    brier = fmean(missed for one in found for missed in one.missed)
    return str(right), str(len(found)), f"{brier:.2f}", f"{100 * expected:.1f}", f"{100 * realised:.1f}"

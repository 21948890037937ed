"""Scores of the odds on pairs that were written down before they were trained: notebooks/results/blind.

`python -m tests.docs.blind` prints them.
"""

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

from growlab.lab.analysis.paired import interval
from tests.command_line import ROOT

FOLDER = ROOT / "notebooks" / "results" / "blind"
SIZES = ("full", "smaller", "eighth", "grown")
INPUTS = ("small_input", "grown_input")
QUESTIONS = ("smaller_full", "eighth_full", "eighth_smaller", "grown_full")


@dataclass(frozen=True)
class Outcome:
    """Results of a pair.

    Attributes:
        pair: its line of `pairs.csv`.
        accuracy: in percent, by arm and seed.
        error: mean test error, of text loss, by arm.
        rows: of `arms.csv`.
    """

    pair: Mapping[str, str]
    accuracy: Mapping[str, Mapping[int, float]]
    error: Mapping[str, float]
    rows: list[dict[str, str]]

    def mean(self, arm: str) -> float:
        """Mean accuracy over seeds."""
        return fmean(self.accuracy[arm].values())

    def gap(self, first: str, second: str) -> tuple[float, tuple[float, float] | None]:
        """Mean difference of accuracy over common seeds, and its 95 % interval."""
        seeds = sorted(set(self.accuracy[first]) & set(self.accuracy[second]))
        found = [self.accuracy[first][seed] - self.accuracy[second][seed] for seed in seeds]
        return fmean(found), interval(found)

    def odds(self, question: str) -> float:
        """Odds of the first network of a question against the second."""
        return float(self.pair[f"odds_{question}"])

    def better(self, question: str) -> bool:
        """Return True if the first network of a question had the lower error."""
        first, second = question.split("_")
        return self.error[first] < self.error[second]

    @property
    def chosen(self) -> str:
        """Network that the odds choose."""
        if self.odds("smaller_full") < 0.5:
            return "full"
        return "eighth" if self.odds("eighth_smaller") >= 0.5 else "smaller"

    def regret(self, rule: str, among: tuple[str, ...]) -> float:
        """Accuracy below the best of some arms."""
        best = max(self.mean(arm) for arm in among if arm in self.accuracy)
        if rule == "coin":
            return best - fmean(self.mean(arm) for arm in SIZES)
        return best - self.mean(self.chosen if rule == "odds" else rule)

    def realised(self, question: str) -> float:
        """Relative error that the choice between two networks cost."""
        first, second = question.split("_")
        if (self.odds(question) >= 0.5) == self.better(question):
            return 0.0
        return max(self.error[first], self.error[second]) / min(self.error[first], self.error[second]) - 1


@cache
def outcomes() -> tuple[Outcome, ...]:
    """All pairs."""
    with (FOLDER / "pairs.csv").open(encoding="utf-8") as pairs, (FOLDER / "arms.csv").open(encoding="utf-8") as arms:
        lines, rows = list(csv.DictReader(pairs)), list(csv.DictReader(arms))
    found = []
    for line in lines:
        own, text = [row for row in rows if row["pair"] == line["pair"]], line["kind"] == "language"
        accuracy: dict[str, dict[int, float]] = {}
        error: dict[str, list[float]] = {}
        for row in own:
            accuracy.setdefault(row["arm"], {})[int(row["seed"])] = 100 * float(row["test_accuracy"])
            value = float(row["test_loss"]) if text else 1 - float(row["test_accuracy"])
            error.setdefault(row["arm"], []).append(value)
        found.append(Outcome(line, accuracy, {arm: fmean(values) for arm, values in error.items()}, own))
    return tuple(found)


def regrets(rule: str, among: tuple[str, ...] = SIZES) -> list[float]:
    """Regret of a rule in every pair that has it."""
    return [one.regret(rule, among) for one in outcomes() if rule not in INPUTS or rule in one.accuracy]


def brier(question: str) -> float:
    """Mean squared difference of odds and outcome."""
    return fmean((one.odds(question) - one.better(question)) ** 2 for one in outcomes())


def right(question: str) -> int:
    """Pairs in which the likelier network was better."""
    return sum((one.odds(question) >= 0.5) == one.better(question) for one in outcomes())


def expected(question: str) -> float:
    """Mean relative error that wrong choices were expected to cost."""
    return fmean(float(one.pair[f"regret_{question}"]) for one in outcomes())


def realised(question: str) -> float:
    """Mean relative error that wrong choices cost."""
    return fmean(one.realised(question) for one in outcomes())


def table(line: Callable[[Outcome], Any]) -> str:
    """A line of each pair."""
    return "\n".join(str(line(one)) for one in outcomes())


if __name__ == "__main__":
    shown = (*SIZES, *INPUTS, "controller", "stays")
    print("pair", *shown, "chosen", sep="\t")
    print(
        table(
            lambda one: "\t".join(
                [
                    one.pair["pair"],
                    *(f"{one.mean(arm):.2f}" if arm in one.accuracy else "" for arm in shown),
                    one.chosen,
                ]
            )
        )
    )
    for first, second in (("smaller", "full"), ("eighth", "full"), ("grown", "full"), ("controller", "stays")):
        print(first, "-", second, *(f"{one.gap(first, second)}" for one in outcomes()), sep="\n  ")
    for rule in ("odds", "controller", *SIZES, *INPUTS, "coin"):
        for among in (SIZES, (*SIZES, *INPUTS)):
            found = regrets(rule, among)
            print(rule, len(among), f"mean {fmean(found):.2f} largest {max(found):.2f}")
    for question in QUESTIONS:
        print(question, right(question), f"Brier {brier(question):.3f}", expected(question), realised(question))

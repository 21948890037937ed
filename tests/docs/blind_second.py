"""Scores of the odds on the second round of blind pairs: notebooks/results/blind_second.

`python -m tests.docs.blind_second` prints the section of the page guide/measured.md.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from textwrap import fill

from growlab.lab.analysis.paired import interval
from tests.command_line import ROOT
from tests.docs import blind
from tests.docs.blind import as_table
from tests.docs.stated import MEASURED, Stated

FOLDER = ROOT / "notebooks" / "results" / "blind_second"
SIZES = ("full", "smaller", "grown")
NAMES = {"full": "full", "smaller": "half", "grown": "grown"}
RULES = {
    "the odds of the 33 cases": "odds",
    "the advice that was written down": "choice",
    **{f"always {NAMES[arm]}": arm for arm in SIZES},
    "a coin": "coin",
}
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

    def arm(self, rule: str) -> str:
        """Network that a rule trains."""
        if rule == "odds":
            return "smaller" if self.odds >= 0.5 else "full"
        return self.pair["choice"] if rule == "choice" else rule

    @property
    def odds(self) -> float:
        """Odds of the smaller network against the full one, by the 33 cases that were known before (odds.csv)."""
        return float(self.pair["odds_smaller_full"])

    @property
    def excess(self) -> float:
        """Error of the likelier network above the better of the two, relative to it."""
        return self.error[self.arm("odds")] / min(self.error["smaller"], self.error["full"]) - 1

    @property
    def smaller_is_better(self) -> bool:
        """The smaller network had a lower error than the full one."""
        return self.error["smaller"] < self.error["full"]


@cache
def outcomes(within: bool = True) -> tuple[Outcome, ...]:
    """Pairs with at most ten samples per parameter, or the others."""
    with (FOLDER / "pairs.csv").open(encoding="utf-8") as pairs, (FOLDER / "arms.csv").open(encoding="utf-8") as arms:
        lines, rows = list(csv.DictReader(pairs)), list(csv.DictReader(arms))
    # Of the version before the first round, which pairs.csv does not have.
    with (FOLDER / "odds.csv").open(encoding="utf-8") as file:
        odds = {row["pair"]: row for row in csv.DictReader(file)}
    found = []
    for line in (line | odds[line["pair"]] for line in lines):
        if (float(line["ratio"]) <= MOST) != within:
            continue
        own = {arm: [row for row in rows if (row["pair"], row["arm"]) == (line["pair"], arm)] for arm in SIZES}
        accuracy = {arm: 100 * fmean(float(row["test_accuracy"]) for row in own[arm]) for arm in SIZES}
        loss = {arm: fmean(float(row["test_loss"]) for row in own[arm]) for arm in SIZES}
        error = loss if line["kind"] == "language" else {arm: 1 - value / 100 for arm, value in accuracy.items()}
        found.append(Outcome(line, accuracy, error))
    return tuple(found)


def everything() -> tuple[Outcome, ...]:
    """All pairs."""
    return (*outcomes(), *outcomes(within=False))


def pair_lines() -> list[tuple[str, ...]]:
    """Network, samples per parameter, mean accuracies, odds of the smaller network and the written choice."""
    return [
        (
            *(one.pair["family"], f"{float(one.pair['ratio']):.3g}"),
            *(f"{one.accuracy[arm]:.1f}" for arm in SIZES),
            *(f"{100 * one.odds:.0f} %", NAMES[one.pair["choice"]]),
        )
        for one in everything()
    ]


def rule_lines() -> list[tuple[str, ...]]:
    """Each rule: mean and largest points below the best of the three, up to ten samples per parameter and beyond."""
    lines = []
    for name, rule in RULES.items():
        two = [[one.points(rule) for one in outcomes(within)] for within in (True, False)]
        lines.append((name, *(f"{value:.1f}" for points in two for value in (fmean(points), max(points)))))
    return lines


def scores() -> tuple[str, ...]:
    """Pairs of the twelve, and of the four, in which the likelier network was better, and the Brier scores."""
    found = []
    for within in (True, False):
        right = sum((one.odds >= 0.5) == one.smaller_is_better for one in outcomes(within))
        brier = fmean((one.odds - one.smaller_is_better) ** 2 for one in outcomes(within))
        found += [str(right), f"{brier:.2f}"]
    return tuple(found)


def costs() -> tuple[str, ...]:
    """Mean relative error that wrong choices of the twelve, and of the four, were expected to add, and added."""
    both = (outcomes(), outcomes(within=False))
    return tuple(
        f"{100 * fmean(values):.1f}"
        for pairs in both
        for values in ([float(one.pair["regret_smaller_full"]) for one in pairs], [one.excess for one in pairs])
    )


def written() -> tuple[str, ...]:
    """Pairs of the twelve in which the written advice chose to grow, and was right."""
    grown = sum(one.pair["choice"] == "grown" for one in outcomes())
    right = sum(one.error[one.pair["choice"]] == min(one.error.values()) for one in outcomes())
    return str(grown), str(right)


def growing() -> tuple[str, ...]:
    """Accuracy of the grown network less that of the full and the smaller one, here and over both rounds."""
    found: list[str] = []
    for other in ("full", "smaller"):
        here = [one.accuracy["grown"] - one.accuracy[other] for one in everything()]
        for gaps in (here, [*here, *blind.across("grown", other)]):
            reach = interval(gaps)
            assert reach is not None
            found += [f"{fmean(gaps):.1f}", f"{reach[0]:.1f} to {reach[1]:.1f}"]
            if gaps is here:
                found.append(str(sum(gap > 0 for gap in gaps)))
    return tuple(found)


#: Paragraphs of the page, with gaps for numbers.
INTRODUCTION = (
    "Sixteen more pairs, of networks and data that no case had, were [written down](../results/blind_second/pairs.md) "
    "in the same way: twelve with 1 to 10 samples per parameter and four with 14 to 40. Accuracy in percent, mean of 2 "
    "seeds; the odds that half the network ends better than the full one, by the 33 cases known before; and the choice "
    "that was written down:"
)
ODDS = (
    "**The odds did well, an attempt to better them did not.** By the 33 cases, which include the first round, the "
    "odds for half the network against the full one were right in {} of the twelve pairs (Brier score {}) and in {} of "
    "the four ({}). Wrong choices were expected to add {} % to the error on average, and added {} %; {} and {} % in "
    "the four. The odds are those of `growlab plan` before and after this round, computed afterwards: what was "
    "written down was another rule, which took from the nearest cases the network with the least expected error. It "
    "chose to grow in {} of the twelve pairs, was right in {}, and has been dropped. These pairs are cases now."
)
GROWN = (
    "**Growing did not pay in this round.** The grown network ends {} points from the full one (95 % interval {}; "
    "better in {} of 16; over both rounds {}, {}) and {} from half of it ({}; better in {}; {}, {}). It was best for "
    "an LSTM, a GRU and a decoder, all on text, and far behind in two convolutional networks."
)
REGRETS = "Points of accuracy below the best of the three, mean and largest:"
HEAD = "| network and data | samples per parameter | full | half | grown | odds of half | written down |"
RULE_HEAD = "| rule | mean regret, 1 to 10 | largest | mean regret, 14 to 40 | largest |"


def stated() -> list[Stated]:
    """Sentences and lines of tables with their numbers."""
    return [
        Stated(MEASURED, ODDS, lambda: (*scores(), *costs(), *written())),
        Stated(MEASURED, GROWN, growing),
        *(Stated(MEASURED, "| {} |", lambda line=line: (" | ".join(line),)) for line in [*pair_lines(), *rule_lines()]),
    ]


if __name__ == "__main__":
    odds, grown = (fill(one.template.format(*one.values()), 120) for one in stated()[:2])
    tables = as_table(HEAD, pair_lines(), 1), as_table(RULE_HEAD, rule_lines(), 1)
    print(fill(INTRODUCTION, 120), tables[0], odds, fill(REGRETS, 120), tables[1], grown, sep="\n\n")

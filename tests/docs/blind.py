"""Scores of the odds on pairs that were written down before they were trained: notebooks/results/blind.

The modules of later rounds use these functions for the pairs of their folders.

`python -m tests.docs.blind` prints the section of the page guide/measured.md.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from textwrap import fill

from growlab.lab.analysis.paired import interval
from tests.command_line import ROOT
from tests.docs.stated import MEASURED, README, Stated

FOLDER = ROOT / "notebooks" / "results" / "blind"
SIZES = ("full", "smaller", "eighth", "grown")
INPUTS = ("small_input", "grown_input")
SHOWN = (*SIZES, *INPUTS, "controller")
RULES = {
    "the odds, and `growlab plan`": "odds",
    "`Controller`": "controller",
    **{f"always {name}": arm for name, arm in zip(("full", "half", "an eighth", "grown"), SIZES, strict=True)},
    "always small input": "small_input",
    "always grown input": "grown_input",
    "a coin": "coin",
}
QUESTIONS = ("smaller_full", "eighth_full", "eighth_smaller", "grown_full")


@dataclass(frozen=True)
class Outcome:
    """Results of a pair.

    Attributes:
        pair: row of `pairs.csv`.
        accuracy: test accuracy in percent, by arm and seed.
        error: mean test error (for text, test loss), by arm.
        rows: rows of `arms.csv`.
    """

    pair: Mapping[str, str]
    accuracy: Mapping[str, Mapping[int, float]]
    error: Mapping[str, float]
    rows: list[dict[str, str]]

    def mean(self, arm: str) -> float:
        """Mean accuracy over seeds."""
        return fmean(self.accuracy[arm].values())

    def gap(self, first: str, second: str) -> float:
        """Mean difference of accuracy over common seeds."""
        seeds = set(self.accuracy[first]) & set(self.accuracy[second])
        return fmean(self.accuracy[first][seed] - self.accuracy[second][seed] for seed in seeds)

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
        return "eighth" if float(self.pair.get("odds_eighth_smaller", 0)) >= 0.5 else "smaller"

    def regret(self, rule: str, among: tuple[str, ...]) -> float:
        """Accuracy below the best of some arms."""
        best = max(self.mean(arm) for arm in among if arm in self.accuracy)
        if rule == "coin":
            return best - fmean(self.mean(arm) for arm in among if arm in SIZES)
        return best - self.mean(self.chosen if rule == "odds" else rule)

    def realised(self, question: str) -> float:
        """Relative error that the choice between two networks cost."""
        first, second = question.split("_")
        if (self.odds(question) >= 0.5) == self.better(question):
            return 0.0
        return max(self.error[first], self.error[second]) / min(self.error[first], self.error[second]) - 1


@cache
def outcomes(folder: Path = FOLDER) -> tuple[Outcome, ...]:
    """All pairs of a folder."""
    with (folder / "pairs.csv").open(encoding="utf-8") as pairs, (folder / "arms.csv").open(encoding="utf-8") as arms:
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


def regrets(rule: str, among: tuple[str, ...] = SIZES, folder: Path = FOLDER) -> list[float]:
    """Regret of a rule in every pair that has it."""
    return [one.regret(rule, among) for one in outcomes(folder) if rule not in INPUTS or rule in one.accuracy]


def brier(question: str, folder: Path = FOLDER) -> float:
    """Mean squared difference of odds and outcome."""
    return fmean((one.odds(question) - one.better(question)) ** 2 for one in outcomes(folder))


def right(question: str, folder: Path = FOLDER) -> int:
    """Pairs in which the likelier network was better."""
    return sum((one.odds(question) >= 0.5) == one.better(question) for one in outcomes(folder))


def expected(question: str, folder: Path = FOLDER) -> float:
    """Mean relative error that wrong choices were expected to cost."""
    return fmean(float(one.pair[f"regret_{question}"]) for one in outcomes(folder))


def realised(question: str, folder: Path = FOLDER) -> float:
    """Mean relative error that wrong choices cost."""
    return fmean(one.realised(question) for one in outcomes(folder))


def scores(folder: Path) -> tuple[str, ...]:
    """Pairs whose likelier network was better, Brier scores, and what wrong choices were to cost and did."""
    half = "smaller_full"
    return (
        *(str(right(half, folder)), *(f"{brier(each, folder):.2f}" for each in (half, "grown_full"))),
        *(f"{100 * value(half, folder):.1f}" for value in (expected, realised)),
    )


def across(first: str, second: str, folder: Path = FOLDER) -> list[float]:
    """Mean difference of accuracy of each pair that has both arms."""
    return [one.gap(first, second) for one in outcomes(folder) if {first, second} <= set(one.accuracy)]


def grew(folder: Path = FOLDER) -> list[int]:
    """Decision of each controller: 1 if it grew."""
    return [int(row["grown"]) for one in outcomes(folder) for row in one.rows if row["arm"] == "controller"]


def pair_lines() -> list[tuple[str, ...]]:
    """Network, samples for each parameter and mean accuracies of each pair."""
    return [
        (
            one.pair["family"],
            one.pair["ratio"],
            *(f"{one.mean(arm):.1f}" if arm in one.accuracy else "" for arm in SHOWN),
        )
        for one in outcomes()
    ]


def rule_lines() -> list[tuple[str, ...]]:
    """Each rule: mean and largest regret, against the best of the sizes and the best of all."""
    lines = []
    for name, rule in RULES.items():
        two = [regrets(rule, among) for among in (SIZES, (*SIZES, *INPUTS))]
        lines.append((name, *(f"{value:.1f}" for found in two for value in (fmean(found), max(found)))))
    return lines


def difference(first: str, second: str, folder: Path = FOLDER) -> tuple[str, str, str]:
    """Mean over pairs, its 95 % interval, and the number of pairs in which the first was better."""
    found = across(first, second, folder)
    reach = interval(found)
    assert reach is not None
    # No -0.0.
    return (
        f"{round(fmean(found), 1) + 0.0:.1f}",
        f"{reach[0]:.1f} to {reach[1]:.1f}",
        str(sum(gap > 0 for gap in found)),
    )


def seeds() -> str:
    """Seeds of the runs, from the fewest to the most."""
    numbers = {len(scores) for one in outcomes() for scores in one.accuracy.values()}
    return " or ".join(map(str, sorted(numbers)))


def two_questions() -> tuple[str, ...]:
    """Scores of the odds of the smaller network against the full one."""
    return (
        *(str(right("smaller_full")), f"{brier('smaller_full'):.2f}"),
        *(f"{100 * value('smaller_full'):.1f}" for value in (expected, realised)),
        *(f"{brier(f'{arm}_full'):.2f}" for arm in ("eighth", "grown")),
    )


def recurrent() -> tuple[str, ...]:
    """Accuracy that the LSTM and the GRU gain by growing in width, over the full network drawn as a seed is."""
    own = [one for one in outcomes() if one.pair["family"].startswith(("lstm", "gru"))]
    return tuple(f"{one.gap('grown', arm):.1f}" for arm in ("drawn", "smaller") for one in own)


def controller(folder: Path = FOLDER) -> tuple[str, ...]:
    """Number of runs that grew, of all, gap to staying, pairs within 0.3 points, and the worst pair."""
    gaps, decisions = across("controller", "stays", folder), grew(folder)
    within = sum(gap >= -0.3 for gap in gaps)
    return (
        str(sum(decisions)),
        str(len(decisions)),
        *difference("controller", "stays", folder)[:2],
        str(within),
        f"{-min(gaps):.1f}",
    )


#: Paragraphs of the page, with gaps for numbers.
INTRODUCTION = (
    "Twelve pairs of a network and a budget, with 1 to 10 training samples (for text, characters) per parameter, were "
    "[written down](../results/blind/pairs.md) and committed with the odds of `growlab plan` before any of them was "
    "trained. All runs of a pair cost the same FLOPs, including the branches of `Controller`: the full network; a half "
    "and an eighth of its parameters; the network grown at 0.3 of the cost (ResNet, ViT and decoder in depth, the "
    "others in width); and the full network on small inputs (smaller images, windows of text half as long), throughout "
    "or for the first half of the cost. Accuracy in percent (for text, of the next character), mean of {} seeds:"
)
ODDS = (
    "**The odds did poorly.** For half the network against the full one they were right in {} of 12 pairs, with a "
    "Brier score of {} (a coin: 0.25). Wrong choices were expected to add {} % to the error on average, and added {} "
    "%. The Brier scores for an eighth, and for growing, against the full network are {} and {}. Between 1 and 10 "
    "samples per parameter, small networks did better than the older cases suggested. These pairs became cases."
)
REGRETS = (
    "Regret of each rule, in points of accuracy below the best of the four sizes (full, half, eighth, grown) and below "
    "the best of all runs (negative: above):"
)
INPUT = (
    "**Small inputs did best.** Small inputs throughout end {} points above the full network (95 % interval over ten "
    "pairs {}; better in {} of ten). Growing the inputs at half of the cost is {} points worse than that ({}; better "
    "in {} of ten): in so short a training, large inputs cost too much. The ViT on MNIST accounts for much of these "
    "means. Windows half as long also give text twice as many steps."
)
GROWN = (
    "**Growing is the best fixed rule among sizes**, {} points above the full network ({}; better in {} of 12) and {} "
    "above half of it ({}; {} of 12). But where growth adds blocks, the network without these blocks, never grown, is "
    "better still, by {} points ({}; {} of 6 pairs). In width, growing gains {} points over the full network "
    "initialised like a seed network ({}; {} of 6), mostly in the LSTM and the GRU: {} and {} points there, and {} and "
    "{} over half the network. These two baselines were added after the first seed."
)
CONTROLLED = (
    "`Controller` grew in {} of {} runs, because a grown network is still behind so soon after the event. It ends {} "
    "points from its smaller network trained on without growth ({}), at most 0.3 points below it in {} of 12 pairs, "
    "and {} points below in the worst. All intervals of this section include 0."
)
FRONT = "small inputs throughout are {} points above the full network (95 % interval {}) and {} above grown inputs ({})"
HEAD = (
    "| network and data | samples per parameter | full | half | eighth | grown | small input | grown input "
    "| `Controller` |"
)
RULE_HEAD = "| rule | mean regret, sizes | largest | mean regret, all | largest |"


def stated() -> list[Stated]:
    """Sentences and lines of tables with their numbers."""
    paragraphs = (
        (INTRODUCTION, lambda: (seeds(),)),
        (ODDS, two_questions),
        (INPUT, lambda: (*difference("small_input", "full"), *_lost("small_input", "grown_input"))),
        (
            GROWN,
            lambda: (
                *(*difference("grown", "full"), *difference("grown", "smaller"), *difference("shallow", "grown")),
                *(*difference("grown", "drawn"), *recurrent()),
            ),
        ),
        (CONTROLLED, controller),
    )
    lines = [*pair_lines(), *rule_lines()]
    front = (*difference("small_input", "full")[:2], *difference("small_input", "grown_input")[:2])
    return [
        *(Stated(MEASURED, *one) for one in paragraphs),
        Stated(README, FRONT, lambda: front),
        *(Stated(MEASURED, "| {} |", lambda line=line: (" | ".join(line),)) for line in lines),
    ]


def _lost(first: str, second: str) -> tuple[str, ...]:
    mean, reach, better = difference(first, second)
    return mean, reach, str(len(across(first, second)) - int(better))


def as_table(head: str, lines: list[tuple[str, ...]], left: int) -> str:
    """A table of Markdown."""
    columns = head.count("|") - 1
    rule = "|".join(["", *["---"] * left, *["---:"] * (columns - left), ""])
    return "\n".join([head, rule, *(f"| {' | '.join(line)} |" for line in lines)])


if __name__ == "__main__":
    introduction, odds, inputs, grown, controlled = (
        fill(one.template.format(*one.values()), 120) for one in stated()[:5]
    )
    tables = as_table(HEAD, pair_lines(), 1), as_table(RULE_HEAD, rule_lines(), 1)
    print(introduction, tables[0], odds, fill(REGRETS, 120), tables[1], inputs, grown, controlled, sep="\n\n")

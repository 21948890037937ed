"""Scores of the odds on pairs of a network and a budget that were written down before training: results/blind*.

`python -m tests.docs.blind` prints the tables and paragraphs of the page guide/odds.md; with `--write` it writes
`accuracy.md` of each round.
"""

import csv
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from math import exp
from pathlib import Path
from statistics import fmean
from textwrap import fill

from growlab.lab.analysis.paired import interval
from growlab.plan import check, read_cases
from tests.docs.stated import README, RESULTS, Stated

PAGE = "notebooks/docs/pages/guide/odds.md"
GROWING_PAYS = "notebooks/docs/pages/guide/growing_pays.md"
TWO, THREE = ("full", "smaller"), ("full", "smaller", "grown")
COLUMNS = {
    **{"full": "full", "smaller": "half", "eighth": "eighth", "grown": "grown"},
    **{"small_input": "small input", "grown_input": "grown input"},
    **{"controller": "`Controller`", "stays": "never grown"},
}


@dataclass(frozen=True)
class Pair:
    """A network and a budget, and the runs that were trained for it.

    Attributes:
        row: row of `pairs.csv`.
        runs: rows of `arms.csv`.
    """

    row: Mapping[str, str]
    runs: list[dict[str, str]]

    @cached_property
    def accuracy(self) -> dict[str, dict[int, float]]:
        """Test accuracy in percent by arm and seed."""
        accuracy: dict[str, dict[int, float]] = {}
        for run in self.runs:
            accuracy.setdefault(run["arm"], {})[int(run["seed"])] = 100 * float(run["test_accuracy"])
        return accuracy

    def mean(self, arm: str) -> float:
        """Mean accuracy over seeds."""
        return fmean(self.accuracy[arm].values())

    def error(self, arm: str) -> float:
        """Mean test error; for text, mean test loss."""
        if self.row["kind"] == "language":
            return fmean(float(run["test_loss"]) for run in self.runs if run["arm"] == arm)
        return 1 - self.mean(arm) / 100

    def gap(self, first: str, second: str) -> float:
        """Mean difference of accuracy over common seeds."""
        a, b = self.accuracy[first], self.accuracy[second]
        return fmean(a[seed] - b[seed] for seed in set(a) & set(b))

    def odds(self, arm: str = "smaller") -> float:
        """Odds of a network against the full one."""
        return float(self.row[f"odds_{arm}_full"])

    def better(self, arm: str = "smaller") -> bool:
        """Return True if a network ended with a lower error than the full one."""
        return self.error(arm) < self.error("full")

    @property
    def likelier(self) -> str:
        """The full network or the half, whichever the odds favour."""
        return "smaller" if self.odds() >= 0.5 else "full"

    def regret(self, rule: str, among: tuple[str, ...]) -> float:
        """Accuracy below the best of some arms."""
        means = [self.mean(arm) for arm in among]
        if rule == "coin":
            return max(means) - fmean(means)
        return max(means) - self.mean(self.likelier if rule == "odds" else rule)

    @property
    def excess(self) -> float:
        """Error of the likelier network above the better one's, relative to it."""
        return self.error(self.likelier) / min(map(self.error, TWO)) - 1


@dataclass(frozen=True)
class Round:
    """Pairs that were written down together."""

    name: str
    pairs: tuple[Pair, ...]

    @property
    def ratios(self) -> str:
        """Samples per parameter, from the least to the most."""
        ratios = [float(pair.row["ratio"]) for pair in self.pairs]
        return f"{min(ratios):.3g} to {max(ratios):.3g}"

    def right(self) -> int:
        """Number of pairs in which the likelier network was better."""
        return sum((pair.odds() >= 0.5) == pair.better() for pair in self.pairs)

    def brier(self, arm: str = "smaller") -> float:
        """Mean squared difference of odds and outcome."""
        return fmean((pair.odds(arm) - pair.better(arm)) ** 2 for pair in self.pairs)

    def expected(self) -> float:
        """Mean relative error in percent that wrong choices were expected to add."""
        return 100 * fmean(float(pair.row["regret_smaller_full"]) for pair in self.pairs)

    def realised(self) -> float:
        """Mean relative error in percent that wrong choices added."""
        return 100 * fmean(pair.excess for pair in self.pairs)

    def points(self, rule: str, among: tuple[str, ...]) -> str:
        """Mean and largest points of accuracy of a rule below the best of some arms; empty if it was not run."""
        if rule in COLUMNS and rule not in self.pairs[0].accuracy:
            return ""
        regrets = [pair.regret(rule, among) for pair in self.pairs]
        return f"{fmean(regrets):.1f}, {max(regrets):.1f}"

    def gaps(self, first: str, second: str) -> list[float]:
        """Difference of accuracy in each pair that has both arms."""
        return [pair.gap(first, second) for pair in self.pairs if {first, second} <= set(pair.accuracy)]

    def rows(self, arm: str) -> list[dict[str, str]]:
        """Runs of an arm."""
        return [run for pair in self.pairs for run in pair.runs if run["arm"] == arm]


@cache
def rounds() -> dict[str, Round]:
    """All rounds by name."""
    names = ("first", "second", "third", "fourth", "fifth", "sixth")
    return {name: _read(name, folder_of(name)) for name in names if (folder_of(name) / "arms.csv").exists()}


def folder_of(name: str) -> Path:
    """Folder of a round's files."""
    return RESULTS / ("blind" if name == "first" else f"blind_{name}")


def _read(name: str, folder: Path) -> Round:
    runs = list(_rows(folder / "arms.csv"))
    # Odds of the second round, which wrote down another rule: by the cases known before it.
    odds = {row["pair"]: row for row in _rows(folder / "odds.csv")} if name == "second" else {}
    pairs = [
        Pair({**row, **odds.get(row["pair"], {})}, [run for run in runs if run["pair"] == row["pair"]])
        for row in _rows(folder / "pairs.csv")
    ]
    return Round(name, tuple(pairs))


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        yield from csv.DictReader(file)


# Tables ------------------------------------------------------------------------------------------------------


def odds_lines() -> list[tuple[str, ...]]:
    """Scores of the odds of half the network against the full one, by round."""
    return [
        (
            *(one.name, str(len(one.pairs)), one.ratios, str(one.right()), f"{one.brier():.2f}"),
            *(f"{one.expected():.1f}", f"{one.realised():.1f}"),
            *(one.points(rule, TWO) for rule in ("odds", "full", "smaller")),
        )
        for one in rounds().values()
    ]


def regret_lines() -> list[tuple[str, ...]]:
    """Points below the best of the full network, the half and the grown one, by round and rule."""
    rules = ("odds", *THREE, "controller", "coin")
    return [(one.name, *(one.points(rule, THREE) for rule in rules)) for one in rounds().values()]


def grown_lines() -> list[tuple[str, ...]]:
    """Accuracy of the grown network less that of the full one and of the half, by round, and the odds' Brier score."""
    return [
        (
            one.name,
            *(value for other in TWO for value in difference(one.gaps("grown", other))),
            "" if "odds_grown_full" not in one.pairs[0].row or one.name == "second" else f"{one.brier('grown'):.2f}",
        )
        for one in rounds().values()
    ]


def pair_lines(one: Round) -> list[tuple[str, ...]]:
    """Network, samples per parameter, odds of the half and mean accuracies of each pair."""
    arms = [arm for arm in COLUMNS if arm in one.pairs[0].accuracy]
    return [
        ("network and data", "samples per parameter", "odds of half", *(COLUMNS[arm] for arm in arms)),
        *(
            (
                *(pair.row["family"], f"{float(pair.row['ratio']):.3g}", f"{100 * pair.odds():.0f} %"),
                *(f"{pair.mean(arm):.1f}" if arm in pair.accuracy else "" for arm in arms),
            )
            for pair in one.pairs
        ),
    ]


def table_of(one: Round) -> str:
    """Text of a round's `accuracy.md`."""
    seeds = {len(by_seed) for pair in one.pairs for by_seed in pair.accuracy.values()}
    head, *lines = pair_lines(one)
    numbers = " or ".join(map(str, sorted(seeds)))
    note = f"Test accuracy in percent (for text, of the next character), mean over {numbers} seeds:"
    return f"{note}\n\n{as_table(head, lines)}\n"


def as_table(head: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    """A table of Markdown, numbers to the right."""
    rule = "|".join(["", "---", *["---:"] * (len(head) - 1), ""])
    return "\n".join([f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(line)} |" for line in lines)])


# Numbers of paragraphs ---------------------------------------------------------------------------------------


def difference(gaps: list[float]) -> tuple[str, str, str]:
    """Mean over pairs, its 95 % interval, and the share of pairs in which the first was better."""
    reach = interval(gaps)
    assert reach is not None
    # No -0.0.
    mean, low, high = (f"{round(value, 1) + 0.0:.1f}" for value in (fmean(gaps), *reach))
    return mean, f"{low} to {high}", f"{sum(gap > 0 for gap in gaps)} of {len(gaps)}"


def differences(name: str, *arms: tuple[str, str]) -> tuple[str, ...]:
    """Differences of pairs of arms in a round."""
    return tuple(value for pair in arms for value in difference(rounds()[name].gaps(*pair)))


def inputs() -> tuple[str, ...]:
    """Small inputs against the full network and against grown inputs, in the first and in the third round."""
    others = (("small_input", "full"), ("small_input", "grown_input"))
    return tuple(value for other in others for name in ("first", "third") for value in differences(name, other))


def recurrent() -> tuple[str, ...]:
    """Accuracy that growth gains in the LSTM and the GRU, over the full network drawn like a seed and over the half."""
    of_both = [pair for pair in rounds()["first"].pairs if pair.row["family"].startswith(("lstm", "gru"))]
    return tuple(f"{pair.gap('grown', arm):.1f}" for arm in ("drawn", "smaller") for pair in of_both)


def controller(name: str) -> tuple[str, ...]:
    """Controllers that grew, all, their gap to the smaller network trained on, pairs within 0.3 points, the worst."""
    runs, gaps = rounds()[name].rows("controller"), rounds()[name].gaps("controller", "stays")
    grew, within = (str(sum(int(run["grown"]) for run in runs)), sum(gap >= -0.3 for gap in gaps))
    return grew, str(len(runs)), *difference(gaps)[:2], f"{within} of {len(gaps)}", f"{-min(gaps):.1f}"


def second_rule() -> tuple[str, ...]:
    """Pairs with at most ten samples per parameter in which the second round's rule chose to grow, and was right."""
    few = [pair for pair in rounds()["second"].pairs if float(pair.row["ratio"]) < 10.5]
    grown = sum(pair.row["choice"] == "grown" for pair in few)
    right = sum(pair.error(pair.row["choice"]) == min(map(pair.error, THREE)) for pair in few)
    return str(grown), str(len(few)), str(right)


def halves() -> tuple[str, ...]:
    """Pairs with at most ten samples per parameter, of all rounds and of text, and those whose half was better."""
    pairs = [pair for one in rounds().values() for pair in one.pairs]
    few = [pair for pair in pairs if float(pair.row["ratio"]) < 10.5]
    text = [pair for pair in few if pair.row["kind"] == "language"]
    return tuple(f"{sum(pair.better() for pair in group)} of {len(group)}" for group in (few, text))


def sixth() -> tuple[str, ...]:
    """Pairs of the sixth round whose likelier network was better, and points of each rule below the better one."""
    one = rounds()["sixth"]
    points = [value for rule in ("odds", "full", "smaller") for value in one.points(rule, TWO).split(", ")]
    return f"{one.right()} of {len(one.pairs)}", *points, f"{one.expected():.1f}", f"{one.realised():.1f}"


def all_cases() -> tuple[str, ...]:
    """Agreement of the odds with all cases, each without its family, and what their choices and fixed rules cost."""
    cases = read_cases()
    fit, gains = check(cases), [case.gain("smaller") or 0.0 for case in cases]
    fixed = (fmean(max(0.0, exp(sign * gain) - 1) for gain in gains) for sign in (-1, 1))
    costs = (fit.expected, fit.realised, *fixed)
    return str(fit.right), str(fit.cases), f"{fit.brier:.2f}", *(f"{100 * cost:.1f}" for cost in costs)


# The page ----------------------------------------------------------------------------------------------------

ODDS_HEAD = (
    *("round", "pairs", "samples per parameter", "right", "Brier score", "expected cost %", "cost %"),
    *("the odds", "always full", "always half"),
)
REGRET_HEAD = ("round", "the odds", "always full", "always half", "always grown", "`Controller`", "a coin")
GROWN_HEAD = (
    *("round", "grown less full", "95 % interval", "better in", "grown less half", "95 % interval", "better in"),
    "Brier score",
)
FEW = (
    "With at most 10 samples per parameter, half the network was better in {} pairs, on text in {}: in this range, "
    "always training the half is as good a rule as the odds. In the first, fourth and fifth round it lost less."
)
SIXTH = (
    "**Over a wider range the odds were better than either rule.** The sixth round has images with 1 to 90 samples per"
    " parameter, and text with 3 to 200. The odds were right in {} pairs and chose a network that is {} points below "
    "the better on average, and {} at most; always the full network, {} and {}; always the half, {} and {}. Wrong "
    "choices were expected to add {} % to the error, and added {} %. The Brier score missed its target, at most 0.12: "
    "the costliest pair is a network on digits of 8x8 pixels, each of them seen about a hundred times, whose half was "
    "better against odds of 0.06."
)
SECOND = (
    "In the second round another rule was written down, which took from the nearest cases the network with the least "
    "expected error. It chose to grow in {} of the {} pairs with at most 10 samples per parameter, was right in {}, "
    "and has been dropped. The odds of that round were computed afterwards, from the 33 cases known before it."
)
ALL = (
    "All pairs are cases of `growlab plan` now. With each family (a network on a data set) left out in turn, the odds "
    "predict the better network in {} of all {} cases (Brier score {}). Following them was expected to cost {} % more "
    "error than always choosing the better network, and cost {} %; always the half costs {} %, always the full network "
    "{} %."
)
GROWN = (
    "Where growth adds blocks (first round), the network without these blocks, never grown, is better still, by {} "
    "points ({}; better in {} pairs). In width, growth gains {} points over the full network initialised like a seed "
    "network ({}; better in {}), mostly in the LSTM and the GRU: {} and {} points there, and {} and {} over half the "
    "network. These two baselines were added after the first seed."
)
INPUTS = (
    "**Small inputs did best.** The full network on small inputs throughout (smaller images, windows of text half as "
    "long) ends {} points above the one on whole inputs in the first round (95 % interval {}; better in {} pairs) and "
    "{} in the third ({}; {}). Inputs that grow at half of the cost are {} points worse than small ones in the first "
    "round ({}; small ones better in {}) and {} in the third ({}; {}): in so short a training, large inputs cost too "
    "much. The ViT on MNIST accounts for much of the first round's means. Windows half as long also give text twice as "
    "many steps."
)
CONTROLLED = (
    "`Controller` grew in {} of {} runs of the first round, because a grown network is still behind so soon after the "
    "event. It ended {} points from its smaller network trained on without growth (95 % interval {}), at most 0.3 "
    "points below it in {} pairs, and {} below in the worst. In the third round it grew in {} of {} runs and ended {} "
    "points from that network ({}), at most 0.3 below it in {} pairs; in the worst, {} below, an RNN trained for so "
    "few steps that two branches of at least four took far more than their share. Since then nothing is compared where"
    " a branch has fewer than four steps or the odds of the full network are below 0.2, and branches take 2 % of the "
    "cost, no longer 2.5. So it grew in {} of {} runs of the fourth round and ended {} points from that network ({}), "
    "at most 0.3 below it in {} pairs, and {} below in the worst."
)
OF_CASES = (
    "following the odds costs {} % more error than always choosing the better network; always training the half costs "
    "{} %."
)
OF_CONTROLLER = (
    "The present `Controller` ended at most 0.3 points below its smaller network that never grows in {} pairs of "
    "the fourth round. It grew in {} of {} runs: it guards against a loss more than it finds a gain."
)
FRONT = "small inputs throughout are {} points above the full network (95 % interval {}) and {} above grown inputs ({})"
PARAGRAPHS: tuple[tuple[str, Callable[[], tuple[str, ...]]], ...] = (
    (FEW, halves),
    (SIXTH, sixth),
    (SECOND, second_rule),
    (ALL, all_cases),
    (GROWN, lambda: (*differences("first", ("shallow", "grown"), ("grown", "drawn")), *recurrent())),
    (INPUTS, inputs),
    (CONTROLLED, lambda: tuple(value for name in ("first", "third", "fourth") for value in controller(name))),
)


def front() -> tuple[str, ...]:
    """Small inputs of the first round against the full network and against grown inputs."""
    arms = product(("small_input",), ("full", "grown_input"))
    return tuple(value for pair in arms for value in differences("first", pair)[:2])


def of_controller() -> tuple[str, ...]:
    """Pairs of the fourth round in which `Controller` lost little, runs that grew, and all."""
    grew, runs, *_, within, _ = controller("fourth")
    return within, grew, runs


def stated() -> list[Stated]:
    """Sentences and lines of tables with their numbers."""
    lines = [*odds_lines(), *regret_lines(), *grown_lines()]
    return [
        *(Stated(PAGE, *paragraph) for paragraph in PARAGRAPHS),
        Stated(README, FRONT, front),
        Stated(GROWING_PAYS, OF_CASES, lambda: all_cases()[4:6]),
        Stated(GROWING_PAYS, OF_CONTROLLER, of_controller),
        *(Stated(PAGE, "| {} |", lambda line=line: (" | ".join(line),)) for line in lines),
    ]


if __name__ == "__main__":
    if "--write" in sys.argv:
        for each in rounds().values():
            (folder_of(each.name) / "accuracy.md").write_text(table_of(each), encoding="utf-8")
    else:
        for table in ((ODDS_HEAD, odds_lines()), (REGRET_HEAD, regret_lines()), (GROWN_HEAD, grown_lines())):
            print(as_table(*table), end="\n\n")
        print(*(fill(template.format(*values()), 120) for template, values in PARAGRAPHS), sep="\n\n")

"""Scores of the odds on the third round of blind pairs: notebooks/results/blind_third.

`python -m tests.docs.blind_third` prints the section of the page guide/measured.md.
"""

from pathlib import Path
from statistics import fmean
from textwrap import fill

from tests.command_line import ROOT
from tests.docs import blind
from tests.docs.blind import as_table, difference, outcomes
from tests.docs.stated import MEASURED, Stated

FOLDER = ROOT / "notebooks" / "results" / "blind_third"
SIZES = ("full", "smaller", "grown")
SHOWN = ("full", "smaller", "eighth", "grown", "small_input", "grown_input", "controller", "stays")
RULES = {
    "the odds, and `growlab plan`": "odds",
    "`Controller`": "controller",
    "always full": "full",
    "always half": "smaller",
    "always grown": "grown",
    "a coin": "coin",
}


def pair_lines(folder: Path = FOLDER, shown: tuple[str, ...] = SHOWN) -> list[tuple[str, ...]]:
    """Network, samples per parameter, odds of the half and mean accuracies of each pair."""
    return [
        (
            *(one.pair["family"], one.pair["ratio"], f"{100 * one.odds('smaller_full'):.0f} %"),
            *(f"{one.mean(arm):.1f}" if arm in one.accuracy else "" for arm in shown),
        )
        for one in outcomes(folder)
    ]


def points(rule: str, among: tuple[str, ...], folder: Path = FOLDER) -> tuple[str, str]:
    """Mean and largest points of accuracy of a rule below the best of some arms."""
    found = blind.regrets(rule, among, folder)
    return f"{fmean(found):.1f}", f"{max(found):.1f}"


def rule_lines() -> list[tuple[str, ...]]:
    """Each rule: points below the best of the three sizes, and below the best of all runs."""
    everything = (*SIZES, "eighth", *blind.INPUTS)
    return [(name, *points(rule, SIZES), *points(rule, everything)) for name, rule in RULES.items()]


def of_two(folder: Path = FOLDER) -> tuple[str, ...]:
    """Points of the odds, of the half and of the full network below the better of these two."""
    return tuple(each for rule in ("odds", "smaller", "full") for each in points(rule, SIZES[:2], folder))


def scores() -> tuple[str, ...]:
    """Pairs whose likelier network was better, Brier scores, and what wrong choices were to cost and did."""
    half = "smaller_full"
    return (
        *(str(blind.right(half, FOLDER)), f"{blind.brier(half, FOLDER):.2f}"),
        *(f"{blind.brier(f'{arm}_full', FOLDER):.2f}" for arm in ("eighth", "grown")),
        *(f"{100 * value(half, FOLDER):.1f}" for value in (blind.expected, blind.realised)),
    )


#: Paragraphs of the page, with gaps for numbers.
INTRODUCTION = (
    "Twelve more pairs, of networks that no case had (but for an LSTM and a Mixer, on other data), were [written "
    "down](../results/blind_third/pairs.md) with the odds of `growlab plan`, by its 49 cases, that half the network "
    "ends better than the full one. All runs of a pair cost the same FLOPs, as in the first round. Accuracy in "
    "percent, mean of 3 seeds; of 8 for `Controller` and for its smaller network that never grows:"
)
ODDS = (
    "**The odds did well.** They were right in {} of 12 pairs, with a Brier score of {} ({} for an eighth and {} for "
    "growing, against the full network). Wrong choices were expected to add {} % to the error on average, and added "
    "{} %."
)
REGRETS = (
    "Points of accuracy below the best of the full network, the half and the grown one, and below the best of these, "
    "the eighth and both inputs, mean and largest:"
)
TWO = (
    "Of the two networks that they compare, the odds choose one that is {} points below the better on average, and {}"
    " at most; always the half, {} and {}; always the full one, {} and {}. What they lose most on is growth, which "
    "they do not consider unless the full network is wanted: an LSTM gained by it once more."
)
INPUT = (
    "**Small inputs did best again**, {} points above the full network (95 % interval {}; better in {} of eight "
    "pairs) and {} above inputs that grow at half of the cost ({}; in {}). The grown network ends {} points from the "
    "full one ({}; better in {} of 12) and {} from half of it ({}; in {})."
)
CONTROLLED = (
    "`Controller` grew in {} of {} runs. It ends {} points from its smaller network trained on without growth ({}), "
    "at most 0.3 points below it in {} of 12 pairs, and {} points below in the worst, an RNN that trained for so few "
    "steps that two branches of at least four took far more than their share. Such a training has no branch any more."
)
HEAD = (
    "| network and data | samples per parameter | odds of half | full | half | eighth | grown | small input | grown "
    "input | `Controller` | never grown |"
)
RULE_HEAD = "| rule | mean regret, three | largest | mean regret, all | largest |"


def stated() -> list[Stated]:
    """Sentences and lines of tables with their numbers."""
    inputs = (("small_input", "full"), ("small_input", "grown_input"), ("grown", "full"), ("grown", "smaller"))
    return [
        Stated(MEASURED, ODDS, scores),
        Stated(MEASURED, TWO, of_two),
        Stated(MEASURED, INPUT, lambda: tuple(each for pair in inputs for each in difference(*pair, FOLDER))),
        Stated(MEASURED, CONTROLLED, lambda: blind.controller(FOLDER)),
        *(Stated(MEASURED, "| {} |", lambda line=line: (" | ".join(line),)) for line in [*pair_lines(), *rule_lines()]),
    ]


if __name__ == "__main__":
    odds, two, inputs, controlled = (fill(one.template.format(*one.values()), 120) for one in stated()[:4])
    tables = as_table(HEAD, pair_lines(), 1), as_table(RULE_HEAD, rule_lines(), 1)
    first = fill(INTRODUCTION, 120), tables[0], odds
    print(*first, fill(REGRETS, 120), tables[1], two, inputs, controlled, sep="\n\n")

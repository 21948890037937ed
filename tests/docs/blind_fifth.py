"""Scores of the odds on the fifth round of blind pairs: notebooks/results/blind_fifth.

`python -m tests.docs.blind_fifth` prints the section of the page guide/measured.md.
"""

from math import exp
from statistics import fmean
from textwrap import fill

from growlab.plan import check, read_cases
from tests.command_line import ROOT
from tests.docs import blind, blind_third
from tests.docs.blind import as_table, difference
from tests.docs.blind_fourth import GROWING_PAYS
from tests.docs.blind_third import SIZES, pair_lines, points
from tests.docs.stated import MEASURED, Stated

FOLDER = ROOT / "notebooks" / "results" / "blind_fifth"
RULES = {name: rule for name, rule in blind_third.RULES.items() if rule != "controller"}


def rule_lines() -> list[tuple[str, ...]]:
    """Each rule: points below the better of the full network and the half, and below the best of the three."""
    two, three = SIZES[:2], SIZES
    lines = []
    for name, rule in RULES.items():
        of_two = ("", "") if rule == "grown" else points(rule, two, FOLDER)
        lines.append((name, *of_two, *points(rule, three, FOLDER)))
    return lines


def halves_better() -> str:
    """Number of pairs in which half of the network was better than the full one."""
    return str(sum(one.better("smaller_full") for one in blind.outcomes(FOLDER)))


def all_cases() -> tuple[str, ...]:
    """Agreement of the odds with all cases, each without its family, and what their choices and fixed rules cost."""
    cases = read_cases()
    fit, gains = check(cases), [case.gain("smaller") or 0.0 for case in cases]
    fixed = (fmean(max(0.0, exp(sign * gain) - 1) for gain in gains) for sign in (-1, 1))
    return (
        *(str(fit.right), str(fit.cases), f"{fit.brier:.2f}"),
        *(f"{100 * value:.1f}" for value in (fit.expected, fit.realised, *fixed)),
    )


#: Paragraphs of the page, with gaps for numbers.
INTRODUCTION = (
    "Twenty-four more pairs, two thirds of them of kinds of networks that no case had, were [written "
    "down](../results/blind_fifth/pairs.md) with the odds by the 73 cases known then. They test a change made after "
    "the fourth round: the odds distinguish text from images, because a token is not an image. Accuracy in percent, "
    "mean of 5 seeds:"
)
ODDS = (
    "The odds were right in {} of 24 pairs, with a Brier score of {} ({} for growing against the full network). Wrong "
    "choices were expected to add {} % to the error on average, and added {} %. Half of the network was better in {} "
    "pairs, so in this round always training the half was the best rule."
)
ALL = (
    "These pairs are cases now. With each family left out in turn, the odds predict the better network in {} of all "
    "{} cases (Brier score {}). Following them was expected to cost {} % more error than always choosing the better "
    "network, and cost {} %; always the half costs {} %, always the full network {} %."
)
REGRETS = (
    "Points of accuracy below the better of the full network and the half, and below the best of these and the grown "
    "one, mean and largest:"
)
GROWN = (
    "The grown network ends {} points from the full one (95 % interval {}; better in {} of 24) and {} from half of it "
    "({}; in {})."
)
OF_CASES = (
    "following the odds costs {} % more error than always choosing the better network; always training the half costs "
    "{} %."
)
HEAD = "| network and data | samples per parameter | odds of half | full | half | grown |"
RULE_HEAD = "| rule | mean regret, two | largest | mean regret, three | largest |"


def stated() -> list[Stated]:
    """Sentences and lines of tables with their numbers."""
    grown = [difference("grown", other, FOLDER) for other in ("full", "smaller")]
    lines = [*pair_lines(FOLDER, SIZES), *rule_lines()]
    return [
        Stated(MEASURED, ODDS, lambda: (*blind.scores(FOLDER), halves_better())),
        Stated(MEASURED, ALL, all_cases),
        Stated(GROWING_PAYS, OF_CASES, lambda: all_cases()[4:6]),
        Stated(MEASURED, GROWN, lambda: (*grown[0], *grown[1])),
        *(Stated(MEASURED, "| {} |", lambda line=line: (" | ".join(line),)) for line in lines),
    ]


if __name__ == "__main__":
    odds, every, _, grown = (fill(one.template.format(*one.values()), 120) for one in stated()[:4])
    tables = as_table(HEAD, pair_lines(FOLDER, SIZES), 1), as_table(RULE_HEAD, rule_lines(), 1)
    print(fill(INTRODUCTION, 120), tables[0], odds, fill(REGRETS, 120), tables[1], grown, every, sep="\n\n")

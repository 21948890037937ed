"""Scores of the odds and of `Controller` on the fourth round of blind pairs: notebooks/results/blind_fourth.

`python -m tests.docs.blind_fourth` prints the section of the page guide/measured.md.
"""

from textwrap import fill

from tests.command_line import ROOT
from tests.docs import blind
from tests.docs.blind import as_table, difference
from tests.docs.blind_third import RULES, SIZES, of_two, pair_lines, points
from tests.docs.stated import MEASURED, Stated

FOLDER = ROOT / "notebooks" / "results" / "blind_fourth"
GROWING_PAYS = "notebooks/docs/pages/guide/growing_pays.md"
SHOWN = (*SIZES, "controller", "stays")


def rule_lines() -> list[tuple[str, ...]]:
    """Each rule: points below the best of the three sizes."""
    return [(name, *points(rule, SIZES, FOLDER)) for name, rule in RULES.items()]


def compared() -> tuple[str, ...]:
    """Controllers that compared, of all that there are, that grew, and how they end beside staying."""
    rows = [row for one in blind.outcomes(FOLDER) for row in one.rows if row["arm"] == "controller"]
    grown, runs, *others = blind.controller(FOLDER)
    return str(sum(bool(row["gap"]) for row in rows)), runs, grown, *others


#: Paragraphs of the page, with gaps for numbers.
INTRODUCTION = (
    "Twelve more pairs, networks of the rounds before on data on which no case had them, were [written "
    "down](../results/blind_fourth/pairs.md) with the odds by the 61 cases of then. They try `Controller` as the third "
    "round left it: it compares nothing where the odds of the full network are below 0.2 or a branch would have fewer "
    "than four steps, and its branches take 2 % of the cost, no longer 2.5. Accuracy in percent, mean of 3 seeds; of 8 "
    "for `Controller` and for its smaller network that never grows:"
)
ODDS = (
    "The odds were right in {} of 12 pairs, with a Brier score of {} ({} for growing against the full network). Wrong "
    "choices were expected to add {} % to the error on average, and added {} %. These pairs are cases now."
)
REGRETS = "Points of accuracy below the best of the full network, the half and the grown one, mean and largest:"
TWO = (
    "Of the two networks that they compare, the odds choose one that is {} points below the better on average, and {}"
    " at most; always the half, {} and {}; always the full one, {} and {}. The grown network ends {} points from the "
    "full one (95 % interval {}; better in {} of 12) and {} from half of it ({}; in {})."
)
CONTROLLED = (
    "`Controller` compared in {} of {} runs and grew in {}. It ends {} points from its smaller network trained on "
    "without growth ({}), at most 0.3 points below it in {} of 12 pairs, and {} points below in the worst."
)
OF_CONTROLLER = (
    "The present `Controller` ended at most 0.3 points below its smaller network that never grows in {} of 12 "
    "pairs of the fourth round. It grew in {} of {} runs: it guards against a loss more than it finds a gain."
)
HEAD = "| network and data | samples per parameter | odds of half | full | half | grown | `Controller` | never grown |"
RULE_HEAD = "| rule | mean regret | largest |"


def stated() -> list[Stated]:
    """Sentences and lines of tables with their numbers."""
    grown = [difference("grown", other, FOLDER) for other in ("full", "smaller")]
    return [
        Stated(MEASURED, ODDS, lambda: blind.scores(FOLDER)),
        Stated(MEASURED, TWO, lambda: (*of_two(FOLDER), *grown[0], *grown[1])),
        Stated(MEASURED, CONTROLLED, compared),
        Stated(GROWING_PAYS, OF_CONTROLLER, lambda: (compared()[5], compared()[2], compared()[1])),
        *(
            Stated(MEASURED, "| {} |", lambda line=line: (" | ".join(line),))
            for line in [*pair_lines(FOLDER, SHOWN), *rule_lines()]
        ),
    ]


if __name__ == "__main__":
    odds, two, controlled = (fill(one.template.format(*one.values()), 120) for one in stated()[:3])
    tables = as_table(HEAD, pair_lines(FOLDER, SHOWN), 1), as_table(RULE_HEAD, rule_lines(), 1)
    print(fill(INTRODUCTION, 120), tables[0], odds, fill(REGRETS, 120), tables[1], two, controlled, sep="\n\n")

"""Plans held to what then happened: `python -m growlab.lab.planner.pairs FOLDER` writes a table.

FOLDER holds `pairs.csv` (columns pair, blind, overrides), a folder for each plan with its `plan.json`, and `arms.csv`
with results of the experiments that the plans wrote (columns pair, arm, seed, test_accuracy, test_loss). Each plan is
judged twice from its probes: for any size, and with `plan.size=full`.
"""

import argparse
import csv
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

from growlab.lab.planner.fit import Measured, fit
from growlab.lab.planner.probes import FULL
from growlab.lab.planner.verdict import Growing, Trial, Verdict, judge

Size = Literal["any", "full"]
_ARM_OF = {"grow": "grown", "smaller": "smaller", "full": FULL}
#: What a rule takes of the arms that there are, by size that is wanted.
ARMS: Mapping[Size, Sequence[str]] = {"any": (FULL, "smaller", "grown"), "full": (FULL, "grown")}


@dataclass(frozen=True)
class Pair:
    """A network and a budget: what was said of it, and what came.

    Attributes:
        name: the folder's.
        blind: whether it was written down before any was run.
        verdicts: by size that is wanted.
        losses: test loss of each seed, by arm.
        accuracies: test accuracy of each seed, by arm.
    """

    name: str
    blind: bool
    verdicts: Mapping[Size, Verdict]
    losses: Mapping[str, Sequence[float]]
    accuracies: Mapping[str, Sequence[float]]

    def chosen(self, size: Size) -> str:
        """The arm that the plan says to train."""
        return _ARM_OF[self.verdicts[size].kind]

    def regret(self, arm: str, size: Size) -> float:
        """By how much an arm's mean test loss is above that of the best one."""
        return mean(self.losses[arm]) - min(mean(self.losses[one]) for one in ARMS[size])

    def gained(self, size: Size) -> float:
        """By how much growing ended below the best arm that does not grow, in test loss."""
        rivals = [mean(self.losses[one]) for one in ARMS[size] if one != "grown"]
        return min(rivals) - mean(self.losses["grown"])


def judged(content: Mapping[str, Any], size: Size) -> Verdict:
    """The verdict that the probes of a `plan.json` lead to.

    Args:
        content: of the file.
        size: that is wanted.
    """
    settings = content["settings"]
    measured = {name: Measured(**one) for name, one in content["measured"].items()}
    curves = fit(measured, FULL, settings["multiple"], seed=settings["seed"])
    trials = {name: Trial(**one) for name, one in content["trials"].items()}
    seconds = {name: one.seconds_per_cost for name, one in measured.items()}
    budget, latest = content["budget_of_the_run"], settings["latest"]
    return judge(curves, trials, FULL, seconds, budget, size, latest, settings["seed"], content["alone"])


def read(folder: Path) -> list[Pair]:
    """All pairs of a folder whose arms have been trained, in the order of their list.

    Args:
        folder: with `pairs.csv`, `arms.csv` and a folder for each plan.
    """
    with (folder / "arms.csv").open() as file:
        rows = list(csv.DictReader(file))
    with (folder / "pairs.csv").open() as file:
        listed = {row["pair"]: row["blind"] == "yes" for row in csv.DictReader(file)}
    found = []
    for name, blind in listed.items():
        own = [row for row in rows if row["pair"] == name]
        if not {row["arm"] for row in own} >= set(ARMS["any"]):
            continue
        content = json.loads((folder / name / "plan.json").read_text())
        verdicts: dict[Size, Verdict] = {size: judged(content, size) for size in ARMS}
        losses, accuracies = (
            {arm: [float(row[key]) for row in own if row["arm"] == arm] for arm in ARMS["any"]}
            for key in ("test_loss", "test_accuracy")
        )
        found.append(Pair(name, blind, verdicts, losses, accuracies))
    return found


def table(pairs: Sequence[Pair]) -> str:
    """Markdown: a line for each pair, then mean regrets of the plan and of rules of thumb."""
    lines = [
        "| pair | blind | any size | full size wanted | full | smaller | grown | growing gained | predicted |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for pair in pairs:
        said = [_said(pair, size) for size in ARMS]
        arms = [
            f"{_spread(pair.losses[arm])}, {100 * mean(pair.accuracies[arm]):.1f} %" for arm in ARMS["any"]
        ]
        gained = f"{pair.gained('any'):+.3f}, {pair.gained('full'):+.3f}"
        predicted = ", ".join(_predicted(pair.verdicts[size].growing) for size in ARMS)
        blind = "yes" if pair.blind else ""
        lines.append(f"| {pair.name} | {blind} | " + " | ".join([*said, *arms, gained, predicted]) + " |")
    return "\n".join([*lines, "", *_regrets(pairs), "", *_coverage(pairs), ""])


def _said(pair: Pair, size: Size) -> str:
    verdict = pair.verdicts[size]
    regret = pair.regret(pair.chosen(size), size)
    name = f"{verdict.kind} ({verdict.candidate})" if verdict.candidate else verdict.kind
    return f"{name}{'' if verdict.decided else ', undecided'}: " + (
        "best" if regret == 0 else f"{regret:.3f} above the best"
    )


def _spread(values: Sequence[float]) -> str:
    return f"{mean(values):.3f}" + (f" +- {stdev(values):.3f}" if len(values) > 1 else "")


def _predicted(growing: Sequence[Growing]) -> str:
    if not growing:
        return "no trial"
    gain = growing[0].loss
    return f"{gain.median:+.3f} ({gain.low:+.3f} to {gain.high:+.3f})"


def _regrets(pairs: Sequence[Pair]) -> list[str]:
    lines = ["| mean test loss above the best arm's | any size | full size wanted |", "|---|---|---|"]
    lines.append("| the plan | " + " | ".join(_mean_regret(pairs, size, None) for size in ARMS) + " |")
    for arm, name in (
        (FULL, "always the full network"),
        ("smaller", "always the smaller one"),
        ("grown", "always growing"),
    ):
        values = [_mean_regret(pairs, size, arm) if arm in ARMS[size] else "" for size in ARMS]
        lines.append(f"| {name} | {values[0]} | {values[1]} |")
    coin = [f"{mean(pair.regret(arm, size) for pair in pairs for arm in ARMS[size]):.3f}" for size in ARMS]
    lines.append(f"| a coin | {coin[0]} | {coin[1]} |")
    return lines


def held(pairs: Sequence[Pair], size: Size) -> tuple[int, int]:
    """How many of the predicted 90 % intervals held what growing then gained, and of how many."""
    told = [
        (pair.gained(size), pair.verdicts[size].growing[0].loss)
        for pair in pairs
        if pair.verdicts[size].growing
    ]
    return sum(gain.low <= gained <= gain.high for gained, gain in told), len(told)


def _coverage(pairs: Sequence[Pair]) -> list[str]:
    counts = [f"{inside} of {number}" for inside, number in (held(pairs, size) for size in ARMS)]
    return [
        "| predicted 90 % intervals | any size | full size wanted |",
        "|---|---|---|",
        f"| held what growing gained | {' | '.join(counts)} |",
    ]


def _mean_regret(pairs: Sequence[Pair], size: Size, arm: str | None) -> str:
    """Of an arm, or of what the plan says: of all pairs, and of the blind ones."""
    regrets = [(pair.blind, pair.regret(arm or pair.chosen(size), size)) for pair in pairs]
    blind = [regret for is_blind, regret in regrets if is_blind]
    of_blind = f" (blind ones {mean(blind):.3f})" if blind else ""
    return f"{mean(regret for _, regret in regrets):.3f}{of_blind}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of a folder and return the exit code.

    Args:
        arguments: in place of the command line's.
    """
    parser = argparse.ArgumentParser(
        prog="growlab.lab.planner.pairs", description="Hold plans to what then happened, as a Markdown table."
    )
    parser.add_argument("folder", type=Path, help="with pairs.csv, arms.csv and a folder for each plan")
    folder = parser.parse_args(arguments).folder
    try:
        print(table(read(folder)), end="")
    except OSError as error:
        print(f"error: cannot read {error.filename}: {error.strerror}.", file=sys.stderr)
        return 2
    except (KeyError, ValueError) as error:
        print(
            f"error: {folder} holds no plans and arms as growlab.lab.planner leaves them ({error}).",
            file=sys.stderr,
        )
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

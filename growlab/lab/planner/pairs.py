"""Compare plans with the results of their runs: `python -m growlab.lab.planner.pairs FOLDER` prints a table.

FOLDER has `pairs.csv` (columns pair, blind, overrides), a folder for each plan with its `plan.json`, and `arms.csv`
with results of the experiments that the plans wrote (columns pair, arm, seed, test_accuracy, test_loss). Each plan is
judged twice from its probes: for any size, and with `plan.size=full`.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

import pandas

from growlab.lab.planner.fit import Measured, fit
from growlab.lab.planner.verdict import Trial, Verdict, judge

Size = Literal["any", "full"]
_ARM_OF = {"grow": "grown", "smaller": "smaller", "full": "full"}
#: Arms that a rule takes its own from, by the size that is wanted.
ARMS: Mapping[Size, Sequence[str]] = {"any": ("full", "smaller", "grown"), "full": ("full", "grown")}
_RULES = {"full": "always the full network", "smaller": "always the smaller one", "grown": "always growing"}


@dataclass(frozen=True)
class Pair:
    """A network and a budget: the plan and the results.

    Attributes:
        name: the folder's.
        blind: True if it was chosen before any pair was run.
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
        """The arm that the plan recommends."""
        return _ARM_OF[self.verdicts[size].kind]

    def regret(self, arm: str, size: Size) -> float:
        """Mean test loss of an arm above that of the best one."""
        return mean(self.losses[arm]) - min(mean(self.losses[one]) for one in ARMS[size])

    def gained(self, size: Size) -> float:
        """Test loss of the best arm that does not grow, minus that of growing."""
        rivals = [mean(self.losses[one]) for one in ARMS[size] if one != "grown"]
        return min(rivals) - mean(self.losses["grown"])


def judged(content: Mapping[str, Any], size: Size) -> Verdict:
    """Judge the probes of a `plan.json` again, for a given `plan.size`."""
    settings = content["settings"]
    measured = {name: Measured(**one) for name, one in content["measured"].items()}
    curves = fit(measured, "full", settings["multiple"], seed=settings["seed"])
    trials = {name: Trial(**one) for name, one in content["trials"].items()}
    seconds = {name: one.seconds_per_cost for name, one in measured.items()}
    budget, latest = content["budget_of_the_run"], settings["latest"]
    return judge(curves, trials, "full", seconds, budget, size, latest, settings["seed"], content["alone"])


def read(folder: Path) -> list[Pair]:
    """Read all pairs of a folder whose arms have been trained, in the order of `pairs.csv`.

    Args:
        folder: with `pairs.csv`, `arms.csv` and a folder for each plan.
    """
    rows, found = pandas.read_csv(folder / "arms.csv"), []
    for listed in pandas.read_csv(folder / "pairs.csv").itertuples():
        own = {str(arm): of_arm for arm, of_arm in rows[rows["pair"] == listed.pair].groupby("arm")}
        if own.keys() >= set(ARMS["any"]):
            content = json.loads((folder / listed.pair / "plan.json").read_text())
            verdicts: dict[Size, Verdict] = {size: judged(content, size) for size in ARMS}
            losses, accuracies = (
                {arm: own[arm][key].tolist() for arm in ARMS["any"]} for key in ("test_loss", "test_accuracy")
            )
            found.append(Pair(listed.pair, listed.blind == "yes", verdicts, losses, accuracies))
    return found


def table(pairs: Sequence[Pair]) -> str:
    """Format as Markdown: each pair, mean regrets of the plan and of rules of thumb, and coverage of intervals."""
    columns = ["pair", "blind", "any size", "full size wanted", *ARMS["any"], "growing gained", "predicted"]
    rows = []
    for pair in pairs:
        arms = [
            f"{_spread(pair.losses[arm])}, {100 * mean(pair.accuracies[arm]):.1f} %" for arm in ARMS["any"]
        ]
        gained = ", ".join(f"{pair.gained(size):+.3f}" for size in ("any", "full"))
        predicted = ", ".join(_predicted(pair.verdicts[size]) for size in ARMS)
        verdicts = [_verdict(pair, size) for size in ARMS]
        rows.append([pair.name, "yes" if pair.blind else "", *verdicts, *arms, gained, predicted])
    sizes = ["any size", "full size wanted"]
    regrets = [["the plan", *(_mean_regret(pairs, size, None) for size in ARMS)]]
    regrets += [
        [name, *(_mean_regret(pairs, size, arm) if arm in ARMS[size] else "" for size in ARMS)]
        for arm, name in _RULES.items()
    ]
    coin = [mean(pair.regret(arm, size) for pair in pairs for arm in ARMS[size]) for size in ARMS]
    regrets.append(["a coin", *(f"{regret:.3f}" for regret in coin)])
    counts = [f"{inside} of {number}" for inside, number in (coverage(pairs, size) for size in ARMS)]
    return "\n".join(
        [
            _markdown(columns, rows),
            _markdown(["mean test loss above the best arm's", *sizes], regrets),
            _markdown(["predicted 90 % intervals", *sizes], [["contained the gain of growing", *counts]]),
        ]
    )


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [" | ".join(line) for line in (columns, *rows)]
    return "\n".join(
        [f"| {lines[0]} |", "|---" * len(columns) + "|", *(f"| {one} |" for one in lines[1:]), ""]
    )


def _verdict(pair: Pair, size: Size) -> str:
    verdict, regret = pair.verdicts[size], pair.regret(pair.chosen(size), size)
    name = f"{verdict.kind} ({verdict.candidate})" if verdict.candidate else verdict.kind
    distance = "best" if regret == 0 else f"{regret:.3f} above the best"
    return f"{name}{'' if verdict.decided else ', undecided'}: {distance}"


def _spread(values: Sequence[float]) -> str:
    return f"{mean(values):.3f}" + (f" +- {stdev(values):.3f}" if len(values) > 1 else "")


def _predicted(verdict: Verdict) -> str:
    if not verdict.growing:
        return "no trial"
    gain = verdict.growing[0].loss
    return f"{gain.median:+.3f} ({gain.low:+.3f} to {gain.high:+.3f})"


def coverage(pairs: Sequence[Pair], size: Size) -> tuple[int, int]:
    """Number of predicted 90 % intervals that contained the gain of growing, and number of all."""
    predicted = [
        (pair.gained(size), pair.verdicts[size].growing[0].loss)
        for pair in pairs
        if pair.verdicts[size].growing
    ]
    return sum(gain.low <= gained <= gain.high for gained, gain in predicted), len(predicted)


def _mean_regret(pairs: Sequence[Pair], size: Size, arm: str | None) -> str:
    """Mean regret of an arm, or of the recommended ones, over all pairs and over the blind ones."""
    regrets = [(pair.blind, pair.regret(arm or pair.chosen(size), size)) for pair in pairs]
    blind = [regret for is_blind, regret in regrets if is_blind]
    of_blind = f" (blind ones {mean(blind):.3f})" if blind else ""
    return f"{mean(regret for _, regret in regrets):.3f}{of_blind}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of a folder and return the exit code.

    Args:
        arguments: instead of the command line's.
    """
    parser = argparse.ArgumentParser(
        prog="growlab.lab.planner.pairs",
        description="Compare plans with what then happened, as a Markdown table.",
    )
    parser.add_argument("folder", type=Path, help="with pairs.csv, arms.csv and a folder for each plan")
    folder = parser.parse_args(arguments).folder
    try:
        print(table(read(folder)), end="")
    except OSError as error:
        print(f"error: cannot read {error.filename}: {error.strerror}.", file=sys.stderr)
        return 2
    except (KeyError, ValueError) as error:
        reason = f"contains no plans and arms as written by growlab.lab.planner ({error})."
        print(f"error: {folder} {reason}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

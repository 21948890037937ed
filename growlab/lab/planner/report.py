"""What a plan says and leaves behind: a paragraph, a table and `plan.json`."""

import textwrap
from dataclasses import asdict
from typing import Any

import numpy as np

from growlab.lab.planner.fit import Curves, fit
from growlab.lab.planner.problem import WHOLE
from growlab.lab.planner.search import Planned
from growlab.lab.planner.verdict import MISSED

_SAYS = {
    "grow": "GROW",
    "smaller": "A SMALLER NETWORK IS BETTER AT THIS BUDGET",
    "full": "TRAIN THE FULL NETWORK",
}

# Said wherever ranges are printed.
_RANGES = (
    f"Ranges are the middle 90 % of the laws' draws; those of a gain in loss are wider by {MISSED:.0%} of the full "
    "network's last loss, by which laws have missed what came."
)


def laws(planned: Planned) -> dict[str, Curves]:
    """The draws that the verdict was made from."""
    return fit(planned.measured, WHOLE, planned.settings.multiple, seed=planned.settings.seed)


def paragraph(planned: Planned) -> str:
    """The verdict, why, what it rests on and what it cost, in lines for a terminal."""
    verdict, account = planned.verdict, planned.account
    undecided = "" if verdict.decided else " (UNDECIDED: this is what to fall back to)"
    text = f"{_SAYS[verdict.kind]}{undecided}: {verdict.reason}."
    name = verdict.candidate or WHOLE
    text += f" Rate: {planned.rates[name]:g} times optimizer.lr."
    if verdict.growing and verdict.kind != "grow":
        best = verdict.growing[0]
        text += f" Growing from {best.candidate} at {best.switch:.0%} would save {best.saved()}."
    if verdict.kind == "grow" and verdict.growing[0].guess > verdict.growing[0].switch:
        text += (
            f" That is as far as the curves are trusted; by their medians {verdict.growing[0].guess:.0%} is a "
            "better moment, and the experiment grows there."
        )
    for one, trial in planned.trials.items():
        kept = next(g.kept for g in verdict.growing if g.candidate == one)
        text += (
            f" The trial growth from {one} kept {kept.median:.0%} ({kept.low:.0%} to {kept.high:.0%}) of its progress "
            f"(held-out loss {trial.loss_before:.3f}, {trial.loss_after:.3f} behind the event)."
        )
    text += (
        f" Probing spent {account.spent:.1%} of the budget, {account.spent - account.training:.1%} of it on "
        f"evaluations, in {account.seconds:.0f} s"
        + (
            ", taken off the run's budget."
            if planned.settings.charge
            else "; the run's budget is left whole."
        )
    )
    return "\n".join(textwrap.wrap(f"{text} {_RANGES}", 100))


def table(planned: Planned) -> str:
    """Every candidate's probe and what its law says, as a Markdown table, and the verdict under it."""
    curves, end = laws(planned), planned.budget
    lines = [
        "| candidate | FLOPs % | rate | probed % | held-out loss | trusted to % | loss at the end | s for it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, one in planned.measured.items():
        law = curves[name]
        low, middle, high = _three(law.law(end))
        lines.append(
            f"| {name} | {100 * planned.flops[name]:.0f} | x{planned.rates[name]:g} | {100 * one.cost[-1]:.2f} | "
            f"{one.loss[-1]:.3f} | {100 * min(1.0, law.reach):.0f} | {middle:.3f} ({low:.3f} to {high:.3f})"
            f"{'' if law.reach >= end else ' not trusted'} | {one.seconds_per_cost * end:.0f} |"
        )
    lines += ["", "Growing, if it were done, with the trial's transfer penalty:", ""]
    lines += [
        "| from | at % of the budget | loss gained | FLOPs saved % | seconds saved % | kept % | best guess at % |",
        "|---|---|---|---|---|---|---|",
    ]
    for way in planned.verdict.growing:
        gains = (way.cost, way.seconds, way.kept)
        cells = [f"{100 * g.median:.0f} ({100 * g.low:.0f} to {100 * g.high:.0f})" for g in gains]
        if way.beyond:
            cells[:2] = [f"at least {100 * g.low:.0f}" for g in gains[:2]]
        percents = " | ".join(cells)
        loss = f"{way.loss.median:.3f} ({way.loss.low:.3f} to {way.loss.high:.3f})"
        lines.append(
            f"| {way.candidate} | {100 * way.switch:.0f} | {loss} | {percents} | {100 * way.guess:.0f} |"
        )
    left = [f"- {name} was left out: {reason}" for name, reason in planned.left_out.items()]
    return "\n".join([*lines, "", *left, *([""] if left else []), paragraph(planned).replace("\n", " "), ""])


def content(planned: Planned) -> dict[str, Any]:
    """The content of `plan.json`: plain containers."""
    return {
        "verdict": planned.verdict.as_dict(),
        "settings": asdict(planned.settings),
        "rates": dict(planned.rates),
        "relative_flops": dict(planned.flops),
        "measured": {name: asdict(one) for name, one in planned.measured.items()},
        "trials": {name: asdict(one) for name, one in planned.trials.items()},
        "probes": [dict(one) for one in planned.tried],
        "left_out": dict(planned.left_out),
        "spent": asdict(planned.account),
        "budget_of_the_run": planned.budget,
        "alone": list(planned.alone),
    }


def _three(draws: Any) -> tuple[float, float, float]:
    low, middle, high = np.quantile(draws, [0.05, 0.5, 0.95])
    return float(low), float(middle), float(high)

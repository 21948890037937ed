"""Write a plan's verdict, table, figure and `plan.json`."""

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator

from growlab.lab.analysis import style
from growlab.lab.planner.fit import Curves, Measured, fit, quantiles
from growlab.lab.planner.probes import FULL
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
_GROWN = "#D55E00"
# The candidates of conf/plan/default.yaml: each has the same colour in the figures of all plans.
_KNOWN = ("both", "half_width", "fewer_blocks", "smaller_inputs")
_SWITCH: dict[str, Any] = {"color": "0.72", "linewidth": 0.7, "linestyle": (0, (3, 2))}


def paragraph(planned: Planned) -> str:
    """Format the verdict, its reason, evidence and cost for a terminal."""
    verdict, account = planned.verdict, planned.account
    undecided = "" if verdict.decided else " (UNDECIDED: this is what to fall back to)"
    parts = [f"{_SAYS[verdict.kind]}{undecided}: {verdict.reason}."]
    parts.append(f"Rate: {planned.rates[verdict.candidate or FULL]:g} times optimizer.lr.")
    best = verdict.growing[0] if verdict.growing else None
    if best and verdict.kind != "grow":
        parts.append(f"Growing from {best.candidate} at {best.switch:.0%} would save {best.saved()}.")
    if best and verdict.kind == "grow" and best.guess > best.switch:
        parts.append(
            f"That is as far as the curves are trusted; by their medians {best.guess:.0%} is a "
            "better moment, and the experiment grows there."
        )
    for one, trial in planned.trials.items():
        kept = next(g.kept for g in verdict.growing if g.candidate == one)
        parts.append(
            f"The trial growth from {one} kept {kept.median:.0%} ({kept.low:.0%} to {kept.high:.0%}) of its progress "
            f"(held-out loss {trial.loss_before:.3f}, {trial.loss_after:.3f} behind the event)."
        )
    charged = (
        ", taken off the run's budget." if planned.settings.charge else "; the run's budget is left whole."
    )
    parts.append(
        f"Probing spent {account.spent:.1%} of the budget, {account.spent - account.training:.1%} of it on "
        f"evaluations, in {account.seconds:.0f} s{charged}"
    )
    return "\n".join(textwrap.wrap(" ".join([*parts, _RANGES]), 100))


def table(planned: Planned) -> str:
    """Format every candidate's probe and law as a Markdown table, with the verdict below."""
    # The draws that the verdict was made from.
    curves = fit(planned.measured, FULL, planned.settings.multiple, seed=planned.settings.seed)
    end = planned.budget
    lines = [
        "| candidate | FLOPs % | rate | probed % | held-out loss | trusted to % | loss at the end | s for it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, one in planned.measured.items():
        law = curves[name]
        low, middle, high = np.quantile(law.law(end), [0.05, 0.5, 0.95])
        lines.append(
            f"| {name} | {100 * planned.flops[name]:.0f} | x{planned.rates[name]:g} | {100 * one.cost[-1]:.2f} | "
            f"{one.loss[-1]:.3f} | {100 * min(1.0, law.reach):.0f} | {middle:.3f} ({low:.3f} to {high:.3f})"
            f"{'' if law.reach >= end else ' not trusted'} | {one.seconds_per_cost * end:.0f} |"
        )
    lines += [
        *("", "Growing, if it were done, with the trial's transfer penalty:", ""),
        "| from | at % of the budget | loss gained | FLOPs saved % | seconds saved % | kept % | best guess at % |",
        "|---|---|---|---|---|---|---|",
    ]
    for way in planned.verdict.growing:
        gains = (way.cost, way.seconds, way.kept)
        cells = [f"{100 * g.median:.0f} ({100 * g.low:.0f} to {100 * g.high:.0f})" for g in gains]
        if way.beyond:
            cells[:2] = [f"at least {100 * g.low:.0f}" for g in gains[:2]]
        loss = f"{way.loss.median:.3f} ({way.loss.low:.3f} to {way.loss.high:.3f})"
        row = [way.candidate, f"{100 * way.switch:.0f}", loss, *cells, f"{100 * way.guess:.0f}"]
        lines.append(f"| {' | '.join(row)} |")
    left = [f"- {name} was left out: {reason}" for name, reason in planned.left_out.items()]
    return "\n".join([*lines, "", *left, *([""] if left else []), paragraph(planned).replace("\n", " "), ""])


def content(planned: Planned) -> dict[str, Any]:
    """Return the content of `plan.json` as plain containers."""
    return {
        "verdict": asdict(planned.verdict),
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


# Picture ---------------------------------------------------------------------------------------------------


def draw(folder: Path) -> Path:
    """Draw `plan.png` from a folder's `plan.json`."""
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    return style.save(drawn(plan), folder / "plan.png")


@style.styled()
def drawn(plan: Mapping[str, Any]) -> Figure:
    """Draw probes, laws with their intervals, the predicted grown run and its switch.

    Held-out loss over cost is on the left, and over this machine's seconds on the right.

    Args:
        plan: content of `plan.json`.
    """
    measured = {name: Measured(**one) for name, one in plan["measured"].items()}
    settings, budget, growing = plan["settings"], plan["budget_of_the_run"], plan["verdict"]["growing"]
    curves = fit(measured, FULL, settings["multiple"], seed=settings["seed"])
    figure = style.new_figure(7.2, 3.5)
    left, right = figure.subplots(1, 2, sharey=True)
    legend: dict[str, Artist] = {}
    for (name, one), line in zip(measured.items(), _line_styles(list(measured)), strict=True):
        for axes, scale in ((left, 100.0), (right, one.seconds_per_cost)):
            _curve(axes, budget, one, curves[name], line, scale)
        legend[f"{name} ({100 * plan['relative_flops'][name]:.0f} % of the FLOPs)"] = Line2D(
            [], [], **line, markersize=4
        )
    legend["90 % of the laws' draws"] = Patch(color="0.5", alpha=0.3, linewidth=0)
    legend["law beyond what is trusted"] = Line2D([], [], color="0.5", linewidth=0.8, linestyle=":")
    if growing:
        for axes, in_seconds in ((left, False), (right, True)):
            _grown(axes, budget, measured, curves, growing[0], in_seconds)
        name = f"grown from {growing[0]['candidate']}, predicted"
        legend[name] = Line2D([], [], color=_GROWN, linewidth=2.2)
        legend["its growth event"] = Line2D([], [], **_SWITCH)
    left.set_xlabel("training cost, % of the budget")
    right.set_xlabel("training time on this machine, s")
    left.set_ylabel("held-out loss of averaged weights")
    for axes in (left, right):
        axes.set_xscale("log")
        style.plain_ticks(axes.xaxis, LogLocator(subs=(1, 3)))
    note = "markers: measured in probes, one run each; lines: medians of the laws that are fitted to them"
    style.legend_below(figure, list(legend.values()), list(legend), 3, note=note)
    return figure


def _line_styles(names: Sequence[str]) -> list[dict[str, Any]]:
    """Colour and marker of each candidate; growlab's candidates always have the same ones."""
    spare = [colour for colour in style.PALETTE if colour != _GROWN]
    others = [name for name in names if name != FULL and name not in _KNOWN]
    seats = {name: seat for seat, name in enumerate((*_KNOWN, *others))}
    styles = {
        name: {
            "color": spare[seat % len(spare)],
            "marker": style.MARKERS[2 + seat % (len(style.MARKERS) - 2)],
        }
        for name, seat in seats.items()
    } | {FULL: {"color": style.FIXED_SIZE[0], "marker": style.MARKERS[0]}}
    return [styles[name] for name in names]


def _fitted_from(measured: Measured) -> float:
    """Cost from which a law is drawn: the middle checkpoint, since the first ones are hardly trained."""
    return measured.cost[len(measured.cost) // 2]


def _curve(axes: Axes, budget: float, measured: Measured, law: Curves, line: dict, scale: float) -> None:
    axes.plot(scale * np.asarray(measured.cost), measured.loss, **line, linestyle="", markersize=3.5)
    cost, colour = np.geomspace(_fitted_from(measured), budget, 60), line["color"]
    low, middle, high = np.quantile(law.law(cost[:, None]), [0.05, 0.5, 0.95], axis=1)
    trusted = cost <= law.reach
    x = scale * cost
    axes.fill_between(x[trusted], low[trusted], high[trusted], color=colour, alpha=0.15, lw=0)
    axes.plot(x[trusted], middle[trusted], color=colour, linewidth=1.2)
    # Not trusted: thin and dotted.
    axes.plot(x[~trusted], middle[~trusted], color=colour, linewidth=0.8, linestyle=":")


def _grown(
    axes: Axes,
    budget: float,
    measured: Mapping[str, Measured],
    curves: Mapping[str, Curves],
    way: Mapping[str, Any],
    in_seconds: bool,
) -> None:
    """The small network's median law up to the switch, then the full network's from that loss.

    If growth sets it back to before the start of the full network's drawn law, the curve starts there.
    """
    candidate = way["candidate"]
    small, full = curves[candidate], curves[FULL]
    rates = [measured[name].seconds_per_cost if in_seconds else 100.0 for name in (candidate, FULL)]
    switch, saved = way["switch"] * budget, way["cost"]["median"] * budget
    look = {"color": _GROWN, "linewidth": 2.2, "alpha": 0.7}
    before = np.geomspace(measured[candidate].cost[-1], switch, 30)
    axes.plot(rates[0] * before, quantiles(small, before)[1], **look)
    behind = np.geomspace(max(switch, _fitted_from(measured[FULL]) - saved), budget, 60)
    loss = np.median(full.law((behind + saved)[:, None]), axis=1)
    axes.plot(rates[0] * switch + rates[1] * (behind - switch), loss, **look)
    axes.axvline(rates[0] * switch, **_SWITCH, zorder=0.5, gid=style.EVENT)

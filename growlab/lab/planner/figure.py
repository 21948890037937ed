"""The picture of a plan: probes, laws with their intervals, the predicted grown run and its switch."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from growlab.lab.analysis import style
from growlab.lab.planner.fit import Curves, Measured, fit, quantiles
from growlab.lab.planner.problem import WHOLE

_GROWN = "#D55E00"
# The candidates of conf/plan/default.yaml: each looks the same in the figures of all plans.
_KNOWN = ("both", "half_width", "fewer_blocks", "smaller_inputs")
_SWITCH: dict[str, Any] = {"color": "0.72", "linewidth": 0.7, "linestyle": (0, (3, 2))}


def drawn(content: Mapping[str, Any]) -> Figure:
    """Held-out loss over cost on the left, and over this machine's seconds on the right.

    Args:
        content: of `plan.json`.
    """
    measured = {name: Measured(**one) for name, one in content["measured"].items()}
    settings, budget, growing = (
        content["settings"],
        content["budget_of_the_run"],
        content["verdict"]["growing"],
    )
    curves = fit(measured, WHOLE, settings["multiple"], seed=settings["seed"])
    names = list(measured)
    looks = _looks(names)
    with style.styled():
        figure = style.new_figure(7.2, 3.5)
        left, right = figure.subplots(1, 2, sharey=True)
        handles: list[Artist] = []
        labels = []
        for name, look in zip(names, looks, strict=True):
            _curve(left, budget, measured[name], curves[name], look, 100.0)
            _curve(right, budget, measured[name], curves[name], look, measured[name].seconds_per_cost)
            handles.append(Line2D([], [], **look, markersize=4))
            labels.append(f"{name} ({100 * content['relative_flops'][name]:.0f} % of the FLOPs)")
        handles.append(Patch(color="0.5", alpha=0.3, linewidth=0))
        labels.append("90 % of the laws' draws")
        handles.append(Line2D([], [], color="0.5", linewidth=0.8, linestyle=":"))
        labels.append("law beyond what is trusted")
        if growing:
            for axes, in_seconds in ((left, False), (right, True)):
                _grown(axes, budget, measured, curves, growing[0], in_seconds)
            handles.append(Line2D([], [], color=_GROWN, linewidth=2.2))
            labels.append(f"grown from {growing[0]['candidate']}, predicted")
            handles.append(Line2D([], [], **_SWITCH))
            labels.append("its growth event")
        left.set_xlabel("training cost, % of the budget")
        right.set_xlabel("training time on this machine, s")
        left.set_ylabel("held-out loss of averaged weights")
        for axes in (left, right):
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
        note = "markers: measured in probes, one run each; lines: medians of the laws that are fitted to them"
        style.legend_below(figure, handles, labels, 3, note=note)
        return figure


def _looks(names: Sequence[str]) -> list[dict[str, Any]]:
    """Colour and marker of each candidate: those of growlab's own have the same ones whatever else a plan has."""
    spare = [colour for colour in style.PALETTE if colour != _GROWN]
    others = [name for name in names if name != WHOLE and name not in _KNOWN]
    seats = {name: seat for seat, name in enumerate((*_KNOWN, *others))}
    return [
        {"color": style.FIXED_SIZE[0], "marker": style.MARKERS[0]}
        if name == WHOLE
        else {
            "color": spare[seats[name] % len(spare)],
            "marker": style.MARKERS[2 + seats[name] % (len(style.MARKERS) - 2)],
        }
        for name in names
    ]


def _fitted_from(measured: Measured) -> float:
    """Cost from which a law is drawn: the middle checkpoint, for the first ones are hardly trained."""
    return measured.cost[len(measured.cost) // 2]


def _curve(axes: Axes, budget: float, measured: Measured, law: Curves, look: dict, scale: float) -> None:
    axes.plot(
        scale * np.asarray(measured.cost),
        measured.loss,
        color=look["color"],
        marker=look["marker"],
        linestyle="",
        markersize=3.5,
    )
    cost = np.geomspace(_fitted_from(measured), budget, 60)
    low, middle, high = np.quantile(law.law(cost[:, None]), [0.05, 0.5, 0.95], axis=1)
    trusted = cost <= law.reach
    axes.fill_between(
        scale * cost[trusted], low[trusted], high[trusted], color=look["color"], alpha=0.15, lw=0
    )
    axes.plot(scale * cost[trusted], middle[trusted], color=look["color"], linewidth=1.2)
    # Not trusted: thin and dotted.
    axes.plot(scale * cost[~trusted], middle[~trusted], color=look["color"], linewidth=0.8, linestyle=":")


def _grown(
    axes: Axes,
    budget: float,
    measured: Mapping[str, Measured],
    curves: Mapping[str, Curves],
    way: Mapping[str, Any],
    in_seconds: bool,
) -> None:
    """The small network's median law to the switch, and the full one's from where it then stands.

    Where growth throws it back before the full one's law is drawn, its curve begins where that does.
    """
    candidate = way["candidate"]
    small, full = curves[candidate], curves[WHOLE]
    rates = [measured[name].seconds_per_cost if in_seconds else 100.0 for name in (candidate, WHOLE)]
    switch, saved = way["switch"] * budget, way["cost"]["median"] * budget
    before = np.geomspace(measured[candidate].cost[-1], switch, 30)
    axes.plot(rates[0] * before, quantiles(small, before)[1], color=_GROWN, linewidth=2.2, alpha=0.7)
    behind = np.geomspace(max(switch, _fitted_from(measured[WHOLE]) - saved), budget, 60)
    loss = np.median(full.law((behind + saved)[:, None]), axis=1)
    x = rates[0] * switch + rates[1] * (behind - switch)
    axes.plot(x, loss, color=_GROWN, linewidth=2.2, alpha=0.7)
    axes.axvline(rates[0] * switch, **_SWITCH, zorder=0.5, gid=style.EVENT)


def draw(folder: Path) -> Path:
    """Draw `plan.png` from the `plan.json` of a folder."""
    content = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    return style.save(drawn(content), folder / "plan.png")

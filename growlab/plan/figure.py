"""The picture of a plan: probes, laws with their intervals, the predicted grown run and its switch."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from growlab.analysis import style
from growlab.plan.fit import Curves, quantiles
from growlab.plan.problem import WHOLE
from growlab.plan.report import laws
from growlab.plan.search import Planned

_GROWN = "#D55E00"


def draw(planned: Planned) -> Figure:
    """Held-out loss over cost on the left, and over this machine's seconds on the right."""
    curves = laws(planned)
    names = list(planned.measured)
    looks = style.looks(["fixed-size" if name == WHOLE else name for name in names])
    # The grown run's own colour.
    colours = [look["color"] for look in looks]
    spare = [colour for colour in style.PALETTE if colour != _GROWN]
    for i, name in enumerate(names):
        colours[i] = colours[i] if name == WHOLE else spare[(i - 1) % len(spare)]
    with style.styled():
        figure = style.new_figure(7.2, 3.5)
        left, right = figure.subplots(1, 2, sharey=True)
        handles, labels = [], []
        for name, look, colour in zip(names, looks, colours, strict=True):
            own = {**look, "color": colour}
            _curve(left, planned, curves[name], name, own, 100.0)
            _curve(right, planned, curves[name], name, own, planned.measured[name].seconds_per_cost)
            handles.append(Line2D([], [], **own, markersize=4))
            labels.append(f"{name} ({100 * planned.flops[name]:.0f} % of the FLOPs)")
        if planned.verdict.growing:
            _grown(left, planned, curves, False)
            _grown(right, planned, curves, True)
            handles.append(Line2D([], [], color=_GROWN, linewidth=2.2))
            labels.append(f"grown from {planned.verdict.growing[0].candidate}, predicted")
        left.set_xlabel("training cost, % of the budget")
        right.set_xlabel("training time on this machine, s")
        left.set_ylabel("held-out loss of averaged weights")
        for axes in (left, right):
            axes.set_xscale("log")
        style.legend_below(figure, handles, labels, 3)
        return figure


def _curve(axes: Axes, planned: Planned, law: Curves, name: str, look: dict, scale: float) -> None:
    measured = planned.measured[name]
    axes.plot(
        scale * np.asarray(measured.cost),
        measured.loss,
        color=look["color"],
        marker=look["marker"],
        linestyle="",
        markersize=3.5,
    )
    cost = np.geomspace(measured.cost[len(measured.cost) // 2], planned.budget, 60)
    low, middle, high = np.quantile(law.law(cost[:, None]), [0.05, 0.5, 0.95], axis=1)
    trusted = cost <= law.reach
    axes.fill_between(
        scale * cost[trusted], low[trusted], high[trusted], color=look["color"], alpha=0.15, lw=0
    )
    axes.plot(scale * cost[trusted], middle[trusted], color=look["color"], linewidth=1.2)
    # Not trusted: thin and dotted.
    axes.plot(scale * cost[~trusted], middle[~trusted], color=look["color"], linewidth=0.8, linestyle=":")


def _grown(axes: Axes, planned: Planned, curves: dict[str, Curves], in_seconds: bool) -> None:
    """The small network's median law to the switch, and the full one's from where it then stands."""
    way = planned.verdict.growing[0]
    small, full = curves[way.candidate], curves[WHOLE]
    rates = [
        planned.measured[name].seconds_per_cost if in_seconds else 100.0 for name in (way.candidate, WHOLE)
    ]
    switch, saved = way.switch * planned.budget, way.cost.median * planned.budget
    before = np.geomspace(planned.measured[way.candidate].cost[-1], switch, 30)
    axes.plot(rates[0] * before, quantiles(small, before)[1], color=_GROWN, linewidth=2.2, alpha=0.7)
    behind = np.linspace(switch, planned.budget, 60)[1:]
    loss = np.median(full.law((behind + saved)[:, None]), axis=1)
    x = rates[0] * switch + rates[1] * (behind - switch)
    axes.plot(x, loss, color=_GROWN, linewidth=2.2, alpha=0.7)
    axes.axvline(
        rates[0] * switch, color="0.72", linewidth=0.7, linestyle=(0, (3, 2)), zorder=0.5, gid=style.EVENT
    )


def write_figure(planned: Planned, path: Path) -> Path:
    """Draw and save it."""
    return style.save(draw(planned), path)

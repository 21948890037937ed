"""Cost against accuracy over schedules and budgets (Yuan et al. 2023, Figure 6)."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from growlab.analysis import style
from growlab.analysis.results import Run
from growlab.analysis.schedules import best_at_cost, series_over_budgets
from growlab.analysis.tables import one_task, summarise

# Costs that differ by more than this factor are drawn on a logarithmic axis.
_WIDE = 6.0
_EDGE = {"color": "0.85", "linewidth": 4}


def frontier(runs: Sequence[Run]) -> Figure:
    """Training cost against test accuracy (or BLEU): a curve for each method and shape of schedule over its budgets.

    Fixed-size training is black. Means over seeds, bars one sample standard deviation. The grey steps are the
    best score measured at a cost or below it. Costs that differ by more than six times stand on a logarithmic axis.

    Raises:
        UserError: the runs are of several networks or data sets, whose numbers do not compare.
    """
    rows = summarise(runs)
    one_task(rows, "a frontier")
    series = series_over_budgets(rows)
    points = [point for one in series for point in one.points]
    looks = style.looks([one.is_fixed_size for one in series])
    reference, metric = rows[0].reference_epochs, rows[0].metric
    names = [f"{style.symbols(one.name)} (n={_seeds([p.row.n for p in one.points])})" for one in series]
    with style.styled():
        names.append("best at this cost or below")
        columns = 1 if max(map(len, names)) > 45 else 2
        lines = -(-len(names) // columns)
        figure = style.new_figure(5.2, 3.4 + 0.16 * lines)
        axes = figure.subplots()
        edge = best_at_cost(points)
        axes.plot(
            [point.cost for point in edge],
            [metric.scale * point.score for point in edge],
            drawstyle="steps-post",
            **_EDGE,
            zorder=0.5,
            gid="frontier",
        )
        axes.set_xlabel("training cost, in epochs of the fixed-size network at full width")
        axes.set_ylabel(metric.axis)
        costs = [point.cost for point in points]
        wide = max(costs) > _WIDE * min(costs)
        axes.set_xscale("log" if wide else "linear")
        percent = axes.secondary_xaxis(
            "top", functions=(lambda x: 100 * x / reference, lambda x: x * reference / 100)
        )
        percent.set_xlabel(f"% of {reference:g} epochs")
        for axis in (axes.xaxis, percent.xaxis) if wide else ():
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(FuncFormatter(lambda cost, _: f"{cost:g}"))
            axis.set_minor_locator(NullLocator())
        handles = [Line2D([], [], **look, markersize=4.5) for look in looks] + [Line2D([], [], **_EDGE)]
        style.legend_below(figure, handles, names, columns)
        for one, look in zip(series, looks, strict=True):
            x, y = zip(*((point.cost, metric.scale * point.score) for point in one.points), strict=True)
            axes.plot(x, y, **{**look, "marker": ""}, linewidth=1.1)
        axes.margins(0.05)
        # Last: which points would cover each other depends on the final layout.
        points_and_looks = [
            (point.cost, metric.scale * point.score, metric.scale * (point.row.score_std or 0.0), look)
            for one, look in zip(series, looks, strict=True)
            for point in one.points
        ]
        if style.mark_points(figure, axes, points_and_looks, size_points=4.5):
            note = "(points that would cover each other stand side by side)"
            axes.set_xlabel(f"{axes.get_xlabel()}\n{note}")
    return figure


def _seeds(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low}-{high}"

"""Cost, or seconds, against accuracy over schedules and budgets (Yuan et al. 2023, Figure 6)."""

from collections.abc import Callable, Sequence
from statistics import stdev
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from growlab.base.errors import UserError
from growlab.lab.analysis import style
from growlab.lab.analysis.results import Run
from growlab.lab.analysis.schedules import Point, Series, best_at_cost, series_over_budgets
from growlab.lab.analysis.tables import Row, one_task, summarise

# Costs that differ by more than this factor are drawn on a logarithmic axis.
_WIDE = 6.0
# The paper's symbols that names of series have.
_SYMBOLS = {
    "T_0": "length of the first stage, in % of all epochs",
    "p_t": "growth rate of the stages' lengths",
    "p_c": "growth rate of the widths",
    "p_b": "growth rate of the batch size",
}
_EDGE = {"color": "0.85", "linewidth": 4}


def frontier(runs: Sequence[Run]) -> Figure:
    """Training cost against test accuracy (or BLEU): a curve for each method and shape of schedule over its budgets.

    Fixed-size training is black. Means over seeds, bars one sample standard deviation. Markers are open: those behind
    others show through. The grey steps are the best score measured at a cost or below it. Costs that differ by more
    than six times stand on a logarithmic axis.

    Raises:
        UserError: the runs are of several networks or data sets, whose numbers do not compare.
    """
    rows = summarise(runs)
    one_task(rows, "a frontier")
    label = "training cost, in epochs of the fixed-size network at full width"
    return _draw(rows, lambda point: point.cost, label, "cost", of_cost=True)


def frontier_seconds(runs: Sequence[Run]) -> Figure:
    """Wall-clock seconds of a training against test accuracy (or BLEU), else as `frontier`.

    Seconds are means over seeds, bars to the left and right one sample standard deviation.

    Raises:
        UserError: the runs are of several networks or data sets, or of several machines, or have no seconds.
    """
    rows = summarise(runs)
    one_task(rows, "a frontier")
    machines = sorted({_machine(run) for row in rows for run in row.runs})
    if len(machines) > 1:
        raise UserError(
            f"seconds of several machines do not compare ({'; '.join(machines)}): name runs of one, or draw frontier."
        )
    if any(row.seconds is None for row in rows):
        raise UserError("runs without seconds have no place on an axis of them: draw frontier.")
    return _draw(rows, lambda point: point.row.seconds or 0.0, "seconds of a training", "time", of_cost=False)


def _draw(
    rows: Sequence[Row], amount: Callable[[Point], float], label: str, what: str, *, of_cost: bool
) -> Figure:
    series = series_over_budgets(rows)
    points = [point for one in series for point in one.points]
    looks = style.looks([one.points[0].row.group.method for one in series])
    metric = rows[0].metric
    names = [
        f"{style.symbols(style.shown(one.name))} (n={_seeds([p.row.n for p in one.points])})"
        for one in series
    ]
    with style.styled():
        names.append(f"best at this {what} or below")
        columns = 1 if max(map(len, names)) > 45 else 2
        lines = -(-len(names) // columns)
        figure = style.new_figure(5.2, 3.4 + 0.16 * lines)
        axes = figure.subplots()
        edge = best_at_cost(points, amount)
        axes.plot(
            [amount(point) for point in edge],
            [metric.scale * point.score for point in edge],
            drawstyle="steps-post",
            **_EDGE,
            zorder=0.5,
            gid="frontier",
        )
        axes.set_xlabel(label)
        axes.set_ylabel(metric.axis)
        _scale(axes, [amount(point) for point in points], rows[0].reference_epochs if of_cost else None)
        handles = [Line2D([], [], **look, markersize=4.5) for look in looks] + [Line2D([], [], **_EDGE)]
        style.legend_below(figure, handles, names, columns, note=_note(series))
        for one, look in zip(series, looks, strict=True):
            x, y = zip(*((amount(point), metric.scale * point.score) for point in one.points), strict=True)
            axes.plot(x, y, **{**look, "marker": ""}, linewidth=1.1)
            for point in () if of_cost else one.points:
                at, spread = amount(point), _spread_of_seconds(point)
                axes.hlines(
                    metric.scale * point.score, at - spread, at + spread, look["color"], linewidth=1.1
                )
        axes.margins(0.05)
        points_and_looks = [
            (amount(point), metric.scale * point.score, metric.scale * (point.row.score_std or 0.0), look)
            for one, look in zip(series, looks, strict=True)
            for point in one.points
        ]
        style.mark_points(axes, points_and_looks, size_points=5.0)
    return figure


def _note(series: Sequence[Series]) -> str:
    """Note on bars and on symbols in names."""
    names = " ".join(one.name for one in series)
    several = any(point.row.n > 1 for one in series for point in one.points)
    told = ["one seed each: no interval is known"]
    if several:
        told = ["points: means over n seeds, bars: one sample standard deviation"]
    told += [f"{style.symbols(symbol)}: {meaning}" for symbol, meaning in _SYMBOLS.items() if symbol in names]
    return "; ".join(told)


def _scale(axes: Axes, amounts: Sequence[float], reference_epochs: float | None) -> None:
    """Logarithmic where amounts are far apart; percent of the reference above, if there is one."""
    wide = max(amounts) > _WIDE * min(amounts)
    axes.set_xscale("log" if wide else "linear")
    shown: list[Any] = [axes.xaxis]
    if reference_epochs is not None:
        percent = axes.secondary_xaxis(
            "top", functions=(lambda x: 100 * x / reference_epochs, lambda x: x * reference_epochs / 100)
        )
        whole = f"{reference_epochs:g} epochs" if reference_epochs >= 1 else "the largest budget"
        percent.set_xlabel(f"% of {whole}")
        # A frame: an axis on top alone would look cut off.
        axes.spines["right"].set_visible(True)
        shown.append(percent.xaxis)
    for axis in shown if wide else ():
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda cost, _: f"{cost:g}"))
        axis.set_minor_locator(NullLocator())


def _machine(run: Run) -> str:
    known = dict(run.machine)
    several = [
        f"{known.pop(key)} {word}" for key, word in (("world_size", "processes"), ("num_nodes", "machines"))
    ]
    first = str(known.pop("device", known.pop("name", "unknown")))
    told = [word for word in several if not word.startswith("1 ")]
    return ", ".join([first, *(f"{value} {key}" for key, value in known.items()), *told])


def _spread_of_seconds(point: Point) -> float:
    seconds = [run.results["seconds"] for run in point.row.runs if run.results.get("seconds") is not None]
    return stdev(seconds) if len(seconds) > 1 else 0.0


def _seeds(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low}-{high}"

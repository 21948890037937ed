"""Figures that compare rows of a table: curves and cost, frontiers of cost or time, learning rates."""

import math
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

from growlab.base.errors import UserError
from growlab.lab.analysis import style
from growlab.lab.analysis.results import ACCURACY, Run
from growlab.lab.analysis.schedules import Point, best_at_cost, series_over_budgets
from growlab.lab.analysis.tables import Row, one_task, summarise, unique_names

_EQUAL_COST = 0.5  # costs count as equal within this many percentage points
# An axis of scores spans at least so many standard deviations over seeds (median over methods). If unknown, use that of
# ResNet-20's accuracy on CIFAR-10 (0.3 points, notebooks/results/resnet20_cifar10_16_epochs).
_LEAST_DEVIATIONS, _USUAL_DEVIATION = 10.0, 0.3
# An axis is logarithmic if costs or losses differ by more than this factor.
_WIDE = 6.0
# The paper's symbols in names of series.
_SYMBOLS = {
    "T_0": "length of the first stage, in % of all epochs",
    "p_t": "growth rate of the stages' lengths",
    "p_c": "growth rate of the widths",
    "p_b": "growth rate of the batch size",
}
_EDGE: dict[str, Any] = {"color": "0.85", "linewidth": 4}
_ONE_SEED = "one seed each: no interval is known"
_SEVERAL_SEEDS = "points: means over n seeds, bars: one sample standard deviation"
# Methods' rows and the line styles of their curves.
Drawn = Sequence[tuple[Row, dict[str, Any]]]


def _rows(runs: Sequence[Run], what: str) -> list[Row]:
    rows = summarise(runs)
    one_task(rows, what)
    return rows


def _seeds(rows: Sequence[Row]) -> str:
    """Return the number of seeds, or its range over the rows."""
    return "-".join(map(str, dict.fromkeys((min(row.n for row in rows), max(row.n for row in rows)))))


@style.styled()
def compare(runs: Sequence[Run]) -> Figure:
    """Compare runs: training loss, accuracy over epochs, and test accuracy against cost.

    Runs are grouped as in the table. Curves are means over seeds; bands and error bars are one sample standard
    deviation. Curves that would be indistinguishable are drawn minus their common mean. If all costs are equal, the
    last panel has one column per method. Accuracy is held-out if every run has it, else on training data. Growth events
    are lines if all grown runs share them, else ticks at the top in the method's colour.
    """
    rows = _rows(runs, "a comparison")
    drawn = list(zip(rows, style.line_styles([row.group.method for row in rows]), strict=True))
    metric, everyone = rows[0].metric, [run for row in rows for run in row.runs]
    if all(run.held_out(metric.key) is None and run.curve(f"train_{metric.key}") is None for run in everyone):
        metric = ACCURACY
    held_out = all(run.held_out(metric.key) is not None for run in everyone)
    methods = [style.display_name(name) for name in unique_names(rows)]
    names = [_legend_name(name, row, rows) for name, row in zip(methods, rows, strict=True)]
    num_columns = min(len(rows), 3 if max(map(len, names)) < 38 else 2)
    figure = style.new_figure(7.2, 4.2 + 0.15 * math.ceil(len(rows) / num_columns))
    panels = figure.subplot_mosaic([["loss", "cost"], ["metric", "cost"]], width_ratios=(1, 1.1))
    if held_out:
        name, scores = f"held-out {metric.name}", partial(Run.held_out, quantity=metric.key)
    else:
        name, scores = f"training {metric.name}", partial(Run.curve, column=f"train_{metric.key}")
    unit = f" ({metric.unit})" if metric.unit else ""
    _curves(panels["loss"], drawn, partial(Run.curve, column="train_loss"), 1, "training loss", "")
    _curves(panels["metric"], drawn, scores, metric.scale, name, unit)
    panels["loss"].set_xlabel("")
    panels["cost"].set_xlabel(f"training cost (%; 100 = fixed-size, {rows[0].reference_epochs:g} epochs)")
    keys = ("color", "linestyle", "marker")
    handles = [Line2D([], [], **{key: line[key] for key in keys}) for _, line in drawn]
    style.legend_below(figure, handles, names, num_columns, note=_curves_note(rows))
    _scatter(panels["cost"], drawn, methods)
    return figure


def _legend_name(name: str, row: Row, rows: Sequence[Row]) -> str:
    epochs = f", {row.group.epochs} epochs"
    omit = len({other.group.epochs for other in rows}) == 1 or epochs in f"{name},"
    return f"{name}{'' if omit else epochs} (n={len(row.runs)})"


def _curves_note(rows: Sequence[Row]) -> str:
    """Explain bands and marks of growth for the legend."""
    note = _ONE_SEED
    if any(len(row.runs) > 1 for row in rows):
        note = "lines and points: means over n seeds; bands and bars: one sample standard deviation"
    num_schedules = len(_distinct_events(rows))
    marks = "dashed lines" if num_schedules == 1 else "ticks at the top"
    return f"{note}; {marks}: growth events" if num_schedules else note


def _distinct_events(rows: Sequence[Row]) -> set[tuple[float, ...]]:
    return {tuple(row.runs[0].growth_epochs) for row in rows} - {()}


def _mark_all_growth(axes: Axes, drawn: Drawn) -> None:
    distinct = _distinct_events([row for row, _ in drawn])
    if len(distinct) == 1:
        style.mark_growth(axes, distinct.pop())
        return
    place: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "gid": style.EVENT, "lw": 1}
    grown = [(row.runs[0].growth_epochs, line["color"]) for row, line in drawn if row.runs[0].growth_epochs]
    for rank, (epochs, colour) in enumerate(grown):
        top = 1.0 - 0.035 * rank
        axes.vlines(epochs, top - 0.03, top, color=colour, **place)


def _curves(axes: Axes, drawn: Drawn, curve: Callable[[Run], Any], scale: float, name: str, unit: str) -> None:
    """Draw a curve of each method over completed epochs."""
    _mark_all_growth(axes, drawn)
    tables = [_table(row, curve, scale) for row, _ in drawn]
    base = _mean_of_equals(tables) if all(len(row.runs) > 1 for row, _ in drawn) else None
    for table, (_, line) in zip(tables, drawn, strict=True):
        if len(table.columns):
            # Join scores that are measured only every few epochs.
            _seed_band(axes, (table if base is None else table.sub(base, axis=0)).dropna(how="all"), line)
    style.epoch_axis(axes, max(row.group.epochs for row, _ in drawn))
    axes.set_ylabel(name + ("" if base is None else ",\nless the mean") + unit)


def _table(row: Row, curve: Callable[[Run], Any], scale: float) -> pandas.DataFrame:
    """Return the curves over completed epochs, one column per run that has it."""
    curves = [
        pandas.Series(scale * values, index=run.metrics["epoch"] + 1)
        for run in row.runs
        if (values := curve(run)) is not None
    ]
    return pandas.concat(curves, axis=1) if curves else pandas.DataFrame()


def _mean_of_equals(tables: Sequence[pandas.DataFrame]) -> pandas.Series | None:
    """Return the mean of the methods' curves if they differ by less than a twentieth of their range, else None."""
    means = [table.mean(axis=1) for table in tables if len(table.columns)]
    if len(means) < 2 or len({len(mean) for mean in means}) > 1:
        return None
    together = pandas.concat(means, axis=1)
    apart = (together.max(axis=1) - together.min(axis=1)).max()
    reach = float(together.to_numpy().max() - together.to_numpy().min())
    return together.mean(axis=1) if 0 < apart < 0.05 * reach else None


def _seed_band(axes: Axes, table: pandas.DataFrame, line: dict[str, Any]) -> None:
    mean, every = table.mean(axis=1), max(1, len(table) // 8)
    axes.plot(mean.index, mean, **line, markersize=2.8, markevery=every, linewidth=1.2, clip_on=False)
    if len(table.columns) > 1:
        std = table.std(axis=1)
        axes.fill_between(mean.index, mean - std, mean + std, color=line["color"], alpha=0.15, linewidth=0)


def _scatter(axes: Axes, drawn: Drawn, methods: Sequence[str]) -> None:
    """Draw score over cost, or over the methods' names if costs are equal."""
    known = [
        (float(row.cost_percent), row.scaled[0], row.scaled[1], line, method)
        for (row, line), method in zip(drawn, methods, strict=True)
        if row.cost_percent is not None and row.score_mean is not None
    ]
    if not known:
        return
    points, names = [(cost, mean, std, line) for cost, mean, std, line, _ in known], [point[4] for point in known]
    rows = [row for row, _ in drawn]
    costs = [point[0] for point in points]
    equal = len(points) > 1 and max(costs) - min(costs) < _EQUAL_COST
    if equal:
        points = [(float(index), *point[1:]) for index, point in enumerate(points)]
    axes.set_ylabel(rows[0].metric.axis)
    axes.margins(0.14)
    style.mark_points(axes, points, size_points=6.0)
    if equal:
        upright = len(names) > 4
        columns = 40 if upright else 60 // len(names)
        ticks = [textwrap.fill(name, columns, break_long_words=False) for name in names]
        axes.set_xticks(range(len(points)), ticks, fontsize=7, rotation=90 if upright else 0)
        axes.set_xlim(-0.5, len(points) - 0.5)
        whole = f"100 = fixed-size, {rows[0].reference_epochs:g} epochs"
        axes.set_xlabel(f"method, each at a training cost of {max(costs):.1f} %\n({whole})")
    _widen(axes, rows)


def _widen(axes: Axes, rows: Sequence[Row]) -> None:
    """Widen the axis of scores so that scatter over seeds does not look like a result.

    The scatter is the median over methods, so that a collapsed seed of one method does not hide the others.
    """
    metric = rows[0].metric
    known = [metric.scale * row.score_std for row in rows if row.score_std is not None]
    deviation = statistics.median(known) if known else _USUAL_DEVIATION if metric.unit == "%" else 0.0
    low, high = axes.get_ylim()
    missing = _LEAST_DEVIATIONS * deviation - (high - low)
    if missing > 0:
        axes.set_ylim(low - missing / 2, high + missing / 2)


def frontier(runs: Sequence[Run]) -> Figure:
    """Draw test accuracy (or BLEU) against training cost: a curve over budgets per method and shape of schedule.

    Fixed-size training is black. Points are means over seeds, bars one sample standard deviation. The grey steps are
    the best score measured up to each cost. The axis is logarithmic if costs differ by more than a factor of six (Yuan
    et al. 2023, Figure 6).
    """
    label = "training cost, in epochs of the fixed-size network at full width"
    return _frontier(_rows(runs, "a frontier"), lambda point: point.cost, label, "cost", of_cost=True)


def frontier_seconds(runs: Sequence[Run]) -> Figure:
    """Draw test accuracy (or BLEU) against wall-clock seconds of training, otherwise like `frontier`.

    Seconds are means over seeds, with horizontal bars of one sample standard deviation.
    """
    rows = _rows(runs, "a frontier")
    machines = sorted({_machine(run) for row in rows for run in row.runs})
    if len(machines) > 1:
        raise UserError(
            f"seconds of several machines are not comparable ({'; '.join(machines)}): name runs of one, or draw "
            "frontier."
        )
    if any(row.seconds is None for row in rows):
        raise UserError("frontier_seconds needs runs with seconds: draw frontier.")
    return _frontier(rows, lambda point: point.row.seconds or 0.0, "seconds of a training", "time", of_cost=False)


@style.styled()
def _frontier(rows: Sequence[Row], amount: Callable[[Point], float], label: str, what: str, *, of_cost: bool) -> Figure:
    series = series_over_budgets(rows)
    points = [point for curve in series for point in curve.points]
    lines = style.line_styles([curve.points[0].row.group.method for curve in series])
    names = _names([(curve.name, [point.row for point in curve.points]) for curve in series])
    names.append(f"best at this {what} or below")
    columns = 1 if max(map(len, names)) > 45 else 2
    figure = style.new_figure(5.2, 3.4 + 0.16 * -(-len(names) // columns))
    axes = figure.subplots()
    edge = best_at_cost(points, amount)
    x, y = list(map(amount, edge)), [point.row.scaled[0] for point in edge]
    axes.plot(x, y, drawstyle="steps-post", **_EDGE, zorder=0.5, gid="frontier")
    axes.set(xlabel=label, ylabel=rows[0].metric.axis)
    _cost_axis(axes, list(map(amount, points)), rows[0].reference_epochs if of_cost else None)
    handles = [Line2D([], [], **line, markersize=4.5) for line in lines] + [Line2D([], [], **_EDGE)]
    text = " ".join(curve.name for curve in series)
    meanings = [f"{style.symbols(symbol)}: {meaning}" for symbol, meaning in _SYMBOLS.items() if symbol in text]
    note = _SEVERAL_SEEDS if any(row.n > 1 for row in rows) else _ONE_SEED
    style.legend_below(figure, handles, names, columns, note="; ".join([note, *meanings]))
    marks = []
    for curve, line in zip(series, lines, strict=True):
        places = [(amount(point), *point.row.scaled, line) for point in curve.points]
        axes.plot(*list(zip(*places, strict=True))[:2], **{**line, "marker": ""}, linewidth=1.1)
        for point, (at, score, *_) in () if of_cost else zip(curve.points, places, strict=True):
            seconds = [s for run in point.row.runs if (s := run.results.get("seconds")) is not None]
            reach = statistics.stdev(seconds) if len(seconds) > 1 else 0.0
            axes.hlines(score, at - reach, at + reach, line["color"], linewidth=1.1)
        marks += places
    axes.margins(0.05)
    style.mark_points(axes, marks, size_points=5.0)
    return figure


def _names(curves: Sequence[tuple[str, Sequence[Row]]]) -> list[str]:
    """Return names of curves with their numbers of seeds for a legend."""
    return [f"{style.symbols(style.display_name(name))} (n={_seeds(rows)})" for name, rows in curves]


def _cost_axis(axes: Axes, amounts: Sequence[float], reference_epochs: float | None) -> None:
    """Make the x axis logarithmic if amounts are far apart; add a top axis in percent of the reference, if any."""
    wide = max(amounts) > _WIDE * min(amounts)
    axes.set_xscale("log" if wide else "linear")
    shown: list[Any] = [axes.xaxis]
    if reference_epochs is not None:
        both = (lambda x: 100 * x / reference_epochs, lambda x: x * reference_epochs / 100)
        percent = axes.secondary_xaxis("top", functions=both)
        whole = f"{reference_epochs:g} epochs" if reference_epochs >= 1 else "the largest budget"
        percent.set_xlabel(f"% of {whole}")
        # Without a right side, the top axis would look cut off.
        axes.spines["right"].set_visible(True)
        shown.append(percent.xaxis)
    for axis in shown if wide else ():
        style.plain_ticks(axis, LogLocator(subs=(1, 2, 5)))
        axis.set_minor_locator(NullLocator())


def _machine(run: Run) -> str:
    known = dict(run.machine)
    counts = {"processes": known.pop("world_size"), "machines": known.pop("num_nodes")}
    first = str(known.pop("device", known.pop("name", "unknown")))
    several = [f"{number} {word}" for word, number in counts.items() if number != 1]
    return ", ".join([first, *(f"{value} {key}" for key, value in known.items()), *several])


@style.styled()
def learning_rates(runs: Sequence[Run]) -> Figure:
    """Draw the last epoch's training loss and the test score over `optimizer.lr`: one curve per method.

    Points are means over seeds, bars one sample standard deviation. Rates without a finite value are left out (Yuan
    et al. 2023, Figure 14).
    """
    rows = _rows(runs, "a figure over learning rates")
    curves = over_rates(rows)
    rates = sorted({rate for of_rates in curves.values() for rate, _ in of_rates})
    if len(rates) == 1:
        raise UserError(f"all runs have optimizer.lr={rates[0]:g}: name runs of several rates, or draw compare.")
    lines = style.line_styles([of_rates[0][1].group.method for of_rates in curves.values()])
    names = _names([(name, [row for _, row in of_rates]) for name, of_rates in curves.items()])
    metric = rows[0].metric
    columns = 1 if max(map(len, names)) > 45 else 2
    figure = style.new_figure(7.2, 2.9 + 0.16 * -(-len(names) // columns))
    loss_axes, score_axes = figure.subplots(1, 2)
    losses: list[float] = []
    for of_rates, line in zip(curves.values(), lines, strict=True):
        last = [(rate, _finite(row, "train_loss")) for rate, row in of_rates]
        losses += [float(value) for _, values in last for value in values]
        _over_rates(loss_axes, last, line)
        scores = [(rate, metric.scale * _finite(row, f"test_{metric.key}")) for rate, row in of_rates]
        _over_rates(score_axes, scores, line)
    loss_axes.set_ylabel("training loss of the last epoch")
    score_axes.set_ylabel(metric.axis)
    if losses and max(losses) > _WIDE * min(losses):
        style.log_axis(loss_axes)
    for axes in (loss_axes, score_axes):
        axes.set_xscale("log")
        style.plain_ticks(axes.xaxis, FixedLocator(rates))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("learning rate")
    handles = [Line2D([], [], **line, markersize=4.5) for line in lines]
    note = _SEVERAL_SEEDS if any(row.n > 1 for row in rows) else _ONE_SEED
    style.legend_below(figure, handles, names, columns, note=note)
    return figure


def over_rates(rows: Sequence[Row]) -> dict[str, list[tuple[float, Row]]]:
    """Join rows that differ only in their learning rate: (learning rate, row) in rising order, by name without it."""
    joined: dict[str, list[tuple[float, Row]]] = defaultdict(list)
    plain = []
    for row in rows:
        kept = tuple(override for override in row.group.overrides if not override.startswith("optimizer.lr="))
        plain.append(replace(row, group=replace(row.group, overrides=kept)))
    for name, row in zip(unique_names(plain), plain, strict=True):
        joined[name].append((float(row.runs[0].config["optimizer"]["lr"]), row))
    return {name: sorted(of_rates, key=lambda pair: pair[0]) for name, of_rates in joined.items()}


def _finite(row: Row, key: str) -> np.ndarray:
    known = np.array([value for run in row.runs if (value := run.results.get(key)) is not None], dtype=float)
    return known[np.isfinite(known)]


def _over_rates(axes: Axes, values: Sequence[tuple[float, np.ndarray]], line: dict[str, Any]) -> None:
    points = [
        (rate, statistics.fmean(of_seeds), statistics.stdev(of_seeds) if len(of_seeds) > 1 else 0.0, line)
        for rate, of_seeds in values
        if len(of_seeds)
    ]
    if points:
        axes.plot(*list(zip(*points, strict=True))[:2], **{**line, "marker": ""}, linewidth=1.1)
        style.mark_points(axes, points, size_points=5.0)

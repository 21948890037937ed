"""Runs side by side: curves over epochs, and training cost against test accuracy."""

import math
import os
import statistics
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from growlab.lab.analysis import style
from growlab.lab.analysis.metrics import ACCURACY
from growlab.lab.analysis.results import Run
from growlab.lab.analysis.tables import Row, one_task, summarise, told_apart

_EQUAL_COST = 0.5  # percentage points within which costs have nothing to tell
# No axis of scores is shorter than so many standard deviations over seeds (the methods' median); where none is known,
# that of accuracies of ResNet-20 on CIFAR-10 (0.3 points, notebooks/results/resnet20_cifar10_16_epochs) stands in.
_LEAST_DEVIATIONS, _USUAL_DEVIATION = 10.0, 0.3


def compare(runs: Sequence[Run], out: str | os.PathLike[str] | None = None) -> Figure:
    """Runs side by side: training loss, accuracy over epochs, and cost against test accuracy.

    Runs are grouped as in the table; a curve is the mean over seeds, its band and the error bars one sample
    standard deviation. Curves of several seeds that could not be told apart are drawn less their mean. Where all
    costs are equal, the last panel has a column for each method. Accuracy is the held-out one if every run has it,
    else that of training. Growth events are lines if all grown runs share them, else ticks at the top in the method's
    colour.

    Args:
        runs: finished runs of one network and data set.
        out: where to write the figure, if anywhere.

    Raises:
        UserError: the runs are of several networks or data sets, whose numbers do not compare.
    """
    rows = summarise(runs)
    one_task(rows, "a comparison")
    looks = style.looks([row.group.method for row in rows])
    everyone = [run for row in rows for run in row.runs]
    metric = rows[0].metric
    if all(run.held_out(metric.key) is None and run.curve(f"train_{metric.key}") is None for run in everyone):
        metric = ACCURACY
    held_out = all(run.held_out(metric.key) is not None for run in everyone)
    num_epochs = max(row.group.epochs for row in rows)
    methods = [style.shown(name) for name in told_apart(rows)]
    names = [_legend_name(name, row, rows) for name, row in zip(methods, rows, strict=True)]
    num_columns = min(len(rows), 3 if max(map(len, names)) < 38 else 2)
    with style.styled():
        num_lines = math.ceil(len(rows) / num_columns)
        figure = style.new_figure(7.2, 4.2 + 0.15 * num_lines)
        panels = figure.subplot_mosaic([["loss", "cost"], ["metric", "cost"]], width_ratios=(1, 1.1))
        loss_axes, metric_axes, cost_axes = (panels[name] for name in ("loss", "metric", "cost"))
        scores = (
            partial(Run.held_out, quantity=metric.key)
            if held_out
            else partial(Run.curve, column=f"train_{metric.key}")
        )
        unit = f" ({metric.unit})" if metric.unit else ""
        score_name = f"{'held-out' if held_out else 'training'} {metric.name}"
        for axes, curve, scale, name, behind in (
            (loss_axes, partial(Run.curve, column="train_loss"), 1, "training loss", ""),
            (metric_axes, scores, metric.scale, score_name, unit),
        ):
            _mark_all_growth(axes, rows, looks)
            tables = [_table(row, curve, scale) for row in rows]
            base = _mean_of_equals(tables) if all(len(row.runs) > 1 for row in rows) else None
            for table, look in zip(tables, looks, strict=True):
                _seed_band(axes, table if base is None else table.sub(base, axis=0), look)
            style.epoch_axis(axes, num_epochs)
            axes.set_ylabel(name + ("" if base is None else ",\nless the mean") + behind)
        loss_axes.set_xlabel("")
        cost_axes.set_xlabel(f"training cost (%; 100 = fixed-size, {rows[0].reference_epochs} epochs)")
        handles = [
            Line2D([], [], color=k["color"], linestyle=k["linestyle"], marker=k["marker"]) for k in looks
        ]
        style.legend_below(figure, handles, names, num_columns, note=_note(rows))
        _scatter(cost_axes, rows, looks, methods)
    if out is not None:
        style.save(figure, out)
    return figure


def _legend_name(name: str, row: Row, rows: Sequence[Row]) -> str:
    epochs = f", {row.group.epochs} epochs"
    said = len({other.group.epochs for other in rows}) == 1 or epochs in f"{name},"
    return f"{name}{'' if said else epochs} (n={len(row.runs)})"


def _note(rows: Sequence[Row]) -> str:
    """Note on intervals and marks of growth."""
    told = "one seed each: no interval is known"
    if any(len(row.runs) > 1 for row in rows):
        told = "lines and points: means over n seeds; bands and bars: one sample standard deviation"
    num_schedules = len(_distinct_events(rows))
    marks = "" if not num_schedules else "dashed lines" if num_schedules == 1 else "ticks at the top"
    return f"{told}; {marks}: growth events" if marks else told


def _distinct_events(rows: Sequence[Row]) -> set[tuple[float, ...]]:
    return {tuple(row.runs[0].growth_epochs) for row in rows if len(row.runs[0].growth_epochs)}


def _mark_all_growth(axes: Axes, rows: Sequence[Row], looks: Sequence[dict[str, Any]]) -> None:
    events = [
        (tuple(row.runs[0].growth_epochs), look["color"]) for row, look in zip(rows, looks, strict=True)
    ]
    distinct = _distinct_events(rows)
    if len(distinct) == 1:
        style.mark_growth(axes, distinct.pop())
        return
    for line, (epochs, colour) in enumerate(e for e in events if e[0]):
        top = 1.0 - 0.035 * line
        axes.vlines(
            epochs, top - 0.03, top, color=colour, transform=axes.get_xaxis_transform(), gid=style.EVENT, lw=1
        )


def _table(row: Row, curve: Callable[[Run], Any], scale: float) -> pandas.DataFrame:
    """A curve of each run over epochs done; runs without it have none."""
    curves = [
        pandas.Series(scale * values, index=run.metrics["epoch"] + 1)
        for run in row.runs
        if (values := curve(run)) is not None
    ]
    return pandas.concat(curves, axis=1) if curves else pandas.DataFrame()


def _mean_of_equals(tables: Sequence[pandas.DataFrame]) -> pandas.Series | None:
    """The mean of several methods' curves where they differ by less than a twentieth of what they run through."""
    means = [table.mean(axis=1) for table in tables if len(table.columns)]
    if len(means) < 2 or len({len(mean) for mean in means}) > 1:
        return None
    together = pandas.concat(means, axis=1)
    apart = (together.max(axis=1) - together.min(axis=1)).max()
    reach = float(together.to_numpy().max() - together.to_numpy().min())
    return together.mean(axis=1) if 0 < apart < 0.05 * reach else None


def _seed_band(axes: Axes, table: pandas.DataFrame, look: dict[str, Any]) -> None:
    if not len(table.columns):
        return
    # Scores that are measured every few epochs are joined.
    table = table.dropna(how="all")
    mean = table.mean(axis=1)
    axes.plot(
        mean.index,
        mean,
        color=look["color"],
        linestyle=look["linestyle"],
        marker=look["marker"],
        markersize=2.8,
        markevery=max(1, len(mean) // 8),
        linewidth=1.2,
        clip_on=False,
    )
    if len(table.columns) > 1:
        std = table.std(axis=1)
        axes.fill_between(mean.index, mean - std, mean + std, color=look["color"], alpha=0.15, linewidth=0)


def _scatter(
    axes: Axes, rows: Sequence[Row], looks: Sequence[dict[str, Any]], methods: Sequence[str]
) -> None:
    """Score over cost; over the methods' names where costs are equal."""
    points = [
        (row.cost_percent, row.metric.scale * row.score_mean, row.metric.scale * (row.score_std or 0.0), look)
        for row, look in zip(rows, looks, strict=True)
        if row.cost_percent is not None and row.score_mean is not None
    ]
    if not points:
        return
    names = [
        method
        for row, method in zip(rows, methods, strict=True)
        if row.cost_percent is not None and row.score_mean is not None
    ]
    costs = [cost for cost, *_ in points]
    equal = len(points) > 1 and max(costs) - min(costs) < _EQUAL_COST
    if equal:
        points = [(index, *rest) for index, (_, *rest) in enumerate(points)]
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
    """Let the axis of scores span so much that the scatter of seeds does not look like a result.

    The scatter is the methods' median one: a method of which one seed collapsed leaves the others apart.
    """
    metric = rows[0].metric
    known = [metric.scale * row.score_std for row in rows if row.score_std is not None]
    deviation = statistics.median(known) if known else _USUAL_DEVIATION if metric.unit == "%" else 0.0
    low, high = axes.get_ylim()
    missing = _LEAST_DEVIATIONS * deviation - (high - low)
    if missing > 0:
        axes.set_ylim(low - missing / 2, high + missing / 2)

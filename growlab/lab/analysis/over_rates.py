"""Loss and score over the learning rate, as in Figure 14 of Yuan et al. 2023."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

import numpy as np
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from growlab.base.errors import UserError
from growlab.lab.analysis import style
from growlab.lab.analysis.results import Run
from growlab.lab.analysis.tables import Row, one_task, summarise, told_apart

_OVERRIDE = "optimizer.lr="
# Losses further apart than by this factor, as of runs that all but diverged, are drawn on a logarithmic axis.
_WIDE = 6.0


@dataclass(frozen=True)
class Curve:
    """One method over learning rates.

    Attributes:
        name: of the method, without its rate.
        rows: (learning rate, runs at it), by rising rate.
    """

    name: str
    rows: tuple[tuple[float, Row], ...]


def learning_rates(runs: Sequence[Run]) -> Figure:
    """Training loss of the last epoch and test score over `optimizer.lr`: a curve for each method.

    Means over seeds, bars one sample standard deviation. A rate whose runs have left no finite value is left out.

    Raises:
        UserError: the runs are of several networks, data sets or metrics, or all of one rate.
    """
    rows = summarise(runs)
    one_task(rows, "a figure over learning rates")
    curves = over_rates(rows)
    rates = sorted({rate for curve in curves for rate, _ in curve.rows})
    if len(rates) == 1:
        raise UserError(
            f"all runs have optimizer.lr={rates[0]:g}: name runs of several rates, or draw compare."
        )
    looks = style.looks([curve.rows[0][1].group.method for curve in curves])
    names = [f"{style.symbols(style.shown(curve.name))} (n={_seeds(curve)})" for curve in curves]
    metric = rows[0].metric
    with style.styled():
        columns = 1 if max(map(len, names)) > 45 else 2
        figure = style.new_figure(7.2, 2.9 + 0.16 * -(-len(names) // columns))
        loss_axes, score_axes = figure.subplots(1, 2)
        losses: list[float] = []
        for curve, look in zip(curves, looks, strict=True):
            last = [(rate, _last_losses(row)) for rate, row in curve.rows]
            losses += [float(value) for _, values in last for value in values]
            _draw(loss_axes, last, look)
            scores = [(rate, _scores(row)) for rate, row in curve.rows]
            _draw(score_axes, [(rate, metric.scale * values) for rate, values in scores], look)
        loss_axes.set_ylabel("training loss of the last epoch")
        score_axes.set_ylabel(metric.axis)
        if losses and max(losses) > _WIDE * min(losses):
            style.log_axis(loss_axes)
        for axes in (loss_axes, score_axes):
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(FixedLocator(rates))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:g}"))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xlabel("learning rate")
        handles = [Line2D([], [], **look, markersize=4.5) for look in looks]
        style.legend_below(figure, handles, names, columns, note=_note(rows))
    return figure


def over_rates(rows: Sequence[Row]) -> list[Curve]:
    """Join the rows that differ by their learning rate only.

    Args:
        rows: rows of one network and data set, from `summarise`.

    Raises:
        UserError: a run tells no rate.
    """
    plain = [replace(row, group=replace(row.group, overrides=_without_rate(row))) for row in rows]
    joined: dict[str, list[tuple[float, Row]]] = defaultdict(list)
    for name, row in zip(told_apart(plain), plain, strict=True):
        joined[name].append((_rate(row.runs[0]), row))
    return [Curve(name, tuple(sorted(members, key=lambda one: one[0]))) for name, members in joined.items()]


def _without_rate(row: Row) -> tuple[str, ...]:
    return tuple(override for override in row.group.overrides if not override.startswith(_OVERRIDE))


def _rate(run: Run) -> float:
    path = run.path / "config.yaml"
    try:
        return float(yaml.safe_load(path.read_text(encoding="utf-8"))["optimizer"]["lr"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} tells no optimizer.lr; restore it or leave out this run.") from error


def _last_losses(row: Row) -> np.ndarray:
    values = [run.results.get("train_loss") for run in row.runs]
    return _finite(values)


def _scores(row: Row) -> np.ndarray:
    return _finite([run.results.get(f"test_{row.metric.key}") for run in row.runs])


def _finite(values: Sequence[float | None]) -> np.ndarray:
    known = np.array([value for value in values if value is not None], dtype=float)
    return known[np.isfinite(known)]


def _draw(axes: Axes, values: Sequence[tuple[float, np.ndarray]], look: dict[str, Any]) -> None:
    points = [
        (rate, fmean(of_seeds), stdev(of_seeds) if len(of_seeds) > 1 else 0.0, look)
        for rate, of_seeds in values
        if len(of_seeds)
    ]
    if points:
        x, y, *_ = zip(*points, strict=True)
        axes.plot(x, y, **{**look, "marker": ""}, linewidth=1.1)
        style.mark_points(axes, points, size_points=5.0)


def _seeds(curve: Curve) -> str:
    low, high = (bound(row.n for _, row in curve.rows) for bound in (min, max))
    return str(low) if low == high else f"{low}-{high}"


def _note(rows: Sequence[Row]) -> str:
    if any(row.n > 1 for row in rows):
        return "points: means over n seeds, bars: one sample standard deviation"
    return "one seed each: no interval is known"

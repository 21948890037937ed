"""Accuracy of runs that move from one width to another, sorted by where they come from or go to."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from matplotlib.figure import Figure

from growlab.analysis import style
from growlab.analysis.results import Run
from growlab.analysis.width_paths import held_out_name, path_of
from growlab.errors import UserError

CHANGE = "width-change"
"""gid of the bars that mark the epochs in which a line's width changes."""


def width_changes(runs: Sequence[Run], by: Literal["start", "end"]) -> Figure:
    """Held-out accuracy over epochs, a panel a width, mean and standard deviation over equal runs (seeds).

    A panel holds the runs that start at (or end with) its width, a line for each width at the other end, and in
    black the runs of that width that do not grow. The bar of a line's colour at the foot spans the epochs in which its
    width changes. The panels of Bird, "On De-Individuated Neurons", Figures 3 and 5 ("start") and 4 ("end").

    Args:
        runs: finished runs of one network and data set.
        by: the end that the panels are sorted by.

    Raises:
        UserError: there is no run that grows, or one has no width groups or was not validated.
    """
    lines = _lines(runs)
    here, there = (0, 1) if by == "start" else (1, 0)
    grown = [line for line in lines if not line.is_fixed_size]
    if not grown:
        raise UserError("width_changes needs runs of a growth method, and there is none.")
    widths = sorted({line.ends[here] for line in grown})
    others = sorted({line.ends[there] for line in grown})
    colours = dict(zip(others, style.PALETTE * len(others), strict=False))
    columns = min(2, len(widths))
    rows = math.ceil(len(widths) / columns)
    with style.styled():
        figure = style.new_figure(3.6 * columns, 0.6 + 2.1 * rows)
        panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
        for axes in panels[len(widths) :]:
            axes.set_visible(False)
        handles = {}
        for index, (axes, width) in enumerate(zip(panels, widths, strict=False)):
            shown = [line for line in lines if line.ends[here] == width]
            for rank, line in enumerate(line for line in shown if line.events):
                # Below the curves, one bar above the other.
                height = 0.012 + 0.022 * rank
                axes.plot(
                    [min(line.events), max(line.events) + 1],
                    [height, height],
                    color=colours[line.ends[there]],
                    linewidth=2.2,
                    solid_capstyle="butt",
                    transform=axes.get_xaxis_transform(),
                    gid=CHANGE,
                )
            for line in shown:
                if line.is_fixed_size:
                    rank, name, colour = math.inf, line.name, style.FIXED_SIZE[0]
                else:
                    rank = line.ends[there]
                    name, colour = f"{'to' if by == 'start' else 'from'} {rank}", colours[rank]
                epochs = np.arange(1, len(line.mean) + 1)
                # Curves that lie on one another show through each other's gaps.
                dashes = "-" if line.is_fixed_size else style.DASHES[others.index(rank) % len(style.DASHES)]
                (handles[rank, name],) = axes.plot(
                    epochs, line.mean, color=colour, linestyle=dashes, linewidth=1.1
                )
                low, high = line.mean - line.std, line.mean + line.std
                axes.fill_between(epochs, low, high, color=colour, alpha=0.15, linewidth=0)
            axes.set_title(f"{'from' if by == 'start' else 'to'} width {width}")
            style.epoch_axis(axes, max(len(line.mean) for line in lines))
            axes.set_xlabel("epoch" if index + columns >= len(widths) else "")
            axes.set_ylabel(f"{held_out_name(runs)} (%)" if index % columns == 0 else "")
        keys = sorted(handles)
        style.legend_below(figure, [handles[key] for key in keys], [name for _, name in keys], len(keys))
    return figure


@dataclass(frozen=True)
class _Line:
    is_fixed_size: bool
    ends: tuple[int, int]
    name: str
    mean: np.ndarray
    std: np.ndarray
    events: frozenset[int]  # epochs at whose beginning the width of any of them changed


def _lines(runs: Sequence[Run]) -> list[_Line]:
    """Curves in percent over equal runs."""
    curves: dict[tuple[bool, int, int], list[np.ndarray]] = defaultdict(list)
    shared = [set(run.group.overrides) for run in runs if run.group.is_fixed_size]
    told = set.intersection(*shared) if shared else set()
    told -= {override for run in runs if not run.group.is_fixed_size for override in run.group.overrides}
    name = ", ".join(["without growth", *sorted(override.partition("=")[2] for override in told)])
    events: dict[tuple[bool, int, int], set[int]] = defaultdict(set)
    for run in runs:
        path, accuracy = path_of(run), run.held_out("accuracy")
        if accuracy is None:
            raise UserError(f"{run.path} has no held-out accuracy over epochs to draw.")
        key = (run.group.is_fixed_size, path[0], path[-1])
        curves[key].append(100 * accuracy)
        events[key] |= {epoch for epoch in range(1, len(path)) if path[epoch] != path[epoch - 1]}
    lines = []
    for key, values in sorted(curves.items(), key=lambda item: item[0]):
        is_fixed, first, last = key
        table = np.stack([value[: min(map(len, values))] for value in values])
        std = table.std(0, ddof=1) if len(table) > 1 else np.zeros(table.shape[1])
        lines.append(_Line(is_fixed, (first, last), name, table.mean(0), std, frozenset(events[key])))
    return lines

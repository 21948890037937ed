"""Accuracy of runs that move from one width to another, sorted by where they come from or go to."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from growlab.base.errors import UserError
from growlab.lab.analysis import style
from growlab.lab.analysis.results import Run
from growlab.lab.analysis.width_paths import held_out_name, path_of

CHANGE = "width-change"
"""gid of the bars that mark the epochs in which a line's width changes."""


def width_changes(runs: Sequence[Run], by: Literal["start", "end"]) -> Figure:
    """Held-out accuracy over epochs, a panel a width, means over equal runs (seeds).

    A panel holds the runs that start at (or end with) its width, a line for each width at the other end, and in
    black the runs of that width that do not grow. Lines that are one up to some epoch are drawn once up to there, in
    grey. Behind the last epoch stands each line's mean with one sample standard deviation; bands of noise would cover
    each other. The bar of a line's colour at the foot spans the epochs in which its width changes. The panels of
    Bird, "On De-Individuated Neurons", Figures 3 and 5 ("start") and 4 ("end").

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
        last = max(len(line.mean) for line in lines)
        handles: dict[tuple[float, str], Line2D] = {}
        for index, (axes, width) in enumerate(zip(panels, widths, strict=False)):
            shown = [line for line in lines if line.ends[here] == width]
            _mark_changes(axes, shown, [colours.get(line.ends[there], "") for line in shown])
            moving = [line for line in shown if not line.is_fixed_size]
            shared = _shared(moving)
            if shared:
                (handles[-1, "not changed yet"],) = axes.plot(
                    np.arange(1, shared + 1), moving[0].mean[:shared], color="0.45", linewidth=1.1
                )
            for line in shown:
                if line.is_fixed_size:
                    handles[math.inf, line.name] = _fixed(axes, line)
                    continue
                rank = line.ends[there]
                # The grey part's last point joins them.
                epochs = np.arange(1, len(line.mean) + 1)[max(0, shared - 1) :]
                # Curves that lie on one another show through each other's gaps.
                (handles[rank, f"{'to' if by == 'start' else 'from'} {rank}"],) = axes.plot(
                    epochs,
                    line.mean[max(0, shared - 1) :],
                    color=colours[rank],
                    linestyle=style.DASHES[others.index(rank) % len(style.DASHES)],
                    linewidth=1.1,
                )
                _mark_end(axes, line, last * (1.025 + 0.025 * others.index(rank)), colours[rank])
            axes.set_title(f"{'from' if by == 'start' else 'to'} width {width}")
            style.epoch_axis(axes, last)
            axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= last])
            axes.set_xlim(right=last * (1.025 + 0.025 * len(others)))
            # What stands behind the last epoch has no place on the axis.
            axes.spines["bottom"].set_bounds(0, last)
            axes.set_xlabel("epoch" if index + columns >= len(widths) else "")
            axes.set_ylabel(f"{held_out_name(runs)} (%)" if index % columns == 0 else "")
        keys = sorted(handles)
        style.legend_below(
            figure, [handles[key] for key in keys], [name for _, name in keys], len(keys), note=_note(lines)
        )
    return figure


@dataclass(frozen=True)
class _Line:
    is_fixed_size: bool
    ends: tuple[int, int]
    name: str
    mean: np.ndarray
    std: np.ndarray
    events: frozenset[int]  # epochs at whose beginning the width of any of them changed
    n: int


def _note(lines: Sequence[_Line]) -> str:
    """Note on the number of runs, bars and bands."""
    counts = sorted({line.n for line in lines})
    told = "one run each: no interval is known"
    if counts != [1]:
        n = "-".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        told = f"lines: means over n = {n} seeds; points behind the last epoch: its mean; "
        told += "their bars: one sample standard deviation"
        if any(line.is_fixed_size for line in lines):
            told = told.replace("their bars", "their bars and bands")
    return f"{told}; bars at the foot: epochs in which the width changes"


def _mark_changes(axes: Axes, lines: Sequence[_Line], colours: Sequence[str]) -> None:
    """A bar for each line, below the curves, one above the other."""
    changing = [(line, colour) for line, colour in zip(lines, colours, strict=True) if line.events]
    for rank, (line, colour) in enumerate(changing):
        height = 0.012 + 0.022 * rank
        axes.plot(
            [min(line.events), max(line.events) + 1],
            [height, height],
            color=colour,
            linewidth=2.2,
            solid_capstyle="butt",
            transform=axes.get_xaxis_transform(),
            gid=CHANGE,
        )


def _shared(lines: Sequence[_Line]) -> int:
    """Number of epochs up to which several lines are one."""
    if len(lines) < 2:
        return 0
    length = min(len(line.mean) for line in lines)
    same = np.all([line.mean[:length] == lines[0].mean[:length] for line in lines], axis=0)
    return length if same.all() else int(np.argmin(same))


def _fixed(axes: Axes, line: _Line) -> Line2D:
    """The line of runs that do not grow, with a band: no other lies on it."""
    epochs, colour = np.arange(1, len(line.mean) + 1), style.FIXED_SIZE[0]
    (drawn,) = axes.plot(epochs, line.mean, color=colour, linewidth=1.1)
    axes.fill_between(
        epochs, line.mean - line.std, line.mean + line.std, color=colour, alpha=0.15, linewidth=0
    )
    return drawn


def _mark_end(axes: Axes, line: _Line, place: float, colour: str) -> None:
    """A line's last mean with its deviation over seeds, behind the last epoch; nothing for a single run."""
    if line.std[-1] > 0:
        look = {"color": colour, "marker": "o", "markersize": 2.5, "capsize": 1.5, "elinewidth": 0.9}
        axes.errorbar(place, line.mean[-1], yerr=line.std[-1], **look)


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
        lines.append(
            _Line(is_fixed, (first, last), name, table.mean(0), std, frozenset(events[key]), len(table))
        )
    return lines

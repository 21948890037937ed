"""Widths over epochs: lines, map, silhouettes and movie of one run; paths and effects of width over several runs."""

import itertools
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from PIL import Image

from growlab.base.errors import UserError
from growlab.base.files import write_atomically
from growlab.lab.analysis import style
from growlab.lab.analysis.results import Run, metric_of

# Up to this width the axis is linear, with a tick per neuron.
_FEW = 20
# With more groups than this, neighbours that grow equally share a row.
_MOST_ROWS = 40
_FRAMES, _FADE = 60, 5  # frames in total; frames in which new channels fade to the colour of old ones
_FRAME_MS, _END_MS = 100, 2500
_AGES = LinearSegmentedColormap.from_list("ages", [style.PALETTE[1], style.PALETTE[0]])
TASK = "task"
"""gid of the lines where the set of classes changes."""
CHANGE = "width-change"
"""gid of the bars over the epochs in which a line's width changes."""


def relative_widths(run: Run) -> list[float]:
    """Return the channels in all width groups relative to full width, one number per stage."""
    groups = [g for g in run.growth["groups"].values() if g.get("widths") and g.get("full_width")]
    full = sum(group["full_width"] for group in groups)
    return [sum(widths) / full for widths in zip(*(group["widths"] for group in groups), strict=False)]


@style.styled()
def widths_over_time(run: Run) -> Figure:
    """Draw the width of every group over epochs; groups that grow equally share a line."""
    equal: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, group in run.groups.items():
        equal[tuple(group["widths"])].append(name)
    num_epochs = float(run.metrics["epoch"].iloc[-1]) + 1
    paths = sorted(equal, reverse=True, key=lambda widths: (widths[-1], widths))
    figure = style.new_figure(5.2, 2.9)
    axes = figure.subplots()
    style.mark_growth(axes, run.growth_epochs)
    edges, numbers = [0.0, *run.growth_epochs, num_epochs], []
    number: dict[str, Any] = {
        "xytext": (0, 1.5),
        "textcoords": "offset points",
        "ha": "center",
        "va": "bottom",
        "fontsize": 7,
    }
    for i, widths in enumerate(paths):
        colour = style.PALETTE[i % len(style.PALETTE)]
        steps = list(widths)[: len(edges) - 1]
        x = edges[: len(steps) + 1]
        # Where lines coincide, the lower one is wider and shows as a rim.
        hidden = sum(any(a == b for a, b in zip(widths, other, strict=False)) for other in paths[i + 1 :])
        line: dict[str, Any] = {"color": colour, "linestyle": style.DASHES[i // len(style.PALETTE) % len(style.DASHES)]}
        width = 1.4 + min(1.6 * hidden, 3.2)
        axes.plot(x, [*steps, steps[-1]], drawstyle="steps-post", **line, linewidth=width)
        for stage, (left, right, size) in enumerate(zip(x, x[1:], steps, strict=False) if len(paths) < 5 else ()):
            # Otherwise the number would overlap that line.
            if not any(size < other[stage] < 1.3 * size for other in paths):
                place = ((left + right) / 2, size)
                numbers.append(axes.annotate(str(size), place, color=colour, **number))
    style.epoch_axis(axes, num_epochs)
    axes.set_ylabel("channels")
    _binary_axis(axes, [width for widths in paths for width in widths])
    names = {p: equal[p][0] if len(equal[p]) == 1 else f"{len(equal[p])} groups" for p in paths}
    _end_labels(axes, [(p[-1], f"{p[-1]}: {names[p]}") for p in paths])
    style.thin_out(figure, numbers)
    return figure


def _binary_axis(axes: Axes, widths: Sequence[int]) -> None:
    """Make the y axis logarithmic with ticks at powers of two, so that equal growth factors are equal distances."""
    least, most = min(widths), max(widths)
    axes.set_yscale("log", base=2)
    axes.set_ylim(least / 1.25, most * 1.3)
    ticks = [2**k for k in range(most.bit_length() + 1) if least / 1.25 <= 2**k <= most * 1.3]
    style.plain_ticks(axes.yaxis, FixedLocator(ticks or [least]))
    axes.yaxis.set_minor_locator(NullLocator())


def _end_labels(axes: Axes, ends: Sequence[tuple[float, str]]) -> None:
    """Label the lines at their right ends, without overlap."""
    low, high = (math.log2(limit) for limit in axes.get_ylim())
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    line_height = 8.5 / 72 * figure.dpi / axes.get_window_extent().height * (high - low)
    room = int((high - low) / line_height)
    # If not all labels fit, keep the widest, the narrowest and evenly spaced ones between.
    kept = sorted({round(i) for i in np.linspace(0, len(ends) - 1, min(len(ends), max(room, 2)))})
    places = style.spread([math.log2(ends[i][0]) for i in kept], line_height)
    # Shift all labels back if some were pushed past the top or the bottom.
    shift = min(0.0, high - line_height / 2 - max(places)) or max(0.0, low + line_height / 2 - min(places))
    places = [place + shift for place in places]
    shifts = (place - math.log2(ends[i][0]) for i, place in zip(kept, places, strict=True))
    moved = any(abs(shift) > line_height / 3 for shift in shifts)
    leader: dict[str, Any] = {"arrowstyle": "-", "linewidth": 0.5, "relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 0}
    transform = axes.get_yaxis_transform()
    for i, place in zip(kept, places, strict=True):
        (width, text), colour = ends[i], style.PALETTE[i % len(style.PALETTE)]
        look: dict[str, Any] = {
            "arrowprops": {**leader, "color": colour} if moved else None,
            "fontsize": 7,
            "color": colour,
        }
        at: dict[str, Any] = {
            "xytext": (1.06 if moved else 1.015, 2**place),
            "xycoords": transform,
            "textcoords": transform,
        }
        axes.annotate(text, (1, width), **at, **look, va="center")


@style.styled()
def network_map(run: Run) -> Figure:
    """Draw the width of every group (row) at every stage (column), shaded by its share of full width.

    With more than forty groups, neighbours that grow equally share a row.
    """
    rows, lengths = rows_of_groups(run), _stage_epochs(run)
    num_stages = len(lengths)
    name_in = 0.075 * max(len(name) for name, _, _ in rows)
    figure = style.new_figure(name_in + 0.42 * num_stages + 0.75, 0.17 * len(rows) + 0.75)
    axes = figure.subplots()
    shares = np.array([[width / full for width in widths] for _, widths, full in rows])
    # From almost white to dark blue: dark means wide, in grey print too.
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1.15, aspect="auto")
    for row, (_, widths, _) in enumerate(rows):
        for stage, width in enumerate(widths):
            look: dict[str, Any] = {"fontsize": 6.5, "color": "white" if shares[row, stage] > 0.6 else "black"}
            axes.text(stage, row, str(width), ha="center", va="center", **look)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows], fontsize=7)
    heads = [f"{i}" + (f"\n{n:g} ep." if n else "") for i, n in enumerate(lengths)]
    axes.set_xticks(range(num_stages), heads, fontsize=7)
    axes.xaxis.tick_top()
    axes.set_xlabel("stage, its epochs; cells: channels, darker = nearer to full width", fontsize=7)
    axes.tick_params(length=0)
    axes.set_xticks(np.arange(num_stages + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(rows) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1)
    axes.tick_params(which="minor", length=0)
    axes.spines[:].set_visible(False)
    return figure


@style.styled()
def silhouettes(run: Run) -> Figure:
    """Draw the network's shape at each stage: one bar per width group, input on top, new channels at the ends."""
    rows, lengths = rows_of_groups(run), _stage_epochs(run)
    num_stages, num_rows, widest = len(lengths), len(rows), max(full for _, _, full in rows)
    apart = widest + 0.12 * widest
    figure = style.new_figure(min(7.2, 1.0 + 1.15 * num_stages), 0.8 + 0.09 * min(max(num_rows, 10), 28))
    axes = figure.subplots()
    for stage in range(num_stages):
        draw_silhouette(axes, rows, stage, centre=stage * apart)
    axes.set(ylim=(num_rows - 0.4, -0.6), xlim=(-widest / 2, (num_stages - 1) * apart + widest / 2))
    heads = [f"stage {i}" + (f"\n{n:g} epoch{'s' * (n != 1)}" if n else "") for i, n in enumerate(lengths)]
    axes.set_xticks([stage * apart for stage in range(num_stages)], heads, fontsize=7 if num_stages < 7 else 6)
    axes.set_yticks([0, num_rows - 1], ["input", "output"], fontsize=7)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    names = (("0.93", "full width"), (style.PALETTE[0], "kept"), (style.PALETTE[1], "new"))
    handles = [Patch(color=colour, label=name) for colour, name in names]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, handlelength=1.2, frameon=False)
    return figure


def draw_silhouette(
    axes: Axes,
    rows: Sequence[tuple[str, tuple[int, ...], int]],
    stage: int,
    centre: float = 0.0,
    new: Any = style.PALETTE[1],
) -> None:
    """Draw a bar per row of `rows_of_groups`: full width in grey, kept channels, and new ones in colour `new`."""
    for row, (_, widths, full) in enumerate(rows):
        bars = ((full, "0.93"), (widths[stage], new), (widths[max(stage - 1, 0)], style.PALETTE[0]))
        for width, colour in bars:
            axes.barh(row, width, left=centre - width / 2, color=colour, height=0.86, linewidth=0)


def rows_of_groups(run: Run) -> list[tuple[str, tuple[int, ...], int]]:
    """Return (name, width at each stage, full width) of each group, or of each run of equal neighbours if many."""
    rows = [(name, tuple(group["widths"]), group["full_width"]) for name, group in run.groups.items()]
    if len(rows) <= _MOST_ROWS:
        return rows
    merged = []
    for (widths, full), part in itertools.groupby(rows, key=lambda row: row[1:]):
        first, *others = (name for name, *_ in part)
        merged.append((f"{first} ... {others[-1]} ({1 + len(others)})" if others else first, widths, full))
    return merged


def _stage_epochs(run: Run) -> list[float]:
    """Return the epochs of each stage, from the growth events; zeros if the run has not had all of them."""
    num_stages = len(next(iter(run.groups.values()))["widths"])
    try:
        edges = [0.0, *run.growth_epochs, float(run.metrics["epoch"].iloc[-1]) + 1]
    except UserError:
        edges = []
    if len(edges) != num_stages + 1:
        return [0.0] * num_stages
    return [right - left for left, right in itertools.pairwise(edges)]


@style.styled()
def width_paths(runs: Sequence[Run]) -> Figure:
    """Draw the channels of all groups over epochs (above) and held-out accuracy (below).

    Runs with the same initial width share a colour, which shows if layers that choose their widths converge.
    """
    paths = [run.width_path for run in runs]
    starts = sorted({path[0] for path in paths})
    colours = dict(zip(starts, style.PALETTE * len(starts), strict=False))
    figure = style.new_figure(5.2, 3.6)
    above, below = figure.subplots(2, sharex=True, height_ratios=[3, 2])
    for run, path in zip(runs, paths, strict=True):
        look = {"color": colours[path[0]], "alpha": 0.8}
        above.plot(range(len(path) + 1), [*path, path[-1]], drawstyle="steps-post", linewidth=1.2, **look)
        if (accuracy := run.held_out("accuracy")) is not None:
            below.plot(range(1, len(accuracy) + 1), 100 * accuracy, linewidth=1.0, **look)
    for start, colour in colours.items():
        ends = sorted({path[-1] for path in paths if path[0] == start})
        last = str(ends[0]) if len(ends) == 1 else f"{ends[0]}-{ends[-1]}"
        n = sum(path[0] == start for path in paths)
        above.plot([], [], color=colour, label=f"from {start} to {last} (n={n})")
    _width_axis(above, min(map(min, paths)), max(map(max, paths)))
    layers = sorted({len(run.growth["groups"]) for run in runs})
    above.set_ylabel("width" if layers == [1] else f"width, sum of {'/'.join(map(str, layers))} layers")
    above.legend(frameon=False, fontsize=8, title="each line is one run", title_fontsize=7)
    below.set_ylabel(f"{_held_out_name(runs)} (%)")
    place = {"xytext": (2, 2), "xycoords": above.get_xaxis_transform(), "textcoords": "offset points"}
    for epoch, classes in _tasks(runs):
        for axes in (above, below):
            axes.axvline(epoch, color="0.6", linewidth=0.8, linestyle=(0, (3, 2)), zorder=0.5, gid=TASK)
        above.annotate(classes, (epoch, 1.0), **place, fontsize=7, color="0.3")
    style.epoch_axis(below, max(len(path) for path in paths))
    return figure


def _held_out_name(runs: Sequence[Run]) -> str:
    """Return "test accuracy" if all runs monitored the test set, else "validation accuracy"."""
    return f"{'test' if all(run.curve('val_accuracy') is None for run in runs) else 'validation'} accuracy"


def _width_axis(axes: Axes, least: int, most: int) -> None:
    """Put a tick at every width if they are few, else make the axis logarithmic with powers of two."""
    if most <= _FEW:
        axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.set_ylim(max(least - 1, 0), most + 1)
        return
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(NullLocator())
    ticks = [2**power for power in range(most.bit_length() + 1) if least <= 2**power <= most]
    axes.set_yticks(ticks or [least, most])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))


def _tasks(runs: Sequence[Run]) -> list[tuple[int, str]]:
    """Return the epochs at which the classes change and names of the new classes, if all runs agree."""
    schedule = runs[0].class_schedule
    if any(run.class_schedule != schedule for run in runs):
        return []
    names = {
        epoch: f"{len(classes)} classes" if len(classes) > 4 else f"classes {', '.join(map(str, classes))}"
        for epoch, classes in schedule.items()
    }
    return [(int(epoch), name) for epoch, name in sorted(names.items())]


@dataclass(frozen=True)
class _Line:
    """Mean curve of equal runs; `events` are the epochs at whose start the width of any of them changed."""

    is_fixed_size: bool
    ends: tuple[int, int]
    name: str
    mean: np.ndarray
    std: np.ndarray
    events: frozenset[int]
    n: int


@style.styled()
def width_changes(runs: Sequence[Run], by: Literal["start", "end"]) -> Figure:
    """Draw held-out accuracy over epochs, one panel per width, as means over seeds.

    A panel shows the runs that start at (or end with) its width: a line for each width at the other end, and in black
    the runs of that width that do not grow. Lines that coincide up to some epoch are grey until then. Each line's last
    mean, with one sample standard deviation, is drawn to the right of the last epoch, as bands would overlap. Bars
    at the bottom span the epochs in which the width of the line of that colour changes. These are the panels of Bird,
    "On De-Individuated Neurons", Figures 3 and 5 ("start") and 4 ("end").
    """
    lines = _lines(runs)
    here, there = (0, 1) if by == "start" else (1, 0)
    grown = [line for line in lines if not line.is_fixed_size]
    if not grown:
        raise UserError("width_changes needs a run of a growth method.")
    widths, others = (sorted({line.ends[end] for line in grown}) for end in (here, there))
    colours = dict(zip(others, style.PALETTE * len(others), strict=False))
    columns = min(2, len(widths))
    rows = math.ceil(len(widths) / columns)
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
            common = (np.arange(1, shared + 1), moving[0].mean[:shared])
            (handles[-1, "not changed yet"],) = axes.plot(*common, color="0.45", linewidth=1.1)
        for line in shown:
            if line.is_fixed_size:
                handles[math.inf, line.name] = _fixed(axes, line)
                continue
            end = line.ends[there]
            rank, colour = others.index(end), colours[end]
            # Start at the grey part's last point; dashes let coinciding curves show through.
            first = max(0, shared - 1)
            x, dashes = np.arange(1, len(line.mean) + 1)[first:], style.DASHES[rank % len(style.DASHES)]
            drawn = axes.plot(x, line.mean[first:], color=colour, linestyle=dashes, linewidth=1.1)
            (handles[end, f"{'to' if by == 'start' else 'from'} {end}"],) = drawn
            if line.std[-1] > 0:
                mark = {"color": colour, "marker": "o", "markersize": 2.5, "capsize": 1.5, "elinewidth": 0.9}
                axes.errorbar(last * (1.025 + 0.025 * rank), line.mean[-1], yerr=line.std[-1], **mark)
        axes.set_title(f"{'from' if by == 'start' else 'to'} width {width}")
        style.epoch_axis(axes, last)
        axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= last])
        axes.set_xlim(right=last * (1.025 + 0.025 * len(others)))
        # Points to the right of the last epoch are not on the axis.
        axes.spines["bottom"].set_bounds(0, last)
        axes.set(xlabel="epoch" if index + columns >= len(widths) else "")
        axes.set(ylabel=f"{_held_out_name(runs)} (%)" if index % columns == 0 else "")
    keys = sorted(handles)
    names = [name for _, name in keys]
    style.legend_below(figure, [handles[key] for key in keys], names, len(keys), note=_note(lines))
    return figure


def _note(lines: Sequence[_Line]) -> str:
    counts = sorted({line.n for line in lines})
    note = "one run each: no interval is known"
    if counts != [1]:
        n = "-".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        bars = "bars and bands" if any(line.is_fixed_size for line in lines) else "bars"
        note = f"lines: means over n = {n} seeds; points behind the last epoch: its mean; "
        note += f"their {bars}: one sample standard deviation"
    return f"{note}; bars at the foot: epochs in which the width changes"


def _mark_changes(axes: Axes, lines: Sequence[_Line], colours: Sequence[str]) -> None:
    """Draw a bar for each line at the bottom, one above the other."""
    changing = [(line, colour) for line, colour in zip(lines, colours, strict=True) if line.events]
    look: dict[str, Any] = {"linewidth": 2.2, "solid_capstyle": "butt", "gid": CHANGE}
    for rank, (line, colour) in enumerate(changing):
        x, y = [min(line.events), max(line.events) + 1], 0.012 + 0.022 * rank
        axes.plot(x, [y, y], color=colour, transform=axes.get_xaxis_transform(), **look)


def _shared(lines: Sequence[_Line]) -> int:
    """Return the number of first epochs over which several lines coincide."""
    if len(lines) < 2:
        return 0
    length = min(len(line.mean) for line in lines)
    same = np.all([line.mean[:length] == lines[0].mean[:length] for line in lines], axis=0)
    return length if same.all() else int(np.argmin(same))


def _fixed(axes: Axes, line: _Line) -> Line2D:
    """Draw the line of runs that do not grow, with a band."""
    epochs, colour = np.arange(1, len(line.mean) + 1), style.FIXED_SIZE[0]
    (drawn,) = axes.plot(epochs, line.mean, color=colour, linewidth=1.1)
    band = (line.mean - line.std, line.mean + line.std)
    axes.fill_between(epochs, *band, color=colour, alpha=0.15, linewidth=0)
    return drawn


def _lines(runs: Sequence[Run]) -> list[_Line]:
    """Average the curves, in percent, over equal runs."""
    curves: dict[tuple[bool, int, int], list[np.ndarray]] = defaultdict(list)
    events: dict[tuple[bool, int, int], set[int]] = defaultdict(set)
    shared = [set(run.group.overrides) for run in runs if run.group.is_fixed_size]
    only_fixed = set.intersection(*shared) if shared else set()
    only_fixed -= {override for run in runs if not run.group.is_fixed_size for override in run.group.overrides}
    name = ", ".join(["without growth", *sorted(override.partition("=")[2] for override in only_fixed)])
    for run in runs:
        path, accuracy = run.width_path, run.held_out("accuracy")
        if accuracy is None:
            raise UserError(f"{run.path} has no held-out accuracy over epochs to draw.")
        key = (run.group.is_fixed_size, path[0], path[-1])
        curves[key].append(100 * accuracy)
        events[key] |= {epoch for epoch in range(1, len(path)) if path[epoch] != path[epoch - 1]}
    lines = []
    for key in sorted(curves):
        table = np.stack([value[: min(map(len, curves[key]))] for value in curves[key]])
        std = table.std(0, ddof=1) if len(table) > 1 else np.zeros(table.shape[1])
        lines.append(_Line(key[0], key[1:], name, table.mean(0), std, frozenset(events[key]), len(table)))
    return lines


def save_movie(run: Run, path: str | os.PathLike[str]) -> Path:
    """Write a GIF of a run: its silhouette, with new channels in colour, next to its held-out metric over epochs."""
    if Path(path).suffix.lower() != ".gif":
        raise UserError(f"cannot write a movie to {path}: its name must end in .gif.")
    (first, *others), times = zip(*_frames(run), strict=True)
    options = {"save_all": True, "append_images": others, "duration": [*times[:-1], _END_MS], "loop": 0}
    write_atomically(path, lambda file: first.save(file, format="GIF", **options))
    return Path(path)


def _frames(run: Run) -> Iterator[tuple[Image.Image, int]]:
    """Yield (image, milliseconds)."""
    metric, epochs = metric_of([run.results]), run.metrics["epoch"].to_numpy() + 1.0
    curves = (run.curve(f"{split}_{metric.key}") for split in ("val", "test", "train"))
    values = next((metric.scale * curve for curve in curves if curve is not None), None)
    if values is None:
        raise UserError(f"a movie needs a run with a curve of its {metric.name}.")
    rows, events = rows_of_groups(run), np.asarray(run.growth_epochs)
    times = np.linspace(0, epochs[-1], _FRAMES)
    stages = np.searchsorted(events, times, side="right").tolist()
    known = np.isfinite(values)
    margin = 0.05 * np.ptp(values[known])
    born = [stages.index(stage) for stage in stages]
    fades = [min(frame - first, _FADE) / _FADE for frame, first in enumerate(born)]
    points = np.searchsorted(epochs, times, side="right").tolist()
    for (stage, fade, seen), equal in itertools.groupby(zip(stages, fades, points, strict=True)):
        with style.styled():
            # A layout engine would move the axes between frames.
            figure = Figure(figsize=(6.4, 2.6), layout="none")  # type: ignore[arg-type]
            figure.subplots_adjust(left=0.08, right=0.97, bottom=0.19, top=0.88, wspace=0.28)
            shape, curve = figure.subplots(1, 2, width_ratios=[2, 3])
            draw_silhouette(shape, rows, stage, new=_AGES(fade))
            shape.set_ylim(len(rows) - 0.4, -0.6)
            shape.set_yticks([0, len(rows) - 1], ["input", "output"])
            shape.set_xticks([])
            shape.tick_params(length=0)
            shape.spines[:].set_visible(False)
            shape.set_title(f"stage {stage}: {run.results['stages'][stage]['num_params']:,} parameters")
            style.mark_growth(curve, events[:stage].tolist())
            shown = known[:seen]
            curve.plot(epochs[:seen][shown], values[:seen][shown], marker="o", color=style.PALETTE[0], clip_on=False)
            curve.set(xlim=(0, epochs[-1]), ylim=(values[known].min() - margin, values[known].max() + margin))
            curve.set(xlabel="epoch", ylabel=f"{metric.name} ({metric.unit})" if metric.unit else metric.name)
            canvas = FigureCanvasAgg(figure)
            canvas.draw()
            picture = Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy())
        yield picture.quantize(64, dither=Image.Dither.NONE), _FRAME_MS * len(list(equal))

"""Widths of a run: over epochs, as a table by stage, and as the network's silhouette at each stage."""

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from growlab.base.errors import UserError
from growlab.lab.analysis import style
from growlab.lab.analysis.results import Run


def widths_over_time(run: Run) -> Figure:
    """Width of every group over epochs; groups that grow alike share a line.

    Raises:
        UserError: the run has no metrics or no width groups.
    """
    groups = run.growth["groups"]
    if not groups:
        raise UserError(f"{run.path} has no width groups in growth.json, so there are no widths to draw.")
    num_epochs = float(run.metrics["epoch"].iloc[-1]) + 1
    alike: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, group in groups.items():
        alike[tuple(group["widths"])].append(name)
    paths = sorted(alike, reverse=True, key=lambda widths: (widths[-1], widths))
    with style.styled():
        figure = style.new_figure(5.2, 2.9)
        axes = figure.subplots()
        style.mark_growth(axes, run.growth_epochs)
        edges = [0.0, *run.growth_epochs, num_epochs]
        numbers = []
        for i, widths in enumerate(paths):
            colour = style.PALETTE[i % len(style.PALETTE)]
            dashes = style.DASHES[i // len(style.PALETTE) % len(style.DASHES)]
            steps = list(widths)[: len(edges) - 1]
            x = edges[: len(steps) + 1]
            # Groups that part only later: the line below shows as a rim of the one drawn over it.
            hidden = sum(any(a == b for a, b in zip(widths, other, strict=False)) for other in paths[i + 1 :])
            axes.plot(
                x,
                [*steps, steps[-1]],
                drawstyle="steps-post",
                color=colour,
                linestyle=dashes,
                linewidth=1.4 + min(1.6 * hidden, 3.2),
            )
            if len(paths) > 4:
                continue
            for stage, (left, right, width) in enumerate(zip(x, x[1:], steps, strict=False)):
                if any(width < other[stage] < 1.3 * width for other in paths):
                    continue  # The number would stand on that line.
                numbers.append(
                    axes.annotate(
                        str(width),
                        ((left + right) / 2, width),
                        xytext=(0, 1.5),
                        textcoords="offset points",
                        ha="center",
                        va="bottom",
                        fontsize=7,
                        color=colour,
                    )
                )
        style.epoch_axis(axes, num_epochs)
        axes.set_ylabel("channels")
        _binary_axis(axes, [width for widths in paths for width in widths])
        named = {p: alike[p][0] if len(alike[p]) == 1 else f"{len(alike[p])} groups" for p in paths}
        _end_labels(axes, [(p[-1], f"{p[-1]}: {named[p]}") for p in paths])
        style.thin_out(figure, numbers)
    return figure


def _binary_axis(axes: Axes, widths: Sequence[int]) -> None:
    """A logarithmic axis with ticks at powers of two: equal growth looks equal at every width."""
    low, high = math.floor(math.log2(min(widths))), math.ceil(math.log2(max(widths)))
    axes.set_yscale("log", base=2)
    axes.set_ylim(min(widths) / 1.25, max(widths) * 1.3)
    axes.yaxis.set_major_locator(FixedLocator([2.0**k for k in range(low, high + 1)]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda width, _: f"{width:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())


def _end_labels(axes: Axes, ends: Sequence[tuple[float, str]]) -> None:
    """Names at the lines' right ends, moved apart where lines end close to each other."""
    low, high = (math.log2(limit) for limit in axes.get_ylim())
    figure = axes.get_figure()
    figure.draw_without_rendering()
    line_height = 8.5 / 72 * figure.dpi / axes.get_window_extent().height * (high - low)
    room = int((high - low) / line_height)
    # More lines than places: the widest and the narrowest keep their names, and what is between, evenly.
    kept = sorted({round(i) for i in np.linspace(0, len(ends) - 1, min(len(ends), max(room, 2)))})
    places = style.spread([math.log2(ends[i][0]) for i in kept], line_height)
    # Labels pushed past the top or the bottom come back in as one stack.
    shift = min(0.0, high - line_height / 2 - max(places)) or max(0.0, low + line_height / 2 - min(places))
    moved = any(
        abs(place + shift - math.log2(ends[i][0])) > line_height / 3
        for i, place in zip(kept, places, strict=True)
    )
    leader = {"arrowstyle": "-", "linewidth": 0.5, "relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 0}
    for i, place in zip(kept, places, strict=True):
        width, text = ends[i]
        colour = style.PALETTE[i % len(style.PALETTE)]
        axes.annotate(
            text,
            (1, width),
            xytext=(1.06 if moved else 1.015, 2 ** (place + shift)),
            xycoords=axes.get_yaxis_transform(),
            textcoords=axes.get_yaxis_transform(),
            arrowprops={**leader, "color": colour} if moved else None,
            fontsize=7,
            color=colour,
            va="center",
        )


def network_map(run: Run) -> Figure:
    """Every width group (a row) and its width at every stage (a column); the shade is the share of full width.

    In a network of more than forty groups, neighbours that grow alike share a row.

    Raises:
        UserError: the run has no width groups.
    """
    rows = _rows_of_groups(run)
    num_stages = len(rows[0][1])
    lengths = _stage_epochs(run, num_stages)
    with style.styled():
        name_in = 0.075 * max(len(name) for name, _, _ in rows)
        figure = style.new_figure(name_in + 0.42 * num_stages + 0.75, 0.17 * len(rows) + 0.75)
        axes = figure.subplots()
        shares = np.array([[width / full for width in widths] for _, widths, full in rows])
        # From almost white to dark blue: dark always means wide, in grey print too.
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1.15, aspect="auto")
        for row, (_, widths, _) in enumerate(rows):
            for stage, width in enumerate(widths):
                dark = shares[row, stage] > 0.6
                axes.text(
                    *(stage, row, str(width)),
                    ha="center",
                    va="center",
                    fontsize=6.5,
                    color="white" if dark else "black",
                )
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


def silhouettes(run: Run) -> Figure:
    """The network's shape at each stage: a bar a width group, input on top, new channels in colour at its ends.

    Raises:
        UserError: the run has no width groups.
    """
    rows = _rows_of_groups(run)
    num_stages, num_rows = len(rows[0][1]), len(rows)
    lengths = _stage_epochs(run, num_stages)
    widest = max(full for _, _, full in rows)
    gap = 0.12 * widest
    with style.styled():
        figure = style.new_figure(min(7.2, 1.0 + 1.15 * num_stages), 0.8 + 0.09 * min(max(num_rows, 10), 28))
        axes = figure.subplots()
        for stage in range(num_stages):
            centre = stage * (widest + gap)
            for row, (_, widths, full) in enumerate(rows):
                old, new = widths[max(stage - 1, 0)], widths[stage]
                box = {"height": 0.86, "linewidth": 0}
                axes.barh(row, full, left=centre - full / 2, color="0.93", **box)
                axes.barh(row, new, left=centre - new / 2, color=style.PALETTE[1], **box)
                axes.barh(row, old, left=centre - old / 2, color=style.PALETTE[0], **box)
        axes.set_ylim(num_rows - 0.4, -0.6)
        axes.set_xlim(-widest / 2, (num_stages - 1) * (widest + gap) + widest / 2)
        centres = [stage * (widest + gap) for stage in range(num_stages)]
        heads = [
            f"stage {i}" + (f"\n{n:g} epoch{'s' * (n != 1)}" if n else "") for i, n in enumerate(lengths)
        ]
        axes.set_xticks(centres, heads, fontsize=7 if num_stages < 7 else 6)
        axes.set_yticks([0, num_rows - 1], ["input", "output"], fontsize=7)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        names = (("0.93", "full width"), (style.PALETTE[0], "kept"), (style.PALETTE[1], "new"))
        handles = [Patch(color=colour, label=name) for colour, name in names]
        figure.legend(handles=handles, loc="outside upper center", ncols=3, handlelength=1.2, frameon=False)
    return figure


def _rows_of_groups(run: Run) -> list[tuple[str, tuple[int, ...], int]]:
    """(name, width at each stage, full width) of each row; neighbours that grow alike share one if need be."""
    groups = run.growth["groups"]
    if not groups:
        raise UserError(f"{run.path} has no width groups in growth.json, so there are no widths to draw.")
    rows = [(name, tuple(group["widths"]), group["full_width"]) for name, group in groups.items()]
    if len(rows) <= 40:
        return rows
    runs = [list(part) for _, part in itertools.groupby(rows, key=lambda row: row[1:])]
    return [
        (f"{part[0][0]}" + (f" ... {part[-1][0]} ({len(part)})" if len(part) > 1 else ""), *part[0][1:])
        for part in runs
    ]


def _stage_epochs(run: Run, num_stages: int) -> list[float]:
    """Epochs of each stage from the growth events; zeros (unknown) for a run that has not come so far."""
    try:
        edges = [0.0, *run.growth_epochs, float(run.metrics["epoch"].iloc[-1]) + 1]
    except UserError:
        return [0.0] * num_stages
    if len(edges) != num_stages + 1:
        return [0.0] * num_stages
    return [right - left for left, right in itertools.pairwise(edges)]

"""Figures from run folders: learning curves, widths and rate factors of a run; the list of all figures.

Every figure's x axis counts epochs done: the values of `metrics.csv`'s epoch e (from 0) stand at e + 1, and a
growth event at the beginning of epoch e stands at e, between the epoch before it and the one after it.
"""

import difflib
import math
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from growlab.analysis import style
from growlab.analysis.comparison import compare
from growlab.analysis.results import Run, open_run
from growlab.analysis.style import save
from growlab.errors import UserError

__all__ = [
    *("FIGURES", "compare", "find", "learning_curves", "rate_factors", "save", "widths_over_time"),
    "write_run_figures",
]


def learning_curves(run: Run) -> Figure:
    """Loss and accuracy over epochs: training, held-out where measured, and the final test value.

    Raises:
        UserError: the run has no metrics.
    """
    metrics = run.metrics
    x = metrics["epoch"].to_numpy() + 1
    with style.styled():
        figure = style.new_figure(5.2, 4.3)
        loss_axes, accuracy_axes = figure.subplots(2, 1, sharex=True)
        for axes, quantity, scale in ((loss_axes, "loss", 1), (accuracy_axes, "accuracy", 100)):
            style.mark_growth(axes, run.growth_epochs)
            for prefix, name, colour, dashes, marker in (
                ("train", "training", style.PALETTE[0], "-", "o"),
                ("val", "held-out", style.PALETTE[1], style.DASHES[1], "s"),
            ):
                y = run.curve(f"{prefix}_{quantity}")
                if y is None:
                    continue
                known = np.isfinite(y)
                axes.plot(
                    x[known],
                    scale * y[known],
                    color=colour,
                    linestyle=dashes,
                    marker=marker if len(x) <= 40 else "",
                    # The last value stands at the right edge: its marker must not be cut in half.
                    clip_on=False,
                    label=name,
                )
            test = run.results.get(f"test_{quantity}")
            if test is not None and math.isfinite(test):
                value = f"{scale * test:.2f}" + (" %" if quantity == "accuracy" else "")
                axes.plot(
                    x[-1:],
                    [scale * test],
                    color="black",
                    linestyle="none",
                    marker="*",
                    markersize=8,
                    clip_on=False,
                    zorder=4,
                    label=f"test, final: {value}",
                )
        loss_axes.set_ylabel("loss")
        accuracy_axes.set_ylabel("accuracy (%)")
        style.epoch_axis(accuracy_axes, x[-1])
        loss_axes.legend(loc="upper right")
        accuracy_axes.legend(loc="lower right")
        labels = style.label_stages(loss_axes, run, x[-1])
        style.thin_out(figure, labels[:-1])
    return figure


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


def rate_factors(run: Run, parameters: Sequence[str] | None = None) -> Figure:
    """Rate factor of every region over epochs: median over parameters, then single parameters.

    Args:
        run: a run with rate adaptation.
        parameters: names of the parameters to show; by default the first, a middle and the last one.

    Raises:
        UserError: the run has no rate factors, or none of a parameter asked for.
    """
    rates = run.rates
    if rates is None:
        raise UserError(f"{run.path} has no rates.csv: it was run without rate adaptation (lr_adapt=none).")
    known = list(dict.fromkeys(rates["parameter"]))
    if parameters is None:
        parameters = [known[i] for i in dict.fromkeys((0, len(known) // 2, len(known) - 1))]
    for name in parameters:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, cutoff=0.0)[0]
            raise UserError(f"{run.path} has no rate factors of {name}; did you mean {near}?")
    metrics = run.metrics
    # Steps an epoch change with the batch size, so steps become epochs by interpolation between epoch ends.
    epochs = np.interp(rates["step"], [0, *metrics["step"]], [0, *(metrics["epoch"] + 1)])
    rates = rates.assign(x=epochs)
    num_regions = int(rates["region"].max()) + 1
    colours = matplotlib.colormaps[style.STAGE_MAP](np.linspace(0, 0.9, max(num_regions, 2)))
    num_panels = len(parameters) + 1
    num_rows = math.ceil(num_panels / 2)
    with style.styled():
        figure = style.new_figure(6.8, 0.5 + 2.1 * num_rows)
        grid = figure.subplots(num_rows, 2, sharex=True, squeeze=False)
        panels = list(grid.flat)
        for axes in panels[num_panels:]:
            axes.remove()
        for axes, name in zip(panels, [None, *parameters], strict=False):
            style.mark_growth(axes, run.growth_epochs)
            style.epoch_axis(axes, float(metrics["epoch"].iloc[-1]) + 1)
            shown = rates if name is None else rates[rates["parameter"] == name]
            if shown["rate_factor"].min() <= 1 <= shown["rate_factor"].max():
                axes.axhline(1, color="0.45", linewidth=0.7, zorder=0.6)
            for region, part in shown.groupby("region"):
                factors = part.groupby("x")["rate_factor"]
                middle = factors.median()
                axes.plot(middle.index, middle, color=colours[int(region)], linewidth=1.2)
                if name is None:
                    low, high = factors.quantile(0.25), factors.quantile(0.75)
                    axes.fill_between(
                        low.index, low, high, color=colours[int(region)], alpha=0.12, linewidth=0
                    )
            axes.set_title(name or "median over parameters (band: quartiles)", loc="left")
            axes.set_ylabel("rate factor")
        for axes in panels[: num_panels - 2]:
            axes.set_xlabel("")
        norm = BoundaryNorm(np.arange(num_regions + 1) - 0.5, num_regions)
        listed = ListedColormap(colours[:num_regions])
        bar = figure.colorbar(
            ScalarMappable(norm, listed),
            ax=panels[:num_panels],
            ticks=range(num_regions),
            aspect=30,
            pad=0.015,
        )
        bar.set_label("region: stage of birth")
        bar.ax.tick_params(which="both", length=0)
        bar.outline.set_visible(False)
    return figure


def write_run_figures(run_dir: str | os.PathLike[str]) -> list[Path]:
    """Draw a run's figures into its folder `figures/`: learning_curves, widths and, if adapted, rate_factors.

    The run need not have a `results.json` yet. Returns the files written.

    Raises:
        UserError: the run has no metrics, or a file cannot be read or written.
    """
    run = open_run(run_dir)
    wanted: dict[str, Callable[[Run], Figure]] = {"learning_curves": learning_curves}
    if run.growth["groups"]:
        wanted["widths"] = widths_over_time
    if run.rates is not None:
        wanted["rate_factors"] = rate_factors
    return [save(draw(run), run.path / "figures" / f"{name}.png") for name, draw in wanted.items()]


def _of_one(name: str, draw: Callable[[Run], Figure]) -> Callable[[Sequence[Run]], Figure]:
    def draw_one(runs: Sequence[Run]) -> Figure:
        if len(runs) != 1:
            raise UserError(
                f"{name} shows one run and there are {len(runs)}: name one of their folders, such as "
                f"{runs[0].path}, or draw compare."
            )
        return draw(runs[0])

    return draw_one


FIGURES: dict[str, Callable[[Sequence[Run]], Figure]] = {
    "learning_curves": _of_one("learning_curves", learning_curves),
    "widths": _of_one("widths", widths_over_time),
    "rate_factors": _of_one("rate_factors", rate_factors),
    "compare": compare,
}


def find(name: str) -> Callable[[Sequence[Run]], Figure]:
    """The function that draws the figure called `name` from runs.

    Raises:
        UserError: there is none; the nearest name is suggested.
    """
    if name not in FIGURES:
        near = difflib.get_close_matches(name, FIGURES, 1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(FIGURES)}."
        raise UserError(f"there is no figure {name}; {hint}")
    return FIGURES[name]


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

"""All figures by name, and those that a run draws into its folder when it ends.

An x axis of epochs counts completed epochs: values of epoch e of `metrics.csv` (from 0) are at e + 1, and a growth
event at the start of epoch e is at e.
"""

import difflib
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from growlab.base.errors import UserError
from growlab.lab.analysis import style
from growlab.lab.analysis.comparison import compare, frontier, frontier_seconds, learning_rates
from growlab.lab.analysis.results import ACCURACY, Metric, Run, metric_of, open_run
from growlab.lab.analysis.step_figures import (
    QUANTITIES,
    deviations,
    has_rate_factors,
    histograms,
    loss_over_steps,
    rate_factors,
    region_norms,
)
from growlab.lab.analysis.style import save
from growlab.lab.analysis.width_figures import (
    network_map,
    relative_widths,
    silhouettes,
    width_changes,
    width_paths,
    widths_over_time,
)

__all__ = [
    *("FIGURES", "compare", "find", "frontier", "frontier_seconds", "learning_curves", "network_map"),
    *("rate_factors", "region_norms", "resources", "save", "silhouettes", "widths_over_time"),
    "write_run_figures",
]

Draw = Callable[[Sequence[Run], Sequence[str] | None], Figure]
# Resources of a stage: the axis's label, and its unit relative to that of `results.json`.
_RESOURCES = {
    "peak_memory_bytes": ("peak memory (GiB)", 2**30),
    "samples_per_sec": ("samples per second", 1),
    "seconds": ("seconds", 1),
}


def write_run_figures(run_dir: str | os.PathLike[str]) -> list[Path]:
    """Draw a run's figures into its folder `figures/`: learning_curves, widths and, if recorded, rate_factors.

    The run need not have a `results.json` yet. Returns the written files.
    """
    run = open_run(run_dir)
    figures: dict[str, Callable[[Run], Figure]] = {"learning_curves": learning_curves}
    if run.growth["groups"]:
        figures["widths"] = widths_over_time
    if has_rate_factors(run):
        figures["rate_factors"] = rate_factors
    return [save(draw(run), run.path / "figures" / f"{name}.png") for name, draw in figures.items()]


@style.styled()
def learning_curves(run: Run) -> Figure:
    """Draw loss and the task's metric over epochs on training and validation (or monitored test) data, and at the test.

    Raises:
        UserError: the run has no metrics.
    """
    x = run.metrics["epoch"].to_numpy() + 1
    metric = metric_of([run.results])
    if all(run.curve(f"{split}_{metric.key}") is None for split in ("train", "val", "test")):
        metric = ACCURACY
    shown = [Metric("loss", "loss", higher_is_better=False), *([] if metric.key == "loss" else [metric])]
    figure = style.new_figure(5.2, 0.3 + 2.0 * len(shown))
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for axes, metric in zip(panels, shown, strict=True):
        style.mark_growth(axes, run.growth_epochs)
        # Without clipping, which would halve the markers at the right edge.
        for prefix, name, rank in (("train", "training", 0), ("val", "validation", 1), ("test", "test, monitored", 1)):
            y = run.curve(f"{prefix}_{metric.key}")
            if y is not None:
                known = np.isfinite(y)
                marker = style.MARKERS[rank] if len(x) <= 40 else ""
                line = {"color": style.PALETTE[rank], "linestyle": style.DASHES[rank], "marker": marker}
                axes.plot(x[known], metric.scale * y[known], **line, clip_on=False, label=name)
        test = run.results.get(f"test_{metric.key}")
        if test is not None and math.isfinite(test):
            star = {"color": "black", "linestyle": "none", "marker": "*", "markersize": 8, "zorder": 4}
            value = f"{metric.text(test)} {metric.unit}".strip()
            axes.plot(x[-1:], [metric.scale * test], **star, clip_on=False, label=f"test, final: {value}")
        axes.set_ylabel(metric.name + (f" ({metric.unit})" if metric.unit else ""))
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="lower right" if metric.higher_is_better else "upper right")
    style.epoch_axis(panels[-1], x[-1])
    style.thin_out(figure, _label_stages(panels[0], run, x[-1]))
    return figure


def _label_stages(axes: Axes, run: Run, num_epochs: float) -> list[Any]:
    """Write each stage's width above its interval, in percent of full width over all groups."""
    shares, edges = relative_widths(run), [0.0, *run.growth_epochs, float(num_epochs)]
    if len(shares) != len(edges) - 1 or len(shares) < 2:
        return []
    look: dict[str, Any] = {"fontsize": 7, "color": "0.25", "va": "bottom"}
    axes.text(-0.012, 1.015, "width %", ha="right", transform=axes.transAxes, **look)
    look |= {"transform": axes.get_xaxis_transform(), "ha": "center"}
    return [
        axes.text((left + right) / 2, 1.015, f"{100 * share:.0f}", **look)
        for left, right, share in zip(edges, edges[1:], shares, strict=False)
    ]


@style.styled()
def resources(runs: Sequence[Run]) -> Figure:
    """Draw peak memory, samples per second and seconds of each stage, one bar per run (Yuan et al. 2023, Figure 7).

    A fixed-size run is a line: its memory, its throughput, and its time for as many epochs as the stage has. Memory is
    shown if recorded: on CUDA devices, and roughly, for the whole process, on CPUs under Linux.
    """
    grown = [run for run in runs if len(run.results.get("stages") or ()) > 1]
    fixed = [run for run in runs if len(run.results.get("stages") or ()) == 1 and run.keeps_full_width]
    if not grown:
        raise UserError("resources compares stages: name at least one run that grows.")
    if len({tuple(stage["epochs"] for stage in run.results["stages"]) for run in grown}) > 1:
        raise UserError("resources needs runs whose stages have equal numbers of epochs: name other runs.")
    epochs = [stage["epochs"] for stage in grown[0].results["stages"]]
    has_memory = all(_of_stages(run, "peak_memory_bytes") is not None for run in (*grown, *fixed))
    quantities = [name for name in _RESOURCES if has_memory or name != "peak_memory_bytes"]
    figure = style.new_figure(0.6 + 2.55 * len(quantities), 2.4 + 0.16 * (len(grown) + len(fixed)))
    panels = figure.subplots(1, len(quantities), squeeze=False)[0]
    for axes, quantity in zip(panels, quantities, strict=True):
        handles = _bars(axes, quantity, grown) + _lines(axes, quantity, fixed, epochs)
        axes.set_xlabel("stage")
        axes.set_xticks(range(len(epochs)), [str(stage) for stage in range(len(epochs))])
        axes.set_ylim(bottom=0)
        axes.set_ylabel(_RESOURCES[quantity][0])
    place: dict[str, Any] = {"loc": "outside lower center", "ncols": 1, "handlelength": 2.4}
    figure.legend(handles=handles, **place, title="one run each", title_fontsize=7)
    return figure


def _bars(axes: Axes, quantity: str, runs: Sequence[Run]) -> list[Any]:
    width, handles = 0.8 / len(runs), []
    for i, (run, line) in enumerate(zip(runs, style.line_styles([r.group.method for r in runs]), strict=True)):
        values = _of_stages(run, quantity)
        assert values is not None
        places = np.arange(len(values)) + (i - (len(runs) - 1) / 2) * width
        look: dict[str, Any] = {"facecolor": line["color"], "hatch": style.HATCHES[i % len(style.HATCHES)]}
        look |= {"edgecolor": "white", "linewidth": 0.4}
        axes.bar(places, values, width, **look)
        handles.append(Patch(**look, label=_label(run)))
    return handles


def _lines(axes: Axes, quantity: str, runs: Sequence[Run], epochs: Sequence[int]) -> list[Any]:
    handles = []
    for i, run in enumerate(runs):
        values = _of_stages(run, quantity)
        assert values is not None
        per_epoch = values[0] / run.results["epochs"]
        heights = [per_epoch * n for n in epochs] if quantity == "seconds" else [values[0]] * len(epochs)
        look: dict[str, Any] = {"color": style.FIXED_SIZE[i % len(style.FIXED_SIZE)], "where": "post"}
        look |= {"linestyle": style.DASHES[i % len(style.DASHES)], "label": _label(run)}
        handles += axes.step(np.arange(len(epochs) + 1) - 0.5, [*heights, heights[-1]], **look)
    return handles


def _of_stages(run: Run, quantity: str) -> list[float] | None:
    values = [stage.get(quantity) for stage in run.results["stages"]]
    return None if None in values else [value / _RESOURCES[quantity][1] for value in values]


def _label(run: Run) -> str:
    overrides = [override for override in run.group.overrides if not override.startswith(("schedule.", "data."))]
    sizes = [stage["batch_size"] for stage in run.results["stages"]]
    batch = f"batch {sizes[0]}" if len(set(sizes)) == 1 else f"batch {sizes[0]} to {sizes[-1]}"
    name = style.display_name(", ".join([run.group.plain_method, *overrides]))
    return f"{name}, {batch}: {run.results['seconds']:.0f} s in all"


_ONE_RUN: dict[str, Callable[..., Figure]] = {
    "learning_curves": learning_curves,
    "widths": widths_over_time,
    "network_map": network_map,
    "silhouettes": silhouettes,
    "rate_factors": rate_factors,
}
_RUNS: dict[str, Callable[..., Figure]] = {
    "norms": region_norms,
    "resources": resources,
    "frontier": frontier,
    "frontier_seconds": frontier_seconds,
    "learning_rates": learning_rates,
    "width_paths": width_paths,
    "width_changes_by_start": partial(width_changes, by="start"),
    "width_changes_by_end": partial(width_changes, by="end"),
    "compare": compare,
    "loss_over_steps": loss_over_steps,
}
for _quantity in QUANTITIES:
    _RUNS |= {
        f"{_quantity}s_at_start": partial(histograms, quantity=_quantity, at_end=False),
        f"{_quantity}s_over_training": partial(deviations, quantity=_quantity),
        f"{_quantity}s_at_end": partial(histograms, quantity=_quantity, at_end=True),
    }
_OF_PARAMETERS = ("rate_factors", "norms")


def one_run(name: str, runs: Sequence[Run]) -> Sequence[Run]:
    """Return `runs`; raise UserError unless there is exactly one."""
    if len(runs) != 1:
        raise UserError(
            f"{name} shows one run, not {len(runs)}: name one of their folders, such as {runs[0].path}, or draw "
            "compare."
        )
    return runs


def _draw(name: str, runs: Sequence[Run], parameters: Sequence[str] | None) -> Figure:
    if name in _ONE_RUN:
        one_run(name, runs)
    if parameters and name not in _OF_PARAMETERS:
        raise UserError(f"{name} does not show single parameters: leave out --parameter.")
    options = (parameters,) if name in _OF_PARAMETERS else ()
    return _ONE_RUN[name](runs[0], *options) if name in _ONE_RUN else _RUNS[name](runs, *options)


FIGURES: dict[str, Draw] = {name: partial(_draw, name) for name in (*_ONE_RUN, *_RUNS)}


def find(name: str) -> Draw:
    """Return the function that draws a figure from runs and optional names of parameters."""
    if name not in FIGURES:
        near = difflib.get_close_matches(name, FIGURES, 1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(FIGURES)}."
        raise UserError(f"there is no figure {name}; {hint}")
    return FIGURES[name]

"""Resources of each stage: time, throughput and memory, with and without batch adaptation."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from growlab.base.errors import UserError
from growlab.lab.analysis import style
from growlab.lab.analysis.results import Run

_GIB = 2**30


def resources(runs: Sequence[Run]) -> Figure:
    """Peak memory, samples per second and seconds of each stage, a bar a run (Yuan et al. 2023, Figure 7).

    A fixed-size run is a line: its memory, its throughput, and the time in which it trains as many epochs as
    the stage has. Memory is shown if it was recorded, which it is on CUDA devices and, for the process as a whole
    and only roughly, on CPUs under Linux.

    Raises:
        UserError: none of the runs grows, or the grown ones differ in their stages' epochs.
    """
    stages = [len(run.results.get("stages") or ()) for run in runs]
    grown = [run for run, number in zip(runs, stages, strict=True) if number > 1]
    fixed = [run for run, number in zip(runs, stages, strict=True) if number == 1 and run.keeps_full_width]
    if not grown:
        raise UserError("resources compares stages: name at least one run that grows.")
    lengths = {tuple(stage["epochs"] for stage in run.results["stages"]) for run in grown}
    if len(lengths) > 1:
        raise UserError("resources shows runs whose stages last as many epochs, and these differ.")
    (epochs,) = lengths
    known = [run for run in (*grown, *fixed) if _column(run, "peak_memory_bytes") is not None]
    quantities = ["samples_per_sec", "seconds"]
    if len(known) == len(grown) + len(fixed):
        quantities.insert(0, "peak_memory_bytes")
    with style.styled():
        # The legend's lines need room of their own.
        figure = style.new_figure(0.6 + 2.55 * len(quantities), 2.4 + 0.16 * (len(grown) + len(fixed)))
        panels = figure.subplots(1, len(quantities), squeeze=False)[0]
        handles: list[Any] = []
        for axes, quantity in zip(panels, quantities, strict=True):
            handles = _bars(axes, quantity, grown) + _lines(axes, quantity, fixed, epochs)
            axes.set_xlabel("stage")
            axes.set_xticks(range(len(epochs)), [str(stage) for stage in range(len(epochs))])
            axes.set_ylim(bottom=0)
        for axes, quantity in zip(panels, quantities, strict=True):
            axes.set_ylabel(
                {
                    "peak_memory_bytes": "peak memory (GiB)",
                    "samples_per_sec": "samples per second",
                    "seconds": "seconds",
                }[quantity]
            )
        figure.legend(
            handles=handles,
            loc="outside lower center",
            ncols=1,
            handlelength=2.4,
            title="one run each",
            title_fontsize=7,
        )
    return figure


def _bars(axes: Axes, quantity: str, runs: Sequence[Run]) -> list[Any]:
    width = 0.8 / len(runs)
    handles = []
    looks = style.looks([run.group.method for run in runs])
    for i, run in enumerate(runs):
        values = _column(run, quantity)
        assert values is not None
        places = np.arange(len(values)) + (i - (len(runs) - 1) / 2) * width
        look = {
            "facecolor": looks[i]["color"],
            "hatch": style.HATCHES[i % len(style.HATCHES)],
            "edgecolor": "white",
            "linewidth": 0.4,
        }
        axes.bar(places, values, width, **look)
        batches = sorted({stage["batch_size"] for stage in run.results["stages"]})
        batch = f"batch {batches[0]}" if len(batches) == 1 else f"batch {batches[-1]} to {batches[0]}"
        handles.append(Patch(**look, label=f"{_name(run)}, {batch}: {run.results['seconds']:.0f} s in all"))
    return handles


def _lines(axes: Axes, quantity: str, runs: Sequence[Run], epochs: Sequence[int]) -> list[Any]:
    handles = []
    for i, run in enumerate(runs):
        values = _column(run, quantity)
        assert values is not None
        value = values[0]
        if quantity == "seconds":
            heights = [value / run.results["epochs"] * n for n in epochs]
        else:
            heights = [value] * len(epochs)
        stage = run.results["stages"][0]
        (line,) = axes.step(
            np.arange(len(epochs) + 1) - 0.5,
            [*heights, heights[-1]],
            where="post",
            color=style.FIXED_SIZE[i % len(style.FIXED_SIZE)],
            linestyle=style.DASHES[i % len(style.DASHES)],
            label=f"{_name(run)}, batch {stage['batch_size']}: {run.results['seconds']:.0f} s in all",
        )
        handles.append(line)
    return handles


def _column(run: Run, quantity: str) -> list[float] | None:
    values = [stage.get(quantity) for stage in run.results["stages"]]
    if any(value is None for value in values):
        return None
    return [value / (_GIB if quantity == "peak_memory_bytes" else 1) for value in values]


def _name(run: Run) -> str:
    own = [o for o in run.group.overrides if not o.startswith("schedule.") and not o.startswith("data.")]
    name = "fixed-size" if run.group.is_fixed_size else run.group.growth
    if run.group.lr_adapt != "none":
        name += f" + {run.group.lr_adapt}"
    return style.shown(", ".join([name, *own]))

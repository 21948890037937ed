"""Widths of several runs over epochs: do layers that decide by themselves arrive at the same width?"""

from collections.abc import Sequence
from pathlib import Path

import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from growlab.base.errors import UserError
from growlab.lab.analysis import style
from growlab.lab.analysis.results import Run

# Up to this width every neuron shows on a linear axis.
_FEW = 20
TASK = "task"
"""gid of the lines that mark another set of classes."""


def width_paths(runs: Sequence[Run]) -> Figure:
    """Channels of all groups over epochs above, held-out accuracy below; runs of one start share a colour.

    Raises:
        UserError: there is no run, or one has no metrics or no width groups.
    """
    if not runs:
        raise UserError("width_paths needs at least one run.")
    paths = [path_of(run) for run in runs]
    starts = sorted({path[0] for path in paths})
    with style.styled():
        figure = style.new_figure(5.2, 3.6)
        above, below = figure.subplots(2, sharex=True, height_ratios=[3, 2])
        for run, path in zip(runs, paths, strict=True):
            colour = style.PALETTE[starts.index(path[0]) % len(style.PALETTE)]
            edges = range(len(path) + 1)
            above.plot(
                edges, [*path, path[-1]], drawstyle="steps-post", color=colour, linewidth=1.2, alpha=0.8
            )
            accuracy = run.held_out("accuracy")
            if accuracy is not None:
                below.plot(
                    range(1, len(accuracy) + 1), 100 * accuracy, color=colour, linewidth=1.0, alpha=0.8
                )
        for start in starts:
            colour = style.PALETTE[starts.index(start) % len(style.PALETTE)]
            ends = sorted({path[-1] for path in paths if path[0] == start})
            told = str(ends[0]) if len(ends) == 1 else f"{ends[0]}-{ends[-1]}"
            n = sum(path[0] == start for path in paths)
            above.plot([], [], color=colour, label=f"from {start} to {told} (n={n})")
        _width_axis(above, min(map(min, paths)), max(map(max, paths)))
        layers = {len(run.growth["groups"]) for run in runs}
        above.set_ylabel(
            "width" if layers == {1} else f"width, sum of {'/'.join(map(str, sorted(layers)))} layers"
        )
        above.legend(frameon=False, fontsize=8, title="each line is one run", title_fontsize=7)
        below.set_ylabel(f"{held_out_name(runs)} (%)")
        for epoch, told in _tasks(runs):
            for axes in (above, below):
                axes.axvline(epoch, color="0.6", linewidth=0.8, linestyle=(0, (3, 2)), zorder=0.5, gid=TASK)
            above.annotate(
                told,
                (epoch, 1.0),
                (2, 2),
                xycoords=above.get_xaxis_transform(),
                textcoords="offset points",
                fontsize=7,
                color="0.3",
            )
        below.set_xlabel("epoch")
        style.epoch_axis(below, max(len(path) for path in paths))
    return figure


def held_out_name(runs: Sequence[Run]) -> str:
    """Name of the held-out accuracy: "test accuracy" if all runs watched the test set."""
    if all(run.curve("val_accuracy") is None for run in runs):
        return "test accuracy"
    return "validation accuracy"


def _width_axis(axes: Axes, least: int, most: int) -> None:
    """Every width as a tick where they are few, else a logarithmic axis with powers of two."""
    if most <= _FEW:
        axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.set_ylim(max(least - 1, 0), most + 1)
        return
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_yticks([2**power for power in range(most.bit_length() + 1) if least <= 2**power <= most])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))


def _tasks(runs: Sequence[Run]) -> list[tuple[int, str]]:
    """When the classes change, and to which, if all runs agree on it: `data.class_schedule` of their configurations."""
    schedules = [class_schedule(run.path / "config.yaml") for run in runs]
    if not schedules[0] or any(schedule != schedules[0] for schedule in schedules):
        return []
    return [
        (
            int(epoch),
            f"classes {', '.join(map(str, classes))}" if len(classes) < 5 else f"{len(classes)} classes",
        )
        for epoch, classes in sorted(schedules[0].items())
    ]


def class_schedule(path: Path) -> dict[int, list[int]]:
    """The classes from each epoch on, as a run's configuration says; none where it does not."""
    if not path.is_file():
        return {}
    content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    return (content.get("data") or {}).get("class_schedule") or {}


def path_of(run: Run) -> list[int]:
    """Channels of all groups in each epoch of a run.

    Raises:
        UserError: the run has no width groups.
    """
    groups = run.growth["groups"].values()
    if not groups:
        raise UserError(f"{run.path} has no width groups in growth.json, so there are no widths to draw.")
    return [sum(group["widths"][stage] for group in groups) for stage in run.metrics["stage"]]

"""Widths of several runs over epochs: do layers that decide by themselves arrive at the same width?"""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from growlab.analysis import style
from growlab.analysis.results import Run
from growlab.errors import UserError


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
            above.plot([], [], color=colour, label=f"from {start} to {told}")
        least, most = min(map(min, paths)), max(map(max, paths))
        shown = [2**power for power in range(most.bit_length() + 1) if least <= 2**power <= most]
        above.set_yscale("log")
        above.yaxis.set_minor_locator(NullLocator())
        above.set_yticks(shown)
        above.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
        above.set_ylabel("width")
        above.legend(frameon=False, fontsize=8)
        below.set_ylabel("held-out accuracy %")
        below.set_xlabel("epoch")
        style.epoch_axis(below, max(len(path) for path in paths))
    return figure


def path_of(run: Run) -> list[int]:
    """Channels of all groups in each epoch of a run.

    Raises:
        UserError: the run has no width groups.
    """
    groups = run.growth["groups"].values()
    if not groups:
        raise UserError(f"{run.path} has no width groups in growth.json, so there are no widths to draw.")
    return [sum(group["widths"][stage] for group in groups) for stage in run.metrics["stage"]]

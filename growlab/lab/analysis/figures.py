"""All figures by name, and those that a run draws into its own folder when it ends."""

import difflib
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from growlab.base.errors import UserError
from growlab.lab.analysis.comparison import compare
from growlab.lab.analysis.curves import learning_curves
from growlab.lab.analysis.frontier import frontier, frontier_seconds
from growlab.lab.analysis.layer_figures import at_end, at_start, loss_over_steps, over_training
from growlab.lab.analysis.over_rates import learning_rates
from growlab.lab.analysis.region_figures import has_rate_factors, rate_factors, region_norms
from growlab.lab.analysis.resources import resources
from growlab.lab.analysis.results import Run, open_run
from growlab.lab.analysis.style import save
from growlab.lab.analysis.width_changes import width_changes
from growlab.lab.analysis.width_figures import network_map, silhouettes, widths_over_time
from growlab.lab.analysis.width_paths import width_paths

__all__ = [
    *("FIGURES", "compare", "find", "frontier", "frontier_seconds", "learning_curves", "network_map"),
    *("rate_factors", "region_norms", "resources", "save", "silhouettes", "widths_over_time"),
    "write_run_figures",
]

Draw = Callable[[Sequence[Run], Sequence[str] | None], Figure]


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
    if has_rate_factors(run):
        wanted["rate_factors"] = rate_factors
    return [save(draw(run), run.path / "figures" / f"{name}.png") for name, draw in wanted.items()]


def _of_one(name: str, draw: Callable[..., Figure], of_parameters: bool = False) -> Draw:
    def draw_one(runs: Sequence[Run], parameters: Sequence[str] | None) -> Figure:
        if len(runs) != 1:
            raise UserError(
                f"{name} shows one run and there are {len(runs)}: name one of their folders, such as "
                f"{runs[0].path}, or draw compare."
            )
        return draw(runs[0], parameters) if of_parameters else _plain(name, draw)(runs[0], parameters)

    return draw_one


def _plain(name: str, draw: Callable[..., Figure]) -> Callable[..., Figure]:
    def draw_all(runs: Sequence[Run], parameters: Sequence[str] | None) -> Figure:
        if parameters:
            raise UserError(f"{name} shows no single parameters: leave out --parameter.")
        return draw(runs)

    return draw_all


FIGURES: dict[str, Draw] = {
    "learning_curves": _of_one("learning_curves", learning_curves),
    "widths": _of_one("widths", widths_over_time),
    "network_map": _of_one("network_map", network_map),
    "silhouettes": _of_one("silhouettes", silhouettes),
    "rate_factors": _of_one("rate_factors", rate_factors, of_parameters=True),
    "norms": region_norms,
    "resources": _plain("resources", resources),
    "frontier": _plain("frontier", frontier),
    "frontier_seconds": _plain("frontier_seconds", frontier_seconds),
    "learning_rates": _plain("learning_rates", learning_rates),
    "width_paths": _plain("width_paths", width_paths),
    "width_changes_by_start": _plain("width_changes_by_start", partial(width_changes, by="start")),
    "width_changes_by_end": _plain("width_changes_by_end", partial(width_changes, by="end")),
    "compare": _plain("compare", compare),
    "loss_over_steps": _plain("loss_over_steps", loss_over_steps),
    **{
        f"{plural}_{when}": _plain(f"{plural}_{when}", make(quantity))
        for quantity, plural in (
            ("activation", "activations"),
            ("gradient", "gradients"),
            ("weight", "weights"),
            ("weight_gradient", "weight_gradients"),
        )
        for when, make in (("at_start", at_start), ("over_training", over_training), ("at_end", at_end))
    },
}


def find(name: str) -> Draw:
    """The function that draws the figure called `name` from runs and, where it shows single ones, parameters.

    Raises:
        UserError: there is none; the nearest name is suggested.
    """
    if name not in FIGURES:
        near = difflib.get_close_matches(name, FIGURES, 1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(FIGURES)}."
        raise UserError(f"there is no figure {name}; {hint}")
    return FIGURES[name]

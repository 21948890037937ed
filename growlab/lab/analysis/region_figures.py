"""Regions of a run, by their stage of birth: rate factors, weight norms and gradient norms over epochs."""

import difflib
import math
import textwrap
from collections.abc import Sequence

import matplotlib
import numpy as np
import pandas
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure

from growlab.base.errors import UserError
from growlab.lab.analysis import style
from growlab.lab.analysis.results import Run

_MOST_RUNS = 3
_NORMS = {"weight_norm": "weight norm", "grad_norm": "gradient norm"}


def has_rate_factors(run: Run) -> bool:
    """True if the run recorded rate factors: norms are recorded without rate adaptation too."""
    adapted = run.results.get("lr_adapt") != "none"
    return adapted and run.rates is not None and bool(run.rates["rate_factor"].notna().any())


def rate_factors(run: Run, parameters: Sequence[str] | None = None) -> Figure:
    """Rate factor of every region over epochs: median over parameters, then single parameters.

    Args:
        run: a run with rate adaptation.
        parameters: names of the parameters to show; by default the first, a middle and the last one.

    Raises:
        UserError: the run has no rate factors, or none of a parameter asked for.
    """
    if not has_rate_factors(run):
        raise UserError(
            f"{run.path} has no rate factors: it was run without rate adaptation (lr_adapt=none)."
        )
    rates = _over_epochs(run)
    parameters = parameters or _first_middle_last(rates)
    _check_parameters(run, rates, parameters)
    num_panels = len(parameters) + 1
    num_rows = math.ceil(num_panels / 2)
    with style.styled():
        figure = style.new_figure(6.8, 0.5 + 2.1 * num_rows)
        panels = list(figure.subplots(num_rows, 2, sharex=True, squeeze=False).flat)
        for axes in panels[num_panels:]:
            axes.remove()
        colours = _region_colours(rates)
        for axes, name in zip(panels, [None, *parameters], strict=False):
            _begin(axes, run)
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
        _region_bar(figure, panels[:num_panels], colours)
    return figure


def region_norms(runs: Sequence[Run], parameters: Sequence[str] | None = None) -> Figure:
    """Norms of the weights (above) and of their gradients (below) of every region over epochs.

    Regions are what the paper calls sub-components: the elements of one weight that came with one stage. Of
    one run the columns are parameters; of two or three runs, such as with and without rate adaptation, they
    are the runs, and one parameter is shown. The axes of a row are shared, logarithmic, and Frobenius norms.

    Args:
        runs: one to three runs with a `rates.csv`.
        parameters: names of the parameters to show; by default the first, a middle and the last one of one
            run, the middle one of several.

    Raises:
        UserError: there are too many runs or parameters, no norms, or none of a parameter asked for.
    """
    if len(runs) > _MOST_RUNS:
        raise UserError(f"norms shows {_MOST_RUNS} runs side by side and there are {len(runs)}: name fewer.")
    tables = [_over_epochs(run) for run in runs]
    if len(runs) == 1:
        names = list(parameters or _first_middle_last(tables[0]))
        columns = [(runs[0], tables[0], name, name) for name in names]
    else:
        if parameters and len(parameters) > 1:
            raise UserError("norms of several runs shows one parameter: give --parameter once.")
        (name,) = parameters or [_first_middle_last(tables[0])[1]]
        titles = _titles(runs)
        columns = [(run, table, name, title) for run, table, title in zip(runs, tables, titles, strict=True)]
    for run, table, name, _ in columns:
        _check_parameters(run, table, [name])
    # Older runs recorded no gradients.
    quantities = [q for q in _NORMS if all(q in table and (table[q] > 0).any() for table in tables)]
    if not quantities:
        raise UserError(f"{runs[0].path}: rates.csv holds no norms to draw.")
    with style.styled():
        figure = style.new_figure(0.9 + 2.15 * max(len(columns), 2), 0.5 + 1.7 * len(quantities))
        grid = figure.subplots(len(quantities), len(columns), sharey="row", squeeze=False)
        colours = max((_region_colours(table) for table in tables), key=len)
        for i, (run, table, name, title) in enumerate(columns):
            for axes, quantity in zip(grid[:, i], quantities, strict=True):
                _begin(axes, run, num_ticks=5)
                for region, part in table[table["parameter"] == name].groupby("region"):
                    known = part[part[quantity] > 0]
                    axes.plot(known["x"], known[quantity], color=colours[int(region)], linewidth=1.1)
                style.log_axis(axes)
            grid[0, i].set_title(title, loc="left", fontsize=7.5)
            for axes in grid[:-1, i]:
                axes.set_xlabel("")
        for axes, quantity in zip(grid[:, 0], quantities, strict=True):
            axes.set_ylabel(_NORMS[quantity])
        if len(runs) > 1:
            figure.suptitle(name, fontsize=8)
        _region_bar(figure, list(grid.flat), colours)
    return figure


def _over_epochs(run: Run) -> pandas.DataFrame:
    """`rates.csv` with the epochs done at each step in the column x.

    Steps an epoch change with the batch size, so steps become epochs by interpolation between epoch ends.
    """
    rates = run.rates
    if rates is None:
        raise UserError(f"{run.path} has no rates.csv, so there are no rates or norms of regions to draw.")
    metrics = run.metrics
    return rates.assign(x=np.interp(rates["step"], [0, *metrics["step"]], [0, *(metrics["epoch"] + 1)]))


def _first_middle_last(rates: pandas.DataFrame) -> list[str]:
    known = list(dict.fromkeys(rates["parameter"]))
    return [known[i] for i in dict.fromkeys((0, len(known) // 2, len(known) - 1))]


def _check_parameters(run: Run, rates: pandas.DataFrame, parameters: Sequence[str]) -> None:
    known = list(dict.fromkeys(rates["parameter"]))
    for name in parameters:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, cutoff=0.0)[0]
            raise UserError(f"{run.path} has no rates of {name}; did you mean {near}?")


def _titles(runs: Sequence[Run]) -> list[str]:
    overrides = [set(run.group.overrides) if run.results else set() for run in runs]
    shared = set.intersection(*overrides)
    names = [style.shown(run.group.name_without(shared)) if run.results else run.path.name for run in runs]
    names = names if len(set(names)) == len(names) else [run.path.name for run in runs]
    return [textwrap.fill(name, 36) for name in names]


def _region_colours(rates: pandas.DataFrame) -> np.ndarray:
    """A colour for each stage of birth."""
    num_regions = int(rates["region"].max()) + 1
    return matplotlib.colormaps[style.STAGE_MAP](np.linspace(0, 0.9, max(num_regions, 2)))[:num_regions]


def _begin(axes: Axes, run: Run, num_ticks: int = 9) -> None:
    style.mark_growth(axes, run.growth_epochs)
    style.epoch_axis(axes, float(run.metrics["epoch"].iloc[-1]) + 1, num_ticks)


def _region_bar(figure: Figure, panels: Sequence[Axes], colours: np.ndarray) -> None:
    num_regions = len(colours)
    norm = BoundaryNorm(np.arange(num_regions + 1) - 0.5, num_regions)
    listed = ListedColormap(colours)
    bar = figure.colorbar(
        ScalarMappable(norm, listed), ax=panels, ticks=range(num_regions), aspect=30, pad=0.015
    )
    bar.set_label("region: stage of birth")
    bar.ax.tick_params(which="both", length=0)
    bar.outline.set_visible(False)

"""Figures over steps: norms and rate factors of regions (`rates.csv`), and statistics of layers (`layers.csv`).

The figures of layers are those of Chang et al. 2020, Section 5.1 and Appendix B.1, without biases (in brackets: with
biases). Before, during and at the end of training: activations 1, 7, 8 (18, 19, 20); gradients 9, 10, 11 (21, 22, 23);
outputs of the hypernetwork's last layer, which are the weights, 12, 2, 13 (24, 25, 26); gradients by these 14, 15, 16
(27, 28, 29). Loss and accuracy: 3 (17).
"""

import difflib
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from growlab.base.errors import UserError
from growlab.lab.analysis import style
from growlab.lab.analysis.results import Run

_MOST_RUNS = 3
_NORMS = {"weight_norm": "weight norm", "grad_norm": "gradient norm"}
QUANTITIES = {
    "activation": "activations",
    "gradient": "gradients by activations",
    "weight": "weights",
    "weight_gradient": "gradients by weights",
}
# Half-width of a histogram's axis, in standard deviations of its widest layer.
_REACH = 3.5
# A histogram is drawn if a standard deviation spans at least this many bins.
_FEWEST_BINS = 2
# Held-out images behind each accuracy of layers.csv (Chang et al. 2020, Appendix B.1).
_IMAGES = 300
# Names of overrides; that of an initialisation is its value.
_WORDS = {
    "model.sharing=none": "classical",
    "model.biases=true": "with biases",
    "model.network.activation=relu": "ReLU",
    "model.gain=2": "gain 2",
}


def _shades(number: int) -> np.ndarray:
    return matplotlib.colormaps[style.STAGE_MAP](np.linspace(0.0, 0.9, number))


def has_rate_factors(run: Run) -> bool:
    """True if the run recorded rate factors; without rate adaptation, `rates.csv` has norms only."""
    adapted = run.results.get("lr_adapt") != "none"
    return adapted and run.rates is not None and bool(run.rates["rate_factor"].notna().any())


@style.styled()
def rate_factors(run: Run, parameters: Sequence[str] | None = None) -> Figure:
    """Draw each region's rate factor over epochs: the median, then `parameters` (default: first, middle, last)."""
    if not has_rate_factors(run):
        raise UserError(f"{run.path} has no rate factors: it was run without rate adaptation (lr_adapt=none).")
    rates = _over_epochs(run)
    parameters = _checked(run, rates, parameters or _first_middle_last(rates))
    num_panels = len(parameters) + 1
    num_rows = math.ceil(num_panels / 2)
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
            factors, colour = part.groupby("x")["rate_factor"], colours[int(region)]
            middle = factors.median()
            axes.plot(middle.index, middle, color=colour, linewidth=1.2)
            if name is None:
                quartiles = factors.quantile(0.25), factors.quantile(0.75)
                axes.fill_between(middle.index, *quartiles, color=colour, alpha=0.12, linewidth=0)
        axes.set_title(name or "median over parameters (band: quartiles)", loc="left")
        axes.set_ylabel("rate factor")
    for axes in panels[: num_panels - 2]:
        axes.set_xlabel("")
    _region_bar(figure, panels[:num_panels], colours)
    return figure


@style.styled()
def region_norms(runs: Sequence[Run], parameters: Sequence[str] | None = None) -> Figure:
    """Draw the Frobenius norms of weights (above) and gradients (below) of every region over epochs.

    Regions are the paper's sub-components: the elements of a weight that were added at one stage. With one run, columns
    are parameters; with two or three, such as with and without rate adaptation, columns are runs and show one
    parameter. A row shares its logarithmic axis.
    """
    if len(runs) > _MOST_RUNS:
        raise UserError(f"norms shows at most {_MOST_RUNS} runs, not {len(runs)}: name fewer.")
    tables = [_over_epochs(run) for run in runs]
    if len(runs) == 1:
        names = list(parameters or _first_middle_last(tables[0]))
        columns = [(runs[0], tables[0], name, name) for name in names]
    elif parameters and len(parameters) > 1:
        raise UserError("norms of several runs shows one parameter: give --parameter once.")
    else:
        (name,) = parameters or [_first_middle_last(tables[0])[1]]
        titles = _titles(runs)
        columns = [(run, table, name, title) for run, table, title in zip(runs, tables, titles, strict=True)]
    for run, table, name, _ in columns:
        _checked(run, table, [name])
    # Older runs recorded no gradients.
    quantities = [q for q in _NORMS if all(q in table and (table[q] > 0).any() for table in tables)]
    if not quantities:
        raise UserError(f"{runs[0].path}: rates.csv has no norms to draw.")
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
    """Return `rates.csv` with completed epochs, interpolated between the steps of epoch ends, in the column x."""
    rates, metrics = run.rates, run.metrics
    if rates is None:
        raise UserError(f"{run.path} has no rates.csv, so there are no rates or norms of regions to draw.")
    return rates.assign(x=np.interp(rates["step"], [0, *metrics["step"]], [0, *(metrics["epoch"] + 1)]))


def _first_middle_last(rates: pandas.DataFrame) -> list[str]:
    known = list(dict.fromkeys(rates["parameter"]))
    return [known[i] for i in dict.fromkeys((0, len(known) // 2, len(known) - 1))]


def _checked(run: Run, rates: pandas.DataFrame, parameters: Sequence[str]) -> Sequence[str]:
    known = set(rates["parameter"])
    for name in parameters:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, cutoff=0.0)[0]
            raise UserError(f"{run.path} has no rates of {name}; did you mean {near}?")
    return parameters


def _titles(runs: Sequence[Run]) -> list[str]:
    overrides = [set(run.group.overrides) if run.results else set() for run in runs]
    shared, folders = set.intersection(*overrides), [run.path.name for run in runs]
    names = [
        style.display_name(run.group.name_without(shared)) if run.results else folder
        for run, folder in zip(runs, folders, strict=True)
    ]
    return [textwrap.fill(name, 36) for name in (names if len(set(names)) == len(names) else folders)]


def _region_colours(rates: pandas.DataFrame) -> np.ndarray:
    """Return one colour per stage of birth."""
    num_regions = int(rates["region"].max()) + 1
    return _shades(max(num_regions, 2))[:num_regions]


def _begin(axes: Axes, run: Run, num_ticks: int = 9) -> None:
    style.mark_growth(axes, run.growth_epochs)
    style.epoch_axis(axes, float(run.metrics["epoch"].iloc[-1]) + 1, num_ticks)


def _region_bar(figure: Figure, panels: Sequence[Axes], colours: np.ndarray) -> None:
    norm = BoundaryNorm(np.arange(len(colours) + 1) - 0.5, len(colours))
    mapped = ScalarMappable(norm, ListedColormap(colours))
    bar = figure.colorbar(mapped, ax=panels, ticks=range(len(colours)), aspect=30, pad=0.015)
    bar.set_label("region: stage of birth")
    bar.ax.tick_params(which="both", length=0)
    bar.outline.set_visible(False)


@style.styled()
def loss_over_steps(runs: Sequence[Run]) -> Figure:
    """Draw loss and accuracy over steps, one colour per run.

    Lines are the loss (left) and accuracy (right) on the held-out images of `layers.csv`, markers the mean training
    loss of each epoch. The band is one standard error of the accuracy on 300 images.
    """
    figure, names = style.new_figure(7.0, 2.9), labels(runs)
    left, right = figure.subplots(1, 2)
    for line, run, name in zip(_line_styles(names), runs, names, strict=True):
        marker, losses = line.pop("marker"), run.curve("train_loss")
        held_out = _quantity(run, "loss")
        left.plot(held_out["step"], held_out["mean"], **line)
        if losses is not None:
            # Draw an epoch's mean at its middle.
            ends = run.metrics["step"].to_numpy(dtype=float)
            middles = ends - np.diff(ends, prepend=0.0) / 2
            left.plot(middles, losses, **(line | {"linestyle": "none"}), marker=marker, markersize=4.5)
        rows = _quantity(run, "accuracy")
        share = rows["mean"].to_numpy()
        error = np.sqrt(share * (1 - share) / _IMAGES)
        right.plot(rows["step"], 100 * share, **line, label=name)
        shade = (100 * (share - error), 100 * (share + error))
        right.fill_between(rows["step"], *shade, color=line["color"], alpha=0.15, linewidth=0)
    low, high = left.get_ylim()
    if high > 10 * max(low, 1e-9) and all(min(line.get_ydata(), default=1) > 0 for line in left.lines):
        style.log_axis(left)
    left.set_ylabel("loss")
    right.set_ylabel("held-out accuracy (%)")
    for axes in (left, right):
        axes.set_xlabel("step")
    kinds = {
        "held-out": Line2D([], [], color="0.5"),
        "training, mean of an epoch": Line2D([], [], color="0.5", marker="o", linestyle="none"),
    }
    handles, texts = right.get_legend_handles_labels()
    note = f"one run each; band: one standard error of the accuracy on {_IMAGES} images"
    columns = min(4, len(runs) + 2)
    style.legend_below(figure, [*handles, *kinds.values()], [*texts, *kinds], columns, note=note)
    return figure


def _quantity(run: Run, quantity: str) -> pandas.DataFrame:
    return run.layers[run.layers["quantity"] == quantity]


def labels(runs: Sequence[Run]) -> list[str]:
    """Return a short name per run: the overrides of its network that not all runs share."""
    overrides = [[o for o in run.results.get("overrides", ()) if o.startswith("model")] for run in runs]
    shared = set.intersection(*(set(of_run) for of_run in overrides)) if len(runs) > 1 else set()
    names = []
    for run, own in zip(runs, overrides, strict=True):
        parts = [override for override in own if override not in shared and not override.startswith("model=")]
        values = [_WORDS.get(o, o.removeprefix("model.initialisation=").removeprefix("model.")) for o in parts]
        names.append(", ".join(values) or str(run.results.get("model", run.path.name)))
    return names


def _line_styles(names: Sequence[str]) -> list[dict[str, Any]]:
    """Return `style.line_styles` with alternating dashes, because lines of hypernetworks often coincide."""
    dashes = style.DASHES * len(names)
    return [line | {"linestyle": dashes[index]} for index, line in enumerate(style.line_styles(names))]


@style.styled()
def histograms(runs: Sequence[Run], quantity: str, at_end: bool) -> Figure:
    """Draw a panel of histograms per run, and a panel of all standard deviations, which the histograms' axes hide."""
    tables, names, columns = [_of_step(run, quantity, at_end) for run in runs], labels(runs), 2
    rows = math.ceil((len(runs) + 1) / columns)
    # If the runs fill their rows, the last panel has a row of its own and room for a wider legend.
    legend_columns = 1 if len(runs) % columns else 2 if max(map(len, names)) > 30 else min(4, len(runs))
    num_lines = math.ceil(len(runs) / legend_columns)
    figure = style.new_figure(3.5 * columns, 0.7 + 2.2 * rows + 0.12 * num_lines)
    grid = figure.add_gridspec(rows, columns)
    places = [grid[index // columns, index % columns] for index in range(len(runs))]
    # The last panel takes the rest of its row.
    places.append(grid[len(runs) // columns, len(runs) % columns :])
    *panels, last = (figure.add_subplot(place) for place in places)
    layers = list(dict.fromkeys(layer for table in tables for layer in table.index))
    colours = dict(zip(layers, _shades(len(layers)), strict=True))
    shown: dict[str, Any] = {}
    for axes, table, name in zip(panels, tables, names, strict=True):
        omitted = _draw_histograms(axes, table, colours)
        heavy = f" (too heavy-tailed to show: {', '.join(omitted)})" if omitted else ""
        axes.set(title="\n".join(textwrap.wrap(name + heavy, 58)), xlabel=QUANTITIES[quantity])
        shown = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True)) | shown
    for line, table, name in zip(_line_styles(names), tables, names, strict=True):
        positive = table["std"].where(table["std"] > 0)
        last.plot([layers.index(layer) for layer in table.index], positive, **line, label=name)
    last.set_xticks(range(len(layers)), layers, rotation=20, ha="right")
    style.log_axis(last)
    last.set(ylabel="standard deviation", xlabel="layer")
    # The legend takes the place of a title.
    place: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": legend_columns}
    last.legend(fontsize=6.5, **place, handlelength=3)
    order = sorted(shown, key=layers.index)
    note = "histograms: a colour a layer, one run each"
    style.legend_below(figure, [shown[name] for name in order], order, min(6, len(order)), 1.6, note=note)
    when = "at the end of training" if at_end else "before training"
    figure.suptitle(f"{QUANTITIES[quantity]} {when}", fontsize=9)
    return figure


def _of_step(run: Run, quantity: str, at_end: bool) -> pandas.DataFrame:
    """Return a quantity's records at the first or last step, indexed by layer."""
    table = _quantity(run, quantity)
    step = table["step"].max() if at_end else table["step"].min()
    return table[table["step"] == step].set_index("layer")


def _draw_histograms(axes: Axes, table: pandas.DataFrame, colours: Mapping[str, Any]) -> list[str]:
    """Draw histograms with peaks of 1; return the layers left out because their deviation spans too few bins."""
    omitted, shown = [], []
    for layer, row in table.iterrows():
        if not isinstance(row["counts"], str):
            continue
        counts = np.array([int(count) for count in row["counts"].split("|")], dtype=float)
        edges = np.linspace(row["low"], row["high"], len(counts) + 1)
        if row["std"] < _FEWEST_BINS * (edges[1] - edges[0]):
            omitted.append(str(layer))
            continue
        shown.append(float(row["std"]))
        axes.stairs(counts / counts.max(), edges, color=colours[str(layer)], label=str(layer), linewidth=1)
    if shown:
        axes.set_xlim(-_REACH * max(shown), _REACH * max(shown))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set(ylim=(0, 1.05), ylabel="frequency (peak = 1)")
    return omitted


@style.styled()
def deviations(runs: Sequence[Run], quantity: str) -> Figure:
    """Draw a quantity's standard deviations over steps: one panel per run, one line per layer, equal scales.

    The title states the largest mean, relative to its standard deviation.
    """
    columns = min(2, len(runs))
    rows = math.ceil(len(runs) / columns)
    tables = [_quantity(run, quantity) for run in runs]
    layers = list(dict.fromkeys(layer for table in tables for layer in table["layer"]))
    colours = dict(zip(layers, _shades(len(layers)), strict=True))
    figure = style.new_figure(3.5 * columns, 0.7 + 1.9 * rows)
    panels = list(figure.subplots(rows, columns, squeeze=False, sharey=True, sharex=True).flat)
    for axes in panels[len(runs) :]:
        axes.set_visible(False)
    for index, (axes, table, name) in enumerate(zip(panels, tables, labels(runs), strict=False)):
        for layer, of_layer in table.groupby("layer", sort=False):
            positive = of_layer["std"].where(of_layer["std"] > 0)
            axes.plot(of_layer["step"], positive, color=colours[layer], label=layer, linewidth=1.2)
        axes.set(title=name, xlabel="step" if index + columns >= len(runs) else "")
        axes.set(ylabel="standard deviation" if index % columns == 0 else "")
    style.log_axis(panels[0])
    handles, texts = panels[0].get_legend_handles_labels()
    style.legend_below(figure, handles, texts, min(6, len(layers)), 1.6, note="one run each")
    ratios = [abs(table["mean"]) / table["std"].where(table["std"] > 0) for table in tables]
    most = float(np.nanmax(np.concatenate([ratio.to_numpy(dtype=float) for ratio in ratios])))
    figure.suptitle(f"{QUANTITIES[quantity]}; no mean is above {most:.2g} deviations", fontsize=9)
    return figure

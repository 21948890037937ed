"""What went on in each layer of runs: histograms before training and means with bars over it, from `layers.csv`.

They are the figures of Chang et al. 2020: activations before training (1), emitted weights over training (2), loss and
accuracy (3), gradients before training (9), emitted weights before training (12).
"""

import math
from collections.abc import Callable, Sequence

import matplotlib
import numpy as np
import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from growlab.analysis import style
from growlab.analysis.results import Run
from growlab.errors import UserError

QUANTITIES = {
    "activation": "activations",
    "gradient": "gradients by activations",
    "weight": "weights",
    "weight_gradient": "gradients by weights",
}
# Half the width of a histogram's axis, in standard deviations of its widest layer.
_REACH = 3.5


def at_start(quantity: str) -> Callable[[Sequence[Run]], Figure]:
    """A function that draws a quantity's histograms before training: a panel a run, a line a layer."""

    def draw(runs: Sequence[Run]) -> Figure:
        return _panels(runs, f"{QUANTITIES[quantity]} before training", _histograms, quantity)

    return draw


def over_training(quantity: str) -> Callable[[Sequence[Run]], Figure]:
    """A function that draws a quantity's means over steps, bars of one standard deviation: a panel a run."""

    def draw(runs: Sequence[Run]) -> Figure:
        return _panels(runs, f"{QUANTITIES[quantity]}: mean and standard deviation", _evolution, quantity)

    return draw


def loss_over_steps(runs: Sequence[Run]) -> Figure:
    """Loss and accuracy on the held-out images of `layers.csv` over steps, a line a run."""
    names = labels(runs)
    with style.styled():
        figure = style.new_figure(7.0, 2.9)
        for axes, quantity, scale in zip(figure.subplots(1, 2), ("loss", "accuracy"), (1, 100), strict=True):
            for index, (run, name) in enumerate(zip(runs, names, strict=True)):
                table = read(run)
                rows = table[table["quantity"] == quantity]
                colour, dashes = (
                    style.PALETTE[index % len(style.PALETTE)],
                    style.DASHES[index % len(style.DASHES)],
                )
                axes.plot(rows["step"], scale * rows["mean"], color=colour, linestyle=dashes, label=name)
            axes.set_xlabel("step")
            axes.set_ylabel("held-out loss" if quantity == "loss" else "held-out accuracy (%)")
        handles, texts = figure.axes[0].get_legend_handles_labels()
        style.legend_below(figure, handles, texts, min(4, len(runs)))
    return figure


def read(run: Run) -> pandas.DataFrame:
    """A run's `layers.csv`.

    Raises:
        UserError: the run did not record it, or it is not such a table.
    """
    path = run.path / "layers.csv"
    if not path.is_file():
        raise UserError(f"{run.path} has no layers.csv; train with log_layers_every_n_steps=N.")
    table = pandas.read_csv(path)
    missing = {"step", "layer", "quantity", "mean", "std", "low", "high", "counts"} - set(table.columns)
    if missing:
        raise UserError(f"{path} has no column {sorted(missing)[0]}: it is not a table of layers.")
    return table


def labels(runs: Sequence[Run]) -> list[str]:
    """A short name for each run: the values of the overrides that it does not share with all others."""
    overrides = [[o for o in run.results.get("overrides", ()) if o.startswith("model")] for run in runs]
    shared = set.intersection(*(set(of_run) for of_run in overrides)) if len(runs) > 1 else set()
    names = []
    for run, own in zip(runs, overrides, strict=True):
        parts = [override for override in own if override not in shared and not override.startswith("model=")]
        short = {"model.sharing=none": "classical"}
        values = [
            short.get(part, part.removeprefix("model.initialisation=").removeprefix("model."))
            for part in parts
        ]
        names.append(", ".join(values) or str(run.results.get("model", run.path.name)))
    return names


def _panels(
    runs: Sequence[Run],
    what: str,
    draw: Callable[[Axes, pandas.DataFrame, list[str], list], None],
    quantity: str,
) -> Figure:
    columns = min(2, len(runs))
    rows = math.ceil(len(runs) / columns)
    tables = [read(run) for run in runs]
    with style.styled():
        figure = style.new_figure(3.5 * columns, 0.7 + 2.1 * rows)
        panels = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes in panels[len(runs) :]:
            axes.set_visible(False)
        for axes, table, name in zip(panels, tables, labels(runs), strict=False):
            of_quantity = table[table["quantity"] == quantity]
            layers = list(dict.fromkeys(of_quantity["layer"]))
            colours = matplotlib.colormaps[style.STAGE_MAP](np.linspace(0.0, 0.9, len(layers)))
            draw(axes, of_quantity, layers, list(colours))
            axes.set_title(name)
        handles, texts = panels[0].get_legend_handles_labels()
        style.legend_below(figure, handles, texts, min(6, len(texts)), handle_length=1.6)
        figure.suptitle(what, fontsize=9)
    return figure


def _histograms(axes: Axes, table: pandas.DataFrame, layers: list[str], colours: list) -> None:
    first = table[table["step"] == table["step"].min()].set_index("layer")
    reach = _REACH * float(first["std"].max())
    for layer, colour in zip(layers, colours, strict=True):
        row = first.loc[layer]
        if not isinstance(row["counts"], str):
            continue
        counts = np.array([int(count) for count in row["counts"].split("|")], dtype=float)
        edges = np.linspace(row["low"], row["high"], len(counts) + 1)
        axes.stairs(counts / counts.max(), edges, color=colour, label=layer, linewidth=1)
    axes.set_xlim(-reach, reach)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("frequency (peak = 1)")


def _evolution(axes: Axes, table: pandas.DataFrame, layers: list[str], colours: list) -> None:
    steps = np.unique(table["step"])
    gap = float(np.diff(steps).min()) if len(steps) > 1 else 1.0
    for index, (layer, colour) in enumerate(zip(layers, colours, strict=True)):
        rows = table[table["layer"] == layer]
        # Beside one another, so that no bar covers another.
        shift = gap * 0.6 * ((index + 0.5) / len(layers) - 0.5)
        axes.errorbar(
            rows["step"] + shift,
            rows["mean"],
            rows["std"],
            color=colour,
            label=layer,
            linewidth=0.9,
            elinewidth=0.7,
        )
    axes.set_xlabel("step")
    axes.set_ylabel("mean ± one deviation")

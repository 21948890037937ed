"""Layer statistics of runs: histograms before and after training, deviations over it, from `layers.csv`.

They are the figures of Chang et al. 2020, Section 5.1 and Appendix B.1, without biases (in brackets: with them):
activations before training 1 (18), over it 7 (19), at its end 8 (20); gradients 9, 10, 11 (21, 22, 23); what the output
layer of the hypernetwork puts out, which are the weights, 12, 2, 13 (24, 25, 26); gradients by these 14, 15, 16
(27, 28, 29); loss and accuracy 3 (17).
"""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from growlab.base.errors import UserError
from growlab.lab.analysis import style
from growlab.lab.analysis.results import Run

QUANTITIES = {
    "activation": "activations",
    "gradient": "gradients by activations",
    "weight": "weights",
    "weight_gradient": "gradients by weights",
}
# Half the width of a histogram's axis, in standard deviations of its widest layer.
_REACH = 3.5
# A histogram shows a shape if a standard deviation spans so many of its bins.
_FEWEST_BINS = 2
# Held-out images behind each accuracy of layers.csv (Chang et al. 2020, Appendix B.1).
_IMAGES = 300


# Overrides in words; an initialisation is called by its name.
_WORDS = {
    "model.sharing=none": "classical",
    "model.biases=true": "with biases",
    "model.network.activation=relu": "ReLU",
    "model.gain=2": "gain 2",
}


def at_start(quantity: str) -> Callable[[Sequence[Run]], Figure]:
    """A function that draws a quantity's histograms before training and the deviation of each layer."""
    return lambda runs: _histograms(runs, quantity, at_end=False)


def at_end(quantity: str) -> Callable[[Sequence[Run]], Figure]:
    """A function that draws the same at the end of training."""
    return lambda runs: _histograms(runs, quantity, at_end=True)


def over_training(quantity: str) -> Callable[[Sequence[Run]], Figure]:
    """A function that draws a quantity's deviations over steps: a panel a run, a line a layer, equal scales."""
    return lambda runs: _deviations(runs, quantity)


def loss_over_steps(runs: Sequence[Run]) -> Figure:
    """Loss and accuracy over steps, a colour a run.

    Lines are the loss (left) and accuracy (right) on the held-out images of `layers.csv`; markers the training loss,
    the mean of each epoch. The band is one standard error, which is what 300 images leave open.
    """
    with style.styled():
        figure = style.new_figure(7.0, 2.9)
        left, right = figure.subplots(1, 2)
        for look, (run, name) in zip(_looks(labels(runs)), zip(runs, labels(runs), strict=True), strict=True):
            table = read(run)
            marker = look.pop("marker")
            held_out, losses = table[table["quantity"] == "loss"], run.curve("train_loss")
            left.plot(held_out["step"], held_out["mean"], **look)
            if losses is not None:
                # An epoch's mean belongs to its middle.
                ends = run.metrics["step"].to_numpy(dtype=float)
                middles = ends - np.diff(ends, prepend=0.0) / 2
                left.plot(middles, losses, **(look | {"linestyle": "none"}), marker=marker, markersize=4.5)
            rows = table[table["quantity"] == "accuracy"]
            share = rows["mean"].to_numpy()
            error = np.sqrt(share * (1 - share) / _IMAGES)
            right.plot(rows["step"], 100 * share, **look, label=name)
            shade = (100 * (share - error), 100 * (share + error))
            right.fill_between(rows["step"], *shade, color=look["color"], alpha=0.15, linewidth=0)
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
        handles, names = right.get_legend_handles_labels()
        note = f"one run each; band: one standard error of the accuracy on {_IMAGES} images"
        style.legend_below(
            figure, [*handles, *kinds.values()], [*names, *kinds], min(4, len(runs) + 2), note=note
        )
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
    """A short name for each run: what it does not share with all others."""
    overrides = [[o for o in run.results.get("overrides", ()) if o.startswith("model")] for run in runs]
    shared = set.intersection(*(set(of_run) for of_run in overrides)) if len(runs) > 1 else set()
    names = []
    for run, own in zip(runs, overrides, strict=True):
        parts = [override for override in own if override not in shared and not override.startswith("model=")]
        values = [
            _WORDS.get(part, part.removeprefix("model.initialisation=").removeprefix("model."))
            for part in parts
        ]
        names.append(", ".join(values) or str(run.results.get("model", run.path.name)))
    return names


def _looks(names: Sequence[str]) -> list[dict[str, Any]]:
    """Those of the methods, and dashes in turn: lines of hypernetworks often lie on one another."""
    return [
        look | {"linestyle": style.DASHES[index % len(style.DASHES)]}
        for index, look in enumerate(style.looks(names))
    ]


def _histograms(runs: Sequence[Run], quantity: str, at_end: bool) -> Figure:
    """A panel of histograms a run, and one of the standard deviations of all, which a histogram's axis hides."""
    tables = [_of_step(run, quantity, at_end) for run in runs]
    columns = 2
    rows = math.ceil((len(runs) + 1) / columns)
    with style.styled():
        names = labels(runs)
        # A whole row leaves the last panel one for itself.
        legend_columns = 1 if len(runs) % columns else 2 if max(map(len, names)) > 30 else min(4, len(runs))
        num_lines = math.ceil(len(runs) / legend_columns)
        figure = style.new_figure(3.5 * columns, 0.7 + 2.2 * rows + 0.12 * num_lines)
        grid = figure.add_gridspec(rows, columns)
        places = [grid[index // columns, index % columns] for index in range(len(runs))]
        # The last panel takes the rest of its row.
        places.append(grid[len(runs) // columns, len(runs) % columns :])
        panels = [figure.add_subplot(place) for place in places]
        layers = list(dict.fromkeys(layer for table in tables for layer in table.index))
        colours = dict(zip(layers, _shades(len(layers)), strict=True))
        for axes, table, name in zip(panels, tables, names, strict=False):
            unresolved = _draw_histograms(axes, table, colours)
            told = f" (too heavy-tailed to show: {', '.join(unresolved)})" if unresolved else ""
            axes.set_title("\n".join(textwrap.wrap(name + told, 58)))
            axes.set_xlabel(QUANTITIES[quantity])
        handles, texts = panels[0].get_legend_handles_labels()
        for axes in panels[1 : len(runs)]:
            for handle, text in zip(*axes.get_legend_handles_labels(), strict=True):
                if text not in texts:
                    handles.append(handle)
                    texts.append(text)
        order = sorted(range(len(texts)), key=lambda index: layers.index(texts[index]))
        last = panels[len(runs)]
        for look, table, name in zip(_looks(names), tables, names, strict=True):
            positive = table["std"].where(table["std"] > 0)
            last.plot([layers.index(layer) for layer in table.index], positive, **look, label=name)
        last.set_xticks(range(len(layers)), layers, rotation=20, ha="right")
        style.log_axis(last)
        last.set_ylabel("standard deviation")
        last.set_xlabel("layer")
        # In place of a title.
        last.legend(
            fontsize=6.5, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=legend_columns, handlelength=3
        )
        style.legend_below(
            figure,
            [handles[i] for i in order],
            [texts[i] for i in order],
            min(6, len(texts)),
            1.6,
            note="histograms: a colour a layer, one run each",
        )
        when = "at the end of training" if at_end else "before training"
        figure.suptitle(f"{QUANTITIES[quantity]} {when}", fontsize=9)
    return figure


def _of_step(run: Run, quantity: str, at_end: bool) -> pandas.DataFrame:
    """A quantity's rows of the first or the last step, by layer."""
    table = read(run)
    table = table[table["quantity"] == quantity]
    step = table["step"].max() if at_end else table["step"].min()
    return table[table["step"] == step].set_index("layer")


def _draw_histograms(axes: Axes, table: pandas.DataFrame, colours: Mapping[str, Any]) -> list[str]:
    """Draw them, the peak of each at 1; returns the layers whose deviation spans too few bins."""
    unresolved, shown = [], []
    for layer, row in table.iterrows():
        if not isinstance(row["counts"], str):
            continue
        counts = np.array([int(count) for count in row["counts"].split("|")], dtype=float)
        edges = np.linspace(row["low"], row["high"], len(counts) + 1)
        if row["std"] < _FEWEST_BINS * (edges[1] - edges[0]):
            unresolved.append(str(layer))
            continue
        shown.append(float(row["std"]))
        axes.stairs(counts / counts.max(), edges, color=colours[str(layer)], label=str(layer), linewidth=1)
    if shown:
        reach = _REACH * max(shown)
        axes.set_xlim(-reach, reach)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("frequency (peak = 1)")
    return unresolved


def _deviations(runs: Sequence[Run], quantity: str) -> Figure:
    """A panel a run; the title tells how far from 0 means are, which the lines leave out."""
    columns = min(2, len(runs))
    rows = math.ceil(len(runs) / columns)
    tables = [read(run) for run in runs]
    tables = [table[table["quantity"] == quantity] for table in tables]
    layers = list(dict.fromkeys(layer for table in tables for layer in table["layer"]))
    colours = dict(zip(layers, _shades(len(layers)), strict=True))
    with style.styled():
        figure = style.new_figure(3.5 * columns, 0.7 + 1.9 * rows)
        panels = list(figure.subplots(rows, columns, squeeze=False, sharey=True, sharex=True).flat)
        for axes in panels[len(runs) :]:
            axes.set_visible(False)
        for index, (axes, table, name) in enumerate(zip(panels, tables, labels(runs), strict=False)):
            for layer, of_layer in table.groupby("layer", sort=False):
                positive = of_layer["std"].where(of_layer["std"] > 0)
                axes.plot(of_layer["step"], positive, color=colours[layer], label=layer, linewidth=1.2)
            axes.set_title(name)
            axes.set_xlabel("step" if index + columns >= len(runs) else "")
            axes.set_ylabel("standard deviation" if index % columns == 0 else "")
        style.log_axis(panels[0])
        handles = panels[0].get_legend_handles_labels()
        style.legend_below(figure, *handles, min(6, len(layers)), 1.6, note="one run each")
        ratios = [abs(table["mean"]) / table["std"].where(table["std"] > 0) for table in tables]
        most = float(np.nanmax(np.concatenate([ratio.to_numpy(dtype=float) for ratio in ratios])))
        figure.suptitle(f"{QUANTITIES[quantity]}; no mean is above {most:.2g} deviations", fontsize=9)
    return figure


def _shades(number: int) -> list[Any]:
    return list(matplotlib.colormaps[style.STAGE_MAP](np.linspace(0.0, 0.9, number)))

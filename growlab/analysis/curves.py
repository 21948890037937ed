"""A run's learning curves.

Every figure's x axis counts epochs done: the values of `metrics.csv`'s epoch e (from 0) stand at e + 1, and a
growth event at the beginning of epoch e stands at e, between the epoch before it and the one after it.
"""

import math

import numpy as np
from matplotlib.figure import Figure

from growlab.analysis import style
from growlab.analysis.results import Run


def learning_curves(run: Run) -> Figure:
    """Loss and accuracy over epochs: training, validation or the test set where watched, and the final test value.

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
                ("val", "validation", style.PALETTE[1], style.DASHES[1], "s"),
                ("test", "test, watched", style.PALETTE[1], style.DASHES[1], "s"),
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

"""A run's learning curves.

Every figure's x axis counts epochs done: the values of `metrics.csv`'s epoch e (from 0) stand at e + 1, and a
growth event at the beginning of epoch e stands at e, between the epoch before it and the one after it.
"""

import math

import numpy as np
from matplotlib.figure import Figure

from growlab.lab.analysis import style
from growlab.lab.analysis.metrics import ACCURACY, Metric, metric_of
from growlab.lab.analysis.results import Run


def learning_curves(run: Run) -> Figure:
    """Loss and the task's metric over epochs: training, validation or the test set where watched, and the test value.

    Raises:
        UserError: the run has no metrics.
    """
    metrics = run.metrics
    x = metrics["epoch"].to_numpy() + 1
    with style.styled():
        metric = metric_of([run.results])
        if all(run.curve(f"{split}_{metric.key}") is None for split in ("train", "val", "test")):
            metric = ACCURACY
        shown = [Metric("loss", "loss", higher_is_better=False), *([] if metric.key == "loss" else [metric])]
        figure = style.new_figure(5.2, 0.3 + 2.0 * len(shown))
        panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
        for axes, one in zip(panels, shown, strict=True):
            quantity, scale = one.key, one.scale
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
                value = f"{one.text(test)} {one.unit}".strip()
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
            axes.set_ylabel(one.name + (f" ({one.unit})" if one.unit else ""))
            if axes.get_legend_handles_labels()[0]:
                axes.legend(loc="lower right" if one.higher_is_better else "upper right")
        style.epoch_axis(panels[-1], x[-1])
        labels = style.label_stages(panels[0], run, x[-1])
        style.thin_out(figure, labels[:-1])
    return figure

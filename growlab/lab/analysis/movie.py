"""A moving picture of one run: the network's shape and its metric over epochs."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from PIL import Image

from growlab.base.errors import UserError
from growlab.base.files import write_atomically
from growlab.lab.analysis import style
from growlab.lab.analysis.results import Run, metric_of
from growlab.lab.analysis.width_figures import draw_silhouette, rows_of_groups

_FRAMES, _FADE = 60, 5  # frames of the training; frames in which new channels take the colour of old ones
_FRAME_MS, _END_MS = 100, 2500
_AGES = LinearSegmentedColormap.from_list("ages", [style.PALETTE[1], style.PALETTE[0]])


def save_movie(run: Run, path: str | os.PathLike[str]) -> Path:
    """Write a GIF of a run: its silhouette stage by stage, new channels in colour, next to the held-out metric."""
    if Path(path).suffix.lower() != ".gif":
        raise UserError(f"cannot write a movie to {path}: its name must end in .gif.")
    (first, *others), times = zip(*_frames(run), strict=True)
    options = {"save_all": True, "append_images": others, "duration": [*times[:-1], _END_MS], "loop": 0}
    write_atomically(path, lambda file: first.save(file, format="GIF", **options))
    return Path(path)


def _frames(run: Run) -> Iterator[tuple[Image.Image, int]]:
    """Yield (picture, milliseconds)."""
    metric, epochs = metric_of([run.results]), run.metrics["epoch"].to_numpy() + 1.0
    curves = (run.curve(f"{split}_{metric.key}") for split in ("val", "test", "train"))
    values = next((metric.scale * curve for curve in curves if curve is not None), None)
    if values is None:
        raise UserError(f"a movie needs a run with a curve of its {metric.name}.")
    rows, events = rows_of_groups(run), np.asarray(run.growth_epochs)
    times = np.linspace(0, epochs[-1], _FRAMES)
    stages = np.searchsorted(events, times, side="right").tolist()
    known = np.isfinite(values)
    margin = 0.05 * np.ptp(values[known])
    born = [stages.index(stage) for stage in stages]
    fades = [min(frame - first, _FADE) / _FADE for frame, first in enumerate(born)]
    points = np.searchsorted(epochs, times, side="right").tolist()
    for (stage, fade, seen), equal in itertools.groupby(zip(stages, fades, points, strict=True)):
        with style.styled():
            # An engine would move the axes between frames.
            figure = Figure(figsize=(6.4, 2.6), layout="none")  # type: ignore[arg-type]
            figure.subplots_adjust(left=0.08, right=0.97, bottom=0.19, top=0.88, wspace=0.28)
            shape, curve = figure.subplots(1, 2, width_ratios=[2, 3])
            draw_silhouette(shape, rows, stage, new=_AGES(fade))
            shape.set_ylim(len(rows) - 0.4, -0.6)
            shape.set_yticks([0, len(rows) - 1], ["input", "output"])
            shape.set_xticks([])
            shape.tick_params(length=0)
            shape.spines[:].set_visible(False)
            shape.set_title(f"stage {stage}: {run.results['stages'][stage]['num_params']:,} parameters")
            style.mark_growth(curve, events[:stage].tolist())
            shown = known[:seen]
            curve.plot(epochs[:seen][shown], values[:seen][shown], marker="o", color=style.PALETTE[0], clip_on=False)
            curve.set(xlim=(0, epochs[-1]), ylim=(values[known].min() - margin, values[known].max() + margin))
            curve.set(xlabel="epoch", ylabel=f"{metric.name} ({metric.unit})" if metric.unit else metric.name)
            canvas = FigureCanvasAgg(figure)
            canvas.draw()
            picture = Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy())
        yield picture.quantize(64, dither=Image.Dither.NONE), _FRAME_MS * len(list(equal))

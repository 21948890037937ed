"""Style of figures: palette, growth events, labels without overlap; `growlab.mplstyle` has matplotlib's settings."""

import csv
import io
import itertools
import math
import os
import re
import textwrap
from collections.abc import Collection, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import matplotlib.style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from growlab.base.errors import UserError
from growlab.base.files import write_atomically

# Okabe and Ito (2008) without yellow, which vanishes on white paper, then two of Tol's muted colours. Black is for
# fixed-size networks.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#882255", "#44AA99")
FIXED_SIZE = ("#000000", "#777777")
_GREYS = ("black", "grey")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h", "<", ">")
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
HATCHES = ("", "////", "....", "xxxx")
# Stages of birth are ordered: a map of growing lightness, which survives grey print.
STAGE_MAP = "viridis"
# gid of the artists that mark growth events, for tests and for restyling an SVG.
EVENT = "growth-event"
# File types. Without a date, the same data give the same file.
_METADATA: dict[str, dict[str, None]] = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def styled() -> Any:
    """Return a context manager and decorator that applies the style sheet and restores global settings afterwards."""
    return matplotlib.style.context("growlab.lab.analysis.growlab")


def new_figure(width_in: float, height_in: float) -> Figure:
    """Return a figure outside pyplot's registry, which needs neither closing nor a display."""
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def check_output(path: str | os.PathLike[str]) -> str:
    """Return the suffix of a figure's path, such as ".png"; raise UserError if it is not supported."""
    suffix = Path(path).suffix.lower()
    if suffix not in _METADATA:
        raise UserError(f"cannot write a figure to {path}: its name must end in {', '.join(_METADATA)}.")
    return suffix


def save(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure atomically, in the format of the path's suffix."""
    suffix, content = check_output(path), io.BytesIO()
    with styled():
        figure.savefig(content, format=suffix[1:], metadata=_METADATA[suffix])
    write_atomically(path, lambda file: file.write(content.getvalue()))
    return Path(path)


def legend_below(
    figure: Figure, handles: Sequence[Artist], names: Sequence[str], columns: int, length: float = 3, note: str = ""
) -> None:
    """Add a legend under the axes in at most `columns` columns, no wider than the figure."""
    title = textwrap.fill(note, max(40, int(17 * figure.get_figwidth())), break_long_words=False) or None
    place: dict[str, Any] = {"loc": "outside lower center", "handlelength": length, "title": title, "title_fontsize": 7}
    for number in range(columns, 0, -1):
        legend = figure.legend(handles, names, ncols=number, **place)
        if number == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


# Patterns in tables' names of methods, and their words in figures.
_WORDS = (
    (r"^ours \+ stagewise_\w+", "ours (variance transfer + rates by age)"),
    (r"\+ stagewise_\w+", "+ rates by age"),
    (r"^ours\b(?! \()", "variance transfer"),
    (r"^fixed-size, fewer blocks\b", "smaller (fewer blocks)"),
    (r"\bschedule\.equal_flops=true\b", "equal FLOPs"),
    (r"\boptimizer_state=", "state "),
)


def display_name(method: str) -> str:
    """Return a method's name for figures: `ours` alone is variance transfer, with rates by region the whole method.

    Examples:
        >>> [display_name(name) for name in ("ours", "ours + stagewise_norm, p_t = 0", "fixed-size, fewer blocks")]
        ['variance transfer', 'ours (variance transfer + rates by age), p_t = 0', 'smaller (fewer blocks)']
        >>> display_name("ours + stagewise_adam"), display_name("pairs + stagewise_norm")
        ('ours (variance transfer + rates by age)', 'pairs + rates by age')
    """
    for pattern, words in _WORDS:
        method = re.sub(pattern, words, method)
    return method


def line_styles(methods: Sequence[str]) -> list[dict[str, Any]]:
    """Return colour, dashes and marker of each curve; a method has the same ones in every figure.

    `colours.csv` maps patterns of names to colours: black for the full network of fixed size, grey for a smaller or
    shorter one, the palette for all others. If several curves map to one colour, the shortest name gets it; the rest,
    and names without a pattern, get the next free one.

    Examples:
        >>> [one["color"] for one in line_styles(["net2net", "fixed-size", "net2net, optimizer.lr=0.1"])]
        ['#D55E00', '#000000', '#0072B2']
    """
    homes = [next((colour for like, colour in _homes() if re.search(like, name)), None) for name in methods]
    # The shortest name gets a shared colour, whatever the order of `methods`.
    plainest_last = sorted(range(len(homes)), key=lambda index: (len(methods[index]), index), reverse=True)
    firsts = {homes[index]: index for index in plainest_last}
    taken = {(home, 0) for home in firsts if home is not None}
    styles = []
    for index, home in enumerate(homes):
        colour, turn = (home, 0) if home is not None and firsts[home] == index else _next_free(home, taken)
        taken.add((colour, turn))
        grey = colour in _GREYS
        marker = _GREYS.index(colour) if grey else len(_GREYS) + int(colour)
        styles.append(
            {
                "color": FIXED_SIZE[_GREYS.index(colour)] if grey else PALETTE[int(colour)],
                "linestyle": DASHES[turn % len(DASHES)],
                "marker": MARKERS[(marker + turn) % len(MARKERS)],
            }
        )
    return styles


@cache
def _homes() -> list[tuple[str, str]]:
    text = resources.files("growlab.lab.analysis").joinpath("colours.csv").read_text(encoding="utf-8")
    return [(line["method"], line["colour"]) for line in csv.DictReader(text.splitlines())]


def _next_free(home: str | None, taken: Collection[tuple[str, int]]) -> tuple[str, int]:
    """Return the next free colour and turn through the dashes; fixed-size networks keep their colour."""
    colours = [home] if home is not None and home in _GREYS else [str(index) for index in range(len(PALETTE))]
    return next((colour, turn) for turn in itertools.count() for colour in colours if (colour, turn) not in taken)


def symbols(text: str) -> str:
    """Format the paper's symbols such as p_t as mathematics; keep other underscores."""
    return re.sub(r"\b([pCT])_([tcb0])\b", r"$\1_\2$", text)


def epoch_axis(axes: Axes, num_epochs: float, num_ticks: int = 9) -> None:
    """Label the x axis in completed epochs, with integer ticks."""
    axes.set(xlabel="epoch", xlim=(0, num_epochs))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=num_ticks, integer=True, min_n_ticks=1))


def plain_ticks(axis: Any, ticks: Any) -> None:
    """Put ticks with plain numbers at a locator's places, on an axis of any scale, without minor labels."""
    axis.set_major_locator(ticks)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def log_axis(axes: Axes) -> None:
    """Make the y axis logarithmic with plain numbers as ticks; linear if there is no positive value."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if not 0 < low < high < math.inf:
        axes.set_yscale("linear")
        return
    decades = math.log10(high / low)
    steps = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0) if decades < 1 else (1.0, 2.0, 5.0) if decades < 2 else (1.0,)
    plain_ticks(axes.yaxis, LogLocator(subs=steps))


def mark_growth(axes: Axes, epochs: Sequence[float]) -> None:
    """Draw a thin vertical line at each growth event, behind the curves."""
    for epoch in epochs:
        axes.axvline(epoch, color="0.72", linewidth=0.7, linestyle=(0, (3, 2)), zorder=0.5, gid=EVENT)


def thin_out(figure: Figure, labels: Sequence[Text], gap_points: float = 1.5) -> None:
    """Hide labels that overlap others; the last one (full width) has priority, then those from the first on."""
    if not labels:
        return
    figure.draw_without_rendering()
    pad = gap_points * figure.dpi / 72
    shown: list[Any] = []
    for label in [labels[-1], *labels[:-1]]:
        box = label.get_window_extent().padded(pad / 2)
        if any(box.overlaps(other) for other in shown):
            label.set_visible(False)
        else:
            shown.append(box)


def mark_points(axes: Axes, points: Sequence[tuple[float, float, float, dict[str, Any]]], size_points: float) -> None:
    """Draw points (x, y, standard deviation, line style) as open markers, so that hidden ones show through."""
    form: dict[str, Any] = {"markersize": size_points, "markerfacecolor": "none", "markeredgewidth": 1.2, "capsize": 2}
    for x, y, reach, line in points:
        mark: dict[str, Any] = {"color": line["color"], "marker": line["marker"], "elinewidth": 0.8, "clip_on": False}
        axes.errorbar(x, y, yerr=reach or None, **mark, **form)


def spread(positions: Sequence[float], gap: float) -> list[float]:
    """Move positions apart, as little as possible, until neighbours keep `gap`.

    Examples:
        >>> spread([0.0, 0.1, 5.0], gap=1.0)
        [-0.45, 0.55, 5.0]
    """
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    # Blocks of touching labels, (indices, centre); overlapping blocks merge around their common mean.
    blocks: list[tuple[list[int], float]] = []
    for i in order:
        members, centre = [i], float(positions[i])
        while blocks and centre - blocks[-1][1] < gap * (len(members) + len(blocks[-1][0])) / 2:
            members = blocks.pop()[0] + members
            centre = sum(positions[j] for j in members) / len(members)
        blocks.append((members, centre))
    placed = [0.0] * len(positions)
    for members, centre in blocks:
        for rank, i in enumerate(members):
            placed[i] = centre + gap * (rank - (len(members) - 1) / 2)
    return placed

"""Draws what the concept pages explain, from small networks that are really traced and grown: `make figures`."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from torch import nn

import growlab
from growlab.lab.analysis import style

DRAWINGS = Path(__file__).parent / "pages" / "drawings"
_GREY, _INK = "#B8B8B8", "#333333"
_SHADES = ("#0B4F82", "#4C97C9", "#B9D9EE")  # of the stages 0, 1, 2: dark to light, also in grey print


class Block(nn.Module):
    """A residual block: its inner width is its own, its output is added to its input."""

    def __init__(self, features: int, inner: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(features, inner, 3, padding=1)
        self.norm = nn.BatchNorm2d(inner)
        self.b = nn.Conv2d(inner, features, 3, padding=1)

    def forward(self, x):
        return x + self.b(torch.relu(self.norm(self.a(x))))


class Residual(nn.Module):
    """A convolution, a residual block and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.block = Block(16, 24)
        self.fc = nn.Linear(16, 10)

    def forward(self, x):
        return self.fc(self.block(self.conv(x)).mean((2, 3)))


def width_groups() -> Figure:
    """Every tensor of a residual network: the axes of one colour grow together."""
    network = Residual()
    graph = growlab.trace(network, torch.randn(2, 3, 8, 8))
    colours = dict(zip(graph.groups, style.PALETTE, strict=False))
    shapes = {name: tuple(tensor.shape) for name, tensor in network.named_parameters() if "bias" not in name}
    with style.styled():
        figure = style.new_figure(7.2, 2.5)
        axes = _blank(figure)
        at = 0.0
        for name, shape in shapes.items():
            groups = [axis.parts[0].group for axis in graph.axes[name][:2]]
            height, width = shape[0] / 8, (shape[1] if len(shape) > 1 else 2.5) / 8
            axes.add_patch(Rectangle((at, -height), width, height, color="#EFEFEF"))
            for group, left, bottom, wide, high in (
                (groups[0], at - 0.16, -height, 0.16, height),
                (groups[1] if len(groups) > 1 else None, at, 0.04, width, 0.16),
            ):
                if high > 0.16 or len(shape) > 1:
                    axes.add_patch(Rectangle((left, bottom), wide, high, color=colours.get(group, _GREY), lw=0))
            label = f"{name}\n[{', '.join(map(str, shape))}]"
            axes.text(at + width / 2, 0.45, label, ha="center", va="bottom", fontsize=6.5, color=_INK)
            at += width + 1.55
        notes = {
            "conv": "16 channels, tied by the residual sum",
            "block.a": "24 channels inside the block",
            None: "fixed: input and classes",
        }
        for row, (group, note) in enumerate(notes.items()):
            name = f'group "{group}": ' if group else ""
            axes.add_patch(Rectangle((-0.16, -4.25 - 0.5 * row), 0.28, 0.28, color=colours.get(group, _GREY)))
            axes.text(0.3, -4.11 - 0.5 * row, name + note, va="center", fontsize=7.5, color=_INK)
        axes.set_xlim(-0.6, at - 0.9)
        axes.set_ylim(-5.5, 1.35)
    return figure


def regions() -> Figure:
    """One weight of a network that grows in three stages: each part is as old as the stage that brought it."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).double()
    x = torch.randn(16, 8, dtype=torch.float64)
    grower = growlab.Grower(network, x, method=growlab.PairGrowth(), trigger={0: 0.25, 4: 0.5, 8: 1.0})
    with style.styled():
        figure = style.new_figure(7.2, 2.35)
        axes = _blank(figure)
        widths = []
        for stage, epoch in enumerate((0, 4, 8)):
            grower.step(epoch=epoch)
            widths.append(network[2].weight.shape[0])
            left = (0, 5.0, 11.5)[stage]
            for born in range(stage, -1, -1):
                side = widths[born] / 4
                axes.add_patch(Rectangle((left, -side), side, side, color=_SHADES[born], ec="white", lw=1.2))
                epochs_trained = (4, 8, 12)[stage] - (0, 4, 8)[born]
                below = widths[born - 1] / 4 if born else 0.0
                axes.text(
                    left + (side + below) / 2,
                    -(side + below) / 2 if born else -side / 2,
                    f"{epochs_trained}",
                    ha="center",
                    va="center",
                    color="white" if born < 2 else _INK,
                    fontsize=8,
                )
            size = widths[-1]
            axes.text(left, 0.25, f"stage {stage}: {size} x {size}", fontsize=8, color=_INK)
        for born, text in enumerate(
            ("region of the seed", "region of stage 1: its new rows\nand columns", "region of stage 2")
        ):
            axes.add_patch(Rectangle((17.0, -0.6 - 0.95 * born), 0.5, 0.5, color=_SHADES[born]))
            axes.text(17.8, -0.35 - 0.95 * born, text, va="center", fontsize=7.5, color=_INK)
        axes.text(
            17.0,
            -3.4,
            "numbers: epochs that a region has\ntrained by the stage's end",
            va="center",
            fontsize=7.5,
            color=_INK,
        )
        axes.set_xlim(-0.2, 25.6)
        axes.set_ylim(-4.3, 0.9)
    return figure


def event() -> Figure:
    """The weights beside a hidden layer before and after an event of pairs, which keeps the output."""
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)).double()
    x = torch.randn(16, 6, dtype=torch.float64)
    grower = growlab.Grower(network, x, method=growlab.PairGrowth(), trigger={0: 0.5, 1: 1.0})
    before = [network[0].weight.detach().clone(), network[2].weight.detach().clone(), network(x).detach()]
    grower.step(epoch=1)
    after = [network[0].weight.detach(), network[2].weight.detach(), network(x).detach()]
    moved = float((after[2] - before[2]).abs().max())
    assert moved < 1e-12
    most = max(float(weight.abs().max()) for weight in (*before[:2], *after[:2]))
    with style.styled():
        figure = style.new_figure(7.2, 2.6)
        axes = _blank(figure)
        for left, weights, title in (
            (0.0, before, "before: 4 channels"),
            (18.5, after, "after the event: 8 channels"),
        ):
            first, second = weights[0].numpy(), weights[1].numpy()
            num = len(first)
            _heat(axes, first, left, 0.0, most)
            _heat(axes, second, left + 9.5, 0.0, most)
            axes.text(left, 1.7, title, fontsize=8.5, color=_INK, weight="bold")
            axes.text(left, 0.5, f"producer [{num}, 6]", fontsize=7, color=_INK)
            axes.text(left + 9.5, 0.5, f"consumer [5, {num}]", fontsize=7, color=_INK)
            axes.add_patch(
                FancyArrowPatch((left + 6.3, -2.0), (left + 9.2, -2.0), arrowstyle="->", mutation_scale=8, color=_INK)
            )
            axes.text(left + 7.75, -1.7, "ReLU", ha="center", va="bottom", fontsize=6.5, color=_INK)
            for new in range(4, num):
                # Pairs lie half of the new channels apart.
                pair, sign = "ab"[(new - 4) % 2], "" if new < 6 else "\N{MINUS SIGN}"
                axes.text(left + 6.35, -new - 0.5, pair, fontsize=7, va="center", style="italic", color=_INK)
                axes.text(
                    left + 10.0 + new,
                    -5.2,
                    sign + pair,
                    fontsize=7,
                    ha="center",
                    va="top",
                    style="italic",
                    color=_INK,
                )
        axes.text(
            28.0,
            -7.2,
            "new rows: equal in pairs (a, a; b, b)\nnew columns: opposite (a, \N{MINUS SIGN}a; b, \N{MINUS SIGN}b)",
            fontsize=7.5,
            va="center",
            color=_INK,
        )
        axes.text(
            0.0,
            -7.2,
            "Each pair's contributions cancel, so the output\nstays the same; training parts the two.",
            fontsize=7.5,
            va="center",
            color=_INK,
        )
        axes.set_xlim(-0.3, 44.0)
        axes.set_ylim(-8.6, 2.6)
    return figure


def _blank(figure: Figure) -> Axes:
    axes = figure.subplots()
    axes.set_aspect("equal")
    axes.axis("off")
    return axes


def _heat(axes: Axes, weight: np.ndarray, left: float, top: float, most: float) -> None:
    from matplotlib import colormaps

    for row, values in enumerate(weight):
        for column, value in enumerate(values):
            # Two digits: rounding of another machine makes no other drawing.
            colour = colormaps["PuOr"](round(0.5 + 0.5 * float(value) / most, 2))
            axes.add_patch(Rectangle((left + column, top - row - 1), 1, 1, facecolor=colour, ec="white", lw=0.5))


ALL: dict[str, Callable[[], Figure]] = {"width_groups": width_groups, "regions": regions, "event": event}


def write(draw: Callable[[], Figure], path: Path) -> Path:
    """Save a drawing as SVG, its letters as paths: a reader may not have the font."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = draw()
    with style.styled(), rc_context({"svg.fonttype": "path"}):
        figure.savefig(path, format="svg", metadata={"Date": None})
    return path


if __name__ == "__main__":
    for name, draw in ALL.items():
        print(write(draw, DRAWINGS / f"{name}.svg"))

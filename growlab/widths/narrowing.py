"""Does a network still run when it is narrowed? What its own code fixes keeps its full width.

A forward may have a width written into it (`x.view(b, 12, 64)`), which no graph tells from a size that follows the
channels. So every graph is tried: the network is narrowed on a copy without memory (device meta) and run; groups
whose narrowing breaks it are left at full width.
"""

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from growlab.widths.groups import WidthGraph
from growlab.widths.layout import Axis, Part
from growlab.widths.resize import resize

_REASON = "its width is written into the network's own code"


def keep_only(graph: WidthGraph, names: Iterable[str], reason: str = _REASON) -> WidthGraph:
    """The graph with only these groups growing; the others keep their full width for the reason given."""
    names = set(names)
    widths = graph.full_widths

    def frozen(axis: Axis) -> Axis:
        parts = tuple(part if part.group in names else Part(None, part.length(widths)) for part in axis.parts)
        return Axis(parts, axis.role if any(part.group for part in parts) else "fixed")

    return replace(
        graph,
        groups={name: group for name, group in graph.groups.items() if name in names},
        axes={name: tuple(frozen(axis) for axis in axes) for name, axes in graph.axes.items()},
        fixed={**graph.fixed, **{name: reason for name in graph.groups if name not in names}},
    )


def without_what_breaks(model: nn.Module, graph: WidthGraph, inputs: tuple[Any, ...]) -> WidthGraph:
    """Leave out groups whose narrowing the network's forward does not survive.

    Args:
        model: at full width; left as it is.
        graph: its width graph.
        inputs: positional inputs of the forward.
    """
    if not graph.groups:
        return graph
    model, inputs = _without_memory(model, inputs)
    expected = _output_shapes(model, inputs)

    def runs(names: Iterable[str]) -> bool:
        names = set(names)
        # All at once, then by each digit of their numbers, so that any two are also tried apart: a schedule may
        # bring widths that have nothing to do with one another.
        for digit in (None, *range(len(graph.groups).bit_length())):
            widths = {
                name: max(1, group.full_width // 2)
                if name in names and (digit is None or number >> digit & 1)
                else group.full_width
                for number, (name, group) in enumerate(graph.groups.items())
            }
            narrowed = copy.deepcopy(model)
            resize(narrowed, graph, graph.full_widths, widths)
            try:
                if _output_shapes(narrowed, inputs) != expected:
                    return False
            except (RuntimeError, ValueError, TypeError, AssertionError, IndexError):
                return False
        return True

    return keep_only(graph, _largest_working(list(graph.groups), runs))


def _largest_working(names: list[str], runs: Any, working: tuple[str, ...] = ()) -> list[str]:
    """Groups that can be narrowed together: halves are tried until what breaks is found."""
    if runs([*working, *names]):
        return names
    if len(names) == 1:
        return []
    half = len(names) // 2
    first = _largest_working(names[:half], runs, working)
    second = _largest_working(names[half:], runs, (*working, *first))
    return first + second


def _without_memory(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[nn.Module, tuple[Any, ...]]:
    try:
        # Putting the light tensors into deepcopy's memo keeps what is shared shared.
        memo: dict[int, Any] = {id(buffer): buffer.to("meta") for buffer in model.buffers()}
        memo |= {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in model.parameters()}
        light = copy.deepcopy(model, memo)
        light_inputs = tuple(x.to("meta") if isinstance(x, Tensor) else x for x in inputs)
        _output_shapes(light, light_inputs)
    except (RuntimeError, NotImplementedError, ValueError, TypeError):
        # Tensors made in the forward, or numbers read from one, need the real device.
        return copy.deepcopy(model), inputs
    return light, light_inputs


def _output_shapes(model: nn.Module, inputs: tuple[Any, ...]) -> list[torch.Size]:
    """Shapes in eval and in train mode, which may have heads of its own that no graph has seen."""
    shapes = []
    for training in (False, True):
        model.train(training)
        with torch.no_grad():
            shapes += [x.shape for x in _tensors(model(*inputs))]
    return shapes


def _tensors(outputs: Any) -> list[Tensor]:
    if isinstance(outputs, Tensor):
        return [outputs]
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    if isinstance(outputs, (list, tuple)):
        return [tensor for output in outputs for tensor in _tensors(output)]
    return []

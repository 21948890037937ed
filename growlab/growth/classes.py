"""A head that grows with the classes: the output layer's rows open as classes appear (Yuan et al. 2023, App. H)."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from growlab.growth.event import GrowthState
from growlab.growth.method import Expansion, GrowthMethod
from growlab.growth.multipliers import carried_multipliers, fold_multipliers, multiply
from growlab.widths import Axis, Carry, Group, Part, WidthGraph, grid, replace_tensors, tensors_of

#: The group whose channels are the network's outputs.
CLASSES = "classes"


def with_classes(graph: WidthGraph, num_classes: int) -> WidthGraph | None:
    """The same graph with the network's outputs as one more group.

    Growth methods leave its width alone: a new class is not a copy or a twin of another. `open_classes` widens it.

    Args:
        graph: of a network at full width.
        num_classes: its outputs.

    Returns:
        None where no single layer with rows of its own puts the outputs out.
    """
    heads = [layer for layer in graph.layers if layer.scale_out == graph.output_class]
    if len(heads) != 1 or CLASSES in graph.groups:
        return None
    (head,) = heads
    rows = graph.axes[head.weight][0]
    if head.depthwise or head.transposed or head.offset or head.emitters or rows.groups:
        return None
    if rows.length({}) != num_classes:
        return None
    opened = Axis((Part(CLASSES),), "out")
    names = [head.weight, *([] if head.bias is None else [head.bias])]
    axes = {**graph.axes, **{name: (opened, *graph.axes[name][1:]) for name in names}}
    return replace(graph, groups={**graph.groups, CLASSES: Group(CLASSES, num_classes)}, axes=axes)


def open_classes(
    model: nn.Module, graph: WidthGraph, method: GrowthMethod, state: GrowthState, count: int, seed: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Give the head rows for classes that appear, drawn as the method draws the output layer's; biases are zero.

    **Preserves** the outputs of the classes that there were, exactly.

    Args:
        model: changed in place.
        graph: with the group of classes.
        method: whose new weights they are.
        state: brought up to date; the rows are born at its stage.
        count: classes from here on.
        seed: the run's seed.

    Returns:
        Old and new tensor by name, for an optimizer to follow.
    """
    before = dict(state.widths)
    widths = {**before, CLASSES: count}
    expansion = Expansion(graph, tensors_of(model, graph), before, widths, seed, state.stage)
    new = {}
    for name in _rows(graph):
        old = expansion.old[name]
        new[name] = method.new_weights.draw(expansion, name).to(old)
        new[name][grid(expansion.kept(name), old.device)] = old
    state.multipliers = carried_multipliers(graph, state.multipliers, {}, Carry(), before, widths)
    state.widths = widths
    state.births[CLASSES] = state.births[CLASSES] + [state.stage] * (count - before[CLASSES])
    replaced = replace_tensors(model, graph, new)
    multiply(model, graph, state.multipliers)
    return replaced


def sort_classes(model: nn.Module, graph: WidthGraph, order: Sequence[int]) -> None:
    """Bring the head's rows from the order in which classes appeared into that of the labels, in place.

    What the forward multiplies rows of weights by is written into them first.

    Args:
        model: with all classes.
        graph: with the group of classes.
        order: the class that each row is of.
    """
    fold_multipliers(model)
    tensors = tensors_of(model, graph)
    with torch.no_grad():
        for name in _rows(graph):
            rows = tensors[name].clone()
            tensors[name][torch.tensor(order, device=rows.device)] = rows


def _rows(graph: WidthGraph) -> list[str]:
    return [name for name, axes in graph.axes.items() if any(CLASSES in axis.groups for axis in axes)]

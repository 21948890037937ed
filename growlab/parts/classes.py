"""A head that grows with the classes: the output layer's rows open as classes appear (Yuan et al. 2023, App. H)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from growlab.base.errors import UserError
from growlab.grower.part import Replaced, WidthPart
from growlab.grower.triggers import GrowingNetwork, Never, Trigger, Widths
from growlab.growth.method import Expansion, GrowthMethod
from growlab.growth.multipliers import carried_multipliers, fold_multipliers, multiply
from growlab.growth.state import GrowthState
from growlab.widths import Axis, Carry, Group, Part, WidthGraph, grid, replace_tensors, tensors_of

#: The group whose channels are the network's outputs.
CLASSES = "classes"


class Classes(WidthPart):
    """Opens the output layer's rows stage by stage, as classes arrive.

    Args:
        order: the classes in the order in which they arrive, all of them.
        counts: maps a number of stages to how many classes each has.

    Raises:
        UserError: the order does not name every class from 0 on once, or the counts are no function.
    """

    name = "classes"

    def __init__(self, order: Sequence[int], counts: Callable[[int], Sequence[int]]) -> None:
        classes = list(order) if isinstance(order, Sequence) else []
        numbers = bool(classes) and all(isinstance(one, Integral) for one in classes)
        if not numbers or sorted(classes) != [*range(len(classes))]:
            raise UserError(f"order must name every class from 0 on once, such as [2, 0, 1], not {order!r}.")
        if not callable(counts):
            raise UserError(f"counts must be a function of the number of stages, not {counts!r}.")
        self._order, self._counts = classes, counts
        self._sorted = False

    def applies(self, trigger: Trigger) -> bool:
        """Return False where stages are not known beforehand: the network then has all outputs from the start."""
        return not isinstance(trigger, Never) and trigger.knows_stages

    def prepare(
        self, network: nn.Module, graph: WidthGraph, seed: int, example: tuple[Any, ...]
    ) -> WidthGraph:
        """Make the network's outputs a width group, where one layer puts them out."""
        self._sorted = False
        opened = with_classes(graph, len(self._order))
        self.groups = () if opened is None else (CLASSES,)
        return opened or graph

    def stage_widths(self, num_stages: int) -> Mapping[str, Sequence[int]]:
        """Classes of each stage.

        Raises:
            UserError: the counts are not one for each stage, ascending, of the classes that there are.
        """
        if not self.groups:
            return {}
        counts, number = list(self._counts(num_stages)), len(self._order)
        whole = all(isinstance(one, Integral) and 1 <= one <= number for one in counts)
        if (
            len(counts) != num_stages
            or not whole
            or any(after < before for before, after in pairwise(counts))
        ):
            raise UserError(
                f"counts({num_stages}) must give {num_stages} ascending numbers of classes from 1 to {number}, not "
                f"{counts}."
            )
        return {CLASSES: counts}

    def widen(
        self, grower: GrowingNetwork, network: nn.Module, state: GrowthState, widths: Widths
    ) -> Replaced:
        """Open rows."""
        if not self.groups:
            return {}
        return open_classes(network, grower.graph, grower.method, state, widths[CLASSES], grower.seed)

    def targets(self, y: Tensor) -> Tensor:
        """Map classes to the head's rows, which are in the order of arrival while the network trains."""
        if self._sorted or not self.groups:
            return y
        return torch.argsort(torch.tensor(self._order, device=y.device))[y]

    def finish(self, grower: GrowingNetwork) -> None:
        """Bring rows into the order of the labels."""
        if self.groups and not self._sorted:
            for network in (grower.network, *grower.copies().values()):
                sort_classes(network, grower.graph, self._order)
            self._sorted = True

    def state_dict(self) -> dict[str, Any]:
        """True under "sorted" if rows are in the order of the labels already."""
        return {"sorted": self._sorted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._sorted = bool(state.get("sorted", False))

    load_for_inference = load_state_dict


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

"""Class-incremental growth: rows are added to the output layer as classes appear (Yuan et al. 2023, App. H)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from growlab.base.errors import UserError
from growlab.grower.part import Replaced, WidthPart, numbers_of_stages, open_channels
from growlab.grower.triggers import GrowingNetwork, Never, Trigger, Widths
from growlab.growth.multipliers import fold_multipliers
from growlab.growth.state import GrowthState
from growlab.widths import Axis, Group, Part, WidthGraph, tensors_of

#: The group whose channels are the network's outputs.
CLASSES = "classes"


class Classes(WidthPart):
    """Adds rows to the output layer from stage to stage, as classes arrive.

    Args:
        order: all classes in their order of arrival.
        counts: maps the number of stages to the number of classes at each stage.

    Raises:
        UserError: `order` is not a permutation of 0, 1, ..., or `counts` is not callable.
    """

    name = "classes"
    # True once rows are in the order of the labels.
    saved: ClassVar[Mapping[str, str]] = {"sorted": "_sorted"}

    def __init__(self, order: Sequence[int], counts: Callable[[int], Sequence[int]]) -> None:
        classes = list(order) if isinstance(order, Sequence) else []
        whole = all(isinstance(label, Integral) for label in classes)
        if not classes or not whole or sorted(classes) != [*range(len(classes))]:
            raise UserError(f"order must name every class from 0 on once, such as [2, 0, 1], not {order!r}.")
        if not callable(counts):
            raise UserError(f"counts must be a function of the number of stages, not {counts!r}.")
        self._order, self._counts = classes, counts
        self._sorted = False

    def applies(self, trigger: Trigger) -> bool:
        """Return True if the network grows in stages known in advance; otherwise all outputs exist from the start."""
        return not isinstance(trigger, Never) and trigger.knows_stages

    def prepare(self, network: nn.Module, graph: WidthGraph, seed: int, example: tuple[Any, ...]) -> WidthGraph:
        """Make the network's outputs a width group, if a single layer produces them."""
        self._sorted = False
        opened = with_classes(graph, len(self._order))
        self.groups = () if opened is None else (CLASSES,)
        return opened or graph

    def stage_widths(self, num_stages: int) -> Mapping[str, Sequence[int]]:
        """Return the number of classes at each stage.

        Raises:
            UserError: `counts` does not return one number per stage, ascending and at most the number of classes.
        """
        if not self.groups:
            return {}
        return {CLASSES: numbers_of_stages(self._counts(num_stages), num_stages, len(self._order), "classes")}

    def widen(self, grower: GrowingNetwork, network: nn.Module, state: GrowthState, widths: Widths) -> Replaced:
        """Add rows to the head for the classes of the next stage, drawn as the method draws its weights."""
        if not self.groups:
            return {}
        return open_channels(network, grower.graph, grower.method, state, CLASSES, widths[CLASSES], grower.seed)

    def targets(self, y: Tensor) -> Tensor:
        """Map class labels to output rows, which are in the order of arrival while the network trains."""
        if self._sorted or not self.groups:
            return y
        return torch.argsort(torch.tensor(self._order, device=y.device))[y]

    def finish(self, grower: GrowingNetwork) -> None:
        """Sort rows into the order of the labels; see `sort_classes`."""
        if self.groups and not self._sorted:
            for network in (grower.network, *grower.copies().values()):
                sort_classes(network, grower.graph, self._order)
            self._sorted = True

    def load_for_inference(self, state: Mapping[str, Any]) -> None:
        """Load the order of the classes."""
        self.load_state_dict(state)


def with_classes(graph: WidthGraph, num_classes: int) -> WidthGraph | None:
    """Return a width graph with the network's outputs as an additional group; None if they are not rows of one layer.

    Growth methods do not change its width: a new class is not a copy or a twin of another.
    """
    heads = [layer for layer in graph.layers if layer.scale_out == graph.output_class]
    if len(heads) != 1 or CLASSES in graph.groups:
        return None
    (head,) = heads
    rows = graph.axes[head.weight][0]
    special = head.depthwise or head.transposed or head.offset or head.emitters or rows.groups
    if special or rows.length({}) != num_classes:
        return None
    opened = Axis((Part(CLASSES),), "out")
    names = [head.weight, *([] if head.bias is None else [head.bias])]
    axes = {**graph.axes, **{name: (opened, *graph.axes[name][1:]) for name in names}}
    return replace(graph, groups={**graph.groups, CLASSES: Group(CLASSES, num_classes)}, axes=axes)


def sort_classes(model: nn.Module, graph: WidthGraph, order: Sequence[int]) -> None:
    """Sort the output layer's rows from the order of arrival into that of the labels, in place.

    Row multipliers of the forward are folded into the weights first. `order` has the class of each row.
    """
    fold_multipliers(model)
    tensors = tensors_of(model, graph)
    with torch.no_grad():
        for name in [name for name, axes in graph.axes.items() if any(CLASSES in axis.groups for axis in axes)]:
            rows = tensors[name].clone()
            tensors[name][torch.tensor(order, device=rows.device)] = rows

"""Growth and pruning of isotropic layers by singular values (Bird, Section 3.3)."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import Tensor, nn

from growlab.base.errors import as_user_errors
from growlab.base.settings import at_least, flag, not_none, one_of, whole
from growlab.growth.method import GrownTensors, GrowthContext, GrowthMethod, WidthDecision
from growlab.parts.isotropic.resize import IMPORTANCES, Change, Choices, Observation, change_width, gradient_of, watch
from growlab.parts.isotropic.spectrum import consumers, decompose, folded, gain_columns, producers, weights_of
from growlab.widths import Carry, WidthGraph


@dataclass(frozen=True)
class Boundaries:
    """Epochs or steps at which the widths of layers are decided.

    Attributes:
        every_n_epochs: number of epochs between two boundaries.
        every_n_steps: number of optimizer steps between two boundaries instead, or None.
        first: epoch (or step) of the first boundary; None for `every_n_epochs` (`every_n_steps`).
        last: epoch (or step) of the last boundary, or None.

    Raises:
        ValueError: a number is below 1, or `last` is before the first boundary.
    """

    every_n_epochs: int = 1
    every_n_steps: int | None = None
    first: int | None = None
    last: int | None = None

    def __post_init__(self) -> None:
        whole(1, every_n_epochs=self.every_n_epochs)
        whole(1, **not_none(every_n_steps=self.every_n_steps, first=self.first))
        whole(0, **not_none(last=self.last))
        every = self.every_n_epochs if self.every_n_steps is None else self.every_n_steps
        if self.last is not None and self.last < (earliest := self.first or every):
            raise ValueError(
                f"last={self.last} is before the first analysis of the layers, at {earliest}: none follows."
            )

    def before(self, epoch: int, step: int) -> int | None:
        """Return the latest boundary up to an epoch and a number of optimizer steps, or None."""
        now, every = (epoch, self.every_n_epochs) if self.every_n_steps is None else (step, self.every_n_steps)
        first = self.first or every
        if now < first or (self.last is not None and now > self.last):
            return None
        # The previous boundary, which may not have been evaluated yet.
        return now - (now - first) % every


@dataclass(frozen=True)
class Widths:
    """Rule for the width of a layer.

    Attributes:
        reserve_neurons: Xi, number of neurons kept below the threshold.
        threshold: theta.
        relative: the threshold is theta times the layer's largest score instead of theta.
        target_width: width that every layer moves towards instead, or None.
        neurons_per_event: largest number of neurons that one event adds to or removes from a layer; None for no limit.
        min_width: smallest width of a layer.
        max_width: largest width of a layer; None for no limit.

    Raises:
        ValueError: a value is invalid.
    """

    reserve_neurons: int = 1
    threshold: float = 0.1
    relative: bool = True
    target_width: int | None = None
    neurons_per_event: int | None = None
    min_width: int = 1
    max_width: int | None = None

    def __post_init__(self) -> None:
        limits = {"neurons_per_event": self.neurons_per_event, "max_width": self.max_width}
        whole(1, min_width=self.min_width, **not_none(target_width=self.target_width, **limits))
        whole(0, reserve_neurons=self.reserve_neurons)
        at_least(0, threshold=self.threshold)
        flag(relative=self.relative)
        if self.max_width is not None and self.max_width < self.min_width:
            raise ValueError(f"max_width={self.max_width} is below min_width={self.min_width}.")

    def after(self, width: int, scores: Tensor | None) -> int:
        """Return the width of a layer after a boundary, from its scores [width]; None for a target width."""
        new_width = width if self.target_width is None else self.target_width
        if scores is not None:
            limit = self.threshold * (float(scores.max()) if self.relative else 1.0)
            new_width = width + self.reserve_neurons - int((scores < limit).sum())
        if self.neurons_per_event is not None:
            new_width = min(max(new_width, width - self.neurons_per_event), width + self.neurons_per_event)
        return max(self.min_width, new_width if self.max_width is None else min(new_width, self.max_width))


MODES = ("reserve", "scheduled")


class Isotropic(GrowthMethod, WidthDecision):
    """Add and remove neurons of isotropic layers, on demand or towards target widths.

    At every boundary each layer is evaluated in the basis where its incoming weights are S V^T. "reserve" keeps Xi
    neurons with a score below the threshold theta: if there are fewer, neurons are added; if there are more, those with
    the lowest scores are removed. "scheduled" moves a number of neurons at a time towards target widths. Neurons are
    added and removed by `growlab.parts.isotropic.change_width`.

    **Preserves** the output exactly if neurons are only added, with the default choices. Removing one changes it by
    about the neuron's contribution, its bias included unless a gain channel absorbs it: the receipt has the removed
    part of the incoming weights (`removed_part`) and the change of the output; beyond `max_pruning_error` the event is
    undone and the run stops.

    **Departs from the paper**: scores are relative to the largest of a layer by default, so that one threshold suits
    layers and phases of training with different scales; an event moves at most `neurons_per_event` neurons of a layer;
    layers keep at least `min_width`.

    Args:
        mode: "reserve" or "scheduled"; the latter needs a `target_width`.
        max_pruning_error: largest relative output error that an event which removes neurons may make; None: any.
        settings: fields of `Boundaries`, `Widths` and `Choices`.

    Raises:
        ValueError: a value is invalid.
        TypeError: a setting is unknown.
    """

    SETTINGS = (Boundaries, Widths, Choices)

    shrinks = True
    follows_norms = True

    def __init__(
        self, mode: Literal["reserve", "scheduled"] = "reserve", max_pruning_error: float | None = None, **settings: Any
    ) -> None:
        super().__init__()
        of_boundaries, of_widths = (
            {field.name: settings.pop(field.name) for field in fields(kind) if field.name in settings}
            for kind in (Boundaries, Widths)
        )
        self.boundaries, self.widths = Boundaries(**of_boundaries), Widths(**of_widths)
        self.choices = Choices(**settings)
        one_of(MODES, mode=mode)
        at_least(0, **not_none(max_pruning_error=max_pruning_error))
        if (self.widths.target_width is None) == (mode == "scheduled"):
            raise ValueError("target_width goes with mode='scheduled', and only with it.")
        self.max_pruning_error = max_pruning_error
        self.wants_gradients = self.choices.importance == "gradient"

    def prepare(self, network: nn.Module, graph: WidthGraph, seed: int) -> WidthGraph:
        """Check that the network has isotropic layers."""
        with as_user_errors():
            adaptable(graph)
        return graph

    def observe(self, model: nn.Module, graph: WidthGraph, probe: tuple[Any, ...]) -> Mapping[str, Observation]:
        """Observe isotropic activations on the probe batch, for the correction of removed neurons."""
        return watch(model, graph, probe)

    def boundary(self, epoch: int, step: int) -> int | None:
        """Return the epoch or step of the boundary at which widths are decided, or None."""
        return self.boundaries.before(epoch, step)

    def decide(
        self,
        graph: WidthGraph,
        tensors: Mapping[str, Tensor],
        widths: Mapping[str, int],
        gradients: Mapping[str, Tensor],
    ) -> dict[str, int]:
        """Decide the width of each layer from now on.

        Raises:
            ValueError: the network has no isotropic layer, or gradients for the scores are missing.
        """
        decided, forward = dict(widths), self.choices.direction == "forward"
        for group in adaptable(graph):
            scores = None
            if self.widths.target_width is None:
                spectrum = decompose(weights_of(graph, group, tensors, widths, forward))
                gradient = gradient_of(graph, group, gradients, widths, forward)
                scores = IMPORTANCES[self.choices.importance](*spectrum, gradient)
            decided[group] = self.widths.after(widths[group], scores)
        return decided

    def grow(self, context: GrowthContext) -> GrownTensors:
        """Resize every layer to its new width, one after the other in forward order."""
        graph, widths = context.graph, dict(context.old_widths)
        changing = [g for g in adaptable(graph) if context.new_widths[g] != widths[g]]
        # A change of basis mixes rows, so their multipliers must be folded into the weights.
        scales = folded(graph, changing, context.multipliers)
        tensors = {n: t * scales[n].to(t) if n in scales else t for n, t in context.old.items()}
        averaged = None if context.averaged is None else dict(context.averaged)
        if averaged is not None:
            averaged |= {name: averaged[name] * scale.to(averaged[name]) for name, scale in scales.items()}
        # The observations from which the averaged network's change was decided.
        averaged_observed = context.averaged_observed or context.observed
        gradients = {n: g * scales[n].to(g) if n in scales else g for n, g in context.gradients.items()}
        report: dict[str, dict[str, float | list[float]]] = {}
        bases: dict[str, Tensor] = {}
        removes = False

        def change(group: str, of: Mapping[str, Tensor], observed: Any, leader: Change | None) -> Change:
            arguments = (self.choices, gradients or None, observed, context.generator, leader)
            return change_width(graph, of, widths, group, context.new_widths[group], *arguments)

        for group in adaptable(graph):
            before = decompose(weights_of(graph, group, tensors, widths, self.choices.direction == "forward"))[1]
            report[group] = {"singular_values": before.tolist()}
            if group not in changing:
                continue
            leader = None
            if averaged is not None:
                leader = change(group, averaged, averaged_observed, None)
                averaged |= leader.tensors
            changed = change(group, tensors, context.observed, leader)
            tensors |= changed.tensors
            widths[group] = context.new_widths[group]
            bases[group] = changed.basis
            removes = removes or bool(changed.removed)
            report[group] |= {"removed": changed.removed, "removed_part": changed.removed_part}
            if gradients:
                carry = Carry(bases={group: changed.basis})
                before_widths = {**widths, group: changed.basis.shape[1]}
                gradients = {
                    name: carry.carried(value, name, graph, before_widths, widths) for name, value in gradients.items()
                }
        exact = self.choices.bias == 0 or self.choices.columns == "zero"
        readers = ((group, layer) for group in bases for layer in consumers(graph, group))
        exact = exact or all(gain_columns(graph, group, layer, widths) for group, layer in readers)
        return GrownTensors(
            tensors,
            # Rows stored as m W have m times the gradient of W; see `growlab.growth.multipliers`.
            carry=Carry(bases=bases, scales=scales),
            allowed_error=self.max_pruning_error if removes else 0.0 if exact else None,
            report=report,
            folded=frozenset(scales),
        )


def adaptable(graph: WidthGraph) -> list[str]:
    """Return the isotropic groups whose width can change."""
    groups = [group for group in graph.isotropic if producers(graph, group)]
    if not groups:
        reasons = {**graph.fixed, **graph.basis_dependent}
        listed = "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:3])
        raise ValueError(
            "isotropic growth needs a layer whose channels no operation distinguishes, such as those of "
            f"growlab's IsotropicMLP; this network has none{f' ({listed})' if listed else ''}."
        )
    return groups

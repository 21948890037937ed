"""Growth and pruning of isotropic layers by singular values (Bird, Section 3.3)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor, nn

from growlab.base.errors import as_user_errors
from growlab.base.settings import at_least, not_none, one_of, sorted_into
from growlab.growth.method import Expansion, GrownTensors, GrowthMethod, WidthDecision
from growlab.parts.isotropic.choices import IMPORTANCES, Choices
from growlab.parts.isotropic.decision import Boundaries, Widths
from growlab.parts.isotropic.layer import Change
from growlab.parts.isotropic.observation import Observation, watch
from growlab.parts.isotropic.resize import change_width
from growlab.parts.isotropic.spectrum import (
    SIDES,
    consumers,
    decompose,
    folded,
    gain_columns,
    producers,
)
from growlab.widths import Carry, WidthGraph

MODES = ("scaffold", "scheduled")


class Isotropic(GrowthMethod, WidthDecision):
    """Add and remove neurons of isotropic layers, on demand or towards target widths.

    At every boundary each layer is evaluated in the basis where its incoming weights are S V^T. "scaffold" keeps Xi
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
        mode: "scaffold" or "scheduled"; the latter needs a `target_width`.
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
        self,
        mode: Literal["scaffold", "scheduled"] = "scaffold",
        max_pruning_error: float | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.boundaries, self.widths, self.choices = sorted_into(self.SETTINGS, settings, "Isotropic")
        one_of(MODES, mode=mode)
        at_least(0, **not_none(max_pruning_error=max_pruning_error))
        if (self.widths.target_width is None) == (mode == "scheduled"):
            raise ValueError("target_width goes with mode='scheduled', and only with it.")
        self.max_pruning_error = max_pruning_error
        self.wants_gradients = self.choices.importance == "gradient"

    def prepare(self, network: nn.Module, graph: WidthGraph, seed: int) -> WidthGraph:
        """Check that the network has isotropic layers.

        Raises:
            UserError: it has none.
        """
        with as_user_errors():
            adaptable(graph)
        return graph

    def observe(
        self, model: nn.Module, graph: WidthGraph, probe: tuple[Any, ...]
    ) -> Mapping[str, Observation]:
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
        decided = dict(widths)
        for group in adaptable(graph):
            scores = None
            if self.widths.target_width is None:
                scores = self._scores(graph, group, tensors, widths, gradients)
            decided[group] = self.widths.after(widths[group], scores)
        return decided

    def grow(self, expansion: Expansion) -> GrownTensors:
        """Resize every layer to its new width, one after the other in forward order."""
        graph, widths = expansion.graph, dict(expansion.old_widths)
        changing = [g for g in adaptable(graph) if expansion.new_widths[g] != widths[g]]
        # A change of basis mixes rows: their multipliers have to be folded into the weights.
        scales = folded(graph, changing, expansion.multipliers)
        tensors = {n: t * scales[n].to(t) if n in scales else t for n, t in expansion.old.items()}
        leading = None if expansion.leader is None else dict(expansion.leader)
        if leading is not None:
            leading |= {name: leading[name] * scale.to(leading[name]) for name, scale in scales.items()}
        # The averaged network's observations, from which its change was decided.
        as_leader = replace(expansion, observed=expansion.leader_observed or expansion.observed)
        gradients = {n: g * scales[n].to(g) if n in scales else g for n, g in expansion.gradients.items()}
        report: dict[str, dict[str, float | list[float]]] = {}
        bases: dict[str, Tensor] = {}
        removes = False
        for group in adaptable(graph):
            before = decompose(SIDES[self.choices.direction](graph, group, tensors, widths))[1]
            report[group] = {"singular_values": before.tolist()}
            if group not in changing:
                continue
            first = None
            if leading is not None:
                first = self._change(as_leader, group, leading, widths, gradients, None)
                leading |= first.tensors
            change = self._change(expansion, group, tensors, widths, gradients, first)
            tensors |= change.tensors
            widths[group] = expansion.new_widths[group]
            bases[group] = change.basis
            removes = removes or bool(change.removed)
            report[group] |= {"removed": change.removed, "removed_part": change.removed_part}
            if gradients:
                carry = Carry(bases={group: change.basis})
                before_widths = {**widths, group: change.basis.shape[1]}
                gradients = {
                    name: carry.carried(value, name, graph, before_widths, widths)
                    for name, value in gradients.items()
                }
        exact = self.choices.bias == 0 or self.choices.columns == "zero"
        exact = exact or all(_reads_gains(graph, group, widths) for group in bases)
        return GrownTensors(
            tensors,
            # Rows stored as m W have m times the gradient of W, see `growlab.growth.multipliers`.
            carry=Carry(bases=bases, scales=scales),
            allowed_error=self.max_pruning_error if removes else 0.0 if exact else None,
            report=report,
            folded=frozenset(scales),
        )

    def _change(
        self,
        expansion: Expansion,
        group: str,
        tensors: Mapping[str, Tensor],
        widths: Mapping[str, int],
        gradients: Mapping[str, Tensor],
        leader: Change | None,
    ) -> Change:
        return change_width(
            expansion.graph,
            tensors,
            widths,
            group,
            expansion.new_widths[group],
            self.choices,
            gradients or None,
            expansion.observed,
            expansion.generator,
            leader,
        )

    def _scores(
        self,
        graph: WidthGraph,
        group: str,
        tensors: Mapping[str, Tensor],
        widths: Mapping[str, int],
        gradients: Mapping[str, Tensor],
    ) -> Tensor:
        left, values, right = decompose(SIDES[self.choices.direction](graph, group, tensors, widths))
        layers = producers if self.choices.direction == "forward" else consumers
        known = all(layer.weight in gradients for layer in layers(graph, group))
        gradient = (
            SIDES[self.choices.direction](graph, group, gradients, widths) if known and gradients else None
        )
        return IMPORTANCES[self.choices.importance](left, values, right, gradient)


def _reads_gains(graph: WidthGraph, group: str, widths: Mapping[str, int]) -> bool:
    return all(gain_columns(graph, group, layer, widths) for layer in consumers(graph, group))


def adaptable(graph: WidthGraph) -> list[str]:
    """Return the isotropic groups whose width can change.

    Raises:
        ValueError: there are none.
    """
    found = [group for group in graph.isotropic if producers(graph, group)]
    if not found:
        reasons = {**graph.fixed, **graph.individuated}
        told = "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:3])
        raise ValueError(
            "isotropic growth needs a layer whose channels no operation tells apart, such as those of "
            f"growlab's IsotropicMLP; this network has none{f' ({told})' if told else ''}."
        )
    return found

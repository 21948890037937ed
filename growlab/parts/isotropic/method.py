"""Isotropic networks whose layers find their widths: growth and pruning by singular values (Bird, Section 3.3)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor, nn

from growlab.errors import UserError
from growlab.growth.method import Expansion, Growth, GrowthMethod, WidthDecision
from growlab.parts.isotropic.observation import Observation, watch
from growlab.parts.isotropic.resize import IMPORTANCES, Change, Choices, Columns, Correction, change_width
from growlab.parts.isotropic.spectrum import consumers, decompose, gain_columns, incoming, producers
from growlab.widths import Carry, WidthGraph

MODES = ("scaffold", "scheduled")


class Isotropic(GrowthMethod, WidthDecision):
    """Add and remove neurons of isotropic layers, on demand or towards target widths.

    At every boundary each layer is looked at in the basis where its incoming weights are S V^T. "scaffold" keeps
    as many neurons, Xi, with a score below the threshold theta as it was told: fewer, and neurons are added; more,
    and those with the lowest scores are removed. "scheduled" moves a number of neurons at a time towards target
    widths. How a neuron is added or removed: `growlab.parts.isotropic.resize.change_width`.

    **Preserves** the output exactly where neurons are only added, with the default choices. Removing one changes
    it about as much as it carried, its bias included where no gain channel takes that up: the receipt says what part
    of the incoming weights went (`removed_part`) and by how much the output changed; beyond `max_pruning_error` the
    event is undone and the run stops.

    **Departs from the paper**: scores are relative to the largest of a layer by default, so that one threshold
    suits layers and moments of training with other scales; an event moves at most `neurons_per_event` neurons of
    a layer; layers keep at least `min_width`.

    Args:
        mode: "scaffold" or "scheduled".
        every_n_epochs: epochs between boundaries.
        every_n_steps: optimizer steps between boundaries instead, or None.
        first: the first boundary: the epoch (or step) before which neurons may first come or go; None for
            `every_n_epochs` (`every_n_steps`).
        last: the last boundary, or None for none.
        scaffold: Xi, neurons kept below the threshold.
        threshold: theta.
        relative: compare scores with theta times the layer's largest score instead of with theta.
        target_width: width that "scheduled" moves every layer to.
        neurons_per_event: most neurons of a layer that one event adds or removes; None for no limit.
        min_width: of every layer.
        max_width: of every layer; None for no limit.
        importance: score of a neuron, a name in `growlab.parts.isotropic.resize.IMPORTANCES`.
        columns: see `growlab.parts.isotropic.resize.Choices`.
        bias: likewise.
        correction: likewise.
        least_squares: likewise.
        rotate: turn the basis also where neurons are only added (optimizers such as Adam depend on it).
        max_pruning_error: largest relative output error that an event which removes neurons may make; None: any.

    Raises:
        ValueError: a value cannot be used.
    """

    shrinks = True
    follows_norms = True

    def __init__(
        self,
        mode: Literal["scaffold", "scheduled"] = "scaffold",
        every_n_epochs: int = 1,
        every_n_steps: int | None = None,
        first: int | None = None,
        last: int | None = None,
        scaffold: int = 1,
        threshold: float = 0.1,
        relative: bool = True,
        target_width: int | None = None,
        neurons_per_event: int | None = None,
        min_width: int = 1,
        max_width: int | None = None,
        importance: Literal["singular_value", "gradient"] = "singular_value",
        columns: Columns = "orthogonal",
        bias: float = 0.0,
        correction: Correction = "bias",
        least_squares: bool = False,
        rotate: bool = True,
        max_pruning_error: float | None = None,
    ) -> None:
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"growth.mode must be {' or '.join(MODES)}, not {mode!r}.")
        if (target_width is None) == (mode == "scheduled"):
            raise ValueError("growth.target_width goes with growth.mode=scheduled, and only with it.")
        if importance not in IMPORTANCES:
            raise ValueError(f"growth.importance must be {' or '.join(IMPORTANCES)}, not {importance!r}.")
        counts = {
            "every_n_epochs": every_n_epochs,
            "every_n_steps": every_n_steps,
            "first": first,
            "target_width": target_width,
            "neurons_per_event": neurons_per_event,
            "min_width": min_width,
        }
        for name, value in counts.items():
            if value is not None and value < 1:
                raise ValueError(f"growth.{name} must be at least 1, not {value}.")
        if scaffold < 0 or threshold < 0:
            raise ValueError("growth.scaffold and growth.threshold must not be negative.")
        if max_width is not None and max_width < min_width:
            raise ValueError(f"growth.max_width={max_width} is below growth.min_width={min_width}.")
        self.mode, self.target_width = mode, target_width
        self.every = every_n_epochs if every_n_steps is None else every_n_steps
        self.by_step = every_n_steps is not None
        self.first, self.last = first or self.every, last
        self.scaffold, self.threshold, self.relative = scaffold, threshold, relative
        self.neurons_per_event, self.min_width, self.max_width = neurons_per_event, min_width, max_width
        self.importance, self.rotate, self.max_pruning_error = importance, rotate, max_pruning_error
        self.wants_gradients = importance == "gradient"
        self.choices = Choices(columns, bias, correction, least_squares)

    def prepare(self, network: nn.Module, graph: WidthGraph, seed: int) -> WidthGraph:
        """Refuse a network without isotropic layers; nothing else.

        Raises:
            UserError: the network has none.
        """
        try:
            adaptable(graph)
        except ValueError as error:
            raise UserError(str(error)) from error
        return graph

    def observe(
        self, model: nn.Module, graph: WidthGraph, probe: tuple[Any, ...]
    ) -> Mapping[str, Observation]:
        """What isotropic activations do on the probe batch, by which constants of removed neurons are corrected."""
        return watch(model, graph, probe)

    def boundary(self, epoch: int, step: int) -> int | None:
        """The epoch or step, where the layers are to be looked at before it."""
        now = step if self.by_step else epoch
        if now < self.first or (self.last is not None and now > self.last):
            return None
        # Between two boundaries the last one counts: it may not have been asked yet.
        return now - (now - self.first) % self.every

    def decide(
        self,
        graph: WidthGraph,
        tensors: Mapping[str, Tensor],
        widths: Mapping[str, int],
        gradients: Mapping[str, Tensor],
    ) -> dict[str, int]:
        """Width of each layer from here on.

        Raises:
            ValueError: the network has no isotropic layer, or what scores need is missing.
        """
        layers = adaptable(graph)
        decided = dict(widths)
        for group in layers:
            if self.target_width is not None:
                wanted = self.target_width
            else:
                scores = self._scores(graph, group, tensors, widths, gradients)
                limit = self.threshold * (float(scores.max()) if self.relative else 1.0)
                wanted = widths[group] + self.scaffold - int((scores < limit).sum())
            least, most = self.min_width, self.max_width
            if self.neurons_per_event is not None:
                step = self.neurons_per_event
                wanted = min(max(wanted, widths[group] - step), widths[group] + step)
            decided[group] = max(least, wanted if most is None else min(wanted, most))
        return decided

    def grow(self, expansion: Expansion) -> Growth:
        """Bring every layer to its new width, one after the other in forward order."""
        tensors, widths = dict(expansion.old), dict(expansion.old_widths)
        leading = None if expansion.leader is None else dict(expansion.leader)
        # What the network that this is an average of has decided by.
        as_leader = replace(expansion, observed=expansion.leader_observed or expansion.observed)
        gradients = dict(expansion.gradients)
        report: dict[str, dict[str, float | list[float]]] = {}
        bases: dict[str, Tensor] = {}
        removes = False
        for group in adaptable(expansion.graph):
            before = decompose(incoming(expansion.graph, group, tensors, widths))[1]
            wanted = expansion.new_widths[group]
            report[group] = {"singular_values": before.tolist()}
            if wanted == widths[group]:
                continue
            first = None
            if leading is not None:
                first = self._change(as_leader, group, leading, widths, gradients, None)
                leading |= first.tensors
            change = self._change(expansion, group, tensors, widths, gradients, first)
            tensors |= change.tensors
            widths[group] = wanted
            bases[group] = change.basis
            removes = removes or bool(change.removed)
            report[group] |= {"removed": change.removed, "removed_part": change.removed_part}
            if gradients:
                carry = Carry(bases={group: change.basis})
                before_widths = {**widths, group: change.basis.shape[1]}
                gradients = {
                    name: carry.carried(value, name, expansion.graph, before_widths, widths)
                    for name, value in gradients.items()
                }
        exact = self.choices.bias == 0 or self.choices.columns == "zero"
        exact = exact or all(_reads_gains(expansion.graph, group, widths) for group in bases)
        return Growth(
            tensors,
            carry=Carry(bases=bases),
            allowed_error=self.max_pruning_error if removes else 0.0 if exact else None,
            report=report,
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
            IMPORTANCES[self.importance],
            gradients or None,
            expansion.observed,
            expansion.generator,
            self.rotate,
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
        left, values, right = decompose(incoming(graph, group, tensors, widths))
        known = all(layer.weight in gradients for layer in producers(graph, group))
        gradient = incoming(graph, group, gradients, widths) if known and gradients else None
        return IMPORTANCES[self.importance](left, values, right, gradient)


def _reads_gains(graph: WidthGraph, group: str, widths: Mapping[str, int]) -> bool:
    return all(gain_columns(graph, group, layer, widths) for layer in consumers(graph, group))


def adaptable(graph: WidthGraph) -> list[str]:
    """The isotropic layers whose width can change.

    Raises:
        ValueError: there is none.
    """
    found = [group for group in graph.isotropic if producers(graph, group)]
    if not found:
        reasons = {**graph.fixed, **graph.individuated}
        told = "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:3])
        raise ValueError(
            "growth=isotropic needs a layer whose channels no operation tells apart, such as those of "
            f"model=isotropic_mlp; this network has none{f' ({told})' if told else ''}."
        )
    return found

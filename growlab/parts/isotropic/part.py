"""Parts for isotropic layers in growing networks: layers that adapt their widths, and weights psi of gains."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from growlab.base.errors import UserError, as_user_errors
from growlab.base.ranks import gather
from growlab.base.settings import at_least
from growlab.grower.part import Part, WidthPart
from growlab.grower.triggers import GrowingNetwork, Never, Trigger, Widths
from growlab.growth.method import WidthDecision
from growlab.parts.isotropic.method import Isotropic, adaptable
from growlab.parts.isotropic.spectrum import consumers, producers
from growlab.widths import WidthGraph, tensors_of


class IsotropicLayers(WidthPart):
    """Adds and removes neurons of isotropic layers by separate events; the run's method grows the other groups.

    Isotropic layers start at the width of the given network. At each boundary an event by `Isotropic` precedes the
    trigger's, with a separate receipt (`asked_by`). `Isotropic` documents what such an event preserves; the trigger's
    events preserve what the run's method does.

    Args:
        mode: see `Isotropic`.
        settings: other arguments of `Isotropic`.
    """

    SETTINGS = (Isotropic,)

    name = "isotropic"
    follows_norms = True
    saved: ClassVar[Mapping[str, str]] = {"asked": "_asked"}
    method: Isotropic

    def __init__(self, mode: Literal["reserve", "scheduled"] = "reserve", **settings: Any) -> None:
        self.method = Isotropic(mode, **settings)
        self._start: dict[str, int] = {}
        self._prepared: WidthGraph | None = None
        # The last boundary at which widths were decided.
        self._asked = -1

    def applies(self, trigger: Trigger) -> bool:
        """Return True if the network grows; otherwise isotropic layers keep their widths too."""
        return not isinstance(trigger, Never)

    def prepare(self, network: nn.Module, graph: WidthGraph, seed: int, example: tuple[Any, ...]) -> WidthGraph:
        """Claim all groups in the norm of isotropic activations; those that are not isotropic keep their width."""
        with as_user_errors():
            adaptable(graph)
        # Methods that do not support norms must not widen groups whose norm is computed.
        self.groups = tuple(dict.fromkeys(group for radius in graph.radii for group in radius.groups))
        self._prepared = graph
        self._start = {group: graph.groups[group].full_width for group in self.groups}
        return graph

    def check(self, grower: GrowingNetwork) -> None:
        """Check that nothing else decides these widths or needs to know them in advance.

        Raises:
            UserError: the run's method decides widths itself, its trigger plans with the cost of future widths, or a
                layer is inserted later as the identity between two isotropic layers, whose widths may differ by then.
        """
        if isinstance(grower.method, WidthDecision):
            raise UserError(
                f"{grower.method.name} decides the widths of isotropic layers already: leave IsotropicLayers out, or "
                "take another growth method for the other layers."
            )
        if grower.trigger.plans_cost:
            raise UserError(
                "a budget needs the cost of future widths, which isotropic layers decide during training by their "
                "singular values: take a schedule of stages, or leave IsotropicLayers out."
            )
        assert self._prepared is not None
        for group in self.groups:
            consumed = any(layer.weight in grower.graph.axes for layer in consumers(self._prepared, group))
            if consumed and not producers(grower.graph, group):
                raise UserError(
                    f"{group} is inserted later as the identity, for which the layers on both sides must have equal "
                    "widths; isotropic layers decide their own: leave IsotropicLayers out, or insert no layer."
                )

    def stage_widths(self, num_stages: int) -> Mapping[str, Sequence[int]]:
        """Return the initial widths for every stage, for planning."""
        return {group: [width] * num_stages for group, width in self._start.items()}

    def decide(self, grower: GrowingNetwork) -> Widths | None:
        """Decide the layers' widths once at each boundary; None if nothing changes."""
        boundary = self.method.boundary(grower.clock.epoch, grower.clock.step)
        if boundary is None or boundary <= self._asked:
            return None
        self._asked = boundary
        graph, old = grower.graph, grower.state.widths
        with as_user_errors():
            decided = self.method.decide(graph, tensors_of(grower.network, graph), old, grower.gradients())
        # Ranks compute the same; if one differs, it follows rank 0, and the comparison of ranks reports it.
        widths: dict[str, int] = gather({group: decided[group] for group in self.groups})[0]
        return None if all(old[group] == width for group, width in widths.items()) else widths


MODES = ("constant", "decayed")


class GainWeights(Part):
    """Freezes or decays the weights psi by which layers read gain channels.

    With a gain channel a layer computes W f(x) + psi g + b, and psi absorbs the contribution of a removed neuron's
    bias. Before any neuron is removed, psi is 0.

    Args:
        mode: "constant": only removed neurons change psi, not optimizers or weight decay; "decayed": decay * ||psi||^2
            is added to the loss, so that psi fades and the network learns without it. Without this part, psi is trained
            like all weights.
        decay: coefficient of "decayed".

    Raises:
        UserError: the mode is unknown, or the decay is negative.
    """

    name = "gain_weights"

    def __init__(self, mode: Literal["constant", "decayed"] = "decayed", decay: float = 0.1) -> None:
        if mode not in MODES:
            raise UserError(f"mode must be {' or '.join(MODES)}, not {mode!r}.")
        with as_user_errors():
            at_least(0, decay=decay)
        self._mode, self._decay = str(mode), decay
        self._saved_gains: list[tuple[nn.Module, Tensor]] = []

    def prepare(self, network: nn.Module, graph: WidthGraph, seed: int, example: tuple[Any, ...]) -> WidthGraph:
        """Check that the network has layers that read gain channels."""
        if not readers(network):
            raise UserError(
                f"mode={self._mode!r} needs layers that read gains, such as those of growlab's IsotropicMLP with "
                "gain_channel=True; this network has none."
            )
        return graph

    def before_step(self, grower: GrowingNetwork) -> None:
        """Add the decay's gradient, or store psi and zero its gradient."""
        layers = readers(grower.network)
        if self._mode == "constant":
            self._saved_gains = [(layer, gain_weights(layer).clone()) for layer in layers]
        for layer in layers:
            if layer.weight.grad is None:
                continue
            if self._mode == "constant":
                # Optimizers' moments of psi stay zero.
                gain_weights(layer, layer.weight.grad).zero_()
            else:
                gain_weights(layer, layer.weight.grad).add_(gain_weights(layer), alpha=2 * self._decay)

    def after_step(self, grower: GrowingNetwork) -> None:
        """Restore a constant psi."""
        for layer, value in self._saved_gains:
            gain_weights(layer).copy_(value)
        self._saved_gains = []


def readers(network: nn.Module) -> list[nn.Linear | nn.Conv2d]:
    """Return the layers with a column for the gain (`add_gain_column`)."""
    return [
        module
        for module in network.modules()
        if isinstance(module, nn.Linear | nn.Conv2d) and getattr(module, "reads_gain", False)
    ]


def gain_weights(layer: nn.Module, tensor: Tensor | None = None) -> Tensor:
    """Return the column psi [out, 1, ...] of a layer's weight, or of a tensor of its shape, as a detached view."""
    return (layer.get_parameter("weight") if tensor is None else tensor).detach()[:, -1:]

"""Freeze or decay the weights psi by which layers read gain channels (from the author's later code)."""

from typing import Any, Literal

from torch import Tensor, nn

from growlab.base.errors import UserError, as_user_errors
from growlab.base.settings import at_least
from growlab.grower.part import Part
from growlab.grower.triggers import GrowingNetwork
from growlab.widths import WidthGraph

MODES = ("constant", "decayed")


class GainWeights(Part):
    """Freezes or decays the weights psi by which layers read gain channels.

    With a gain channel a layer computes W f(x) + psi g + b, and psi absorbs the contribution of a removed neuron's
    bias. Before any neuron is removed, psi is 0.

    Args:
        mode: "constant": only removed neurons change psi, not optimizers or weight decay; "decayed": decay * ||psi||^2
            is added to the loss, so that psi fades and the network learns to do without it. Without this part, psi is
            trained like all weights.
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
        self._held: list[tuple[nn.Module, Tensor]] = []

    def prepare(
        self, network: nn.Module, graph: WidthGraph, seed: int, example: tuple[Any, ...]
    ) -> WidthGraph:
        """Check that the network has layers that read gain channels.

        Raises:
            UserError: it has none.
        """
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
            self._held = [(layer, gain_weights(layer).clone()) for layer in layers]
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
        for layer, value in self._held:
            gain_weights(layer).copy_(value)
        self._held = []


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

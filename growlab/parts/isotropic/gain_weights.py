"""Weights by which layers read gains, held or decayed apart from all others (the author's later code; his psi)."""

from typing import Any, Literal

from torch import Tensor, nn

from growlab.base.errors import UserError, as_user_errors
from growlab.base.settings import at_least
from growlab.grower.part import Part
from growlab.grower.triggers import GrowingNetwork
from growlab.widths import WidthGraph

MODES = ("constant", "decayed")


class GainWeights(Part):
    """Lets optimizers leave the weights psi alone by which layers read gains, or lets psi decay.

    With a gain channel a layer computes W f(x) + psi g + b, and what a removed neuron's bias contributed goes into
    psi. The activation of a network without neurons removed has psi = 0.

    Args:
        mode: "constant": removed neurons alone change psi, optimizers do not, nor does weight decay; "decayed": the
            loss has decay ||psi||^2 besides, so that psi fades and the network finds other ways. Without the part psi
            is trained as all weights are.
        decay: of "decayed".

    Raises:
        UserError: there is no such mode, or the decay is negative.
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
        """Refuse a network whose layers read no gains; nothing else.

        Raises:
            UserError: none does.
        """
        if not readers(network):
            raise UserError(
                f"mode={self._mode!r} needs layers that read gains, such as those of growlab's IsotropicMLP with "
                "gain_channel=True; this network has none."
            )
        return graph

    def before_step(self, grower: GrowingNetwork) -> None:
        """Add the decay's gradient, or note what psi is."""
        layers = readers(grower.network)
        if self._mode == "constant":
            self._held = [(layer, gain_weights(layer).clone()) for layer in layers]
        for layer in layers:
            if layer.weight.grad is None:
                continue
            if self._mode == "constant":
                # Moments that optimizers keep of it stay zero.
                gain_weights(layer, layer.weight.grad).zero_()
            else:
                gain_weights(layer, layer.weight.grad).add_(gain_weights(layer), alpha=2 * self._decay)

    def after_step(self, grower: GrowingNetwork) -> None:
        """Put back what a constant psi was."""
        for layer, value in self._held:
            gain_weights(layer).copy_(value)
        self._held = []


def readers(network: nn.Module) -> list[nn.Linear | nn.Conv2d]:
    """The layers that `add_gain_column` has given a column for the gain."""
    return [
        module
        for module in network.modules()
        if isinstance(module, nn.Linear | nn.Conv2d) and getattr(module, "reads_gain", False)
    ]


def gain_weights(layer: nn.Module, tensor: Tensor | None = None) -> Tensor:
    """The column psi [out, 1, ...] of a layer's weight, or of a tensor of its shape, as a view without gradient."""
    return (layer.get_parameter("weight") if tensor is None else tensor).detach()[:, -1:]

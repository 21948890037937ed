"""Observe isotropic activations on a batch, for the bias corrections of growth and pruning."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from growlab.growth.outputs import positional, quietly
from growlab.widths import WidthGraph
from growlab.widths.inputs import call_with


@dataclass(frozen=True)
class Observation:
    """Statistics of an isotropic activation on a batch.

    Attributes:
        gain: E[g], mean factor on the vectors.
        mean: E[x] of its input x, [n].
        square: E[x x^T], [n, n].
    """

    gain: float
    mean: Tensor
    square: Tensor


def watch(model: nn.Module, graph: WidthGraph, probe: Tensor | Sequence[Tensor]) -> Mapping[str, Observation]:
    """Run a batch in eval mode and observe every activation whose norm is over a single group.

    Args:
        model: the network; left unchanged.
        graph: its width graph, traced with `follow_norms`.
        probe: its positional inputs.

    Returns:
        Observations by module path, in float64 on the activations' device. Modules whose output does not have the shape
        of their first input are left out: they are more than an activation.
    """
    found: dict[str, Observation] = {}

    def record(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            x = inputs[0]
            if name in with_gain and isinstance(output, Tensor):
                output = output[:, :-1]
            if not isinstance(output, Tensor) or output.shape != x.shape:
                return
            x_BN, f_BN = (tensor.double().movedim(1, -1).flatten(0, -2) for tensor in (x, output))
            squares_B = x_BN.square().sum(1)
            gains_B = (f_BN * x_BN).sum(1)[squares_B > 0] / squares_B[squares_B > 0]
            gain = float(gains_B.mean()) if len(gains_B) else 1.0
            found[name] = Observation(gain, x_BN.mean(0), x_BN.T @ x_BN / len(x_BN))

        return hook

    known = dict(model.named_modules())
    with_gain = {radius.name for radius in graph.radii if radius.gain_channel}
    names = [radius.name for radius in graph.radii if len(radius.groups) == 1]
    hooks = [known[name].register_forward_hook(record(name)) for name in names if name in known]
    try:
        with quietly(model):
            model.eval()
            call_with(model, positional(probe))
    finally:
        for hook in hooks:
            hook.remove()
    return found

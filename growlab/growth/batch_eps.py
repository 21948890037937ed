"""Batch normalisation's eps, which does not follow an input that growth has rescaled, set apart in parity's check.

A channel of batch variance v that is rescaled by c comes out multiplied by sqrt(c^2 (v + eps) / (c^2 v + eps)) in
train mode. Where v is large against eps that is rounding, in a dead channel it is c: no bound is tight, and changes
add up where one normalisation is applied several times. With c^2 eps in the place of eps a rescaled network computes
what it did, so that train mode is as exact a check as eval mode. The change that eps itself makes is measured apart.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from growlab.growth.method import Expansion, GrownTensors
from growlab.growth.rescale import eps_ratio

#: Runs a network's train mode as if eps had been rescaled too.
Setting = Callable[[], contextlib.AbstractContextManager[Any]]
# By where the running variance lies in memory: squared scale of the input, and what the weight was divided by [C].
_Rescaled = tuple[float, Tensor]
_CALLED_WITH = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


def eps_follows(
    model: nn.Module, expansion: Expansion, growth: GrownTensors, tensors: Mapping[str, Tensor]
) -> Setting | None:
    """Make the setting in which a grown network's eps follows the scales of what enters batch normalisations.

    Args:
        model: the network, after the event.
        expansion: the event.
        growth: the tensors and scales that its method has computed.
        tensors: the grown network's, by name.

    Returns:
        A function that enters it, or None where no normalisation's input was rescaled.
    """
    rescaled = {}
    for norm in expansion.graph.norms:
        scale = growth.norm_scale.get(norm.name, 1.0)
        if scale == 1.0 or norm.weight is None or norm.running_var is None:
            continue
        weight, (kept,) = tensors[norm.weight], expansion.kept(norm.running_var)
        ratio = weight.new_ones(weight.shape)
        ratio[kept.to(ratio.device)] = eps_ratio(expansion.old[norm.running_var], scale, norm.eps).to(ratio)
        rescaled[tensors[norm.running_var].data_ptr()] = (scale**2, ratio)
    return (lambda: _following(model, rescaled)) if rescaled else None


@contextlib.contextmanager
def _following(model: nn.Module, rescaled: Mapping[int, _Rescaled]) -> Iterator[None]:
    """Let eps follow in all calls of torch's function, and in modules that normalise over processes by another."""
    others = dict(rescaled)
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, _BatchNorm) and hasattr(module, "process_group"):
                known = others.pop(_place(module.running_var), None)
                if known is not None:
                    stack.enter_context(_in_module(module, *known))
        stack.enter_context(_Following(others))
        yield


def _place(running_var: Tensor | None) -> int:
    return 0 if running_var is None else running_var.data_ptr()


@contextlib.contextmanager
def _in_module(module: _BatchNorm, square: float, ratio: Tensor) -> Iterator[None]:
    eps, weight = module.eps, module._parameters["weight"]
    module.eps = eps * square
    module._parameters["weight"] = nn.Parameter(module.weight.detach() * ratio)
    try:
        yield
    finally:
        module.eps, module._parameters["weight"] = eps, weight


class _Following(TorchFunctionMode):
    """Lets eps follow where statistics are the batch's; with running ones the weight has taken it up."""

    def __init__(self, rescaled: Mapping[int, _Rescaled]) -> None:
        super().__init__()
        self._rescaled = rescaled

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        given = {
            "eps": 1e-5,
            "training": False,
            **dict(zip(_CALLED_WITH, args, strict=False)),
            **(kwargs or {}),
        }
        known = self._rescaled.get(_place(given["running_var"]))
        if given["training"] and known is not None:
            square, ratio = known
            given |= {"eps": given["eps"] * square, "weight": given["weight"] * ratio}
        return func(**given)

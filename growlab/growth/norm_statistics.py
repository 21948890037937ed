"""Batch and instance normalisation at a growth event: statistics of new channels, and the eps of rescaled ones.

With the default mean 0 and variance 1, eval mode would not normalise new channels until running averages have adapted:
their activations would grow from layer to layer and dominate the output of a deep network. So new channels get the
statistics of the probe batch.

In train mode, rescaling a channel of batch variance v by c multiplies its output by
sqrt(c^2 (v + eps) / (c^2 v + eps)). If v is much larger than eps, that factor is 1 up to rounding; in a dead channel it
is c. No bound is tight, and changes add up if one normalisation is applied several times. With c^2 eps in place of eps
a rescaled network computes the same function, so outputs can be compared as exactly in train mode as in eval mode. The
change due to eps is measured separately.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from growlab.growth.method import GrownTensors, GrowthContext
from growlab.growth.rescale import eps_ratio

#: Mean and variance of each channel of a normalisation's input, by its name.
Moments = Mapping[str, tuple[Tensor, Tensor]]
#: Makes a context in which train mode runs with rescaled eps.
Setting = Callable[[], contextlib.AbstractContextManager[Any]]
# By the data pointer of the running variance: squared scale of the input, and the divisor of the weight [C].
_Rescaled = tuple[float, Tensor]


def statistics_writer(
    context: GrowthContext, growth: GrownTensors, tensors: Mapping[str, Tensor], average: Callable[[Tensor], Tensor]
) -> Callable[[Moments], None]:
    """Return a callback that writes the probe batch's statistics into new channels of the grown network's `tensors`.

    Channels whose statistics the method sets, such as copies, keep them. An averaged copy of the network takes the
    network's statistics. `average` maps this process's tensor to the mean over all processes.
    """
    new = dict(_new_channels(context, growth))
    averaged_event = None if context.averaged_event is None else context.averaged_event[0]

    def write(moments: Moments) -> None:
        for norm in context.graph.norms:
            pair = moments.get(norm.name, (None, None))
            for name, moment in zip((norm.running_mean, norm.running_var), pair, strict=True):
                if name not in new:
                    continue
                if context.averaged is not None:
                    moment = None if averaged_event is None else averaged_event.get(name)
                elif moment is not None:
                    moment = average(moment)
                if moment is not None:
                    tensor = tensors[name]
                    tensor.copy_(torch.where(new[name].to(tensor.device), moment.to(tensor), tensor))

    return write


def _new_channels(context: GrowthContext, growth: GrownTensors) -> Iterable[tuple[str, Tensor]]:
    """Yield (name of a running average, mask [channels] of new channels that have the default)."""
    before, after = context.old_widths, context.new_widths
    for norm in context.graph.norms:
        for name in (norm.running_mean, norm.running_var):
            if name is None or name not in growth.tensors or name in context.constants or not context.changes(name):
                continue
            (axis,) = context.graph.axes[name]
            sources = {group: growth.carry.source(group, before, after) for group in axis.groups}
            default = growth.tensors[name].cpu() == context.norm_defaults[name]
            mask = (axis.lift(sources, after, before) < 0) & default
            if bool(mask.any()):
                yield name, mask


def eps_follows(
    model: nn.Module, context: GrowthContext, growth: GrownTensors, tensors: Mapping[str, Tensor]
) -> Setting | None:
    """Return a function that makes a context in which eps of batch normalisations is scaled with their inputs.

    None if no normalisation's input was rescaled. `model` and `tensors` are the grown network and its tensors.
    """
    rescaled = {}
    for norm in context.graph.norms:
        scale = growth.norm_scale.get(norm.name, 1.0)
        if scale == 1.0 or norm.weight is None or norm.running_var is None:
            continue
        weight, (kept,) = tensors[norm.weight], context.kept(norm.running_var)
        ratio = torch.ones(weight.shape, dtype=weight.dtype, device=weight.device)
        ratio[kept.to(ratio.device)] = eps_ratio(context.old[norm.running_var], scale, norm.eps).to(ratio)
        rescaled[tensors[norm.running_var].data_ptr()] = (scale**2, ratio)
    return (lambda: _rescaled_eps(model, rescaled)) if rescaled else None


@contextlib.contextmanager
def _rescaled_eps(model: nn.Module, rescaled: Mapping[int, _Rescaled]) -> Iterator[None]:
    """Rescale eps in all `F.batch_norm` calls, and in synchronised batch normalisations, which call other functions."""
    by_mode = dict(rescaled)
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, _BatchNorm) and hasattr(module, "process_group"):
                square_and_ratio = by_mode.pop(_address(module.running_var), None)
                if square_and_ratio is not None:
                    stack.enter_context(_in_module(module, *square_and_ratio))
        stack.enter_context(_RescaledEps(by_mode))
        yield


def _address(running_var: Tensor | None) -> int:
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


class _RescaledEps(TorchFunctionMode):
    """Rescales eps where batch statistics are used; for running statistics the weight accounts for it already."""

    def __init__(self, rescaled: Mapping[int, _Rescaled]) -> None:
        super().__init__()
        self._rescaled = rescaled

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        call = signature(func).bind(*args, **(kwargs or {}))
        call.apply_defaults()
        arguments = call.arguments
        address = _address(arguments["running_var"])
        if arguments["training"] and address in self._rescaled:
            square, ratio = self._rescaled[address]
            arguments |= {"eps": arguments["eps"] * square, "weight": arguments["weight"] * ratio}
        return func(**arguments)

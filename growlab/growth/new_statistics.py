"""Statistics that new channels of batch and instance normalisation begin with: those of parity's batch.

At their defaults, mean 0 and variance 1, eval mode does not normalise new channels until running averages have found
them: they get larger from layer to layer, in a deep network until what they leave of the output is rounding.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from growlab.growth.method import Expansion, GrownTensors

#: Mean and variance of each channel, by the name of the normalisation that they enter.
Moments = Mapping[str, tuple[Tensor, Tensor]]


def begin(
    expansion: Expansion,
    growth: GrownTensors,
    tensors: Mapping[str, Tensor],
    average: Callable[[Tensor], Tensor],
) -> Callable[[Moments], None]:
    """What writes them, once a batch has been seen in train mode.

    Channels that the method gives statistics of its own, copies above all, keep these. An average of networks takes
    what the network that it follows has got.

    Args:
        expansion: the event.
        growth: what its method has computed.
        tensors: the grown network's, by name; running averages are written in place.
        average: maps what this process has seen to the mean over all.
    """
    new = dict(_new_channels(expansion, growth))
    leading = None if expansion.leading is None else expansion.leading[0]

    def write(found: Moments) -> None:
        for norm in expansion.graph.norms:
            seen = found.get(norm.name)
            for name, moment in zip((norm.running_mean, norm.running_var), seen or (None, None), strict=True):
                if name not in new:
                    continue
                if expansion.leader is not None:
                    moment = None if leading is None else leading.get(name)
                elif moment is not None:
                    moment = average(moment)
                if moment is not None:
                    tensor = tensors[name]
                    tensor.copy_(torch.where(new[name].to(tensor.device), moment.to(tensor), tensor))

    return write


def _new_channels(expansion: Expansion, growth: GrownTensors) -> Iterable[tuple[str, Tensor]]:
    """By the name of a running average, a mask [channels] of what is new there and has its default."""
    before, after = expansion.old_widths, expansion.new_widths
    for norm in expansion.graph.norms:
        for name in (norm.running_mean, norm.running_var):
            known = name in growth.tensors and name not in expansion.constants
            if name is None or not known or not expansion.changes(name):
                continue
            (axis,) = expansion.graph.axes[name]
            sources = {group: growth.carry.source(group, before, after) for group in axis.groups}
            default = growth.tensors[name].cpu() == expansion.norm_defaults[name]
            mask = (axis.lift(sources, after, before) < 0) & default
            if bool(mask.any()):
                yield name, mask

"""Initialise running statistics of new channels in batch and instance normalisation from the parity probe batch.

With the defaults, mean 0 and variance 1, eval mode does not normalise new channels until running averages have adapted:
their activations grow from layer to layer, and in a deep network they drown the output.
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
    """Return a callback that writes the probe batch's statistics into new channels.

    Channels whose statistics the method sets, such as copies, keep these. An average of networks takes the statistics
    of the network that it averages.

    Args:
        expansion: the event.
        growth: the result of its method.
        tensors: the grown network's, by name; running averages are written in place.
        average: maps this process's tensor to the mean over all processes.
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
    """Yield (name of a running average, mask [channels] of new channels that have the default)."""
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

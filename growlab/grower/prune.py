"""Remove channels from a trained network by its width groups: structured pruning with the same tracer as growth."""

from collections.abc import Mapping, Sequence
from functools import partial
from numbers import Integral, Real
from typing import Any, Literal

import torch
from torch import Tensor, nn

from growlab.base.devices import on_cpu
from growlab.base.errors import UserError, as_user_errors
from growlab.growth.constants import as_applied, as_stored
from growlab.growth.method import GrowthContext
from growlab.growth.outputs import evaluate, network_inputs
from growlab.growth.parity import exact_rounding, relative_error
from growlab.growth.rescale import attention_factors
from growlab.growth.weighted_norms import weigh
from growlab.optim import Inheritance, follow
from growlab.optim.carry import default_inheritance
from growlab.widths import Carry, Example, WidthGraph, grid, replace_tensors, restore_tensors, tensors_of
from growlab.widths.meta import copied

#: Channels of a group to keep: their indices, their number, or their fraction.
Keep = int | float | Sequence[int] | Tensor
Score = Literal["l1", "taylor", "random"]


@on_cpu
def prune(
    network: nn.Module,
    graph: WidthGraph,
    keep: Keep | Mapping[str, Keep],
    score: Score | Mapping[str, Tensor] = "l1",
    optimizer: torch.optim.Optimizer | None = None,
    example: Example | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Remove channels from a network, in place; it stays an ordinary network of its class, with smaller widths.

    The pruned network computes the same as the network with the removed channels masked: consumers do not read them,
    and statistics of layer, RMS and group normalisations run over the channels that are kept.

    Args:
        network: the network that `graph` was traced from, at its full widths.
        graph: from `growlab.trace`.
        keep: channels to keep, by group, or one fraction for all groups; other groups stay whole. A channel of a
             group of attention heads is a head, with the key head that it shares.
        score: how channels are ranked where `keep` is a number: "l1", the sum of absolute weights that produce or
            consume the channel (Li et al. 2017); "taylor", the sum of |weight * gradient| over them, with the gradients
            in `.grad` (Molchanov et al. 2019); "random"; or custom scores, [channels] by group.
        optimizer: pruned too: the same object and groups, with the state of the kept channels; state that has no
            channels, such as Adafactor's, is reset with a warning.
        example: an input of the network; if given, pruned and masked outputs are compared, and the network is not
            changed if they differ.
        seed: seed of random scores.

    Returns:
        The indices that were kept, in order, by group.

    Raises:
        UserError: a group or channel does not exist, no channel of a group would be left, gradients are missing for
            "taylor", the outputs on `example` differ from those of the masked network, or the optimizer cannot follow.
            The network is then unchanged.
    """
    wanted = dict(keep) if isinstance(keep, Mapping) else dict.fromkeys(graph.groups, keep)
    tensors = as_applied(graph, tensors_of(network, graph))
    before = graph.widths_of({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    if unknown := [group for group in wanted if group not in graph.groups]:
        raise UserError(f"the network has no width group {unknown[0]!r}; there are {', '.join(graph.groups)}.")
    kept = {
        group: _kept(group, channels, before[group], partial(_scores, network, graph, group, before, score, seed))
        for group, channels in wanted.items()
    }
    kept = {group: channels for group, channels in kept.items() if len(channels) < before[group]}
    after = {group: len(kept[group]) if group in kept else width for group, width in before.items()}
    factors = attention_factors(GrowthContext(graph, tensors, before, after, seed, stage=0))
    masked = None
    if example is not None:
        inputs = network_inputs(example, network)
        masked = evaluate(_masked(network, graph, before, kept), inputs)
    identity = {group: torch.arange(width) for group, width in before.items()}
    new = {}
    for name, tensor in tensors.items():
        direction = graph.lengths.get(name, name)
        if graph.changes(direction, before, after) or direction in factors:
            positions = [axis.lift({**identity, **kept}, after, before) for axis in graph.axes[name]]
            new[name] = tensor[grid(positions, tensor.device)] * factors.get(name, 1.0)
    replaced = replace_tensors(network, graph, as_stored(graph, new))
    if masked is not None:
        error = relative_error(masked, evaluate(network, inputs))
        if error > exact_rounding(network, masked):
            restore_tensors(network, graph, replaced)
            raise UserError(
                f"the pruned network's output would differ from the masked one's by {error:.0e}: its code computes "
                "numbers from one of these widths; leave out some of " + ", ".join([*kept][:5]) + "."
            )
    if optimizer is not None:
        scales = {name: 1.0 / factor for name, factor in factors.items()}
        # Momentum is kept too, which growth resets.
        state: Inheritance = "inherit" if default_inheritance(optimizer) == "reset" else "auto"
        try:
            with as_user_errors():
                follow(optimizer, replaced, graph, before, after, state, Carry(sources=kept, scales=scales))
        except UserError:
            restore_tensors(network, graph, replaced)
            raise
    return {group: kept.get(group, identity[group]) for group in wanted}


def _kept(group: str, keep: Any, width: int, scores: Any) -> Tensor:
    if isinstance(keep, Real) and not isinstance(keep, bool):
        number = int(keep) if isinstance(keep, Integral) else max(1, round(float(keep) * width))
        if not 1 <= number <= width or not (isinstance(keep, Integral) or 0 < float(keep) <= 1):
            raise UserError(f"{group} has {width} channels and cannot keep {keep}; give 1 to {width}, or a fraction.")
        return scores().topk(number).indices.sort().values if number < width else torch.arange(width)
    channels = torch.as_tensor(keep, dtype=torch.int64).cpu().sort().values
    if (
        channels.dim() != 1
        or not len(channels)
        or len(channels.unique()) < len(channels)
        or not 0 <= int(channels[0]) <= int(channels[-1]) < width
    ):
        raise UserError(f"{group} can keep some of its channels 0 to {width - 1}, each once; not {channels.tolist()}.")
    return channels


def _scores(
    network: nn.Module,
    graph: WidthGraph,
    group: str,
    widths: Mapping[str, int],
    score: Score | Mapping[str, Tensor],
    seed: int,
) -> Tensor:
    width = widths[group]
    if isinstance(score, Mapping):
        if group not in score or tuple(score[group].shape) != (width,):
            raise UserError(f"score has no [{width}] tensor for {group}.")
        return score[group].detach().double().cpu()
    if score == "random":
        return torch.rand(width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if score not in ("l1", "taylor"):
        raise UserError(f"there is no score {score!r}; there are l1, taylor and random, or scores by group.")
    scores, tensors = torch.zeros(width, dtype=torch.float64), as_applied(graph, tensors_of(network, graph))
    for name, parameter in network.named_parameters():
        axes = graph.axes.get(name, ())
        # Gains, biases and lengths do not measure a channel's importance.
        if len(axes) < 2 or name in graph.lengths or not any(group in axis.groups for axis in axes):
            continue
        size = tensors[name]
        if score == "taylor":
            if parameter.grad is None:
                raise UserError(f'score="taylor" reads gradients, and {name} has none; call backward() first.')
            size = parameter.detach() * parameter.grad
            length, dim = graph.weight_norms.get(name, ("", 0))
            if length and (g := network.get_parameter(length)).grad is not None:
                # The gradient of v is orthogonal to v.
                size = size + g.detach() * g.grad * (parameter / torch.norm_except_dim(parameter, 2, dim)).detach() ** 2
        size = size.abs().double().cpu()
        for dim, axis in enumerate(axes):
            if group in axis.groups:
                others = [other for other in range(size.dim()) if other != dim]
                scores.index_add_(0, *_by_channel(axis, group, widths, size.sum(others)))
    return scores


def _by_channel(axis: Any, group: str, widths: Mapping[str, int], values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the channel of each position that belongs to the group, and the position's value."""
    channels = {other: torch.full((widths[other],), -1.0) for other in axis.groups}
    channels[group] = torch.arange(widths[group], dtype=torch.float64)
    channel = axis.spread(channels, widths, fixed=-1.0)
    return channel[channel >= 0].long(), values[channel >= 0]


def _masked(network: nn.Module, graph: WidthGraph, widths: Mapping[str, int], kept: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of the network whose consumers do not read the channels that are not kept."""
    masked = copied(network)
    masks = {group: torch.zeros(widths[group]).index_fill_(0, channels, 1.0) for group, channels in kept.items()}
    every = {group: masks.get(group, torch.ones(width)) for group, width in widths.items()}
    stored = tensors_of(masked, graph)
    tensors = dict(as_applied(graph, stored))
    for name, axes in graph.axes.items():
        for dim, axis in enumerate(axes):
            if axis.role == "in" and set(axis.groups) & kept.keys():
                mask = axis.spread({g: every[g] for g in axis.groups}, widths, fixed=1.0).to(tensors[name])
                tensors[name] = tensors[name] * mask.view(-1, *[1] * (tensors[name].dim() - dim - 1))
    with torch.no_grad():
        for name, tensor in as_stored(graph, tensors).items():
            stored[name].copy_(tensor)
    weigh(masked, graph, widths, {group: mask.tolist() for group, mask in masks.items()})
    return masked

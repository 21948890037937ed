"""Tracing of a full-width network for growth, and checks of networks that cannot grow."""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from growlab.base.errors import UserError, as_user_errors
from growlab.base.settings import whole
from growlab.grower.part import Part
from growlab.growth import GrowthMethod
from growlab.growth.hooks import state_of
from growlab.widths import Example, UnsupportedOperation, WidthGraph, trace
from growlab.widths.inputs import inputs_of, values_of


def no_widths() -> WidthGraph:
    """Width graph of a network of which nothing is to grow."""
    return WidthGraph({}, {}, (), (), frozenset(), 0)


def trace_for_growth(
    network: nn.Module,
    example: Example,
    method: GrowthMethod,
    parts: Sequence[Part] = (),
    seed: int = 0,
    opaque: Sequence[str] = (),
    grows: bool = True,
    submodule: str | nn.Module | None = None,
) -> WidthGraph:
    """Trace a full-width network, and let method and parts change how it keeps its weights, in place.

    Args:
        network: at full width.
        example: see `Grower`.
        method: the growth method.
        parts: features beside growing.
        seed: the run's.
        opaque: see `growlab.widths.trace`.
        grows: False: a network that cannot be traced has no width groups.
        submodule: see `growlab.widths.trace`.

    Returns:
        The width graph to continue with.

    Raises:
        UnsupportedOperation: the network cannot be traced.
        UserError: it has no values, is wrapped or sharded, or two parameters are views of one memory.
    """
    inputs = inputs_of(example, network)
    _check_values(inputs)
    check_whole(network)
    if hollow := next((name for name, p in network.named_parameters() if p.is_meta), None):
        raise UserError(f"{hollow} is on the meta device, without values: give the network a device first.")
    _check_memory(network)
    if (state := state_of(network)) is not None and state.widths:
        raise UserError(
            "the network is growing already, as a Grower made it a seed: finish that, or build the network anew."
        )
    try:
        follow_norms = method.follows_norms or any(part.follows_norms for part in parts)
        graph = trace(network, inputs, opaque, follow_norms, submodule)
    except UnsupportedOperation:
        if grows:
            raise
        graph = no_widths()
    graph = method.prepare(network, graph, seed)
    for part in parts:
        graph = part.prepare(network, graph, seed, inputs)
    return graph


def _check_values(inputs: tuple[Any, ...]) -> None:
    """Refuse an example on which outputs could not be compared."""
    for given in values_of(inputs):
        if not isinstance(given, Tensor) or given.is_meta:
            continue
        if given.ndim and not len(given):
            raise UserError("the example has no samples: give a batch of at least two.")
        if given.is_floating_point() and bool(given.isnan().any()):
            raise UserError(
                "the example holds NaN: outputs before and after an event could not be compared on it."
            )


def check_whole(network: nn.Module) -> None:
    """Refuse wrappers of distributed training, and parameters of which a process holds a piece.

    Raises:
        UserError: the network is wrapped, sharded, or replicated by torch's composable function.
    """
    if isinstance(network, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise UserError(
            f"{type(network).__name__} is a wrapper: give the network inside of it, and wrap that after the Grower is "
            "made."
        )
    for module in network.modules():
        kind: Any = type(module)
        how = _distributed(kind)
        if how == "sharded" or any(hasattr(p, "device_mesh") for p in module._parameters.values()):
            raise UserError(
                f"{type(network).__name__} is sharded: FSDP and tensor parallelism cut parameters into pieces once, "
                "and growth would have to cut them anew; train with DistributedDataParallel."
            )
        if how:
            raise UserError(
                f"{type(network).__name__} is replicated by torch.distributed._composable.replicate, which goes on "
                "with the parameters that growing replaces: wrap it in DistributedDataParallel, and call "
                "growlab.grower.renew after events."
            )


@cache
def _distributed(kind: Any) -> str:
    """Return "sharded" or "replicated" for modules of a class that is so over processes, else ""."""
    bases = {f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__}
    if "torch.distributed.fsdp.FSDPModule" in bases or any(
        "FullyShardedDataParallel" in base for base in bases
    ):
        return "sharded"
    return (
        "replicated"
        if any(base.startswith("torch.distributed._composable.replicate") for base in bases)
        else ""
    )


def _check_memory(network: nn.Module) -> None:
    """Refuse parameters that are tied by their memory alone: each would get its own at the first event."""
    ranges = []
    for name, parameter in network.named_parameters():
        try:
            start = parameter.data_ptr()
        except (RuntimeError, ValueError):
            # A tensor subclass that wraps others has no memory itself, nor has a lazy parameter, which `trace` refuses.
            continue
        if start and parameter.numel():
            last = sum((n - 1) * step for n, step in zip(parameter.shape, parameter.stride(), strict=True))
            ranges.append((str(parameter.device), start, start + last * parameter.element_size(), name))
    ranges.sort()
    for (device, _, end, one), (other_device, start, _, other) in pairwise(ranges):
        within = device == other_device and start <= end
        if within and set(_addresses(network, one)) & set(_addresses(network, other)):
            raise UserError(
                f"{one} and {other} are two Parameters in the same memory, which growing would part: tie them as one "
                "(assign the Parameter itself, not nn.Parameter of it)."
            )


def _addresses(network: nn.Module, name: str) -> list[int]:
    """Address of each element of a parameter, in bytes."""
    parameter = network.get_parameter(name)
    places = torch.zeros((), dtype=torch.int64)
    for size, step in zip(parameter.shape, parameter.stride(), strict=True):
        places = places[..., None] + torch.arange(size) * step * parameter.element_size()
    return [int(place) for place in (parameter.data_ptr() + places).flatten().tolist()]


def check_arguments(seed: Any, anneal_steps: Any, graph: Any) -> None:
    """Refuse arguments that a `Grower` would only fail on later.

    Raises:
        UserError: one is of another type, or a number of steps is negative.
    """
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise UserError(f"seed must be an integer, not {seed!r}.")
    if anneal_steps is None:
        raise UserError("anneal_steps must be a number of steps or a function of the grower, not None.")
    if not callable(anneal_steps):
        with as_user_errors():
            whole(0, anneal_steps=anneal_steps)
    if not isinstance(graph, WidthGraph | None):
        raise UserError(
            f"graph={graph!r} must be what growlab.grower.trace_for_growth or growlab.trace returned, or None."
        )

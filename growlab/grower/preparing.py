"""A network as growth takes it: traced, changed by method and parts; and its widths at every stage."""

from collections.abc import Collection, Sequence
from functools import cache
from itertools import pairwise
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from growlab.base import ranks
from growlab.base.errors import UserError, as_user_errors
from growlab.base.settings import whole
from growlab.grower.part import Part
from growlab.grower.triggers import Trigger, Widths
from growlab.growth import GrowthMethod, Measurement
from growlab.growth.attached import state_of
from growlab.growth.weighted_norms import annealed
from growlab.widths import Example, UnsupportedOperation, WidthGraph, trace
from growlab.widths.inputs import inputs_of, values_of

if TYPE_CHECKING:
    from growlab.grower.grower import Grower


def forecast(trigger: Trigger, graph: WidthGraph, parts: Sequence[Part]) -> list[dict[str, int]] | None:
    """Width of each group at every stage, those of parts too; None where it is not known before."""
    stages = trigger.forecast(graph)
    if stages is None:
        return None
    own = {group: each for part in parts for group, each in part.stage_widths(len(stages)).items()}
    return [{**widths, **{g: each[stage] for g, each in own.items()}} for stage, widths in enumerate(stages)]


def seed_widths(
    trigger: Trigger, graph: WidthGraph, parts: Sequence[Part], method: GrowthMethod | None = None
) -> dict[str, int]:
    """Width of each group in the seed, those of parts too; what parts decide by themselves is left to them.

    Raises:
        UserError: a stage is narrower than the one before it, and the method only widens; or it cannot grow a group so.
    """
    trigger.leave_to_parts({group for part in parts if part.method is not None for group in part.groups})
    known = forecast(trigger, graph, parts)
    for stage, (before, after) in enumerate(pairwise(known or ()), start=1):
        narrower = next((group for group, width in before.items() if after[group] < width), None)
        if method is not None and narrower is not None and not method.shrinks:
            raise UserError(
                f"stage {stage} of the trigger is narrower than the one before it ({before[narrower]} to "
                f"{after[narrower]} channels of {narrower!r}), and {method.name} only widens."
            )
    if method is not None and not any(part.grows for part in parts):
        # Blocks that come in change which groups there are, and parts widen their own groups themselves.
        theirs = {group for part in parts for group in part.groups}
        steps = trigger.steps(graph)
        method.check(graph, [{g: step[g] for g in step if g not in theirs} for step in steps])
    first = {group: each[0] for part in parts for group, each in part.stage_widths(1).items()}
    own = first if known is None else {group: known[0][group] for group in first}
    return {**trigger.first(graph), **own}


def nothing_grows(graph: WidthGraph, trigger: Trigger, parts: Sequence[Part]) -> str:
    """A sentence that says why nothing would grow; "" where something does, or nothing is to."""
    if graph.groups or not trigger.grows or any(part.grows for part in parts):
        return ""
    reasons = "; ".join(f"{name}: {reason}" for name, reason in list(graph.fixed.items())[:3])
    return f"nothing in this network can grow{f' ({reasons})' if reasons else ''}"


def still_narrow(run: "Grower") -> str:
    """A sentence about stages that the trigger still has in store; "" where there are none or it does not know."""
    stages = forecast(run.trigger, run.full_graph, run.parts)
    if stages is None or run.state.scheduled_stage >= len(stages) - 1:
        return ""
    return (
        f"training has ended in stage {run.state.scheduled_stage} of {len(stages) - 1}: the network is narrower than "
        "in its last stage, which its trigger would have grown it to later"
    )


def check_arguments(seed: Any, anneal_steps: Any, graph: Any) -> None:
    """Refuse what a `Grower` would only fail on later.

    Raises:
        UserError: the seed is no integer, the steps are neither a number of them nor a function, or the graph is none.
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
            f"graph={graph!r} must be what growlab.grower.prepared or growlab.trace returned, or None."
        )


def check_told(trigger: Trigger, told: Collection[str]) -> None:
    """Refuse a loop that never tells what a trigger counts.

    Args:
        trigger: of the run.
        told: keywords of `Grower.step` that were given so far.

    Raises:
        UserError: it is none of them.
    """
    if trigger.counts is not None and trigger.counts not in told:
        raise UserError(
            f"the trigger's moments count {trigger.counts!r}, which Grower.step was never told: call "
            f"step({trigger.counts}=...), or give At(..., unit=...) what your loop counts."
        )


def no_widths() -> WidthGraph:
    """The width graph of a network of which nothing is to grow."""
    return WidthGraph({}, {}, (), (), frozenset(), 0)


def prepared(
    network: nn.Module,
    example: Example,
    method: GrowthMethod,
    parts: Sequence[Part] = (),
    seed: int = 0,
    opaque: Sequence[str] = (),
    grows: bool = True,
    submodule: str | nn.Module | None = None,
) -> WidthGraph:
    """Trace a full-width network, and let method and parts change how it holds its weights, in place.

    Args:
        network: at full width.
        example: see `Grower`.
        method: the growth method.
        parts: features beside growing.
        seed: the run's.
        opaque: see `growlab.widths.trace`.
        grows: False: a network that cannot be traced is one of no width groups.
        submodule: see `growlab.widths.trace`.

    Returns:
        The width graph to go on with.

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
    """Of each number of a parameter, in bytes."""
    parameter = network.get_parameter(name)
    places = torch.zeros((), dtype=torch.int64)
    for size, step in zip(parameter.shape, parameter.stride(), strict=True):
        places = places[..., None] + torch.arange(size) * step * parameter.element_size()
    return [int(place) for place in (parameter.data_ptr() + places).flatten().tolist()]


def with_parts(run: "Grower", widths: Widths, stage: int) -> dict[str, int]:
    """Widths that the trigger says for a stage of its own but the first, with those of the groups that parts widen."""
    known = forecast(run.trigger, run.full_graph, run.parts)
    own = {group for part in run.parts for group in part.groups}
    scheduled = {group: known[stage][group] for group in own} if own and known else {}
    decided = {group for part in run.parts if part.method is not None for group in part.groups}
    return {**widths, **scheduled, **{group: run.state.widths[group] for group in decided}}


def knows_stages(trigger: Trigger, parts: Sequence[Part]) -> bool:
    """Whether it is known before when each stage begins and how wide the network is then."""
    return trigger.knows_stages and all(part.method is None for part in parts)


def measurement(run: "Grower", number: int, asker: str) -> Measurement:
    """So many training batches to measure something on, see `Grower.measurement`."""
    training = run.training
    if training.batches is None or training.loss is None:
        raise UserError(
            f"{asker} looks at training data, of which there is none; give some with Grower.look_at, or choose "
            "another."
        )
    weights = annealed(run.state.norm_weights, run.state.norm_progress)
    return Measurement(
        run.network,
        run.graph,
        training.batches(number),
        training.loss,
        ranks.averaged,
        ranks.shared,
        weights,
        training.near_zero,
    )

"""What a run will do, worked out before it trains: stages, widths, cost, batches and steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from growlab.analysis.flops import forward_flops, stage_flops, train_cost_percent
from growlab.data import ImageData, Incremental
from growlab.errors import UserError
from growlab.growth import (
    CLASSES,
    Demand,
    Depth,
    FixedSize,
    GrowthMethod,
    Schedule,
    WidthDecision,
    make_schedule,
    with_classes,
)
from growlab.growth.multipliers import without_multipliers
from growlab.training.objective import network_inputs
from growlab.widths import UnsupportedOperation, WidthGraph, trace

# A forward and a backward pass cost about three forward passes.
_TRAINING_FACTOR = 3


@dataclass(frozen=True)
class Plan:
    """What a run will do.

    Attributes:
        schedule: its stages.
        widths: width of each group at each stage.
        flops: forward FLOPs per sample of each stage.
        full_flops: the same of the full-width network.
        reference_epochs: epochs of the fixed-size run that cost is relative to.
        batches: batches of each epoch.
        steps: optimizer steps of each epoch.
        samples: training samples of each epoch.
        reference_samples: training samples of the fixed-size run that cost is relative to, where epochs differ in
            them because data arrives with the stages; else None.
        stage_numbers: what growth events call each stage; None for 0, 1, 2, ...
        ladder: widths that growth on demand climbs by, the seed's first; None where a schedule says when.
        auxiliary_flops: forward FLOPs of passes beside training's, each with a backward pass, or what costs as much.
    """

    schedule: Schedule
    widths: list[dict[str, int]]
    flops: list[int]
    full_flops: int
    reference_epochs: int
    batches: list[int]
    steps: list[int]
    samples: list[int]
    reference_samples: int | None = None
    stage_numbers: list[int] | None = None
    ladder: list[dict[str, int]] | None = None
    auxiliary_flops: int = 0

    @property
    def train_cost_percent(self) -> float:
        """Forward FLOPs relative to those of the fixed-size run on the same data, in percent."""
        if self.reference_samples is not None:
            return 100.0 * (sum(self.flops_in_epoch) + self.auxiliary_flops) / self.reference_flops
        percent = train_cost_percent(self.schedule.epochs, self.flops, self.full_flops, self.reference_epochs)
        return percent + 100.0 * self.auxiliary_flops / self.reference_flops

    @property
    def reference_flops(self) -> float:
        """Forward FLOPs of the fixed-size run."""
        images = self.reference_samples
        if images is None:
            return self.full_flops * self.reference_epochs * sum(self.samples) / len(self.samples)
        return self.full_flops * images

    @property
    def flops_in_epoch(self) -> list[int]:
        """Forward FLOPs of each epoch over all its samples."""
        stages = [self.schedule.stage_at(epoch) for epoch in range(self.schedule.total_epochs)]
        return [self.flops[stage] * samples for stage, samples in zip(stages, self.samples, strict=True)]

    @property
    def train_flops(self) -> int:
        """FLOPs of the whole training, forward and backward."""
        return _TRAINING_FACTOR * (sum(self.flops_in_epoch) + self.auxiliary_flops)


def find_widths(
    network: nn.Module, example: Tensor | tuple[Any, ...], method: GrowthMethod, opaque: Sequence[str] = ()
) -> WidthGraph:
    """The width graph of a network; an empty one where nothing grows and the network cannot be followed.

    Args:
        network: at full width.
        example: two inputs, or the tuple of the forward's positional ones.
        method: the growth method.
        opaque: see `trace`.

    Raises:
        UnsupportedOperation: the network cannot be followed, and it should grow.
        UserError: its weights are computed from others already.
    """
    keeps_size = isinstance(method, FixedSize) and method.width_multiple == 1.0
    nothing = WidthGraph({}, {}, (), (), frozenset(), 0)
    if any(is_parametrized(module) for module in network.modules()):
        if keeps_size:
            return nothing
        raise UserError(
            "a network whose weights are computed from others does not grow as it is: take the plain network as "
            "model with growth=hyperfan, or train this one with growth=none."
        )
    try:
        return trace(network, example, opaque, method.follows_norms)
    except UnsupportedOperation:
        if keeps_size:
            return nothing
        raise


def make_plan(
    settings: Mapping[str, Any],
    network: nn.Module,
    graph: WidthGraph,
    method: GrowthMethod,
    data: ImageData,
    limit_batches: float | None = None,
    accumulate: int = 1,
    num_processes: int = 1,
    demand: Demand | None = None,
    depth: Depth | None = None,
    fit: Callable[[Sequence[Mapping[str, int]]], Sequence[int]] | None = None,
) -> Plan:
    """Work out a run.

    Args:
        settings: arguments of `make_schedule` but the batch size, and `equal_flops`: whether a fixed-size run
            trains for as many epochs as cost what growing by this schedule costs.
        network: at full width; left as it is.
        graph: its width graph.
        method: the growth method; a `FixedSize` one has a single stage.
        data: set up.
        limit_batches: Lightning's `limit_train_batches`: a number (int) or part (float) of an epoch's batches.
        accumulate: batches whose gradients make a step.
        num_processes: what every batch is divided among.
        demand: decides when the network grows, in place of the schedule.
        depth: the blocks that come in with the stages of a scheduled run.
        fit: finds the batch size of each stage from its widths, in place of the schedule's rates.

    Raises:
        ValueError: the schedule is impossible.
        UserError: the settings do not go together.
    """
    if not graph.groups and depth is None and not isinstance(method, FixedSize):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(graph.fixed.items())[:3])
        raise UserError(
            f"nothing in this network can grow{f' ({reasons})' if reasons else ''}; train it as it is with growth=none "
            "lr_adapt=none, or take another growth or model."
        )
    ladder = None
    settings = {**settings, "num_processes": num_processes}
    base = data.batch_size
    if fit is not None:
        # The smallest that is possible, until the widths are known that sizes are found at.
        base = num_processes
        settings |= {"batch_growth_rate": 0.0, "max_batch_size": None, "max_batch_size_per_device": None}
    equal_flops = settings.pop("equal_flops")
    sample = network_inputs(data.probe_batch(1), network)
    full_flops = forward_flops(network, sample)

    def flops_of(widths: list[dict[str, int]]) -> list[int]:
        def narrow(copied: nn.Module, stage: int) -> WidthGraph:
            return graph if depth is None else depth.as_at(copied, stage, len(widths))

        return stage_flops(network, graph, graph.full_widths, widths, sample, narrow)

    def fixed(epochs: int) -> Schedule:
        return make_schedule(epochs, base, num_stages=1, num_processes=num_processes)

    # Also of a run that does not grow: data arrives with the stages all the same.
    stages = None if _incremental(data) is None else make_schedule(batch_size=base, **settings)
    if isinstance(method, FixedSize):
        if equal_flops and demand is not None:
            raise UserError(
                "what growth on demand costs is not known before: set schedule.total_epochs in place of "
                "schedule.equal_flops."
            )
        demand = None
        epochs = settings["total_epochs"] if settings["epochs"] is None else sum(settings["epochs"])
        reference_epochs = epochs
        widths = [_multiple(graph, method.width_multiple)]
        flops = flops_of(widths)
        if equal_flops:
            grown = make_schedule(batch_size=base, **settings)
            epochs = max(1, round(_epochs_worth(grown, flops_of(grown.widths(graph)), data) / flops[0]))
        schedule = fixed(epochs)
    elif demand is not None:
        _refuse_stages(settings, equal_flops, method)
        _refuse_fit(fit)
        reference_epochs, ladder = settings["total_epochs"], _ladder(settings, graph)
        widths, schedule = ladder[:1], fixed(reference_epochs)
        flops = flops_of(widths)
    elif isinstance(method, WidthDecision):
        _refuse_widths(settings, equal_flops)
        _refuse_fit(fit)
        reference_epochs, widths = settings["total_epochs"], [graph.full_widths]
        schedule = fixed(reference_epochs)
        flops = flops_of(widths)
    else:
        if equal_flops:
            raise UserError("schedule.equal_flops is for the fixed-size run; set growth=none with it.")
        schedule = make_schedule(batch_size=base, **settings)
        incremental = _incremental(data)
        if incremental is not None and CLASSES in graph.groups:
            counts = incremental.num_classes(data.num_classes, schedule.num_stages)
            schedule = replace(schedule, given={CLASSES: tuple(counts)})
        reference_epochs, widths = schedule.total_epochs, schedule.widths(graph)
        flops = flops_of(widths)
    if fit is not None:
        schedule = replace(schedule, batch_sizes=tuple(fit(widths)))
    reference_samples = None
    if stages is not None:
        data.follow_stages(stages.starts, stages.total_epochs, reference_epochs)
        reference_samples = sum(_batches(data, fixed(reference_epochs), limit_batches)[1])
        data.follow_stages(stages.starts, stages.total_epochs, schedule.total_epochs)
    batches, samples = _batches(data, schedule, limit_batches)
    steps = optimizer_steps(batches, accumulate)
    plan = Plan(
        *(schedule, widths, flops, full_flops, reference_epochs, batches, steps, samples, reference_samples),
        ladder=ladder,
    )
    if demand is not None and ladder is not None:
        rungs = len(ladder) - 1
        narrow = demand.latest(reference_epochs, rungs) if rungs else 0
        ways = flops_of(ladder)
        spent = ways[0] * sum(samples[:narrow]) + climb(ways[1:] or ways, samples[narrow:], demand.min_epochs)
        demand.check(reference_epochs, rungs, 100.0 * spent / plan.reference_flops)
    return plan


def _refuse_fit(fit: Any | None) -> None:
    if fit is not None:
        raise UserError(
            "schedule.batch_size=auto needs to know how wide the network is at which epoch, and this run decides that "
            "while it trains: leave it out."
        )


def climb(flops: Sequence[int], samples: Sequence[int], every: int) -> int:
    """Forward FLOPs of growing now, and then a rung every so many epochs, to the end of the run.

    Args:
        flops: per sample, of each rung to come; none: nothing is left to climb, and nothing is spent.
        samples: of each epoch to come.
        every: epochs on each rung but the last.
    """
    last = len(flops) - 1
    return sum(flops[min(i // every, last)] * count for i, count in enumerate(samples)) if flops else 0


def _ladder(settings: Mapping[str, Any], graph: WidthGraph) -> list[dict[str, int]]:
    """The widths of the schedule's stages, each once."""
    number = settings["num_stages"] if settings["widths"] is None else len(settings["widths"])
    stages = make_schedule(batch_size=1, **{**settings, "epochs": [1] * number, "num_processes": 1})
    ladder: list[dict[str, int]] = []
    for widths in stages.widths(graph):
        if not ladder or widths != ladder[-1]:
            ladder.append(widths)
    return ladder


def grow_head(
    graph: WidthGraph, method: GrowthMethod, data: ImageData, on_demand: bool = False
) -> WidthGraph:
    """Let the network's outputs grow with the classes, where they appear one after the other and a schedule grows it.

    A network of fixed size, and one whose widths the method or a demand decides, has all outputs from the start.
    """
    incremental = _incremental(data)
    if incremental is None or incremental.mode != "classes":
        return graph
    if on_demand or isinstance(method, (FixedSize, WidthDecision)):
        return graph
    return with_classes(graph, data.num_classes) or graph


def _incremental(data: ImageData) -> Incremental | None:
    """How data arrives with the stages; other data than images is there from the start."""
    return getattr(data, "incremental", None)


def _epochs_worth(stages: Schedule, flops: Sequence[int], data: ImageData) -> float:
    """FLOPs of a grown run for each training image of a mean epoch."""
    images = [1] * stages.num_stages
    if _incremental(data) is not None:
        data.follow_stages(stages.starts, stages.total_epochs, stages.total_epochs)
        images = [data.num_train_at(start) for start in stages.starts]
    spent = sum(e * f * n for e, f, n in zip(stages.epochs, flops, images, strict=True))
    return spent * stages.total_epochs / sum(e * n for e, n in zip(stages.epochs, images, strict=True))


def _batches(data: ImageData, schedule: Schedule, limit: float | None) -> tuple[list[int], list[int]]:
    """Batches and samples of each epoch."""
    samples = [data.samples_in_batches(e, schedule.batch_size_at(e)) for e in range(schedule.total_epochs)]
    batches = [_limited(len(epoch), limit) for epoch in samples]
    return batches, [sum(epoch[:number]) for epoch, number in zip(samples, batches, strict=True)]


def carried_out(
    plan: Plan,
    stage_of_epoch: Sequence[int],
    stage_widths: Sequence[dict[str, int]],
    network: nn.Module,
    graph: WidthGraph,
    sample: tuple[Any, ...],
) -> Plan:
    """The plan of a run whose widths the method has decided, as it turned out.

    Its stages are those that an epoch ended in. An epoch in which widths changed counts with its last ones.

    Args:
        plan: what was known before.
        stage_of_epoch: the stage that each epoch ended in.
        stage_widths: width of each group at every stage; the last one's are the network's.
        network: as it is now; left so.
        graph: its width graph.
        sample: the network's inputs, of one sample.
    """
    numbers = sorted(set(stage_of_epoch))
    widths = [stage_widths[number] for number in numbers]
    epochs = tuple(stage_of_epoch.count(number) for number in numbers)
    sizes = tuple(plan.schedule.batch_sizes[:1] * len(numbers))
    fractions = (Fraction(1),) * len(numbers)
    flops = stage_flops(without_multipliers(network), graph, stage_widths[-1], widths, sample)
    schedule = Schedule(epochs, fractions, sizes)
    return replace(plan, schedule=schedule, widths=widths, flops=flops, stage_numbers=numbers)


def _refuse_stages(settings: Mapping[str, Any], equal_flops: bool, method: GrowthMethod) -> None:
    given = [name for name in ("epochs", "batch_sizes") if settings[name] is not None]
    given += ["batch_growth_rate"] if settings["batch_growth_rate"] else []
    given += ["equal_flops"] if equal_flops else []
    if given:
        raise UserError(
            f"schedule.{given[0]} is about stages whose ends are known before; growth on demand (schedule.demand) has "
            "none: leave it out."
        )
    if isinstance(method, WidthDecision):
        raise UserError(
            f"{method.name} decides widths itself; take it with schedule=exponential, or another growth method."
        )


def _refuse_widths(settings: Mapping[str, Any], equal_flops: bool) -> None:
    given = [name for name in ("epochs", "widths", "batch_sizes") if settings[name] is not None]
    if given or equal_flops:
        name = given[0] if given else "equal_flops"
        raise UserError(
            f"schedule.{name} is for runs whose widths the schedule says; this growth method decides them itself: "
            "set schedule.total_epochs alone."
        )


def optimizer_steps(batches: Sequence[int], accumulate: int) -> list[int]:
    """Steps of each epoch; the last batch of an epoch always ends in a step.

    Raises:
        UserError: there is no such number.
    """
    if accumulate < 1:
        raise UserError(f"trainer.accumulate_grad_batches={accumulate} must be at least 1.")
    return [-(-number // accumulate) for number in batches]


def _limited(batches: int, limit: float | None) -> int:
    if limit is None:
        return batches
    limited = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    if limited < 1 or (isinstance(limit, float) and limit > 1):
        raise UserError(
            f"trainer.limit_train_batches={limit} of {batches} batches leaves none to train on; give a number of "
            "batches from 1 or a part of them up to 1.0."
        )
    return limited


def _multiple(graph: WidthGraph, multiple: float) -> dict[str, int]:
    return {name: max(1, round(group.full_width * multiple)) for name, group in graph.groups.items()}

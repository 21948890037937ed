"""Plan a run before it trains: its stages, widths, cost, batches and steps."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, count, pairwise
from math import floor
from typing import Any

from torch import Tensor, nn

from growlab.base.errors import UserError
from growlab.grower import Forecast, Grower, triggers
from growlab.grower.cost import forward_flops, train_cost_percent
from growlab.grower.part import Part
from growlab.growth import FixedSize, GrowthMethod, Schedule, WidthDecision, make_schedule
from growlab.growth.outputs import network_inputs
from growlab.lab.data import RunData
from growlab.lab.data.loaders import Steps
from growlab.plan import advise
from growlab.widths import WidthGraph, resize
from growlab.widths.inputs import Example, changed

# A forward and a backward pass cost about three forward passes.
_TRAINING_FACTOR = 3
# Tolerance for rounding errors in sums of decimal fractions.
_ROUNDING = 1 + 1e-9
_MANY_EPOCHS = 10**6
# Settings of `conf/schedule` that `make_schedule` does not take.
NOT_OF_STAGES = (
    *("equal_flops", "budget", "total_steps", "total_tokens", "steps"),
    *("eval_every_n_steps", "repeat_batches"),
)
# Default number of evaluations of a run in steps.
_EVALUATIONS = 20


@dataclass(frozen=True)
class Plan:
    """Stages, cost, batches and steps of a run.

    Attributes:
        flops: forward FLOPs per sample of each stage.
        full_flops: forward FLOPs per sample of the full-width network.
        reference_epochs: epochs of the fixed-size run that cost is relative to.
        reference_samples: training samples of that run if epochs differ in size, as with incremental data; else None.
        stage_numbers: number of each stage in growth events; None for 0, 1, 2, ...
        total_steps: optimizer steps of a run whose length is in steps; its epochs are the intervals between
            evaluations.
        auxiliary_flops: forward FLOPs of passes besides training, each counted as one with a backward pass.
    """

    schedule: Schedule
    widths: list[dict[str, int]]
    flops: list[int]
    full_flops: int
    reference_epochs: float
    batches: list[int]
    steps: list[int]
    samples: list[int]
    reference_samples: int | None = None
    stage_numbers: list[int] | None = None
    auxiliary_flops: int = 0
    total_steps: int | None = None

    @property
    def train_cost_percent(self) -> float:
        """Forward FLOPs in percent of those of the fixed-size run on the same data."""
        if self.reference_samples is not None:
            return 100.0 * (sum(self.flops_in_epoch) + self.auxiliary_flops) / self.reference_flops
        percent = train_cost_percent(self.schedule.epochs, self.flops, self.full_flops, self.reference_epochs)
        return percent + 100.0 * self.auxiliary_flops / self.reference_flops

    @property
    def reference_flops(self) -> float:
        """Forward FLOPs of the fixed-size run."""
        if self.reference_samples is None:
            return self.full_flops * self.reference_epochs * sum(self.samples) / len(self.samples)
        return self.full_flops * self.reference_samples

    @property
    def flops_in_epoch(self) -> list[int]:
        """Forward FLOPs of each epoch over all its samples."""
        stages = [self.schedule.stage_at(epoch) for epoch in range(self.schedule.total_epochs)]
        return [self.flops[stage] * samples for stage, samples in zip(stages, self.samples, strict=True)]

    @property
    def train_flops(self) -> int:
        """FLOPs of the whole training, forward and backward."""
        return _TRAINING_FACTOR * (sum(self.flops_in_epoch) + self.auxiliary_flops)


@dataclass(frozen=True)
class Loop:
    """Settings of the training loop that a plan depends on.

    Attributes:
        limit_batches: Lightning's `limit_train_batches`: a number (int) or fraction (float) of an epoch's batches.
        accumulate: batches per optimizer step.
    """

    limit_batches: float | None = None
    accumulate: int = 1
    num_processes: int = 1


class StageCost:
    """Forward FLOPs per sample of a network at any stage of its growth."""

    def __init__(self, network: nn.Module, graph: WidthGraph, parts: Sequence[Part], example: Example) -> None:
        self._network, self._graph, self._parts = copy.deepcopy(network), graph, tuple(parts)
        inputs = network_inputs(example, network)
        self._sample = changed(lambda x: x[:1] if isinstance(x, Tensor) else x, inputs)
        self._known: dict[tuple[Any, ...], int] = {}

    @property
    def num_params(self) -> int:
        """Parameters of the whole network at full width."""
        return sum(parameter.numel() for parameter in self._network.parameters())

    def __call__(self, widths: triggers.Widths, fraction_grown: float | None = None) -> int:
        """FLOPs at these widths and fraction of growth; None: with all blocks and full-size inputs."""
        key = (*(widths[group] for group in self._graph.groups), fraction_grown)
        if key not in self._known:
            sample, copied, graph = self._sample, copy.deepcopy(self._network), self._graph
            if fraction_grown is not None:
                for part in self._parts:
                    sample = part.inputs_at(sample, fraction_grown)
                    graph = part.shrink_to(copied, graph, fraction_grown)
            resize(copied, graph, graph.full_widths, widths)
            self._known[key] = forward_flops(copied, sample)
        return self._known[key]


@dataclass
class Planning:
    """Makes a run's trigger and, once the network is traced, its plan.

    Args:
        settings: arguments of `make_schedule` except the batch size, and the settings in `NOT_OF_STAGES`. With
            `equal_flops` a fixed-size run costs as much as growing by this schedule; with `budget` a run costs at most
            that many epochs of the fixed full-width network.
        method: growth method; it may keep the size fixed or decide widths itself.
        fit: finds the batch size of each stage from its widths, instead of the schedule.
    """

    settings: dict[str, Any]
    method: GrowthMethod
    demand: triggers.Demand | None
    data: RunData
    loop: Loop = Loop()
    fit: Callable[[Sequence[triggers.Widths]], Sequence[int]] | None = None

    def __post_init__(self) -> None:
        self.settings = {**dict.fromkeys(NOT_OF_STAGES), **self.settings}
        budget, decides = self.settings["budget"], isinstance(self.method, WidthDecision)
        if budget is None:
            self._count_steps()
            return
        self.settings |= dict.fromkeys(("total_steps", "total_tokens", "steps"))
        for name in ("epochs", "equal_flops"):
            if self.settings[name]:
                raise UserError(f"schedule.budget and schedule.{name} both set the length: leave one out.")
        if self.demand is not None or decides:
            raise UserError(
                "schedule.budget needs the widths of all epochs before the run, but this run decides them while it "
                "trains: take schedule=budget, which grows on demand within a fraction of the cost, or "
                "schedule=exponential with another growth method."
            )
        if self.data.incremental is not None:
            raise UserError("schedule.budget needs data that is complete from the start: set schedule.total_epochs.")
        # Enough for any stages; replaced once their cost is known.
        self.settings["total_epochs"] = _MANY_EPOCHS

    def _count_steps(self) -> None:
        """Set `total_steps` if the length is given in steps or tokens, and the steps between evaluations."""
        settings, data = self.settings, self.data
        if (tokens := settings["total_tokens"]) is not None:
            if data.tokens_per_sample is None or settings["batch_growth_rate"] or settings["batch_sizes"]:
                raise UserError(
                    "schedule.total_tokens needs data in windows of tokens and batches of one size: set "
                    "schedule.total_steps."
                )
            tokens_per_step = data.tokens_per_sample * self._batch_size * self.loop.accumulate
            if tokens < tokens_per_step:
                raise UserError(f"schedule.total_tokens={tokens} must be at least one step's {tokens_per_step} tokens.")
            settings["total_steps"] = tokens // tokens_per_step
        if settings["steps"] is not None:
            settings["total_steps"] = sum(settings["steps"])
        if (total := settings["total_steps"]) is None:
            return
        other = next((f"schedule.{name}" for name in ("epochs", "initial_epochs") if settings[name]), "")
        limited = "trainer.limit_train_batches" * (self.loop.limit_batches is not None)
        if other := other or data.only_in_epochs or limited:
            raise UserError(f"{other} counts epochs, and schedule.total_steps={total} sets the run's length in steps.")
        settings["eval_every_n_steps"] = settings["eval_every_n_steps"] or max(1, total // _EVALUATIONS)

    def _cut(self, schedule: Schedule) -> tuple[Schedule, Steps | None]:
        """Split the stages of a run in steps into epochs between evaluations; also return the steps of each epoch."""
        if self.settings["total_steps"] is None:
            return schedule, None
        starts, total = schedule.starts, schedule.total_epochs
        cuts = sorted({*starts, *range(0, total, self.settings["eval_every_n_steps"]), total})
        epochs = (sum(a <= cut < b for cut in cuts) for a, b in pairwise((*starts, total)))
        lengths = [self.loop.accumulate * (b - a) for a, b in pairwise(cuts)]
        return replace(schedule, epochs=tuple(epochs)), Steps(lengths, self.settings["repeat_batches"])

    @property
    def _batch_size(self) -> int:
        """Batch size of the schedule's reference stage; the smallest possible one if sizes are searched."""
        return self.data.batch_size if self.fit is None else self.loop.num_processes

    def trigger(self) -> triggers.Trigger:
        """Make the trigger from the settings, the demand and the growth method."""
        settings, method = self.settings, self.method
        if isinstance(method, FixedSize):
            if settings["equal_flops"] and self.demand is not None:
                raise UserError(
                    "the cost of growth on demand is not known before the run: set schedule.total_epochs instead of "
                    "schedule.equal_flops."
                )
            return triggers.Never(method.width_multiple, method.depth_multiple)
        if self.demand is not None:
            invalid = [name for name in ("epochs", "steps", "batch_sizes") if settings[name] is not None]
            invalid += [name for name in ("batch_growth_rate", "equal_flops") if settings[name]]
            if invalid:
                raise UserError(
                    f"schedule.{invalid[0]} is for stages whose ends are known before the run; growth on demand "
                    "(schedule.grow_when) has none: leave it out."
                )
            if isinstance(method, WidthDecision):
                raise UserError(
                    f"{method.name} decides widths itself; take it with schedule=exponential, or another growth method."
                )
            num_stages = settings["num_stages"] if settings["widths"] is None else len(settings["widths"])
            stages = _schedule({**settings, "total_steps": None, "epochs": [1] * num_stages}, 1, Loop())
            schedule, _ = self._cut(_one_stage(self._length, self._batch_size, self.loop))
            return triggers.OnDemand(self.demand, stages, schedule.total_epochs)
        if isinstance(method, WidthDecision):
            invalid = [n for n in ("epochs", "steps", "widths", "batch_sizes", "equal_flops") if settings[n]]
            if invalid:
                raise UserError(
                    f"schedule.{invalid[0]} is for runs whose schedule sets the widths; this growth method decides "
                    "them itself: set only schedule.total_epochs."
                )
            return triggers.ByMethod()
        if settings["equal_flops"]:
            raise UserError("schedule.equal_flops is for the fixed-size run; set growth=none with it.")
        return triggers.Scheduled(self._cut(_schedule(settings, self._batch_size, self.loop))[0])

    @property
    def _length(self) -> int:
        """Steps of the run if its length is given in steps, else its epochs."""
        settings = self.settings
        if settings["total_steps"] is not None:
            return settings["total_steps"]
        return settings["total_epochs"] if settings["epochs"] is None else sum(settings["epochs"])

    def plan(
        self, trigger: triggers.Trigger, graph: WidthGraph, cost: StageCost, parts: Sequence[Part] = ()
    ) -> tuple[triggers.Trigger, Plan]:
        """Return the trigger, with the epochs that a budget allows, and the plan."""
        forecast = Forecast(trigger, graph, parts)
        if reason := forecast.nothing_grows():
            raise UserError(
                f"{reason}; train it as it is with growth=none lr_adapt=none, or take another growth or model."
            )
        settings, data, loop, base = self.settings, self.data, self.loop, self._batch_size
        widths = forecast.stages or [forecast.seed]
        flops = [cost(each, forecast.fraction_grown(stage, each)) for stage, each in enumerate(widths)]
        if not (full_flops := cost(graph.full_widths)):
            raise UserError("the network has no multiply-adds to count, so it has no cost: choose another model.")
        if settings["budget"] is not None:
            scheduled = isinstance(trigger, triggers.Scheduled)
            settings["total_epochs"] = self._epochs_of_budget(scheduled, flops, full_flops)
            trigger = self.trigger()
        total = length = self._length
        if settings["equal_flops"]:
            grown = _schedule(settings, base, loop)
            worth = _epochs_worth(grown, [cost(w) for w in grown.widths(graph)], data)
            length = max(1, round(worth / flops[0]))
        scheduled = isinstance(trigger, triggers.Scheduled)
        schedule, data.steps = self._cut(
            _schedule(settings, base, loop) if scheduled else _one_stage(length, base, loop)
        )
        reference_epochs: float = schedule.total_epochs if scheduled else total
        if settings["budget"] is not None:
            reference_epochs = settings["budget"] * data.epochs_per_pass
            reference_epochs = int(reference_epochs) if reference_epochs == int(reference_epochs) else reference_epochs
        if self.fit is not None:
            if not forecast.known:
                raise UserError(
                    "schedule.batch_size=auto needs the widths of all epochs before the run, but this run decides them "
                    "while it trains: leave it out."
                )
            schedule = replace(schedule, batch_sizes=tuple(self.fit(widths)))
        reference_samples, in_steps = None, settings["total_steps"] is not None
        if in_steps:
            reference_samples = total * base * loop.accumulate
            reference_epochs = float(f"{reference_samples / data.num_train:.3g}")
        if data.incremental is not None:
            # Data arrive with the stages, also in runs that do not grow, such as the fixed-size reference.
            stages, reference = _schedule(settings, base, loop), _one_stage(int(reference_epochs), base, loop)
            data.follow_stages(stages.starts, stages.total_epochs, reference.total_epochs)
            reference_samples = sum(_batches(data, reference, loop.limit_batches)[1])
            data.follow_stages(stages.starts, stages.total_epochs, schedule.total_epochs)
        batches, samples = _batches(data, schedule, loop.limit_batches)
        # The last batch of an epoch always ends in a step.
        steps = [-(-number // loop.accumulate) for number in batches]
        plan = Plan(
            *(schedule, widths, flops, full_flops, reference_epochs),
            *(batches, steps, samples, reference_samples),
            total_steps=sum(steps) if in_steps else None,
        )
        if isinstance(trigger, triggers.OnDemand):
            _check_demand(trigger, graph, cost, plan)
        return trigger, plan

    def _epochs_of_budget(self, scheduled: bool, flops: Sequence[int], full_flops: int) -> int:
        """Largest number of epochs whose training costs no more than the budget.

        What is left of the budget is less than one epoch of the widest stage.
        """
        data, parts, budget = self.data, self.data.epochs_per_pass, self.settings["budget"]
        cumulative: dict[int, list[int]] = {}

        def samples_before(epoch: int, size: int) -> int:
            """Training samples before an epoch, at a batch size."""
            if size not in cumulative:
                batches = [data.samples_in_batches(part, size) for part in range(parts)]
                limited = [each[: _limited(len(each), self.loop.limit_batches)] for each in batches]
                cumulative[size] = [0, *accumulate(map(sum, limited))]
            passes, part = divmod(epoch, parts)
            return passes * cumulative[size][-1] + cumulative[size][part]

        def spent(epochs: int) -> int:
            settings = {**self.settings, "total_epochs": epochs}
            base, loop = data.batch_size, self.loop
            schedule = _schedule(settings, base, loop) if scheduled else _one_stage(epochs, base, loop)
            stages = zip(schedule.starts, schedule.epochs, schedule.batch_sizes, flops, strict=True)
            return sum(
                f * (samples_before(start + n, size) - samples_before(start, size)) for start, n, size, f in stages
            )

        samples_per_pass = samples_before(parts, data.batch_size)
        allowed = _ROUNDING * budget * full_flops * samples_per_pass
        affordable, least = 0, 0.0
        for epochs in count(len(flops)):
            try:
                cost = spent(epochs)
            except ValueError:
                # Too few epochs for stages whose length is set.
                if epochs * min(flops) * samples_per_pass > parts * allowed:
                    break
                continue
            least = least or cost / (full_flops * samples_per_pass)
            if cost > allowed:
                break
            affordable = epochs
        if not affordable:
            needed = f", which costs {least:.3g} epochs of the fixed-size network" if least else ""
            stages = f"{len(flops)} stage{'s' * (len(flops) > 1)}"
            raise UserError(
                f"schedule.budget={budget:g} is below the shortest run of {stages}{needed}: raise it, lower "
                "schedule.num_stages, or divide epochs with data.epochs_per_pass."
            )
        return affordable


def _check_demand(trigger: triggers.OnDemand, graph: WidthGraph, cost: StageCost, plan: Plan) -> None:
    """Check that growing to full size fits into the demand's limits on epochs and cost."""
    steps, demand = trigger.steps(graph), trigger.demand
    events, total = len(steps) - 1, trigger.total_epochs
    narrow_epochs = demand.latest(total, events) if events else 0
    flops = [
        cost({**plan.widths[0], **widths}, trigger.fraction_grown(stage, widths)) for stage, widths in enumerate(steps)
    ]
    spent = flops[0] * sum(plan.samples[:narrow_epochs])
    spent += triggers.cheapest_remaining_cost(flops[1:] or flops, plan.samples[narrow_epochs:], demand.min_epochs)
    demand.check(total, events, 100.0 * spent / plan.reference_flops)


def _schedule(settings: Mapping[str, Any], batch_size: int, loop: Loop) -> Schedule:
    """The schedule in epochs, or in steps if the run's length is in steps."""
    arguments = {name: value for name, value in settings.items() if name not in NOT_OF_STAGES}
    if settings["total_steps"] is not None:
        arguments |= {"total_epochs": settings["total_steps"], "epochs": settings["steps"]}
    return make_schedule(batch_size=batch_size, **arguments, num_processes=loop.num_processes)


def _one_stage(epochs: int, batch_size: int, loop: Loop) -> Schedule:
    return make_schedule(epochs, batch_size, num_stages=1, num_processes=loop.num_processes)


def _epochs_worth(stages: Schedule, flops: Sequence[int], data: RunData) -> float:
    """FLOPs of a grown run divided by the training samples of a mean epoch."""
    samples = [1] * stages.num_stages
    if data.incremental is not None:
        data.follow_stages(stages.starts, stages.total_epochs, stages.total_epochs)
        samples = [data.num_train_at(start) for start in stages.starts]
    spent = sum(e * f * n for e, f, n in zip(stages.epochs, flops, samples, strict=True))
    return spent * stages.total_epochs / sum(e * n for e, n in zip(stages.epochs, samples, strict=True))


def _batches(data: RunData, schedule: Schedule, limit: float | None) -> tuple[list[int], list[int]]:
    """Batches and samples of each epoch."""
    samples = [data.samples_in_batches(e, schedule.batch_size_at(e)) for e in range(schedule.total_epochs)]
    batches = [_limited(len(epoch), limit) for epoch in samples]
    return batches, [sum(epoch[:number]) for epoch, number in zip(samples, batches, strict=True)]


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


def carried_out(
    plan: Plan,
    trigger: triggers.Trigger,
    stage_of_epoch: Sequence[int],
    stages: Sequence[triggers.Widths],
    cost: StageCost,
    scheduled: Sequence[int],
) -> Plan:
    """Update the plan of a run whose widths were decided during training to its actual stages.

    Stages in which no epoch ended are left out. An epoch in which widths changed counts with its last widths.
    """
    numbers = sorted(set(stage_of_epoch))
    widths = [dict(stages[number]) for number in numbers]
    epochs = tuple(stage_of_epoch.count(number) for number in numbers)
    planned = plan.schedule.batch_sizes
    sizes = tuple(planned[min(scheduled[number], len(planned) - 1)] for number in numbers)
    fractions = [trigger.fraction_grown(scheduled[n], stages[n]) for n in numbers]
    flops = [cost(stages[n], 1.0 if part is None else part) for n, part in zip(numbers, fractions, strict=True)]
    schedule = Schedule(epochs, (Fraction(1),) * len(numbers), sizes)
    return replace(plan, schedule=schedule, widths=widths, flops=flops, stage_numbers=numbers)


def anneal_steps(grower: Grower, part: float, plan: Plan) -> int:
    """Optimizer steps after the last event over which norms are annealed: a fraction of the stage's steps.

    At least the last training step uses the plain network.
    """
    if not grower.events:
        return 0
    epoch, begin = grower.events[-1].epoch, grower.events[-1].step
    steps = plan.steps[epoch]
    if grower.trigger.knows_stages:
        steps = sum(plan.steps[epoch : grower.trigger.stage_end(grower)])
    return min(floor(part * steps), sum(plan.steps) - begin - 1)


def tokens_of(data: RunData) -> int | None:
    """Tokens per sample of text; None for other data."""
    inputs = data.probe_batch(2)
    first = inputs[0] if isinstance(inputs, tuple | list) else inputs
    is_text = isinstance(first, Tensor) and first.dim() == 2 and not first.is_floating_point()
    return first.shape[1] if is_text else None


def odds(plan: Plan, cost: StageCost, data: RunData) -> str:
    """One line with the odds that a smaller network would end better for the run's budget."""
    tokens = tokens_of(data)
    samples = plan.reference_flops / max(1, plan.full_flops) * (tokens or 1)
    return f"odds: {advise(cost.num_params, samples, kind='language' if tokens else 'classes').line}"

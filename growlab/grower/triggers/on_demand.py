"""The trigger that grows when training asks for it: a demand decides at the beginning of each epoch."""

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from math import sqrt
from typing import Any

from growlab.base.errors import UserError, as_user_errors
from growlab.base.ranks import gather
from growlab.grower.triggers.demand import Demand, Progress
from growlab.grower.triggers.trigger import GrowingNetwork, Trigger, Widths
from growlab.growth import Bottleneck, Schedule, WidthDecision, bottlenecks, measurable, out_of_reach
from growlab.widths import WidthGraph


class OnDemand(Trigger):
    """Grow through the widths of a schedule's stages whenever a demand asks for it.

    The demand decides from widths, the records so far and the optimizers' state, all of which are in a checkpoint: a
    resumed run decides the same.

    Args:
        demand: decides.
        stages: schedule whose widths the network goes through; its epochs do not count.
        total_epochs: of the run.

    Attributes:
        auxiliary_passes: passes over data that the demand measured by, with their results and their cost.
    """

    unit = "epoch"

    def __init__(self, demand: Demand, stages: Schedule, total_epochs: int) -> None:
        if not isinstance(demand, Demand) or not isinstance(stages, Schedule):
            raise UserError(
                "OnDemand needs a demand and a schedule: such as Plateau() and make_schedule(...)."
            )
        self.demand, self.total_epochs = demand, total_epochs
        self._stages, self._left = stages, frozenset[str]()
        self.auxiliary_passes: list[dict[str, Any]] = []

    def __repr__(self) -> str:
        return f"OnDemand({type(self.demand).__name__}, {self.total_epochs} epochs)"

    def leave_to_parts(self, groups: Collection[str]) -> None:
        """Exclude groups whose widths parts decide from the steps."""
        self._left = frozenset(groups)

    def steps(self, graph: WidthGraph) -> list[Widths]:
        """Widths that growth goes through, of the groups that it decides about; the seed's first, each once."""
        found: list[Widths] = []
        for stage in self._stages.widths(graph):
            widths = {group: width for group, width in stage.items() if group not in self._left}
            if not found or widths != found[-1]:
                found.append(widths)
        return found

    def first(self, graph: WidthGraph) -> Widths:
        """Width of each group in the seed."""
        self._known = self.steps(graph)
        return {**graph.full_widths, **self._known[0]}

    def fraction_grown(self, stage: int, widths: Widths) -> float:
        """Fraction of the steps that every group has reached."""
        last = len(self._known) - 1
        return 1 - len(_above(self._known, widths)) / last if last else 1.0

    def stage_end(self, grower: GrowingNetwork) -> int:
        """Epoch at which it grows at the latest; at full width the number of the run's epochs."""
        ahead = len(_above(self.steps(grower.graph), grower.state.widths))
        return self.demand.latest(self.total_epochs, ahead) if ahead else self.total_epochs

    def check(self, grower: GrowingNetwork) -> None:
        """Refuse a grower that it cannot decide for.

        Raises:
            UserError: the method decides widths by itself, or no channels can be measured that the demand measures.
        """
        if isinstance(grower.method, WidthDecision):
            raise UserError(
                f"{grower.method.name} decides widths itself; take it with a schedule of stages, or another growth "
                "method."
            )
        if self.demand.wants_bottlenecks:
            self._check_measurable(grower)

    def check_records(self, columns: Collection[str]) -> None:
        """Refuse records that lack the demand's metric.

        Raises:
            UserError: they do.
        """
        with as_user_errors():
            self.demand.check_records(columns)

    def next(self, grower: GrowingNetwork) -> Widths | None:
        """Widths that the demand decides on, in the first process.

        Raises:
            UserError: data or records that the demand reads are missing.
        """
        epoch, state = grower.clock.epoch, grower.state
        self._check_training(grower)
        # Nothing is known before the first epoch, and an epoch that a run is resumed in has been asked about.
        if not state.asked < epoch < self.total_epochs or not epoch:
            return None
        state.asked = epoch
        progress = self._progress(grower)
        led = {group: width for group, width in state.widths.items() if group not in self._left}
        try:
            with as_user_errors():
                widths = self.demand.decide(progress, led, self.steps(grower.graph))
        except KeyError as error:
            raise UserError(
                f"{type(self.demand).__name__} looks at the column {error} of the records, which lack it: give each "
                "epoch's in Grower.provide(records=...)."
            ) from error
        reason = {
            "by": type(self.demand).__name__,
            "due": progress.steps_left > 0 and self.demand.must(progress),
            "spent_percent": progress.spent,
            "climbing_percent": progress.climbing,
        }
        widths, reason = gather((widths, reason))[0]
        grower.notes["demand"] = reason
        return None if widths == led else {**state.widths, **widths}

    def _check_training(self, grower: GrowingNetwork) -> None:
        """Refuse a training that provides nothing to count cost by, before its first step."""
        training = grower.training
        if training.flops is None or not training.samples or not training.reference_flops:
            raise UserError(
                "growth on demand needs to know the training: call Grower.provide(records=..., samples=..., flops=..., "
                "reference_flops=...) before the first step; see growlab.grower.triggers.Training."
            )

    def state_dict(self) -> dict[str, Any]:
        """Its auxiliary passes so far."""
        return {"looks": list(self.auxiliary_passes)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.auxiliary_passes = list(state["looks"])

    def _progress(self, grower: GrowingNetwork) -> Progress:
        training, widths, stage = grower.training, grower.state.widths, grower.state.scheduled_stage
        rows, samples, flops = training.records(), training.samples, training.flops
        assert flops is not None
        above = _above(self.steps(grower.graph), widths)
        ahead = [{**widths, **{g: max(widths[g], width) for g, width in step.items()}} for step in above]
        stages = [grower.seed_widths, *(event["widths_after"] for event in grower.events)]
        spent = sum(
            flops(stages[row["stage"]], self.fraction_grown(row["stage"], stages[row["stage"]]))
            * samples[row["epoch"]]
            for row in rows
        )
        scheduled = _scheduled(grower.events)
        found = self._measure(grower) if above and self.demand.wants_bottlenecks else {}
        spent += sum(passes.get("auxiliary_flops", 0) for passes in (*grower.events, *self.auxiliary_passes))
        epoch = grower.clock.epoch
        costs = [flops(step, self.fraction_grown(stage + 1, step)) for step in ahead]
        percent = 100.0 / training.reference_flops
        return Progress(
            epoch,
            self.total_epochs,
            [row for row in rows if scheduled[row["stage"]] == stage],
            len(above),
            spent * percent,
            (spent + cheapest_remaining_cost(costs, samples[epoch:], self.demand.min_epochs)) * percent,
            self._gradient_norms(grower) if self.demand.wants_gradients else {},
            found,
            [look["out_of_reach"] for look in self.auxiliary_passes if scheduled[look["stage"]] == stage],
        )

    def _check_measurable(self, grower: GrowingNetwork) -> None:
        if not measurable(grower.graph, grower.network):
            raise UserError(
                f"{type(self.demand).__name__} looks at channels that one layer puts out and one takes, of which this "
                "network has none: take Plateau or GradientNorm."
            )

    def _measure(self, grower: GrowingNetwork) -> dict[str, Bottleneck]:
        """Measure bottlenecks, and record results and cost."""
        self._check_measurable(grower)
        data = grower.measurement(self.demand.batches, type(self.demand).__name__)
        found = bottlenecks(grower.graph, grower.state.widths, data, grower.seed)
        found = {group: one for group, one in found.items() if group not in self._left}
        missing = {group: {"wanted": one.wanted, "missing": one.missing} for group, one in found.items()}
        look = {"stage": grower.state.stage, "epoch": grower.clock.epoch, "out_of_reach": out_of_reach(found)}
        self.auxiliary_passes.append({**look, "bottlenecks": missing, **data.report()})
        return found

    def _gradient_norms(self, grower: GrowingNetwork) -> dict[str, float]:
        """Root mean square of the running gradient of the layers that put out each group's channels."""
        found = grower.gradients()
        if not found:
            raise UserError(
                f"{type(self.demand).__name__} looks at running gradients, which this optimizer does not keep: set "
                "its momentum, or choose another optimizer."
            )
        squares: dict[str, float] = {}
        counts: dict[str, int] = {}
        for name, parameter in grower.network.named_parameters():
            axes = [axis for axis in grower.graph.axes.get(name, ()) if axis.role == "out"]
            if name not in found or not axes:
                continue
            square = float(found[name].double().square().sum())
            for group in {group for axis in axes for group in axis.groups}:
                squares[group] = squares.get(group, 0.0) + square
                counts[group] = counts.get(group, 0) + parameter.numel()
        return {group: sqrt(square / counts[group]) for group, square in squares.items()}


def cheapest_remaining_cost(flops: Sequence[int], samples: Sequence[int], every: int) -> int:
    """Forward FLOPs of growing now, and then one step every so many epochs, to the end of the run.

    Args:
        flops: per sample, at each step to come; none: nothing is left to grow, and nothing is spent.
        samples: of each epoch to come.
        every: epochs at each step but the last.
    """
    last = len(flops) - 1
    return sum(flops[min(i // every, last)] * count for i, count in enumerate(samples)) if flops else 0


def _above(steps: Sequence[Widths], widths: Widths) -> list[Widths]:
    return [step for step in steps if any(width > widths[group] for group, width in step.items())]


def _scheduled(events: Sequence[Mapping[str, Any]]) -> list[int]:
    """Stage as triggers count it, of every stage so far: events that parts asked for begin none of theirs."""
    return [0, *accumulate(int("asked_by" not in event) for event in events)]

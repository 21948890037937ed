"""The trigger that grows when training asks for it: a demand decides at the beginning of each epoch."""

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from math import sqrt
from typing import Any

from growlab.base.errors import UserError, as_user_errors
from growlab.base.ranks import gather
from growlab.grower.triggers.demand import Demand, Progress
from growlab.grower.triggers.trigger import Run, Trigger, Widths
from growlab.growth import Bottleneck, Schedule, WidthDecision, bottlenecks, measurable, out_of_reach
from growlab.widths import WidthGraph


class OnDemand(Trigger):
    """Grow through the widths of a schedule's stages whenever a demand asks for it.

    What the demand is asked about comes from the weights' widths, the records so far and the optimizers' state, all
    of which a checkpoint holds: a resumed run is told the same.

    Args:
        demand: decides.
        stages: whose widths the network climbs through; its epochs do not count.
        total_epochs: of the run.
    """

    counts = "epoch"

    def __init__(self, demand: Demand, stages: Schedule, total_epochs: int) -> None:
        if not isinstance(demand, Demand) or not isinstance(stages, Schedule):
            raise UserError(
                "OnDemand needs a demand and a schedule: such as Plateau() and make_schedule(...)."
            )
        self.demand, self.total_epochs = demand, total_epochs
        self._stages, self._told, self._left = stages, dict[str, Any](), frozenset[str]()
        self.looks: list[dict[str, Any]] = []
        self.wants_gradients, self.plans_cost = demand.wants_gradients, demand.plans_cost

    def leave_to_parts(self, groups: Collection[str]) -> None:
        """Groups that are no part of the steps."""
        self._left = frozenset(groups)

    def steps(self, graph: WidthGraph) -> list[Widths]:
        """Widths that growth goes through, of the groups that it leads; the seed's first, each once."""
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

    def share(self, stage: int, widths: Widths) -> float:
        """Part of the widths that have been reached by every group."""
        last = len(self._known) - 1
        return 1 - len(_above(self._known, widths)) / last if last else 1.0

    def stage_end(self, run: Run) -> int:
        """Epoch before which it grows in any case, or behind the run's last one."""
        ahead = len(_above(self.steps(run.graph), run.state.widths))
        return self.demand.latest(self.total_epochs, ahead) if ahead else self.total_epochs

    def check(self, run: Run) -> None:
        """A method that decides widths by itself leaves nothing to decide, and bottlenecks need channels to look at."""
        if isinstance(run.method, WidthDecision):
            raise UserError(
                f"{run.method.name} decides widths itself; take it with a schedule of stages, or another growth method."
            )
        if self.demand.wants_bottlenecks:
            self._check_measurable(run)

    def check_records(self, columns: Collection[str]) -> None:
        """What the demand looks at has to be there."""
        with as_user_errors():
            self.demand.check_records(columns)

    def next(self, run: Run) -> Widths | None:
        """The demand's widths, as the first process says.

        Raises:
            UserError: what the demand looks at is not there.
        """
        epoch, state = run.clock.epoch, run.state
        self._check_told(run)
        # Nothing is known before the first epoch, and an epoch that a run is resumed in has been asked about.
        if not state.asked < epoch < self.total_epochs or not epoch:
            return None
        state.asked = epoch
        progress = self._progress(run)
        led = {group: width for group, width in state.widths.items() if group not in self._left}
        try:
            with as_user_errors():
                widths = self.demand.decide(progress, led, self.steps(run.graph))
        except KeyError as error:
            raise UserError(
                f"{type(self.demand).__name__} looks at the column {error} of the records, which lack it: give each "
                "epoch's in Grower.look_at(records=...)."
            ) from error
        reason = {
            "by": type(self.demand).__name__,
            "due": progress.steps_left > 0 and self.demand.must(progress),
            "spent_percent": progress.spent,
            "climbing_percent": progress.climbing,
        }
        widths, reason = gather((widths, reason))[0]
        self._told = {"demand": reason}
        return None if widths == led else {**state.widths, **widths}

    def _check_told(self, run: Run) -> None:
        """Refuse a training that has not told what cost is counted by, before its first step."""
        training = run.training
        if training.flops is None or not training.samples or not training.reference_flops:
            raise UserError(
                "growth on demand needs to know the training: call Grower.look_at(records=..., samples=..., flops=..., "
                "reference_flops=...) before the first step; see growlab.grower.triggers.Training."
            )

    def told(self) -> Mapping[str, Any]:
        """How the last decision came about."""
        return self._told

    def state_dict(self) -> dict[str, Any]:
        """What has been measured by passes of its own, and when."""
        return {"looks": list(self.looks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned."""
        self.looks = list(state["looks"])

    def _progress(self, run: Run) -> Progress:
        training, widths, stage = run.training, run.state.widths, run.state.scheduled_stage
        rows, samples, flops = training.records(), training.samples, training.flops
        assert flops is not None
        above = _above(self.steps(run.graph), widths)
        ahead = [{**widths, **{g: max(widths[g], width) for g, width in step.items()}} for step in above]
        stages = [run.seed_widths, *(event["widths_after"] for event in run.events)]
        spent = sum(
            flops(stages[row["stage"]], self.share(row["stage"], stages[row["stage"]]))
            * samples[row["epoch"]]
            for row in rows
        )
        scheduled = _scheduled(run.events)
        found = self._look(run) if above and self.demand.wants_bottlenecks else {}
        spent += sum(passes.get("auxiliary_flops", 0) for passes in (*run.events, *self.looks))
        epoch = run.clock.epoch
        costs = [flops(step, self.share(stage + 1, step)) for step in ahead]
        percent = 100.0 / training.reference_flops
        return Progress(
            epoch,
            self.total_epochs,
            [row for row in rows if scheduled[row["stage"]] == stage],
            len(above),
            spent * percent,
            (spent + climb(costs, samples[epoch:], self.demand.min_epochs)) * percent,
            self._gradient_norms(run) if self.demand.wants_gradients else {},
            found,
            [look["out_of_reach"] for look in self.looks if scheduled[look["stage"]] == stage],
        )

    def _check_measurable(self, run: Run) -> None:
        if not measurable(run.graph, run.network):
            raise UserError(
                f"{type(self.demand).__name__} looks at channels that one layer puts out and one takes, of which this "
                "network has none: take Plateau or GradientNorm."
            )

    def _look(self, run: Run) -> dict[str, Bottleneck]:
        """Measure bottlenecks, and note what was found and what it took."""
        self._check_measurable(run)
        data = run.measurement(self.demand.batches, type(self.demand).__name__)
        found = bottlenecks(run.graph, run.state.widths, data, run.seed)
        found = {group: one for group, one in found.items() if group not in self._left}
        told = {group: {"wanted": one.wanted, "missing": one.missing} for group, one in found.items()}
        look = {"stage": run.state.stage, "epoch": run.clock.epoch, "out_of_reach": out_of_reach(found)}
        self.looks.append({**look, "bottlenecks": told, **data.told()})
        return found

    def _gradient_norms(self, run: Run) -> dict[str, float]:
        """Root mean square of the running gradient of the layers that put out each group's channels."""
        found = run.gradients()
        if not found:
            raise UserError(
                f"{type(self.demand).__name__} looks at running gradients, which this optimizer does not keep: set "
                "its momentum, or choose another optimizer."
            )
        squares: dict[str, float] = {}
        counts: dict[str, int] = {}
        for name, parameter in run.network.named_parameters():
            axes = [axis for axis in run.graph.axes.get(name, ()) if axis.role == "out"]
            if name not in found or not axes:
                continue
            square = float(found[name].double().square().sum())
            for group in {group for axis in axes for group in axis.groups}:
                squares[group] = squares.get(group, 0.0) + square
                counts[group] = counts.get(group, 0) + parameter.numel()
        return {group: sqrt(square / counts[group]) for group, square in squares.items()}


def climb(flops: Sequence[int], samples: Sequence[int], every: int) -> int:
    """Forward FLOPs of growing now, and then a step every so many epochs, to the end of the run.

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

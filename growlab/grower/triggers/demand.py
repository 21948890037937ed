"""Growth on demand: decide from the progress of training when and which groups grow."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from math import ceil, isfinite, sqrt
from typing import Any

from growlab.base.errors import UserError, as_user_errors
from growlab.base.ranks import gather
from growlab.base.settings import Described, at_least, finite, one_of, whole
from growlab.grower.triggers.trigger import GrowingNetwork, Trigger, Widths
from growlab.growth import Bottleneck, Schedule, WidthDecision, bottlenecks, measurable, out_of_reach
from growlab.widths import WidthGraph

GROUPS = ("all", "gradient", "bottleneck")


@dataclass(frozen=True)
class Progress:
    """Progress of a run at the beginning of an epoch.

    Attributes:
        epoch: the starting epoch, from 0.
        total_epochs: epochs of the run.
        rows: records of each epoch since the trigger's last event, or since the start.
        steps_left: number of growth events of all groups until full width.
        spent: FLOPs so far in percent of the fixed-size run.
        climbing: FLOPs of the whole run in percent of the fixed-size run, if it grows now and after every `min_epochs`
            until full width.
        gradient_norms: root mean square of the running gradient of the layers that produce each group's channels.
        bottlenecks: expressivity bottlenecks by group, if the demand measures them.
        out_of_reach: sum(missing) / sum(wanted) of bottlenecks at the start of each epoch of the stage except its
            first; the last entry is this epoch's.
    """

    epoch: int
    total_epochs: int
    rows: Sequence[Mapping[str, Any]]
    steps_left: int
    spent: float = 0.0
    climbing: float = 0.0
    gradient_norms: Mapping[str, float] = field(default_factory=dict)
    bottlenecks: Mapping[str, Bottleneck] = field(default_factory=dict)
    out_of_reach: Sequence[float] = ()


class Demand(Described, ABC):
    """Decides at the start of each epoch whether to grow to the next widths of the schedule.

    All groups grow in time for full width to last at least `final_fraction` of the epochs. Decisions depend only on the
    arguments: ranks use rank 0's, and a resumed run asks again.

    Args:
        min_epochs: least number of epochs between two growth events, and before the first.
        final_fraction: least fraction of the run at full width.
        groups: "all" grow together; "gradient": those with the largest gradients; "bottleneck": those with the largest
            bottleneck in the layer that consumes them, see `growlab.growth.bottlenecks`.
        groups_fraction: fraction of the groups that "gradient" and "bottleneck" choose, at least one.
        batches: training batches to measure bottlenecks on at the start of each epoch.

    Raises:
        ValueError: a value is impossible.
    """

    #: True if it needs the optimizer's running gradients.
    wants_gradients: bool = False
    #: True if it needs expressivity bottlenecks.
    wants_bottlenecks: bool = False
    #: True if it uses the cost of future widths.
    plans_cost: bool = False
    #: Column of the records that it uses.
    metric: str | None = None

    def __init__(
        self,
        min_epochs: int = 1,
        final_fraction: float = 0.2,
        groups: str = "all",
        groups_fraction: float = 0.5,
        batches: int = 1,
    ) -> None:
        whole(1, batches=batches, min_epochs=min_epochs)
        finite(final_fraction=final_fraction, groups_fraction=groups_fraction)
        if not 0 <= final_fraction < 1:
            raise ValueError(f"final_fraction must be in [0, 1), not {final_fraction}.")
        one_of(GROUPS, groups=groups)
        if not 0 < groups_fraction <= 1:
            raise ValueError(f"groups_fraction must be in (0, 1], not {groups_fraction}.")
        self.min_epochs, self.final_fraction = min_epochs, final_fraction
        self.groups, self.groups_fraction = groups, groups_fraction
        self.batches = batches
        self.wants_gradients = self.wants_gradients or groups == "gradient"
        self.wants_bottlenecks = self.wants_bottlenecks or groups == "bottleneck"

    @abstractmethod
    def wants(self, progress: Progress) -> bool:
        """Return True to grow now."""

    def latest(self, total_epochs: int, steps_left: int) -> int:
        """Return the latest epoch for the next step, given the number of steps left."""
        final = max(1, ceil(self.final_fraction * total_epochs))
        return total_epochs - final - (steps_left - 1) * self.min_epochs

    def must(self, progress: Progress) -> bool:
        """Return True if waiting would leave too little time at full width."""
        return progress.epoch >= self.latest(progress.total_epochs, progress.steps_left)

    def check(self, total_epochs: int, steps: int, cheapest: float) -> None:
        """Refuse a run in which the demand cannot reach full width in time.

        Args:
            total_epochs: epochs of the run.
            steps: number of growth events of all groups to full width.
            cheapest: lowest possible cost of the run, in percent of the fixed-size run's FLOPs.

        Raises:
            ValueError: there are too few epochs.
        """
        if steps and self.latest(total_epochs, steps) < self.min_epochs:
            needed = total_epochs - self.latest(total_epochs, steps) + self.min_epochs
            raise ValueError(
                f"{total_epochs} epochs are too few to grow {steps} times with min_epochs={self.min_epochs} and train "
                f"final_fraction={self.final_fraction} of them at full width: take {needed}, or lower num_stages."
            )

    def check_records(self, columns: Collection[str]) -> None:
        """Refuse a run that does not record the demand's metric.

        Args:
            columns: columns of metrics.csv that will have values.

        Raises:
            ValueError: the column is missing.
        """
        if self.metric is not None and self.metric not in columns:
            instead = "hold out a validation set, or " if self.metric.startswith("val_") else ""
            raise ValueError(f"metric={self.metric!r} is not recorded: {instead}use train_loss.")

    def decide(
        self, progress: Progress, widths: Mapping[str, int], steps: Sequence[Mapping[str, int]]
    ) -> dict[str, int]:
        """Return the width of each group from now on, at least the current one.

        Args:
            progress: progress of the training.
            widths: current width of each group.
            steps: widths of the schedule's stages; the last are the full widths.
        """
        due = progress.steps_left > 0 and self.must(progress)
        early = len(progress.rows) < self.min_epochs
        if progress.steps_left == 0 or (early and not due) or not (due or self.wants(progress)):
            return dict(widths)
        if due or self.groups == "all":
            step = steps[len(steps) - progress.steps_left]
            return {group: max(width, step[group]) for group, width in widths.items()}
        growing = [group for group in widths if widths[group] < steps[-1][group]]
        scores = progress.gradient_norms
        if self.groups == "bottleneck":
            scores = {group: bottleneck.missing for group, bottleneck in progress.bottlenecks.items()}
        # Groups with equal scores keep their order.
        growing.sort(key=lambda group: -scores.get(group, 0.0))
        chosen = growing[: max(1, round(self.groups_fraction * len(growing)))]
        wider = {group: min(step[group] for step in steps if step[group] > widths[group]) for group in chosen}
        return {**widths, **wider}


class Plateau(Demand):
    """Grow when a metric stops improving.

    Args:
        metric: a column of metrics.csv: val_loss, val_accuracy, train_loss or train_accuracy.
        patience: epochs without an improvement.
        min_delta: least improvement, relative to the best value of the stage.
        demand: see `Demand`.

    Raises:
        ValueError: a value is impossible.
    """

    METRICS = ("val_loss", "val_accuracy", "train_loss", "train_accuracy")
    metric: str

    def __init__(self, metric: str = "val_loss", patience: int = 3, min_delta: float = 0.01, **demand: Any) -> None:
        super().__init__(**demand)
        one_of(self.METRICS, metric=metric)
        whole(1, patience=patience)
        at_least(0, min_delta=min_delta)
        self.metric, self.patience, self.min_delta = metric, patience, min_delta

    def wants(self, progress: Progress) -> bool:
        """Return True if the last improvement is `patience` epochs ago."""
        sign = 1.0 if self.metric.endswith("loss") else -1.0
        best, since = None, 0
        for row in progress.rows:
            value = sign * float(row[self.metric])
            if best is None or value < best - self.min_delta * abs(best):
                best, since = value, 0
            else:
                since += 1
        return since >= self.patience


class _BelowPeak(Demand):
    """Grow when a number falls below a fraction of its maximum in the stage."""

    def __init__(self, ratio: float, **demand: Any) -> None:
        super().__init__(**demand)
        finite(ratio=ratio)
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio must be in (0, 1], not {ratio}.")
        self.ratio = ratio


class GradientNorm(_BelowPeak):
    """Grow when the gradient has become small, i.e. the current widths learn slowly (motivation of Evci et al. 2022).

    The gradient is the optimizer's running mean at the end of an epoch.

    Args:
        ratio: grow when the norm falls below this fraction of its maximum in the stage.
        demand: see `Demand`.

    Raises:
        ValueError: a value is impossible.
    """

    wants_gradients = True

    def __init__(self, ratio: float = 0.5, **demand: Any) -> None:
        super().__init__(ratio, **demand)

    def wants(self, progress: Progress) -> bool:
        """Return True if the last epoch's gradient is below `ratio` of the stage's largest."""
        norms = [float(row["gradient_norm"]) for row in progress.rows]
        finite_norms = [norm for norm in norms if isfinite(norm)]
        return len(finite_norms) > 1 and norms[-1] < self.ratio * max(finite_norms)


class Expressivity(_BelowPeak):
    """Grow when the present weights can follow little of the functional gradient (Verbockhaven et al. 2024).

    A change of the weights can achieve only a part of the change of outputs that lowers the loss most; the rest is the
    expressivity bottleneck. The achievable part is largest early in a stage and shrinks as training converges. It
    depends on the network and the batches, so it is compared with its own maximum. Measuring takes a forward and
    backward pass over `batches` at the start of each epoch, which counts as cost.

    Args:
        ratio: grow when the achievable part falls below this fraction of its maximum in the stage.
        demand: see `Demand`.

    Raises:
        ValueError: a value is impossible.
    """

    wants_bottlenecks = True

    def __init__(self, ratio: float = 0.8, **demand: Any) -> None:
        super().__init__(ratio, **demand)

    def wants(self, progress: Progress) -> bool:
        """Return True if the achievable part is below `ratio` of its maximum, or no bottleneck can be measured."""
        achievable = [1.0 - out_of_reach for out_of_reach in progress.out_of_reach]
        return not progress.bottlenecks or achievable[-1] < self.ratio * max(achievable)


class Budget(Demand):
    """Grow as soon as a budget of FLOPs suffices to reach full width and train there to the end.

    The network is narrow for as long as necessary, and the run costs the budget or a little less.

    Args:
        percent: budget in percent of the FLOPs of the fixed-size run of equal length.
        demand: see `Demand`.

    Raises:
        ValueError: a value is impossible.
    """

    plans_cost = True

    def __init__(self, percent: float = 50.0, **demand: Any) -> None:
        super().__init__(**demand)
        finite(percent=percent)
        if not 0 < percent <= 100:
            raise ValueError(f"percent must be above 0 and at most 100, not {percent}.")
        self.percent = percent

    def wants(self, progress: Progress) -> bool:
        """Return True if growing from now on stays within the budget."""
        return progress.climbing <= self.percent

    def check(self, total_epochs: int, steps: int, cheapest: float) -> None:
        """Refuse a budget below the cheapest possible run.

        Raises:
            ValueError: the budget is too small.
        """
        super().check(total_epochs, steps, cheapest)
        if cheapest > self.percent:
            raise ValueError(
                f"percent={self.percent} is below {cheapest:.1f}, the cost of growing as late as possible: raise it, "
                "or lower final_fraction or initial_width."
            )


class OnDemand(Trigger):
    """Grow to the next widths of a schedule whenever a demand asks for it.

    The demand decides from widths, records and optimizer state, which are in checkpoints: a resumed run decides the
    same.

    Args:
        demand: demand that decides when to grow.
        stages: schedule of the widths; its epochs are ignored.
        total_epochs: epochs of the run.

    Attributes:
        auxiliary_passes: the demand's measurements on data, with their results and cost.
    """

    unit = "epoch"

    def __init__(self, demand: Demand, stages: Schedule, total_epochs: int) -> None:
        if not isinstance(demand, Demand) or not isinstance(stages, Schedule):
            raise UserError("OnDemand needs a demand and a schedule, such as Plateau() and make_schedule(...).")
        self.demand, self.total_epochs, self._stages = demand, total_epochs, stages
        self.plans_cost = demand.plans_cost
        self.auxiliary_passes: list[dict[str, Any]] = []

    def steps(self, graph: WidthGraph) -> list[Widths]:
        """Widths that growth goes through, without repetitions, starting with the seed's."""
        steps: list[Widths] = []
        for stage in self._stages.widths(graph):
            widths = {group: width for group, width in stage.items() if group not in self.left_to_parts}
            if not steps or widths != steps[-1]:
                steps.append(widths)
        self._steps = steps
        return steps

    def fraction_grown(self, stage: int, widths: Widths) -> float:
        """Return the fraction of the steps that every group has reached."""
        last = len(self._steps) - 1
        return 1 - len(_above(self._steps, widths)) / last if last else 1.0

    def stage_end(self, grower: GrowingNetwork) -> int:
        """Return the latest epoch of the next event; at full width the number of the run's epochs."""
        ahead = len(_above(self.steps(grower.graph), grower.state.widths))
        return self.demand.latest(self.total_epochs, ahead) if ahead else self.total_epochs

    def check_records(self, columns: Collection[str]) -> None:
        """Refuse records that lack the demand's metric.

        Raises:
            UserError: the metric is missing.
        """
        with as_user_errors():
            self.demand.check_records(columns)

    def next(self, grower: GrowingNetwork) -> Widths | None:
        """Return the demand's widths, decided on rank 0.

        Raises:
            UserError: data or records are missing, the method decides widths itself, or no group can be measured.
        """
        epoch, state = grower.clock.epoch, grower.state
        if not epoch and not grower.clock.step:
            self._check(grower)
        # There are no records before the first epoch, and a resumed run has decided for its epoch already.
        if not state.asked < epoch < self.total_epochs or not epoch:
            return None
        state.asked = epoch
        progress = self._progress(grower)
        current = {group: width for group, width in state.widths.items() if group not in self.left_to_parts}
        try:
            with as_user_errors():
                widths = self.demand.decide(progress, current, self.steps(grower.graph))
        except KeyError as error:
            raise UserError(
                f"{type(self.demand).__name__} uses the column {error}, which the records lack: give it for each epoch "
                "in Grower.provide(records=...)."
            ) from error
        reason = {
            "by": type(self.demand).__name__,
            "due": progress.steps_left > 0 and self.demand.must(progress),
            "spent_percent": progress.spent,
            "climbing_percent": progress.climbing,
        }
        widths, reason = gather((widths, reason))[0]
        grower.notes["demand"] = reason
        return None if widths == current else {**state.widths, **widths}

    def _check(self, grower: GrowingNetwork) -> None:
        training = grower.training
        if training.flops is None or not training.samples or not training.reference_flops:
            raise UserError(
                "growth on demand needs to know the training: call Grower.provide(records=..., samples=..., flops=..., "
                "reference_flops=...) before the first step; see growlab.grower.triggers.Training."
            )
        if isinstance(grower.method, WidthDecision):
            raise UserError(f"{grower.method.name} decides widths itself; use it with a schedule of stages.")
        if self.demand.wants_bottlenecks and not measurable(grower.graph, grower.network):
            raise UserError(
                f"{type(self.demand).__name__} measures channels with one producing and one consuming layer, and this "
                f"network has none: use Plateau or GradientNorm."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the auxiliary passes so far."""
        return {"looks": list(self.auxiliary_passes)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.auxiliary_passes = list(state["looks"])

    def _progress(self, grower: GrowingNetwork) -> Progress:
        training, widths, stage = grower.training, grower.state.widths, grower.state.scheduled_stage
        rows, samples, flops = training.records(), training.samples, training.flops
        assert flops is not None
        above = _above(self.steps(grower.graph), widths)
        ahead = [{**widths, **{g: max(widths[g], width) for g, width in step.items()}} for step in above]
        stages = [grower.seed_widths, *(event.widths_after for event in grower.events)]
        spent = sum(
            flops(stages[row["stage"]], self.fraction_grown(row["stage"], stages[row["stage"]])) * samples[row["epoch"]]
            for row in rows
        )
        # Each stage so far as triggers count stages, without events requested by parts.
        scheduled = [0, *accumulate(int("asked_by" not in event.notes) for event in grower.events)]
        measured = self._measure(grower) if above and self.demand.wants_bottlenecks else {}
        spent += sum(
            passes.get("auxiliary_flops", 0)
            for passes in (*(event.notes for event in grower.events), *self.auxiliary_passes)
        )
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
            measured,
            [pass_["out_of_reach"] for pass_ in self.auxiliary_passes if scheduled[pass_["stage"]] == stage],
        )

    def _measure(self, grower: GrowingNetwork) -> dict[str, Bottleneck]:
        data = grower.measurement(self.demand.batches, type(self.demand).__name__)
        measured = bottlenecks(grower.graph, grower.state.widths, data, grower.seed)
        measured = {group: one for group, one in measured.items() if group not in self.left_to_parts}
        receipt = {"stage": grower.state.stage, "epoch": grower.clock.epoch, "out_of_reach": out_of_reach(measured)}
        by_group = {group: asdict(bottleneck) for group, bottleneck in measured.items()}
        self.auxiliary_passes.append({**receipt, "bottlenecks": by_group, **data.report()})
        return measured

    def _gradient_norms(self, grower: GrowingNetwork) -> dict[str, float]:
        """Root mean square of the running gradient of the layers that produce each group's channels."""
        gradients = grower.gradients()
        if not gradients:
            raise UserError(
                f"{type(self.demand).__name__} uses running gradients, which this optimizer does not keep: set its "
                f"momentum, or choose another optimizer."
            )
        squares: dict[str, float] = {}
        counts: dict[str, int] = {}
        for name, parameter in grower.network.named_parameters():
            axes = [axis for axis in grower.graph.axes.get(name, ()) if axis.role == "out"]
            if name not in gradients or not axes:
                continue
            square = float(gradients[name].double().square().sum())
            for group in {group for axis in axes for group in axis.groups}:
                squares[group] = squares.get(group, 0.0) + square
                counts[group] = counts.get(group, 0) + parameter.numel()
        return {group: sqrt(square / counts[group]) for group, square in squares.items()}


def cheapest_remaining_cost(flops: Sequence[int], samples: Sequence[int], every: int) -> int:
    """Forward FLOPs of the remaining run if it grows now, and then one step every `every` epochs.

    Args:
        flops: FLOPs per sample at each remaining step; if empty the result is 0.
        samples: number of samples of each remaining epoch.
        every: epochs at each step except the last.
    """
    last = len(flops) - 1
    return sum(flops[min(i // every, last)] * count for i, count in enumerate(samples)) if flops else 0


def _above(steps: Sequence[Widths], widths: Widths) -> list[Widths]:
    return [step for step in steps if any(width > widths[group] for group, width in step.items())]

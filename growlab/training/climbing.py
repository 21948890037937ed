"""Growth on demand in a run: what it has cost and how it has gone, for the demand to decide by."""

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from typing import Any

from lightning import Trainer
from torch import Tensor

from growlab.analysis.flops import stage_flops
from growlab.errors import UserError
from growlab.growth import Bottleneck, Course, Demand, bottlenecks, measurable, out_of_reach
from growlab.growth.multipliers import without_multipliers
from growlab.optim import running_gradients
from growlab.ranks import gather
from growlab.training.looking import Batches, auxiliary, auxiliary_flops, measurement
from growlab.training.objective import network_inputs
from growlab.training.plan import Plan, climb
from growlab.training.task import Task

Widths = Mapping[str, int]


class Climber:
    """Asks a demand at the beginning of each epoch.

    What it is asked about comes from the weights' widths, the rows recorded so far and the optimizer's state, all of
    which a checkpoint holds: a resumed run is told the same.

    Args:
        demand: decides.
        plan: of the run, with a ladder of widths.
        sample: one input [1, ...], or the tuple of the forward's positional inputs.
        rows: what was recorded of every epoch so far.
        batches: for a demand that looks at some.
    """

    def __init__(
        self,
        demand: Demand,
        plan: Plan,
        sample: Tensor | tuple[Any, ...],
        rows: Callable[[], Sequence[Mapping[str, Any]]],
        batches: Batches | None = None,
    ) -> None:
        assert plan.ladder is not None
        self.demand, self._ladder, self._plan = demand, plan.ladder, plan
        self._sample, self._rows, self._batches = sample, rows, batches
        self._known: dict[tuple[int, ...], int] = {}

    def decide(self, trainer: Trainer, task: Task) -> tuple[dict[str, int], dict[str, Any]]:
        """Width of each group from here on, as the first rank says, and how the decision came about.

        Raises:
            UserError: what the demand looks at is not there.
        """
        course = self._course(trainer, task)
        try:
            widths = self.demand.decide(course, task.growth_state.widths, self._ladder)
        except ValueError as error:
            raise UserError(str(error)) from error
        reason = {
            "by": type(self.demand).__name__,
            "due": course.rungs_left > 0 and self.demand.must(course),
            "spent_percent": course.spent,
            "climbing_percent": course.climbing,
        }
        return gather((widths, reason))[0]

    def _course(self, trainer: Trainer, task: Task) -> Course:
        rows, widths = self._rows(), task.growth_state.widths
        above = [rung for rung in self._ladder if any(rung[group] > width for group, width in widths.items())]
        rungs = [{group: max(width, rung[group]) for group, width in widths.items()} for rung in above]
        stages, samples = task.stage_widths, self._plan.samples
        spent = sum(self._flops(task, stages[row["stage"]]) * samples[row["epoch"]] for row in rows)
        found = self._look(trainer, task) if above and self.demand.wants_bottlenecks else {}
        spent += auxiliary_flops(task)
        epoch = trainer.current_epoch
        ahead = climb([self._flops(task, rung) for rung in rungs], samples[epoch:], self.demand.min_epochs)
        percent = 100.0 / self._plan.reference_flops
        return Course(
            epoch,
            self._plan.schedule.total_epochs,
            [row for row in rows if row["stage"] == task.growth_state.stage],
            len(above),
            spent * percent,
            (spent + ahead) * percent,
            self._gradient_norms(trainer, task) if self.demand.wants_gradients else {},
            found,
            [look["out_of_reach"] for look in task.looks if look["stage"] == task.growth_state.stage],
        )

    def _look(self, trainer: Trainer, task: Task) -> dict[str, Bottleneck]:
        """Measure bottlenecks, and note what was found and what it took."""
        name = f"schedule.demand ({type(self.demand).__name__})"
        if not measurable(task.graph, task.network):
            raise UserError(
                f"{name} looks at channels that one layer puts out and one takes, of which this network has none: "
                "choose schedule=plateau or gradient."
            )
        data = measurement(task, self._batches, self.demand.batches, name)
        found = bottlenecks(task.graph, task.growth_state.widths, data, task.seed)
        told = {group: {"wanted": one.wanted, "missing": one.missing} for group, one in found.items()}
        look = {
            "stage": task.growth_state.stage,
            "epoch": trainer.current_epoch,
            "out_of_reach": out_of_reach(found),
        }
        task.looks.append({**look, "bottlenecks": told, **auxiliary(data)})
        return found

    def _flops(self, task: Task, widths: Widths) -> int:
        key = tuple(widths[group] for group in task.graph.groups)
        if key not in self._known:
            sample = network_inputs(self._sample, task.network)
            now = task.growth_state.widths
            (self._known[key],) = stage_flops(
                without_multipliers(task.network), task.graph, now, [widths], sample
            )
        return self._known[key]

    def _gradient_norms(self, trainer: Trainer, task: Task) -> dict[str, float]:
        """Root mean square of the running gradient of what produces each group's channels."""
        found = {p: g for optimizer in trainer.optimizers for p, g in running_gradients(optimizer).items()}
        if not found:
            raise UserError(
                f"schedule.demand ({type(self.demand).__name__}) looks at running gradients, which this optimizer does "
                "not keep: set optimizer.momentum, or choose another optimizer."
            )
        squares: dict[str, float] = {}
        counts: dict[str, int] = {}
        for name, parameter in task.network.named_parameters():
            axes = [axis for axis in task.graph.axes.get(name, ()) if axis.role == "out"]
            if parameter not in found or not axes:
                continue
            square = float(found[parameter].double().square().sum())
            for group in {group for axis in axes for group in axis.groups}:
                squares[group] = squares.get(group, 0.0) + square
                counts[group] = counts.get(group, 0) + parameter.numel()
        return {group: sqrt(square / counts[group]) for group, square in squares.items()}

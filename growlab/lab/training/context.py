"""What a run tells its grower of the training: data, cost and records, for methods, triggers and parts that ask."""

import lightning

from growlab.grower import Grower
from growlab.grower.triggers import OnDemand
from growlab.lab.data import RunData
from growlab.lab.training import RunRecorder, Task
from growlab.lab.training.recorder import metric_columns
from growlab.lab.training.run_plan import Planned

# Numbers near zero that training in half precision (twice its smallest), and in any other, does not take for zero.
_HALF, _USUAL = 2.0**-23, 2.0**-100


def near_zero(precision: str) -> float:
    """A number that training in one of Lightning's precisions tells from zero, and that is lost beside any other."""
    return _HALF if precision in ("16-mixed", "16-true") else _USUAL


def tell_training(
    grower: Grower,
    task: Task,
    data: RunData,
    planned: Planned,
    recorder: RunRecorder,
    trainer: lightning.Trainer,
) -> None:
    """Tell it.

    Raises:
        UserError: trigger, method or parts do not go with the data.
    """
    batches = data.training_batches
    arriving = any(part.groups for part in grower.parts)

    def known_batches(number: int) -> list[tuple]:
        # Of the stage that ends, whose classes the network has outputs for.
        return batches(number, max(0, trainer.current_epoch - 1))

    unfilled = () if data.num_val else f"{task.watched}_"
    columns = metric_columns(task.objective, watched=task.watched)
    if isinstance(grower.trigger, OnDemand):
        grower.trigger.check_records([name for name in columns if not name.startswith(unfilled)])
    grower.provide(
        known_batches if arriving else batches,
        task.loss,
        weight=lambda output, target: task.objective(output, grower.targets(target))[1][-1],
        near_zero=near_zero(trainer.precision),
        steps=planned.plan.steps,
        samples=planned.plan.samples,
        records=lambda: recorder.rows,
        reference_flops=planned.plan.reference_flops,
        flops=planned.cost,
        epoch_batches=data.training_loader,
        seed_draws=task.seed_step,
    )

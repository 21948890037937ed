"""Brings normalisations that a growth event has weighted back to plain ones while a stage begins."""

from math import floor
from typing import Any

from lightning import Callback, Trainer

from growlab.errors import UserError
from growlab.growth import anneal_norms
from growlab.training.task import Task


class NormAnnealing(Callback):
    """Lets the weights of channels in statistics go to 1 before each step, in equal steps (`anneal_norms`).

    How far they are depends on the number of steps since the growth event alone; before the last step of the training
    they are plain. It comes behind the callback that grows.

    Args:
        part: of a stage's optimizer steps, after which normalisations are plain again; of an epoch's, where a method
            or a demand decides when to grow.

    Raises:
        UserError: the part leaves a stage no plain step at its end.
    """

    def __init__(self, part: float) -> None:
        if not 0 <= part < 1:
            raise UserError(f"norm_anneal={part} must be a part of a stage: at least 0 and below 1.")
        self._part = part

    def on_train_batch_start(self, trainer: Trainer, pl_module: Task, batch: Any, batch_idx: int) -> None:
        """Set the weights for this batch."""
        state = pl_module.growth_state
        if not state.norm_weights:
            return
        epoch, done = pl_module.events[-1]["epoch"], trainer.global_step - pl_module.events[-1]["step"]
        if pl_module.decides_widths:
            steps = pl_module.steps_in_epoch[epoch]
        else:
            schedule = pl_module.schedule
            epochs = [e for e in range(schedule.total_epochs) if schedule.stage_at(e) == state.stage]
            steps = sum(pl_module.steps_in_epoch[e] for e in epochs)
        # At least the last step of the training is one of the plain network.
        left = sum(pl_module.steps_in_epoch) - pl_module.events[-1]["step"] - 1
        wanted = min(floor(self._part * steps), left)
        progress = min(1.0, done / wanted) if wanted else 1.0
        if progress == state.norm_progress:
            return
        if pl_module.average is not None:
            average_state = type(state).from_dict(state.as_dict())
            anneal_norms(pl_module.average.module, pl_module.graph, average_state, progress)
        anneal_norms(pl_module.network, pl_module.graph, state, progress)

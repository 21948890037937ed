"""The callback that grows the network between epochs."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from lightning import Callback, Trainer
from torch import Tensor

from growlab.errors import UserError
from growlab.growth import ParityError, grow
from growlab.optim import Inheritance, follow
from growlab.training.task import Task

log = logging.getLogger(__name__)


class GrowthCallback(Callback):
    """Brings the network to the stage of the current epoch before the epoch's first batch.

    It asks "is the network at the stage of this epoch?" whenever training or an epoch starts, so that a run
    resumed from just before an event grows as the uninterrupted run does.

    Args:
        probe: inputs that parity is checked on, [B, ...].
        optimizer_state: what becomes of optimizer state at an event, see `growlab.optim.follow`.
        on_event: called with the receipt after each event.
    """

    def __init__(
        self,
        probe: Tensor,
        optimizer_state: Inheritance = "auto",
        on_event: Callable[[Trainer, dict[str, Any]], None] | None = None,
    ) -> None:
        self._probe = probe
        self._optimizer_state = optimizer_state
        self._on_event = on_event

    def on_train_start(self, trainer: Trainer, pl_module: Task) -> None:
        """Catch up if the run was resumed from a stage's last step."""
        self._bring_to_stage(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Task) -> None:
        """Grow if the epoch that begins belongs to the next stage."""
        self._bring_to_stage(trainer, pl_module)

    def _bring_to_stage(self, trainer: Trainer, task: Task) -> None:
        wanted = task.schedule.stage_at(trainer.current_epoch)
        while task.growth_state.stage < wanted:
            self._grow(trainer, task)

    def _grow(self, trainer: Trainer, task: Task) -> None:
        widths = task.schedule.widths(task.graph)
        before, stage = dict(task.growth_state.widths), task.growth_state.stage + 1
        parameter = next(task.network.parameters())
        probe = self._probe.to(parameter.device, parameter.dtype)
        try:
            event = grow(
                task.network, task.graph, task.method, task.growth_state, widths[stage], task.seed, (probe,)
            )
        except ParityError as error:
            raise UserError(f"{error} Lower optimizer.lr or choose another growth method.") from error
        for optimizer in trainer.optimizers:
            try:
                follow(
                    optimizer,
                    event.replaced,
                    task.graph,
                    before,
                    widths[stage],
                    self._optimizer_state,
                    event.carry,
                )
            except ValueError as error:
                raise UserError(str(error)) from error
            task.relabel_regions(optimizer)
        if task.network._compiled_call_impl is not None:
            # Else the ninth width exceeds the compiler's recompile limit and it silently stops compiling.
            torch.compiler.reset()
        receipt = {
            "stage": stage,
            "epoch": trainer.current_epoch,
            "step": trainer.global_step,
            "batch_size": task.schedule.batch_sizes[stage],
            **event.receipt(),
        }
        task.events.append(receipt)
        if self._on_event is not None:
            self._on_event(trainer, receipt)

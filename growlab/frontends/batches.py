"""Batches of a Lightning training: their sizes by stages, and how many there are."""

import logging
from collections.abc import Callable
from functools import wraps
from math import ceil, inf, isfinite
from typing import Any

from lightning import Trainer

from growlab.base.errors import UserError
from growlab.grower.triggers import At, Clock, Trigger

log = logging.getLogger(__name__)


def change_batch_sizes(trainer: Trainer, trigger: Trigger) -> Callable[[], None]:
    """Put a trigger's batch sizes into the data module's `batch_size` whenever its training data are asked for.

    Returns:
        Leaves the data module and the trainer as they were.

    Raises:
        UserError: the number of processes does not divide a batch size.
    """
    data = getattr(trainer, "datamodule", None)
    if not isinstance(trigger, At) or trigger.batch_sizes is None or len(set(trigger.batch_sizes)) == 1:
        return lambda: None
    sizes = trigger.batch_sizes
    if not hasattr(data, "batch_size"):
        log.warning("the trigger's batch sizes %s are left out: the data module has no batch_size", sizes)
        return lambda: None
    uneven = [size for size in sizes if size % trainer.world_size]
    if uneven:
        raise UserError(f"a batch of {uneven[0]} does not divide among {trainer.world_size} processes.")
    own, every = vars(data), trainer.reload_dataloaders_every_n_epochs
    before = {name: own[name] for name in ("train_dataloader", "batch_size") if name in own}
    original = data.train_dataloader

    @wraps(original)
    def train_dataloader() -> Any:
        now = Clock(epoch=trainer.current_epoch, step=trainer.global_step)
        data.batch_size = sizes[trigger.stage_at(now)] // trainer.world_size
        return original()

    def put_back() -> None:
        for name in ("train_dataloader", "batch_size"):
            own.pop(name, None)
        own.update(before)
        trainer.reload_dataloaders_every_n_epochs = every

    data.train_dataloader = train_dataloader
    trainer.reload_dataloaders_every_n_epochs = 1
    return put_back


def length(trainer: Trainer) -> tuple[float, float]:
    """Epochs and optimizer steps that a training has at most, `inf` where that is not known.

    Epochs have as many batches as the present one. Of several optimizers `max_steps` alone says how many steps they do.
    """
    epochs = inf if trainer.max_epochs in (None, -1) else float(trainer.max_epochs or 0)
    steps = inf if trainer.max_steps == -1 else float(trainer.max_steps)
    in_epoch = trainer.num_training_batches / trainer.accumulate_grad_batches
    if len(trainer.optimizers) != 1 or not isfinite(in_epoch) or not in_epoch:
        return epochs, steps
    steps_in_epoch = ceil(in_epoch)
    return min(epochs, ceil(steps / steps_in_epoch) if isfinite(steps) else inf), min(
        steps, epochs * steps_in_epoch
    )

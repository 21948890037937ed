"""Saving of checkpoints: at the end of every epoch, between steps, and at once when a signal asks for it."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from growlab.base.errors import Stopped, UserError
from growlab.lab.training.checkpoints import PREVIOUS, AtomicCheckpointIO
from growlab.lab.training.task import Task

# Wishes of a rank between two steps, the stronger one the larger number.
_SAVE, _STOP = 1, 2
_FORBIDDEN = {"SIGKILL", "SIGSTOP", "SIGINT"}


@dataclass(frozen=True)
class SavePolicy:
    """Moments besides the ends of epochs at which a run saves itself.

    Attributes:
        every_n_steps: after every so many optimizer steps; None: never.
        every_minutes: when the last checkpoint is so old; None: never.
        signals: names of the signals after which a run saves itself and ends; Ctrl-C always does.

    Raises:
        UserError: a value is impossible.
    """

    every_n_steps: int | None = None
    every_minutes: float | None = None
    signals: Sequence[str] = ("SIGTERM",)

    def __post_init__(self) -> None:
        if self.every_n_steps is not None and self.every_n_steps < 1:
            raise UserError(f"checkpoint.every_n_steps={self.every_n_steps} must be at least 1, or null.")
        if self.every_minutes is not None and not self.every_minutes > 0:
            raise UserError(f"checkpoint.every_minutes={self.every_minutes} must be positive, or null.")
        for name in self.signals:
            if name not in signal.Signals.__members__ or name in _FORBIDDEN:
                raise UserError(
                    f"checkpoint.signals: {name} is no signal that a run can wait for; give names such as SIGTERM "
                    "and SIGUSR1."
                )


class SaveCheckpoints(Checkpoint):
    """Keeps the newest state of a run in one file, and the one before it in another.

    Between steps means between optimizer steps: gradients that are being accumulated are not part of a
    checkpoint. After the last step of an epoch its end is waited for, which follows at once but for validation;
    a signal during validation saves a checkpoint that resumes with the whole of it.

    Lightning runs callbacks of this kind after all others. Its own `ModelCheckpoint(save_top_k=0,
    save_last=True)` saves nothing before training ends, and its handlers of signals save nothing at all or, under
    SLURM, into another file; they are replaced while training runs.

    Args:
        path: the file.
        writer: what writes it.
        policy: when.
        resumed: the file that the run resumes from.
    """

    def __init__(
        self,
        path: Path,
        writer: AtomicCheckpointIO,
        policy: SavePolicy | None = None,
        resumed: Path | None = None,
    ) -> None:
        self._path, self._writer, self._policy = path, writer, policy or SavePolicy()
        self._resumed = resumed
        self._saved_at, self._speaks = 0.0, False
        self._received: int | None = None
        self._handlers: dict[int, Any] = {}

    # Hooks ---------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen to signals, in place of Lightning."""
        if trainer.is_global_zero and self._resumed == self._path.with_name(PREVIOUS):
            # Over the newest one, which was damaged: else the next one saved would push out the only good one.
            os.replace(self._resumed, self._path)
        self._saved_at, self._speaks = time.monotonic(), trainer.is_global_zero
        if threading.current_thread() is threading.main_thread():
            for name in ("SIGINT", *self._policy.signals):
                number = signal.Signals[name]
                self._handlers.setdefault(number, signal.signal(number, self._note))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Task, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if it is time to, between two optimizer steps of an epoch."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches or batch_idx + 1 == trainer.num_training_batches:
            return
        every = self._policy.every_n_steps
        wish = self._agreed(trainer)
        if wish or (every and trainer.global_step % every == 0):
            self._save_inside(trainer, pl_module)
        if wish == _STOP:
            self._end(trainer)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: Task, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Do not let a signal wait for the end of the validation."""
        if self._agreed(trainer) == _STOP:
            self._save_inside(trainer, pl_module)
            self._end(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save, on every rank at once."""
        self._save(trainer)
        if self._agreed(trainer) == _STOP:
            self._end(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Signals are again whose they were."""
        self._restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Signals are again whose they were."""
        self._restore()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Write a validation that has begun down as one that begins.

        Lightning's loops continue an evaluation that was interrupted, but its loaders are not asked where they
        were. This is the one place that knows how Lightning names its counters.
        """
        if trainer.validating:
            counts = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
            progress = checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]
            progress.update(total=dict(counts), current=dict(counts), is_last_batch=False)

    # ---------------------------------------------------------------------------------------------------

    def _save_inside(self, trainer: Trainer, task: Task) -> None:
        """Save inside an epoch; its end has checked already what is saved."""
        task.check_loss()
        task.check_weights()
        self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        trainer.save_checkpoint(self._path)
        self._saved_at = time.monotonic()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._received is not None:
            raise KeyboardInterrupt
        self._received = number
        if number == signal.SIGINT and self._speaks:
            # `print` must not be used in a handler: it may interrupt another one.
            with contextlib.suppress(OSError):
                os.write(2, b"stopping after this step; Ctrl-C again stops at once\n")

    def _agreed(self, trainer: Trainer) -> int:
        """The strongest wish of any rank: `_STOP` after a signal, `_SAVE` after so many minutes, or 0.

        A signal may reach one rank only and clocks differ, but ranks save and end together.
        """
        minutes = self._policy.every_minutes
        wish = 0
        if self._received is not None:
            wish = _STOP
        elif minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes:
            wish = _SAVE
        if trainer.world_size == 1:
            return wish
        wishes = torch.tensor(float(wish), device=trainer.strategy.root_device)
        return int(trainer.strategy.reduce(wishes, reduce_op="max"))

    def _end(self, trainer: Trainer) -> None:
        # Ranks without a signal stop with those that got one.
        number = signal.SIGTERM if self._received is None else self._received
        if self._writer.failure is not None:
            raise UserError(f"{signal.Signals(number).name} ends the run, but {self._writer.failure}")
        raise Stopped(number, f"saved after step {trainer.global_step}")

    def _restore(self) -> None:
        while self._handlers:
            signal.signal(*self._handlers.popitem())

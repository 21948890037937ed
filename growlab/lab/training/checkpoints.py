"""Atomic checkpoints: when to save them, and how to read them."""

import contextlib
import logging
import os
import pickle
import signal
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Annotated, Any, Literal

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from pydantic import Field
from torch.optim import Optimizer

from growlab.base.errors import Stopped, UserError, WriteError
from growlab.base.files import CHECKPOINT_FOLDER, write_atomically
from growlab.grower import Grower
from growlab.inspect.hub import read_saved, weights_in
from growlab.lab.analysis.identity import differences
from growlab.optim import load_named_state

log = logging.getLogger(__name__)

LAST, PREVIOUS = "last.ckpt", "previous.ckpt"
# Key of growlab's part of a checkpoint.
HEADER = "growlab"
# Key that is true if a callback has ended the run.
STOPPED = "growlab_stopped"
# Requests of a rank between two steps; the larger number takes precedence.
_SAVE, _STOP = 1, 2
# Key of `growlab.optim.named_state`, next to "state_dict" in a file for `start_from`.
OPTIMIZER = "optimizer"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints atomically and keeps the previous one, so that neither a kill nor a full disk loses both.

    If a checkpoint cannot be written, training continues with a warning: there may be room for the next one.
    """

    failure: str | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write the checkpoint; Lightning calls this only on the first rank."""
        path = Path(path)
        self.failure = None
        try:
            save(path, checkpoint, path.with_name(PREVIOUS))
        except WriteError as error:
            self.failure = str(error)
            print(f"warning: no checkpoint at step {checkpoint['global_step']}: {error}", file=sys.stderr)


def save(path: str | os.PathLike[str], content: Any, previous: Path | None = None) -> None:
    """`torch.save`, atomically: the file is unchanged after a WriteError. The old file is moved to `previous`."""

    def write(file: IO[bytes]) -> None:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            # torch's zip writer hides the file's error, such as a full disk, or Ctrl-C.
            if isinstance(error.__context__, OSError | KeyboardInterrupt):
                raise error.__context__ from error
            raise

    write_atomically(path, write, previous)


def last_checkpoint(run_dir: Path) -> Path:
    """Path of a run's newest checkpoint."""
    return run_dir / CHECKPOINT_FOLDER / LAST


def usable_checkpoint(run_dir: Path) -> tuple[Path | None, str | None]:
    """Find the newest intact checkpoint of a run, or None; also return a warning, or None.

    Leaves the files as they are, since all ranks read at the same time.
    """
    last = last_checkpoint(run_dir)
    previous = last.with_name(PREVIOUS)
    reasons = {path: damage(path) for path in (last, previous) if path.is_file()}
    if not reasons:
        return None, f"no checkpoint in {run_dir} yet: starting from the beginning"
    if reasons.get(last, "missing") is None:
        return last, None
    if reasons.get(previous, "missing") is not None:
        damages = "; ".join(f"{path}: {reason}" for path, reason in reasons.items())
        raise UserError(f"no checkpoint can be read ({damages}); start again without ckpt_path.")
    reason = reasons.get(last)
    return previous, reason and f"{last} is damaged ({reason}): resuming from the checkpoint before it"


def damage(path: Path) -> str | None:
    """Read a checkpoint's whole file and describe damage; None if it is intact.

    torch stores a checksum for every tensor, but does not verify it when loading.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except PermissionError as error:
        raise UserError(f"cannot read {path}: {error.strerror}.") from error
    # A wrong byte anywhere in the file raises one of these.
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError) as error:
        return str(error)
    return None if broken is None else f"{broken} does not match its checksum"


def read_header(path: Path) -> dict[str, Any]:
    """Read a checkpoint's header; its tensors are checked but not loaded."""
    if not path.is_file():
        raise UserError(f"ckpt_path={path} is not a file; give a checkpoint's path or ckpt_path=last.")
    reason = damage(path)
    try:
        if reason is not None:
            raise ValueError(reason)
        checkpoint = torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        # torch's message would advise loading the objects, which may run code.
        raise UserError(
            f"ckpt_path={path} contains objects other than tensors, numbers and text, which growlab does not load, "
            "since they could run code; give a checkpoint that growlab has written."
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise UserError(f"ckpt_path={path} is not a checkpoint that growlab can read ({error}).") from error
    header = checkpoint.get(HEADER) if isinstance(checkpoint, dict) else None
    if header is None:
        raise UserError(
            f"ckpt_path={path} is not a checkpoint of a growlab run; give a run's {CHECKPOINT_FOLDER}/{LAST} or "
            "ckpt_path=last."
        )
    return header


def shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor, for `differences`."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@dataclass(frozen=True)
class SavePolicy:
    """Settings for checkpoints besides those at the ends of epochs.

    Attributes:
        every_n_steps: save after this many optimizer steps; None: never.
        every_minutes: save when the last checkpoint is this old; None: never.
        signals: names of the signals (besides Ctrl-C) after which a run saves and ends.
    """

    every_n_steps: Annotated[int, Field(ge=1)] | None = None
    every_minutes: Annotated[float, Field(gt=0)] | None = None
    signals: Sequence[Literal["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT"]] = ("SIGTERM",)


class SaveCheckpoints(Checkpoint):
    """Saves a run's state, and keeps the previous one in another file.

    Within an epoch, checkpoints are saved between optimizer steps, since they do not contain accumulated gradients;
    after the epoch's last step, saving waits for its end. A signal during validation saves a checkpoint that repeats
    the whole validation when resumed.

    A callback of its own, since Lightning's `ModelCheckpoint(save_top_k=0, save_last=True)` saves nothing before
    training ends. Lightning's signal handlers, which save nothing or, under SLURM, into another file, are replaced
    during training. Lightning runs checkpoint callbacks after all others.
    """

    def __init__(
        self, path: Path, writer: AtomicCheckpointIO, policy: SavePolicy | None = None, resumed: Path | None = None
    ) -> None:
        self._path, self._writer, self._policy = path, writer, policy or SavePolicy()
        self._resumed, self._stopped = resumed, False
        self._saved_at, self._speaks = 0.0, False
        self._received: int | None = None
        self._handlers: dict[int, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install signal handlers in place of Lightning's."""
        if trainer.is_global_zero and self._resumed == self._path.with_name(PREVIOUS):
            # Replaces the damaged newest one, which would otherwise replace the only good one at the next save.
            os.replace(self._resumed, self._path)
        trainer.should_stop = trainer.should_stop or self._stopped
        self._saved_at, self._speaks = time.monotonic(), trainer.is_global_zero
        if threading.current_thread() is threading.main_thread():
            for name in ("SIGINT", *self._policy.signals):
                number = signal.Signals[name]
                self._handlers.setdefault(number, signal.signal(number, self._note))

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save if it is due, between two optimizer steps of an epoch."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches or batch_idx + 1 == trainer.num_training_batches:
            return
        every = self._policy.every_n_steps
        request = self._agreed_request(trainer)
        if request or (every and trainer.global_step % every == 0):
            self._save_inside(trainer, pl_module)
        if request == _STOP:
            self._end(trainer)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Save on a signal without waiting for the end of validation."""
        if self._agreed_request(trainer) == _STOP:
            self._save_inside(trainer, pl_module)
            self._end(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save; a collective operation."""
        self._save(trainer)
        if self._agreed_request(trainer) == _STOP:
            self._end(trainer)

    def on_train_end(self, *_: Any) -> None:
        """Restore the signal handlers."""
        while self._handlers:
            signal.signal(*self._handlers.popitem())

    on_exception = on_train_end  # type: ignore[assignment]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Record whether a callback has ended the run, and mark a running validation as not started.

        Lightning's loops would continue an interrupted evaluation without restoring the position of its loaders. Only
        this function depends on Lightning's names of these counters.
        """
        checkpoint[STOPPED] = trainer.should_stop
        if trainer.validating:
            counts = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
            progress = checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]
            progress.update(total=dict(counts), current=dict(counts), is_last_batch=False)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Do not continue a run that a callback has ended."""
        self._stopped = checkpoint.get(STOPPED, False)

    def _save_inside(self, trainer: Trainer, task: Any) -> None:
        """Save within an epoch, after the checks that otherwise run at its end."""
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
            # `print` is not reentrant: the handler may interrupt another one.
            with contextlib.suppress(OSError):
                os.write(2, b"stopping after this step; Ctrl-C again stops at once\n")

    def _agreed_request(self, trainer: Trainer) -> int:
        """Highest request of any rank: `_STOP` after a signal, `_SAVE` when one is due, or 0.

        A signal may reach one rank only, and clocks differ, but all ranks save and end together.
        """
        minutes = self._policy.every_minutes
        request = 0
        if self._received is not None:
            request = _STOP
        elif minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes:
            request = _SAVE
        if trainer.world_size == 1:
            return request
        requests = torch.tensor(float(request), device=trainer.strategy.root_device)
        return int(trainer.strategy.reduce(requests, reduce_op="max"))

    def _end(self, trainer: Trainer) -> None:
        # Ranks that received no signal stop with the others.
        number = signal.SIGTERM if self._received is None else self._received
        if self._writer.failure is not None:
            raise UserError(f"{signal.Signals(number).name} ends the run, but {self._writer.failure}")
        raise Stopped(number, f"saved after step {trainer.global_step}")


def start_from(grower: Grower, path: str, make_optimizer: Callable[[Any], Optimizer]) -> Any:
    """Load a file's weights into the first stage's network and its averages; return a function for the optimizer.

    It makes the optimizer with the state in the file, if there is one for its class, as from `growlab.lab.planner`.
    """
    what = f"start_from={path}"
    content = read_saved(path, what)
    state = weights_in(content, what)
    for network in (grower.network, *grower.copies().values()):
        if other := differences(shapes(state), shapes(network.state_dict()), "the shape of "):
            raise UserError(f"{what} is of another network than the first stage's: {other[0]}.")
        network.load_state_dict(state)
    saved = content.get(OPTIMIZER) if isinstance(content, Mapping) else None
    # Other programs' files may have an "optimizer" with parameters by number instead of name.
    if not isinstance(saved, Mapping) or not {"class", "state"} <= saved.keys():
        return make_optimizer

    def make_and_load(parameters: Any) -> Optimizer:
        optimizer = make_optimizer(parameters)
        try:
            load_named_state(optimizer, grower.network, saved)
        except ValueError as error:
            log.warning("the optimizer's state of %s is left aside: %s", what, error)
        return optimizer

    return make_and_load

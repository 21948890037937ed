"""Faults to install in a run's process before the run begins."""

import json
import os
import pkgutil
import resource
import shutil
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from growlab.base.errors import UserError
from tests.rank_faults import FAULTS, after_step, fault

FAULT_ON_RANK, FAULTS_OF_ATTEMPTS = "FAULT_ON_RANK", "FAULTS_OF_ATTEMPTS"


def _strike(number: int) -> None:
    os.kill(os.getpid(), number)


@fault
def at_step(step: int, number: int) -> None:
    """Send a signal after an optimizer step."""
    after_step(step, lambda trainer, task: _strike(number))


@fault
def at_validation(epoch: int, batch: int, number: int) -> None:
    """Send a signal after a validation batch of an epoch."""
    from growlab.lab.training import Task

    original = Task.validation_step

    def validation_step(self: Any, entry: Any, batch_index: int) -> None:
        original(self, entry, batch_index)
        if (self.current_epoch, batch_index) == (epoch, batch):
            _strike(number)

    Task.validation_step = validation_step


@fault
def before_growth(stage: int, number: int) -> None:
    """Send a signal after the last step before a stage, ahead of its growth event."""
    from growlab.grower import Grower

    grow_once = Grower._grow_once

    def struck(grower: Any, *rest: Any) -> Any:
        if grower.state.stage + 1 == stage:
            _strike(number)
        return grow_once(grower, *rest)

    Grower._grow_once = struck


@fault
def in_growth(stage: int, number: int) -> None:
    """Send a signal inside a growth event, between the network and the optimizer."""
    from growlab.grower import Grower
    from growlab.optim import followers

    follow, grow_once, stages = followers.follow_once, Grower._grow_once, []

    def noted(grower: Any, *rest: Any) -> Any:
        stages.append(grower.state.stage + 1)
        return grow_once(grower, *rest)

    def struck(*arguments: Any, **named: Any) -> None:
        if stages[-1] == stage:
            _strike(number)
        follow(*arguments, **named)

    Grower._grow_once, followers.follow_once = noted, struck


# Moments in `growlab.base.files.write_atomically`; "unnamed" and "named" occur twice for a checkpoint, since the
# previous file is renamed first.
WRITE_MOMENTS = ("opened", "half", "unsynchronised", "unnamed", "named", "folder")


@fault
def at_write(count: int, moment: str, number: int) -> None:
    """Send a signal at a moment of the n-th file written (`count`)."""
    opened, replace, fsync = tempfile.NamedTemporaryFile, os.replace, os.fsync
    written = 0

    def due(now: str) -> None:
        if (written, now) == (count, moment):
            _strike(number)

    def open_file(*arguments: Any, **named: Any) -> Any:
        nonlocal written
        file = opened(*arguments, **named)
        if str(named.get("suffix")) == ".unfinished":
            written += 1
            due("opened")
            write = file.write

            def half(content: Any) -> int:
                if (written, "half") == (count, moment):
                    write(memoryview(content)[: len(content) // 2])
                    file.flush()
                    _strike(number)
                return write(content)

            file.write = half
        return file

    def synchronise(descriptor: int) -> None:
        due("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "unsynchronised")
        fsync(descriptor)

    def rename(source: Any, target: Any) -> None:
        due("unnamed")
        replace(source, target)
        due("named")

    tempfile.NamedTemporaryFile, os.replace, os.fsync = open_file, rename, synchronise


@fault
def after(seconds: float, number: int) -> None:
    """Send a signal after a number of seconds, also inside of torch."""
    threading.Timer(seconds, _strike, [number]).start()


@fault
def at_checkpoint(count: int, moment: str, number: int) -> None:
    """Send a signal before or after the n-th checkpoint (`count`) is renamed to its final name."""
    replace, seen = os.replace, []

    def struck(source: Any, target: Any) -> None:
        seen.extend([target] * (Path(target).name == "last.ckpt"))
        if len(seen) == count and moment == "before":
            _strike(number)
        replace(source, target)
        if len(seen) == count:
            _strike(number)

    os.replace = struck


@fault
def keep_checkpoints(folder: str) -> None:
    """Not a fault: keep a copy of every checkpoint, named by its step."""
    from growlab.lab.training.checkpoints import AtomicCheckpointIO

    save = AtomicCheckpointIO.save_checkpoint

    def save_and_keep(self: Any, checkpoint: dict[str, Any], path: Any, *rest: Any, **more: Any) -> None:
        save(self, checkpoint, path, *rest, **more)
        shutil.copy(path, Path(folder) / f"{checkpoint['global_step']}.ckpt")

    AtomicCheckpointIO.save_checkpoint = save_and_keep


@fault
def full_disk(epoch: int, limit: int) -> None:
    """Limit the size of files, in bytes, from an epoch on."""
    from growlab.lab.training import GrowthProgress

    def on_train_epoch_start(self: Any, trainer: Any, task: Any) -> None:
        if trainer.current_epoch == epoch:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    GrowthProgress.on_train_epoch_start = on_train_epoch_start


@fault
def loss_is_nan(step: int) -> None:
    from growlab.lab.training import Task

    original = Task._watch

    def watch(self: Any, loss: Any, batch_index: int) -> None:
        original(self, loss * float("nan") if self.global_step == step else loss, batch_index)

    Task._watch = watch


@fault
def weights_are_nan(step: int) -> None:
    """Set gradients of one step to NaN while its loss stays finite."""
    from growlab.frontends.lightning import Growth

    def on_before_optimizer_step(self: Any, trainer: Any, task: Any, optimizer: Any) -> None:
        if trainer.global_step == step:
            next(task.network.parameters()).grad.fill_(float("nan"))

    Growth.on_before_optimizer_step = on_before_optimizer_step


# Phases of a run and a function that each calls.
PHASES = {
    "read": "growlab.lab.data.loaders.ImageBatches.read_batch",
    "trace": "growlab.grower.network.trace",
    "step": "growlab.lab.training.task.Task.training_step",
    "event": "growlab.grower.grower.grow",
    "checkpoint": "growlab.lab.training.checkpoints.AtomicCheckpointIO.save_checkpoint",
    "validation": "growlab.lab.training.task.Task.validation_step",
    "test": "growlab.lab.training.task.Task.test_step",
    "loggers": "growlab.grower.grower.finish",
}


@fault
def fails(phase: str, call: int, sentence: str | None) -> None:
    """Raise in the n-th call of a phase's function, and write the time to the file `failed`.

    Args:
        phase: one of `PHASES`.
        call: number of the call, from 1, in each process.
        sentence: message of the `UserError`; None for a bug.
    """
    owner_name, _, name = PHASES[phase].rpartition(".")
    owner = pkgutil.resolve_name(owner_name)
    original, calls = getattr(owner, name), 0

    def failing(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < call:
            return original(*arguments, **named)
        Path("failed").write_text(str(time.time()))
        raise RuntimeError("our own mistake") if sentence is None else UserError(sentence)

    setattr(owner, name, failing)


@fault
def with_figures() -> None:
    """Not a fault: write the report and figures, which other tests skip."""
    from growlab.lab.analysis.report import write_run_report
    from growlab.lab.training import run as experiment

    experiment.write_run_report = write_run_report


@fault
def together(*faults: Sequence[Any]) -> None:
    """Install several faults."""
    for name, *rest in faults:
        FAULTS[name](*rest)


@fault
def on_rank(rank: int, *fault: Any) -> None:
    """Install a fault on one rank."""
    os.environ[FAULT_ON_RANK] = json.dumps([rank, *fault])


@fault
def attempts(*faults: Sequence[Any]) -> None:
    """Install a (rank, fault...) for each attempt of a run that restarts its processes."""
    os.environ[FAULTS_OF_ATTEMPTS] = json.dumps(faults)

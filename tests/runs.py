"""Real runs of the command line, each in a process of its own that has everything imported already.

Starting Python, torch and Lightning takes longer than a small run. So one process imports them once and forks
for every run: exit codes, signals, what is printed and what is left behind are those of a real process.
"""

import atexit
import contextlib
import csv
import gc
import json
import os
import pkgutil
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from torch import nn
from torch.distributed.elastic.multiprocessing import api as elastic

from growlab.errors import UserError
from tests.rank_faults import RANK_FAULTS

ROOT = Path(__file__).resolve().parent.parent

# 18 steps in 6 epochs and 3 stages, with everything that has a state: momentum, batch sizes that change,
# augmentation, validation, regions, statistics.
SMALL = (
    *("data.limit_train=96", "data.limit_test=40", "data.batch_size=32", "data.validation=split"),
    *("schedule.epochs=[2,2,2]", "schedule.widths=[0.5,0.75,1]", "log_rates_every_n_steps=2"),
)
MLP = (*SMALL, "model=mlp8", "model.width=12", "model.batch_norm=true")
NUM_STEPS = 18


def dropout_mlp(image_shape: Sequence[int], num_classes: int) -> nn.Module:
    """A network whose steps draw random numbers."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(torch.Size(image_shape).numel(), 12),
        nn.BatchNorm1d(12),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(12, num_classes),
    )


def plain_mlp(image_shape: Sequence[int], num_classes: int, batch_norm: bool = False) -> nn.Module:
    """Two hidden layers of eight."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs in (torch.Size(image_shape).numel(), 8):
        layers += [nn.Linear(inputs, 8), *([nn.BatchNorm1d(8)] if batch_norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(8, num_classes))


def spatial(image_shape: Sequence[int], num_classes: int) -> nn.Module:
    """A network that somebody forgot to pool: [batch, classes, height, width]."""
    return nn.Sequential(nn.Conv2d(image_shape[0], 8, 3), nn.ReLU(), nn.Conv2d(8, num_classes, 1))


def narrow_head(image_shape: Sequence[int], num_classes: int) -> nn.Module:
    """A network with five outputs, whatever the number of classes."""
    return plain_mlp(image_shape, 5)


class HungryMlp(nn.Sequential):
    """A network that trains on a device of little memory: so many images times channels, in $HUNGRY by rank."""

    def __init__(self, image_shape: Sequence[int], num_classes: int) -> None:
        inputs = torch.Size(image_shape).numel()
        layers = (nn.Linear(inputs, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, num_classes))
        super().__init__(nn.Flatten(), *layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        most = os.environ.get("HUNGRY", "1000000").split(",")[int(os.environ.get("RANK", "0"))]
        if torch.is_grad_enabled() and self.training and len(x) * self[1].out_features > int(most):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate too much.")
        return super().forward(x)


_AS_RUN = "hydra.mode=RUN"
# A variable in a run's environment: the command is `growlab.plan`.
PLAN = "GROWLAB_TEST_PLAN"


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its exit code (-9 after SIGKILL) and what it printed."""

    code: int
    out: str
    err: str


class CommandLine:
    """`python -m growlab ARGUMENTS`, many times over.

    Args:
        fairseq_modules: imported once too.
    """

    def __init__(self, *fairseq_modules: str) -> None:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        environment.pop("HYDRA_FULL_ERROR", None)
        command = [sys.executable, "-m", "tests.runs", *fairseq_modules]
        self._server = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(
        self,
        *arguments: object,
        cwd: Path,
        fault: tuple[Any, ...] | None = None,
        environment: dict[str, str] | None = None,
    ) -> Outcome:
        """Run and wait.

        Args:
            arguments: overrides and options.
            cwd: the folder that it is called from.
            fault: name in `FAULTS` and its arguments, put in place before the run begins.
            environment: variables added to this process's.
        """
        with tempfile.TemporaryDirectory() as folder:
            order = {
                "arguments": [str(a) for a in arguments],
                "cwd": str(cwd),
                "fault": fault,
                "environment": environment or {},
                "files": folder,
            }
            print(json.dumps(order), file=self._server.stdin, flush=True)
            answer = self._server.stdout.readline()
            assert answer, "the process that forks the runs has died"
            code, left = json.loads(answer)
            outcome = Outcome(code, *((Path(folder) / name).read_text() for name in ("stdout", "stderr")))
            # Whatever happens to a run.
            assert not left, f"left behind: {left}\n{outcome.err}"
            return outcome

    def close(self) -> None:
        """End the process that forks."""
        self._server.stdin.close()
        self._server.wait(timeout=30)
        self._server.stdout.close()


# What a run leaves behind --------------------------------------------------------------------------------

# Measured times, and memory of the process, differ from run to run; everything else must not.
_TIMES = {"seconds", "samples_per_sec", "seconds_by_part", "peak_memory_bytes"}


def table(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file, measured times left out."""
    with path.open() as file:
        return [{k: v for k, v in row.items() if k not in _TIMES} for row in csv.DictReader(file)]


def without_times(content: Any) -> Any:
    """Nested dicts and lists, measured times left out."""
    if isinstance(content, dict):
        return {key: without_times(value) for key, value in content.items() if key not in _TIMES}
    return [without_times(value) for value in content] if isinstance(content, list | tuple) else content


def same(one: Any, other: Any) -> bool:
    """Whether nested containers of tensors and numbers are equal bit for bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return isinstance(other, list | tuple) and len(one) == len(other) and all(map(same, one, other))
    return one == other


@dataclass(frozen=True)
class Left:
    """What a finished run has left in its folder, as far as it must be the same every time."""

    metrics: list[dict[str, str]]
    rates: list[dict[str, str]]
    growth: dict[str, Any]
    results: dict[str, Any]
    weights: dict[str, torch.Tensor]
    checkpoint: dict[str, Any]

    @classmethod
    def by(cls, folder: Path) -> "Left":
        """Read it."""
        results = json.loads((folder / "results.json").read_text())
        checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
        rates = folder / "rates.csv"
        return cls(
            table(folder / "metrics.csv"),
            table(rates) if rates.exists() else [],
            without_times(json.loads((folder / "growth.json").read_text())),
            without_times(
                {k: v for k, v in results.items() if k not in ("overrides", "command", "git_commit")}
            ),
            torch.load(folder / "model.pt", weights_only=True),
            {
                key: checkpoint[key]
                for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step")
            },
        )

    def differences(self, other: "Left") -> list[str]:
        """Names of the parts that are not equal bit for bit."""
        return [name for name in vars(self) if not same(getattr(self, name), getattr(other, name))]


def kept_run(cli: CommandLine, folder: Path, arguments: Sequence[str]) -> tuple[Left, dict[int, Path]]:
    """What an undisturbed run leaves in FOLDER/whole, and all of its checkpoints by their step."""
    kept = folder / "kept"
    kept.mkdir()
    outcome = cli(*arguments, "hydra.run.dir=whole", cwd=folder, fault=("keep_checkpoints", str(kept)))
    assert outcome.code == 0, outcome.err
    return Left.by(folder / "whole"), {int(path.stem): path for path in kept.iterdir()}


def resumed_from(cli: CommandLine, folder: Path, arguments: Sequence[str], checkpoint: Path) -> Outcome:
    """The run that goes on from a checkpoint, in FOLDER/run: that of a process killed before it wrote another."""
    last = folder / "run" / "checkpoints" / "last.ckpt"
    last.parent.mkdir(parents=True)
    shutil.copy(checkpoint, last)
    return cli(*arguments, "hydra.run.dir=run", "ckpt_path=last", cwd=folder)


# Faults: what may happen to a run -----------------------------------------------------------------------


def _strike(number: int) -> None:
    os.kill(os.getpid(), number)


def _at_step(step: int, number: int) -> None:
    """A signal after so many optimizer steps."""
    from growlab.training import GrowthCallback

    def on_train_batch_end(self: Any, trainer: Any, *rest: Any) -> None:
        if trainer.global_step == step:
            _strike(number)

    GrowthCallback.on_train_batch_end = on_train_batch_end


def _at_validation(epoch: int, batch: int, number: int) -> None:
    """A signal in the validation of an epoch."""
    from growlab.training import Task

    original = Task.validation_step

    def validation_step(self: Any, entry: Any, batch_index: int) -> None:
        original(self, entry, batch_index)
        if (self.current_epoch, batch_index) == (epoch, batch):
            _strike(number)

    Task.validation_step = validation_step


def _before_growth(stage: int, number: int) -> None:
    """A signal between the last step of a stage and the growth event that begins the given one."""
    from growlab.grower import grower

    carry_out = grower.carry_out

    def struck(run: Any, *rest: Any) -> Any:
        if run.state.stage + 1 == stage:
            _strike(number)
        return carry_out(run, *rest)

    grower.carry_out = struck


def _in_growth(stage: int, number: int) -> None:
    """A signal in the middle of an event: the network has grown, the optimizer has not followed."""
    from growlab.grower import grower
    from growlab.optim import followers

    follow, carry_out, stages = followers.follow, grower.carry_out, []

    def noted(run: Any, *rest: Any) -> Any:
        stages.append(run.state.stage + 1)
        return carry_out(run, *rest)

    def struck(*arguments: Any, **named: Any) -> None:
        if stages[-1] == stage:
            _strike(number)
        follow(*arguments, **named)

    grower.carry_out, followers.follow = noted, struck


# The moments of a file's way to the disk, see `growlab.files.write_atomically`; a checkpoint has the ones in the
# middle twice: the file before it is renamed first.
WRITE_MOMENTS = ("opened", "half", "unsynchronised", "unnamed", "named", "folder")


def _at_write(count: int, moment: str, number: int) -> None:
    """A signal at a moment of the n-th file that is written."""
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


def _after(seconds: float, number: int) -> None:
    """A signal at any moment whatever, inside torch too."""
    threading.Timer(seconds, _strike, [number]).start()


def _at_checkpoint(count: int, moment: str, number: int) -> None:
    """A signal before or after the n-th checkpoint takes its place."""
    replace, seen = os.replace, []

    def struck(source: Any, target: Any) -> None:
        seen.extend([target] * (Path(target).name == "last.ckpt"))
        if len(seen) == count and moment == "before":
            _strike(number)
        replace(source, target)
        if len(seen) == count:
            _strike(number)

    os.replace = struck


def _keep_checkpoints(folder: str) -> None:
    """No fault: every checkpoint is kept, by its step."""
    from growlab.training.checkpoints import AtomicCheckpointIO

    save = AtomicCheckpointIO.save_checkpoint

    def save_and_keep(self: Any, checkpoint: dict[str, Any], path: Any, *rest: Any, **more: Any) -> None:
        save(self, checkpoint, path, *rest, **more)
        shutil.copy(path, Path(folder) / f"{checkpoint['global_step']}.ckpt")

    AtomicCheckpointIO.save_checkpoint = save_and_keep


def _full_disk(epoch: int, limit: int) -> None:
    """From an epoch on no file may become larger than so many bytes."""
    from growlab.training import GrowthProgress

    def on_train_epoch_start(self: Any, trainer: Any, task: Any) -> None:
        if trainer.current_epoch == epoch:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    GrowthProgress.on_train_epoch_start = on_train_epoch_start


def _loss_is_nan(step: int) -> None:
    from growlab.training import Task

    original = Task._watch

    def watch(self: Any, loss: Any, batch_index: int) -> None:
        original(self, loss * float("nan") if self.global_step == step else loss, batch_index)

    Task._watch = watch


def _weights_are_nan(step: int) -> None:
    """The gradient of one step is not finite, though its loss is."""
    from growlab.training import GrowthCallback

    def on_before_optimizer_step(self: Any, trainer: Any, task: Any, optimizer: Any) -> None:
        if trainer.global_step == step:
            next(task.network.parameters()).grad.fill_(float("nan"))

    GrowthCallback.on_before_optimizer_step = on_before_optimizer_step


# Phases of a run, each with the function that is called in it.
PHASES = {
    "read": "growlab.data.readers.ImageBatches._read",
    "trace": "growlab.grower.preparing.trace",
    "step": "growlab.training.task.Task.training_step",
    "event": "growlab.grower.events.grow",
    "checkpoint": "growlab.training.checkpoints.AtomicCheckpointIO.save_checkpoint",
    "validation": "growlab.training.task.Task.validation_step",
    "test": "growlab.training.task.Task.test_step",
    "loggers": "growlab.grower.grower.finish",
}


def _fails(phase: str, call: int, sentence: str | None) -> None:
    """The n-th call of a phase's function raises, and the time is left in a file `failed`.

    Args:
        phase: one of `PHASES`.
        call: counted from 1, in each process.
        sentence: of a `UserError`; None: a mistake of our own.
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


def _no_wandb() -> None:
    import lightning.pytorch.loggers.wandb as module
    from lightning_utilities.core.imports import RequirementCache

    module._WANDB_AVAILABLE = RequirementCache("wandb>=9999")


def _with_figures() -> None:
    """No fault: the figures that other tests do without."""
    from growlab import experiment
    from growlab.analysis.report import write_run_report

    experiment.write_run_report = write_run_report


def _together(*faults: Sequence[Any]) -> None:
    """Several of these at once."""
    for name, *rest in faults:
        FAULTS[name](*rest)


def _on_rank(rank: int, *fault: Any) -> None:
    """Another fault, in one of several processes."""
    os.environ[_FAULT_ON_RANK] = json.dumps([rank, *fault])


def _attempts(*faults: Sequence[Any]) -> None:
    """A rank and a fault for each attempt that a run's processes make."""
    os.environ[_FAULTS_OF_ATTEMPTS] = json.dumps(faults)


_FAULT_ON_RANK, _FAULTS_OF_ATTEMPTS = "FAULT_ON_RANK", "FAULTS_OF_ATTEMPTS"
FAULTS: dict[str, Callable[..., None]] = {
    "at_step": _at_step,
    "at_validation": _at_validation,
    "before_growth": _before_growth,
    "in_growth": _in_growth,
    "at_write": _at_write,
    "after": _after,
    "at_checkpoint": _at_checkpoint,
    "full_disk": _full_disk,
    "keep_checkpoints": _keep_checkpoints,
    "loss_is_nan": _loss_is_nan,
    "weights_are_nan": _weights_are_nan,
    "fails": _fails,
    "no_wandb": _no_wandb,
    "with_figures": _with_figures,
    "together": _together,
    "on_rank": _on_rank,
    "attempts": _attempts,
    **RANK_FAULTS,
}


# How long a run and, when it is gone, the processes that it has started may take.
_RUN_SEC, _LEFT_SEC = 120.0, 10.0


def _serve() -> None:
    """Fork for every line on standard input; answer with the exit code and what the run has left running."""
    _import_everything(sys.argv[1:])
    # What is imported stays: a run's first full collection would go through all of it, and copy its pages.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            # A session of its own tells its processes from others.
            os.setsid()
            _leave(_run(order))
        print(json.dumps([_exit_code(child), _end_session(child)]), flush=True)
    gc.unfreeze()


def _exit_code(child: int) -> int:
    """Of a run, which is killed if it has not come to an end."""
    deadline = time.monotonic() + _RUN_SEC
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.005)


def _end_session(session: int) -> list[int]:
    """Kill the processes of a session that do not end by themselves; which these are."""
    deadline = time.monotonic() + _LEFT_SEC
    while (members := _members(session)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in members:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return members


def _members(session: int) -> list[int]:
    """Processes of a session, those left out that have ended and are waited for."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, number, *_ = path.read_text().rpartition(")")[2].split()
            if int(number) == session and state not in "ZX":
                found.append(int(path.parent.name))
    return found


def _leave(code: int) -> None:
    """End this process as the interpreter does: what waits for ever at its exit shows here too."""
    with contextlib.suppress(BaseException):
        threading._shutdown()
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    os._exit(code)


def _import_everything(fairseq_modules: Sequence[str]) -> None:
    from hydra._internal.hydra import Hydra

    from growlab import experiment, launcher  # noqa: F401 - imported once for all runs
    from growlab.data import digits
    from growlab.fairseq_library import fairseq_module
    from growlab.networks import mlp8, resnet20
    from growlab.optim.native import library
    from growlab.widths import trace

    # Compiled once instead of once a run.
    library(torch.float32)
    # A second for every run; tests/analysis looks at figures.
    experiment.write_run_report = lambda run_dir: None
    # Read once. Hydra composes everything an extra time to read `hydra.mode`, which no file in conf/ gives.
    digits.load_digits = cache(digits.load_digits)
    digits.load_digits()
    Hydra.get_mode = lambda self, config_name, overrides: RunMode.RUN if _AS_RUN in overrides else None
    # What is written survives a killed process without: it is the machine that may fail.
    os.fsync = lambda descriptor: None
    for name in fairseq_modules:
        fairseq_module(name)
    # The first trace loads much of torch. Nothing here may call backward: a fork could not do so any more.
    for make, size in ((partial(mlp8, batch_norm=True), 2), (resnet20, 8)):
        trace(make([1, size, size], 2, width=2), torch.zeros(2, 1, size, size))


class _Forked:
    """What torch's elastic agent makes of a command, without the seconds that importing everything takes."""

    def __init__(
        self, args: tuple[str, ...], env: dict[str, str], stdout: str, stderr: str, **rest: Any
    ) -> None:
        self.proc, self.returncode = self, None
        self.pid = os.fork()
        if self.pid == 0:
            os.setpgid(0, 0)
            # As in a process that starts anew.
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGCONT):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for number, path in ((1, stdout), (2, stderr)):
                if path:
                    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
            os.environ.update(env)
            _leave(_main([a for a in args[2:] if a not in ("--config-name", "config")]))
        with contextlib.suppress(OSError):
            os.setpgid(self.pid, self.pid)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("growlab", timeout)
            time.sleep(0.005)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def close(self, death_sig: int) -> None:
        os.killpg(self.pid, death_sig)


def _run(order: dict[str, Any]) -> int:
    os.chdir(order["cwd"])
    os.environ.update(order["environment"])
    elastic.get_subprocess_handler = _Forked
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(
            os.open(Path(order["files"]) / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), number
        )
    if order["fault"]:
        FAULTS[order["fault"][0]](*order["fault"][1:])
    return _main(order["arguments"])


def _main(arguments: list[str]) -> int:
    """The command line in this process, which has no other purpose."""
    import traceback

    from growlab.__main__ import main
    from growlab.plan.__main__ import main as plan

    rank, *fault = json.loads(os.environ.get(_FAULT_ON_RANK, "[null]"))
    attempts = json.loads(os.environ.get(_FAULTS_OF_ATTEMPTS, "[]"))
    if (attempt := int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))) < len(attempts):
        rank, *fault = attempts[attempt]
    if fault and os.environ.get("RANK") == str(rank):
        FAULTS[fault[0]](*fault[1:])

    try:
        sys.stdin.close()
        # A process that Hydra was used in already, such as one that starts others, has an initialised Hydra.
        GlobalHydra.instance().clear()
        sys.argv = ["growlab", *arguments]
        code = plan() if os.environ.get(PLAN) else main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code or 0


if __name__ == "__main__":
    _serve()

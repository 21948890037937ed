"""A run on several devices of this machine: one process each, started, watched and ended together.

Each process is a run of the command line of its own, with the same overrides and the same folder, so a job of a sweep
is a fresh run too, and devices may differ from job to job. Processes that torchrun or SLURM have started are left
alone. If one process fails, the others are ended and one reason is given.
"""

import atexit
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from hydra.core.hydra_config import HydraConfig
from omegaconf import ListConfig

from growlab.errors import Stopped, UserError
from growlab.files import write_json

# Says that growlab has started this process, and where to leave the reason if it fails.
_REPORT = "GROWLAB_REPORT"
# File descriptor that closes when the process that started this one is gone.
_LEASH = "GROWLAB_LEASH"
# How long the others may take to end by themselves once one process has failed.
_GRACE_SEC = 5.0
_POLL_SEC = 0.05
_FORWARDED = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGCONT")
# Overrides for a process that is one of several: it is no sweep, and writes no second copy of what Hydra leaves.
_ALONE = ("hydra.mode=RUN", "hydra.output_subdir=null")
_QUIET = ("hydra.output_subdir=null", "hydra/job_logging=none")


class ProcessFailed(RuntimeError):
    """A process of the run ended with a traceback, which this carries."""

    def __repr__(self) -> str:
        return str(self).rstrip().rpartition("\n")[2]


class Process(Protocol):
    """A process that was started, such as a `subprocess.Popen`."""

    pid: int

    def poll(self) -> int | None:
        """The exit code, minus the signal's number after a signal, None while it runs."""


def started_elsewhere() -> bool:
    """Whether torchrun, SLURM or the like have started this process as one of several."""
    if _REPORT in os.environ:
        return False
    several = int(os.environ.get("SLURM_NTASKS", "1")) > 1
    return "RANK" in os.environ or "LOCAL_RANK" in os.environ or (several and "SLURM_STEP_ID" in os.environ)


def is_first() -> bool:
    """Whether this is the process that writes files and talks."""
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        if name in os.environ:
            return int(os.environ[name]) == 0
    return True


def to_start(trainer: Mapping[str, Any]) -> int:
    """How many processes have to be started for this run; 1 if this one does it.

    Args:
        trainer: the configuration's `trainer`.

    Raises:
        UserError: several machines, on which something else has to start them.
    """
    if started_elsewhere() or _REPORT in os.environ:
        return 1
    if trainer.get("num_nodes", 1) > 1:
        raise UserError(
            f"trainer.num_nodes={trainer['num_nodes']}: start growlab on every machine with torchrun, or in a "
            "SLURM job with srun."
        )
    return num_devices(trainer)


def num_devices(trainer: Mapping[str, Any]) -> int:
    """Devices that Lightning will take on this machine."""
    devices, accelerator = trainer.get("devices", "auto"), trainer.get("accelerator", "auto")
    if isinstance(devices, (list, ListConfig)):
        return max(1, len(devices))
    text = str(devices)
    if "," in text:
        return len([name for name in text.split(",") if name.strip()])
    if text.isdigit():
        return max(1, int(text))
    if accelerator in ("auto", "gpu", "cuda"):
        # Imported here: for a run on CPUs the process that only watches needs no torch.
        import torch

        return max(1, torch.cuda.device_count())
    return 1


def world_size(trainer: Mapping[str, Any]) -> int:
    """Processes of the whole run, over all machines."""
    return num_devices(trainer) * trainer.get("num_nodes", 1)


def run(number: int, run_dir: Path, more: Sequence[str] = ()) -> None:
    """Run the job that Hydra has composed in several processes and wait for them.

    Args:
        number: of processes.
        run_dir: the run's folder, for all of them.
        more: overrides beside the job's.

    Raises:
        UserError: a process met input that cannot be used, or was ended from outside.
        ProcessFailed: a process ended with a traceback.
        KeyboardInterrupt: the run was interrupted before it could save itself.
        Stopped: a signal ended the run in good order.
    """
    hydra = HydraConfig.get()
    arguments = [*_options(), *hydra.overrides.task, *more, f"hydra.run.dir={_quoted(run_dir)}", *_ALONE]
    reports = Path(tempfile.mkdtemp(prefix="growlab_"))
    leash, held = os.pipe()
    processes: list[Process] = []
    try:
        with _forwarding(processes) as received:
            port = str(_free_port())
            for rank in range(number):
                environment = {
                    **os.environ,
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    "WORLD_SIZE": str(number),
                    "NODE_RANK": "0",
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    _REPORT: str(reports / f"{rank}.json"),
                    _LEASH: str(leash),
                }
                # What torch's sockets say when a neighbour has gone is no news beside the reason.
                environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
                quiet = reports / f"{rank}.log" if rank else None
                more = ["hydra/job_logging=none"] if rank else []
                processes.append(run_as_command([*arguments, *more], environment, leash, quiet))
            codes = _wait(processes)
        _judge(codes, reports, run_dir, signal.SIGINT in received)
    finally:
        _end(processes)
        os.close(leash)
        os.close(held)
        shutil.rmtree(reports, ignore_errors=True)


def run_as_command(
    arguments: Sequence[str], environment: Mapping[str, str], leash: int, quiet: Path | None
) -> Process:
    """Start `python -m growlab` in a process group of its own.

    Args:
        arguments: options and overrides.
        environment: of the process.
        leash: the file descriptor that it inherits.
        quiet: where its output goes; None for where this one's goes.
    """
    with open(quiet or os.devnull, "wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "growlab", *arguments],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=file if quiet else None,
            stderr=file if quiet else None,
            pass_fds=(leash,),
            process_group=0,
        )


# In a process that was started ----------------------------------------------------------------------------


def follow_the_leash() -> None:
    """End this process and its children if the one that started it is gone.

    Nobody would wait for them, and the run's folder may be taken.
    """
    if _LEASH not in os.environ:
        return
    leash = int(os.environ[_LEASH])

    def watch() -> None:
        # Returns only when the last writing end is closed: nothing is ever written.
        os.read(leash, 1)
        shutil.rmtree(Path(os.environ[_REPORT]).parent, ignore_errors=True)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def report(code: int, reason: str, number: int | None = None) -> bool:
    """Leave the reason of an end to the process that started this one; False if there is none.

    Args:
        code: the exit code.
        reason: a sentence for codes 0 and 2, else a traceback.
        number: the signal that ended the run in good order.
    """
    if _REPORT not in os.environ:
        return False
    content = {"code": code, "reason": reason, "time": time.time(), "signal": number}
    write_json(os.environ[_REPORT], content)
    return True


# In the process that starts them --------------------------------------------------------------------------


def _wait(processes: Sequence[Process]) -> list[int | None]:
    """Exit codes; once one process has failed the others have a few seconds, and None if they need more."""
    ended: set[int] = set()
    deadline = None
    while any(process.poll() is None for process in processes):
        if deadline is None and any(process.poll() for process in processes):
            deadline = time.monotonic() + _GRACE_SEC
        if deadline is not None and time.monotonic() > deadline:
            ended |= _end(processes)
        time.sleep(_POLL_SEC)
    return [None if rank in ended else process.poll() for rank, process in enumerate(processes)]


def _end(processes: Sequence[Process]) -> set[int]:
    """Kill those that still run, with the processes that read data for them, and say which."""
    running = {rank for rank, process in enumerate(processes) if process.poll() is None}
    for rank in running:
        os.killpg(processes[rank].pid, signal.SIGKILL)
    return running


@contextlib.contextmanager
def _forwarding(processes: Sequence[Process]) -> Iterator[list[int]]:
    """Hand signals on to the processes, which know what to do at each; yields what came."""
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for process in processes:
            if process.poll() is None:
                os.kill(process.pid, number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for name in _FORWARDED:
            before[name] = signal.signal(getattr(signal, name), forward)
    try:
        yield received
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


def _judge(codes: Sequence[int | None], reports: Path, run_dir: Path, interrupted: bool) -> None:
    """Raise the one reason among several: what a user can mend, else what came first."""
    found = [json.loads(path.read_text()) for path in sorted(reports.glob("*.json"))]
    stopped = [one for one in found if one["signal"] is not None]
    if not any(codes):
        if stopped:
            # Ranks that got no signal of their own say SIGTERM.
            number = signal.SIGINT if interrupted else stopped[0]["signal"]
            raise Stopped(number, stopped[0]["reason"])
        return
    if interrupted:
        raise KeyboardInterrupt
    told = [one for one in found if one["code"] == 2]
    if told:
        raise UserError(told[0]["reason"])
    number = len(codes)
    # Processes that lose a neighbour fail too: one that was killed is the cause.
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            raise UserError(
                f"process {rank} of {number} was ended by {signal.Signals(-code).name} (out of memory, or from "
                f"outside), and the others with it; go on with ckpt_path=last hydra.run.dir={run_dir}."
            )
    if found:
        raise ProcessFailed(min(found, key=lambda one: one["time"])["reason"])
    rank, code = next((rank, code) for rank, code in enumerate(codes) if code)
    log = reports / f"{rank}.log"
    raise ProcessFailed(
        f"process {rank} of {number} ended with code {code}\n" + (log.read_text() if rank else "")
    )


def _options() -> list[str]:
    """Options of this command line that decide what its configuration is."""
    hydra = HydraConfig.get()
    options = ["--config-name", hydra.job.config_name]
    for source in hydra.runtime.config_sources:
        if source.provider == "command-line":
            options += ["--config-dir", source.path]
    return options


def _quoted(path: Path) -> str:
    """A path as the value of an override."""
    text = str(path).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def apart(overrides: Sequence[str], multirun: bool) -> list[str]:
    """Overrides that keep a process that is not the first from leaving folders and logs of its own.

    Args:
        overrides: those given; folders named there stay.
        multirun: whether they make a sweep.
    """
    if not started_elsewhere() or is_first():
        return []
    names: dict[str, Any] = (
        {"hydra.sweep.dir": None, "hydra.sweep.subdir": "."} if multirun else {"hydra.run.dir": None}
    )
    given = {override.partition("=")[0] for override in overrides}
    missing = [name for name in names if name not in given]
    if any(names[name] is None for name in missing):
        folder = tempfile.mkdtemp(prefix="growlab_")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    added = [f"{name}={names[name] or _quoted(Path(folder))}" for name in missing]
    return [*added, *(override for override in _QUIET if override.partition("=")[0] not in given)]

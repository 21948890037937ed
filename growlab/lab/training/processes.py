"""The processes of a run: who started this one, and how many it has to start.

Unless torchrun or SLURM has started the processes, `growlab.lab.training.launcher` starts one per device. Each is a
separate run of the command line with the same overrides and folder, so that jobs of a sweep are independent and may use
different devices. This module does not import torch, which help and composing do not need.

Only one run at a time may write to a folder, which it locks.
"""

import atexit
import contextlib
import fcntl
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import ListConfig

from growlab.base.errors import FolderLocked, UserError
from growlab.base.files import write_json

# torchrun's environment variables for the run's id and a process's error file.
RUN_ID, ERROR_FILE = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"
_OURS = "growlab-"
_POLL_SEC = 0.1
# Paths that Hydra needs no quotes for.
_PLAIN = re.compile(r"[\w.@%+-]*/[\w./@%+-]*", re.ASCII)

# Files and folders that a run writes at its end, and records that only some runs write.
_RESULTS = ("results.json", "report.html", "model*.pt", "pretrained*", "steps.csv", "layers.csv")
# File descriptors of locked folders.
_LOCKED: set[int] = set()


class ProcessFailed(RuntimeError):
    """A process of the run ended with a traceback, which is the message."""

    def __repr__(self) -> str:
        return str(self).rstrip().rpartition("\n")[2]


def run_id() -> str:
    """Id of the run whose processes this one starts; contains this process's id."""
    return f"{_OURS}{os.getpid()}"


def started_by_growlab() -> bool:
    """Return True if another process of growlab has started this one."""
    return os.environ.get(RUN_ID, "").startswith(_OURS)


def started_elsewhere() -> bool:
    """Return True if torchrun, SLURM or the like have started this process as one of several."""
    if started_by_growlab():
        return False
    by_slurm = int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_STEP_ID" in os.environ
    return "RANK" in os.environ or "LOCAL_RANK" in os.environ or by_slurm


def is_first() -> bool:
    """Return True in the process that writes files and prints."""
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        if name in os.environ:
            return int(os.environ[name]) == 0
    return True


def announce(sentence: str) -> None:
    """Print what the next seconds are spent on, if stderr is a terminal."""
    if is_first() and sys.stderr.isatty():
        print(f"{sentence} ...", file=sys.stderr, flush=True)


def program() -> str:
    """Program name for commands to copy: `growlab` if it was started like that, else `python -m growlab`."""
    # `growlab.lab.cli.commands.run_command` appends a command's name to the script's.
    names = {os.path.basename(path) for path in (sys.argv[0], sys.argv[0].rpartition(" ")[0])}
    return "growlab" if "growlab" in names else "python -m growlab"


def to_start(trainer: Mapping[str, Any]) -> int:
    """Count the processes that have to be started for this run; 0 if this one runs it."""
    if started_by_growlab():
        return 0
    restarts = max_restarts(trainer)
    if started_elsewhere():
        if restarts:
            raise UserError(
                f"trainer.max_restarts={restarts} is for processes that growlab itself starts; torchrun has "
                "--max-restarts=N, SLURM has --requeue, both with ckpt_path=last hydra.run.dir=FOLDER."
            )
        return 0
    if trainer.get("num_nodes", 1) > 1:
        raise UserError(
            f"trainer.num_nodes={trainer['num_nodes']}: start growlab on every machine with torchrun, or in a "
            "SLURM job with srun."
        )
    number = num_devices(trainer)
    return number if number > 1 or restarts else 0


def max_restarts(trainer: Mapping[str, Any]) -> int:
    """Number of times that the processes of a run may be restarted (`trainer.max_restarts`)."""
    restarts = trainer.get("max_restarts", 0)
    if not isinstance(restarts, int) or isinstance(restarts, bool) or restarts < 0:
        raise UserError(f"trainer.max_restarts={restarts} must be a number of restarts, 0 for none.")
    return restarts


def num_devices(trainer: Mapping[str, Any]) -> int:
    """Number of devices that Lightning will use on this machine."""
    devices, accelerator = trainer.get("devices", "auto"), trainer.get("accelerator", "auto")
    if isinstance(devices, (list, ListConfig)):
        return max(1, len(devices))
    text = str(devices)
    if "," in text:
        return len([name for name in text.split(",") if name.strip()])
    if text.isdigit():
        return max(1, int(text))
    if accelerator in ("auto", "gpu", "cuda"):
        # Imported here: the launcher of a run on CPUs needs no torch.
        import torch

        return max(1, torch.cuda.device_count())
    return 1


def world_size(trainer: Mapping[str, Any]) -> int:
    """Number of processes of the run on all machines."""
    return num_devices(trainer) * trainer.get("num_nodes", 1)


def end_with_parent() -> None:
    """End this process and its children when the agent that started it, growlab's or torchrun's, has ended.

    Otherwise nobody would wait for them, and another run may use the folder.
    """
    if RUN_ID not in os.environ:
        return
    # growlab reports the reason of a failure; errors of torch's sockets about a lost peer add nothing.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    parent = int(os.environ[RUN_ID].removeprefix(_OURS)) if started_by_growlab() else os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SEC)
        if started_by_growlab():
            # FOLDER/ATTEMPT/FILE, as the launcher lays them out.
            shutil.rmtree(Path(os.environ[ERROR_FILE]).parents[1], ignore_errors=True)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def report(code: int, reason: str) -> bool:
    """Write the reason of this process's end (a sentence or traceback) to torch's error file, if an agent started it.

    The code is negative, a signal's number, if the run saved and ended. Returns True if growlab's launcher prints it.
    """
    if path := os.environ.get(ERROR_FILE):
        # The format of `torch.distributed.elastic.multiprocessing.errors.ErrorHandler`; torchrun prints `py_callstack`.
        extra = {"py_callstack": reason, "timestamp": time.time()}
        write_json(path, {"message": {"message": reason, "errorCode": code, "extraInfo": extra}})
    return started_by_growlab()


def name_of(override: str) -> str:
    """Name of the setting in an override: `a` of `a=1`, `+a=1` and `++a=1`."""
    return override.lstrip("+").partition("=")[0]


def in_folder(path: Path) -> str:
    """The override that sets a run's folder."""
    return path_override("hydra.run.dir", path)


def path_override(name: str, path: Path) -> str:
    """An override whose value is a path, quoted if Hydra needs it."""
    text = str(path)
    return f"{name}={text if _PLAIN.fullmatch(text) else quoted(path)}"


def quoted(path: Path | str) -> str:
    """A path, quoted as the value of an override."""
    return QuotedString(str(path), Quote.single).with_quotes()


def apart(overrides: Sequence[str], multirun: bool) -> list[str]:
    """Overrides that send the folders and logs of processes other than the first to a temporary folder."""
    if is_first() or not (started_elsewhere() or started_by_growlab()):
        return []
    folder = Path(tempfile.gettempdir()) / f"growlab_{secrets.token_hex(8)}"
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if multirun:
        settings = {"hydra.sweep.dir": quoted(folder), "hydra.sweep.subdir": "."}
    else:
        settings = {"hydra.run.dir": quoted(folder)}
    settings |= {"hydra.output_subdir": "null", "hydra/job_logging": "none"}
    overridden = set(map(name_of, overrides))
    return [f"{name}={value}" for name, value in settings.items() if name not in overridden]


@contextlib.contextmanager
def lock_folder(folder: Path, wait_sec: float = 5.0) -> Iterator[None]:
    """Lock a folder while this process writes to it; the system unlocks it when the process ends.

    Raises:
        FolderLocked: another process has locked it for `wait_sec`.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    _LOCKED.add(descriptor)
    try:
        deadline = time.monotonic() + wait_sec
        # Some network file systems do not support locks.
        with contextlib.suppress(OSError):
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise FolderLocked(
                            f"another process is at work in {folder}: wait for its end, or name another folder with "
                            "hydra.run.dir=FOLDER."
                        ) from None
                    time.sleep(_POLL_SEC)
        yield
    finally:
        _LOCKED.discard(descriptor)
        os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Return True if another process has locked a folder; False if there is no such folder."""
    if not folder.is_dir():
        return False
    try:
        with lock_folder(folder, wait_sec=0.0):
            return False
    except FolderLocked:
        return True


def _release_locks() -> None:
    """Release the locks in a forked process, which may outlive the run."""
    for descriptor in _LOCKED:
        os.close(descriptor)
    _LOCKED.clear()


os.register_at_fork(after_in_child=_release_locks)


def forget_results(folder: Path) -> None:
    """Remove the results of an earlier run, which could be taken for those of a run that is stopped."""
    for path in [path for pattern in _RESULTS for path in folder.glob(pattern)]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()

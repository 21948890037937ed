"""The processes of a run: who started this one, and how many it has to start.

Processes that torchrun or SLURM have started are left alone. Else `growlab.lab.training.launcher` starts one for each
device, each a separate run of the command line, with the same overrides and the same folder, so a job of a sweep is a
fresh run too, and devices may differ from job to job. This module does without torch: help and composing need none.

One process at a time writes to a run's folder, which it locks.
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

# Variables of torchrun with the name of the run that a process belongs to, and its error file.
RUN_ID, ERROR_FILE = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"
_OURS = "growlab-"
_POLL_SEC = 0.1
# A path that Hydra reads as it is where it stands unquoted.
_PLAIN = re.compile(r"[\w.@%+-]*/[\w./@%+-]*", re.ASCII)

# Files and folders that a run writes at its end.
_RESULTS = ("results.json", "report.html", "model*.pt", "pretrained*")
_LOCKED: set[int] = set()


class ProcessFailed(RuntimeError):
    """A process of the run ended with a traceback, which this carries."""

    def __repr__(self) -> str:
        return str(self).rstrip().rpartition("\n")[2]


def run_id() -> str:
    """Name of the run whose processes this one starts; it contains the number of this process."""
    return f"{_OURS}{os.getpid()}"


def started_by_growlab() -> bool:
    """Return True if another process of growlab has started this one."""
    return os.environ.get(RUN_ID, "").startswith(_OURS)


def started_elsewhere() -> bool:
    """Return True if torchrun, SLURM or the like have started this process as one of several."""
    if started_by_growlab():
        return False
    several = int(os.environ.get("SLURM_NTASKS", "1")) > 1
    return "RANK" in os.environ or "LOCAL_RANK" in os.environ or (several and "SLURM_STEP_ID" in os.environ)


def is_first() -> bool:
    """Return True in the process that writes files and prints."""
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        if name in os.environ:
            return int(os.environ[name]) == 0
    return True


def announce(sentence: str) -> None:
    """Print to a terminal what takes the next seconds."""
    if is_first() and sys.stderr.isatty():
        print(f"{sentence} ...", file=sys.stderr, flush=True)


def program() -> str:
    """Program name for commands to copy: `growlab` where this process was started so, else `python -m growlab`."""
    # `growlab.lab.cli.commands.run_command` puts a command's name behind the script's.
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
    """Times that the processes of a run may start again, of the configuration's `trainer`."""
    restarts = trainer.get("max_restarts", 0)
    if not isinstance(restarts, int) or isinstance(restarts, bool) or restarts < 0:
        raise UserError(f"trainer.max_restarts={restarts} must be a number of restarts, 0 for none.")
    return restarts


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


def end_with_parent() -> None:
    """End this process and its children when the agent that started it, growlab's or torchrun's, is gone.

    Nobody would wait for them, and the run's folder may be taken.
    """
    if RUN_ID not in os.environ:
        return
    # The reason is reported; what torch's sockets say of a neighbour that has gone adds nothing.
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
    """Leave the reason of this process's end (a sentence or a traceback) in torch's error file, if an agent started it.

    The code is minus the number of a signal that ended the run in good order. True: growlab's launcher will print it.
    """
    if os.environ.get(ERROR_FILE):
        # The layout of `torch.distributed.elastic.multiprocessing.errors.ErrorHandler`; torchrun prints `py_callstack`.
        more = {"py_callstack": reason, "timestamp": time.time()}
        content = {"message": {"message": reason, "errorCode": code, "extraInfo": more}}
        write_json(os.environ[ERROR_FILE], content)
    return started_by_growlab()


def name_of(override: str) -> str:
    """Name of the setting in an override: `a` of `a=1`, `+a=1` and `++a=1`."""
    return override.lstrip("+").partition("=")[0]


def in_folder(path: Path) -> str:
    """The override that sends a run into a folder."""
    return path_override("hydra.run.dir", path)


def path_override(name: str, path: Path) -> str:
    """An override whose value is a path, quoted where Hydra would stumble over it."""
    text = str(path)
    return f"{name}={text if _PLAIN.fullmatch(text) else quoted(path)}"


def quoted(path: Path | str) -> str:
    """A path as the value of an override."""
    return QuotedString(str(path), Quote.single).with_quotes()


def apart(overrides: Sequence[str], multirun: bool) -> list[str]:
    """Overrides that keep a process other than the first from leaving folders and logs."""
    if is_first() or not (started_elsewhere() or started_by_growlab()):
        return []
    folder = Path(tempfile.gettempdir()) / f"growlab_{secrets.token_hex(8)}"
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if multirun:
        own = {"hydra.sweep.dir": quoted(folder), "hydra.sweep.subdir": "."}
    else:
        own = {"hydra.run.dir": quoted(folder)}
    own |= {"hydra.output_subdir": "null", "hydra/job_logging": "none"}
    given = set(map(name_of, overrides))
    return [f"{name}={value}" for name, value in own.items() if name not in given]


@contextlib.contextmanager
def lock_folder(folder: Path, wait_sec: float = 5.0) -> Iterator[None]:
    """Lock a folder while this process writes to it; the system unlocks it when the process ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    _LOCKED.add(descriptor)
    try:
        last = time.monotonic() + wait_sec
        # Some network file systems cannot lock.
        with contextlib.suppress(OSError):
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > last:
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
    """True if another process has locked a folder, which need not be there."""
    if not folder.is_dir():
        return False
    try:
        with lock_folder(folder, wait_sec=0.0):
            return False
    except FolderLocked:
        return True


def _let_go() -> None:
    """Processes that a run has forked may outlive it by a moment, and must not keep its locks."""
    for descriptor in _LOCKED:
        os.close(descriptor)
    _LOCKED.clear()


os.register_at_fork(after_in_child=_let_go)


def forget_results(folder: Path) -> None:
    """Remove the results of an earlier run, so that a run which is stopped is not taken for it."""
    for path in [path for pattern in _RESULTS for path in folder.glob(pattern)]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()

"""A run's folder: one process writes to it at a time; results of earlier runs are removed."""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from growlab.base.errors import FolderHeld, UserError
from growlab.base.files import CHECKPOINT_FOLDER

# What a run writes at its end.
_RESULTS = ("results.json", "report.html", "model*.pt", "pretrained*")
# What it writes before that, and where.
_FOLDERS = (CHECKPOINT_FOLDER, "figures")
_FILES = (
    *("config.yaml", "metrics.csv", "rates.csv", "layers.csv", "growth.json"),
    *(f"{CHECKPOINT_FOLDER}/{name}.ckpt" for name in ("last", "previous")),
)
_HELD: set[int] = set()


@contextlib.contextmanager
def held_alone(folder: Path, wait_sec: float = 5.0) -> Iterator[None]:
    """Lock a folder while this process writes to it; the system unlocks it when the process ends.

    Args:
        folder: that is there.
        wait_sec: for a process that is about to end.

    Raises:
        FolderHeld: another process has locked it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    _HELD.add(descriptor)
    try:
        _lock(descriptor, folder, time.monotonic() + wait_sec)
        yield
    finally:
        _HELD.discard(descriptor)
        os.close(descriptor)


def is_held(folder: Path) -> bool:
    """True if another process has locked a folder, which need not be there."""
    if not folder.is_dir():
        return False
    try:
        with held_alone(folder, wait_sec=0.0):
            return False
    except FolderHeld:
        return True


def _lock(descriptor: int, folder: Path, last: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > last:
                raise FolderHeld(
                    f"another process is at work in {folder}: wait for its end, or name another folder with "
                    "hydra.run.dir=FOLDER."
                ) from None
            time.sleep(0.1)
        except OSError:
            # Some network file systems cannot.
            return


def check_places(folder: Path) -> None:
    """Refuse a run's folder in which a folder lies where the run will write a file, or a file where it makes a folder.

    Raises:
        UserError: naming it.
    """
    wrong = [(name, "folder", "file") for name in _FILES if (folder / name).is_dir()]
    wrong += [(name, "file", "folder") for name in _FOLDERS if (folder / name).is_file()]
    for name, there, needed in wrong:
        raise UserError(
            f"{folder / name} is a {there}, and a run has a {needed} there: move it away, or name another folder "
            "with hydra.run.dir=FOLDER."
        )


def _let_go() -> None:
    """Processes that a run has forked may outlive it by a moment, and must not keep its locks."""
    for descriptor in _HELD:
        os.close(descriptor)
    _HELD.clear()


os.register_at_fork(after_in_child=_let_go)


def forget_results(folder: Path) -> None:
    """Remove what an earlier run has left at its end: a run that is stopped leaves none, and is not taken for it."""
    for path in [path for pattern in _RESULTS for path in folder.glob(pattern)]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()

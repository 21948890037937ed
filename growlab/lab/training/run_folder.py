"""A run's folder: one process writes to it at a time; results of earlier runs are removed."""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from growlab.base.errors import FolderLocked

# Files and folders that a run writes at its end.
_RESULTS = ("results.json", "report.html", "model*.pt", "pretrained*")
_LOCKED: set[int] = set()


@contextlib.contextmanager
def lock_folder(folder: Path, wait_sec: float = 5.0) -> Iterator[None]:
    """Lock a folder while this process writes to it; the system unlocks it when the process ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    _LOCKED.add(descriptor)
    try:
        last = time.monotonic() + wait_sec
        # Some network file systems cannot lock.
        with contextlib.suppress(OSError):
            while not _locked(descriptor):
                if time.monotonic() > last:
                    raise FolderLocked(
                        f"another process is at work in {folder}: wait for its end, or name another folder with "
                        "hydra.run.dir=FOLDER."
                    )
                time.sleep(0.1)
        yield
    finally:
        _LOCKED.discard(descriptor)
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


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

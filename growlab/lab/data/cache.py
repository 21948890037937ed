"""The user's cache folder: locks between processes, and arrays that only the first run has to make."""

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import numpy as np
from filelock import FileLock, Timeout

from growlab.base.errors import UserError
from growlab.base.files import write_atomically

log = logging.getLogger(__name__)


def cache_dir() -> Path:
    """Return growlab's folder in the user's cache folder (`XDG_CACHE_HOME`, else `~/.cache`)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "growlab"


def files_fingerprint(paths: Sequence[Path]) -> str:
    """Return a text that changes when one of the files does: absolute names, sizes, times of change."""

    def state(path: Path) -> str:
        try:
            stat = path.stat()
            return f"{stat.st_size}\t{stat.st_mtime_ns}"
        except FileNotFoundError:
            # A link to nowhere, which reading it will report.
            return "missing"

    return "\n".join(f"{path.resolve()}\t{state(path)}" for path in paths)


def refuse(error: OSError) -> NoReturn:
    """Raise an error of `os.walk`, which passes over folders that it may not read."""
    raise error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time in, where the cache folder can be written; else everyone."""
    with ExitStack() as stack:
        # A folder that cannot be written, a system without locks, a holder that hangs: doing the work twice is no harm.
        with suppress(OSError, NotImplementedError, Timeout):
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(f"{path}.lock", timeout=3600))
        yield


def is_cached(key: str) -> bool:
    """Return True if an array was stored under a key."""
    return _path(key).is_file()


def cached_array(key: str, make: Callable[[], np.ndarray]) -> np.ndarray:
    """Return the array cached under a key; make and store it if it is missing. The key must change with the content."""
    path = _path(key)
    # One process at a time makes it; the others wait, and load it.
    with locked(path):
        if (found := _loaded(path)) is None:
            found = make()
            try:
                write_atomically(path, lambda file: np.save(file, found))
            except UserError as error:
                log.warning("decoded images are not kept for the next run: %s", error)
    return found


def _path(key: str) -> Path:
    return cache_dir() / "arrays" / (hashlib.sha256(key.encode()).hexdigest()[:24] + ".npy")


def _loaded(path: Path) -> np.ndarray | None:
    try:
        return np.load(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError) as error:
        log.warning("ignoring the unreadable cache %s (%s)", path, error)
        return None

"""The user's cache folder: locks between processes, and cached arrays."""

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
    """Return a string of absolute paths, sizes and modification times, which changes when a file does."""

    def state(path: Path) -> str:
        try:
            stat = path.stat()
            return f"{stat.st_size}\t{stat.st_mtime_ns}"
        except FileNotFoundError:
            # A broken link; reading it will report that.
            return "missing"

    return "\n".join(f"{path.resolve()}\t{state(path)}" for path in paths)


def refuse(error: OSError) -> NoReturn:
    """Raise the error: an `onerror` for `os.walk`, which skips unreadable folders by default."""
    raise error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock between processes; without effect if the cache folder is not writable."""
    with ExitStack() as stack:
        # If the folder is not writable, locks are unsupported or another process hangs, duplicate work does no harm.
        with suppress(OSError, NotImplementedError, Timeout):
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(f"{path}.lock", timeout=3600))
        yield


def is_cached(key: str) -> bool:
    """Return True if an array was stored under a key."""
    return _path(key).is_file()


def cached_array(key: str, make: Callable[[], np.ndarray]) -> np.ndarray:
    """Return the array cached under a key, which must change with the content; make and store it if missing."""
    path = _path(key)
    # One process makes it; others wait and load it.
    with locked(path):
        if (array := _loaded(path)) is None:
            array = make()
            try:
                write_atomically(path, lambda file: np.save(file, array))
            except UserError as error:
                log.warning("cannot cache decoded images for the next run: %s", error)
    return array


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

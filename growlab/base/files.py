"""Writing files so that a reader sees either the old content or the new one, never a torn file."""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from growlab.base.errors import WriteError

# End of the names of files that are being written.
_UNFINISHED = ".unfinished"

CHECKPOINT_FOLDER = "checkpoints"
"""In a run's folder: its newest states."""

FAILURE = "failure.json"
"""In the folder of a sweep's job that failed: the reason."""


def write_atomically(
    path: str | os.PathLike[str], write: Callable[[IO[bytes]], Any], previous: Path | None = None
) -> None:
    """Call `write(file)` on a temporary file in the same folder, then rename it to `path`.

    Args:
        path: where the content goes; its folder is made if need be.
        write: writes the bytes to the open binary file it is given.
        previous: where the old content of `path` goes, in the same folder; None: nowhere.

    Raises:
        WriteError: the disk is full or the folder cannot be written; what was at `path` is left as it was.
    """
    path = Path(path)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f".{path.name}.", suffix=_UNFINISHED, delete=False
        ) as file:
            temporary = Path(file.name)
            write(file)
            file.flush()
            os.fsync(file.fileno())
        # A temporary file is private to its owner; results are as readable as any other file.
        os.chmod(temporary, 0o666 & ~_umask())
        if previous is not None and path.exists():
            os.replace(path, previous)
        os.replace(temporary, path)
        temporary = None
        _sync(path.parent)
    except OSError as error:
        reason = error.strerror or str(error)
        raise WriteError(f"cannot write {path}: {reason}; free some space or choose another folder.") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def remove_unfinished(folder: Path) -> None:
    """Remove temporary files of processes that were killed while writing."""
    for path in folder.glob(f".*{_UNFINISHED}"):
        path.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` as UTF-8, atomically."""
    write_atomically(path, lambda file: file.write(text.encode()))


def write_json(path: str | os.PathLike[str], content: Any) -> None:
    """Write `content` as indented JSON, atomically."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def _sync(folder: Path) -> None:
    """Make renamed files stay renamed after a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # Some network file systems cannot, and need not.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    # The only portable way to read the mask is to set it and set it back.
    mask = os.umask(0o022)
    os.umask(mask)
    return mask

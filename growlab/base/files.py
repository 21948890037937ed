"""Atomic writes: a reader sees either a file's old content or its new content, never a part."""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from growlab.base.errors import WriteError

# Suffix of files that are being written.
_UNFINISHED = ".unfinished"

CHECKPOINT_FOLDER = "checkpoints"
"""Folder of a run's checkpoints, within the run's folder."""

FAILURE = "failure.json"
"""File with the reason of a failure, in the folder of a sweep's job."""


def write_atomically(
    path: str | os.PathLike[str], write: Callable[[IO[bytes]], Any], previous: Path | None = None
) -> None:
    """Call `write(file)` on a temporary file in the same folder, then rename it to `path`.

    Args:
        path: file to write; its folder is created if necessary.
        write: writes the content to an open binary file.
        previous: path in the same folder to which the old file is moved; None: it is replaced.

    Raises:
        WriteError: the disk is full or the folder cannot be written; `path` is unchanged.
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
        # Temporary files are private to their owner; results get the usual permissions.
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
    """Make renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # Some network file systems do not support this.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    # The mask can only be read portably by setting it.
    mask = os.umask(0o022)
    os.umask(mask)
    return mask

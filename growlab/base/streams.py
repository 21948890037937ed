"""Standard output and error as a program may find them: on a disk that is full, closed, or a terminal that is gone."""

import errno
import io
import os
import sys
from typing import Any, TextIO

from growlab.base.errors import WriteError

# A full disk, a full quota, a terminal that is gone.
_NOT_TAKEN = {errno.ENOSPC, errno.EDQUOT, errno.EIO}


class _Messages(io.FileIO):
    """What is not taken is lost: hours of training are worth more than a line about them."""

    def write(self, content: Any, /) -> int:
        try:
            return super().write(content)
        except OSError as error:
            if error.errno not in _NOT_TAKEN:
                raise
            return memoryview(content).nbytes


class _Output(io.FileIO):
    """What is not taken is told once, as a `WriteError`; the rest is lost: Python writes it out again as it ends."""

    _told = False

    def write(self, content: Any, /) -> int:
        try:
            return super().write(content)
        except OSError as error:
            if error.errno not in _NOT_TAKEN:
                raise
            if not self._told:
                self._told = True
                raise WriteError(f"cannot write the output: {error.strerror}.") from error
            return memoryview(content).nbytes


def guard_streams() -> None:
    """Let this program's messages never end it, and its output end it with a sentence."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # Else the next file that is opened gets this number, and messages of libraries go into it.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdout is sys.__stdout__:
        sys.stdout = _text(_Output(1, "w", closefd=False), sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _text(_Messages(2, "w", closefd=False), sys.stderr)


def flushed(code: Any) -> Any:
    """Write out what was printed.

    Args:
        code: the program's exit code.

    Returns:
        The code; of a program that has succeeded, 2 where its output cannot be written and 141 where nobody reads it.
    """
    try:
        sys.stdout.flush()
    except WriteError as error:
        print(f"error: {error}", file=sys.stderr)
        return code or 2
    except BrokenPipeError:
        drop_output()
        return code or 141
    return code


def drop_output() -> None:
    """Let standard output go nowhere: its reader has gone, and Python would complain as it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _text(raw: io.FileIO, like: TextIO | None) -> io.TextIOWrapper:
    """A text stream as Python makes its own."""
    settings: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace", "line_buffering": True}
    if isinstance(like, io.TextIOWrapper):
        settings = {name: getattr(like, name) for name in (*settings, "write_through")}
    # With PYTHONUNBUFFERED or `python -u` nothing is held back, which a forked process would write out once more.
    unbuffered = settings.get("write_through", False)
    return io.TextIOWrapper(raw if unbuffered else io.BufferedWriter(raw), **settings)

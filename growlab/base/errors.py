"""Exceptions whose message is for the user."""

import contextlib
import importlib
import importlib.metadata
import re
import signal
from collections.abc import Iterator
from typing import Any


class UserError(Exception):
    """Input that growlab cannot use; its message is one sentence: what is wrong and what to do about it.

    `python -m growlab` prints the sentence after `error:` and exits with code 2, without a traceback.
    """


class WriteError(UserError):
    """A file could not be written, such as on a full disk; its previous content is unchanged."""


class FolderLocked(UserError):
    """Another process writes to the folder; nothing was written there."""


@contextlib.contextmanager
def as_user_errors() -> Iterator[None]:
    """Turn a ValueError raised inside into a UserError with the same message.

    Raises:
        UserError: instead of the ValueError.

    Examples:
        >>> with as_user_errors():
        ...     raise ValueError("width must be at least 1, not 0.")
        Traceback (most recent call last):
        growlab.base.errors.UserError: width must be at least 1, not 0.
    """
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


class Stopped(BaseException):
    """A signal ended the run, after its state was saved.

    Not an `Exception`, so that a sweep ends instead of starting its next job.

    Attributes:
        signal: the signal.
        sentence: what was saved and how to resume.
    """

    def __init__(self, number: int, sentence: str) -> None:
        super().__init__(sentence)
        self.signal, self.sentence = signal.Signals(number), sentence


def first_line(error: BaseException) -> str:
    """First line of an error's message, or its class if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def how_to_install(extra: str) -> str:
    """Return the command that installs the packages of an extra of growlab.

    It names the packages, since `growlab[EXTRA]` cannot be installed if growlab comes from a checkout.

    Examples:
        >>> how_to_install("no such extra")
        "pip install -e '.[no such extra]' in growlab's checkout"
    """
    try:
        requirements = importlib.metadata.requires("growlab") or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    of_extra = re.compile(rf"""extra == ['"]{re.escape(extra)}['"]$""")
    packages = [line.partition(";")[0].strip() for line in requirements if of_extra.search(line)]
    if not packages:
        return f"pip install -e '.[{extra}]' in growlab's checkout"
    return "pip install " + " ".join(f"'{package}'" for package in packages) + f" (growlab's extra [{extra}])"


def imported(name: str, extra: str) -> Any:
    """Import a module of an extra; if it is missing, raise a UserError with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"{extra} is not installed: {how_to_install(extra)}.") from error


@contextlib.contextmanager
def needs(what: str, command: str) -> Iterator[None]:
    """Add the command that installs a package to the error of a failed import in this context.

    Args:
        what: beginning of the message: who needs the package.
        command: command that installs the package.

    Raises:
        ModuleNotFoundError: with that message.

    Examples:
        >>> with needs("A bird", "pip install feathers"):
        ...     import no_feathers
        Traceback (most recent call last):
        ModuleNotFoundError: A bird needs no_feathers, which is not installed: pip install feathers
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        message = f"{what} needs {missing.name}, which is not installed: {command}"
        raise ModuleNotFoundError(message, name=missing.name) from None

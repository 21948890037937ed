"""Command-line parser that reports a wrong command line in one sentence."""

import argparse
import contextlib
import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from math import inf, prod
from typing import Any, NoReturn

from growlab.base.errors import UserError

_DIGITS = 10
# Most entries of a sample: 1 GiB in float32.
_LARGEST = 2**28
_WHOLE_WORDS: Any = {"break_long_words": False, "break_on_hyphens": False}


class _Paragraphs(argparse.HelpFormatter):
    """Keeps paragraphs, and wraps them only at spaces."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, **_WHOLE_WORDS)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = partial(textwrap.fill, width=width, initial_indent=indent, subsequent_indent=indent, **_WHOLE_WORDS)
        return "\n\n".join(map(fill, text.strip().split("\n\n")))


class CommandParser(argparse.ArgumentParser):
    """Raises `UserError` where argparse prints the usage and ends the program; wraps help at spaces."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=_Paragraphs, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise `UserError` with argparse's message and a pointer to the help."""
        raise UserError(f"{message}; see {self.prog} --help.")


def command(run: Callable[[Sequence[str]], int | None]) -> Callable[..., int]:
    """Decorator: turn a function of command-line arguments into a command that exits with code 2 on a `UserError`."""

    @wraps(run)
    def main(argv: Sequence[str] | None = None) -> int:
        try:
            code = run(list(sys.argv[1:] if argv is None else argv))
            sys.stdout.flush()
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        return code or 0

    return main


def in_columns(text: str, columns: int = 79, hanging: int = 4) -> str:
    """Wrap the lines of a text at spaces for a terminal, keeping their indents.

    Examples:
        >>> print(in_columns("  width: 12 to 24", 12))
          width: 12
              to 24
    """
    lines = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())] + " " * hanging
        lines += textwrap.wrap(line, columns, subsequent_indent=indent, **_WHOLE_WORDS) or [""]
    return "\n".join(lines)


def shell_lines(words: Sequence[str], columns: int = 79, first: str = "") -> str:
    r"""Quote a command's words, and break lines with backslashes, so that it can be copied from a terminal.

    Examples:
        >>> print(shell_lines(["growlab", "method=ours", "seed=1"], 24))
        growlab method=ours \
          seed=1
    """
    lines = [first]
    for word in map(shlex.quote, words):
        if len(lines[-1]) + len(word) + 3 > columns and lines[-1].strip():
            lines.append(" ")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(lines)


def columns_of(stream: Any) -> int | None:
    """Number of columns of the terminal that a stream writes to; None for a pipe or a file."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (AttributeError, OSError, ValueError):
        return None


class _Wrapped:
    """A terminal's stream that wraps long lines at spaces, where the terminal would break words."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        columns = columns_of(self._stream)
        # Text with escape codes comes from code that wraps by itself.
        if columns and "\x1b" not in text and max(map(len, text.splitlines()), default=0) > columns:
            text = in_columns(text, columns, hanging=0) + "\n" * text.endswith("\n")
        self._stream.write(text)
        return len(text)


@contextlib.contextmanager
def whole_words() -> Iterator[None]:
    """Context in which lines printed to a terminal are wrapped between words."""
    with contextlib.redirect_stdout(_Wrapped(sys.stdout)), contextlib.redirect_stderr(_Wrapped(sys.stderr)):
        yield


def sizes(text: str) -> list[int]:
    """Argument type: whole numbers separated by commas.

    Examples:
        >>> sizes("3,32,32")
        [3, 32, 32]
    """
    parts = [part.strip() for part in text.split(",")]
    numbers = [int(part) for part in parts if part.isascii() and part.isdecimal() and len(part) < _DIGITS]
    if len(numbers) < len(parts) or not all(numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 3,32,32")
    if prod(numbers) > _LARGEST:
        raise argparse.ArgumentTypeError(f"a sample of {text} is larger than {_LARGEST:,} numbers")
    return numbers


def count(text: str) -> int:
    """Argument type: a whole number above 0."""
    if not (text.isascii() and text.isdecimal() and len(text) < _DIGITS and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def amount(text: str, zero: bool = False) -> float:
    """Argument type: a finite number above 0, or at least 0 if `zero`."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < inf or (value == 0 and not zero):
        raise argparse.ArgumentTypeError(f"{text!r} is no number {'from 0 on' if zero else 'above 0'}")
    return value

"""Command-line parser that reports a wrong command line in one sentence."""

import argparse
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import wraps
from math import inf, prod
from typing import NoReturn

from growlab.base.errors import UserError

_DIGITS = 10
# Numbers of a sample, 1 GiB of them.
_LARGEST = 2**28


class CommandParser(argparse.ArgumentParser):
    """Raises `UserError` where argparse prints the usage and ends the program."""

    def error(self, message: str) -> NoReturn:
        """Raise `UserError` with argparse's message and where help is."""
        raise UserError(f"{message}; see {self.prog} --help.")


def command(run: Callable[[Sequence[str]], int | None]) -> Callable[..., int]:
    """Turn a function of command-line arguments into a command: a `UserError` is printed and gives exit code 2."""

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


def in_columns(text: str, columns: int = 79) -> str:
    """Wrap the lines of a text at spaces, each with its indent, for a terminal.

    Examples:
        >>> print(in_columns("  width: 12 to 24", 12))
          width: 12
              to 24
    """
    lines = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        wrapped = textwrap.wrap(
            line, columns, subsequent_indent=f"{indent}    ", break_long_words=False, break_on_hyphens=False
        )
        lines += wrapped or [""]
    return "\n".join(lines)


def sizes(text: str) -> list[int]:
    """Whole numbers with commas between them, as the type of an argument.

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
    """A number from 1, as the type of an argument."""
    if not (text.isascii() and text.isdecimal() and len(text) < _DIGITS and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def amount(text: str, zero: bool = False) -> float:
    """A finite number above 0, or with `zero` from 0 on, as the type of an argument."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < inf or (value == 0 and not zero):
        raise argparse.ArgumentTypeError(f"{text!r} is no number {'from 0 on' if zero else 'above 0'}")
    return value

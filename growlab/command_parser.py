"""The parser of commands: a wrong command line is answered with one sentence."""

import argparse
from typing import NoReturn

from growlab.errors import UserError


class CommandParser(argparse.ArgumentParser):
    """Raises `UserError` where argparse prints the usage and ends the program."""

    def error(self, message: str) -> NoReturn:
        """Raise `UserError` with argparse's message and where help is."""
        raise UserError(f"{message}; see {self.prog} --help.")


def sizes(text: str) -> list[int]:
    """Whole numbers with commas between them, as the type of an argument.

    Examples:
        >>> sizes("3,32,32")
        [3, 32, 32]
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 3,32,32") from error

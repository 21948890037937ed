"""`python -m growlab.analysis DIR...` prints a table of runs; `... figure NAME DIR... -o FILE` draws."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from growlab.analysis.results import load_runs
from growlab.analysis.tables import summarise, write_table
from growlab.errors import UserError
from growlab.files import write_text

_SUFFIXES = {".csv": "csv", ".json": "json"}


class _Parser(argparse.ArgumentParser):
    """Answers a wrong command line with one sentence, as everything else here does."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see python -m growlab.analysis --help.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`; returns the exit code (2: told in one sentence on stderr)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if argv[:1] == ["figure"]:
            _figure(argv[1:])
        else:
            _table(argv)
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader (head, less) has seen enough; keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)


def _table(argv: Sequence[str]) -> None:
    parser = _Parser(
        prog="python -m growlab.analysis",
        description="Print a table over finished runs, grouped by everything but the seed.",
        epilog="python -m growlab.analysis figure --help tells how to draw figures.",
        allow_abbrev=False,
    )
    parser.add_argument("folders", metavar="DIR", nargs="+", help="run folders, or folders above them")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", dest="form", action="store_const", const="csv", help="CSV, plain numbers")
    form.add_argument("--json", dest="form", action="store_const", const="json", help="JSON, plain numbers")
    parser.add_argument("-o", "--output", metavar="FILE", help="write to FILE (.csv, .json or Markdown)")
    arguments = parser.parse_args(argv)
    form_name = arguments.form or _SUFFIXES.get(Path(arguments.output or "").suffix.lower(), "markdown")
    text = write_table(summarise(load_runs(arguments.folders, _warn), _warn), form_name)
    if arguments.output:
        write_text(arguments.output, text)
    else:
        sys.stdout.write(text)


def _figure(argv: Sequence[str]) -> None:
    # Imported here: the table must not wait for matplotlib.
    from growlab.analysis import figures, style

    names = ", ".join(figures.FIGURES)
    parser = _Parser(
        prog="python -m growlab.analysis figure",
        description="Draw a figure from finished runs.",
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", help=f"one of {names}")
    parser.add_argument("folders", metavar="DIR", nargs="+", help="run folders, or folders above them")
    parser.add_argument(
        "-o", "--output", metavar="FILE", required=True, help="where to write (.png, .svg or .pdf)"
    )
    parser.add_argument(
        "--parameter", metavar="NAME", action="append", help="show this one (rate_factors, norms; repeatable)"
    )
    arguments = parser.parse_args(argv)
    draw = figures.find(arguments.name)
    style.check_output(arguments.output)
    figures.save(draw(load_runs(arguments.folders, _warn), arguments.parameter), arguments.output)
    print(arguments.output)


if __name__ == "__main__":
    sys.exit(main())

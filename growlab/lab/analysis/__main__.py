"""Commands over finished runs: `growlab table`, `figure`, `paired` and `time`."""

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from growlab.base.command_parser import CommandParser, command
from growlab.base.errors import UserError
from growlab.base.files import write_text
from growlab.lab.analysis.grid import Grid
from growlab.lab.analysis.results import load_runs
from growlab.lab.analysis.tables import Row, answer, summarise, write_table
from growlab.lab.analysis.tables import table as grid_of

_SUFFIXES = {".csv": "csv", ".json": "json", ".tex": "latex"}
_AGAINST = {
    "paired": "compare all others with this one, named as in the table",
    "time": "the reference; by default the fixed-size network at full width",
}


@command
def main(argv: Sequence[str]) -> None:
    """Run `figure`, `paired` or `time` if that is the first word, else `table`."""
    others = {"figure": _figure, "paired": _paired, "time": _time}
    if argv and argv[0] in others:
        others[argv[0]](argv[1:])
    else:
        _table(argv)


def warn(message: str) -> None:
    """Print a warning on stderr."""
    print(f"warning: {message}", file=sys.stderr)


def table_parser(name: str, description: str, epilog: str | None = None, json: bool = False) -> CommandParser:
    """Return the parser of a command that prints or writes a table of runs."""
    parser = CommandParser(prog=f"growlab {name}", description=description, epilog=epilog, allow_abbrev=False)
    parser.add_argument("folders", metavar="DIR", nargs="+", help="run folders, or folders above them")
    form = parser.add_mutually_exclusive_group()
    names = {"csv": "CSV", "latex": "LaTeX"} | ({"json": "JSON, plain numbers"} if json else {})
    for option, text in names.items():
        form.add_argument(f"--{option}", dest="form", action="store_const", const=option, help=text)
    ends = ", ".join(end for end, option in _SUFFIXES.items() if option in names)
    parser.add_argument("-o", "--output", metavar="FILE", help=f"write to FILE ({ends} or Markdown)")
    if name in _AGAINST:
        parser.add_argument("--against", metavar="METHOD", help=_AGAINST[name])
    return parser


def rows_of(arguments: argparse.Namespace) -> list[Row]:
    """Summarise the runs in the folders of a command line."""
    return summarise(load_runs(arguments.folders, warn), warn)


def put(table: Grid | Sequence[Row], arguments: argparse.Namespace) -> None:
    """Print or write a table, or the rows of the main table, in the requested format."""
    form = arguments.form or _SUFFIXES.get(Path(arguments.output or "").suffix.lower(), "markdown")
    if isinstance(table, Grid):
        if form == "json":
            raise UserError(f"cannot write this table to {arguments.output}: its name must end in .md, .tex or .csv.")
        text: str = getattr(table, form)()
    else:
        text = write_table(table, form)
    if arguments.output:
        write_text(arguments.output, text)
    elif form == "markdown":
        sys.stdout.write((table if isinstance(table, Grid) else grid_of(table)).shown())
    else:
        sys.stdout.write(text)


def _table(argv: Sequence[str]) -> None:
    parser = table_parser(
        "table",
        "Print a table over finished runs, grouped by everything but the seed.",
        "Example: growlab table runs --by optimizer.lr --metric val_loss --filter data=cifar10. See also: growlab "
        "figure, growlab paper (methods by networks, with published values), growlab paired (methods compared seed by "
        "seed), growlab time (cost and seconds to a test score).",
        json=True,
    )
    each: dict[str, Any] = {"action": "append", "default": []}
    parser.add_argument("--by", metavar="KEY", **each, help="one row for each value of a setting; repeatable")
    metric = "average this number of results.json, such as val_loss; repeatable"
    parser.add_argument("--metric", metavar="NAME", **each, help=metric)
    only = "only runs with this setting (* and ? match); repeatable"
    parser.add_argument("--filter", metavar="KEY=VALUE", **each, help=only)
    parser.add_argument("--sort", metavar="COLUMN", help="sort by a column; --sort=-COLUMN: descending")
    arguments = parser.parse_args(argv)
    rows, asked = rows_of(arguments), (arguments.by, arguments.metric, arguments.filter, arguments.sort)
    put(answer(rows, *asked) if any(asked) else rows, arguments)


def _paired(argv: Sequence[str]) -> None:
    from growlab.lab.analysis.paired import compare_pairs, paired_table

    parser = table_parser(
        "paired",
        "Compare methods over equal seeds: mean difference in test accuracy with its confidence interval.",
        "Example: growlab paired runs --against fixed-size",
    )
    arguments = parser.parse_args(argv)
    put(paired_table(compare_pairs(rows_of(arguments), arguments.against)), arguments)


def _time(argv: Sequence[str]) -> None:
    from growlab.lab.analysis.schedules import time_to_score_table, times_to_scores

    parser = table_parser(
        "time",
        "Time to accuracy: cost and seconds for each method to reach the test scores of a reference.",
        "Example: growlab time runs/frontier_testbed --score 70",
    )
    score = "to this test score in the table's unit, such as 70 for 70 %%"
    parser.add_argument("--score", metavar="X", type=float, help=score)
    arguments = parser.parse_args(argv)
    rows = rows_of(arguments)
    level = None if arguments.score is None else arguments.score / rows[0].metric.scale
    put(time_to_score_table(times_to_scores(rows, arguments.against, level)), arguments)


def _figure(argv: Sequence[str]) -> None:
    from growlab.lab.analysis import figures, style

    parser = CommandParser(
        prog="growlab figure",
        description="Draw a figure from finished runs.",
        epilog="Example: growlab figure compare runs -o compare.svg",
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", help=f"one of {', '.join(figures.FIGURES)}, movie")
    parser.add_argument("folders", metavar="DIR", nargs="+", help="run folders, or folders above them")
    output = "write to FILE (.png, .svg or .pdf; .gif for movie)"
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help=output)
    single = "show this parameter (rate_factors, norms; repeatable)"
    parser.add_argument("--parameter", metavar="NAME", action="append", help=single)
    arguments = parser.parse_args(argv)
    if arguments.name == "movie":
        from growlab.lab.analysis.width_figures import save_movie

        (run,) = figures.one_run("movie", load_runs(arguments.folders, warn))
        print(save_movie(run, arguments.output))
        return
    draw = figures.find(arguments.name)
    style.check_output(arguments.output)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        style.save(draw(load_runs(arguments.folders, warn), arguments.parameter), arguments.output)
    for warning in caught:
        warn(str(warning.message))
    print(arguments.output)


if __name__ == "__main__":
    sys.exit(main())

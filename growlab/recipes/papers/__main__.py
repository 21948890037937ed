"""`python -m growlab reproduce [NAME]` trains what is missing of the papers' tables and figures; --list says what."""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from growlab.base.command_parser import CommandParser, amount, count
from growlab.base.errors import UserError
from growlab.base.files import write_text
from growlab.base.streams import drop_output
from growlab.recipes.papers.paces import Forecast, forecast
from growlab.recipes.papers.registry import UNFINISHED, Item, Job, Registry, drawn, registry
from growlab.recipes.papers.slices import Place, device, missing, runs_at_once, train
from growlab.recipes.papers.stopping import Ended, EndingSignals

_RESULTS = Path("notebooks", "results")
# What numpy takes as a seed.
_SEEDS = 2**32


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`.

    Returns:
        The exit code: 2, told in one sentence on stderr; 128 and the number of a signal that ended it, as a shell has
        it.
    """
    started = time.monotonic()
    try:
        arguments = _parser().parse_args(sys.argv[1:] if argv is None else argv)
        with EndingSignals() as signals:
            _run(arguments, started + 60 * arguments.minutes, signals)
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader of our output has gone, as in `growlab reproduce --list | head`.
        drop_output()
        return 141
    except KeyboardInterrupt as ended:
        number = ended.signal if isinstance(ended, Ended) else signal.SIGINT
        named = "interrupted" if number == signal.SIGINT else number.name
        print(f"{named}; the same command goes on", file=sys.stderr)
        return 128 + number
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="growlab reproduce",
        description="Train what is missing of a table or figure of the papers, in slices that go on where they ended, "
        "and write its rows beside the published ones. Without NAME: one entry after the other, as far as data are "
        "there.",
        epilog="Example: growlab reproduce table2 --minutes 60",
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="a table or figure; --list names them")
    parser.add_argument(
        "--list", action="store_true", help="say of each entry how many rows there are, and stop"
    )
    parser.add_argument(
        "--minutes", type=amount, default=60.0, help="end after so many, measuring included (60)"
    )
    parser.add_argument(
        "--at-once",
        type=count,
        metavar="N",
        help="train so many runs at the same time (several small ones on a GPU, one on a CPU)",
    )
    parser.add_argument("--seeds", type=_seeds, metavar="0,1", help="these seeds alone")
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="folder above the data sets' ($GROWLAB_DATA)"
    )
    parser.add_argument("--runs", type=Path, metavar="DIR", default=Path("runs"), help="where runs go (runs)")
    parser.add_argument(
        "--dry-run", action="store_true", help="measure a few steps, say what it takes, and stop"
    )
    parser.add_argument("--page", type=Path, metavar="DIR", help="make the docs' page from the rows in DIR")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="of --page")
    return parser


def _seeds(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) < _SEEDS for part in parts):
        raise argparse.ArgumentTypeError(
            f"{text} is no list of seeds, numbers from 0 to {_SEEDS - 1}, such as 0,1"
        )
    return [int(part) for part in parts]


def _run(arguments: argparse.Namespace, end: float, signals: EndingSignals) -> None:
    known = registry()
    if arguments.output is not None and arguments.page is None:
        raise UserError(
            "-o goes with --page; tables and figures of NAME go beside the runs, where --runs says."
        )
    if arguments.page is not None:
        if arguments.name is not None or arguments.list or arguments.dry_run:
            raise UserError(
                "--page makes a page of rows that are there: leave NAME, --list and --dry-run out."
            )
        from growlab.recipes.papers.page import page

        text = page(known, arguments.page)
        if arguments.output is None:
            print(text, end="")
        else:
            write_text(arguments.output, text)
        return
    items = [known.find(arguments.name)] if arguments.name else list(known.items.values())
    if arguments.list:
        _list(known, items, arguments)
        return
    _check_writable(arguments.runs)
    if arguments.name:
        _reproduce(known, items[0], arguments, end, signals)
    else:
        _everything(known, arguments, end, signals)


def _check_writable(runs: Path) -> None:
    """Refuse a folder before anything is measured or trained for it."""
    try:
        runs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=runs):
            return
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"{runs} cannot take runs: {reason}; name another folder with --runs.") from error


def _list(known: Registry, items: Sequence[Item], arguments: argparse.Namespace) -> None:
    from growlab.recipes.papers.page import standings

    place = Place(arguments.runs, arguments.data, ())
    results = _RESULTS if _RESULTS.is_dir() else None
    for standing in standings(known, results, arguments.seeds):
        item = standing.item
        if item in items:
            jobs = item.jobs(arguments.seeds)
            here = sum(map(place.done, jobs))
            print(f"{item.name:30s} {here:3d} of {len(jobs):3d} in {place.runs}; kept: {standing.rows_text}")
            print(f"{'':30s} {standing.verdict}")


def _everything(known: Registry, arguments: argparse.Namespace, end: float, signals: EndingSignals) -> None:
    """One entry after the other within the time; those without data are told and passed over."""
    for item in known.items.values():
        if time.monotonic() >= end:
            return
        try:
            _reproduce(known, item, arguments, end, signals)
        except UserError as error:
            print(f"{item.name}: {error}", file=sys.stderr)


def _reproduce(
    known: Registry, item: Item, arguments: argparse.Namespace, end: float, signals: EndingSignals
) -> None:
    """Train what is missing of an entry until `end` of the monotonic clock, and tell what is there then."""
    paper = known.papers[item.paper]
    place = Place(arguments.runs, arguments.data, device(paper), _RESULTS / UNFINISHED)
    at_once = arguments.at_once or runs_at_once(item, paper)
    absent = place.without_data(known, item.data)
    if item.data and len(absent) == len(item.data):
        raise UserError(next(iter(absent.values())))
    left = [job for job in missing(item, place, arguments.seeds) if job.data not in absent]
    print(f"{item.title}\n{item.claim}")
    for name, sentence in absent.items():
        waiting = sum(job.data == name for job in item.jobs(arguments.seeds))
        print(f"{waiting} run{'' if waiting == 1 else 's'} left out: {sentence}", file=sys.stderr)
    if left and item.minutes is not None:
        print(f"{_to_go(left, min(at_once, len(left)))}, {item.minutes:g} minutes of one CPU core each")
    elif left:
        # Measuring is part of the time, at most half of it where training is to follow.
        until = end if arguments.dry_run else (time.monotonic() + end) / 2
        at_most = forecast(left, place, known, min(at_once, len(left)), until, signals)
        print(f"{_to_go(left, min(at_once, len(left)))}: {_told(at_most)}", flush=True)
    if arguments.dry_run:
        return
    finished, failed, elsewhere = train(left, place, known, (end - time.monotonic()) / 60, at_once, signals)
    jobs = item.jobs(arguments.seeds)
    print(f"{sum(map(place.done, jobs))} of {len(jobs)} runs are there")
    if elsewhere:
        of = "1 run is" if len(elsewhere) == 1 else f"{len(elsewhere)} runs are"
        print(f"{of} left to another process, which is at work there")
    if finished + len(failed) + len(elsewhere) < len(left):
        print(
            "the same command goes on"
            if item.minutes is None
            else f"it is not saved on its way: the same command begins anew, and needs {item.minutes:g} minutes a run"
        )
    _tell(item, place, arguments.seeds)
    signals.check()
    if failed:
        these = f"{len(failed)} runs" if len(failed) > 1 else "1 run"
        raise UserError(f"{these} failed, for reasons that stand above: {'; '.join(failed)}.")


def _to_go(left: Sequence[Job], at_once: int) -> str:
    number = f"{len(left)} run{'' if len(left) == 1 else 's'} to go"
    return f"{number}, {at_once} at the same time" if at_once > 1 else number


def _told(at_most: Forecast) -> str:
    """What a forecast says, and what it does not know."""
    hours = at_most.seconds / 3600
    minutes = max(round(60 * hours), 1)
    known = f"{hours:.1f} hours" if hours >= 1 else f"{minutes} minute{'' if minutes == 1 else 's'}"
    measured = f"{known} here at most, by a few steps at full width"
    if not at_most.unknown:
        return measured
    networks = "; ".join(map(" ".join, at_most.unknown))
    unknown = f"the time was too short to measure a few steps of {networks}"
    return f"{measured}, for {at_most.num_known} of them; {unknown}" if at_most.num_known else unknown


def _tell(item: Item, place: Place, seeds: Sequence[int] | None = None) -> None:
    """The rows that are there beside the published ones, as a table and as the figures that can be drawn.

    Of the seeds that the commands name, and of those that are asked for.
    """
    from growlab.lab.analysis import figures
    from growlab.lab.analysis.paper_table import paper_table
    from growlab.lab.analysis.results import load_runs
    from growlab.lab.analysis.table_text import write_table
    from growlab.lab.analysis.tables import summarise

    jobs = dict.fromkeys([*item.jobs(), *item.jobs(seeds)])
    done = [job for job in jobs if place.done(job) and not job.is_study]
    if not done:
        return
    rows = summarise(load_runs([place.runs / job.folder for job in done]))
    text = paper_table(rows, unmeasured=True).markdown() if item.table else write_table(rows, "markdown")
    path = place.runs / f"{item.name}.md"
    write_text(path, text)
    print(f"{text}\n{path}")
    for figure in item.figures:
        name, overrides = drawn(figure)
        shown = [place.runs / job.folder for job in done if set(overrides) <= set(job.overrides)]
        if shown:
            named = "_".join([item.name, name, *(one.partition("=")[2] for one in overrides)])
            try:
                print(figures.save(figures.find(name)(load_runs(shown), None), place.runs / f"{named}.png"))
            except UserError as error:
                print(f"{named}: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())

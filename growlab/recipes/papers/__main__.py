"""`python -m growlab reproduce [NAME]` trains what is missing of the papers' tables and figures; --list names them."""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from growlab.base.command_parser import CommandParser, amount, count
from growlab.base.errors import UserError
from growlab.base.files import write_text
from growlab.lab.analysis.results import Run, open_run
from growlab.recipes.papers.registry import Item, Job, Registry, drawn, registry
from growlab.recipes.papers.runs import Place, Training, device, runs_at_once

_RESULTS = Path("notebooks", "results")
# Seeds of numpy end here.
_SEEDS = 2**32


class _Ended(Exception):
    """A signal ended the command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`.

    Returns:
        The exit code: 2 after one sentence on stderr; 128 and the number of a signal that ended it, as in a shell.
    """
    started = time.monotonic()
    try:
        arguments = _parser().parse_args(sys.argv[1:] if argv is None else argv)
        _run(arguments, started + 60 * arguments.minutes)
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, _Ended) as ended:
        number = ended.args[0] if isinstance(ended, _Ended) else signal.SIGINT
        print(f"{signal.Signals(number).name}; the same command resumes", file=sys.stderr)
        return 128 + number
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="growlab reproduce",
        description="Train what is missing of a table or figure of the papers, resumable, and write its rows beside "
        "the published ones. Without NAME: one entry after the other, as far as data are there.",
        epilog="Example: growlab reproduce table2 --minutes 60",
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="a table or figure; --list names them")
    parser.add_argument(
        "--list", action="store_true", help="print the number of rows of each entry, and stop"
    )
    parser.add_argument("--minutes", type=amount, default=60.0, help="save and end after so many (60)")
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
    parser.add_argument(
        "--runs", type=Path, metavar="DIR", default=Path("runs"), help="folder of runs (runs)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="estimate the time from runs that have finished, and stop"
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


def _run(arguments: argparse.Namespace, end: float) -> None:
    known = registry()
    if arguments.output is not None and arguments.page is None:
        raise UserError("-o goes with --page; the table and figures of NAME are written into --runs.")
    if arguments.page is not None:
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
    for item in items:
        try:
            if time.monotonic() < end:
                _reproduce(known, item, arguments, end)
        except UserError as error:
            if arguments.name:
                raise
            print(f"{item.name}: {error}", file=sys.stderr)


def _check_writable(runs: Path) -> None:
    """Refuse a folder before anything is trained for it."""
    try:
        runs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=runs):
            return
    except OSError as error:
        raise UserError(f"{runs} cannot take runs: {error.strerror}; name another with --runs.") from error


def _list(known: Registry, items: Sequence[Item], arguments: argparse.Namespace) -> None:
    from growlab.recipes.papers.page import standings

    place = Place(arguments.runs)
    results = _RESULTS if _RESULTS.is_dir() else None
    for standing in standings(known, results, arguments.seeds):
        item = standing.item
        if item in items:
            jobs = item.jobs(arguments.seeds)
            here = sum(map(place.done, jobs))
            print(f"{item.name:30s} {here:3d} of {len(jobs):3d} in {place.runs}; kept: {standing.rows_text}")
            print(f"{'':30s} {standing.verdict}")


def _reproduce(known: Registry, item: Item, arguments: argparse.Namespace, end: float) -> None:
    """Train what is missing of an entry until `end` of the monotonic clock, and write what is there then."""
    paper = known.papers[item.paper]
    place = Place(arguments.runs, arguments.data, device(paper))
    jobs = item.jobs(arguments.seeds)
    absent: dict[str, str] = {}
    for name in item.data:
        try:
            place.root(known, name)
        except UserError as error:
            absent[name] = str(error)
    if item.data and len(absent) == len(item.data):
        raise UserError(next(iter(absent.values())))
    left = [job for job in jobs if not place.done(job) and job.data not in absent]
    # Runs that have begun come first.
    left.sort(key=lambda job: not (place.runs / job.folder).is_dir())
    print(f"{item.title}\n{item.claim}")
    for name, sentence in absent.items():
        print(f"{sum(job.data == name for job in jobs)} run(s) left out: {sentence}", file=sys.stderr)
    at_once = min(arguments.at_once or runs_at_once(item, paper), max(len(left), 1))
    if left:
        together = f", {at_once} at the same time" if at_once > 1 else ""
        print(f"{len(left)} run(s) to go{together}: {_estimate(item, left, place, at_once)}", flush=True)
    if arguments.dry_run:
        return
    training = Training(place, known, at_once)
    with _signals(training) as received:
        failed = training.train(left, end - time.monotonic())
    # A terminal that has closed takes no output.
    if signal.SIGHUP not in received:
        print(f"{sum(map(place.done, jobs))} of {len(jobs)} runs are there")
        if training.stopped:
            print("the same command resumes" if item.minutes is None else "the same command starts it again")
        _tell(item, place, arguments.seeds)
    if received:
        raise _Ended(received[0])
    if failed:
        raise UserError(f"{len(failed)} run(s) failed, for the reasons above: {'; '.join(failed)}.")


@contextmanager
def _signals(training: Training) -> Iterator[list[int]]:
    """Inside, SIGINT, SIGTERM and SIGHUP stop the training and are listed; `nohup` stays in force."""
    received: list[int] = []

    def stop(number: int, frame: object) -> None:
        received.append(number)
        training.stop()

    numbers = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN
    ]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _estimate(item: Item, left: Sequence[Job], place: Place, at_once: int) -> str:
    """Time that the missing runs take, from the mean seconds of an epoch in finished runs of the entry."""
    if item.minutes is not None:
        return f"{item.minutes:g} minutes of one CPU core each"
    here = [open_run(place.runs / job.folder) for job in item.jobs() if place.done(job)]
    paces = [pace for run in here if (pace := _seconds_per_epoch(run))]
    if not paces:
        return "no finished run in this folder to estimate their time from"
    minutes = sum(paces) / len(paces) * sum(job.epochs or 0 for job in left) / at_once / 60
    return f"about {minutes / 60:.1f} hours at the pace of {len(paces)} finished run(s)"


def _seconds_per_epoch(run: Run) -> float:
    return (run.results.get("seconds") or 0.0) / run.results.get("epochs", 1)


def _tell(item: Item, place: Place, seeds: Sequence[int] | None = None) -> None:
    """Write finished runs beside the published values, as a table and as the figures that can be drawn.

    Of the seeds that the commands name, and of those that are asked for.
    """
    from growlab.lab.analysis import figures
    from growlab.lab.analysis.results import load_runs
    from growlab.lab.analysis.tables import summarise, write_table
    from growlab.recipes.papers.paper_table import paper_table

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

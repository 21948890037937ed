"""`growlab reproduce [NAME]`: train the missing runs of the papers' tables and figures; `--list` names them."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any

import yaml

from growlab.base.command_parser import CommandParser, amount, count, in_columns
from growlab.base.errors import UserError
from growlab.base.files import FAILURE, write_text
from growlab.lab.analysis.results import open_run
from growlab.lab.data.loaders import cores
from growlab.lab.training.processes import is_locked, path_override
from growlab.recipes.papers.registry import Item, Job, Registry, drawn, registry


@dataclass(frozen=True)
class Place:
    """Folders of the runs and their data, and the device.

    Attributes:
        data: parent folder of the data sets; None: $GROWLAB_DATA, else ~/.cache/growlab.
        device: overrides that select the device.
    """

    runs: Path
    data: Path | None = None
    device: tuple[str, ...] = ()

    def root(self, registry: Registry, name: str) -> Path | None:
        """Return the folder of a data set; None for one without files."""
        about = registry.data[name]
        if about.get("built_in"):
            return None
        above = self.data or Path(os.environ.get("GROWLAB_DATA") or Path.home() / ".cache" / "growlab")
        for folder in (above / other for other in (name, *about.get("also", ()))):
            if folder.is_dir() and any(folder.iterdir()):
                return folder
        raise UserError(
            f"{name} is not in {above}: name the folder above it with --data, or try to download it with growlab "
            f"data={name}."
        )

    def done(self, job: Job) -> bool:
        """True if a job has a result."""
        folder = self.runs / job.folder
        return (folder / "results.json").is_file() or (job.is_study and (folder / "summary.json").is_file())


def command(job: Job, place: Place, registry: Registry, num_threads: int | None = None) -> list[str]:
    """Return the command line of a job: a sweep of one run, which is resumed, or skipped if done.

    A started run keeps its precision on whatever machine it is resumed.
    """
    root = None if job.data is None else place.root(registry, job.data)
    experiment, _, folder = job.folder.partition("/")
    config = place.runs / job.folder / "config.yaml"
    device = list(place.device)
    if config.is_file():
        precision = yaml.safe_load(config.read_text(encoding="utf-8"))["trainer"]["precision"]
        device.append(f"trainer.precision={precision}")
    return [
        *(sys.executable, "-m", "growlab", "-m", f"experiment={job.experiment}", *job.overrides),
        *([] if root is None else [path_override("data.root", root.resolve())]),
        *([] if job.is_study else [*device, "ckpt_path=last"]),
        *([] if num_threads is None or job.is_study else [f"num_threads={num_threads}"]),
        "hydra.sweeper.params=null",
        path_override("hydra.sweep.dir", (place.runs / experiment).resolve()),
        f"hydra.sweep.subdir='{folder}'",
    ]


class Training:
    """Trains jobs until `stop`, which lets running ones save and end.

    A failed job does not stop the others, because some runs of a sweep over learning rates diverge. A job that another
    process trains is skipped.
    """

    def __init__(self, place: Place, registry: Registry, at_once: int = 1) -> None:
        self.stopped = False
        self._place, self._registry, self._at_once = place, registry, at_once
        self._running: set[subprocess.Popen[bytes]] = set()

    def stop(self) -> None:
        """Start no further jobs; running ones save at the end of their step."""
        self.stopped = True
        for process in tuple(self._running):
            process.terminate()

    def train(self, jobs: Sequence[Job], seconds: float) -> list[str]:
        """Train jobs in this order and return the folders of those that failed."""
        deadline = Timer(max(seconds, 0.0), self.stop)
        deadline.start()
        try:
            with ThreadPoolExecutor(self._at_once) as pool:
                return [folder for folder in pool.map(self._failed, jobs) if folder]
        finally:
            deadline.cancel()

    def _failed(self, job: Job) -> str | None:
        """Train a job; return its folder if it failed."""
        if self.stopped:
            return None
        folder = self._place.runs / job.folder
        if is_locked(folder):
            print(f"{job.folder}: another process is training it", flush=True)
            return None
        print(job.folder, flush=True)
        threads = None if self._at_once == 1 else max(1, cores() // self._at_once)
        # In a separate session, so that Ctrl-C and a closing terminal reach it only through `stop`.
        with subprocess.Popen(
            command(job, self._place, self._registry, threads),
            stdout=subprocess.DEVNULL,
            stderr=None if self._at_once == 1 else subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            self._running.add(process)
            if self.stopped:
                process.terminate()
            code = process.wait()
            self._running.discard(process)
        if self.stopped or self._place.done(job) or is_locked(folder):
            return None
        path = folder / FAILURE
        reason = f": {json.loads(path.read_text(encoding='utf-8'))['reason']}" if path.is_file() else ""
        print(f"{job.folder} failed (exit code {code}){reason}", flush=True)
        return job.folder


def device(about: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the overrides for a GPU, or for a CPU, in bfloat16 if that is faster than float32."""
    import torch  # --list need not wait for it

    if torch.cuda.is_available():
        return tuple(about.get("gpu", ()))
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    fast = any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))
    return ("trainer=cpu", *(about.get("cpu_bfloat16", ()) if fast else ()))


# The largest seed of numpy.
_SEEDS = 2**32


class _Ended(Exception):
    """A signal ended the command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 2 after a sentence on stderr, 128 + N after signal N."""
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
        description="Train the missing runs of a table or figure of the papers, resumable, and write our results "
        "next to the published ones. Without NAME: every entry whose data are present, one after the other.",
        epilog="Example: growlab reproduce table2 --minutes 60",
        allow_abbrev=False,
    )
    add, folder = parser.add_argument, dict[str, Any](type=Path, metavar="DIR")
    add("name", metavar="NAME", nargs="?", help="a table or figure; --list names them")
    add("--list", action="store_true", help="print the number of finished runs of each entry, and stop")
    add("--minutes", type=amount, default=60.0, help="save and end after this many minutes (60)")
    at_once = "number of runs to train at the same time (several small ones on a GPU, one on a CPU)"
    add("--at-once", type=count, metavar="N", help=at_once)
    add("--seeds", type=_seeds, metavar="0,1", help="only these seeds")
    add("--data", **folder, help="folder that contains the data sets ($GROWLAB_DATA)")
    add("--runs", **folder, default=Path("runs"), help="folder of runs (runs)")
    add("--dry-run", action="store_true", help="estimate the time from runs that have finished, and stop")
    return parser


def _seeds(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) < _SEEDS for part in parts):
        raise argparse.ArgumentTypeError(f"{text} is not a list of seeds, numbers from 0 to {_SEEDS - 1}, such as 0,1")
    return [int(part) for part in parts]


def _run(arguments: argparse.Namespace, end: float) -> None:
    known = registry()
    items = [known.find(arguments.name)] if arguments.name else list(known.items.values())
    if arguments.list:
        place = Place(arguments.runs)
        print(f"finished runs in {place.runs}:")
        for item in items:
            jobs = item.jobs(arguments.seeds)
            there = f"{item.name:30s} {sum(map(place.done, jobs)):3d} of {len(jobs):3d}  "
            print(in_columns(f"{there}{item.title}", hanging=len(there)))
        return
    arguments.runs.mkdir(parents=True, exist_ok=True)
    for item in items:
        try:
            if time.monotonic() < end:
                _reproduce(known, item, arguments, end)
        except UserError as error:
            if arguments.name:
                raise
            print(f"{item.name}: {error}", file=sys.stderr)


def _reproduce(known: Registry, item: Item, arguments: argparse.Namespace, end: float) -> None:
    """Train the missing runs of an entry until `end` (monotonic clock), then write its results."""
    paper = known.papers[item.paper]
    place = Place(arguments.runs, arguments.data, device(paper))
    jobs = item.jobs(arguments.seeds)
    absent: dict[str | None, UserError] = {}
    for name in item.data:
        try:
            place.root(known, name)
        except UserError as error:
            absent[name] = error
    if item.data and len(absent) == len(item.data):
        raise next(iter(absent.values()))
    left = [job for job in jobs if not place.done(job) and job.data not in absent]
    # Interrupted runs first.
    left.sort(key=lambda job: not (place.runs / job.folder).is_dir())
    print(f"{item.title}\n{item.claim}")
    for absentee, sentence in absent.items():
        print(f"{sum(job.data == absentee for job in jobs)} run(s) left out: {sentence}", file=sys.stderr)
    default = 1 if "trainer=cpu" in place.device else item.gpu_runs or paper.get("gpu_runs", 1)
    at_once = min(arguments.at_once or default, max(len(left), 1))
    if left:
        together = f", {at_once} at the same time" if at_once > 1 else ""
        print(f"{len(left)} run(s) to go{together}: {_estimate(item, left, place, at_once)}", flush=True)
    if arguments.dry_run:
        return
    training = Training(place, known, at_once)
    with _signals(training) as received:
        failed = training.train(left, end - time.monotonic())
    # The terminal may have been closed.
    if signal.SIGHUP not in received:
        print(f"{sum(map(place.done, jobs))} of {len(jobs)} runs are done")
        if training.stopped:
            print("the same command resumes" if item.minutes is None else "the same command starts it again")
        _write_results(item, place, arguments.seeds)
    if received:
        raise _Ended(received[0])
    if failed:
        raise UserError(f"{len(failed)} run(s) failed, for the reasons above: {'; '.join(failed)}.")


@contextmanager
def _signals(training: Training) -> Iterator[list[int]]:
    """Within the context, SIGINT, SIGTERM and SIGHUP stop the training and are listed, unless ignored by `nohup`."""
    received: list[int] = []

    def stop(number: int, frame: object) -> None:
        received.append(number)
        training.stop()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers if signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _estimate(item: Item, left: Sequence[Job], place: Place, at_once: int) -> str:
    """Estimate the time of the missing runs from the mean seconds per epoch of the entry's finished runs."""
    if item.minutes is not None:
        return f"{item.minutes:g} minutes of one CPU core each"
    runs = [open_run(place.runs / job.folder) for job in item.jobs() if place.done(job)]
    paces = [run.results["seconds"] / run.results["epochs"] for run in runs if run.results.get("seconds")]
    if not paces:
        return "no finished run in this folder to estimate their time from"
    minutes = sum(paces) / len(paces) * sum(job.epochs or 0 for job in left) / at_once / 60
    return f"about {minutes / 60:.1f} hours at the pace of {len(paces)} finished run(s)"


def _write_results(item: Item, place: Place, seeds: Sequence[int] | None = None) -> None:
    """Write a table of finished runs with the published values, and the figures that can be drawn.

    It includes runs with the commands' seeds and with the requested ones.
    """
    from growlab.lab.analysis import figures
    from growlab.lab.analysis.results import load_runs
    from growlab.lab.analysis.tables import summarise, table
    from growlab.recipes.papers.paper_table import paper_table

    jobs = dict.fromkeys([*item.jobs(), *item.jobs(seeds)])
    done = [job for job in jobs if place.done(job) and not job.is_study]
    if not done:
        return
    rows = summarise(load_runs([place.runs / job.folder for job in done]))
    grid = paper_table(rows, unmeasured=True) if item.table else table(rows)
    path = place.runs / f"{item.name}.md"
    write_text(path, grid.markdown())
    print(f"{grid.shown()}\n{path}")
    for figure in item.figures:
        name, overrides = drawn(figure)
        shown = [place.runs / job.folder for job in done if set(overrides) <= set(job.overrides)]
        if shown:
            stem = "_".join([item.name, name, *(override.partition("=")[2] for override in overrides)])
            try:
                print(figures.save(figures.find(name)(load_runs(shown), None), place.runs / f"{stem}.png"))
            except UserError as error:
                print(f"{stem}: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())

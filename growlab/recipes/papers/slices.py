"""Training what is missing of an entry, one run after the other, in slices that end by themselves."""

import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import yaml

from growlab.base.errors import UserError
from growlab.base.files import CHECKPOINT_FOLDER
from growlab.lab.training.processes import path_override
from growlab.lab.training.run_folder import is_held
from growlab.recipes.papers.registry import Item, Job, Registry
from growlab.recipes.papers.stopping import EndingSignals, hangup_blocked

# A run that is asked to stop saves at the end of its step.
_SAVING_SEC = 300
POLL_SEC = 0.2


@dataclass(frozen=True)
class Place:
    """Where runs go, where their data lie and what they run on.

    Attributes:
        runs: the folder of all runs.
        data: folder above the data sets' own; None: $GROWLAB_DATA, else ~/.cache/growlab.
        device: overrides that choose it.
        begun: a folder like `runs` with runs that others have begun and that go on here; None: there is none.
    """

    runs: Path
    data: Path | None
    device: tuple[str, ...]
    begun: Path | None = None

    def root(self, registry: Registry, name: str) -> Path | None:
        """The folder of a data set; None for one that growlab brings along.

        Raises:
            UserError: it is not there.
        """
        about = registry.data[name]
        if about.get("built_in"):
            return None
        above = self._above()
        for folder in (above / other for other in (name, *about.get("also", ()))):
            if folder.is_dir() and any(folder.iterdir()):
                return folder
        raise UserError(
            f"{name} is not in {above}: name the folder above it with --data, or let growlab download it once, "
            f"python -m growlab data={name}, where it can."
        )

    def num_train(self, registry: Registry, name: str) -> int:
        """Number of training samples of a data set as it lies here.

        Raises:
            UserError: it is not there.
        """
        about = registry.data[name]
        root = self.root(registry, name)
        shorter: Mapping[str, int] = about.get("also", {})
        return int(about["num_train"] if root is None else shorter.get(root.name, about["num_train"]))

    def without_data(self, registry: Registry, names: Iterable[str]) -> dict[str, str]:
        """Those data sets that are not there, and the sentence that says so of each."""
        told = {}
        for name in names:
            try:
                self.root(registry, name)
            except UserError as error:
                told[name] = str(error)
        return told

    def _above(self) -> Path:
        return self.data or Path(os.environ.get("GROWLAB_DATA") or Path.home() / ".cache" / "growlab")

    def done(self, job: Job) -> bool:
        """Whether a job has left its result."""
        folder = self.runs / job.folder
        return (folder / "results.json").is_file() or (job.is_study and (folder / "summary.json").is_file())

    def has_begun(self, job: Job) -> bool:
        """Whether a job has left a state to go on from, here or elsewhere."""
        places = (self.runs, self.begun) if self.begun is not None else (self.runs,)
        return any((folder / job.folder / CHECKPOINT_FOLDER).is_dir() for folder in places)


def command(job: Job, place: Place, registry: Registry) -> list[str]:
    """The command line of one job: alone in a sweep, so that it goes on where it was and is skipped when done."""
    root = None if job.data is None else place.root(registry, job.data)
    experiment, _, folder = job.folder.partition("/")
    return [
        *(sys.executable, "-m", "growlab", "-m", f"experiment={job.experiment}", *job.overrides),
        *([] if root is None else [path_override("data.root", root.resolve())]),
        *([] if job.is_study else [*_on_device(job, place), "ckpt_path=last"]),
        "hydra.sweeper.params=null",
        path_override("hydra.sweep.dir", (place.runs / experiment).resolve()),
        f"hydra.sweep.subdir='{folder}'",
    ]


def _on_device(job: Job, place: Place) -> list[str]:
    """Overrides that choose the device; a run that has begun keeps its precision, on whatever machine it goes on."""
    known = place.runs / job.folder / "config.yaml"
    chosen = list(place.device)
    if known.is_file():
        precision = yaml.safe_load(known.read_text(encoding="utf-8"))["trainer"]["precision"]
        chosen = [word for word in chosen if not word.startswith("trainer.precision=")]
        chosen.append(f"trainer.precision={precision}")
    return chosen


def share_of_cores(at_once: int) -> list[str]:
    """Overrides that let runs at the same time share the processor's cores."""
    return [] if at_once == 1 else [f"num_threads={max(1, len(os.sched_getaffinity(0)) // at_once)}"]


class Trained(NamedTuple):
    """What came of jobs.

    Attributes:
        finished: how many have ended with a result.
        failed: folders of those that failed.
        elsewhere: folders of those that another process is at work on.
    """

    finished: int
    failed: list[str]
    elsewhere: list[str]


def train(
    jobs: Sequence[Job],
    place: Place,
    registry: Registry,
    minutes: float,
    at_once: int = 1,
    signals: EndingSignals | None = None,
) -> Trained:
    """Train jobs, so many at the same time, until the time is over; those that are then at work save and end.

    A job that fails leaves the others alone: of a sweep over learning rates some diverge. So does one that another
    process is at work on, which is left to that.

    Args:
        jobs: to be trained, in this order.
        place: where they go.
        registry: of the data sets.
        minutes: until no run begins and those at work are asked to save and end.
        at_once: how many train at the same time.
        signals: that end the time too; None: there are none.

    Raises:
        UserError: data is missing.
    """
    end, finished = time.monotonic() + 60 * minutes, 0
    failed, elsewhere = list[str](), list[str]()
    waiting, running = deque(jobs), dict[Job, _Run]()
    signals = EndingSignals() if signals is None else signals
    with signals.awaited():
        try:
            while (waiting or running) and time.monotonic() < end and not signals.came:
                while waiting and len(running) < at_once:
                    job = waiting.popleft()
                    if _at_work_elsewhere(job, place):
                        elsewhere.append(job.folder)
                    else:
                        running[job] = _start(job, place, registry, at_once)
                ended = {job: code for job, run in running.items() if (code := run.code()) is not None}
                if not ended:
                    time.sleep(POLL_SEC)
                for job, code in ended.items():
                    del running[job]
                    if place.done(job):
                        finished += 1
                    elif _at_work_elsewhere(job, place):
                        # Both have begun in the same moment.
                        elsewhere.append(job.folder)
                    else:
                        failed.append(job.folder)
                        print(f"{job.folder} failed (exit code {code})", flush=True)
        finally:
            _end(list(running.values()), signals)
    return Trained(finished, failed, elsewhere)


def _at_work_elsewhere(job: Job, place: Place) -> bool:
    """Whether another process is at work on a job, which is then told."""
    held = is_held(place.runs / job.folder)
    if held:
        print(f"{job.folder}: another process is at work on it", flush=True)
    return held


def _end(running: Sequence["_Run"], signals: EndingSignals) -> None:
    """Let runs save and end, and hand them the signals that come while they do; kill those that take too long."""
    last, told = time.monotonic() + _SAVING_SEC, len(signals.received)
    for run in running:
        run.send(signal.SIGTERM)
    while (left := [run for run in running if run.code() is None]) and time.monotonic() < last:
        new = signals.received[told:]
        told += len(new)
        for number in new:
            for run in left:
                run.send(number)
        time.sleep(POLL_SEC)
    for run in left:
        run.kill()


class _Run:
    """A job's run at work; of several at once each line that it tells says whose it is."""

    def __init__(self, job: Job, line: Sequence[str], named: bool) -> None:
        told = subprocess.PIPE if named else None
        with hangup_blocked():
            self._process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=told, text=True)
        self._teller = Thread(target=self._tell, args=(job.folder,), daemon=True)
        self._teller.start()

    def _tell(self, name: str) -> None:
        with self._process.stderr or io.StringIO() as lines:
            for line in lines:
                print(f"{name}: {line}", end="", file=sys.stderr, flush=True)

    def code(self) -> int | None:
        """The exit code, once it has ended and all lines are told."""
        if self._process.poll() is not None:
            self._teller.join()
        return self._process.returncode

    def send(self, number: int) -> None:
        """Send it a signal; SIGTERM lets it save and end."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it as it is."""
        self._process.kill()
        self._process.wait()
        self._teller.join()


def _start(job: Job, place: Place, registry: Registry, at_once: int) -> _Run:
    """Start a job's run, or let it go on."""
    begun, folder = place.begun and place.begun / job.folder, place.runs / job.folder
    if begun and begun.is_dir() and not folder.exists():
        _copy(begun, folder)
    line = command(job, place, registry)
    print(f"{job.folder}", flush=True)
    return _Run(job, [*line, *([] if job.is_study else share_of_cores(at_once))], named=at_once > 1)


def _copy(begun: Path, folder: Path) -> None:
    """Copy a run that others have begun; another process that does so at the same time does no harm."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as beside:
        whole = shutil.copytree(begun, Path(beside) / folder.name)
        try:
            whole.rename(folder)
        except OSError:
            # The other process has been faster.
            if not folder.is_dir():
                raise


def device(about: Mapping[str, Any]) -> tuple[str, ...]:
    """Overrides that choose the device: a GPU with what makes small networks fast there, or the CPU likewise."""
    # Imported here: a list of entries need not wait for torch.
    import torch

    if torch.cuda.is_available():
        return tuple(about.get("gpu", ()))
    fast = _multiplies_bfloat16(getattr(torch.cpu, "get_capabilities", dict)())
    return ("trainer=cpu", *(about.get("cpu_bfloat16", ()) if fast else ()))


def _multiplies_bfloat16(capabilities: Mapping[str, Any]) -> bool:
    """Whether a processor multiplies matrices in bfloat16 faster than in float32."""
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))


def runs_at_once(item: Item, about: Mapping[str, Any]) -> int:
    """How many runs of an entry train at the same time: several on a GPU that one leaves idle, one on a CPU."""
    import torch

    several = item.gpu_runs if item.gpu_runs is not None else about.get("gpu_runs", 1)
    return int(several) if torch.cuda.is_available() else 1


def missing(item: Item, place: Place, seeds: Sequence[int] | None) -> list[Job]:
    """Jobs of an entry that have no result yet, those that have begun first."""
    left = [job for job in item.jobs(seeds) if not place.done(job)]
    return sorted(left, key=lambda job: not place.has_begun(job))

"""Training what is missing of an entry, one run after the other, in slices that end by themselves."""

import csv
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import yaml

from growlab.errors import UserError
from growlab.files import CHECKPOINT_FOLDER
from growlab.processes import announce, in_folder, path_override
from growlab.reproduce.registry import Item, Job, Registry, experiment

# Steps that are measured, in the second of two epochs: the first one starts kernels and caches.
_STEPS = 4
# A run that is asked to stop saves at the end of its step.
_SAVING_SEC = 300
_POLL_SEC = 0.2
_FIXED_SIZE = (
    *("growth=none", "lr_adapt=none", "schedule.epochs=null", "schedule.widths=null"),
    *("schedule.batch_sizes=null", "schedule.total_epochs=2", f"trainer.limit_train_batches={_STEPS}"),
    *("data.validation=none", "data.limit_test=20", "log_layers_every_n_steps=null"),
    # Whatever the rate, a step takes as long; some rates that are swept make the loss infinite.
    "optimizer.lr=1e-9",
)


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


def measured_seconds(jobs: Sequence[Job], place: Place, registry: Registry, at_once: int = 1) -> float:
    """Seconds that training jobs take at most: each as if at full width all along, at the pace of a few real steps.

    One pace a network and width, of its widest job; of several runs at once that of them all.

    Raises:
        UserError: data is missing, or the steps failed.
    """
    networks = list(dict.fromkeys(map(network_of, jobs)))
    paces: dict[tuple[str, ...], float] = {}
    total = 0.0
    for job in jobs:
        assert job.data is not None and job.epochs is not None
        network = network_of(job)
        if network not in paces:
            announce(f"measuring a few steps of {' '.join(network)}, {len(paces) + 1} of {len(networks)}")
            paces[network] = _samples_per_sec(job, network, place, registry, at_once)
        total += job.epochs * place.num_train(registry, job.data) / paces[network]
    return total


def network_of(job: Job) -> tuple[str, ...]:
    """The experiment of a job and the overrides that its pace depends on; data that arrives is there at once."""
    kept = [o for o in job.overrides if o.startswith(("model", "data="))]
    data = experiment(job.experiment).data
    at_once = [f"data={job.data}"] if data != job.data and data.endswith("_incremental") else []
    return (job.experiment, *at_once, *(o for o in kept if not o.startswith("model.initialisation")))


def measuring(network: Sequence[str]) -> list[str]:
    """Overrides of a run of a few steps of an experiment's network, its first word, at full width."""
    return [f"experiment={network[0]}", *network[1:], *_FIXED_SIZE, "ckpt_path=null"]


def _samples_per_sec(
    job: Job, network: tuple[str, ...], place: Place, registry: Registry, at_once: int
) -> float:
    assert job.data is not None
    root = place.root(registry, job.data)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(at_once) as threads:
        places = [Path(folder) / str(number) for number in range(at_once)]
        lines = [
            [
                *(sys.executable, "-m", "growlab", *measuring(network)),
                *([] if root is None else [path_override("data.root", root.resolve())]),
                *(*place.device, *_share_of_cores(at_once), in_folder(own)),
            ]
            for own in places
        ]
        quiet = partial(subprocess.run, capture_output=True, text=True, check=False)
        for ended in threads.map(quiet, lines):
            if ended.returncode != 0:
                reason = ended.stderr.strip().splitlines()[-1:] or ["it said nothing"]
                raise UserError(f"a few steps of {' '.join(network)} failed: {reason[0]}")
        return sum(map(_pace, places))


def _pace(run: Path) -> float:
    with (run / "metrics.csv").open(encoding="utf-8") as file:
        return float(list(csv.DictReader(file))[-1]["samples_per_sec"])


def _share_of_cores(at_once: int) -> list[str]:
    """Overrides that let runs at the same time share the processor's cores."""
    return [] if at_once == 1 else [f"num_threads={max(1, len(os.sched_getaffinity(0)) // at_once)}"]


def train(
    jobs: Sequence[Job], place: Place, registry: Registry, minutes: float, at_once: int = 1
) -> tuple[int, list[str]]:
    """Train jobs, so many at the same time, until the time is over; those that are then at work save and end.

    A job that fails leaves the others alone: of a sweep over learning rates some diverge.

    Returns:
        How many have ended with a result, and the folders of those that failed.

    Raises:
        UserError: data is missing.
    """
    end, finished, failed = time.monotonic() + 60 * minutes, 0, list[str]()
    waiting, running = deque(jobs), dict[Job, _Run]()
    try:
        while (waiting or running) and time.monotonic() < end:
            while waiting and len(running) < at_once:
                job = waiting.popleft()
                running[job] = _start(job, place, registry, at_once)
            ended = {job: code for job, run in running.items() if (code := run.code()) is not None}
            if not ended:
                time.sleep(_POLL_SEC)
            for job, code in ended.items():
                del running[job]
                if place.done(job):
                    finished += 1
                else:
                    failed.append(job.folder)
                    print(f"{job.folder} failed (exit code {code})", flush=True)
    finally:
        for run in running.values():
            run.ask_to_stop()
        last = time.monotonic() + _SAVING_SEC
        for run in running.values():
            run.end(last)
    return finished, failed


class _Run:
    """A job's run at work; of several at once each line that it tells says whose it is."""

    def __init__(self, job: Job, line: Sequence[str], named: bool) -> None:
        told = subprocess.PIPE if named else None
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

    def ask_to_stop(self) -> None:
        """Let it save and end."""
        self._process.send_signal(signal.SIGTERM)

    def end(self, last: float) -> None:
        """Wait for its end until `last` of the monotonic clock, then kill it."""
        try:
            self._process.wait(timeout=max(0.0, last - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._teller.join()


def _start(job: Job, place: Place, registry: Registry, at_once: int) -> _Run:
    """Start a job's run, or let it go on."""
    begun, folder = place.begun and place.begun / job.folder, place.runs / job.folder
    if begun and begun.is_dir() and not folder.exists():
        shutil.copytree(begun, folder)
    line = command(job, place, registry)
    print(f"{job.folder}", flush=True)
    return _Run(job, [*line, *([] if job.is_study else _share_of_cores(at_once))], named=at_once > 1)


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

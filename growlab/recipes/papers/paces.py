"""How long the runs of an entry take on this machine, by a few real steps of each of its networks."""

import csv
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from growlab.base.errors import UserError
from growlab.base.files import write_json
from growlab.lab.training.processes import in_folder, path_override
from growlab.recipes.papers.matching import settings_of
from growlab.recipes.papers.registry import Job, Registry, experiment
from growlab.recipes.papers.slices import POLL_SEC, Place, share_of_cores
from growlab.recipes.papers.stopping import EndingSignals, hangup_blocked

# Steps that are measured, in the second of two epochs: the first one starts kernels and caches.
_STEPS = 4
# A run that is asked to stop ends at the end of its step.
_ENDING_SEC = 10
_STEPS_DEPEND_ON = ("model", "data", "optimizer")
_FIXED_SIZE = (
    *("growth=none", "lr_adapt=none", "schedule.epochs=null", "schedule.widths=null"),
    *("schedule.batch_sizes=null", "schedule.total_epochs=2", f"trainer.limit_train_batches={_STEPS}"),
    *("data.validation=none", "data.limit_test=20", "log_layers_every_n_steps=null"),
    # Whatever the rate, a step takes as long; some rates that are swept make the loss infinite.
    "optimizer.lr=1e-9",
)

Network = tuple[str, ...]


@dataclass(frozen=True)
class Forecast:
    """How long jobs take at most.

    Attributes:
        seconds: of those whose pace is known.
        num_known: how many these are.
        unknown: networks of the others, which there was no time to measure.
    """

    seconds: float
    num_known: int
    unknown: tuple[Network, ...]


def forecast(
    jobs: Sequence[Job], place: Place, registry: Registry, at_once: int, end: float, signals: EndingSignals
) -> Forecast:
    """Seconds that training jobs take at most: each as if at full width all along, at the pace of a few real steps.

    One pace a network and width, of the first job whose steps are such; of several runs at once that of them all. A
    pace is kept below the runs, and not measured again on the same machine.

    Args:
        jobs: to be trained.
        place: where they go and what they run on.
        registry: of the data sets.
        at_once: how many train at the same time.
        end: of the monotonic clock, when measuring stops.
        signals: that stop it too.

    Raises:
        UserError: data is missing, or the steps failed.
        Ended: a signal came.
    """
    # Jobs whose steps are the same share a pace, whatever the experiments' names.
    networks: dict[str, Network] = {}
    for network in map(network_of, jobs):
        networks.setdefault(_steps(network), network)
    kept = _Kept(place, at_once)
    unknown: dict[str, Network] = {}
    for number, (steps, network) in enumerate(networks.items(), start=1):
        if network in kept:
            continue
        if not unknown:
            print(
                f"measuring a few steps of {' '.join(network)}, {number} of {len(networks)}",
                file=sys.stderr,
                flush=True,
            )
            job = next(job for job in jobs if network_of(job) == network)
            with signals.awaited():
                pace = _samples_per_sec(job, network, place, registry, at_once, end, signals)
            signals.check()
            if pace is not None:
                kept.add(network, pace)
                continue
        unknown[steps] = network
    known = [job for job in jobs if _steps(network_of(job)) not in unknown]
    return Forecast(
        sum(_samples(job, place, registry) / kept[network_of(job)] for job in known),
        len(known),
        tuple(unknown.values()),
    )


@cache
def _steps(network: Network) -> str:
    """What a network's steps depend on: itself, its data and the optimizer, at whatever rate."""
    settings = settings_of((f"experiment={network[0]}", *network[1:]))
    chosen = {group: settings.choices[group] for group in _STEPS_DEPEND_ON}
    single = {
        key: value
        for key, value in {**settings.others, **settings.fixed}.items()
        if key.partition(".")[0] in _STEPS_DEPEND_ON and key != "optimizer.lr"
    }
    return json.dumps([chosen, single], sort_keys=True, default=str)


class _Kept:
    """Paces that were measured on this machine, in a file below the runs."""

    def __init__(self, place: Place, at_once: int) -> None:
        where = [f"growlab {version('growlab')}", _machine()]
        how = [f"{at_once} at the same time", *place.device]
        self._path = place.runs / "paces.json"
        self._paces: dict[str, float] = {}
        if self._path.is_file():
            try:
                self._paces = dict(json.loads(self._path.read_text(encoding="utf-8")))
            except (ValueError, TypeError):
                print(f"{self._path} cannot be read, and is written anew", file=sys.stderr)
        self._before = "; ".join([*where, *how, ""])
        self._of_steps = {
            _steps(tuple(key.removeprefix(self._before).split())): pace
            for key, pace in self._paces.items()
            if key.startswith(self._before)
        }

    def __contains__(self, network: Network) -> bool:
        return _steps(network) in self._of_steps

    def __getitem__(self, network: Network) -> float:
        return self._of_steps[_steps(network)]

    def add(self, network: Network, pace: float) -> None:
        self._of_steps[_steps(network)] = pace
        self._paces[self._before + " ".join(network)] = pace
        write_json(self._path, self._paces)


def _machine() -> str:
    # Imported here: a list of entries need not wait for torch.
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"{platform.node()}, {device}, {torch.get_num_threads()} threads"


def _samples(job: Job, place: Place, registry: Registry) -> int:
    """Training samples that a job sees."""
    assert job.data is not None and job.epochs is not None
    return job.epochs * place.num_train(registry, job.data)


def network_of(job: Job) -> Network:
    """The experiment of a job and the overrides that its pace depends on; data that arrives is there at once."""
    kept = [o for o in job.overrides if o.startswith(("model", "data="))]
    data = experiment(job.experiment).data
    at_once = [f"data={job.data}"] if data != job.data and data.endswith("_incremental") else []
    return (job.experiment, *at_once, *(o for o in kept if not o.startswith("model.initialisation")))


def measuring(network: Sequence[str]) -> list[str]:
    """Overrides of a run of a few steps of an experiment's network, its first word, at full width."""
    return [f"experiment={network[0]}", *network[1:], *_FIXED_SIZE, "ckpt_path=null"]


def _samples_per_sec(
    job: Job,
    network: Network,
    place: Place,
    registry: Registry,
    at_once: int,
    end: float,
    signals: EndingSignals,
) -> float | None:
    """The pace of a network; None if the time is over, or a signal came, before it is known."""
    assert job.data is not None
    root = place.root(registry, job.data)
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder) / str(number) for number in range(at_once)]
        lines = [
            [
                *(sys.executable, "-m", "growlab", *measuring(network)),
                *([] if root is None else [path_override("data.root", root.resolve())]),
                *(*place.device, *share_of_cores(at_once), in_folder(own)),
            ]
            for own in places
        ]
        said = [own.with_suffix(".txt") for own in places]
        codes = _codes(lines, said, end, signals)
        if None in codes:
            return None
        for code, path in zip(codes, said, strict=True):
            if code != 0:
                reason = path.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
                raise UserError(f"a few steps of {' '.join(network)} failed: {reason[0]}")
        return sum(map(_pace, places))


def _codes(
    lines: Sequence[Sequence[str]], said: Sequence[Path], end: float, signals: EndingSignals
) -> list[int | None]:
    """Exit codes of commands that run at the same time; None for those that are ended as the time is over."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        for line, path in zip(lines, said, strict=True):
            with path.open("wb") as file, hangup_blocked():
                running.append(subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=file))
        while any(one.poll() is None for one in running) and time.monotonic() < end and not signals.came:
            time.sleep(POLL_SEC)
        return [one.poll() for one in running]
    finally:
        for one in running:
            one.terminate()
        last = time.monotonic() + _ENDING_SEC
        for one in running:
            try:
                one.wait(timeout=max(0.0, last - time.monotonic()))
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()


def _pace(run: Path) -> float:
    with (run / "metrics.csv").open(encoding="utf-8") as file:
        return float(list(csv.DictReader(file))[-1]["samples_per_sec"])

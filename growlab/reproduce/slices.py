"""Training what is missing of an entry, one run after the other, in slices that end by themselves."""

import csv
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from growlab.errors import UserError
from growlab.processes import announce
from growlab.reproduce.registry import Item, Job, Registry, experiment

# Steps that are measured, in the second of two epochs: the first one starts kernels and caches.
_STEPS = 4
# A run that is asked to stop saves at the end of its step.
_SAVING_SEC = 300
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
    """

    runs: Path
    data: Path | None
    device: tuple[str, ...]

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


def command(job: Job, place: Place, registry: Registry) -> list[str]:
    """The command line of one job: alone in a sweep, so that it goes on where it was and is skipped when done."""
    root = None if job.data is None else place.root(registry, job.data)
    experiment, _, folder = job.folder.partition("/")
    return [
        *(sys.executable, "-m", "growlab", "-m", f"experiment={job.experiment}", *job.overrides),
        *([] if root is None else [f"data.root={root.resolve()}"]),
        *([] if job.is_study else [*place.device, "ckpt_path=last"]),
        "hydra.sweeper.params=null",
        f"hydra.sweep.dir={(place.runs / experiment).resolve()}",
        f"hydra.sweep.subdir='{folder}'",
    ]


def measured_seconds(jobs: Sequence[Job], place: Place, registry: Registry) -> float:
    """Seconds that training jobs take at most: each as if at full width all along, at the pace of a few real steps.

    One pace a network and width, of its widest job.

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
            paces[network] = _samples_per_sec(job, network, place, registry)
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


def _samples_per_sec(job: Job, network: tuple[str, ...], place: Place, registry: Registry) -> float:
    assert job.data is not None
    root = place.root(registry, job.data)
    with tempfile.TemporaryDirectory() as folder:
        line = [
            *(sys.executable, "-m", "growlab", *measuring(network)),
            *([] if root is None else [f"data.root={root.resolve()}"]),
            *(*place.device, f"hydra.run.dir={folder}"),
        ]
        ended = subprocess.run(line, capture_output=True, text=True, check=False)
        if ended.returncode != 0:
            reason = ended.stderr.strip().splitlines()[-1:] or ["it said nothing"]
            raise UserError(f"a few steps of {' '.join(network)} failed: {reason[0]}")
        with (Path(folder) / "metrics.csv").open(encoding="utf-8") as file:
            return float(list(csv.DictReader(file))[-1]["samples_per_sec"])


def train(jobs: Sequence[Job], place: Place, registry: Registry, minutes: float) -> tuple[int, list[str]]:
    """Train jobs one after the other until the time is over; the one that is then at work saves and ends.

    A job that fails leaves the others alone: of a sweep over learning rates some diverge.

    Returns:
        How many have ended with a result, and the folders of those that failed.

    Raises:
        UserError: data is missing.
    """
    end, finished, failed = time.monotonic() + 60 * minutes, 0, []
    for job in jobs:
        line = command(job, place, registry)
        if time.monotonic() >= end:
            break
        print(f"{job.folder}", flush=True)
        process = subprocess.Popen(line, stdout=subprocess.DEVNULL)
        try:
            process.wait(timeout=max(end - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            _stop(process)
            break
        except BaseException:
            _stop(process)
            raise
        if place.done(job):
            finished += 1
        else:
            failed.append(job.folder)
            print(f"{job.folder} failed (exit code {process.returncode})", flush=True)
    return finished, failed


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Let a run save and end; kill it if it does not."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=_SAVING_SEC)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def device(about: Mapping[str, Any]) -> tuple[str, ...]:
    """Overrides that choose the device: a GPU with what makes small networks fast there, or the CPU."""
    # Imported here: a list of entries need not wait for torch.
    import torch

    return tuple(about.get("gpu", ())) if torch.cuda.is_available() else ("trainer=cpu",)


def missing(item: Item, place: Place, seeds: Sequence[int] | None) -> list[Job]:
    """Jobs of an entry that have no result yet."""
    return [job for job in item.jobs(seeds) if not place.done(job)]

"""Train the runs of an entry that are missing: a process for each, several at a time, until a deadline or a signal."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any

import yaml

from growlab.base.errors import UserError
from growlab.base.files import FAILURE
from growlab.lab.training.processes import path_override
from growlab.lab.training.run_folder import is_held
from growlab.recipes.papers.registry import Item, Job, Registry


@dataclass(frozen=True)
class Place:
    """Folders of the runs and of their data, and the device.

    Attributes:
        runs: the folder of all runs.
        data: folder above the data sets' own; None: $GROWLAB_DATA, else ~/.cache/growlab.
        device: overrides that choose the device.
    """

    runs: Path
    data: Path | None = None
    device: tuple[str, ...] = ()

    def root(self, registry: Registry, name: str) -> Path | None:
        """Folder of a data set; None for one that growlab brings along.

        Raises:
            UserError: it is not there.
        """
        about = registry.data[name]
        if about.get("built_in"):
            return None
        above = self.data or Path(os.environ.get("GROWLAB_DATA") or Path.home() / ".cache" / "growlab")
        for folder in (above / other for other in (name, *about.get("also", ()))):
            if folder.is_dir() and any(folder.iterdir()):
                return folder
        raise UserError(
            f"{name} is not in {above}: name the folder above it with --data, or let growlab download it once, "
            f"python -m growlab data={name}, where it can."
        )

    def done(self, job: Job) -> bool:
        """True if a job has left its result."""
        folder = self.runs / job.folder
        return (folder / "results.json").is_file() or (job.is_study and (folder / "summary.json").is_file())


def command(job: Job, place: Place, registry: Registry, num_threads: int | None = None) -> list[str]:
    """Command line of one job: a sweep of one run, which is resumed, or skipped when done.

    A run that has begun keeps its precision, on whatever machine it is resumed.
    """
    root = None if job.data is None else place.root(registry, job.data)
    experiment, _, folder = job.folder.partition("/")
    begun = place.runs / job.folder / "config.yaml"
    device = list(place.device)
    if begun.is_file():
        precision = yaml.safe_load(begun.read_text(encoding="utf-8"))["trainer"]["precision"]
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
    """Train jobs until `stop`, which lets the runs at work save and end.

    A job that fails leaves the others alone: of a sweep over learning rates some diverge. One that another process
    trains is skipped.

    Args:
        place: the folders and the device.
        registry: of the data sets.
        at_once: number of runs at the same time.
    """

    def __init__(self, place: Place, registry: Registry, at_once: int = 1) -> None:
        self.stopped = False
        self._place, self._registry, self._at_once = place, registry, at_once
        self._running: set[subprocess.Popen[bytes]] = set()

    def stop(self) -> None:
        """Start no further run; those at work save at the end of their step."""
        self.stopped = True
        for process in tuple(self._running):
            process.terminate()

    def train(self, jobs: Sequence[Job], seconds: float) -> list[str]:
        """Train jobs in this order and return the folders of those that failed.

        Args:
            jobs: to be trained.
            seconds: until `stop`.

        Raises:
            UserError: data is missing.
        """
        deadline = Timer(max(seconds, 0.0), self.stop)
        deadline.start()
        try:
            with ThreadPoolExecutor(self._at_once) as pool:
                return [folder for folder in pool.map(self._failed, jobs) if folder]
        finally:
            deadline.cancel()

    def _failed(self, job: Job) -> str | None:
        """Train a job; its folder if it failed."""
        if self.stopped:
            return None
        folder = self._place.runs / job.folder
        if is_held(folder):
            print(f"{job.folder}: another process is at work on it", flush=True)
            return None
        print(job.folder, flush=True)
        threads = None if self._at_once == 1 else max(1, len(os.sched_getaffinity(0)) // self._at_once)
        # In a session of its own, so that Ctrl-C and a closing terminal reach it as `stop` alone.
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
        if self.stopped or self._place.done(job) or is_held(folder):
            return None
        print(f"{job.folder} failed (exit code {code}){_reason(folder / FAILURE)}", flush=True)
        return job.folder


def _reason(path: Path) -> str:
    return f": {json.loads(path.read_text(encoding='utf-8'))['reason']}" if path.is_file() else ""


def device(about: Mapping[str, Any]) -> tuple[str, ...]:
    """Overrides for a GPU, or for a CPU that may multiply matrices in bfloat16 faster than in float32."""
    # Imported here: a list of entries need not wait for torch.
    import torch

    if torch.cuda.is_available():
        return tuple(about.get("gpu", ()))
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    fast = any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))
    return ("trainer=cpu", *(about.get("cpu_bfloat16", ()) if fast else ()))


def runs_at_once(item: Item, about: Mapping[str, Any]) -> int:
    """Number of runs that train at the same time: several on a GPU that one leaves idle, one on a CPU."""
    import torch

    several = item.gpu_runs if item.gpu_runs is not None else about.get("gpu_runs", 1)
    return int(several) if torch.cuda.is_available() else 1

"""Entries of `results.json`, which tables are made of."""

import contextlib
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer

import growlab
from growlab.lab.training.experiment import Identity
from growlab.lab.training.plan import Plan
from growlab.lab.training.recorder import RunRecorder, memory_measure
from growlab.lab.training.task import Task


def results_row(
    identity: Identity, plan: Plan, task: Task, recorder: RunRecorder, trainer: Trainer
) -> dict[str, Any]:
    """Return the content of `results.json`.

    Args:
        identity: the run's settings.
        plan: the run as it was carried out.
        task: tested.
        recorder: of every epoch.
        trainer: of the run.
    """
    grower, objective = task.grower, task.objective
    stages = recorder.stages(plan, grower.events)
    errors = [
        error for event in grower.events for error in (event.parity_error_eval, event.parity_error_train)
    ]
    name, higher = getattr(objective, "compared_by", ("accuracy", True))
    last = recorder.rows[-1]
    names = {"train": objective.metric_names, "val": (*objective.metric_names, *objective.evaluated_names)}
    return {
        **identity.row,
        "epochs": plan.schedule.total_epochs,
        "reference_epochs": plan.reference_epochs,
        "world_size": trainer.world_size,
        "num_nodes": trainer.num_nodes,
        "batch_size": plan.schedule.batch_sizes[-1],
        "batch_fit": task.batch_fit,
        # The metric that runs are compared by.
        "metric": {"name": name, "higher_is_better": higher},
        **task.metrics("test"),
        **{key: value for copy in grower.copies() for key, value in task.metrics(f"test_{copy}").items()},
        **{f"{split}_{one}": last.get(f"{split}_{one}") for split in names for one in names[split]},
        "train_cost_percent": plan.train_cost_percent,
        "train_flops": plan.train_flops,
        "seconds": sum(stage["seconds"] for stage in stages),
        "parity_max_error": max((error for error in errors if error is not None), default=None),
        "memory_measure": memory_measure(task.device),
        "stages": stages,
        **provenance(task.device),
    }


def provenance(device: torch.device) -> dict[str, Any]:
    """Commit, versions and machine that a result comes from."""
    return {
        "git_commit": git_commit(),
        "versions": versions(),
        "machine": {"device": _device_name(device), "threads": torch.get_num_threads()},
    }


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that decide results; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("torch", "lightning", "growlab"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def git_commit() -> str | None:
    """Commit of the checkout that growlab runs from, `-dirty` behind it after changes; None outside of one."""
    package = Path(growlab.__file__).resolve().parent

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=package, capture_output=True, text=True, check=True, timeout=10
        )
        return done.stdout.strip()

    try:
        # An installed copy may lie inside a repository that it is no part of.
        git("ls-files", "--error-unmatch", "__init__.py")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", "../conf")
        return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

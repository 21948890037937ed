"""Small runs of the command line: their settings, their networks, and what they leave behind."""

import csv
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import nn

from growlab.lab import networks
from tests.command_line import CommandLine, Outcome

# 18 steps in 6 epochs and 3 stages, with everything that has a state: momentum, batch sizes that change,
# augmentation, validation, regions, statistics.
SMALL = (
    *("data.limit_train=96", "data.limit_test=40", "data.batch_size=32", "data.validation=split"),
    *("schedule.epochs=[2,2,2]", "schedule.widths=[0.5,0.75,1]", "log_rates_every_n_steps=2"),
)
STEPWISE = "checkpoint.every_n_steps=1"
MLP3 = ("model=mlp8", "model._target_=tests.whole_runs.mlp3", "model.width=12", "model.batch_norm=true")
MLP = (*SMALL, *MLP3)
# Two convolutions with batch normalisation.
SMOOTH = ("model=custom", "model._target_=tests.whole_runs.smooth")
NUM_STEPS = 18


def slow(*case: Any) -> Any:
    """A row of parameters that `make test-slow` tests."""
    # Runs import this module too, and do without it.
    import pytest

    return pytest.param(*case, marks=pytest.mark.slow)


def mlp3(image_shape: Sequence[int], num_classes: int, width: int = 12, batch_norm: bool = False) -> nn.Module:
    """Three hidden layers, named as those of `mlp8`."""
    return networks.MLP(torch.Size(image_shape).numel(), [width] * 3, num_classes, batch_norm)


def dropout_mlp(image_shape: Sequence[int], num_classes: int) -> nn.Module:
    """A network whose steps draw random numbers."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(torch.Size(image_shape).numel(), 12),
        nn.BatchNorm1d(12),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(12, num_classes),
    )


def plain_mlp(image_shape: Sequence[int], num_classes: int, batch_norm: bool = False) -> nn.Module:
    """Two hidden layers of eight."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs in (torch.Size(image_shape).numel(), 8):
        layers += [nn.Linear(inputs, 8), *([nn.BatchNorm1d(8)] if batch_norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(8, num_classes))


def spatial(image_shape: Sequence[int], num_classes: int) -> nn.Module:
    """A network that somebody forgot to pool: [batch, classes, height, width]."""
    return nn.Sequential(nn.Conv2d(image_shape[0], 8, 3), nn.ReLU(), nn.Conv2d(8, num_classes, 1))


def smooth(image_shape: Sequence[int], num_classes: int) -> nn.Module:
    """A network without kinks: its gradients differ between precisions by rounding alone."""
    layers = [nn.Conv2d(image_shape[0], 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)]
    return nn.Sequential(*layers, nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes))


class HungryMlp(nn.Sequential):
    """A network that trains on a device of little memory: so many images times channels, in $HUNGRY by rank."""

    def __init__(self, image_shape: Sequence[int], num_classes: int) -> None:
        inputs = torch.Size(image_shape).numel()
        layers = (nn.Linear(inputs, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, num_classes))
        super().__init__(nn.Flatten(), *layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        most = os.environ.get("HUNGRY", "1000000").split(",")[int(os.environ.get("RANK", "0"))]
        if torch.is_grad_enabled() and self.training and len(x) * self[1].out_features > int(most):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate too much.")
        return super().forward(x)


# What a run leaves behind --------------------------------------------------------------------------------

# Measured times, and memory of the process, differ from run to run; everything else must not.
_TIMES = {"seconds", "samples_per_sec", "tokens_per_sec", "seconds_by_part", "peak_memory_bytes"}


def table(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file, measured times left out."""
    with path.open() as file:
        return [{k: v for k, v in row.items() if k not in _TIMES} for row in csv.DictReader(file)]


def without_times(content: Any) -> Any:
    """Nested dicts and lists, measured times left out."""
    if isinstance(content, dict):
        return {key: without_times(value) for key, value in content.items() if key not in _TIMES}
    return [without_times(value) for value in content] if isinstance(content, list | tuple) else content


def same(one: Any, other: Any) -> bool:
    """Whether nested containers of tensors and numbers are equal bit for bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return isinstance(other, list | tuple) and len(one) == len(other) and all(map(same, one, other))
    return one == other


@dataclass(frozen=True)
class Left:
    """What a finished run has left in its folder, as far as it must be the same every time."""

    metrics: list[dict[str, str]]
    steps: list[dict[str, str]]
    rates: list[dict[str, str]]
    growth: dict[str, Any]
    results: dict[str, Any]
    weights: dict[str, torch.Tensor]
    checkpoint: dict[str, Any]

    @classmethod
    def by(cls, folder: Path) -> "Left":
        """Read it."""
        results = json.loads((folder / "results.json").read_text())
        checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
        optional = (folder / "steps.csv", folder / "rates.csv")
        return cls(
            table(folder / "metrics.csv"),
            *(table(file) if file.exists() else [] for file in optional),
            without_times(json.loads((folder / "growth.json").read_text())),
            without_times({k: v for k, v in results.items() if k not in ("overrides", "command", "git_commit")}),
            torch.load(folder / "model.pt", weights_only=True),
            {key: checkpoint[key] for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step")},
        )

    def differences(self, other: "Left") -> list[str]:
        """Names of the parts that are not equal bit for bit."""
        return [name for name in vars(self) if not same(getattr(self, name), getattr(other, name))]


@dataclass(frozen=True)
class Whole:
    """A run that nothing disturbed: its folder, which stays as it is, what it printed, its checkpoints by step."""

    folder: Path
    out: str
    err: str

    @cached_property
    def left(self) -> Left:
        """What it left."""
        return Left.by(self.folder)

    @cached_property
    def results(self) -> dict[str, Any]:
        """Its results.json, times and commands included."""
        return json.loads((self.folder / "results.json").read_text(encoding="utf-8"))

    @cached_property
    def checkpoints(self) -> dict[int, Path]:
        """Every checkpoint that it wrote, one each step unless its settings say otherwise."""
        return {int(path.stem): path for path in (self.folder.parent / "kept").iterdir()}


def whole_run(
    cli: CommandLine, *arguments: str, fault: tuple[Any, ...] | None = None, files: Path | None = None
) -> Whole:
    """An undisturbed run, made once for all processes of the tests.

    Args:
        cli: the command line.
        arguments: overrides, without the folder.
        fault: one of those that disturb nothing.
        files: folder with what the run reads from its working directory.
    """
    name = hashlib.sha256(json.dumps([arguments, fault]).encode()).hexdigest()[:16]
    place, done = cli.shared / name, cli.shared / name / "printed.json"
    with FileLock(cli.shared / f"{name}.lock"):
        if not done.exists():
            shutil.rmtree(place, ignore_errors=True)
            kept = place / "kept"
            kept.mkdir(parents=True)
            if files is not None:
                shutil.copytree(files, place, dirs_exist_ok=True)
            often = () if any(a.startswith("checkpoint.") for a in arguments) else (STEPWISE,)
            more = ("hydra.run.dir=run", *often)
            faults = [["keep_checkpoints", str(kept)], *([] if fault is None else [fault])]
            outcome = cli.done(*arguments, *more, cwd=place, fault=("together", *faults))
            done.write_text(json.dumps([outcome.out, outcome.err]))
    return Whole(place / "run", *json.loads(done.read_text()))


def kept_run(cli: CommandLine, folder: Path, arguments: Sequence[str]) -> tuple[Left, dict[int, Path]]:
    """What an undisturbed run leaves that reads the files in FOLDER, and all of its checkpoints by their step."""
    whole = whole_run(cli, *arguments, files=folder)
    return whole.left, whole.checkpoints


def resumed_from(cli: CommandLine, folder: Path, arguments: Sequence[str], checkpoint: Path) -> Outcome:
    """Resume in FOLDER/run from a checkpoint, as after the death of a process that wrote no later one."""
    last = folder / "run" / "checkpoints" / "last.ckpt"
    last.parent.mkdir(parents=True)
    shutil.copy(checkpoint, last)
    return cli(*arguments, "hydra.run.dir=run", "ckpt_path=last", cwd=folder)


def assert_resumes(cli: CommandLine, folder: Path, arguments: Sequence[str], checkpoint: Path, whole: Left) -> None:
    """A run that resumes in FOLDER/run from a checkpoint ends as the undisturbed one."""
    outcome = resumed_from(cli, folder, arguments, checkpoint)
    assert outcome.code == 0 and "Warning" not in outcome.err, outcome.err
    assert Left.by(folder / "run").differences(whole) == []


def struck(cli: CommandLine, folder: Path, arguments: Sequence[str], faults: Sequence[tuple[Any, ...]]) -> Left:
    """What a run leaves in FOLDER/run that is killed by each of the faults in turn and resumed each time."""
    command = (*arguments, "hydra.run.dir=run")
    for number, fault in enumerate(faults):
        outcome = cli(*command, *["ckpt_path=last"] * (number > 0), cwd=folder, fault=fault)
        assert outcome.code == -signal.SIGKILL, (fault, outcome.err)
    outcome = cli(*command, "ckpt_path=last", cwd=folder)
    assert outcome.code == 0 and "Warning" not in outcome.err, outcome.err
    return Left.by(folder / "run")

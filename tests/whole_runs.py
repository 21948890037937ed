"""Small runs of the command line: settings, networks, and comparison of their files."""

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

IMAGES = ("data.limit_train=96", "data.limit_test=40", "data.batch_size=32")
BASE = (*IMAGES, "data.validation=split", "log_rates_every_n_steps=2")
# 18 steps in 6 epochs and 3 stages, with everything that has a state: momentum, batch sizes that change,
# augmentation, validation, regions, statistics.
SMALL = (*BASE, "schedule.epochs=[2,2,2]", "schedule.widths=[0.5,0.75,1]")
STEPWISE = "checkpoint.every_n_steps=1"
MLP3 = ("model=mlp8", "model._target_=tests.whole_runs.mlp3", "model.width=12", "model.batch_norm=true")
MLP = (*SMALL, *MLP3)
# Two convolutions with batch normalisation.
SMOOTH = ("model=custom", "model._target_=tests.whole_runs.smooth")
NUM_STEPS = 18


def mlp8_flops(width: int, classes: int = 10) -> int:
    """FLOPs of a forward pass of mlp8 on 8x8 images: eight hidden layers, two for each multiply-add."""
    return 2 * (64 * width + 7 * width * width + width * classes)


def slow(*case: Any) -> Any:
    """Mark a set of parameters as slow."""
    # Runs import this module too, without pytest.
    import pytest

    return pytest.param(*case, marks=pytest.mark.slow)


def mlp3(image_shape: Sequence[int], num_classes: int, width: int = 12, batch_norm: bool = False) -> nn.Module:
    """MLP with three hidden layers, with the parameter names of `mlp8`."""
    return networks.MLP(torch.Size(image_shape).numel(), [width] * 3, num_classes, batch_norm)


def dropout_mlp(image_shape: Sequence[int], num_classes: int) -> nn.Module:
    """MLP with dropout, which draws random numbers."""
    hidden = (nn.Linear(torch.Size(image_shape).numel(), 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3))
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(12, num_classes))


def plain_mlp(image_shape: Sequence[int], num_classes: int, batch_norm: bool = False) -> nn.Module:
    """MLP with two hidden layers of width 8."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs in (torch.Size(image_shape).numel(), 8):
        layers += [nn.Linear(inputs, 8), *([nn.BatchNorm1d(8)] if batch_norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(8, num_classes))


def smooth(image_shape: Sequence[int], num_classes: int) -> nn.Module:
    """Smooth network: its gradients differ between precisions only by rounding."""
    layers = [nn.Conv2d(image_shape[0], 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)]
    return nn.Sequential(*layers, nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes))


class HungryMlp(nn.Sequential):
    """MLP that runs out of memory above a number of images times channels, given per rank in $HUNGRY."""

    def __init__(self, image_shape: Sequence[int], num_classes: int) -> None:
        inputs = torch.Size(image_shape).numel()
        layers = (nn.Linear(inputs, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, num_classes))
        super().__init__(nn.Flatten(), *layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        most = os.environ.get("HUNGRY", "1000000").split(",")[int(os.environ.get("RANK", "0"))]
        if torch.is_grad_enabled() and self.training and len(x) * self[1].out_features > int(most):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate too much.")
        return super().forward(x)


# Files of a run --------------------------------------------------------------------------------

# Entries that differ from run to run.
_TIMES = {"seconds", "samples_per_sec", "tokens_per_sec", "seconds_by_part", "peak_memory_bytes"}


def table(path: Path) -> list[dict[str, str]]:
    """Read the rows of a CSV file, without measured times and memory."""
    with path.open() as file:
        return [{k: v for k, v in row.items() if k not in _TIMES} for row in csv.DictReader(file)]


def without_times(content: Any) -> Any:
    """Copy nested dicts and lists without measured times and memory."""
    if isinstance(content, dict):
        return {key: without_times(value) for key, value in content.items() if key not in _TIMES}
    return [without_times(value) for value in content] if isinstance(content, list | tuple) else content


def same(one: Any, other: Any) -> bool:
    """True if nested containers of tensors and numbers are equal bit for bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return isinstance(other, list | tuple) and len(one) == len(other) and all(map(same, one, other))
    return one == other


def read_results(run: Path) -> dict[str, Any]:
    """Read a run's results.json."""
    return json.loads((run / "results.json").read_text(encoding="utf-8"))


def read_events(run: Path) -> list[dict[str, Any]]:
    """Read a run's growth events."""
    return json.loads((run / "growth.json").read_text(encoding="utf-8"))["events"]


@dataclass(frozen=True)
class Left:
    """Content of a finished run's folder, without what differs each time."""

    metrics: list[dict[str, str]]
    steps: list[dict[str, str]]
    rates: list[dict[str, str]]
    growth: dict[str, Any]
    results: dict[str, Any]
    weights: dict[str, torch.Tensor]
    checkpoint: dict[str, Any]

    @classmethod
    def by(cls, folder: Path) -> "Left":
        """Read a folder."""
        results = read_results(folder)
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
    """An undisturbed run: its folder, which no test changes, its output, its checkpoints by step."""

    folder: Path
    out: str
    err: str

    @cached_property
    def left(self) -> Left:
        """Its files."""
        return Left.by(self.folder)

    @cached_property
    def results(self) -> dict[str, Any]:
        """Its results.json, times and commands included."""
        return read_results(self.folder)

    @cached_property
    def checkpoints(self) -> dict[int, Path]:
        """All its checkpoints by step, one for each step unless the arguments set another interval."""
        return {int(path.stem): path for path in (self.folder.parent / "kept").iterdir()}


def whole_run(
    cli: CommandLine, *arguments: str, fault: tuple[Any, ...] | None = None, files: Path | None = None
) -> Whole:
    """Make an undisturbed run, once for all test processes.

    Args:
        cli: the command line.
        arguments: overrides, without the folder.
        fault: a "fault" that only records.
        files: folder with files to copy to the run's working directory.
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
    """Files and checkpoints by step of an undisturbed run that reads files in a folder."""
    whole = whole_run(cli, *arguments, files=folder)
    return whole.left, whole.checkpoints


def resumed_from(cli: CommandLine, folder: Path, arguments: Sequence[str], checkpoint: Path) -> Outcome:
    """Resume in FOLDER/run from a checkpoint, as if its process had been killed after writing it."""
    last = folder / "run" / "checkpoints" / "last.ckpt"
    last.parent.mkdir(parents=True)
    shutil.copy(checkpoint, last)
    return cli(*arguments, "hydra.run.dir=run", "ckpt_path=last", cwd=folder)


def assert_resumes(cli: CommandLine, folder: Path, arguments: Sequence[str], checkpoint: Path, whole: Left) -> None:
    """Assert that a run resumed in FOLDER/run from a checkpoint ends as the undisturbed one."""
    outcome = resumed_from(cli, folder, arguments, checkpoint)
    assert outcome.code == 0 and "Warning" not in outcome.err, outcome.err
    assert Left.by(folder / "run").differences(whole) == []


def struck(cli: CommandLine, folder: Path, arguments: Sequence[str], faults: Sequence[tuple[Any, ...]]) -> Left:
    """Kill a run in FOLDER/run by each fault in turn, resume each time, and return its files."""
    command = (*arguments, "hydra.run.dir=run")
    for number, fault in enumerate(faults):
        outcome = cli(*command, *["ckpt_path=last"] * (number > 0), cwd=folder, fault=fault)
        assert outcome.code == -signal.SIGKILL, (fault, outcome.err)
    outcome = cli(*command, "ckpt_path=last", cwd=folder)
    assert outcome.code == 0 and "Warning" not in outcome.err, outcome.err
    return Left.by(folder / "run")

"""The lab's runner on one process and on two: an epoch to a hand-written loop's, an event to a training step."""

import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from torch.nn import functional as F

from growlab.lab.networks import resnet20
from tests.benchmarks.ratios import Ratio, Setting
from tests.command_line import ROOT

NUM_IMAGES, BATCH = 256, 128


def run(folder: str, *arguments: str) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Growth events and rows of epochs of a run in a process of its own."""
    command = [sys.executable, "-m", "growlab", *arguments, "hydra.run.dir=run", "num_threads=1", "logger=csv"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    events = json.loads((Path(folder) / "run" / "growth.json").read_text())["events"]
    return events, list(csv.DictReader((Path(folder) / "run" / "metrics.csv").read_text().splitlines()))


def epochs(setting: Setting) -> Iterator[Ratio]:
    """An epoch of ResNet-20 on the digits, without growth, to one of a loop in six lines."""
    count, data = (2 if setting.small else 5), ("data.validation=none", "data.shift=0", "lr_adapt=none")
    with tempfile.TemporaryDirectory() as folder:
        fixed = ("experiment=digits", "method=fixed_size", f"schedule.total_epochs={count}", "trainer=cpu")
        _, rows = run(folder, *fixed, *data, "model.width=8")
    network = resnet20(image_shape=(1, 8, 8), num_classes=10, width=8)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    x, y = (torch.randn(1438, 1, 8, 8).contiguous(memory_format=torch.channels_last), torch.randint(10, (1438,)))
    network.to(memory_format=torch.channels_last)
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        for chosen in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(network(x[chosen]), y[chosen]).backward()
            optimizer.step()
        seconds.append(time.perf_counter() - began)
    ours = min(float(row["seconds"]) for row in rows)
    yield Ratio("runner / a hand-written loop", "digits, an epoch", ours / min(seconds), 1.0, 1.1, ours)


def random_images(root: Path, sizes: Sequence[tuple[str, int]]) -> None:
    pixels = np.random.default_rng(0)
    for split, number in sizes:
        for image in range(number):
            folder = root / split / f"class{image % 10}"
            folder.mkdir(parents=True, exist_ok=True)
            picture = PIL.Image.fromarray(pixels.integers(0, 256, (32, 32, 3), dtype=np.uint8))
            picture.save(folder / f"{image}.png")


def events(setting: Setting) -> Iterator[Ratio]:
    """Events of ResNet-18 in four stages on two processes (gloo), their comparison included, to a step after each."""
    with tempfile.TemporaryDirectory() as folder:
        random_images(Path(folder) / "images", (("train", NUM_IMAGES), ("test", 20)))
        grown, rows = run(
            folder,
            *("experiment=papers/resnet18_cifar100", "trainer=ddp_cpu", f"data.root={folder}/images"),
            *("data.download=false", "data.validation=none", f"data.batch_size={BATCH}"),
            *("schedule.widths=[0.5,0.7,0.85,1]", "schedule.epochs=[1,1,1,1]", "schedule.batch_sizes=null"),
            *("optimizer_state=inherit", *("model.width=8",) * setting.small),
        )
    for event, row in zip(grown, rows[1:], strict=True):
        step_sec = float(row["seconds"]) / (NUM_IMAGES // BATCH)
        on = f"{event['num_params']:,} parameters"
        yield Ratio("event on two ranks / a step", on, event["seconds"] / step_sec, 0.1, 1.0, event["seconds"])

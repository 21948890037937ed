"""The lab's runner: epochs relative to a hand-written loop, and events on two processes to training steps."""

import csv
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from growlab.lab.networks import resnet20
from tests.benchmarks.clock import Clock
from tests.benchmarks.ratios import Ratio, Setting
from tests.command_line import new_process
from tests.experiments import write_fake_images
from tests.whole_runs import read_events

NUM_IMAGES, BATCH = 256, 128


def run(folder: str, *arguments: str) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Make a run in a new process; return its growth events and rows of epochs."""
    command = ("-m", "growlab", *arguments, "hydra.run.dir=run", "num_threads=1", "logger=csv")
    done = new_process(*command, cwd=Path(folder), limit_sec=3600.0)
    assert done.code == 0, done.err
    with (Path(folder) / "run" / "metrics.csv").open() as file:
        return read_events(Path(folder) / "run"), list(csv.DictReader(file))


def epochs(setting: Setting) -> Iterator[Ratio]:
    """Batches and epochs without growth relative to a hand-written loop; the limit is plain Lightning's.

    ResNet-20 of width 8 on the digits, and of full width on images as in CIFAR-10.
    """
    count = 3 if setting.small else 6
    kinds = {"digits": (1438, (1, 8, 8), 64, 8), "32 x 32, batches of 128": (640, (3, 32, 32), 128, 16)}
    for name, sizes in list(kinds.items())[: 1 if setting.small else 2]:
        (batch, epoch), (bare_batch, bare_epoch) = _of_runner(count, name, *sizes), _by_lightning(count, *sizes)
        plain_batch, plain_epoch = _by_hand(count, *sizes)
        ratio, least = batch / plain_batch, bare_batch / plain_batch
        yield Ratio("runner / a loop by hand, a batch", name, ratio, least, 1.05 if name == "digits" else 1.01, batch)
        ratio, least = epoch / plain_epoch, bare_epoch / plain_epoch
        yield Ratio("runner / a loop by hand, an epoch", name, ratio, least, 1.1, epoch)


def _best(batches: Sequence[float], epochs: Sequence[float]) -> tuple[float, float]:
    """Seconds of fast batches and of the fastest epoch, which depend least on other load."""
    return quantiles(batches, n=10)[0], min(epochs)


def _of_runner(count: int, name: str, number: int, shape: Sequence[int], size: int, width: int) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        settings = ["experiment=digits"]
        if name != "digits":
            write_fake_images(Path(folder) / "images", number)
            settings = ["experiment=resnet20_cifar10", "data.download=false", f"data.root={folder}/images"]
            settings += [f"data.batch_size={size}", "schedule.batch_sizes=null"]
        settings += ["method=fixed_size", f"schedule.total_epochs={count}", "trainer=cpu", "data.validation=none"]
        settings += ["data.shift=0", "lr_adapt=none"] if name == "digits" else []
        clock = f"+callbacks.clock={{_target_: tests.benchmarks.clock.Clock, file: {folder}/clock.json}}"
        run(folder, *settings, f"model.width={width}", clock)
        found = json.loads((Path(folder) / "clock.json").read_text())
    return _best(found["batches"], found["epochs"])


def _network(number: int, shape: Sequence[int], width: int) -> tuple[nn.Module, Optimizer, Tensor, Tensor]:
    network = resnet20(image_shape=tuple(shape), num_classes=10, width=width).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    return network, optimizer, torch.randn(number, *shape), torch.randint(10, (number,))


def _by_hand(count: int, number: int, shape: Sequence[int], size: int, width: int) -> tuple[float, float]:
    network, optimizer, x, y = _network(number, shape, width)
    x, batches, epochs = x.contiguous(memory_format=torch.channels_last), list[float](), list[float]()
    for _ in range(count):
        began = time.thread_time()
        for chosen in torch.randperm(number).split(size):
            batch_began = time.thread_time()
            optimizer.zero_grad()
            F.cross_entropy(network(x[chosen]), y[chosen]).backward()
            optimizer.step()
            batches.append(time.thread_time() - batch_began)
        epochs.append(time.thread_time() - began)
    return _best(batches, epochs)


def _by_lightning(count: int, number: int, shape: Sequence[int], size: int, width: int) -> tuple[float, float]:
    """Train a plain LightningModule."""
    import lightning

    network, optimizer, x, y = _network(number, shape, width)
    x = x.contiguous(memory_format=torch.channels_last)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def training_step(self, batch: Any, index: int) -> Tensor:
            return F.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> Optimizer:
            return optimizer

    class Batches:
        def __len__(self) -> int:
            return -(-number // size)

        def __iter__(self) -> Iterator[Any]:
            return ((x[chosen], y[chosen]) for chosen in torch.randperm(number).split(size))

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        clock = Clock(f"{folder}/clock.json")
        off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, max_epochs=count, enable_model_summary=False, callbacks=[clock], **off
        )
        trainer.fit(Module(), Batches())
        found = json.loads((Path(folder) / "clock.json").read_text())
    return _best(found["batches"], found["epochs"])


def events(setting: Setting) -> Iterator[Ratio]:
    """Events of ResNet-18 on two processes (gloo), including rank checks, relative to a following training step."""
    with tempfile.TemporaryDirectory() as folder:
        write_fake_images(Path(folder) / "images", NUM_IMAGES)
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

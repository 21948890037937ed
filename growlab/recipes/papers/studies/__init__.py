"""Experiments other than training one network: each is a function and a file in conf/experiment.

This module has their shared training steps, accuracy and tables.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import pandas
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab.base.files import write_json, write_text

_ALL = 10**9  # more batches than any epoch has


def batches_of(data: Any, epoch: int, number: int) -> list[tuple[Tensor, Tensor]]:
    """Return a number of training batches from an epoch on."""
    return list(islice(chain.from_iterable(epoch_of(data, each) for each in count(epoch)), number))


def epoch_of(data: Any, epoch: int) -> Iterable[tuple[Tensor, Tensor]]:
    """Return the training batches of an epoch of `growlab.lab.data.ImageData`."""
    return data.training_batches(_ALL, epoch)


def train(network: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Train with one step on the cross-entropy of each batch, in float64."""
    for x, labels in batches:
        optimizer.zero_grad()
        F.cross_entropy(network(x.double()), labels).backward()
        optimizer.step()


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Return the fraction of samples with the largest logit at their label."""
    return float((logits.argmax(1) == labels).double().mean())


def relative(after: Tensor, before: Tensor) -> float:
    """Return the norm of the difference relative to the norm of `before`."""
    return float((after - before).norm() / before.norm())


def changed(after: Tensor, before: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the relative change of the logits, and the accuracy before and after."""
    return {
        "relative_error": relative(after, before),
        "accuracy_before": accuracy(before, labels),
        "accuracy": accuracy(after, labels),
    }


def diverging(
    pair: Sequence[nn.Module], make: Any, x: Tensor, batches: Sequence[tuple[Tensor, Tensor]]
) -> Iterator[tuple[int, float]]:
    """Train two networks on equal batches; yield the number of steps and the relative difference of their outputs."""
    optimizers = [make(network.parameters()) for network in pair]
    for step in range(len(batches) + 1):
        first, second = (network(x).detach() for network in pair)
        yield step, relative(second, first)
        for network, optimizer in zip(pair, optimizers, strict=True):
            train(network, optimizer, batches[step : step + 1])


def write(
    run_dir: Path,
    tables: Mapping[str, Sequence[dict[str, Any]]],
    summarise: Callable[[Mapping[str, pandas.DataFrame]], dict[str, Any]],
    draw: Callable[[Path], Path],
) -> None:
    """Write rows as `NAME.csv` with six significant digits, their summary as `summary.json`, and the figure."""
    frames = {name: pandas.DataFrame(rows) for name, rows in tables.items()}
    for name, frame in frames.items():
        text = frame.to_csv(index=False, float_format="%.6g", lineterminator="\n", na_rep="nan")
        write_text(run_dir / f"{name}.csv", text)
    write_json(run_dir / "summary.json", summary := summarise(frames))
    draw(run_dir)
    print(json.dumps(summary, indent=2))

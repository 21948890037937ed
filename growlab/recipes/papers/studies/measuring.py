"""Code that studies share: steps on batches, accuracies, and tables of rows."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_ALL = 10**9  # batches of an epoch: as many as there are


def batches_of(data: Any, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Training batches of an epoch and of those that follow, without end."""
    while True:
        yield from epoch_of(data, epoch)
        epoch += 1


def epoch_of(data: Any, epoch: int) -> Iterable[tuple[Tensor, Tensor]]:
    """Training batches of one epoch of `growlab.lab.data.ImageData`."""
    return data.training_batches(_ALL, epoch)


def train(
    network: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[tuple[Tensor, Tensor]]
) -> None:
    """One step on the cross-entropy of each batch, in float64."""
    for x, labels in batches:
        optimizer.zero_grad()
        F.cross_entropy(network(x.double()), labels).backward()
        optimizer.step()


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Share of samples whose largest logit is their label's."""
    return float((logits.argmax(1) == labels).double().mean())


def relative(after: Tensor, before: Tensor) -> float:
    """Norm of a difference relative to what it is a difference to."""
    return float((after - before).norm() / before.norm())


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as CSV; numbers with six digits."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()}
        )
    return text.getvalue()


def read_table(path: Path) -> list[dict[str, Any]]:
    """The rows of `table`, numbers as such."""
    with path.open(encoding="utf-8", newline="") as file:
        return [{key: _number(value) for key, value in row.items()} for row in csv.DictReader(file)]


def _number(value: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value

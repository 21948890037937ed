"""A small training to plan for."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from growlab.lab.planner import Candidate, Problem

WIDTH, BATCH, BATCHES = 24, 16, 20


def network() -> nn.Module:
    hidden = [nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 3))


def data(number: int, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(number, 8, generator=torch.Generator().manual_seed(seed))
    teacher = torch.randn(8, 3, generator=torch.Generator().manual_seed(9))
    return x, (x.sin() @ teacher).argmax(1)


def batches(epoch: int) -> Iterable[tuple[Tensor, ...]]:
    x, y = data(BATCH * BATCHES, 0)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
    return [(x[part], y[part]) for part in order.split(BATCH)]


def sgd(module: nn.Module, multiple: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1 * multiple, momentum=0.9)


def problem(epochs: float = 40, **known: Any) -> Problem:
    given = {
        "make_network": network,
        "make_optimizer": sgd,
        "batches": batches,
        "loss": nn.functional.cross_entropy,
        "held_out": [data(200, 1)],
        "example": data(8, 0)[0],
        "budget_samples": epochs * BATCH * BATCHES,
        "candidates": (Candidate("half", 0.5), Candidate("quarter", 0.25)),
    }
    return Problem(**{**given, **known})

"""Growth does not depend on torch's default device: growlab creates its own tensors on the CPU."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import growlab.optim
from growlab import Grower, parts, prune, trace
from growlab.growth import FireFly, GradMax, GrowthMethod, Net2Net, PairGrowth, Splitting, Tiny, VarianceTransfer
from growlab.parts import Part
from tests.cases import OLD_TORCH, Around

Y = torch.arange(6) % 5


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 12), nn.LayerNorm(12), nn.ReLU()),
        nn.Linear(12, 5),
    )


X = torch.randn(6, 3, 7, 7, generator=torch.Generator().manual_seed(1))
# In this context a tensor created without a device is on device meta, and reading it raises an error.
ELSEWHERE = torch.device("meta")


def trained(
    where: AbstractContextManager[Any],
    method: GrowthMethod,
    make: Callable[..., torch.optim.Optimizer],
    *with_parts: Part,
) -> list[float]:
    """Train through an event, save and load; return the losses."""
    growing, again, losses = network(), network(), list[float]()
    with where:
        grower = Grower(growing, X, method=method, trigger={0: 0.5, 1: 1.0}, parts=with_parts)
        optimizer = make(growing.parameters())
        grower.follow(optimizer)
        grower.provide(
            batches=lambda number: [(X, Y)] * number,
            loss=F.cross_entropy,
            epoch_batches=lambda *_: [(X, Y)],
            steps=[2, 2],
        )
        for epoch in range(2):
            grower.step(epoch=epoch)
            for _ in range(2):
                optimizer.zero_grad()
                loss = F.cross_entropy(growing(X), Y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            state, tensors = grower.state_dict(), growing.state_dict()
        other = Grower(again, X, method=method, trigger={0: 0.5, 1: 1.0})
        if not with_parts:
            other.load_state_dict(state)
            again.load_state_dict(tensors)
            other.finish()
        grower.finish()
    if not with_parts:
        assert torch.equal(again(X), growing(X))
    return losses


OLD_STEPS = pytest.mark.skipif(OLD_TORCH, reason="its Adam makes its counter of steps on the default device")
SGD = growlab.optim.SGD
CASES: list[Any] = [
    *((one(fallback="pairs"), SGD, ()) for one in (Tiny, Splitting)),
    *(pytest.param(one(fallback="pairs"), SGD, (), marks=pytest.mark.slow) for one in (GradMax, FireFly)),
    *((method, SGD, ()) for method in (VarianceTransfer(), PairGrowth())),
    *((Net2Net(), make, ()) for make in (SGD, growlab.optim.AdamW, growlab.optim.Muon, growlab.optim.AvaGrad)),
    pytest.param(Net2Net(), torch.optim.AdamW, (), marks=OLD_STEPS),
    *((Net2Net(), SGD, (part,)) for part in (parts.Averages, parts.OldGradient, parts.Freeze)),
    *((Net2Net(), SGD, (part,)) for part in (partial(parts.Warmup, 2), partial(parts.Resolution, [5, 7]))),
]


@pytest.mark.parametrize(("method", "make", "with_parts"), CASES, ids=str)
def test_training_is_the_same_as_without_a_default_device(
    method: GrowthMethod, make: Any, with_parts: tuple[Any, ...]
) -> None:
    losses = [trained(where, method, make, *(part() for part in with_parts)) for where in (ELSEWHERE, nullcontext())]
    assert losses[0] == losses[1]


def test_trained_networks_grow_and_shrink() -> None:
    small = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
    wide, x = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5)), torch.randn(4, 6)
    with ELSEWHERE:
        grower = Grower.from_trained(small, wide, x)
        grower.step(epoch=0)
        grower.finish()
        prune(wide, trace(wide, x), 0.5, example=x)
    assert wide(x).shape == (4, 5)


def test_a_forward_sees_the_default_device_of_the_user() -> None:
    with ELSEWHERE:
        network = Around(
            lambda net, x: net.head((net.tokens(x) + net.positions(torch.arange(x.shape[1]))).relu()),
            **{"tokens": nn.Embedding(9, 16), "positions": nn.Embedding(7, 16), "head": [16, 9]},
        )
        tokens = torch.zeros(2, 7, dtype=torch.int64)
        assert trace(network, tokens).full_widths == {"tokens": 16}

"""A loop under Lightning's Fabric and one under accelerate, which put something around network and optimizer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional as F

from growlab import Grower, VarianceTransfer
from growlab.grower import renew
from tests.command_line import CommandLine, join, offer_port

accelerate = pytest.importorskip("accelerate")

_GENERATOR = torch.Generator().manual_seed(1)
IMAGES = torch.randn(48, 6, generator=_GENERATOR)
LABELS = torch.randint(3, (48,), generator=_GENERATOR)
Prepare = Callable[[nn.Module, torch.optim.Optimizer], tuple[nn.Module, Any]]


def trained(prepare: Prepare, backward: Callable[[Tensor], None], rank: int, ranks: int) -> list[Any]:
    """Parameters and momentum at the end of a run that grows twice."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3)).double()
    method = VarianceTransfer(noise_std=1e-3)
    grower = Grower(network, IMAGES[:8].double(), method=method, trigger={0: 0.5, 1: 0.75, 2: 1.0}, anneal_steps=2)
    own = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = prepare(network, own)
    grower.follow(optimizer)
    for epoch in range(3):
        if grower.step(epoch=epoch):
            renew(model)
        for first in range(0, len(IMAGES), 16):
            x, y = (data[first : first + 16][rank::ranks] for data in (IMAGES.double(), LABELS))
            optimizer.zero_grad()
            backward(F.cross_entropy(model(x), y))
            optimizer.step()
    grower.finish()
    return [[p.detach(), own.state[p]["momentum_buffer"]] for p in network.parameters()]


def one_rank(rank: int, folder: Path) -> None:
    join(rank, folder)
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2)
    fabric.launch()
    ends = {"fabric": trained(fabric.setup, fabric.backward, rank, 2)}
    library = accelerate.Accelerator(cpu=True)
    ends["accelerate"] = trained(library.prepare, library.backward, rank, 2)
    torch.save(ends, folder / f"{rank}.pt")


def test_two_processes_end_alike_and_compute_what_one_does(cli: CommandLine, tmp_path: Path) -> None:
    offer_port(tmp_path)
    cli.on_two_ranks(one_rank, tmp_path)
    alone = trained(lambda *given: given, torch.Tensor.backward, 0, 1)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for library in ("fabric", "accelerate"):
        for one, other, expected in zip(first[library], second[library], alone, strict=True):
            for ours, theirs, whole in zip(one, other, expected, strict=True):
                assert torch.equal(ours, theirs)
                torch.testing.assert_close(ours, whole, rtol=1e-9, atol=1e-12)

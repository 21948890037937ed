"""A loop under Lightning's Fabric and one under accelerate, in the processes that torchrun starts; see the test."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional as F

from growlab import Grower, VarianceTransfer
from growlab.grower import renew

_GENERATOR = torch.Generator().manual_seed(1)
IMAGES = torch.randn(48, 6, generator=_GENERATOR)
LABELS = torch.randint(3, (48,), generator=_GENERATOR)
Prepare = Callable[[nn.Module, torch.optim.Optimizer], tuple[nn.Module, Any]]


def trained(prepare: Prepare, backward: Callable[[Tensor], None], rank: int, ranks: int) -> list[Any]:
    """Parameters and momentum at the end of a run that grows twice."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3)).double()
    method = VarianceTransfer(noise_std=1e-3)
    grower = Grower(
        network, IMAGES[:8].double(), method=method, trigger={0: 0.5, 1: 0.75, 2: 1.0}, anneal_steps=2
    )
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


def fabric() -> list[Any]:
    library = Fabric(accelerator="cpu", strategy="ddp", devices=2)
    library.launch()
    return trained(library.setup, library.backward, library.global_rank, library.world_size)


def accelerate() -> list[Any]:
    library = Accelerator(cpu=True)
    return trained(library.prepare, library.backward, library.process_index, library.num_processes)


if __name__ == "__main__":
    ends = {"fabric": fabric(), "accelerate": accelerate()}
    torch.save(ends, Path(sys.argv[1]) / f"{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()

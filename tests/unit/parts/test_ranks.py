"""Parts in a plain loop on two ranks: what they decide and measure is the same on both, and a drift is noticed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from growlab.base import ranks
from growlab.base.errors import UserError
from tests.command_line import CommandLine
from tests.unit.grower.test_grower import EPOCHS, STEPS, Loop, batch, mlp


def settings_of(name: str) -> dict[str, Any]:
    from growlab.parts import Averages, Hyperfan, IsotropicLayers
    from tests.unit.parts.isotropic.mixed import Mixed

    if name == "hypernetworks":
        return {"method": Hyperfan(sharing="chunk", noise_std=1e-3), "parts": [Averages(0.9)]}
    layers = IsotropicLayers(reserve_neurons=2, threshold=0.5, importance="gradient", removal_compensation="batch")
    return {"network": lambda: Mixed(6, 3, 8, "batch"), "parts": [layers, Averages(0.9)]}


def trained(rank: int, drift: bool = False, **settings: Any) -> str:
    torch.manual_seed(0)
    loop = Loop(**settings)
    wrapped = torch.nn.parallel.DistributedDataParallel(loop.network)
    for step in range(STEPS * EPOCHS):
        if drift and rank == 1 and step == 2:
            loop.grower.copies()["ema"][0].weight.view(-1)[-1].add_(1e-6)
        if loop.grower.step(epoch=step // STEPS, step=step):
            wrapped = torch.nn.parallel.DistributedDataParallel(loop.network)
        x, y = batch(2 * step + rank)
        loop.optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        loop.optimizer.step()
    # Statistics of normalisation are each rank's until the wrapper's next forward pass.
    ranks.broadcast_buffers(loop.network)
    return str(loop.everything())


def one_rank(rank: int, folder: Path) -> None:
    from growlab.parts import Averages

    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    for name in ("hypernetworks", "isotropic"):
        (folder / f"{name}_{rank}.txt").write_text(trained(rank, **settings_of(name)))
    with pytest.raises(UserError, match=r"ranks hold different values after growth .*: 0\.weight of ema"):
        trained(rank, drift=True, network=mlp, parts=[Averages(0.9)])
    torch.distributed.destroy_process_group()


def test_ranks_end_with_the_same_bits_and_an_average_that_drifts_is_noticed(cli: CommandLine, tmp_path: Path) -> None:
    cli.on_two_ranks(one_rank, tmp_path)
    for name, word in (("hypernetworks", "Hyperfan"), ("isotropic", "asked_by")):
        first, second = ((tmp_path / f"{name}_{rank}.txt").read_text() for rank in (0, 1))
        assert first == second and word in first

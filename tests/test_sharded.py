"""Networks that are sharded or replicated by torch's composable functions once a Grower has them are refused."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from growlab import Grower, PairGrowth, UserError

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own
X = torch.randn(6, 4)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


WAYS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "fully_shard": ("is sharded", lambda network, mesh: fully_shard(network, mesh=mesh)),
    "fully_shard of a part": ("is sharded", lambda network, mesh: fully_shard(network[0], mesh=mesh)),
    "tensor parallel": (
        "is sharded",
        lambda network, mesh: parallelize_module(network, mesh, {"0": ColwiseParallel()}),
    ),
    "replicate": ("is replicated", lambda network, _: replicate(network)),
    "replicate of a part": ("is replicated", lambda network, _: replicate(network[0])),
}


@pytest.mark.parametrize("way", WAYS)
def test_it_is_refused_at_once(way: str, mesh: Any) -> None:
    expected, change = WAYS[way]
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    grower = Grower(network, X, method=PairGrowth(), trigger={0: 0.5, 1: 1.0})
    optimizer = torch.optim.AdamW(network.parameters())
    grower.follow(optimizer)
    grower.step(epoch=0)
    change(network, mesh)
    with pytest.raises(UserError, match=expected):
        grower.follow(torch.optim.AdamW(network.parameters()))
    with pytest.raises(UserError, match=expected):
        grower.step(epoch=0)
    with pytest.raises(UserError, match=expected):
        Grower(network, X, method=PairGrowth(), trigger={0: 0.5, 1: 1.0})
    assert grower.events == []

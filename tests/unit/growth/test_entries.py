"""A network whose own forward applies bare weights and normalises: checkpoints load in any order, at any stage."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_states
from torch import nn
from torch.nn import functional as F

from growlab import Grower, VarianceTransfer

X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
STAGES = {0: 0.25, 1: 0.5, 2: 1.0}


class Bare(nn.Module):
    """Weights and a normalisation of its own, around a layer."""

    def __init__(self, normalised: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Parameter(torch.randn(16, 6) * 0.4), nn.Parameter(torch.randn(3, 16) * 0.3)
        self.gain, self.shift = nn.Parameter(torch.rand(16) + 0.5), nn.Parameter(torch.randn(16))
        self.hidden, self.normalised = nn.Linear(16, 16), normalised

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(x, self.first)
        if self.normalised:
            x = F.layer_norm(x, (x.shape[-1],), self.gain, self.shift)
        return F.linear(torch.relu(self.hidden(torch.relu(x))), self.last)


def begun(normalised: bool, stage: int, steps: int = 0) -> tuple[nn.Module, Grower, torch.optim.Optimizer]:
    torch.manual_seed(1)
    network = Bare(normalised).double()
    grower = Grower(network, X, method=VarianceTransfer(multipliers="keep"), trigger=STAGES)
    optimizer = torch.optim.Adam(network.parameters())
    grower.follow(optimizer)
    for epoch in range(stage + 1):
        grower.step(epoch=epoch)
        for _ in range(steps):
            optimizer.zero_grad()
            network(X).square().mean().backward()
            optimizer.step()
    return network, grower, optimizer


@pytest.mark.parametrize(
    ("normalised", "stage", "start"),
    [
        *((False, 0, 2), (False, 1, 1), (False, 2, 0), (False, 2, 1)),
        *((True, 0, 1), (True, 1, 0), (True, 1, 2), (True, 2, 2)),
    ],
)
def test_checkpoints_of_weights_at_the_root_load_in_any_order(normalised: bool, stage: int, start: int) -> None:
    saved = begun(normalised, stage, steps=3)
    states: list[Any] = [copy.deepcopy(one.state_dict()) for one in saved]
    assert any("unfinished_growth" in name for name in states[0]) == (stage > 0)
    for order in itertools.permutations(range(3)):
        loading = begun(normalised, start)
        for index in order:
            loading[index].load_state_dict(copy.deepcopy(states[index]))
        assert torch.equal(loading[0](X), saved[0](X)), order


def test_a_copy_loads_by_itself_and_nothing_is_left_behind() -> None:
    saved = copy.deepcopy(begun(False, 2, steps=3)[0].state_dict())
    network, grower, optimizer = begun(False, 0)
    twin, _ = copy.deepcopy((grower, optimizer))
    expected = network(X)
    twin.network.load_state_dict(saved)
    assert torch.equal(network(X), expected)
    assert not torch.equal(twin.network(X), expected)
    before = twin.network(X)
    twin.finish()
    torch.testing.assert_close(twin.network(X), before)
    grower.finish(at_any_stage=True)
    for module in (*network.modules(), *twin.network.modules()):
        assert not module._load_state_dict_pre_hooks
        assert not module._state_dict_hooks
    plain = Bare(False).double()
    plain.load_state_dict(twin.network.state_dict())
    torch.testing.assert_close(plain(X), before)


@pytest.mark.filterwarnings("ignore")  # of torch's own, without a process group
@pytest.mark.parametrize("method", [VarianceTransfer(), VarianceTransfer(output_multiplier=False)])
def test_distributed_checkpoints_hold_a_growing_network(method: Any, tmp_path: Path) -> None:
    """torch.distributed.checkpoint's helpers, at every stage, with multipliers and weighted statistics."""

    def make() -> tuple[nn.Module, Grower, torch.optim.Optimizer]:
        torch.manual_seed(1)
        layers = nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
        network = nn.Sequential(nn.Sequential(*layers[:3]), *layers[3:]).double()
        grower = Grower(network, X, method=method, trigger={0: 0.25, 1: 0.5, 2: 1.0}, anneal_steps=5)
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
        grower.follow(optimizer)
        return network, grower, optimizer

    def train(network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            (network(X) - 1).square().mean().backward()
            optimizer.step()

    network, grower, optimizer = make()
    for epoch in range(3):
        grower.step(epoch=epoch)
        train(network, optimizer)
        model, moments = dcp_states.get_state_dict(network, optimizer)
        assert model.keys() == network.state_dict().keys() == dcp_states.get_model_state_dict(network).keys()
        assert moments["state"].keys() == dict(network.named_parameters()).keys()
        dcp.save({"model": model, "optimizer": moments}, checkpoint_id=str(tmp_path / str(epoch)))
        saved = copy.deepcopy(grower.state_dict())
        other, again, resumed = make()
        again.load_state_dict(saved)
        train(other, resumed)
        # Its steps have brought normalisations closer to plain ones.
        again.load_state_dict(saved)
        model, moments = dcp_states.get_state_dict(other, resumed)
        dcp.load({"model": model, "optimizer": moments}, checkpoint_id=str(tmp_path / str(epoch)))
        dcp_states.set_model_state_dict(other, model)
        dcp_states.set_optimizer_state_dict(other, resumed, moments)
        assert torch.equal(other(X), network(X))
        whole = dcp_states.get_model_state_dict(
            network, options=dcp_states.StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        dcp_states.set_model_state_dict(other, whole)
        assert torch.equal(other(X), network(X))
        twin, its = copy.deepcopy((grower, optimizer))
        train(twin.network, its)
        train(other, resumed)
        assert torch.equal(other(X), twin.network(X))

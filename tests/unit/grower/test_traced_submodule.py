"""Networks that cannot be traced as wholes: a submodule grows, everything else is the whole network's."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import growlab
from growlab.widths import UnsupportedOperation


class Encoder(nn.Module):
    """Two layers with a normalisation; takes an input by name."""

    def __init__(self, normed: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.LayerNorm(16) if normed else nn.Identity()

    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        return self.second(self.norm(self.first(x)).relu()) * scale


class Sorting(nn.Module):
    """An encoder that is called twice in a forward that leaves torch for NumPy; returns rows that it chooses."""

    def __init__(self, normed: bool = False) -> None:
        super().__init__()
        self.before, self.encoder, self.head = nn.Linear(5, 8), Encoder(normed), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        order = torch.from_numpy(x.detach().numpy().sum(1).argsort())
        h = self.encoder(self.before(x)[order], scale=2.0)
        h = self.encoder(h, scale=0.5)
        return {"logits": self.head(h[h.detach().numpy()[:, 0] > 0])}


METHODS = {"variance_transfer": growlab.VarianceTransfer(), "net2net": growlab.Net2Net(), "gradmax": growlab.GradMax()}


def growing(network: nn.Module, x: Tensor, method: str) -> growlab.Grower:
    grower = growlab.Grower(
        network, x, method=copy.deepcopy(METHODS[method]), trigger={0: 0.5, 1: 1.0}, anneal_steps=1, trace="encoder"
    )
    grower.provide(lambda number: [(x, torch.zeros(len(x)))] * number, lambda logits, _: logits.square().mean())
    return grower


@pytest.mark.parametrize(("method", "normed"), [("variance_transfer", True), ("net2net", False), ("gradmax", False)])
def test_the_whole_network_trains_while_a_part_of_it_grows(method: str, normed: bool) -> None:
    torch.manual_seed(0)
    network, x = Sorting(normed).double(), torch.randn(12, 5).double()
    fresh, other = copy.deepcopy(network), copy.deepcopy(network)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    grower = growing(network, x, method)
    average = AveragedModel(network)
    grower.follow(optimizer, average)

    def train() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            network(x)["logits"].square().mean().backward()
            optimizer.step()
            average.update_parameters(network)

    train()
    outside = network.before.weight
    assert network.encoder.first.weight.shape == (8, 8)
    (event,) = grower.step(epoch=1)
    assert event.output_factor == 1.0
    assert event.parity_error_eval is not None
    assert max(event.parity_error_eval, event.parity_error_train) < 1e-10
    assert network.before.weight is outside
    assert average.module.get_parameter("encoder.first.weight").shape == (16, 8)
    train()
    network.eval()
    wanted = network(x)["logits"]
    saved, state = copy.deepcopy(network.state_dict()), grower.state_dict()
    assert grower.finish() is network
    fresh.eval().load_state_dict(network.state_dict())
    torch.testing.assert_close(fresh(x)["logits"], wanted, rtol=1e-10, atol=1e-10)
    resumed = growing(other, x, method)
    other.eval().load_state_dict(saved)
    resumed.load_state_dict(state)
    torch.testing.assert_close(other(x)["logits"], wanted, rtol=1e-10, atol=1e-10)


def test_a_graph_has_the_names_of_the_whole_network() -> None:
    network, x = Sorting(), torch.randn(12, 5)
    with pytest.raises(UnsupportedOperation, match=r"at `order = torch\.from_numpy.*trace=SUBMODULE"):
        growlab.trace(network, x)
    for submodule in ("encoder", network.encoder):
        graph = growlab.trace(network, x, submodule=submodule)
        assert graph.full_widths == {"encoder.first": 16}
        assert graph.fixed["encoder.second"] == "encoder puts it out, and is traced alone"
        assert graph.fixed["head"] == "outside of encoder, which is traced alone"


class Reading(Sorting):
    """The rest of the network reads weights of the encoder."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = super().forward(x)["logits"]
        return {"logits": logits + self.encoder.first.weight.new_ones(3, 16) @ self.encoder.first.weight[:, 0]}


def test_channels_that_the_rest_of_the_network_reads_stay() -> None:
    assert growlab.trace(Reading(), torch.randn(12, 5), submodule="encoder").full_widths == {}


@pytest.mark.parametrize(
    ("submodule", "message"),
    [
        ("decoder", "no submodule 'decoder' to trace"),
        (nn.Linear(2, 2), "no submodule 'Linear' to trace"),
        ("encoder.spare", r"does not call its submodule encoder\.spare"),
    ],
)
def test_what_cannot_be_traced_is_named(submodule: Any, message: str) -> None:
    network = Sorting()
    network.encoder.spare = nn.Linear(2, 2)
    with pytest.raises(UnsupportedOperation, match=message):
        growlab.trace(network, torch.randn(12, 5), submodule=submodule)

"""Growth with torch's checkpoint wrappers, and growth of a submodule if the whole network cannot be traced."""

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    ActivationWrapper,
    CheckpointImpl,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.optim.swa_utils import AveragedModel

import growlab
from growlab import Grower, Net2Net, PairGrowth, VarianceTransfer
from growlab.parts import Averages
from growlab.widths import UnsupportedOperation
from tests.cases import train as take_steps
from tests.unit.parts.stages import Residual

X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), Residual(8, 16), Residual(8, 16), nn.Linear(8, 2)).double()


def one(model: Any, wrap: Callable[[nn.Module], nn.Module]) -> None:
    model[1] = wrap(model[1])


def inner(model: Any, wrap: Callable[[nn.Module], nn.Module]) -> None:
    model[1].up, model[3] = wrap(model[1].up), wrap(model[3])


def nested(model: Any, wrap: Callable[[nn.Module], nn.Module]) -> None:
    model[2].down = wrap(model[2].down)
    model[2] = wrap(model[2])


def train(method: Any, change: Any = None, at: int = -2) -> tuple[Any, Grower, list[Any]]:
    """Train in three stages; add wrappers before the Grower (-2), before the optimizer (-1), or in a stage."""
    model = network()
    if at == -2 and change:
        change(model)
    grower = Grower(model, X, method=method, trigger={0: 0.5, 1: 0.75, 2: 1.0}, parts=[Averages(0.9)], anneal_steps=3)
    if at == -1 and change:
        change(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    average = AveragedModel(model)
    grower.follow(optimizer, average)
    found: list[Any] = []
    for epoch in range(3):
        grower.step(epoch=epoch)
        if at == epoch and change:
            change(model)
        take_steps(model, optimizer, X, steps=4)
        found += [copy.deepcopy(model.state_dict()), sorted(grower.regions())]
        found.append(copy.deepcopy(average.module.state_dict()))
        model.load_state_dict(model.state_dict())
    return model, grower, found


@cache
def unwrapped(method: Any) -> list[Any]:
    return train(method())[2]


reentrant = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    ("method", "place", "at", "wrap"),
    [
        (VarianceTransfer(), one, -1, checkpoint_wrapper),
        (VarianceTransfer(), inner, 1, checkpoint_wrapper),
        (VarianceTransfer(), nested, -2, checkpoint_wrapper),
        (VarianceTransfer(), nested, 0, checkpoint_wrapper),
        (PairGrowth(), nested, -1, checkpoint_wrapper),
        (Net2Net(), inner, 0, checkpoint_wrapper),
        (PairGrowth(), one, -1, offload_wrapper),
        (PairGrowth(), one, -1, reentrant),
    ],
)
def test_training_is_the_same(method: Any, place: Any, at: int, wrap: Any) -> None:
    expected = unwrapped(type(method))
    model, grower, found = train(method, lambda model: place(model, wrap), at)
    # Draws depend on names, which wrappers change if they come before the trace.
    if at > -2:
        for got, wanted in zip(found, expected, strict=True):
            if isinstance(got, list):
                assert got == wanted
            else:
                torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)
    twin = copy.deepcopy(grower)
    twin.network.eval()
    assert torch.equal(twin.network(X), model.eval()(X))
    twin.finish()
    output = model(X)
    grower.finish()
    torch.testing.assert_close(model(X), output, rtol=1e-10, atol=1e-12)
    plain = network()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(plain.eval()(X), output, rtol=1e-10, atol=1e-12)
    assert any("_checkpoint_wrapped_module" in name for name, _ in model.named_parameters())
    assert any(isinstance(module, ActivationWrapper) for module in model.modules())


class Encoder(nn.Module):
    """Two layers with a normalisation; takes an input by name."""

    def __init__(self, normed: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.LayerNorm(16) if normed else nn.Identity()

    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        return self.second(self.norm(self.first(x)).relu()) * scale


class Sorting(nn.Module):
    """Calls an encoder twice, orders rows by NumPy, and returns rows that depend on the data."""

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
    expected = network(x)["logits"]
    saved, state = copy.deepcopy(network.state_dict()), grower.state_dict()
    assert grower.finish() is network
    fresh.eval().load_state_dict(network.state_dict())
    torch.testing.assert_close(fresh(x)["logits"], expected, rtol=1e-10, atol=1e-10)
    resumed = growing(other, x, method)
    other.eval().load_state_dict(saved)
    resumed.load_state_dict(state)
    torch.testing.assert_close(other(x)["logits"], expected, rtol=1e-10, atol=1e-10)


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
    """Reads weights of the encoder outside of it."""

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
def test_untraceable_submodules_are_named(submodule: Any, message: str) -> None:
    network = Sorting()
    network.encoder.spare = nn.Linear(2, 2)
    with pytest.raises(UnsupportedOperation, match=message):
        growlab.trace(network, torch.randn(12, 5), submodule=submodule)

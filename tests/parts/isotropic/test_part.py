"""Isotropic layers that decide their own widths beside layers that grow by a schedule and any method."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab import parts
from growlab.base.errors import UserError
from growlab.grower import Grower
from growlab.grower.triggers import ByMethod
from growlab.growth import Net2Net, PairGrowth, RandomGrowth, VarianceTransfer
from growlab.optim import SGD
from growlab.parts.isotropic import Isotropic, IsotropicLayers, IsotropicMLP
from tests.parts.isotropic.mixed import Mixed

METHODS = {
    "ours": VarianceTransfer,
    "ours by constraint": lambda: VarianceTransfer("constraint"),
    "net2net": Net2Net,
    "pairs": PairGrowth,
    "random": RandomGrowth,
}
SCHEDULE = {0: 0.5, 2: 0.75, 4: 1.0}
# Neurons come and go.
SETTINGS: dict[str, Any] = {"scaffold": 2, "threshold": 0.5, "neurons_per_event": 2}


def batch(number: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(100 + number)
    return torch.randn(16, 5, generator=source, dtype=torch.float64), torch.randint(
        3, (16,), generator=source
    )


class Loop:
    """Epochs of three steps on a mixed network."""

    def __init__(self, method: Any, norm: str = "none", adam: bool = False, **settings: Any) -> None:
        torch.manual_seed(0)
        self.network = Mixed(5, 3, 8, norm).double()
        both = (parts.Averages(0.9), IsotropicLayers(**{**SETTINGS, **settings}))
        self.grower = Grower(
            self.network, batch(0)[0], method=method, trigger=SCHEDULE, parts=both, anneal_steps=2
        )
        parameters = list(self.network.parameters())
        self.optimizer = torch.optim.Adam(parameters, 0.01) if adam else SGD(parameters, 0.1, momentum=0.9)
        self.grower.follow(self.optimizer)

    def run(self, *epochs: int) -> None:
        for epoch in epochs:
            self.grower.step(epoch=epoch, step=3 * epoch)
            for step in range(3):
                x, y = batch(3 * epoch + step)
                self.optimizer.zero_grad()
                F.cross_entropy(self.network(x), y).backward()
                self.optimizer.step()

    def saved(self) -> dict[str, Any]:
        held = {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "grower": self.grower.state_dict(),
        }
        return copy.deepcopy(held)

    def load(self, saved: dict[str, Any]) -> None:
        self.grower.load_state_dict(saved["grower"])
        self.network.load_state_dict(saved["network"])
        self.optimizer.load_state_dict(saved["optimizer"])


@pytest.mark.parametrize(
    ("name", "norm"),
    [
        ("ours", "none"),
        ("ours", "batch"),
        ("ours", "layer"),
        ("ours by constraint", "batch"),
        ("net2net", "layer"),
        ("pairs", "none"),
        ("random", "batch"),
    ],
)
def test_each_event_keeps_its_promise_and_leaves_the_others_groups_alone(name: str, norm: str) -> None:
    loop = Loop(METHODS[name](), norm)
    own = set(loop.grower.parts[1].groups)
    assert own == {"hidden.0", "hidden.3"}
    full = {g: w for g, w in loop.grower.full_graph.full_widths.items() if g not in own}
    loop.run(*range(6))
    asked = [event for event in loop.grower.events if event.get("asked_by") == "isotropic"]
    scheduled = [event for event in loop.grower.events if "asked_by" not in event]
    assert len(scheduled) == 2 and len(asked) >= 2
    assert {event["method"] for event in asked} == {"Isotropic"}
    for event in loop.grower.events:
        changed = {g for g, w in event["widths_after"].items() if w != event["widths_before"][g]}
        assert changed <= own if event in asked else not changed & own
        grew = all(w >= event["widths_before"][g] for g, w in event["widths_after"].items())
        promised = event["parity_tolerance_eval"]
        assert promised is None or event["parity_error_eval"] <= promised
        if grew and name != "random":
            assert event["parity_error_eval"] < 1e-9 and event["ema_parity_error_eval"] < 1e-9
    assert {g: loop.grower.state.widths[g] for g in full} == full
    before = loop.network.eval()(batch(0)[0])
    network = loop.grower.finish()
    assert torch.allclose(network(batch(0)[0]), before, rtol=1e-10, atol=1e-12)
    plain = nn.ModuleDict({"network": network}).state_dict()
    assert not [key for key in plain if "unfinished" in key]


@pytest.mark.parametrize(("epoch", "adam"), [(1, False), (2, True), (3, False), (4, True)])
def test_a_resumed_loop_equals_one_that_was_not_interrupted(epoch: int, adam: bool) -> None:
    whole = Loop(VarianceTransfer(), "layer", adam)
    whole.run(*range(6))
    first = Loop(VarianceTransfer(), "layer", adam)
    first.run(*range(epoch))
    second = Loop(VarianceTransfer(), "layer", adam)
    second.load(first.saved())
    second.run(*range(epoch, 6))
    for one, other in zip(whole.saved().values(), second.saved().values(), strict=True):
        assert _flat(one).keys() == _flat(other).keys()
        for key, value in _flat(one).items():
            if not key.rpartition("/")[2].startswith("seconds") and "seconds_by_part" not in key:
                same = _flat(other)[key]
                assert torch.equal(value, same) if isinstance(value, Tensor) else value == same, key


def test_a_method_that_decides_by_itself_is_asked() -> None:
    torch.manual_seed(0)
    network = IsotropicMLP(5, [8], 3).double()
    method = Isotropic()
    grower = Grower(network, batch(0)[0], method=method, trigger=ByMethod(0.5))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    grower.follow(optimizer)
    for epoch in range(3):
        grower.step(epoch=epoch, step=epoch)
        optimizer.zero_grad()
        F.cross_entropy(network(batch(epoch)[0]), batch(epoch)[1]).backward()
        optimizer.step()
    assert grower.state.asked >= 1
    assert {id(p) for p in optimizer.state} == {id(p) for p in network.parameters()}


def _flat(content: Any, path: str = "") -> dict[str, Any]:
    if isinstance(content, dict):
        return {k: v for key, one in content.items() for k, v in _flat(one, f"{path}/{key}").items()}
    if isinstance(content, list | tuple):
        return {k: v for index, one in enumerate(content) for k, v in _flat(one, f"{path}/{index}").items()}
    return {path: content}


def test_the_gradient_follows_where_multiplied_rows_are_written_into_the_weights() -> None:
    """The first isotropic layer reads channels that grow, so its rows are multiplied; a turn mixes them."""
    loop = Loop(VarianceTransfer(), mode="scheduled", target_width=8, every_n_epochs=3)
    loop.run(0, 1)
    loop.grower.step(epoch=2, step=6)
    known = dict(loop.grower.state.multipliers)
    assert "hidden.0.weight" in known
    x, y = batch(50)

    def gradients() -> dict[str, Tensor]:
        loop.network.zero_grad()
        F.cross_entropy(loop.network.eval()(x), y).backward()
        return {name: p.grad.clone() for name, p in loop.network.named_parameters()}

    before, widths = gradients(), dict(loop.grower.state.widths)
    (event,) = loop.grower.step(epoch=3, step=9)
    assert "hidden.0.weight" not in loop.grower.state.multipliers
    after, graph = gradients(), loop.grower.graph
    assert event.widths_after["hidden.0"] > widths["hidden.0"]
    for name in event.replaced:
        if name in before and "log_length" not in name:
            moved = event.carry.carried(before[name], name, graph, widths, event.widths_after)
            # New neurons have a gradient of their own, which the old network does not determine.
            old = tuple(slice(0, n) for n in before[name].shape)
            assert torch.allclose(after[name][old], moved[old], rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"method": Isotropic(), "trigger": ByMethod()}, "decides the widths of isotropic layers already"),
        (
            {"network": nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))},
            "isotropic growth needs a layer",
        ),
    ],
)
def test_what_cannot_be_is_told(arguments: dict[str, Any], told: str) -> None:
    given = {"network": IsotropicMLP(5, [4], 3), "method": PairGrowth(), "trigger": SCHEDULE, **arguments}
    with pytest.raises(UserError, match=told):
        Grower(given.pop("network").double(), batch(0)[0], parts=[IsotropicLayers()], **given)
    with pytest.raises(ValueError, match="target_width goes with mode='scheduled'"):
        IsotropicLayers("scheduled")

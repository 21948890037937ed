"""Optimizers that hold parameters in lists of their own step the grown network's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from growlab import Grower, Net2Net, UserError, VarianceTransfer
from growlab.optim.followers import order_parameters


class Own(torch.optim.Optimizer):
    """Gradient descent on what `hold` picks, of its own list or group, and on nothing else."""

    def __init__(self, params: Any, hold: Callable[[list[nn.Parameter]], Any], in_group: bool = False) -> None:
        super().__init__(params, {"lr": 0.1})
        held = hold(self.param_groups[0]["params"])
        if in_group:
            self.param_groups[0]["matrices"] = held
        else:
            self.held = held

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = self.param_groups[0].get("matrices") or self.held
        for parameter in list(held.values() if isinstance(held, dict) else held):
            for one in parameter if isinstance(parameter, (list, tuple)) else [parameter]:
                one.sub_(one.grad, alpha=0.1)


HOLD: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "list": lambda params: [p for p in params if p.dim() == 2],
    "tuple": tuple,
    "set": set,
    "lists": lambda params: [params[:2], tuple(params[2:])],
    "dictionary": lambda params: {f"kind {p.dim()}": [q for q in params if q.dim() == p.dim()] for p in params},
    "by number": lambda params: {number: p for number, p in enumerate(params)},
    "mapping of parameters": lambda params: {p: p for p in params},
}


def network() -> nn.Module:
    torch.manual_seed(0)
    # The last bias has as many numbers as there are parameters before it.
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).double()


X = torch.randn(8, 6, dtype=torch.float64)


@pytest.mark.parametrize("in_group", [False, True])
@pytest.mark.parametrize("hold", HOLD)
def test_parameters_in_an_optimizers_own_lists_are_exchanged(hold: str, in_group: bool) -> None:
    model = network()
    optimizer = Own(model.parameters(), HOLD[hold], in_group)
    grower = Grower(model, X, method=Net2Net(), trigger={0: 0.25, 1: 0.5, 2: 1.0})
    grower.follow(optimizer)
    for epoch in range(3):
        grower.step(epoch=epoch)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
        for parameter, old in zip(model.parameters(), before, strict=True):
            expected = old - 0.1 * parameter.grad if hold != "list" or parameter.dim() == 2 else old
            torch.testing.assert_close(parameter.detach(), expected)


@pytest.mark.parametrize(
    "hold",
    [
        lambda params: {p.shape: [p] for p in params},
        lambda params: {(p.shape, p.dtype): [p] for p in params},
        lambda params: {p.numel(): [p] for p in params},
        lambda params: [torch.zeros_like(p) for p in params],
        lambda params: {f"parameter {number}": torch.zeros_like(p) for number, p in enumerate(params)},
        lambda params: {id(p): torch.zeros_like(p) for p in params},
        lambda params: {number: {"mean": torch.zeros_like(p), "step": 0} for number, p in enumerate(params)},
        lambda params: [(torch.zeros_like(p), torch.ones_like(p)) for p in params],
        lambda params: torch.zeros(sum(p.numel() for p in params)),
        lambda params: {"flat": [torch.zeros(sum(p.numel() for p in params))]},
    ],
    ids=[
        *("shape", "shape and dtype", "size", "velocities", "by name", "by id", "by number", "in pairs"),
        *("in one tensor", "in one tensor, in a dictionary"),
    ],
)
def test_containers_that_would_not_fit_are_refused_before_the_network_grows(
    hold: Callable[[list[nn.Parameter]], Any],
) -> None:
    model = network()
    grower = Grower(model, X, method=Net2Net(), trigger={0: 0.5, 1: 1.0})
    optimizer = Own(model.parameters(), hold)
    grower.follow(optimizer)
    grower.step(epoch=0)
    with pytest.raises(UserError, match="'held', which growlab cannot carry through growth"):
        grower.step(epoch=1)
    assert grower.state.stage == 0
    assert model[0].weight.shape == (8, 6)  # type: ignore[index, union-attr]


def test_new_parameters_are_refused_if_an_optimizer_keeps_lists() -> None:
    model = network()
    past = dict(model.named_parameters())
    now = {**past, "4.weight": nn.Parameter(torch.ones(3))}
    order_parameters(plain := torch.optim.SGD(model.parameters()), past, now)
    assert len(plain.param_groups[0]["params"]) == 5
    with pytest.raises(UserError, match="Own keeps parameters in 'matrices' too"):
        order_parameters(Own(model.parameters(), HOLD["list"], in_group=True), past, now)


class Together(torch.optim.Optimizer):
    """Steps several optimizers, whose groups it shows as its own."""

    def __init__(self, *inner: torch.optim.Optimizer, by_name: bool) -> None:
        super().__init__([p for one in inner for group in one.param_groups for p in group["params"]], {})
        self.param_groups = [group for one in inner for group in one.param_groups]
        self.inner: Any = dict(enumerate(inner)) if by_name else list(inner)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.inner.values() if isinstance(self.inner, dict) else self.inner:
            one.step()


@pytest.mark.parametrize("by_name", [False, True])
def test_optimizers_in_an_optimizers_list_follow_with_their_state(by_name: bool) -> None:
    def train(together: bool) -> list[torch.Tensor]:
        model = network()
        grower = Grower(model, X, method=Net2Net(), trigger={0: 0.25, 2: 0.5, 4: 1.0})
        matrices = [p for p in model.parameters() if p.dim() == 2]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        inner = torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.Adam(vectors, lr=0.01)
        outer = [Together(*inner, by_name=by_name)] if together else list(inner)
        grower.follow(*outer, state="inherit")
        for epoch in range(6):
            grower.step(epoch=epoch)
            model.zero_grad()
            (model(X) - 1).square().mean().backward()
            for one in outer:
                one.step()
        return [p.detach() for p in model.parameters()]

    for one, other in zip(train(True), train(False), strict=True):
        assert torch.equal(one, other)


class Around(torch.optim.Optimizer):
    """Shows the groups and the state of the one inside of it as its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


def test_state_that_two_optimizers_share_is_carried_once() -> None:
    def train(around: bool) -> list[torch.Tensor]:
        model = network()
        # Without its multiplier the output shrinks, and with it all gradients.
        method = VarianceTransfer(output_multiplier=False, rescale_layers_without_batch_norm=True)
        grower = Grower(model, X, method=method, trigger={0: 0.25, 2: 0.5, 4: 1.0})
        inner: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        optimizer = Around(inner) if around else inner
        grower.follow(optimizer, state="inherit")
        for epoch in range(6):
            grower.step(epoch=epoch)
            optimizer.zero_grad()
            (model(X) - 1).square().mean().backward()
            optimizer.step()
        assert any(event.output_factor != 1.0 for event in grower.events)
        grower.finish()
        return [one for p in model.parameters() for one in (p.detach(), inner.state[p]["momentum_buffer"])]

    for one, other in zip(train(True), train(False), strict=True):
        assert torch.equal(one, other)

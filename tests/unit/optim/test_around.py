"""Wrapped optimizers, and optimizers with parameter lists, global state entries or nested state, through growth."""

import io
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from growlab import Grower, Net2Net, PairGrowth, UserError, VarianceTransfer
from growlab.optim.followers import order_parameters, remove_parameters
from growlab.parts import Part
from tests.cases import train as take_step

X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()


def train(make: Callable[[Any], Any], state: Any = "auto", method: Any = None) -> tuple[nn.Sequential, Any, Grower]:
    """Train through two events, for 24 steps of one optimizer or several."""
    model = network()
    grower = Grower(model, X, method=method or PairGrowth(), trigger={0: 0.5, 1: 0.75, 2: 1.0})
    optimizer = make(model.parameters())
    optimizers = optimizer if isinstance(optimizer, tuple) else (optimizer,)
    grower.follow(*optimizers, state=state)
    for epoch in range(3):
        grower.step(epoch=epoch)
        for _ in range(8):
            model.zero_grad()
            (model(X) - 1).square().sum().backward()
            for one in optimizers:
                one.step()
    return model, optimizer, grower


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


class Slow:
    """Slow weights (Lookahead) around another optimizer, in a class that is not an Optimizer."""

    def __init__(self, inner: torch.optim.Optimizer, name: str, hold: Callable[[Any], Any] = lambda one: one) -> None:
        self.state: dict[Any, Any] = {}
        self.around(inner, name, hold)

    def around(self, inner: torch.optim.Optimizer, name: str, hold: Callable[[Any], Any]) -> None:
        self.param_groups, self.count, self.name = inner.param_groups, 0, name
        setattr(self, name, hold(inner))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        inner = getattr(self, self.name)
        for one in inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list) else [inner]:
            one.step()
        self.count += 1
        for p in self.param_groups[0]["params"]:
            slow = self.state.setdefault(p, {}).setdefault("slow", p.detach().clone())
            if self.count % 4 == 0:
                p.copy_(slow.add_(p - slow, alpha=0.5))


class SlowOptimizer(Slow, torch.optim.Optimizer):
    """Slow weights as an Optimizer."""

    def __init__(self, inner: torch.optim.Optimizer, name: str, hold: Callable[[Any], Any] = lambda one: one) -> None:
        torch.optim.Optimizer.__init__(self, inner.param_groups, {})
        self.around(inner, name, hold)


class Unmade(Slow, torch.optim.Optimizer):
    """Slow weights as an Optimizer whose constructor is not called."""


@pytest.mark.parametrize(
    ("kind", "inherits"),
    [
        *((Slow, "auto"), (Slow, "reset"), (SlowOptimizer, "inherit"), (SlowOptimizer, "zero_new")),
        *((Unmade, "inherit"), (Unmade, "reset")),
    ],
)
def test_a_wrappers_state_follows(kind: Any, inherits: Any) -> None:
    holds: dict[str, Callable[[Any], Any]] = {
        "inner": lambda one: one,
        "optimizers": lambda one: [one],
        "by_name": lambda one: {"adam": one},
    }
    found = []
    for name, hold in holds.items():
        model, optimizer, grower = train(lambda p, n=name, h=hold: kind(adam(p), n, h), inherits)
        assert all(optimizer.state[p]["slow"].shape == p.shape for p in model.parameters())
        assert set(optimizer.state) == set(model.parameters())
        (inner,) = [one for one in grower.optimizers if isinstance(one, torch.optim.Adam)]
        assert all(inner.state[p]["exp_avg"].shape == p.shape for p in model.parameters())
        found.append(weights(model))
    assert all(torch.equal(one, found[0]) for one in found)


class Shell(torch.optim.Optimizer):
    """Forwards everything without calling Optimizer's constructor, like accelerate's wrapper."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner

    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.optimizer.step(closure)


class Showing(torch.optim.Optimizer):
    """Shares the groups and the state of its inner optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


class Sharing(Showing):
    """Shares the state of each parameter, but not the dictionary of states."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self.state = {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p] = self.state.get(p) or self.inner.state[p]
            assert self.state[p] is self.inner.state[p]


class Forwarding:
    """Forwards missing attributes, like Fabric's wrapper."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._optimizer = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


@pytest.mark.parametrize("kind", [Shell, Showing, Sharing, Forwarding])
def test_a_wrapper_without_state_of_its_own_changes_nothing(kind: Any) -> None:
    # Without an output multiplier the output and all gradients shrink.
    method = VarianceTransfer(output_multiplier=False, rescale_layers_without_batch_norm=True)
    plain, _, grower = train(adam, "inherit", method)
    wrapped, _, other = train(lambda p: kind(adam(p)), "inherit", method)
    assert any(event.output_factor != 1.0 for event in grower.events)
    assert torch.equal(weights(plain), weights(wrapped))
    assert grower.state.as_dict() == other.state.as_dict()


class Together(torch.optim.Optimizer):
    """Steps several optimizers and shares their groups."""

    def __init__(self, *inner: torch.optim.Optimizer, by_name: bool) -> None:
        super().__init__([p for one in inner for group in one.param_groups for p in group["params"]], {})
        self.param_groups = [group for one in inner for group in one.param_groups]
        self.inner: Any = dict(enumerate(inner)) if by_name else list(inner)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.inner.values() if isinstance(self.inner, dict) else self.inner:
            one.step()


@pytest.mark.parametrize("by_name", [False, True])
def test_optimizers_in_an_optimizers_list_follow_with_their_state(by_name: bool) -> None:
    def separate(params: Any) -> tuple[torch.optim.Optimizer, ...]:
        first, *others = params
        return torch.optim.SGD([first], lr=0.01, momentum=0.9), adam(others)

    one, *_ = train(lambda p: Together(*separate(p), by_name=by_name), "inherit")
    assert torch.equal(weights(one), weights(train(separate, "inherit")[0]))


class Entries(torch.optim.Adam):
    """Global counts and tensors in the state, as in SPAM, MADGRAD and TRAC."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.state["total"] = self.state.get("total", 0) + 1
        self.state.setdefault("sums", {"of": torch.zeros(3), 2: [torch.ones(())]})["of"] += 1
        self.state.setdefault((0, "k"), torch.zeros(1, dtype=torch.long)).add_(1)
        return super().step(closure)


@pytest.mark.parametrize("inherits", ["auto", "inherit", "zero_new", "reset"])
def test_entries_of_no_parameter_stay_as_they_are(inherits: Any) -> None:
    model, optimizer, grower = train(lambda p: Entries(p, lr=0.01), inherits)
    assert optimizer.state["total"] == 24
    assert torch.equal(optimizer.state["sums"]["of"], torch.full((3,), 24.0))
    assert optimizer.state[0, "k"] == 24
    plain, _, _ = train(adam, inherits)
    assert torch.equal(weights(model), weights(plain))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again = Entries(model.parameters(), lr=0.01)
    grower.follow(again)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert again.state["total"] == 24
    assert again.state["sums"][2] == [1.0]
    assert all(torch.equal(again.state[p]["exp_avg"], optimizer.state[p]["exp_avg"]) for p in model.parameters())


class Held:
    def __init__(self, p: torch.Tensor) -> None:
        self.mean = torch.zeros_like(p)


class Slotted:
    __slots__ = ("mean",)

    def __init__(self, p: torch.Tensor) -> None:
        self.mean = torch.zeros_like(p)


class Kept(torch.optim.Optimizer):
    """A running mean of gradients, in a container that `begin` creates and `mean` reads."""

    def __init__(self, params: Any, begin: Any, mean: Callable[[Any], torch.Tensor], where: str = "") -> None:
        super().__init__(params, {})
        self.begin, self.mean, self.where = begin, mean, where
        self.own: dict[Any, Any] = {}
        if where == "state":
            self.state["own"] = self.own

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            kept, key = (self.state.get("own", self.own), p) if self.where else (self.state[p], "memory")
            mean = self.mean(kept.setdefault(key, self.begin(p))).view_as(p)
            p.sub_(mean.lerp_(p.grad, 0.1), alpha=0.01)


PLAIN: Any = (torch.zeros_like, lambda kept: kept)
CONTAINERS: dict[str, Any] = {
    "list": (lambda p: [torch.zeros_like(p), 3], lambda kept: kept[0]),
    "tuple": (lambda p: (torch.zeros_like(p),), lambda kept: kept[0]),
    "dictionary": (lambda p: {"memory": torch.zeros_like(p)}, lambda kept: kept["memory"]),
    "deque": (lambda p: deque([torch.zeros_like(p)], maxlen=2), lambda kept: kept[0]),
    "nested": (lambda p: {0: [{"memory": torch.zeros_like(p)}]}, lambda kept: kept[0][0]["memory"]),
    "with its size": (lambda p: (p.shape, torch.zeros(p.shape).to(p)), lambda kept: kept[1].view(kept[0])),
}
OBJECTS: dict[str, Any] = {
    "object": (Held, lambda kept: kept.mean),
    "slots": (Slotted, lambda kept: kept.mean),
    "list of objects": (lambda p: [Held(p)], lambda kept: kept[0].mean),
    "module": (lambda p: nn.ParameterList([torch.zeros_like(p)]), lambda kept: kept[0].data),
    "array": (lambda p: p.detach().numpy() * 0, torch.from_numpy),
    "flat": (lambda p: torch.zeros_like(p).flatten(), lambda kept: kept),
}


@pytest.mark.parametrize("where", ["attribute", "state"])
def test_dictionaries_by_parameter_are_carried_as_state_is(where: str) -> None:
    """The dictionary is an attribute, or a named entry of the state."""
    found, _, _ = train(lambda p: Kept(p, *PLAIN, where), "zero_new")
    expected, _, _ = train(lambda p: Kept(p, *PLAIN), "zero_new")
    assert torch.equal(weights(found), weights(expected))


@pytest.mark.parametrize("name", CONTAINERS)
def test_tensors_in_containers_move_as_state_does(name: str) -> None:
    found, _, _ = train(lambda p: Kept(p, *CONTAINERS[name]), "inherit")
    expected, _, _ = train(lambda p: Kept(p, *PLAIN), "inherit")
    assert torch.equal(weights(found), weights(expected))


@pytest.mark.parametrize("name", OBJECTS)
def test_state_in_objects_is_reset_with_a_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        train(lambda p: Kept(p, *OBJECTS[name]))
    warnings = [record.getMessage() for record in caplog.records if "is reset at" in record.getMessage()]
    assert len(warnings) == 2, "one of each event"
    assert all("Kept's 'memory' of 0.weight is" in one for one in warnings)
    with pytest.raises(UserError, match=r"Kept's 'memory' of 0\.weight is .*state='reset'"):
        train(lambda p: Kept(p, *OBJECTS[name]), "inherit")


class Own(torch.optim.Optimizer):
    """Gradient descent on the container that `hold` makes of the parameters, in an attribute or in the group."""

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
        take_step(model, optimizer, X)
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
def test_containers_that_do_not_fit_raise_an_error_before_growth(
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
    assert model[0].weight.shape == (4, 4)


def test_new_parameters_raise_an_error_if_an_optimizer_keeps_lists() -> None:
    model = network()
    past = dict(model.named_parameters())
    now = {**past, "4.weight": nn.Parameter(torch.ones(3))}
    order_parameters(plain := torch.optim.SGD(model.parameters()), past, now)
    assert len(plain.param_groups[0]["params"]) == 5
    order_parameters(named := torch.optim.SGD(model.named_parameters()), past, now)
    assert named.param_groups[0]["param_names"] == list(now)
    remove_parameters(named, {id(now["0.weight"])})
    assert named.param_groups[0]["param_names"] == list(now)[1:]
    with pytest.raises(UserError, match="Own keeps parameters in 'matrices' too"):
        order_parameters(Own(model.parameters(), HOLD["list"], in_group=True), past, now)


class Counting(Part):
    """Counts calls of `before_update`."""

    count = 0

    def before_update(self, grower: Any, optimizer: Any) -> None:
        self.count += 1


def test_an_optimizer_in_the_memory_of_a_deleted_one_has_hooks_of_its_own() -> None:
    model, part = network(), Counting()
    grower, optimizer = Grower(model, X, parts=[part], verbose=False), torch.optim.SGD(model.parameters(), lr=0.1)
    # As left behind by a deleted optimizer with the same id.
    grower.followers._announced.add(id(optimizer))
    grower.follow(optimizer)
    optimizer.step()
    assert part.count == 1


class Bare:
    """A wrapper with neither groups nor a state_dict."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def test_a_bare_wrapper_of_an_optimizer_follows(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    grower, wrapper = Grower(model, X, trigger={0: 0.5, 1: 1.0}, verbose=False), Bare(adam(model.parameters()))
    grower.follow(wrapper)
    assert "contains no parameter" not in caplog.text
    model(X).sum().backward()
    wrapper.optimizer.step()
    assert grower.gradients().keys() == dict(model.named_parameters()).keys()
    saved = grower.checkpoint()
    before = weights(model)
    wrapper.optimizer.step()
    grower.put_back(saved)
    assert torch.equal(weights(model), before)
    assert len(grower.step(epoch=1)) == 1

"""Optimizers of pytorch_optimizer through growth: state of the parameter's shape is carried, other state is reset."""

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from growlab import Grower
from growlab.growth import Net2Net, PairGrowth
from tests.unit.optim.test_follow import Run

theirs = pytest.importorskip("pytorch_optimizer")
pytestmark = pytest.mark.filterwarnings("ignore")  # raised inside the other library


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))


@pytest.mark.parametrize(
    ("name", "key", "power"),
    [("AdaBelief", "exp_avg", 1), ("AdaBelief", "exp_avg_var", 2), ("Adan", "exp_avg_diff", 1),
     ("Adan", "previous_grad", 1), ("Yogi", "exp_avg_sq", 2), ("MARS", "last_grad", 1)],
)  # fmt: skip
def test_replication_carries_moments_by_their_power_of_the_gradient(name, key, power):
    """Net2Net's copies divide a unit's gradient, so first and second moments scale by different powers."""
    run = Run(lambda p: getattr(theirs, name)(p, lr=1e-2), Net2Net(), "inherit").steps(4)
    old = run.state_of("4.weight")[key].clone()
    event = run.grow()
    expected = event.carry.carried(old, "4.weight", run.graph, event.widths_before, event.widths_after, power)
    assert torch.equal(run.state_of("4.weight")[key], expected)


def _made(name, **settings):
    return lambda params: getattr(theirs, name)(params, **{"lr": 1e-3, **settings})


def _around(name, **settings):
    return lambda params: getattr(theirs, name)(torch.optim.AdamW(params, 1e-3), **settings)


def _on_class(name):
    return lambda params: getattr(theirs, name)(params, torch.optim.AdamW, lr=1e-3)


ALL = {
    **{name: _made(name) for name in (
        "AccSGD", "AdaBelief", "AdaBound", "AdaFactor", "Adai", "AdamP", "AdamS", "Adan", "AdEMAMix", "AggMo", "Aida",
        "Amos", "ApolloDQN", "CAME", "Conda", "DAdaptSGD", "DiffGrad", "Fira", "GaLore", "GrokFastAdamW", "Kron",
        "LaProp", "Lion", "MADGRAD", "MARS", "Nero", "PNM", "Prodigy", "QHAdam", "Ranger", "RACS", "SOAP",
        "SPAM", "SWATS", "ScalableShampoo", "ScheduleFreeAdamW", "ScheduleFreeSGD", "Shampoo", "StableAdamW", "SM3",
        "Tiger", "VSGD", "Yogi",
    )},
    "BSAM": lambda params: theirs.BSAM(params, num_data=16),
    **{name: _around(name) for name in ("Lookahead", "OrthoGrad", "PCGrad", "ScheduleFreeWrapper", "TRAC")},
    "Lookahead pulling back": _around("Lookahead", pullback_momentum="pullback"),
    **{name: _on_class(name) for name in ("SAM", "LookSAM")},
}  # fmt: skip


def _flat(value, path=()):
    """Flatten nested state: path through dictionaries and lists -> value."""
    if isinstance(value, dict):
        return {k: v for key, one in value.items() for k, v in _flat(one, (*path, key)).items()}
    if isinstance(value, (list, tuple)):
        return {k: v for key, one in enumerate(value) for k, v in _flat(one, (*path, key)).items()}
    return {path: value.clone() if torch.is_tensor(value) else value}


def _state(optimizer, network):
    """State of the optimizer and its inner ones: (class, parameter name, *path) -> value."""
    found, names = {}, {id(p): name for name, p in network.named_parameters()}
    inner = [one for one in vars(optimizer).values() if isinstance(one, torch.optim.Optimizer)]
    for one in (optimizer, *inner):
        state = {**one.state, **one.state.get("trac", {})}
        for param, values in state.items():
            where = (type(one).__name__, names.get(id(param), param))
            found |= {(*where, *path): value for path, value in _flat(values).items()}
    return {key: value for key, value in found.items() if key[1] != "trac"}


@pytest.mark.parametrize("name", ALL)
def test_two_events_lose_no_state_without_a_warning_and_end_no_training(name, caplog):
    x, y = torch.randn(16, 6, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3
    model = network()
    grower = Grower(model, x, method=PairGrowth(), trigger={0: 0.5, 1: 0.75, 2: 1.0})
    optimizer = ALL[name](list(model.parameters()))
    grower.follow(optimizer)

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for epoch in range(3):
        old, sizes = _state(optimizer, model), {n: p.shape for n, p in model.named_parameters()}
        caplog.clear()
        with caplog.at_level(logging.WARNING, "growlab"):
            grower.step(epoch=epoch)
        warnings = [one.getMessage() for one in caplog.records if "is reset at" in one.getMessage()]
        new, now = _state(optimizer, model), {n: p.shape for n, p in model.named_parameters()}
        lost = {key[0] for key in old if key not in new}
        assert len(warnings) == len(lost) and all(any(kind in one for kind in lost) for one in warnings), warnings
        for key, value in new.items():
            _compare(old[key], value, sizes.get(key[1]), now.get(key[1]), key)
        if hasattr(optimizer, "train"):
            optimizer.train()
        for _ in range(3):
            closure()
            optimizer.step(closure)
        assert all(torch.isfinite(p).all() for p in model.parameters())
    assert len(grower.events) == 2


def _compare(old, new, shape_before, shape_after, key):
    """Check that state of the parameter's shape keeps its old entries, and other state stays as it is."""
    if not torch.is_tensor(old):
        assert isinstance(old, torch.Size) or repr(old) == repr(new), key
    elif old.shape != shape_before:
        assert torch.equal(old, new), key
    else:
        assert new.shape == shape_after, key
        old_entries = new[tuple(slice(size) for size in shape_before)]
        torch.testing.assert_close(old_entries, old, rtol=1e-5, atol=1e-7, msg=str(key))
        assert old.dtype == new.dtype

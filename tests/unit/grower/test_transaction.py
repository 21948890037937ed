"""A growth event that raises an error anywhere leaves everything unchanged, bit for bit, and can be repeated."""

import inspect
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import growlab
from growlab import Grower, Net2Net, UserError, VarianceTransfer
from growlab.grower.triggers import At, GrowingNetwork, Widths
from growlab.growth import GrowthEvent, ParityError
from growlab.parts import Averages, Part

HERE = str(Path(growlab.__file__).parent)
X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Network(nn.Module):
    """Batch and layer normalisation, a buffer, a tensor in an attribute, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.hidden = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.second, self.last = nn.LayerNorm(16), nn.Linear(16, 3)
        self.register_buffer("shift", torch.randn(16))
        self.table = torch.randn(16)
        self.last.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x))) + self.shift + self.table.to(x)
        return self.last(torch.relu(self.second(self.hidden(x))))


class Restless(Part):
    """Changes its attributes and the network, also in place, before and after each event."""

    name = "restless"

    def __init__(self) -> None:
        self.source, self.numbers, self.seen = torch.Generator().manual_seed(3), np.random.default_rng(3), [0]
        self.sums = {"all": torch.zeros(2)}

    def touch(self, grower: GrowingNetwork) -> Mapping[str, Any]:
        self.seen.append(len(self.seen))
        self.sums["all"] += torch.rand(2, generator=self.source)
        drawn = float(self.numbers.random()) + float(torch.rand(())) + random.random() + float(np.random.rand())
        with torch.no_grad():
            for p in grower.network.parameters():
                p.mul_(1.0 + 1e-12 * drawn)
            for module in grower.network.modules():
                if isinstance(module, nn.BatchNorm1d) and module.running_mean is not None:
                    module.running_mean += 1e-12
        return {}

    def before_growth(self, grower: GrowingNetwork, widths: Widths) -> Mapping[str, Any]:
        return self.touch(grower)

    def after_growth(self, grower: GrowingNetwork, event: GrowthEvent) -> Mapping[str, Any]:
        return self.touch(grower)


class Slow(torch.optim.Optimizer):
    """Slow weights around another optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.param_groups, self.inner = inner.param_groups, inner
        self.mine = {p: p.detach().clone() for p in inner.param_groups[0]["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.state["steps"] = {"all": self.state.get("steps", {"all": 0})["all"] + 1}
        for p in self.param_groups[0]["params"]:
            self.mine[p].lerp_(p, 0.1)


class Training:
    """A training run after four steps, before its first event."""

    def __init__(self, method: Any = None) -> None:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(0)
        self.network = Network().double()
        self.restless = Restless()
        self.grower = Grower(
            self.network,
            X,
            method=method or VarianceTransfer(noise_std=1e-3),
            trigger={0: 0.5, 1: 0.75, 2: 1.0},
            parts=[Averages(0.9), self.restless],
            anneal_steps=3,
        )
        self.average = AveragedModel(self.network)
        trained = [p for p in self.network.parameters() if p.requires_grad]
        self.optimizer = Slow(torch.optim.AdamW(trained, lr=0.01, amsgrad=True))
        self.mine = growlab.optim.Adam(trained, lr=1e-4, rule=growlab.optim.NormRatio())
        self.grower.follow(self.optimizer, self.mine, self.average)
        self.steps(4)

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.optimizer.zero_grad()
            (self.network(X) - 1).square().mean().backward()
            self.optimizer.step()
            self.mine.step()
        (self.network(X) + 1).square().mean().backward()

    def everything(self) -> dict[str, Any]:
        """Identity and content of all tensors, state and attributes, by name."""
        found: dict[str, Any] = {}

        def note(name: str, value: Any) -> None:
            if isinstance(value, torch.Tensor):
                found[name] = (id(value), value.dtype, value.detach().clone().flatten().tolist(), value.requires_grad)
            elif isinstance(value, dict):
                found[name] = [id(value), [id(key) if isinstance(key, torch.Tensor) else key for key in value]]
                for number, one in enumerate(value.values()):
                    note(f"{name}.{number}", one)
            elif isinstance(value, (list, tuple)):
                found[name] = len(value)
                for number, one in enumerate(value):
                    note(f"{name}.{number}", one)
            elif isinstance(value, torch.Generator):
                found[name] = value.get_state().tolist()
            elif isinstance(value, (bool, int, float, str, type(None))):
                found[name] = value
            else:
                found[name] = id(value)

        averages: Any = self.grower.parts[0]
        for which, network in {"net": self.network, "ema": averages.module, "swa": self.average}.items():
            for name, module in network.named_modules():
                note(f"{which} {name}", vars(module))
            for name, p in network.named_parameters():
                note(f"{which} gradient of {name}", p.grad)
        for number, optimizer in enumerate((self.optimizer, self.optimizer.inner, self.mine)):
            note(f"optimizer {number}", vars(optimizer))
        for name in ("state", "trigger", "clock", "events"):
            one = getattr(self.grower, name)
            note(name, [event.as_dict() for event in one] if isinstance(one, list) else vars(one))
        note("restless", vars(self.restless))
        note("numbers", str(self.restless.numbers.bit_generator.state))
        note("global", (torch.get_rng_state().tolist(), str(random.getstate()), str(np.random.get_state())))
        return found


class Struck(Exception):
    """The fault that is injected."""


@contextmanager
def struck(at: int) -> Iterator[list[int]]:
    """Raise at the call with this number among all calls of functions of growlab and of this file."""
    calls = [0]

    def watch(frame: Any, kind: str, _: Any) -> None:
        # Leave out generators, because an error raised while one is closed is ignored.
        generator = frame.f_code.co_flags & inspect.CO_GENERATOR
        if kind == "call" and not generator and frame.f_code.co_filename.startswith((HERE, __file__)):
            calls[0] += 1
            if calls[0] == at:
                sys.setprofile(None)
                raise Struck

    sys.setprofile(watch)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]


@pytest.fixture(scope="module")
def undisturbed() -> tuple[list[Any], int]:
    training = Training()
    with struck(0) as calls:
        training.grower.step(epoch=1)
    number = calls[0]
    training.steps(3)
    return [t.tolist() for t in training.network.state_dict().values()], number


@pytest.mark.parametrize("share", range(12))
def test_a_fault_anywhere_in_an_event_leaves_everything_as_it_was(share: int, undisturbed: Any) -> None:
    expected, number = undisturbed
    training = Training()
    before = training.everything()
    # Strike twice in each share of the event's calls, at its beginning and in its middle.
    for at in (1, 1 + number // 24):
        with pytest.raises(Struck), struck(share * number // 12 + at):
            training.grower.step(epoch=1)
        assert differing(before, training.everything()) == []
    assert len(training.grower.step(epoch=1)) == 1
    training.steps(3)
    assert [t.tolist() for t in training.network.state_dict().values()] == expected


def _raise(*_: Any, **__: Any) -> Any:
    raise Struck


# The target of the patch that raises.
FAULTS: dict[str, tuple[Any, ...]] = {
    "trigger": (At, "next"),
    "method": (VarianceTransfer, "grow"),
    "noise": (VarianceTransfer, "noise"),
    "part before": (Averages, "before_growth"),
    "part after": (Averages, "after_growth"),
    "state": ("growlab.optim.carry.replace_in_groups",),
    "ranks": ("growlab.grower.grower.ranks.broadcast_buffers",),
    "compiler": (torch.compiler, "reset"),
}


@pytest.mark.parametrize("small", [0, 2**20], ids=["large", "small"])
@pytest.mark.parametrize("kind", FAULTS)
def test_each_kind_of_fault(kind: str, small: int) -> None:
    training = Training()
    before = training.everything()
    with pytest.MonkeyPatch.context() as patch:
        # Tensors of small networks are copied at once, those of large ones before they are written to.
        patch.setattr("growlab.widths.unchanged._SMALL", small)
        patch.setattr(*FAULTS[kind], _raise)
        with pytest.raises(Struck):
            training.grower.step(epoch=1)
        assert differing(before, training.everything()) == []
    training.grower.step(epoch=1)
    training.steps(2)


def test_failures_in_user_hooks_and_in_then_undo_events() -> None:
    training = Training()
    before = training.everything()
    averages: Any = training.grower.parts[0]
    for network in (training.network, averages.module, training.average.module):
        for at in range(1, 3):
            # growlab cannot restore an iterator, so this one counts all calls.
            calls = iter([False] * (at - 1) + [True])

            def hook(*_: Any, calls: Iterator[bool] = calls) -> None:
                if next(calls, False):
                    raise Struck

            handle = network.hidden.register_forward_pre_hook(hook)
            with pytest.raises(Struck):
                training.grower.step(epoch=1)
            handle.remove()
    with pytest.raises(Struck):
        training.grower.step(epoch=2, then=_raise)
    assert [name for name in differing(before, training.everything()) if "hidden" not in name] == []
    called: list[int] = []
    assert len(training.grower.step(epoch=2, then=lambda: called.append(1))) == 2
    assert training.grower.step(epoch=2, then=lambda: called.append(1)) == []
    assert called == [1]
    training.steps(2)


class Counted(At):
    """Counts its calls and raises an error."""

    calls = 0

    def next(self, grower: GrowingNetwork) -> Widths | None:
        self.calls += 1
        raise Struck


@pytest.mark.parametrize("package", ["mine", "torchmine", "numpymine", "torch_mine.triggers"])
def test_a_trigger_of_any_package_is_restored(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "__module__", package)
    trigger = Counted({0: 0.5, 1: 1.0})
    grower = Grower(Network().double(), X, trigger=trigger)
    with pytest.raises(Struck):
        grower.step(epoch=0)
    assert trigger.calls == 0


def test_an_average_that_cannot_follow_undoes_the_event_of_the_network() -> None:
    training = Training(Net2Net())
    with torch.no_grad():
        training.average.module.last.weight[0, 0] = torch.nan
    before = training.everything()
    with pytest.raises(ParityError, match="an average of the network"):
        training.grower.step(epoch=1)
    after = training.everything()
    assert [name for name in differing(before, after) if repr(before[name]) != repr(after[name])] == []


def test_a_failed_step_leaves_the_clock_unchanged() -> None:
    training = Training()
    training.optimizer.inner.state[training.network.first.weight]["odd"] = torch.zeros(7)
    training.grower.follow(training.optimizer, state="inherit")
    before = training.everything()
    with pytest.raises(UserError, match=r"'odd' of first\.weight"):
        training.grower.step(epoch=1)
    assert differing(before, training.everything()) == []
    assert training.grower.clock.epoch == 0

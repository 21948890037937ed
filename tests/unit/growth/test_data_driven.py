"""Promises of all methods that use training data, on networks of the shared table."""

import copy
from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from growlab.base.errors import UserError
from growlab.grower import Grower
from growlab.grower.triggers import OnDemand, Plateau, Trigger
from growlab.growth import (
    FireFly,
    GradMax,
    GrowthMethod,
    GrowthState,
    Measurement,
    Schedule,
    Splitting,
    Tiny,
    grow,
    make_seed,
)
from growlab.optim import follow
from growlab.parts import Part
from growlab.widths import tensors_of
from tests.cases import NETWORKS, graph_of, outputs, roughen, widths_at

METHODS: dict[str, Callable[[], GrowthMethod]] = {
    "gradmax": lambda: GradMax(steps=2, fallback="pairs"),
    "tiny": lambda: Tiny(fallback="pairs"),
    "splitting": lambda: Splitting(iterations=2, fallback="pairs"),
    "firefly": lambda: FireFly(steps=1, fallback="pairs"),
    "firefly_split": lambda: FireFly(new_candidates=0, steps=1, fallback="pairs"),
}
SOME = [
    "flatten",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("resnet B", "dense", "attention", "transformer")),
]


class Run:
    def __init__(self, network: str, method: GrowthMethod, seed: int = 2) -> None:
        self.case, self.graph, self.method = NETWORKS[network], graph_of(network), method
        self.network = self.case.make()
        self.state = make_seed(self.network, self.graph, method, widths_at(self.graph, 0.5), 5)
        roughen(self.network, seed)
        self.x = self.case.inputs()
        classes = outputs(self.network, self.x, False).shape[1]
        self.batches = [(self.case.inputs(seed=seed), torch.arange(8) % classes) for seed in (3, 4)]

    def grow(self, network: nn.Module | None = None, **given):
        network = network or self.network
        data = Measurement(network, self.graph, self.batches, F.cross_entropy)
        state = GrowthState.from_dict(self.state.as_dict())
        widths = widths_at(self.graph, 0.8)
        return grow(network, self.graph, self.method, state, widths, 5, (self.x,), data=data, **given)


@pytest.mark.parametrize("network", SOME)
@pytest.mark.parametrize("method", METHODS)
def test_events(method: str, network: str) -> None:
    run = Run(network, METHODS[method]())
    again, plain = copy.deepcopy(run.network), copy.deepcopy(run.network)
    before = outputs(run.network, run.x, True)
    optimizer = torch.optim.AdamW(run.network.parameters())
    run.network.train()(run.x).square().mean().backward()
    optimizer.step()
    run.network.load_state_dict(plain.state_dict())
    event = run.grow()
    # Shapes, and a network that computes nearly what it did where that is promised.
    for name, tensor in tensors_of(run.network, run.graph).items():
        assert tuple(tensor.shape) == run.graph.shape(name, event.widths_after)
        assert bool(tensor.isfinite().all())
    after = outputs(run.network, run.x, True)
    moved = float((after - before).abs().max() / before.abs().max())
    assert moved < {"gradmax": 1e-10, "tiny": 100.0}.get(method, 0.2)
    # Nothing is drawn but from seed, stage and name: the same event again is the same, bit for bit.
    torch.manual_seed(123)
    run.grow(again)
    for name, tensor in run.network.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    # Optimizer state goes along.
    follow(optimizer, event.replaced, run.graph, event.widths_before, event.widths_after, "inherit", event.carry)
    for parameter in run.network.parameters():
        assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape


def test_channels_that_norms_and_attention_sum_over_grow_by_pairs_and_the_others_do_not() -> None:
    run = Run("attention", Tiny(fallback="pairs"))
    before = outputs(run.network, run.x, False)
    event = run.grow()
    assert event.report["grown_by_pairs"] == {
        "embed": "norm takes its statistics over its channels",
        "q": "attention sums over its channels",
    }
    assert torch.allclose(outputs(run.network, run.x, False), before)
    run = Run("transformer", GradMax(fallback="pairs"))
    event = run.grow()
    assert set(event.report["grown_by_pairs"]) == {"embed"} and set(event.report["groups"]) == {"mlp.0"}
    assert event.parity_error_eval < 1e-10


@pytest.mark.parametrize("method", METHODS)
def test_an_average_goes_through_the_same_map_without_data(method: str) -> None:
    """G(average) = average of G: linear in what it was, plus what the network's own event added."""
    made = METHODS[method]()
    run = Run("resnet B", made)
    other = Run("resnet B", made, seed=7)
    mean = copy.deepcopy(run.network)
    with torch.no_grad():
        for name, tensor in mean.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_((run.network.state_dict()[name] + other.network.state_dict()[name]) / 2)
    leader = tensors_of(run.network, run.graph)
    event = run.grow()
    state = [GrowthState.from_dict(run.state.as_dict()) for _ in range(2)]
    grown = []
    for network, own in zip((other.network, mean), state, strict=True):
        wanted = event.widths_after
        arguments = (network, run.graph, made, own, wanted, 5, (run.x,))
        try:
            grow(*arguments, averaged=leader, averaged_event=event)
        except UserError as error:
            raise AssertionError(f"looked at data: {error}") from error
        grown.append(network.state_dict())
    for name, tensor in grown[1].items():
        if tensor.is_floating_point():
            expected = (run.network.state_dict()[name] + grown[0][name]) / 2
            torch.testing.assert_close(tensor, expected)


def test_without_data_and_by_nothing() -> None:
    run = Run("mlp", METHODS["firefly"]())
    with pytest.raises(UserError, match="FireFly decides by training data"):
        grow(run.network, run.graph, run.method, run.state, run.graph.full_widths, 5, (run.x,))
    same = grow(run.network, run.graph, run.method, run.state, run.state.widths, 5, (run.x,))
    assert same.replaced == {}


def test_widths_that_it_cannot_grow_through_are_refused_before_training() -> None:
    class WidensItself(Part):
        groups = ("0",)

    def grower(trigger: Trigger | dict, fallback: str | None = None, parts: Sequence[Part] = ()) -> Grower:
        network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        method = Splitting(fallback=fallback)
        return Grower(network, torch.ones(2, 3), method=method, trigger=trigger, parts=parts)

    def on_demand(*quarters: int) -> OnDemand:
        number = len(quarters)
        schedule = Schedule((1,) * number, tuple(Fraction(one, 4) for one in quarters), (4,) * number)
        return OnDemand(Plateau(groups="gradient"), schedule, 8)

    for too_much in ({0: 0.25, 1: 1.0}, on_demand(1, 4)):
        with pytest.raises(UserError, match="Splitting cannot grow 0: splitting makes at most twice as many"):
            grower(too_much)
        grower(too_much, fallback="pairs")
        grower(too_much, parts=[WidensItself()])
    for fits in ({0: 0.25, 1: 0.5, 2: 1.0}, on_demand(1, 2, 4)):
        grower(fits)


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        (GradMax, {"batches": 0, "zero": "both", "scale": 0.0, "steps": 0, "fallback": "net2net"}),
        (FireFly, {"new_candidates": -1.0, "steps": -1, "rate": 0.0, "epsilon": 0.0}),
        (Splitting, {"iterations": 0, "epsilon": 0.0, "softplus_beta": -1.0}),
        (Tiny, {"amplitudes": [], "ridge": -1.0, "update_old": 1}),
    ],
)
def test_impossible_choices_are_refused(method: type[GrowthMethod], wrong: dict[str, object]) -> None:
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"^{name} must be"):
            method(**{name: value})

"""Dynamic orthogonalised SGD against Eq. 21 computed apart."""

from functools import cache
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from growlab.growth import PairGrowth, grow, make_schedule, plant
from growlab.parts.osgd import OldGradient, Orthogonalised
from growlab.triggers import Clock, Scheduled, Training
from growlab.widths import trace


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


def gradients(network: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in network.named_parameters()}


def with_random_gradients(network: nn.Module, seed: int) -> nn.Module:
    source = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=source, dtype=parameter.dtype)
    return network


@cache
def grown() -> tuple[nn.Module, Orthogonalised, dict[str, Tensor]]:
    """A network that has grown, what remembers its old gradient, and that gradient padded by hand."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    graph = trace(network, torch.randn(2, 5).double())
    state = plant(network, graph, PairGrowth(), {"0": 4}, 0)
    orthogonalised = Orthogonalised(network)
    old = gradients(with_random_gradients(network, 1))
    orthogonalised.remember(old)
    grow(network, graph, PairGrowth(), state, {"0": 8}, 0, (torch.randn(4, 5).double(),))
    orthogonalised.follow(graph, {"0": 4}, {"0": 8})
    padded = {name: torch.zeros_like(p) for name, p in network.named_parameters()}
    for name, gradient in old.items():
        padded[name][tuple(slice(size) for size in gradient.shape)] = gradient
    return network, orthogonalised, padded


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), strength=st.sampled_from([0.0, 0.25, 1.0]))
def test_the_projection_is_taken_out(seed: int, strength: float) -> None:
    network, orthogonalised, padded = grown()
    g, pad = flat(gradients(with_random_gradients(network, seed))), flat(padded)
    orthogonalised.project(strength)
    after = flat(gradients(network))
    assert torch.allclose(after, g - strength * (g @ pad) / (pad @ pad) * pad, rtol=1e-12, atol=1e-13)
    # What is along the padded gradient shrinks by the strength, to nothing at 1; what is across it stays.
    assert float(after @ pad) == pytest.approx((1 - strength) * float(g @ pad), abs=1e-11)
    across = g - (g @ pad) / (pad @ pad) * pad
    assert torch.allclose(after - (after @ pad) / (pad @ pad) * pad, across, atol=1e-12)


def test_the_state_goes_through_a_checkpoint() -> None:
    network, orthogonalised, _ = grown()
    other = Orthogonalised(network)
    other.load_state_dict(orthogonalised.state_dict())
    results = []
    for one in (orthogonalised, other):
        with_random_gradients(network, 3)
        one.project(0.7)
        results.append(flat(gradients(network)))
    assert torch.equal(*results)


def test_nothing_remembered_and_a_zero_gradient_change_nothing() -> None:
    network = with_random_gradients(nn.Linear(3, 2), 0)
    before = flat(gradients(network))
    orthogonalised = Orthogonalised(network)
    orthogonalised.project(1.0)
    orthogonalised.remember({"weight": torch.zeros(2, 3)})
    orthogonalised.project(1.0)
    assert torch.equal(flat(gradients(network)), before)
    # A frozen parameter has no gradient to take anything out of.
    network.weight.grad = None
    orthogonalised.remember({"weight": torch.ones(2, 3)})
    orthogonalised.project(1.0)
    assert network.weight.grad is None


@pytest.mark.parametrize(
    ("anneal", "step", "strength"),
    [
        # Two epochs of three steps, one of four, two of four; the first event before step 6, the second before 10.
        *(("stage", step, 1 - (step - 6) / 3) for step in (6, 7, 8, 9)),
        *(("stage", step, 1 - (step - 10) / 7) for step in (10, 13, 17)),
        *(("run", step, 1 - (step - 6) / 11) for step in (6, 9, 10, 17)),
    ],
)
def test_what_is_taken_out_falls_evenly_from_all_after_an_event_to_nothing(
    anneal: Literal["stage", "run"], step: int, strength: float
) -> None:
    layer = nn.Linear(2, 1, bias=False)
    events = [{"step": 6}, {"step": 10}][: 1 + (step >= 10)]
    run = SimpleNamespace(
        network=layer,
        events=events,
        state=SimpleNamespace(stage=len(events), scheduled_stage=len(events)),
        trigger=Scheduled(make_schedule(5, 8, epochs=[2, 1, 2], widths=[0.25, 0.5, 1])),
        training=Training(steps=[3, 3, 4, 4, 4]),
        clock=Clock(step=step),
    )
    old = OldGradient(anneal)
    old.begin(run)
    old.load_state_dict({"gradients": {"weight": torch.tensor([[2.0, 0.0]])}})
    layer.weight.grad = torch.tensor([[5.0, 3.0]])
    old.before_step(run)
    torch.testing.assert_close(layer.weight.grad, torch.tensor([[5.0 * (1 - strength), 3.0]]))
    run.events = []
    layer.weight.grad = torch.tensor([[5.0, 3.0]])
    old.before_step(run)
    assert layer.weight.grad.tolist() == [[5.0, 3.0]]

"""Dynamic orthogonalised SGD against a separate computation of Eq. 21."""

import copy
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from growlab.base.errors import UserError
from growlab.grower.triggers import Clock, Scheduled, Training
from growlab.growth import PairGrowth, grow, make_schedule, make_seed
from growlab.parts.osgd import OldGradient, Orthogonalised, mean_gradients
from growlab.widths import trace
from tests.cases import Around, differing


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
    """A grown network, its old gradient carried through growth, and the same gradient padded by hand."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    graph = trace(network, torch.randn(2, 5).double())
    state = make_seed(network, graph, PairGrowth(), {"0": 4}, 0)
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
def test_gradients_are_projected_orthogonally(seed: int, strength: float) -> None:
    network, orthogonalised, padded = grown()
    g, pad = flat(gradients(with_random_gradients(network, seed))), flat(padded)
    orthogonalised.project(strength)
    after = flat(gradients(network))
    assert torch.allclose(after, g - strength * (g @ pad) / (pad @ pad) * pad, rtol=1e-12, atol=1e-13)
    # The component along the padded gradient shrinks with the strength, to 0 at 1; the rest is unchanged.
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


def test_projection_without_an_old_gradient_changes_nothing() -> None:
    network = with_random_gradients(nn.Linear(3, 2), 0)
    before = flat(gradients(network))
    orthogonalised = Orthogonalised(network)
    orthogonalised.project(1.0)
    orthogonalised.remember({"weight": torch.zeros(2, 3)})
    orthogonalised.project(1.0)
    assert torch.equal(flat(gradients(network)), before)
    # A frozen parameter has no gradient.
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
def test_the_strength_falls_evenly_from_1_after_an_event_to_0(
    anneal: Literal["stage", "run"], step: int, strength: float
) -> None:
    layer = nn.Linear(2, 1, bias=False)
    events = [SimpleNamespace(step=6), SimpleNamespace(step=10)][: 1 + (step >= 10)]
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


@pytest.mark.parametrize(
    ("anneal", "end", "training", "message"),
    [
        ("stage", None, {"steps": [3, 3], "epoch_batches": list}, "needs stages whose ends"),
        ("run", None, {"steps": [3, 3]}, "need data whose epochs can be iterated again"),
        ("run", None, {"epoch_batches": list}, "the number of steps in every epoch, .* give provide steps="),
        ("stage", 3, {"steps": [3, 3], "epoch_batches": list}, None),
    ],
)
def test_annealing_needs_ends_of_stages_steps_and_data(anneal, end, training, message) -> None:
    trigger = SimpleNamespace(stage_end=lambda run: end)
    run = SimpleNamespace(trigger=trigger, training=Training(**training))
    with nullcontext() if message is None else pytest.raises(UserError, match=message):
        OldGradient(anneal).check(run)


def before_growth(noisy: bool, **training: object) -> SimpleNamespace:
    """A run before growth, with an unused layer, and with dropout and batch normalisation if `noisy`."""
    torch.manual_seed(0)
    between = [nn.BatchNorm1d(6), nn.Dropout(0.5)] if noisy else []
    layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), *between, nn.Linear(6, 3))
    network = Around(lambda net, x: net.layers(x), layers=layers, unused=[2, 2]).double()
    settings = {"loss": nn.functional.cross_entropy, "weight": None, "seed_draws": None, **training}
    return SimpleNamespace(network=network, training=SimpleNamespace(**settings))


def batches_of(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(1)
    made = [torch.randn(size, 4, generator=source, dtype=torch.float64) for size in sizes]
    return [(x, torch.randint(3, (len(x),), generator=source)) for x in made]


@pytest.mark.parametrize("classes", [None, torch.tensor([0.1, 2.0, 5.0], dtype=torch.float64)])
def test_the_mean_over_batches_is_that_of_all_samples_at_once(classes: Tensor | None) -> None:
    """Batches have different sizes, and losses may be weighted means over classes."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target, weight=classes)

    weight = None if classes is None else lambda output, target: classes[target].sum()
    run = before_growth(False, loss=loss, weight=weight)
    run.network.layers[0].bias.requires_grad_(False)
    batches = batches_of(5, 1, 7)
    found, samples = mean_gradients(run, batches)
    x, target = (torch.cat(entries) for entries in zip(*batches, strict=True))
    loss(run.network(x), target).backward()
    expected = {name: p.grad for name, p in run.network.named_parameters() if p.requires_grad}
    assert samples == 13 and found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], torch.zeros_like(found[name]) if gradient is None else gradient)


def test_measuring_changes_nothing_and_its_passes_draw_differently() -> None:
    calls: list[tuple[int, int]] = []
    run = before_growth(True, seed_draws=lambda *place: calls.append(place))
    run.network.layers[2].eval()
    modes = [module.training for module in run.network.modules()]
    before = copy.deepcopy(run.network.state_dict())
    mean_gradients(run, batches_of(4, 4))
    mean_gradients(run, batches_of(4, 4), pass_number=1)
    assert [module.training for module in run.network.modules()] == modes
    assert not differing(before, run.network.state_dict())
    assert all(parameter.grad is None for parameter in run.network.parameters())
    # Training steps are seeded by epochs, which are not negative.
    assert len(set(calls)) == 4 and all(number < 0 for number, _ in calls)

"""Isotropic layers that adapt their widths in a growing network, and weights of gains."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from growlab import parts
from growlab.base.errors import UserError
from growlab.grower import Grower
from growlab.grower.triggers import At, ByMethod
from growlab.growth import GradMax, GrowthState, Net2Net, PairGrowth, VarianceTransfer, grow, make_seed
from growlab.optim import SGD
from growlab.parts.isotropic import (
    GainWeights,
    Isotropic,
    IsotropicLayers,
    IsotropicMLP,
    change_inputs,
    deepen,
    isotropic_mlp,
    spectra,
)
from growlab.parts.isotropic.method import adaptable
from growlab.parts.isotropic.part import gain_weights, readers
from growlab.widths import tensors_of, trace
from tests.cases import tracked, train
from tests.unit.grower.test_grower import STEPS, Loop
from tests.unit.grower.test_grower import batch as drawn
from tests.unit.parts.isotropic.mixed import Mixed

METHODS = {
    "ours": VarianceTransfer,
    "ours by constraint": lambda: VarianceTransfer("constraint"),
    "net2net": Net2Net,
    "pairs": PairGrowth,
    "gradmax": lambda: GradMax(steps=1, fallback="pairs"),
}
SCHEDULE = {0: 0.5, 2: 0.75, 4: 1.0}
# Settings with which neurons are both added and removed.
SETTINGS: dict[str, Any] = {"reserve_neurons": 2, "threshold": 0.5, "neurons_per_event": 2}


def batch(number: int) -> tuple[Tensor, Tensor]:
    return drawn(number, torch.float64)


def momentum(network: nn.Module) -> torch.optim.Optimizer:
    return SGD(network.parameters(), 0.1, momentum=0.9)


def looped(method: Any, norm: str = "none", make: Any = momentum, **settings: Any) -> Loop:
    """A loop with epochs of three steps on a mixed network."""
    torch.manual_seed(0)
    both = (parts.Averages(0.9), IsotropicLayers(**{**SETTINGS, **settings}))
    loop = Loop(make, lambda: Mixed(6, 3, 8, norm).double(), SCHEDULE, method=method, parts=both)
    loop.grower.provide(lambda number: [batch(n) for n in range(number)], F.cross_entropy)
    return loop


@pytest.mark.parametrize(
    ("name", "norm"),
    [
        ("ours", "batch"),
        ("ours", "layer"),
        ("ours by constraint", "batch"),
        ("net2net", "layer"),
        ("pairs", "none"),
        ("gradmax", "none"),
    ],
)
def test_each_event_keeps_its_promise_and_leaves_the_others_groups_alone(name: str, norm: str) -> None:
    loop = looped(METHODS[name](), norm)
    own = set(loop.grower.parts[1].groups)
    assert own == {"hidden.0", "hidden.3"}
    full = {g: w for g, w in loop.grower.full_graph.full_widths.items() if g not in own}
    loop.train(6 * STEPS)
    asked = [event for event in loop.grower.events if event.notes.get("asked_by") == "isotropic"]
    scheduled = [event for event in loop.grower.events if "asked_by" not in event.notes]
    assert len(scheduled) == 2 and len(asked) >= 2
    assert {event.method for event in asked} == {"Isotropic"}
    for event in loop.grower.events:
        changed = {g for g, w in event.widths_after.items() if w != event.widths_before[g]}
        assert changed <= own if event in asked else not changed & own
        grew = all(w >= event.widths_before[g] for g, w in event.widths_after.items())
        promised = event.parity_tolerance_eval
        assert promised is None or event.parity_error_eval <= promised
        if grew:
            assert event.parity_error_eval < 1e-9 and event.notes["ema_parity_error_eval"] < 1e-9
    assert {g: loop.grower.state.widths[g] for g in full} == full
    before = loop.network.eval()(batch(0)[0])
    network = loop.grower.finish()
    assert torch.allclose(network(batch(0)[0]), before, rtol=1e-10, atol=1e-12)
    plain = nn.ModuleDict({"network": network}).state_dict()
    assert not [key for key in plain if "unfinished" in key]


@pytest.mark.parametrize(("epoch", "make"), [(2, lambda n: torch.optim.Adam(n.parameters(), 0.01)), (3, momentum)])
def test_a_resumed_loop_equals_one_that_was_not_interrupted(epoch: int, make: Any) -> None:
    uninterrupted = looped(VarianceTransfer(), "layer", make)
    file = uninterrupted.train(epoch * STEPS).saved()
    expected = uninterrupted.train(6 * STEPS).everything()
    assert looped(VarianceTransfer(), "layer", make).resume(file).train(6 * STEPS).everything() == expected


def test_the_gradient_follows_where_multiplied_rows_are_written_into_the_weights() -> None:
    """The first isotropic layer reads channels that grow, so its rows have multipliers; a rotation mixes them."""
    loop = looped(VarianceTransfer(), mode="scheduled", target_width=8, every_n_epochs=3)
    loop.train(2 * STEPS)
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
            # The gradient of new neurons is not determined by the old network.
            old = tuple(slice(0, n) for n in before[name].shape)
            assert torch.allclose(after[name][old], moved[old], rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": Isotropic(), "trigger": ByMethod()}, "decides the widths of isotropic layers already"),
        ({"network": nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))}, "isotropic growth needs a layer"),
    ],
)
def test_invalid_combinations_raise_errors(arguments: dict[str, Any], message: str) -> None:
    given = {"network": IsotropicMLP(6, [4], 3), "method": PairGrowth(), "trigger": SCHEDULE, **arguments}
    with pytest.raises(UserError, match=message):
        Grower(given.pop("network").double(), batch(0)[0], parts=[IsotropicLayers()], **given)


# Averages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "choices",
    [{}, {"removal_compensation": "batch", "least_squares": True}, {"columns": "random", "rotate": False}],
    ids=["default", "observed", "random"],
)
def test_an_average_grows_and_is_pruned_in_the_basis_of_its_network(choices: dict) -> None:
    """The average remains an average of weights, though one network decides the bases."""
    method = Isotropic(mode="scheduled", target_width=8, **choices)
    probe = torch.randn(16, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    networks = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        networks.append(isotropic_mlp((1, 4, 4), 5, width=6, depth=3).double())
    early, late = networks
    graph = trace(early, probe[:2], follow_norms=True)
    hidden = adaptable(graph)
    average = AveragedModel(early, multi_avg_fn=get_ema_multi_avg_fn(0.25), use_buffers=True)
    for network in networks:
        average.update_parameters(network)
    state = make_seed(late, graph, method, graph.full_widths, 0)
    for widths in ((8, 9, 7), (4, 9, 6), (5, 7, 3)):
        after = {**state.widths, **dict(zip(hidden, widths, strict=True))}
        leader, before = tensors_of(late, graph), state.as_dict()
        leading = grow(late, graph, method, state, after, 0, (probe,))
        for network in (early, average.module):
            own = GrowthState.from_dict(before)
            event = grow(network, graph, method, own, after, 0, (probe,), averaged=leader, averaged_event=leading)
            assert event.carry.bases.keys() == leading.carry.bases.keys() != set()
            for group, basis in leading.carry.bases.items():
                assert torch.equal(event.carry.bases[group], basis), group
        for name, weight in average.module.named_parameters():
            if weight.dim() == 2:
                expected = 0.25 * early.get_parameter(name) + 0.75 * late.get_parameter(name)
                torch.testing.assert_close(weight, expected, rtol=1e-9, atol=1e-12)


# Depth -------------------------------------------------------------------------------------------------------


def test_a_network_is_deepened_and_trained_on() -> None:
    torch.manual_seed(0)
    network, x, y = IsotropicMLP(6, [5, 4], 3), torch.randn(32, 6), torch.arange(32) % 3
    optimizer = torch.optim.Adam(network.parameters(), lr=0.05)
    before = network(x)
    new = deepen(network.hidden, 1)
    assert torch.allclose(network(x), before, rtol=1e-6)
    optimizer.add_param_group({"params": new})
    assert {id(p) for p in network.parameters()} == set(tracked(optimizer))
    old = [p.detach().clone() for p in new]
    train(network, optimizer, x, y, steps=20)
    assert all(not torch.equal(a, b) for a, b in zip(old, new, strict=True)), "a part of the new layer does not learn"
    assert F.cross_entropy(network(x), y) < F.cross_entropy(before, y)
    # The deeper network is an isotropic network with three layers.
    graph = trace(network, x[:2], follow_norms=True)
    assert list(spectra(graph, tensors_of(network, graph), graph.full_widths)) == ["hidden.0", "hidden.2", "hidden.4"]


def deeper(blend: bool = True, gain: bool = False, *more: parts.Part) -> Grower:
    """Three of four layers are inserted one after another, as the identity."""
    torch.manual_seed(0)
    network = isotropic_mlp((1, 1, 6), 3, width=6, depth=4, blend=blend, gain_channel=gain)
    blocks = parts.Depth(["hidden.2:4", "hidden.4:6", "hidden.6:8"], "identity")
    trigger = At(dict.fromkeys(range(4), 1.0))
    return Grower(network, batch(0)[0].float(), method=PairGrowth(), trigger=trigger, parts=[blocks, *more])


def test_layers_are_inserted_as_the_identity_and_learn() -> None:
    grower = deeper()
    optimizer = torch.optim.AdamW(grower.network.parameters(), 0.01)
    grower.follow(optimizer)
    for epoch in range(6):
        grower.step(epoch=epoch)
        x, y = batch(epoch)
        train(grower.network, optimizer, x.float(), y)
    inserted = [one for event in grower.events for one in event.notes["inserted"]]
    assert [one["block"] for one in inserted] == ["hidden.2:4", "hidden.4:6", "hidden.6:8"]
    assert all(one["parity_error_eval"] < 1e-6 for one in inserted)
    weights = grower.finish().state_dict().items()
    blends = [float(tensor.detach()) for name, tensor in weights if name.endswith(".blend")]
    assert len(blends) == 3 and all(0.5 < blend < 1.5 and blend != 1 for blend in blends)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((False,), "hidden.2:4 of blocks cannot be left out with start='identity'"),
        ((True, True), "needs an activation without a gain channel"),
        ((True, False, IsotropicLayers()), "leave IsotropicLayers out, or insert no layer"),
    ],
)
def test_layers_that_cannot_be_inserted_raise_errors(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises((UserError, ValueError), match=message):
        # `provide` makes the parts check the seed.
        deeper(*arguments).provide(lambda number: [], F.cross_entropy)


def made() -> tuple[IsotropicMLP, Tensor, Tensor]:
    torch.manual_seed(0)
    network = IsotropicMLP(6, [5, 7], 3, gain_channel=True).double()
    for layer in readers(network):
        with torch.no_grad():
            layer.weight[:, -1].normal_()
    return network, torch.randn(24, 6, dtype=torch.float64), torch.arange(24) % 3


def trained(network: nn.Module, x: Tensor, y: Tensor, part: GainWeights | None, steps: int, make: Any) -> None:
    parts = () if part is None else (part,)
    grower = Grower(network, x[:2], method=Isotropic(first=10**6), trigger=ByMethod(), parts=parts)
    optimizer = make(network.parameters())
    grower.follow(optimizer)
    train(network, optimizer, x, y, steps)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def test_constant_weights_are_what_a_network_without_a_gradient_for_them_keeps() -> None:
    """The same steps with psi in a separate vector without gradient, as in the author's later code."""
    network, x, y = made()
    twin, psi = copy.deepcopy(network), [gain_weights(layer).clone() for layer in readers(network)]
    trained(network, x, y, GainWeights("constant"), 7, adamw)
    weights = [nn.Parameter(layer.weight.detach()[:, :-1].clone()) for layer in readers(twin)]
    first, *behind = [m for m in twin.modules() if isinstance(m, nn.Linear)]
    activations = [m for m in twin.hidden if not isinstance(m, nn.Linear)]
    parameters = [first.weight, first.bias, *weights, *(layer.bias for layer in behind)]
    parameters += [activation.log_length for activation in activations]
    optimizer = adamw(parameters)
    for _ in range(7):
        optimizer.zero_grad()
        h = first(x)
        for activation, weight, vector, layer in zip(activations, weights, psi, behind, strict=True):
            gain = activation.gain(h)
            h = (gain * h) @ weight.T + gain * vector.T + layer.bias
        F.cross_entropy(h, y).backward()
        optimizer.step()
    for layer, weight, vector in zip(readers(network), weights, psi, strict=True):
        assert torch.equal(gain_weights(layer), vector)
        assert torch.allclose(layer.weight[:, :-1], weight, rtol=1e-10)


def test_decayed_weights_have_the_gradient_of_their_squares() -> None:
    network, x, y = made()
    twin = copy.deepcopy(network)
    trained(network, x, y, GainWeights("decayed", 0.3), 5, adamw)
    optimizer = adamw(twin.parameters())
    for _ in range(5):
        optimizer.zero_grad()
        decay = sum(layer.weight[:, -1].square().sum() for layer in readers(twin))
        (F.cross_entropy(twin(x), y) + 0.3 * decay).backward()
        optimizer.step()
    for a, b in zip(network.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def test_neurons_that_go_leave_their_biases_in_constant_weights() -> None:
    network, x, y = made()
    method, part = Isotropic(reserve_neurons=1, threshold=0.5), GainWeights("constant")
    grower = Grower(network, x[:2], method=method, trigger=ByMethod(), parts=[part])
    optimizer = adamw(network.parameters())
    grower.follow(optimizer)
    for step in range(4):
        psi = [gain_weights(layer).clone() for layer in readers(network)]
        (event,) = grower.step(epoch=step) or [None]
        changed = [not torch.equal(gain_weights(layer), old) for layer, old in zip(readers(network), psi, strict=True)]
        assert event is not None or not any(changed)
        psi = [gain_weights(layer).clone() for layer in readers(network)]
        train(network, optimizer, x, y)
        assert all(torch.equal(gain_weights(layer), old) for layer, old in zip(readers(network), psi, strict=True))
    assert any(min(e.widths_after.values()) < min(e.widths_before.values()) for e in grower.events)


def test_a_network_without_gains_raises_an_error() -> None:
    network = IsotropicMLP(6, [5], 3).double()
    with pytest.raises(UserError, match="needs layers that read gains"):
        trained(network, torch.randn(4, 6, dtype=torch.float64), torch.arange(4) % 3, GainWeights(), 0, adamw)


@pytest.mark.parametrize(("convolution", "optimizer"), [(False, "SGD"), (True, "Adam")])
def test_new_inputs_change_nothing_and_learn_from_the_first_step(convolution: bool, optimizer: str) -> None:
    torch.manual_seed(0)
    layer = (nn.Conv2d(3, 4, 3, padding=1) if convolution else nn.Linear(3, 4)).double()
    shape = (8, 5, 4, 4) if convolution else (8, 5)
    x = torch.randn(shape, dtype=torch.float64)
    options = {"lr": 0.01, "momentum": 0.9} if optimizer == "SGD" else {"lr": 0.01}
    made = getattr(torch.optim, optimizer)(layer.parameters(), **options)
    train(layer, made, x[:, :3])
    key = "momentum_buffer" if optimizer == "SGD" else "exp_avg"
    known, before = made.state[layer.weight][key].clone(), layer(x[:, :3])
    change_inputs(layer, 2, made)
    assert torch.equal(made.state[layer.weight][key][:, :3], known)
    assert made.state[layer.weight][key].shape == layer.weight.shape
    assert torch.allclose(layer(x), before, rtol=1e-12)
    train(layer, made, x)
    assert layer.weight[:, 3:].count_nonzero() == layer.weight[:, 3:].numel()
    expected = layer(x * torch.tensor([1.0, 1, 1, 0, 0]).view(-1, *[1] * (x.dim() - 2)))
    change_inputs(layer, -2, made)
    assert torch.allclose(layer(x[:, :3]), expected, rtol=1e-12)
    assert [p.shape for group in made.param_groups for p in group["params"]] == [p.shape for p in layer.parameters()]


def test_inputs_that_cannot_change_raise_errors() -> None:
    network = made()[0]
    with pytest.raises(ValueError, match="6 of 6 inputs cannot be removed"):
        change_inputs(network.hidden[0], -6)
    with pytest.raises(ValueError, match="with a gain channel cannot be"):
        change_inputs(network.hidden[2], 1)

"""Weights g v / |v| in both of torch's spellings, and multipliers on rows, through growth and finishing."""

import copy
import warnings
from collections.abc import Callable
from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from growlab import Grower
from growlab.grower.prune import prune
from growlab.growth import GradMax, GrowthMethod, HyperCloning, Net2Net, PairGrowth, Tiny, VarianceTransfer
from growlab.growth.constants import as_applied, as_stored
from growlab.growth.multipliers import fold_multipliers
from growlab.lab.networks import MLP, WideResNet
from growlab.parts import Averages, Depth
from growlab.widths import tensors_of, trace
from tests.cases import Around, Growing, train
from tests.unit.growth.measured import started

X = torch.randn(5, 3, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def by_hooks(layer: nn.Module, dim: int | None = 0) -> nn.Module:
    with warnings.catch_warnings():
        # Deprecated, but still used.
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer, dim=dim)


SPELLINGS: dict[str, tuple[Callable[..., nn.Module], Callable[[nn.Module], object]]] = {
    "hooks": (by_hooks, nn.utils.remove_weight_norm),
    "parametrization": (
        parametrizations.weight_norm,
        lambda layer: parametrize.remove_parametrizations(layer, "weight"),
    ),
}


def vocoder(norm: Callable[..., nn.Module], dim: int | None = 0) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv1d(3, 8, 3, padding=1), nn.ConvTranspose1d(8, 6, 4, 2, padding=1), nn.Conv1d(6, 10, 3)
    one, up, two = (norm(layer, dim=dim) for layer in layers)
    last = norm(nn.Linear(10, 4), dim=dim)
    rest = nn.LeakyReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten()
    return nn.Sequential(one, nn.LeakyReLU(), up, nn.LeakyReLU(), two, *rest, last).double()


@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_network_grows_exactly_and_ends_as_an_ordinary_one(spelling: str, dim: int | None) -> None:
    norm, remove = SPELLINGS[spelling]
    network = vocoder(norm, dim)
    full = {name: tensor.shape for name, tensor in network.state_dict().items()}
    grower = Grower(network, X, method=VarianceTransfer(), trigger={0: 1 / 4, 1: 1 / 2, 2: 1.0})
    assert grower.graph.full_widths == {"0": 8, "2": 6, "4": 10}
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    grower.follow(optimizer, state="inherit")
    for epoch in range(3):
        before = network(X).detach()
        for event in grower.step(epoch):
            assert max(event.parity_error_eval, event.parity_error_train) <= 1e-12
            torch.testing.assert_close(network(X) * grower.state.output_factor, before, rtol=1e-12, atol=1e-12)
        train(network, optimizer, X, steps=3)
        assert {float(optimizer.state[p]["step"]) for p in network.parameters()} == {3.0 * (epoch + 1)}
    grower.finish()
    assert {float(optimizer.state[p]["step"]) for p in network.parameters()} == {9.0}
    expected, state = network(X).detach(), network.state_dict()
    assert {name: tensor.shape for name, tensor in state.items()} == full
    fresh = vocoder(norm, dim)
    fresh.load_state_dict(state, strict=True)
    assert torch.equal(fresh(X), expected) and repr(fresh) == repr(network)
    for layer in (network[0], network[2], network[4], network[-1]):
        remove(layer)
        assert isinstance(layer.weight, nn.Parameter)
    torch.testing.assert_close(network(X), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_noise_is_that_of_the_weights_themselves(spelling: str, dim: int | None) -> None:
    """Regardless of the lengths of their directions; noise that cancels changes no output."""
    norm, _ = SPELLINGS[spelling]
    small, wide = (
        nn.Sequential(norm(nn.Linear(5, n), dim=dim), nn.ReLU(), norm(nn.Linear(n, 3), dim=dim)).double()
        for n in (4, 8)
    )
    with torch.no_grad():
        for name, parameter in small.named_parameters():
            if name.endswith(("weight_v", "original1")):
                parameter.mul_(20.0)
    x, method = torch.randn(6, 5).double(), HyperCloning(noise_std=0.1)
    expected, grower = small(x), Grower.from_trained(small, wide, x, method=method, verbose=False)
    (event,) = grower.step()
    torch.testing.assert_close(wide(x), expected, rtol=1e-12, atol=1e-12)
    assert event.noise_error_eval <= 1e-12
    weight = wide[2].weight.detach()
    assert 0.01 < (weight[:, :4] - weight[:, 4:]).std() / weight.std() < 1


def test_weights_are_restored_from_storage_whatever_their_lengths() -> None:
    network = vocoder(parametrizations.weight_norm)
    graph, stored = trace(network, X), dict(network.named_parameters())
    length, direction = (stored[f"0.parametrizations.weight.original{i}"] for i in (0, 1))
    with torch.no_grad():
        direction.mul_(torch.arange(1.0, 9.0).view(8, 1, 1))
        length.mul_(torch.linspace(-2, 2, 8).view(8, 1, 1))
        length[3] = 1e-120
    old = {name: tensor.detach().clone() for name, tensor in tensors_of(network, graph).items()}
    applied = as_applied(graph, old)
    torch.testing.assert_close(applied["0.parametrizations.weight.original1"], network[0].weight)
    for name, tensor in as_stored(graph, applied).items():
        torch.testing.assert_close(tensor, old[name], rtol=1e-14, atol=0)


def test_zero_rows_are_stored_with_zero_length_and_a_direction() -> None:
    network = vocoder(parametrizations.weight_norm)
    graph = trace(network, X)
    applied = dict(as_applied(graph, tensors_of(network, graph)))
    length, direction = (f"0.parametrizations.weight.original{i}" for i in (0, 1))
    applied[direction] = applied[direction].index_fill(0, torch.tensor([2, 5]), 0.0)
    # GradMax's new rows: the square of their length would vanish in float32.
    applied[direction][3] *= 1e-30
    stored = as_stored(graph, applied)
    assert float(stored[direction][3].norm()) == pytest.approx(1) and 0 < float(stored[length][3]) < 1e-29
    assert not stored[length][[2, 5]].any() and stored[length].count_nonzero() == 6
    assert (torch.linalg.vector_norm(stored[direction].flatten(1), dim=1) > 0.1).all()
    assert not torch.equal(stored[direction][2], stored[direction][5])


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_passes_over_data_measure_the_weight_itself(spelling: str) -> None:
    """This includes zero weights, such as GradMax's new rows."""
    norm, remove = SPELLINGS[spelling]
    run = started(nn.Sequential(norm(nn.Linear(5, 8)), nn.Tanh(), norm(nn.Linear(8, 3))), (5,), GradMax(), part=1.0)
    (weight,) = (name for name in run.graph.weight_norms if name.startswith("0."))
    tensors = dict(as_applied(run.graph, run.tensors()))
    tensors[weight] = tensors[weight].index_fill(0, torch.tensor([1]), 0.0)
    names, keys = set(dict(run.network[0].named_parameters())), set(run.network.state_dict())
    found = run.data().gradients(tensors, [weight])
    assert set(dict(run.network[0].named_parameters())) == names and set(run.network.state_dict()) == keys
    for layer in (run.network[0], run.network[2]):
        remove(layer)
    with torch.no_grad():
        run.network[0].weight[1] = 0.0
    (expected,) = torch.autograd.grad(run.loss(), run.network[0].weight)
    assert expected[1].any()
    torch.testing.assert_close(found[weight], expected)
    assert float(found[""]) == pytest.approx(float(run.loss().detach()))


@pytest.mark.parametrize("method", [GradMax(), Tiny(fallback="pairs")])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_methods_that_look_at_data_grow_it(spelling: str, method: GradMax | Tiny) -> None:
    norm, _ = SPELLINGS[spelling]
    run = started(nn.Sequential(norm(nn.Linear(5, 8)), nn.Tanh(), norm(nn.Linear(8, 3))), (5,), method)
    before, width = run.network(run.batches[0][0]), run.state.widths["0"]
    event, _ = run.grow({"0": width + 2})
    after = run.network(run.batches[0][0])
    assert after.isfinite().all() and event.widths_after["0"] == width + 2
    if method.preserves:
        torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)


def test_gains_that_the_forward_adds_one_to_are_measured_with_it() -> None:
    network = Around(
        lambda net, x: net.last(torch.tanh(net.first(x)) * (1.0 + net.gain)),
        **{"first": [5, 8], "gain": nn.Parameter(torch.randn(8)), "last": [8, 3]},
    )
    run = started(network, (5,), GradMax(), part=1.0)
    assert run.graph.offsets == {"gain": 1.0}
    tensors = as_applied(run.graph, run.tensors())
    assert run.data().loss(tensors) == pytest.approx(float(run.loss().detach()))


@pytest.mark.parametrize("score", ["l1", "taylor"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_trained_networks_are_pruned_as_without_it(spelling: str, score: Any) -> None:
    norm, remove = SPELLINGS[spelling]
    normed, plain = vocoder(norm), vocoder(norm)
    for layer in (plain[0], plain[2], plain[4], plain[-1]):
        remove(layer)
    kept = []
    for network in (normed, plain):
        graph = trace(network, X)
        (network(X) - 1).square().mean().backward()
        kept.append(prune(network, graph, {"0": 5, "2": 4}, score, example=X))
    assert {name: each.tolist() for name, each in kept[0].items()} == {n: each.tolist() for n, each in kept[1].items()}
    torch.testing.assert_close(normed(X), plain(X), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_copies_of_growers_and_averages_grow_as_the_network_does(spelling: str) -> None:
    network = vocoder(SPELLINGS[spelling][0])
    grower = Grower(network, X, method=PairGrowth(), trigger={0: 1 / 2, 1: 1.0}, parts=[Averages(0.9)])
    average = torch.optim.swa_utils.AveragedModel(network, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    grower.follow(average)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    grower.follow(optimizer)
    for _ in range(2):
        train(network, optimizer, X, steps=3)
        average.update_parameters(network)
    network(X).sum().backward()
    twin, before = copy.deepcopy(grower), average(X).detach()
    assert grower.step(1) and twin.step(1)
    assert torch.equal(twin.network(X), network(X))
    assert not {*map(id, twin.network.parameters())} & {*map(id, network.parameters())}
    torch.testing.assert_close(average(X), before, rtol=1e-12, atol=1e-12)


def test_a_frozen_length_or_direction_keeps_the_width() -> None:
    """DINO's last layer has a frozen g of 1."""
    norm = parametrizations.weight_norm
    network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), norm(nn.Linear(8, 6, bias=False)))
    network[2].parametrizations.weight.original0.requires_grad_(False)
    graph = trace(network, torch.randn(4, 5))
    assert not graph.groups and "is frozen" in graph.fixed["2.parametrizations.weight"], graph.fixed


def residual(norm: Callable[..., nn.Module], dim: int | None) -> nn.Module:
    """A residual block of a vocoder, whose branch ends in a weight-normalised layer."""
    one, two = (norm(nn.Conv1d(8, 8, 3, padding=1), dim=dim) for _ in range(2))
    return Around(lambda net, x: x + net.two(F.leaky_relu(net.one(F.leaky_relu(x)))), one=one, two=two)


@pytest.mark.parametrize("start", ["zero", "stack"])
@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_blocks_are_inserted_exactly_and_learn(spelling: str, dim: int | None, start: Any) -> None:
    torch.manual_seed(0)
    norm, _ = SPELLINGS[spelling]
    ends = nn.Conv1d(3, 8, 3), (nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 4))
    network = nn.Sequential(ends[0], *(residual(norm, dim) for _ in range(3)), *ends[1]).double()
    grower = Grower(network, X, method=VarianceTransfer(), trigger={0: 0.5, 1: 1.0}, parts=[Depth(start=start)])
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    grower.follow(optimizer)
    train(network, optimizer, X, steps=3)
    before = network(X).detach()
    (event,) = grower.step(1)
    assert [each["block"] for each in event.notes["inserted"]] == ["2", "3"]
    torch.testing.assert_close(network(X) * grower.state.output_factor, before, rtol=1e-12, atol=1e-12)
    starts = {name: p.clone() for name, p in network.named_parameters()}
    train(network, optimizer, X, steps=3)
    assert all(bool(p.isfinite().all()) and not torch.equal(p, starts[name]) for name, p in network.named_parameters())


def mlp8(method: GrowthMethod) -> Growing:
    """Eight hidden layers at a quarter of their widths."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = MLP(192, [24] * 8, 5).double()
    return Growing(network, images(0), method, 0.25, seed=3)


def images(seed: int) -> Tensor:
    return torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("batch_norm", "rescale_layers_without_batch_norm"), [(True, False), (False, True), (True, True)]
)
def test_weights_of_a_wide_resnet_end_at_the_variance_of_their_fan_in(
    batch_norm: bool, rescale_layers_without_batch_norm: bool
) -> None:
    """A stream takes the scale of the layers whose fan-in grows, not of its first producer, the stem."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = WideResNet(1, 4, 3, 10, batch_norm=batch_norm)
    method = VarianceTransfer(rescale_layers_without_batch_norm=rescale_layers_without_batch_norm)
    run = Growing(network, images(1).float(), method, 0.25, rough=False)
    for part in (0.5, 1.0):
        assert run.grow(part).parity_error_eval < 1e-4
    for layer in run.graph.layers:
        weight = network.get_parameter(layer.weight).detach()
        fan_in = run.graph.fan_in(layer, run.state.widths)
        target = 1 / fan_in**2 if layer.is_output else 2 / fan_in
        assert float(weight.square().mean()) == pytest.approx(target, rel=0.35), layer.weight


@pytest.mark.parametrize("layer_multipliers", [True, False])
def test_the_stream_of_a_wide_resnet_takes_the_scale_of_growing_layers(layer_multipliers: bool) -> None:
    method = VarianceTransfer(layer_multipliers=layer_multipliers)
    run = Growing(WideResNet(1, 1, 3, 5).double(), images(0), method, 0.25, seed=3)
    rescaled = run.grow(0.5).report["rescaled"]
    assert rescaled["blocks.0.conv2.weight"] == pytest.approx(sqrt(0.5))
    # A multiplier compensates the stem, or its weight is rescaled too.
    assert rescaled.get("conv1.weight", 1.0) == pytest.approx(1.0 if layer_multipliers else sqrt(0.5))


def test_a_copy_takes_the_multiplier_of_its_source() -> None:
    run = mlp8(VarianceTransfer())
    run.grow(0.5)
    before = run.outputs()
    run.method = Net2Net()
    run.grow()
    torch.testing.assert_close(run.outputs(), before, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_steps_of_sgd_move_products_as_if_there_were_no_multipliers(momentum: float) -> None:
    run = mlp8(VarianceTransfer())
    run.grow(0.5)
    run.grow()
    network, folded = run.network, copy.deepcopy(run.network)
    fold_multipliers(folded)
    for one in (network.train(), folded.train()):
        optimizer = torch.optim.SGD(one.parameters(), 0.1, momentum=momentum, weight_decay=1e-2)
        for seed in (11, 12, 13):
            train(one, optimizer, images(seed), torch.arange(4))
    fold_multipliers(network)
    for one, other in zip(network.parameters(), folded.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_the_literal_rule_changes_the_function_and_its_receipt_says_by_how_much() -> None:
    run = mlp8(VarianceTransfer(as_published=True))
    event = run.grow(0.5)
    assert event.parity_tolerance_eval is None and event.parity_error_eval > 0.1
    assert not run.state.multipliers and run.state.output_factor == 1.0
    assert event.report["rescaled"]["hidden.2.weight"] == pytest.approx(sqrt(0.5))


def test_modules_are_found_that_apply_weights_of_others() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    network = Around(
        lambda net, x: net.head(net.attention(h := net.inside(x), h, h, need_weights=False)[0]),
        **{"inside": [5, 8], "attention": attention, "head": [8, 3]},
    )
    callers = {layer.weight: layer.callers for layer in trace(network, torch.randn(2, 6, 5)).layers}
    assert callers["head.weight"] == ("head",)
    # torch's own attention uses the weight of the layer inside of it.
    assert callers["attention.out_proj.weight"] == ("attention",)


@pytest.mark.parametrize(
    ("beside", "backend"),
    [*(("norm", "eager"), ("nothing compiled", "eager")), pytest.param("nothing", "aot_eager", marks=pytest.mark.slow)],
)
def test_a_compiled_module_inside_grows_and_is_finished(beside: str, backend: str) -> None:
    def compiled(module: nn.Module) -> nn.Module:
        return torch.compile(module, backend=backend)  # type: ignore[return-value]

    torch.manual_seed(0)
    torch._dynamo.reset()
    # The compiler gives up on an empty graph, and then runs compiled layers under growlab's torch function mode.
    norm = {"nothing": nn.Identity(), "norm": nn.LayerNorm(16), "nothing compiled": nn.Identity()}[beside]
    norm = norm if beside == "nothing" else compiled(norm)
    network = nn.Sequential(nn.Linear(6, 16), compiled(nn.Linear(16, 16)), nn.ReLU(), norm, nn.Linear(16, 3)).double()
    x = torch.randn(32, 6).double()
    schedule = {0: 0.25, 1: 0.5, 2: 1.0}
    grower = Grower(network, x, method=VarianceTransfer(), trigger=schedule, anneal_steps=1)
    before = network(x)
    for epoch in (1, 2):
        (event,) = grower.step(epoch=epoch)
        assert event.parity_error_train < 1e-9
    assert any(name.endswith("unfinished_growth_multipliers") for name in network.state_dict())
    for _ in range(2):
        torch.testing.assert_close(network(x), before, rtol=1e-9, atol=1e-9)
    grower.anneal(1.0)
    before = network(x)
    grower.finish()
    assert not any("unfinished" in name for name in network.state_dict())
    torch.testing.assert_close(network(x), before, rtol=1e-9, atol=1e-9)


def test_layers_with_other_hooks_are_multiplied_just_as_plain_ones() -> None:
    """Hooks see the parameter itself, which is restored after an error."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).double()
    x = torch.randn(4, 6).double()
    grower = Grower(network, x, method=VarianceTransfer(), trigger={0: 0.5, 1.0: 1.0}, anneal_steps=0)
    grower.step(epoch=1)
    layer, weights = network[2], list(network.parameters())
    seen: list[Tensor] = []

    def step() -> list[Any]:
        network.zero_grad()
        out = network(x)
        out.square().sum().backward()
        return [out, *[weight.grad for weight in weights]]

    alone = step()
    hook = layer.register_forward_hook(lambda module, *_: seen.append(module.weight))
    for a, b in zip(alone, step(), strict=True):
        assert torch.equal(a, b)
    hook.remove()
    assert seen[0] is weights[2] and len(seen) == 1
    assert not torch.allclose(alone[0], layer.bias + network[:2](x) @ layer.weight.T)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(x)
    assert layer.weight is weights[2]

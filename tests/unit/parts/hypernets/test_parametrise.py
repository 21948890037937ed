"""Networks with weights emitted by a hypernetwork: initialisation, parametrisation, conversion to plain networks."""

import copy
from collections.abc import Callable
from itertools import pairwise
from math import prod, sqrt

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from growlab.base.errors import UserError
from growlab.lab.networks import MLP, allconv, mobilenetv1, resnet20
from growlab.parts.hypernets import (
    INITIALISATIONS,
    Emission,
    Hypernet,
    Initialisation,
    emitted,
    materialize,
    parametrise,
)
from growlab.parts.hypernets.parametrise import initialise
from tests.cases import train

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: MLP(20, [12, 12, 12], 10, activation="tanh"), (20,)),
    "all-conv": (lambda: allconv((3, 16, 16), 10, width=6), (3, 16, 16)),
    "mobilenet": (lambda: mobilenetv1((3, 8, 8), 10, width=2), (3, 8, 8)),
    "resnet-20": (lambda: resnet20((3, 8, 8), 10, width=4), (3, 8, 8)),
}


def parts(module: nn.Module, name: str = "weight") -> nn.Module:
    return module.parametrizations[name]


@pytest.mark.parametrize(
    ("network", "sharing"),
    [
        *(("mlp", sharing) for sharing in ("layer", "size", "network", "chunk")),
        *(("all-conv", "chunk"), ("mobilenet", "layer"), ("mobilenet", "chunk"), ("resnet-20", "size")),
        ("all-conv", "network"),
    ],
)
def test_everything_is_trained_and_materialized_equal(network: str, sharing: str) -> None:
    make, shape = NETWORKS[network]
    net, x = make().double(), torch.randn(4, *shape, dtype=torch.float64)
    plain, text = set(net.state_dict()), repr(net)
    hypernet = Hypernet(
        sharing, embedding_features=6, hidden_features=(7,), embedding="trained", biases=sharing != "chunk"
    )
    parametrise(net, hypernet)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
    train(net, optimizer, x, steps=2)
    assert not [name for name, p in net.named_parameters() if p.requires_grad and p.grad is None]
    expected = net.eval()(x)
    copied = copy.deepcopy(net)
    assert torch.equal(copied(x), expected)
    materialize(net)
    assert torch.equal(net(x), expected)
    assert set(net.state_dict()) == plain and repr(net) == text
    assert not [m for m in net.modules() if parametrize.is_parametrized(m)]
    assert torch.equal(copied(x), expected), "such as an average of the weights"
    fresh = make().double()
    fresh.load_state_dict(net.state_dict(), strict=True)
    assert torch.equal(fresh.eval()(x), expected)
    assert all(p.requires_grad for p in net.parameters())


def test_one_layer_computes_table_1s_sum() -> None:
    net = nn.Sequential(nn.Linear(3, 4))
    parametrise(net, Hypernet("layer", embedding_features=5, biases=True))
    for name in ("weight", "bias"):
        mine = parts(net[0], name)
        with torch.no_grad():
            mine.original.normal_()
        weight, embedding = mine[0].output.weight, mine[0].features.embedding.values
        expected = torch.einsum("...k,k->...", weight, embedding) + mine.original
        torch.testing.assert_close(getattr(net[0], name), expected)


def test_layers_of_one_size_share_the_output_layer_and_not_the_embedding() -> None:
    net = parametrise(MLP(8, [8, 8], 8), Hypernet("size", embedding_features=5, hidden_features=(4,)))
    first, second, last = parts(net.hidden[0]), parts(net.hidden[2]), parts(net.classifier)
    for other in (second, last):
        assert other[0].output is first[0].output and other.original is first.original
        assert other[0].features.hidden is first[0].features.hidden
        assert other[0].features.embedding is not first[0].features.embedding
    assert not torch.equal(net.hidden[0].weight, net.hidden[2].weight)
    # H, beta, one hidden layer, three biases of the main network.
    assert sum(p.numel() for p in net.parameters()) == 64 * 4 + 64 + 4 * 5 + 4 + 3 * 8


def test_one_embedding_for_the_network() -> None:
    net = parametrise(MLP(8, [6], 3), Hypernet("network", embedding_features=2, biases=True))
    embeddings = {id(parts(m, name)[0].features.embedding) for m, name in emitted(net)}
    assert len(embeddings) == 1
    assert len(list(emitted(net))) == 4


def test_chunks_are_equation_6() -> None:
    """W[bK:(b+1)K, j] = H (G[b, j] e[b, j] + gamma[b, j]) + beta, or likewise by inputs."""
    net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 3, 3), nn.Conv2d(3, 4, 1))
    parametrise(net, Hypernet("chunk", embedding_features=5, hidden_features=(6,)))
    first, second, third = (parts(layer)[0] for layer in net)
    assert (first.size, first.by_inputs) == (8, False) and (second.size, second.by_inputs) == (8, True)
    assert second.output is first.output and third.output is not first.output
    assert (third.size, third.kernel) == (4, (1, 1))
    for layer, chunks in zip(net, (first, second, third), strict=True):
        with torch.no_grad():
            chunks.bias.normal_()
            chunks.output.bias.normal_()
        weight = layer.weight
        for a in range(chunks.weight.shape[0]):
            for b in range(chunks.weight.shape[1]):
                features = chunks.weight[a, b] @ chunks.embedding.values[a, b] + chunks.bias[a, b]
                chunk = (chunks.output.weight @ features + chunks.output.bias).view(chunks.size, *chunks.kernel)
                rows = a if chunks.by_inputs else slice(a * chunks.size, (a + 1) * chunks.size)
                columns = slice(b * chunks.size, (b + 1) * chunks.size) if chunks.by_inputs else b
                torch.testing.assert_close(weight[rows, columns], chunk)


def test_chunks_are_those_of_the_paper() -> None:
    """All-CNN-C in blocks of its first width: the highest common factor (Chang et al. 2020, Appendix B.3)."""
    small = allconv((3, 32, 32), 10, width=12)
    parametrise(small, Hypernet("chunk", embedding_features=2))
    assert {parts(m)[0].size for m, _ in emitted(small) if parts(m)[0].kernel == (3, 3)} == {12}


def test_noise_is_drawn_at_every_use_and_left_out_of_the_plain_network() -> None:
    net = parametrise(nn.Sequential(nn.Linear(5, 4)), Hypernet("layer", embedding_features=6, noise=0.1))
    x = torch.randn(3, 5)
    for mode in (True, False):
        net.train(mode)
        assert not torch.equal(net(x), net(x))
    with parametrize.cached():
        assert torch.equal(net[0].weight, net[0].weight)
    mine = parts(net[0])
    mean = mine[0].output.weight @ mine[0].features.embedding.values + mine.original
    samples = torch.stack([net[0].weight.detach() for _ in range(2000)])
    torch.testing.assert_close(samples.mean(0), mean.detach(), rtol=0, atol=0.01)
    # Uniform on [-0.1, 0.1], through H: the variance of an emitted weight is |H|^2 * 0.1^2 / 3.
    expected = mine[0].output.weight.detach().square().sum(-1) * 0.01 / 3
    torch.testing.assert_close(samples.var(0), expected, rtol=0.2, atol=0)
    materialize(net)
    torch.testing.assert_close(net[0].weight.detach(), mean.detach())


def test_an_emitted_tensor_can_be_assigned() -> None:
    net = parametrise(nn.Sequential(nn.Linear(5, 4)), Hypernet("layer", embedding_features=6))
    assigned = torch.randn(4, 5)
    with torch.no_grad():
        net[0].weight = assigned
    torch.testing.assert_close(net[0].weight.detach(), assigned)


@pytest.mark.parametrize("sharing", ["layer", "chunk"])
def test_weights_are_emitted_in_full_precision_under_autocast(sharing: str) -> None:
    net = parametrise(nn.Sequential(nn.Linear(16, 16)), Hypernet(sharing, embedding_features=6))
    expected = net[0].weight
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(net[0].weight, expected)
        assert net(torch.randn(2, 16)).dtype == torch.bfloat16


def tied() -> nn.Module:
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    network[1].weight = network[0].weight
    return network


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (None, {"sharing": "block"}, "sharing must be layer, size, network or chunk"),
        (None, {"embedding": "learned"}, "embedding must be fixed or trained"),
        (None, {"noise": -1.0}, "noise must be at least 0, not -1"),
        (None, {"sharing": "chunk", "biases": True}, "emits no biases"),
        (None, {"sharing": "chunk", "hidden_features": (3, 3)}, "one hidden layer"),
        (None, {"sharing": "network", "initialisation": "constant_embedding"}, "sharing='network' has a single one"),
        (None, {"sharing": "chunk", "chunk_channels": 5}, "do not split into chunks of 5"),
        (None, {"emit_last": False}, "has one layer alone, and emit_last=False leaves none"),
        (lambda: nn.Sequential(nn.ReLU()), {}, "no linear layer"),
        (tied, {}, "share a weight"),
        (lambda: parametrise(nn.Sequential(nn.Linear(4, 4)), Hypernet()), {}, "parametrised already"),
    ],
)
def test_unsupported_settings_and_networks_raise_errors_of_one_sentence(
    make: Callable[[], nn.Module] | None, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        parametrise(nn.Sequential(nn.Linear(6, 4)) if make is None else make(), Hypernet(**settings))


@pytest.mark.parametrize("init", ["kaiming_tenth", "constant_embedding"])
def test_hypernetwork_initialisations_need_a_hypernetwork(init: str) -> None:
    with pytest.raises(UserError, match=f"{init} initialises hypernetworks"):
        initialise(MLP(3, [4], 2), Hypernet(initialisation=init))


@pytest.mark.parametrize("trained", [True, False])
def test_a_plain_weight_is_trained_if_what_emitted_it_was(trained):
    network = parametrise(nn.Sequential(nn.Linear(3, 4)), Hypernet())
    network.requires_grad_(trained)
    materialize(network)
    assert network[0].weight.requires_grad == trained


E, F = 40, 30  # sizes of an embedding and of what the output layer of chunks reads

INITIALISED: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: MLP(30, [48, 48, 48], 10),
    "all-conv": lambda: allconv((3, 32, 32), 10, width=12),
    "mobilenet": lambda: mobilenetv1((3, 32, 32), 10, width=4),
    "resnet-20": lambda: resnet20((3, 32, 32), 10, width=8),
}

SHARINGS, DISTRIBUTIONS = ("layer", "size", "network"), ("uniform", "normal", "uniform")
PAIRS = list(zip(INITIALISED, ("layer", "size", "network", "chunk"), strict=True))


def means(of_inputs: float, of_outputs: float) -> dict[str, float]:
    """Variances by fan-in and fan-out, and their means."""
    one, other = of_inputs, of_outputs
    of_both = {"harmonic": 2 * one * other / (one + other), "geometric": sqrt(one * other)}
    return {"in": one, "out": other, **of_both, "arithmetic": (one + other) / 2}


def variance_of(initialisation: str, j: int, i: int, *sizes: int) -> float:
    """Variance of a weight (fan-in j, fan-out i) that layers of these sizes emit from an embedding of variance 1."""
    rule, _, mean = initialisation.rpartition("_")
    alone = {
        "small_random": prod(1e-4 * size for size in sizes[:-1]),
        "kaiming_tenth": 2 ** len(sizes[1:]) / 100,
        "constant_embedding": 2 / j,
    }
    if rule == "hyperfan":
        return means(1 / j, 1 / i)[mean]
    gain = 2 if rule == "kaiming" else 1
    return alone.get(initialisation) or prod(gain * means(1, a / b)[mean] for a, b in pairwise(sizes))


# Means differ in their formulas alone, so that small networks suffice.
MEANS = tuple(name for name in INITIALISATIONS if name.endswith(("geometric", "arithmetic")))


def visible(network: str) -> list[str]:
    return [name for name in INITIALISATIONS if name not in MEANS or network in ("mlp", "all-conv")]


def fans(module: nn.Module) -> tuple[int, int]:
    shape, groups = module.weight.shape, getattr(module, "groups", 1)
    kernel = prod(shape[2:])
    return shape[1] * kernel, shape[0] // groups * kernel


@pytest.mark.parametrize("network", ["mlp", "all-conv", "mobilenet"])
@pytest.mark.parametrize(("sharing", "distribution"), list(zip(SHARINGS, DISTRIBUTIONS, strict=True)))
def test_emitted_variance_by_tensor(network: str, sharing: str, distribution: str) -> None:
    for init in visible(network):
        if init == "constant_embedding" and sharing == "network":
            continue
        net = parametrise(INITIALISED[network](), Hypernet(sharing, init, distribution, E), seed=3)
        squares, expectations = [], []
        for module, _ in emitted(net):
            parts = module.parametrizations["weight"][0]
            embedding, weight = parts.features.embedding.values, module.weight.detach()
            expected = variance_of(init, *fans(module), E, weight.numel())
            # Given the embedding, entries are independent: the deviation of a mean of n squares is sqrt(2 / n).
            given = 1.0 if init == "constant_embedding" else float(embedding.square().mean())
            measured = float(weight.square().mean())
            assert abs(measured / (expected * given) - 1) < 5 * sqrt(2 / weight.numel()), (init, weight.shape)
            squares.append(measured / expected)
            expectations.append(given)
        # And over embeddings, uniform ones of variance 1 (their squares have the variance 4/5).
        different = 1 if sharing == "network" else len(expectations)
        assert abs(sum(expectations) / len(expectations) - 1) < 5 * sqrt(0.8 / (E * different))
        smallest = min(module.weight.numel() for module, _ in emitted(net))
        assert abs(sum(squares) / len(squares) - 1) < 5 * sqrt(0.8 / (E * different) + 2 / smallest)


@pytest.mark.parametrize(
    ("network", "distribution"), [("mlp", "uniform"), ("all-conv", "normal"), ("mobilenet", "uniform")]
)
def test_emitted_variance_by_chunks(network: str, distribution: str) -> None:
    for init in visible(network):
        hypernet = Hypernet("chunk", init, distribution, E, (F,))
        net = parametrise(INITIALISED[network](), hypernet, seed=4)
        for module, _ in emitted(net):
            chunks, weight = module.parametrizations["weight"][0], module.weight.detach()
            numbers = chunks.size * prod(chunks.kernel)
            expected = variance_of(init, *fans(module), E, F, numbers)
            num_chunks = weight.numel() // numbers
            # Each chunk has a separate e and G; H is drawn once: P rows whose squares are summed over F entries.
            spread = sqrt((0.8 / E + 2 / F + 2 / numbers) / num_chunks + 2 / (F * numbers))
            assert abs(float(weight.square().mean()) / expected - 1) < 5 * spread, (init, weight.shape)


@pytest.mark.parametrize("gain", [1.0, 2.0])
@pytest.mark.parametrize("init", ["hyperfan_in", "hyperfan_out"])
def test_weights_and_biases(init: str, gain: float) -> None:
    """Table 1's right half: the variance is divided between W and b so that y = W x + b keeps the variance of x."""
    narrow, wide = [], []
    for seed in range(30):
        net = nn.Sequential(nn.Linear(60, 90), nn.ReLU(), nn.Linear(90, 40), nn.ReLU(), nn.Linear(40, 5))
        parametrise(net, Hypernet("layer", init, "uniform", E, biases=True, gain=gain), seed)
        wide.append([net[0].weight.var().item(), net[0].bias.square().mean().item()])
        narrow.append([net[2].weight.var().item(), net[2].bias.square().mean().item()])
    wide, narrow = torch.tensor(wide).mean(0).tolist(), torch.tensor(narrow).mean(0).tolist()
    if init == "hyperfan_in":
        expected = ([gain / 120, gain / 2], [gain / 180, gain / 2])
    else:
        expected = ([gain / 90, gain * (1 - 60 / 90)], [gain / 40, 0.0])
    for measured, (weight, bias) in zip((wide, narrow), expected, strict=True):
        assert measured[0] == pytest.approx(weight, rel=0.1)
        assert measured[1] == pytest.approx(bias, rel=0.25)


@pytest.mark.parametrize(
    ("init", "gain", "weights", "biases"),
    [
        # Fan-ins 25, 250, 250, fan-outs 250, 250, 250: Table 1 divides the variance of the sum.
        ("hyperfan_in", 1.0, [1 / 50, 1 / 500, 1 / 500, 1 / 500], [0.5, 0.5, 0.5, 0.5]),
        ("hyperfan_out", 2.0, [2 / 250, 2 / 250, 2 / 250, 1 / 250], [1.8, 0.0, 0.0, 0.0]),
    ],
)
def test_layers_that_share_a_hypernetwork_have_each_their_own_variances(
    init: str, gain: float, weights: list[float], biases: list[float]
) -> None:
    """Three biases have one shape and two fan-ins, and the last layer has the hidden ones' shape and another gain."""
    net = MLP(25, [250, 250, 250], 250)
    hypernet = Hypernet("size", init, embedding_features=200, biases=True, gain=gain)
    parametrise(net, hypernet, seed=3)
    layers = [net.hidden[0], net.hidden[2], net.hidden[4], net.classifier]
    # The deviation of a mean of n squares, and of the embedding's.
    for layer, weight, bias in zip(layers, weights, biases, strict=True):
        assert layer.weight.square().mean().item() == pytest.approx(weight, rel=0.2)
        assert layer.bias.square().mean().item() == pytest.approx(bias, rel=0.3)
    shared = [layer.parametrizations["weight"][0].output for layer in layers]
    assert shared[1] is shared[2] and (shared[3] is shared[1]) == (gain == 1)


@pytest.mark.parametrize(("network", "distribution"), [("mlp", "uniform"), ("all-conv", "normal")])
def test_a_network_without_a_hypernetwork_has_the_initialisation_in_every_layer(
    network: str, distribution: str
) -> None:
    """The last layer too."""
    # The paper's rules have a separate gain.
    gains = {"xavier": 1, "kaiming": 2, "hyperfan": 3}
    for init in [name for name in INITIALISATIONS if name not in ("kaiming_tenth", "constant_embedding")]:
        hypernet = Hypernet("layer", init, distribution, gain=3.0, output_gain=3.0)
        net = initialise(INITIALISED[network](), hypernet, seed=5)
        rule, _, mean = init.rpartition("_")
        for module in (m for m in net.modules() if isinstance(m, nn.Linear | nn.Conv2d)):
            j, i = fans(module)
            expected = 1e-4 if rule == "small" else gains[rule] * means(1 / j, 1 / i)[mean]
            number = module.weight.numel()
            assert abs(module.weight.var().item() / expected - 1) < 5 * sqrt(2 / number), (init, module)
            # Uniform numbers end at sqrt(3) standard deviations; normal ones do not.
            largest = module.weight.abs().max().item() / sqrt(3 * expected)
            assert (0.9 < largest <= 1 + 1e-6) == (distribution == "uniform"), (init, module)
            assert module.bias is None or not module.bias.any()


@pytest.mark.parametrize(
    ("init", "expected"),
    [("hyperfan_harmonic", 0.4 / 0.9), ("hyperfan_geometric", sqrt(0.2)), ("hyperfan_arithmetic", 0.45)],
)
def test_means_of_the_variances_of_biases(init: str, expected: float) -> None:
    """The variance is 1/2 by fan-in; by fan-out it is 1 - 60/100 = 0.4, or 0."""
    emissions = [Emission(60, 100, 2.0, True), Emission(100, 60, 2.0, True)]
    variances = [Initialisation(init).bias(emission, 4, 100) for emission in emissions]
    nothing = 0.125 if init == "hyperfan_arithmetic" else 0.0
    assert variances == pytest.approx([expected * 2 / 4, nothing])


@pytest.mark.parametrize(("network", "sharing"), PAIRS)
def test_the_last_layer_may_be_a_plain_one_and_biases_that_are_not_emitted_start_at_zero(
    network: str, sharing: str
) -> None:
    """The last layer's weights are those without a hypernetwork; all others are emitted."""
    hypernet = Hypernet(sharing, "hyperfan_out", output_gain=3.0, emit_last=False)
    net = parametrise(INITIALISED[network](), hypernet, seed=5)
    plain = initialise(INITIALISED[network](), hypernet, seed=5)
    names = [name for name, m in plain.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    layers = [net.get_submodule(name) for name in names]
    assert {id(m) for m, _ in emitted(net)} == {id(layer) for layer in layers[:-1]}
    assert torch.equal(layers[-1].weight, plain.get_submodule(names[-1]).weight) and layers[-1].weight.requires_grad
    assert not any(layer.bias.any() for layer in layers if layer.bias is not None) and layers[-1].bias is not None


def test_a_deeper_h_keeps_the_variance_of_its_embedding() -> None:
    variances = []
    for seed in range(60):
        net = nn.Sequential(nn.Linear(50, 40))
        parametrise(net, Hypernet("layer", "hyperfan_in", "normal", E, (50, 20)), seed)
        variances.append(net[0].weight.square().mean().item() * 50)
    variances = torch.tensor(variances)
    assert abs(float(variances.mean()) - 1) < 4 * float(variances.std()) / sqrt(len(variances))
    assert float(variances.std()) < 0.6


def test_noise_on_embeddings_counts_as_variance() -> None:
    hypernet = Hypernet("layer", embedding_features=400, noise=2.0)
    net = parametrise(nn.Sequential(nn.Linear(50, 40)), hypernet)
    assert net[0].weight.square().mean().item() * 50 == pytest.approx(1, rel=0.2)
    assert not torch.equal(net[0].weight, net[0].weight)


def test_the_output_layer_alone_has_a_gain_of_its_own() -> None:
    """Four times the variance doubles the same draws."""
    plain, doubled = (
        parametrise(MLP(6, [5, 5], 4), Hypernet(embedding_features=3, output_gain=gain), seed=7) for gain in (1.0, 4.0)
    )
    layers = [name for name, module in plain.named_modules() if hasattr(module, "weight") and "param" not in name]
    for name in layers:
        ratio = 2.0 if name == "classifier" else 1.0
        torch.testing.assert_close(
            doubled.get_submodule(name).weight, ratio * plain.get_submodule(name).weight, msg=name
        )


@pytest.mark.parametrize("distribution", ["uniform", "normal"])
def test_draws_do_not_depend_on_the_default_dtype(distribution: str) -> None:
    drawn, plain = [], torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            source = torch.Generator().manual_seed(0)
            drawn.append(Initialisation(distribution=distribution).draw((4, 5), 0.3, source))
    finally:
        torch.set_default_dtype(plain)
    torch.testing.assert_close(*drawn, rtol=0, atol=0)

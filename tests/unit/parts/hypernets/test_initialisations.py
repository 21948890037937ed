"""Initialisations without training: the variance of what is emitted, against formulas written out here."""

from collections.abc import Callable
from math import prod, sqrt

import pytest
import torch
from torch import nn

from growlab.base.errors import UserError
from growlab.lab.networks import MLP, allconv, mobilenetv1, resnet20
from growlab.parts.hypernets import INITIALISATIONS, Emission, Hypernet, Initialisation, emitted, parametrise
from growlab.parts.hypernets.parametrise import initialise

E, F = 40, 30  # sizes of an embedding and of what the output layer of chunks reads

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: MLP(30, [48, 48, 48], 10),
    "all-conv": lambda: allconv((3, 32, 32), 10, width=12),
    "mobilenet": lambda: mobilenetv1((3, 32, 32), 10, width=4),
    "resnet-20": lambda: resnet20((3, 32, 32), 10, width=8),
}

SHARINGS, DISTRIBUTIONS = ("layer", "size", "network"), ("uniform", "normal", "uniform")
PAIRS = list(zip(NETWORKS, ("layer", "size", "network", "chunk"), strict=True))

# Variance of an emitted weight, Var(e) = 1: fan-in j, fan-out i, n numbers that the output layer emits.
BY_TENSOR: dict[str, Callable[[int, int, int], float]] = {
    "hyperfan_in": lambda j, i, n: 1 / j,
    "hyperfan_out": lambda j, i, n: 1 / i,
    "hyperfan_harmonic": lambda j, i, n: 2 / (i + j),
    "hyperfan_geometric": lambda j, i, n: (i * j) ** -0.5,
    "hyperfan_arithmetic": lambda j, i, n: (i + j) / (2 * i * j),
    "xavier_in": lambda j, i, n: 1,
    "xavier_out": lambda j, i, n: E / n,
    "xavier_harmonic": lambda j, i, n: 2 * E / (E + n),
    "xavier_geometric": lambda j, i, n: sqrt(E / n),
    "xavier_arithmetic": lambda j, i, n: (1 + E / n) / 2,
    "kaiming_in": lambda j, i, n: 2,
    "kaiming_out": lambda j, i, n: 2 * E / n,
    "kaiming_harmonic": lambda j, i, n: 4 * E / (E + n),
    "kaiming_geometric": lambda j, i, n: 2 * sqrt(E / n),
    "kaiming_arithmetic": lambda j, i, n: 1 + E / n,
    "small_random": lambda j, i, n: E * 1e-4,
    "kaiming_tenth": lambda j, i, n: 2 / 100,
    "constant_embedding": lambda j, i, n: 2 / j,
}
BY_CHUNK: dict[str, Callable[[int, int, int], float]] = {
    **{name: BY_TENSOR[name] for name in BY_TENSOR if name.startswith("hyperfan")},
    **{name: BY_TENSOR[name] for name in ("xavier_in", "constant_embedding")},
    "xavier_out": lambda j, i, n: E / n,
    "xavier_harmonic": lambda j, i, n: 2 * E / (E + F) * 2 * F / (F + n),
    "xavier_geometric": lambda j, i, n: sqrt(E / F) * sqrt(F / n),
    "xavier_arithmetic": lambda j, i, n: (1 + E / F) / 2 * (1 + F / n) / 2,
    "kaiming_in": lambda j, i, n: 4,
    "kaiming_out": lambda j, i, n: 4 * E / n,
    "kaiming_harmonic": lambda j, i, n: 4 * E / (E + F) * 4 * F / (F + n),
    "kaiming_geometric": lambda j, i, n: 4 * sqrt(E / n),
    "kaiming_arithmetic": lambda j, i, n: (1 + E / F) * (1 + F / n),
    "small_random": lambda j, i, n: E * F * 1e-8,
    "kaiming_tenth": lambda j, i, n: 4 / 100,
}


# Means are formulas alone: the small networks show them.
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
        net = parametrise(NETWORKS[network](), Hypernet(sharing, init, distribution, E), seed=3)
        squares, expectations = [], []
        for module, _ in emitted(net):
            parts = module.parametrizations["weight"][0]
            embedding, weight = parts.features.embedding.values, module.weight.detach()
            expected = BY_TENSOR[init](*fans(module), weight.numel())
            # Given the embedding, entries are independent: the spread of a mean of n squares is sqrt(2 / n).
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
        net = parametrise(NETWORKS[network](), hypernet, seed=4)
        for module, _ in emitted(net):
            chunks, weight = module.parametrizations["weight"][0], module.weight.detach()
            numbers = chunks.size * prod(chunks.kernel)
            expected = BY_CHUNK[init](*fans(module), numbers)
            num_chunks = weight.numel() // numbers
            # Every chunk has its own e and G; H is drawn once: P rows whose squares add up over F entries.
            spread = sqrt((0.8 / E + 2 / F + 2 / numbers) / num_chunks + 2 / (F * numbers))
            assert abs(float(weight.square().mean()) / expected - 1) < 5 * spread, (init, weight.shape)


@pytest.mark.parametrize("gain", [1.0, 2.0])
@pytest.mark.parametrize("init", ["hyperfan_in", "hyperfan_out"])
def test_weights_and_biases(init: str, gain: float) -> None:
    """Table 1's right half: variance is shared between the two so that y = W x + b keeps the variance of x."""
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
    for measured, wanted in zip((wide, narrow), expected, strict=True):
        assert measured[0] == pytest.approx(wanted[0], rel=0.1)
        assert measured[1] == pytest.approx(wanted[1], rel=0.25)


@pytest.mark.parametrize(
    ("init", "gain", "weights", "biases"),
    [
        # Fan-ins 25, 250, 250, fan-outs 250, 250, 250: Table 1 shares the variance of what the two add up to.
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
    # The spread of a mean of n squares, and of the embedding's.
    for layer, weight, bias in zip(layers, weights, biases, strict=True):
        assert layer.weight.square().mean().item() == pytest.approx(weight, rel=0.2)
        assert layer.bias.square().mean().item() == pytest.approx(bias, rel=0.3)
    shared = [layer.parametrizations["weight"][0].output for layer in layers]
    assert shared[1] is shared[2] and (shared[3] is shared[1]) == (gain == 1)


@pytest.mark.parametrize(("network", "distribution"), [("mlp", "uniform"), ("all-conv", "normal")])
def test_a_network_without_a_hypernetwork_has_the_initialisation_in_every_layer(
    network: str, distribution: str
) -> None:
    """The last one too, whatever its constructor drew."""
    variances: dict[str, Callable[[int, int], float]] = {
        "xavier_in": lambda j, i: 1 / j,
        "xavier_out": lambda j, i: 1 / i,
        "xavier_harmonic": lambda j, i: 2 / (i + j),
        "kaiming_in": lambda j, i: 2 / j,
        "small_random": lambda j, i: 1e-4,
        "hyperfan_in": lambda j, i: 3 / j,
        "hyperfan_out": lambda j, i: 3 / i,
        "hyperfan_geometric": lambda j, i: 3 / sqrt(i * j),
        "kaiming_arithmetic": lambda j, i: 1 / i + 1 / j,
    }
    for init, variance in variances.items():
        hypernet = Hypernet("layer", init, distribution, gain=3.0, output_gain=3.0)
        net = initialise(NETWORKS[network](), hypernet, seed=5)
        for module in (m for m in net.modules() if isinstance(m, nn.Linear | nn.Conv2d)):
            expected, number = variance(*fans(module)), module.weight.numel()
            assert abs(module.weight.var().item() / expected - 1) < 5 * sqrt(2 / number), (init, module)
            # Uniform numbers fill an interval that ends at sqrt(3) deviations; the normal one has no end there.
            largest = module.weight.abs().max().item() / sqrt(3 * expected)
            assert (0.9 < largest <= 1 + 1e-6) == (distribution == "uniform"), (init, module)
            assert module.bias is None or not module.bias.any()


@pytest.mark.parametrize(("network", "sharing"), PAIRS)
def test_biases_that_are_not_emitted_start_at_zero(network: str, sharing: str) -> None:
    net = parametrise(NETWORKS[network](), Hypernet(sharing), seed=5)
    biases = [m.bias for m in net.modules() if isinstance(m, nn.Linear | nn.Conv2d) and m.bias is not None]
    assert biases and not any(bias.any() for bias in biases)


@pytest.mark.parametrize(
    ("init", "expected"),
    [("hyperfan_harmonic", 0.4 / 0.9), ("hyperfan_geometric", sqrt(0.2)), ("hyperfan_arithmetic", 0.45)],
)
def test_means_of_the_variances_of_biases(init: str, expected: float) -> None:
    """Of 1/2 by the fan-in and 1 - 60/100 = 0.4, or nothing, by the fan-out."""
    emissions = [Emission(60, 100, 2.0, True), Emission(100, 60, 2.0, True)]
    variances = [Initialisation(init).bias(emission, 4, 100) for emission in emissions]
    nothing = 0.125 if init == "hyperfan_arithmetic" else 0.0
    assert variances == pytest.approx([expected * 2 / 4, nothing])


@pytest.mark.parametrize(("network", "sharing"), PAIRS)
def test_the_last_layer_may_be_a_plain_one(network: str, sharing: str) -> None:
    """Its weights are those of the network without a hypernetwork; all others are emitted."""
    hypernet = Hypernet(sharing, "hyperfan_out", output_gain=3.0, emit_last=False)
    net = parametrise(NETWORKS[network](), hypernet, seed=5)
    plain = initialise(NETWORKS[network](), hypernet, seed=5)
    names = [name for name, m in plain.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    assert {id(m) for m, _ in emitted(net)} == {id(net.get_submodule(name)) for name in names[:-1]}
    last = net.get_submodule(names[-1])
    assert torch.equal(last.weight, plain.get_submodule(names[-1]).weight) and not last.bias.any()
    assert last.weight.requires_grad


def test_nothing_to_emit_is_told() -> None:
    with pytest.raises(UserError, match="has one layer alone, and emit_last=False leaves none"):
        parametrise(nn.Sequential(nn.Linear(3, 2)), Hypernet(emit_last=False))


@pytest.mark.parametrize("init", ["kaiming_tenth", "constant_embedding"])
def test_what_is_about_hypernetworks_alone_is_refused_without_one(init: str) -> None:
    with pytest.raises(UserError, match=f"{init} initialises hypernetworks"):
        initialise(MLP(3, [4], 2), Hypernet(initialisation=init))


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
    """Four times the variance of the same draws: twice their numbers."""
    plain, louder = (
        parametrise(MLP(6, [5, 5], 4), Hypernet(embedding_features=3, output_gain=gain), seed=7) for gain in (1.0, 4.0)
    )
    layers = [name for name, module in plain.named_modules() if hasattr(module, "weight") and "param" not in name]
    for name in layers:
        ratio = 2.0 if name == "classifier" else 1.0
        torch.testing.assert_close(
            louder.get_submodule(name).weight, ratio * plain.get_submodule(name).weight, msg=name
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

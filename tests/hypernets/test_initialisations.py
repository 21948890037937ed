"""Initialisations without training: the variance of what is emitted, against formulas written out here."""

from collections.abc import Callable
from math import log, prod, sqrt

import pytest
import torch
from torch import Tensor, nn

from growlab.errors import UserError
from growlab.hypernets import INITIALISATIONS, Hypernet, Initialisation, emitted, parametrise
from growlab.networks import MLP, AllConv, mobilenetv1, resnet20

E, F = 40, 30  # sizes of an embedding and of what the output layer of chunks reads

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: MLP(30, [48, 48, 48], 10),
    "all-conv": lambda: AllConv(3, 10, width=12),
    "mobilenet": lambda: mobilenetv1((3, 32, 32), 10, width=4),
    "resnet-20": lambda: resnet20((3, 32, 32), 10, width=8),
}

# Variance of an emitted weight, Var(e) = 1: fan-in j, fan-out i, n numbers that the output layer emits.
BY_TENSOR: dict[str, Callable[[int, int, int], float]] = {
    "hyperfan_in": lambda j, i, n: 1 / j,
    "hyperfan_out": lambda j, i, n: 1 / i,
    "xavier_in": lambda j, i, n: 1,
    "xavier_out": lambda j, i, n: E / n,
    "xavier_harmonic": lambda j, i, n: 2 * E / (E + n),
    "kaiming_in": lambda j, i, n: 2,
    "kaiming_out": lambda j, i, n: 2 * E / n,
    "kaiming_harmonic": lambda j, i, n: 4 * E / (E + n),
    "small_random": lambda j, i, n: E * 1e-4,
    "kaiming_tenth": lambda j, i, n: 2 / 100,
    "constant_embedding": lambda j, i, n: 2 / j,
}
BY_CHUNK: dict[str, Callable[[int, int, int], float]] = {
    **{name: BY_TENSOR[name] for name in ("hyperfan_in", "hyperfan_out", "xavier_in", "constant_embedding")},
    "xavier_out": lambda j, i, n: E / n,
    "xavier_harmonic": lambda j, i, n: 2 * E / (E + F) * 2 * F / (F + n),
    "kaiming_in": lambda j, i, n: 4,
    "kaiming_out": lambda j, i, n: 4 * E / n,
    "kaiming_harmonic": lambda j, i, n: 4 * E / (E + F) * 4 * F / (F + n),
    "small_random": lambda j, i, n: E * F * 1e-8,
    "kaiming_tenth": lambda j, i, n: 4 / 100,
}


def fans(module: nn.Module) -> tuple[int, int]:
    shape, groups = module.weight.shape, getattr(module, "groups", 1)
    kernel = prod(shape[2:])
    return shape[1] * kernel, shape[0] // groups * kernel


@pytest.mark.parametrize("distribution", ["uniform", "normal"])
@pytest.mark.parametrize("sharing", ["layer", "size", "network"])
@pytest.mark.parametrize("network", NETWORKS)
def test_emitted_variance_by_tensor(network: str, sharing: str, distribution: str) -> None:
    for init in INITIALISATIONS:
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


@pytest.mark.parametrize("distribution", ["uniform", "normal"])
@pytest.mark.parametrize("network", NETWORKS)
def test_emitted_variance_by_chunks(network: str, distribution: str) -> None:
    for init in INITIALISATIONS:
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
    for seed in range(40):
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


@pytest.mark.parametrize("hidden", [(30,), (50, 20)])
def test_a_deeper_h_keeps_the_variance_of_its_embedding(hidden: tuple[int, ...]) -> None:
    variances = []
    for seed in range(60):
        hypernet = Hypernet("layer", "hyperfan_in", "normal", E, hidden)
        net = parametrise(nn.Sequential(nn.Linear(50, 40)), hypernet, seed)
        variances.append(net[0].weight.square().mean().item() * 50)
    variances = torch.tensor(variances)
    assert abs(float(variances.mean()) - 1) < 4 * float(variances.std()) / sqrt(len(variances))
    assert float(variances.std()) < 0.6


def test_noise_on_embeddings_counts_as_variance() -> None:
    hypernet = Hypernet("layer", embedding_features=400, noise=2.0)
    net = parametrise(nn.Sequential(nn.Linear(50, 40)), hypernet)
    assert net[0].weight.square().mean().item() * 50 == pytest.approx(1, rel=0.2)
    assert not torch.equal(net[0].weight, net[0].weight)


def activation_variances(init: str, depth: int, seed: int, width: int = 128, embedding: int = 64) -> Tensor:
    """Variance after each of `depth` linear layers whose weights one hypernetwork emits, float64."""
    net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
    parametrise(net, Hypernet("size", init, embedding_features=embedding), seed)
    x, variances = torch.randn(32, width, generator=torch.Generator().manual_seed(seed)).double(), []
    for layer in net:
        x = x @ layer.weight.detach().double().T
        variances.append(x.square().mean())
    return torch.stack(variances)


def test_activations_over_depth() -> None:
    """Section 3's product: hyperfan keeps the scale over 50 layers, fan-in explodes and fan-out vanishes."""
    depth, width, embedding = 50, 128, 64
    kept = torch.stack([activation_variances("hyperfan_in", depth, seed) for seed in range(40)]).mean(0)
    assert kept.min() > 0.5 and kept.max() < 2
    for init, factor in (("xavier_in", width), ("xavier_out", embedding / width)):
        logs = torch.stack([activation_variances(init, depth, seed) for seed in range(4)]).log().mean(0)
        for layer in range(9, depth):
            assert float(logs[layer]) == pytest.approx((layer + 1) * log(factor), rel=0.2)


def test_same_seed_same_numbers_whatever_the_global_generator_does() -> None:
    nets = []
    for _ in range(2):
        torch.manual_seed(len(nets))
        nets.append(parametrise(MLP(6, [5], 4), Hypernet(embedding_features=3), seed=7).state_dict())
    hypernet = [name for name in nets[0] if "parametrizations" in name]
    assert len(hypernet) == 6
    assert all(torch.equal(nets[0][name], nets[1][name]) for name in hypernet)
    other = parametrise(MLP(6, [5], 4), Hypernet(embedding_features=3), seed=8).state_dict()
    drawn = "classifier.parametrizations.weight.0.output.weight"
    assert not torch.equal(other[drawn], nets[0][drawn])


@pytest.mark.parametrize(
    "arguments", [{"name": "hyperfan"}, {"distribution": "cauchy"}, {"small_std": 0.0}], ids=str
)
def test_an_impossible_initialisation_is_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(UserError):
        Initialisation(**arguments)

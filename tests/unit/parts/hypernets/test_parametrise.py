"""Hypernetworks in a network's place of weights: what is shared, trained and emitted, and the way back."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from growlab.base.errors import UserError
from growlab.lab.networks import MLP, allconv, mobilenetv1, resnet20
from growlab.parts.hypernets import Hypernet, emitted, materialize, parametrise

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
    for _ in range(2):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    still = {name for name, p in net.named_parameters() if p.requires_grad and p.grad is None}
    assert not still
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
    wanted = torch.randn(4, 5)
    with torch.no_grad():
        net[0].weight = wanted
    torch.testing.assert_close(net[0].weight.detach(), wanted)


@pytest.mark.parametrize("sharing", ["layer", "chunk"])
def test_weights_are_emitted_in_full_precision_under_autocast(sharing: str) -> None:
    net = parametrise(nn.Sequential(nn.Linear(16, 16)), Hypernet(sharing, embedding_features=6))
    expected = net[0].weight
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(net[0].weight, expected)
        assert net(torch.randn(2, 16)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sharing": "block"}, "sharing must be layer, size, network or chunk"),
        ({"embedding": "learned"}, "embedding must be fixed or trained"),
        ({"noise": -1.0}, "noise must be at least 0, not -1"),
        ({"sharing": "chunk", "biases": True}, "emits no biases"),
        ({"sharing": "chunk", "hidden_features": (3, 3)}, "one hidden layer"),
        ({"sharing": "network", "initialisation": "constant_embedding"}, "sharing='network' has a single one"),
        ({"sharing": "chunk", "chunk_channels": 5}, "do not split into chunks of 5"),
    ],
)
def test_bad_settings_are_refused_in_a_sentence(change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parametrise(nn.Sequential(nn.Linear(6, 4)), Hypernet(**change))


def test_networks_that_cannot_be_emitted_are_refused() -> None:
    with pytest.raises(UserError, match="no linear layer"):
        parametrise(nn.Sequential(nn.ReLU()), Hypernet())
    shared = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shared[1].weight = shared[0].weight
    with pytest.raises(UserError, match="share a weight"):
        parametrise(shared, Hypernet())
    net = parametrise(nn.Sequential(nn.Linear(4, 4)), Hypernet())
    with pytest.raises(UserError, match="parametrised already"):
        parametrise(net, Hypernet())


@pytest.mark.parametrize("trained", [True, False])
def test_a_plain_weight_is_trained_if_what_emitted_it_was(trained):
    network = parametrise(nn.Sequential(nn.Linear(3, 4)), Hypernet())
    network.requires_grad_(trained)
    materialize(network)
    assert network[0].weight.requires_grad == trained

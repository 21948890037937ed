"""Groups whose width the network's code fixes, and which parts of a network can grow."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab import Grower
from growlab.growth import GrowthMethod, Net2Net, VarianceTransfer
from growlab.widths import resize, trace
from growlab.widths.groups import HardcodedSize
from growlab.widths.places import kept_at
from tests.cases import Around, check_growth


def test_a_width_written_into_the_forward_keeps_its_group_full():
    network = Around(
        lambda net, x: net.classifier(F.relu(net.conv2(F.relu(net.conv1(x)))).reshape(-1, 32)),
        **{"conv1": nn.Conv2d(3, 6, 1), "conv2": nn.Conv2d(6, 8, 1), "classifier": [8 * 4, 3]},
    )
    graph = trace(network, torch.randn(2, 3, 2, 2))
    assert graph.full_widths == {"conv1": 6}
    assert re.fullmatch(r"the code fails at narrow widths: test_narrowing.py:\d+ raises .*32.*", graph.fixed["conv2"])
    assert not graph.grows("classifier.weight")
    resize(network, graph, graph.full_widths, {"conv1": 2})
    assert network(torch.randn(5, 3, 2, 2)).shape == (5, 3)


def looks_aside(net: Any, x: Tensor) -> Tensor:
    """Stores a result in an attribute of the module."""
    x = net.first(x).relu()
    net.seen = net.aside(net, x)
    return net.last(x).mean((2, 3))


@pytest.mark.parametrize(
    ("aside", "decoder"),
    [
        (lambda net, x: net.decoder(x), nn.ConvTranspose2d(8, 3, 2)),
        (lambda net, x: net.decoder(x), nn.ConvTranspose2d(8, 4, 2, groups=2)),
        (lambda net, x: x.new_zeros(2, 8).index_add(0, torch.zeros(len(x)).long(), x.mean((2, 3))), None),
    ],
    ids=["transposed", "transposed in groups", "rows added"],
)
def test_auxiliary_computations_keep_their_inputs_full(aside: Any, decoder: nn.Module | None) -> None:
    layers = {"first": nn.Conv2d(3, 8, 1), "last": nn.Conv2d(8, 4, 1), "decoder": decoder}
    network, x = Around(looks_aside, aside=aside, **layers), torch.randn(2, 3, 4, 4)
    grower = Grower(network, x, method=Net2Net(), trigger={0: 0.5, 1: 1.0})
    assert not grower.graph.groups and network(x).shape == (2, 4)


def shuffle_unit(net: Any, x: Tensor) -> Tensor:
    """ShuffleNet's block: half of the channels pass, the other half is convolved, then both are interleaved."""
    passing, convolved = net.stem(x).chunk(2, dim=1)
    x = torch.cat([passing, net.outside(F.relu(net.inside(convolved)))], dim=1)
    batch, channels, height, width = x.shape
    x = x.view(batch, 2, channels // 2, height, width).transpose(1, 2).flatten(1, 2)
    return net.classifier(x.mean((2, 3)))


def test_channel_shuffle_grows():
    layers = {"stem": nn.Conv2d(3, 8, 1), "inside": nn.Conv2d(4, 6, 1), "outside": nn.Conv2d(6, 4, 1)}
    network = Around(shuffle_unit, **layers, classifier=[8, 3]).double()
    graph = trace(network, example := torch.randn(4, 3, 5, 5, dtype=torch.float64))
    # The halves of a chunk must stay equal: they are one group.
    assert graph.full_widths == {"stem": 4, "inside": 6}
    check_growth(network, graph, example, VarianceTransfer(), Net2Net())


def test_tied_weights_stay_tied_while_narrowing_is_tried():
    network = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 2))
    network[3].weight = network[1].weight
    graph = trace(network, torch.randn(2, 4))
    assert list(graph.full_widths.values()) == [6]
    assert network[3].weight is network[1].weight


class Auxiliary(nn.Module):
    """A second head that only runs in train mode, as in GoogLeNet."""

    def __init__(self, in_python: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 8)
        self.head, self.auxiliary = nn.Linear(8, 3), nn.Linear(6, 3)
        self.in_python = in_python

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        hidden = F.relu(self.first(x))
        logits = self.head(F.relu(self.second(hidden)))
        if not self.training:
            return logits
        scale = hidden.sum().item() if self.in_python and not hidden.is_meta else 1.0
        return logits, self.auxiliary(hidden) * (scale if scale != 0.0 else 1.0)


@pytest.mark.parametrize(
    ("in_python", "groups", "reason"),
    [
        (False, {"first": 6, "second": 8}, "the network's output"),
        (True, {"second": 8}, "the code fails at narrow widths: test_narrowing.py:"),
    ],
)
def test_train_only_heads_grow_or_keep_their_inputs_full(in_python: bool, groups: Any, reason: str) -> None:
    network = Auxiliary(in_python).double()
    graph = trace(network, example := torch.randn(4, 4, dtype=torch.float64))
    assert graph.full_widths == groups
    assert graph.fixed["first" if in_python else "auxiliary"].startswith(reason)
    check_growth(network, graph, example, Net2Net())


def autoencoder(net: Any, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    """A variational autoencoder, whose variance is only used in training."""
    mean = net.mean(hidden := net.encoder(x))
    if not net.training:
        return net.decoder(mean)
    log_variance = net.log_variance(hidden)
    drawn = mean + torch.randn_like(mean) * (log_variance / 2).exp()
    return net.decoder(drawn), (mean**2 + log_variance.exp() - 1 - log_variance).sum(1).mean() / 2


@pytest.mark.parametrize("method", [Net2Net(), VarianceTransfer()])
def test_train_only_loss_terms_are_preserved(method: GrowthMethod) -> None:
    encoder = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
    decoder = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 20))
    parts = {"encoder": encoder, "mean": [32, 6], "log_variance": [32, 6], "decoder": decoder}
    network = Around(autoencoder, **parts).double()
    example = torch.randn(5, 20, dtype=torch.float64)
    grower = Grower(network, example, method=method, trigger={0: 0.25, 1: 1.0})
    assert grower.full_graph.full_widths == {"encoder.0": 64, "encoder.2": 32, "decoder.0": 64}
    outputs = []
    for epoch in range(2):
        grower.step(epoch=epoch)
        torch.manual_seed(0)
        outputs.append((*network.train()(example), network.eval()(example)))
    torch.testing.assert_close(outputs[1], outputs[0])


def test_noise_on_channels_does_not_keep_them_from_growing():
    def noisy(net: Any, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        hidden = net.first(x)
        if net.training:
            return net.head(hidden + 0.1 * torch.randn_like(hidden)), net.critic(x)
        return net.head(hidden)

    network = Around(noisy, first=[4, 16], head=[16, 3], critic=[4, 1])
    assert trace(network, torch.randn(2, 4)).full_widths == {"first": 16}


@pytest.mark.parametrize("num_others", [0, 3])
def test_any_two_groups_are_tried_apart(num_others):
    """The forward requires two layers to keep the ratio of their full widths."""

    def tied(net: Any, x: Tensor) -> Tensor:
        first, second = net.first(x := net.others(x)), net.second(x)
        assert second.shape[1] == 2 * first.shape[1]
        return net.head(torch.cat([first, second], 1))

    others = nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_others)))
    graph = trace(Around(tied, others=others, first=[8, 4], second=[8, 8], head=[12, 3]), torch.randn(2, 8))
    assert set(graph.groups) == {f"others.{number}" for number in range(num_others)}


class Wary:
    """A configuration that raises an error if its width is read."""

    def __init__(self) -> None:
        self.width = 8

    def __getattribute__(self, name: str) -> object:
        if name == "width":
            raise RuntimeError("ask each layer")
        return super().__getattribute__(name)


def test_missing_or_unreadable_sizes_are_ignored() -> None:
    module = nn.Linear(8, 4)
    module.settings = Wary()
    assert kept_at(module, HardcodedSize("", "settings.width")) is None
    assert kept_at(module, HardcodedSize("", "heads")) is None
    assert kept_at(module, HardcodedSize("", "out_features")) == 4


@pytest.mark.slow
@pytest.mark.parametrize("second", [False, True])
def test_swin_transformers_narrow_to_one_head(second: bool) -> None:
    """With one head a tensor is contiguous, so that `contiguous()` does not copy it: this is no other computation.

    Swin V2 takes a slice of a copy of its bias and writes zeros there.
    """
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2

    more = {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2} if second else {}
    network = SwinTransformer([2, 2], 12, [1, 2], [3, 6], [2, 2], num_classes=3, **more).eval()
    graph = trace(network, torch.randn(2, 3, 16, 16))
    assert {"features.0.0", "features.2.reduction"} <= graph.groups.keys()
    assert not {name for name in graph.fixed if "attn" in name or "reduction" in name}
    narrow = {name: max(1, width // 3) for name, width in graph.full_widths.items()}
    resize(network, graph, graph.full_widths, narrow)
    first, last = network.features[1][0].attn, network.features[3][1].attn
    assert (first.num_heads, first.shift_size, last.num_heads, last.shift_size) == (1, [0, 0], 2, [1, 1])
    assert last.qkv.bias.shape == (24,) and not (second and last.logit_scale.shape[0] != 2)
    assert network(torch.randn(5, 3, 16, 16)).shape == (5, 3)


def sliced(rows: Callable[[Tensor], int]) -> nn.Module:
    """One vector of biases for two layers; the first `rows` are for the first layer."""

    def run(net: Any, x: Tensor) -> Tensor:
        one, two = net.first(x), net.second(x)
        parts = one + net.bias[: rows(one)], two + net.bias[rows(one) :]
        return net.out(torch.cat(parts, 1).tanh())

    return Around(run, first=[6, 8], second=[6, 4], bias=nn.Parameter(torch.randn(12)), out=[12, 3]).double()


@pytest.mark.parametrize(
    # A slice of a fixed length takes other entries if the first layer is narrow.
    ("rows", "groups"),
    [(lambda x: x.shape[1], {"first", "second"}), (lambda x: 8, {"second"})],
)
def test_slices_of_a_vector_grow_with_what_they_are_added_to(rows: Callable[[Tensor], int], groups: set[str]) -> None:
    network, x = sliced(rows), torch.randn(5, 6, dtype=torch.float64)
    graph = trace(network, x)
    assert graph.groups.keys() == groups and graph.grows("bias")
    bias = network.bias.detach().clone()
    resize(network, graph, graph.full_widths, widths := {name: graph.full_widths[name] // 2 for name in groups})
    assert torch.equal(network.bias, bias[[*range(widths.get("first", 8)), 8, 9]])
    resize(network, graph, widths, graph.full_widths)
    check_growth(network, graph, x, Net2Net())


def twice_normed(net: Any, x: Tensor) -> Tensor:
    """A stream with as many groups as channels per group, between norms with one channel per group."""
    x = net.second(net.every(net.first(x)).relu())
    return net.head(net.norms[1](net.norms[0](x).relu()).mean((2, 3)))


def in_groups_of_four(net: Any, x: Tensor) -> Tensor:
    """The number of groups grows with the channels, not their width."""
    x = net.first(x)
    return net.head(F.group_norm(x, x.shape[1] // 4, net.gain).relu().mean((2, 3)))


def shuffled_groups(net: Any, x: Tensor) -> Tensor:
    """A channel shuffle with as many groups as channels per group; no shape shows the number of groups."""
    return net.head(net.norm(net.shuffle(net.first(x))).relu().mean((2, 3)))


@pytest.mark.parametrize(
    ("function", "layers", "groups", "following"),
    [
        (
            twice_normed,
            {
                **{"first": nn.Conv2d(3, 4, 1), "every": nn.GroupNorm(4, 4), "second": nn.Conv2d(4, 16, 1)},
                "norms": nn.ModuleList(nn.GroupNorm(4, 16) for _ in range(2)),
            },
            {"first": 4, "second": 4},
            {"every"},
        ),
        (in_groups_of_four, {"first": nn.Conv2d(3, 16, 1), "gain": nn.Parameter(torch.ones(16))}, {}, set()),
        (
            shuffled_groups,
            {"first": nn.Conv2d(3, 16, 1), "shuffle": nn.ChannelShuffle(4), "norm": nn.GroupNorm(16, 16)},
            {"first": 4},
            {"norm"},
        ),
    ],
    ids=["twice normed", "groups of four", "shuffled"],
)
def test_a_number_of_groups_follows_channels_only_where_each_is_a_group(
    function: Any, layers: dict[str, Any], groups: dict[str, int], following: set[str]
) -> None:
    network = Around(function, **layers, head=[16, 5]).double()
    x = torch.randn(4, 3, 6, 6, dtype=torch.float64)
    graph = trace(network, x)
    assert graph.full_widths == groups
    assert {place.module for place in graph.written if place.attribute == "num_groups"} == following
    check_growth(network, graph, x, *[VarianceTransfer()] * bool(groups))


def two_streams(net: Any, images: Tensor, captions: Tensor) -> Tensor:
    """Two streams of equal width, each with its norms: the code takes the size of the second from the first."""
    x, y = net.images(images), net.captions(captions)
    # This view alone requires equal widths.
    y = net.of_captions(y.relu().view(len(y), -1, x.shape[-1]))
    return net.one(net.of_images(x)).mean(1) + net.two(y).mean(1)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_streams_whose_code_wants_one_width_grow_together(norm: Callable[..., nn.Module]) -> None:
    norms = {name: norm(8, elementwise_affine=False) for name in ("of_images", "of_captions")}
    network = Around(two_streams, images=[6, 8], captions=[5, 8], **norms, one=[8, 3], two=[8, 3]).double()
    inputs = torch.randn(2, 7, 6).double(), torch.randn(2, 5, 5).double()
    grower = Grower(network, inputs, method=Net2Net(), trigger={0: 0.5, 1: 1.0})
    assert grower.graph.full_widths == {"images": 8} and network(*inputs).shape == (2, 3)
    assert network.of_captions.normalized_shape == (4,)
    (event,) = grower.step(epoch=1)
    assert event.parity_error_train < 1e-12 and network.of_captions.normalized_shape == (8,)

"""Numbers of heads follow the widths, even if the forward would run with the old numbers and compute something else."""

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import VisionTransformer

from growlab.growth import Net2Net, PairGrowth, VarianceTransfer
from growlab.widths import resize, trace
from tests.cases import Around, check_growth

CHANNELS, HEADS = 12, 4


class Block(nn.Module):
    """Attention over a stream, in one of the usual implementations, and a hidden layer."""

    def __init__(self, attend: Callable[["Block", Tensor], Tensor], fused: bool, **kept: object) -> None:
        super().__init__()
        self.inside, self.norm = nn.Linear(5, CHANNELS), nn.LayerNorm(CHANNELS)
        self.qkv = nn.Linear(CHANNELS, 3 * CHANNELS) if fused else None
        self.parts = nn.ModuleList(() if fused else [nn.Linear(CHANNELS, CHANNELS) for _ in "qkv"])
        self.out, self.hidden = nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, 16)
        self.head = nn.Linear(16, 3)
        self.attend = attend
        for name, content in kept.items():
            setattr(self, name, content)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x)
        x = x + self.out(self.attend(self, self.norm(x)))
        return self.head(F.gelu(self.hidden(x)).mean(1))

    def each(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.parts] if self.qkv is None else list(self.qkv(x).chunk(3, -1))


def weighted(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Hand-written attention of [B, heads, T, D] to [B, T, heads * D], whose scale may be computed from the shape."""
    weights = (q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)


def split_heads(x: Tensor, number: int) -> Tensor:
    return x.view(*x.shape[:-1], number, x.shape[-1] // number).transpose(1, 2)


def of_reshape(net: Block, x: Tensor) -> Tensor:
    B, T, C = x.shape
    q, k, v = net.qkv(x).reshape(B, T, 3, net.h, C // net.h).permute(2, 0, 3, 1, 4)
    return weighted(q, k, v, (C // net.h) ** -0.5)


def of_heads_before_parts(net: Block, x: Tensor) -> Tensor:
    B, T, C = x.shape
    q, k, v = net.qkv(x).view(B, T, net.table["n"], 3, C // net.table["n"]).permute(3, 0, 2, 1, 4)
    return weighted(q, k, v)


def of_dimension_first(net: Block, x: Tensor) -> Tensor:
    B, T, C = x.shape
    q, k, v = (y.reshape(B, T, C // net.h, net.h).permute(0, 3, 1, 2) for y in net.each(x))
    weights = (q @ k.transpose(-2, -1) * net.scale).softmax(-1)
    return (weights @ v).permute(0, 2, 3, 1).reshape(B, T, C)


def of_samples_and_heads(net: Block, x: Tensor) -> Tensor:
    B, T, C = x.shape
    q, k, v = (split_heads(y, net.h).reshape(B * net.h, T, -1) for y in net.each(x))
    weights = torch.bmm(q, k.transpose(1, 2)).div((C // net.h) ** 0.5).softmax(-1)
    return torch.bmm(weights, v).view(B, net.h, T, -1).transpose(1, 2).reshape(B, T, C)


def of_unflatten(net: Block, x: Tensor) -> Tensor:
    q, k, v = (y.unflatten(-1, (net.config.heads, -1)).transpose(1, 2) for y in net.each(x))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def of_division(net: nn.Module, x: Tensor) -> Tensor:
    """Computes the head dimension as the number of channels divided by the number of heads."""
    B, T, _ = x.shape
    each = (layer(x) for layer in (net.q, net.k, net.v))
    q, k, v = (y.reshape(B, T, net.num_heads, y.shape[-1] // net.num_heads).transpose(1, 2) for y in each)
    return net.out(weighted(q, k, v, 6**-0.5)).mean(1)


def of_list(net: Block, x: Tensor) -> Tensor:
    heads, dimension = net.sizes
    q, k, v = (y.unflatten(-1, (heads, dimension)).transpose(1, 2) for y in net.each(x))
    return weighted(q, k, v, dimension**-0.5)


def of_function(net: Block, x: Tensor) -> Tensor:
    return weighted(*(net.split(y) for y in net.each(x)))


class Splitting(nn.Module):
    """An einops layer that splits heads; it is copied by a dictionary that its forward does not read."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        self.sizes, self._items = sizes, tuple(sizes.items())

    def forward(self, x: Tensor) -> Tensor:
        return split_heads(x, dict(self._items)["h"])

    def __getstate__(self) -> dict[str, int]:
        return self.sizes

    def __setstate__(self, state: dict[str, int]) -> None:
        self.__init__(**state)


def of_layer_and_einsum(net: Block, x: Tensor) -> Tensor:
    q, k, v = (net.split(y) for y in net.each(x))
    weights = (torch.einsum("bhxd,bhyd->bhxy", q, k) * 3**-0.5).softmax(-1)
    return torch.einsum("bhxy,bhyd->bhxd", weights, v).transpose(1, 2).flatten(2)


def of_chunks(net: Block, x: Tensor) -> Tensor:
    q, k, v = (torch.stack(y.chunk(net.h, -1), 1) for y in net.each(x))
    return torch.cat(F.scaled_dot_product_attention(q, k, v).unbind(1), -1)


def of_rotated_pairs(net: Block, x: Tensor) -> Tensor:
    """Rotary embedding of pairs of channels as complex numbers, as in Llama 4."""
    turns = torch.polar(torch.ones(x.shape[1], 1), torch.arange(float(x.shape[1]))[:, None])

    def rotated(y: Tensor) -> Tensor:
        pairs = torch.view_as_complex(y.reshape(*y.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns[:, None, :]).flatten(3)

    q, k, v = (y.view(*y.shape[:-1], -1, 4) for y in net.each(x))
    return weighted(*(y.transpose(1, 2) for y in (rotated(q), rotated(k), v)))


def of_one_key_and_value(net: Block, x: Tensor) -> Tensor:
    """Queries of all heads, followed by shared keys and values that are indexed by lists, as in Falcon."""
    y = net.qkv(x).view(*x.shape[:-1], -1, CHANNELS // HEADS)
    q, k, v = (each.transpose(1, 2) for each in (y[..., :-2, :], y[..., [-2], :], y[..., [-1], :]))
    return F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q)).transpose(1, 2).flatten(2)


SPELLINGS: dict[str, Callable[[], Block]] = {
    "h of a reshape": lambda: Block(of_reshape, True, h=HEADS),
    "a dict's entry, heads before q, k and v": lambda: Block(of_heads_before_parts, True, table={"n": HEADS}),
    "the head dimension first": lambda: Block(of_dimension_first, False, h=HEADS, scale=3**-0.5),
    "heads among the samples": lambda: Block(of_samples_and_heads, False, h=HEADS),
    "an object's attribute": lambda: Block(of_unflatten, True, config=SimpleNamespace(heads=HEADS, width=CHANNELS)),
    "a list's entries": lambda: Block(of_list, True, sizes=[HEADS, CHANNELS // HEADS]),
    "a partial function": lambda: Block(of_function, True, split=partial(split_heads, number=HEADS)),
    "a layer, and einsum": lambda: Block(of_layer_and_einsum, True, split=Splitting(h=HEADS)),
    "an attribute of the class": lambda: type("Classed", (Block,), {"h": HEADS})(of_reshape, True),
    "pairs as complex numbers": lambda: Block(of_rotated_pairs, False),
    "one key and value for all heads": lambda: Block(
        of_one_key_and_value, True, qkv=nn.Linear(CHANNELS, CHANNELS + 2 * CHANNELS // HEADS)
    ),
    "chunks": lambda: Block(of_chunks, False, h=HEADS),
    "a constant": lambda: Block(lambda net, x: weighted(*(split_heads(y, HEADS) for y in net.each(x))), True),
    "the stream's width in the scale": lambda: Block(
        lambda net, x: weighted(*(split_heads(y, net.h) for y in net.each(x)), x.shape[-1] ** -0.5), False, h=HEADS
    ),
}
# Heads cannot follow the widths here; the report names the reason.
KEPT = {"a constant", "the stream's width in the scale"}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_heads_are_found_however_attention_is_written(spelling: str) -> None:
    torch.manual_seed(0)
    network, x = SPELLINGS[spelling]().double(), torch.randn(2, 7, 5, dtype=torch.float64)
    graph = trace(network, x)
    assert "hidden" in graph.groups
    assert graph.grows("out.weight") or spelling in KEPT
    assert all(reason for reason in graph.fixed.values())
    check_growth(network, graph, x, Net2Net())


@pytest.mark.parametrize(
    ("make", "shape", "stream"),
    [
        (lambda: Around(of_division, num_heads=4, q=[5, 24], k=[5, 24], v=[5, 24], out=[24, 3]), (7, 5), ()),
        (
            lambda: VisionTransformer(32, 8, num_layers=2, num_heads=4, hidden_dim=48, mlp_dim=64, num_classes=10),
            *((3, 32, 32), ("conv_proj.weight", "encoder.ln.weight")),
        ),
    ],
)
def test_heads_and_streams_grow_exactly(make: Callable[[], nn.Module], shape: Any, stream: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    network, x = make().double(), torch.randn(2, *shape, dtype=torch.float64)
    graph = trace(network, x)
    assert graph.groups and all(map(graph.grows, stream))
    check_growth(network, graph, x, PairGrowth(), VarianceTransfer(), Net2Net())


def test_settings_that_modules_share_are_copied_where_they_follow_a_width() -> None:
    shared, x = SimpleNamespace(heads=HEADS), torch.randn(2, 7, 5)
    for network in (Block(of_unflatten, True, config=shared), SPELLINGS["a layer, and einsum"]()):
        graph = trace(network, x)
        resize(network, graph, graph.full_widths, {name: 2 for name in graph.groups})
        assert torch.equal(copy.deepcopy(network)(x), network(x))
    assert shared.heads == HEADS


@pytest.mark.parametrize(
    ("what", "correlated"),
    [
        ("a matrix product", lambda y: y.transpose(1, 2) @ y),
        ("attention", lambda y: F.scaled_dot_product_attention(y[:, :6], y[:, :6], y[:, :6])),
    ],
)
def test_reasons_distinguish_matrix_products_from_attention(what: str, correlated: Callable[[Tensor], Tensor]) -> None:
    """Products of each sample's features with themselves, which are not attention."""
    network = Around(lambda net, x: net.out(correlated(net.features(x)).flatten(1)), features=[5, 6], out=[36, 3])
    graph = trace(network, torch.randn(2, 6, 5))
    assert graph.fixed["features"] == f"{what} multiplies and sums over them"

"""A channel rule a row: what grows around an operation, and that it grows exactly, to a network as it was built."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab.growth import Net2Net, VarianceTransfer, anneal_norms, finish, grow, make_schedule, make_seed
from growlab.widths import HardcodedSize, trace
from tests.cases import Around, outputs, roughen

IMAGE, TOKENS, ROW = (3, 6, 6), (5, 8), (8,)
torch.manual_seed(0)


def on_stacks(
    function: Callable[..., Tensor], up: tuple[int, ...], down: tuple[int, ...], **biases: tuple[int, ...]
) -> Around:
    """`function(network, x [tokens, samples, channels])` uses parameters that hold several matrices each."""
    parameters = {
        name: nn.Parameter(0.3 * torch.randn(size)) for name, size in {"up": up, "down": down, **biases}.items()
    }
    return Around(
        lambda net, x: net.head(function(net, net.inside(x).transpose(0, 1)).mean(0)),
        inside=nn.Linear(8, 6),
        head=nn.Linear(7, 4),
        **parameters,
    )


@dataclass(frozen=True)
class RuleCase:
    """A small network around one operation.

    Attributes:
        network: at full width.
        input_shape: of one sample.
        groups: full width of the groups that must be found.
        written: attributes of modules that must follow the widths.
    """

    network: nn.Module
    input_shape: tuple[int, ...]
    groups: Mapping[str, int]
    written: frozenset[HardcodedSize]


def case(
    input_shape: tuple[int, ...],
    groups: Mapping[str, int],
    network: nn.Module | Callable[..., Tensor],
    written: frozenset[HardcodedSize] = frozenset(),
    **layers: Any,
) -> RuleCase:
    """A network, or a function of one and its input, with linear layers [in, out] and others by name."""
    if not isinstance(network, nn.Module):
        network = Around(network, **layers)
    return RuleCase(network, input_shape, groups, written)


def stacked(function: Callable[..., Tensor], up: tuple[int, ...], down: tuple[int, ...], **biases: Any) -> RuleCase:
    return case(TOKENS, {"inside": 6, "up": 9, "down": 7}, on_stacks(function, up, down, **biases))


def conv(inside: int, outside: int) -> nn.Conv2d:
    return nn.Conv2d(inside, outside, 1)


def on_images(function: Callable[[Tensor], Tensor], width: int = 8, after: int | None = None) -> nn.Module:
    """Two convolutions around a function; `after`: channels that it leaves."""
    return Around(
        lambda net, x: net.head(function(net.inside(x)).mean((2, 3))),
        inside=conv(3, width),
        head=nn.Linear(after or width, 4),
    )


def around_layer(layer: nn.Module, width: int = 8, after: int | None = None) -> nn.Module:
    """Two layers around a third on images."""
    return Around(
        lambda net, x: net.head(net.layer(net.inside(x)).square().mean((2, 3))),
        inside=conv(3, width),
        layer=layer,
        head=nn.Linear(after or width, 4),
    )


def fused_attention(net: nn.Module, x: Tensor) -> Tensor:
    batch, tokens, _ = x.shape
    # A number that is the number of heads by chance, and that any other number would do for.
    x = x * sum(1 / (1 + i) for i in range(net.steps))
    qkv = net.qkv(x).reshape(batch, tokens, 3, net.num_heads, -1).permute(2, 0, 3, 1, 4)
    bias = net.table[net.positions].permute(2, 0, 1)
    x = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], attn_mask=bias)
    return net.head(x.transpose(1, 2).reshape(batch, tokens, net.attn_dim).mean(1))


def separate_attention(net: nn.Module, x: Tensor) -> Tensor:
    heads = [layer(x).unflatten(2, (-1, 3)).transpose(1, 2) for layer in (net.q, net.k, net.v)]
    weights = (heads[0] @ heads[1].transpose(-2, -1) * net.temperature).softmax(-1)
    return net.head((weights @ heads[2]).transpose(1, 2).flatten(2).mean(1))


def residual_attention(net: nn.Module, x: Tensor) -> Tensor:
    x = net.inside(x)
    for norm, attend in net.layers:
        y = norm(x)
        x = x + attend(y, y, y, need_weights=False)[0]
    return net.head(x.mean(1))


def attention_of_its_stream(net: nn.Module, x: Tensor) -> Tensor:
    batch, tokens, width = x.shape
    qkv = net.qkv(x).reshape(batch, tokens, 3, net.num_heads, width // net.num_heads).permute(2, 0, 3, 1, 4)
    weights = (qkv[0] * (width // net.num_heads) ** -0.5 @ qkv[1].transpose(-2, -1)).softmax(-1)
    return net.out((weights @ qkv[2]).transpose(1, 2).reshape(batch, tokens, width))


def attention(split: Callable[[nn.Module, Tensor], Tensor], **settings: float) -> nn.Module:
    """Attention over 12 channels, which `split` makes heads of, and a mask."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        q, k, v = (split(net, layer(x)).transpose(1, 2) for layer in (net.q, net.k, net.v))
        mask = torch.ones(5, 5, dtype=torch.bool).tril()
        x = F.scaled_dot_product_attention(q, k, v, mask, scale=settings.get("scale"))
        return net.head(x.transpose(1, 2).flatten(2).mean(1))

    layers = {name: nn.Linear(8, 12) for name in ("q", "k", "v")}
    return Around(forward, **layers, **settings, head=nn.Linear(12, 4))


def recurrent(net: nn.Module, x: Tensor) -> Tensor:
    x, _ = net.lstm(F.relu(net.inside(x)))
    return net.head(F.relu(net.hidden(x)).mean(1))


def split_by_attribute(net: nn.Module, x: Tensor) -> Tensor:
    values, gates = torch.split(net.inside(x), net.sizes, dim=1)
    return net.head(torch.cat([F.silu(gates), net.norm(values)], 1))


def under_autocast(net: nn.Module, x: Tensor) -> Tensor:
    x = F.relu(net.inside(x))
    with torch.autocast(x.device.type, enabled=False):
        x = torch.tanh(net.middle(x))
    return net.head(x)


def bagged(net: nn.Module, x: Tensor) -> Tensor:
    return net.head(torch.tanh(net.embed((x > 0).long())))


def through_casts(net: nn.Module, x: Tensor) -> Tensor:
    x = net.inside(x.double()).to(torch.float64).type_as(x)
    return net.head(x.to(x.device, x.dtype).clone() * x.detach().contiguous().tanh())


def placed(x: Tensor) -> Tensor:
    """Picks, gathers, scatters and adds along the second dimension."""
    order = x.shape[1] - 1 - torch.arange(x.shape[1])
    everywhere = order[None, :, None].expand(x.shape)
    x = x.index_select(1, order) + torch.gather(x, 1, everywhere)
    x = torch.zeros_like(x).index_add_(1, order, x).scatter_add(1, everywhere, x.new_zeros(x.shape) + x)
    x[:, 1:] = x[:, :-1].repeat_interleave(1, 1)
    return torch.where((x.argmax(1, keepdim=True) > 1) | (x > 0.5), x, -x)


def with_state(net: nn.Module, x: Tensor) -> Tensor:
    state = torch.zeros(x.shape[0], net.hidden, dtype=x.dtype)
    for step in range(x.shape[1]):
        state = torch.tanh(net.inside(x[:, step]) + net.state(state))
    return net.head(state)


def causal(x: Tensor, filters: Tensor, bias: Tensor) -> Tensor:
    """Each channel's own filter [channels, width] over its past, as state space models have it."""
    channels, width = filters.shape
    return F.conv1d(x, filters.unsqueeze(1), bias, padding=width - 1, groups=channels)[:, :, : x.shape[-1]]


def einsum_attention(net: nn.Module, x: Tensor) -> Tensor:
    q, k, v = (layer(x).unflatten(-1, (net.heads, -1)) for layer in (net.q, net.k, net.v))
    weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) / 3**0.5).softmax(-1)
    return net.head(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2).mean(1))


def embedded(net: nn.Module, x: Tensor) -> Tensor:
    return net.head(F.relu(net.embed((x > 0).long())).mean(1))


def using(use: Callable[[nn.Module, Tensor], Tensor]) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda net, x: net.head(use(net, net.inside(x)).tanh().mean(1))


#: Parameters that meet the channels of `x` [4, 5, 6] in other places and shapes than they have.
REARRANGED: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "a slice of all rows": lambda net, x: x + net.rows[:5],
    "a slice of all rows by their number": lambda net, x: x + net.rows[: x.shape[1]],
    "a slice of all channels": lambda net, x: x + net.vector[:] * net.vector[:6],
    "a slice behind a slice": lambda net, x: x + net.rows.clone()[0:][:5],
    "some rows": lambda net, x: x + net.rows.narrow(0, 2, 1),
    "rows by index": lambda net, x: x + net.rows.index_select(0, torch.arange(5)),
    "rows gathered": lambda net, x: x + torch.take_along_dim(net.rows, torch.arange(5)[:, None], 0),
    "rows in another order": lambda net, x: x + net.rows.flip(0) + net.rows.roll(1, 0),
    "rows that are padded": lambda net, x: x + F.pad(net.rows[1:], (0, 0, 1, 0)),
    "rows of an interpolation": lambda net, x: x + F.interpolate(net.columns, 5, mode="linear").mT,
    "columns": lambda net, x: x + net.columns.transpose(1, 2) + net.columns.movedim(1, 2),
    "repeated over the batch": lambda net, x: torch.cat([net.token.repeat(len(x), 1, 1), x], 1),
    "tiled over the batch": lambda net, x: torch.cat([net.token.tile(len(x), 1, 1), x], 1),
    "interleaved over the batch": lambda net, x: torch.cat([net.token.repeat_interleave(len(x), 0), x], 1),
    "a vector repeated": lambda net, x: torch.cat([net.vector.repeat(len(x), 1, 1), x], 1),
    "mask tokens": lambda net, x: torch.where(torch.arange(5)[:, None] > 2, net.token.repeat(*x.shape[:2], 1), x),
    "running sums": lambda net, x: x + net.rows.cumsum(0),
}
#: RMS normalisation by Euclidean norms and sums, times the root of a number of channels or of how many there are.
EUCLIDEAN: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "normalize": lambda net, x: F.normalize(x, dim=-1) * net.scale * net.gain,
    "normalize without a scale": lambda net, x: F.normalize(x, 2.0, -1, 1e-6) * (1 + net.gain),
    "normalize by shape": lambda net, x: F.normalize(x, dim=-1) * x.shape[-1] ** 0.5 * net.gain,
    "normalize of another dimension": lambda net, x: F.normalize(x.mT, dim=1).mT * net.scale * net.gain,
    "normalize of deviations": lambda net, x: F.normalize(x - x.mean(-1, keepdim=True), dim=-1) * net.gain,
    "norm": lambda net, x: x / x.norm(dim=-1, keepdim=True) * net.scale * net.gain,
    "clamped norm": lambda net, x: x / (torch.norm(x, dim=-1, keepdim=True) / net.scale).clamp(1e-8) * net.gain,
    "norm by shape": lambda net, x: x / (x.norm(2, -1, True) * x.shape[-1] ** -0.5 + 1e-8) * net.gain,
    "vector norm": lambda net, x: x / torch.linalg.vector_norm(x, dim=-1)[..., None] * net.gain,
    "sum of squares": lambda net, x: x * (x.square().sum(-1, True) + 1e-8).rsqrt() * net.scale * net.gain,
    "sum of squares by shape": lambda net, x: (
        x * (torch.sum(x**2, -1, keepdim=True) / x.shape[-1] + 1e-8).rsqrt() * net.gain
    ),
    "sum of products": lambda net, x: x / (x * x).sum(dim=-1, keepdim=True).sqrt() * net.scale * net.gain,
}
HEADS = frozenset({HardcodedSize("", "num_heads"), HardcodedSize("", "attn_dim")})
CASES = {
    **{
        f"a parameter, {name}": case(
            TOKENS,
            {"inside": 6},
            using(use),
            inside=[8, 6],
            rows=nn.Parameter(torch.randn(5, 6)),
            columns=nn.Parameter(torch.randn(1, 6, 5)),
            token=nn.Parameter(torch.randn(1, 1, 6)),
            vector=nn.Parameter(torch.randn(6)),
            head=[6, 4],
        )
        for name, use in REARRANGED.items()
    },
    "transposed convolution": case(
        IMAGE, {"inside": 8, "layer": 6}, around_layer(nn.ConvTranspose2d(8, 6, 3, stride=2), after=6)
    ),
    "depthwise transposed convolution": case(
        IMAGE, {"inside": 8}, around_layer(nn.ConvTranspose2d(8, 8, 3, stride=2, groups=8))
    ),
    "depthwise transposed convolution with a multiplier": case(
        IMAGE, {}, around_layer(nn.ConvTranspose2d(8, 16, 2, groups=8), after=16)
    ),
    "grouped transposed convolution": case(IMAGE, {}, around_layer(nn.ConvTranspose2d(8, 8, 3, groups=2))),
    "transposed convolution in 1d": case(
        TOKENS,
        {"inside": 8, "layer": 6},
        lambda net, x: net.head(net.layer(net.inside(x)).mean(2)),
        inside=nn.Conv1d(5, 8, 1),
        layer=nn.ConvTranspose1d(8, 6, 2),
        head=[6, 4],
    ),
    "pixel shuffle": case(IMAGE, {"inside": 6}, on_images(lambda x: F.pixel_shuffle(x, 2), 24, after=6)),
    "pixel unshuffle": case(IMAGE, {"inside": 8}, on_images(lambda x: F.pixel_unshuffle(x, 2), after=32)),
    "nearest interpolation": case(IMAGE, {"inside": 8}, on_images(lambda x: F.interpolate(x, scale_factor=2))),
    "bilinear interpolation": case(
        IMAGE, {"inside": 8}, on_images(lambda x: F.interpolate(x, (9, 7), mode="bilinear", antialias=True))
    ),
    "instance norm": case(IMAGE, {"inside": 8}, around_layer(nn.InstanceNorm2d(8, affine=True))),
    "a group a channel": case(
        IMAGE,
        {"inside": 8},
        around_layer(nn.GroupNorm(8, 8)),
        written=frozenset({HardcodedSize("layer", "num_groups")}),
    ),
    "group norm": case(IMAGE, {"inside": 4}, around_layer(nn.GroupNorm(2, 8))),
    "group norm of small groups": case(IMAGE, {"inside": 2}, around_layer(nn.GroupNorm(4, 8))),
    "group norm of two values": case(
        ROW, {}, nn.Sequential(nn.Linear(8, 6), nn.GroupNorm(3, 6), nn.ReLU(), nn.Linear(6, 4))
    ),
    "layer norm over images": case(IMAGE, {}, around_layer(nn.LayerNorm([8, 6, 6]))),
    "a norm used for two streams": case(
        ROW,
        {},
        Around(
            lambda net, x: net.head(net.norm(net.first(x)).tanh() * 2 + net.second(net.norm(net.third(x)).tanh())),
            **{name: nn.Linear(8, 8) for name in ("first", "second", "third")},
            norm=nn.LayerNorm(8, elementwise_affine=False),
            head=nn.Linear(8, 4),
        ),
    ),
    "a norm that is no module": case(IMAGE, {"inside": 8}, on_images(lambda x: F.group_norm(x, 1))),
    **{
        f"a norm as {name}": case(
            TOKENS,
            {"inside": 6},
            lambda net, x: net.head(net.last(net.inside(x) + net.hidden(F.relu(net.norm(net.inside(x)))))),
            inside=[8, 6],
            norm=Around(norm, scale=6**0.5, gain=nn.Parameter(torch.randn(6))),
            hidden=[6, 6],
            last=Around(norm, scale=6**0.5, gain=nn.Parameter(torch.randn(6))),
            head=[6, 4],
        )
        for name, norm in EUCLIDEAN.items()
    },
    "a slope per channel": case(IMAGE, {"inside": 8}, around_layer(nn.PReLU(8))),
    "rms norm": case(
        ROW,
        {"0": 6, "2": 6},
        nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 6), nn.RMSNorm(6), nn.Linear(6, 4)),
    ),
    "a layer scale that is reshaped": case(
        IMAGE,
        {"inside": 8},
        lambda net, x: net.head((net.inside(x) * net.gamma.view(1, -1, 1, 1)).mean((2, 3))),
        inside=conv(3, 8),
        gamma=nn.Parameter(torch.randn(8)),
        head=[8, 4],
    ),
    "glu": case(IMAGE, {"inside": 6}, on_images(lambda x: F.glu(x, 1), 12, after=6)),
    "where": case(IMAGE, {"inside": 8}, on_images(lambda x: torch.where(x > 0, x, 0.1 * x).masked_fill(x < -1, 0))),
    "a constant minus": case(IMAGE, {"inside": 8}, on_images(lambda x: 1 - x.sigmoid())),
    "stack": case(IMAGE, {"inside": 8}, on_images(lambda x: torch.stack([x, -x], 1).amax(1))),
    "repeat": case(IMAGE, {"inside": 8}, on_images(lambda x: x.repeat(1, 2, 1, 1), after=16)),
    "norm over pixels": case(IMAGE, {"inside": 8}, on_images(lambda x: x / (1 + x.norm(dim=(2, 3), keepdim=True)))),
    "softmax over pixels": case(
        IMAGE, {"inside": 8}, on_images(lambda x: x * x.flatten(2).softmax(2).unflatten(2, (6, 6)))
    ),
    "embedding": case(ROW, {"embed": 6}, embedded, embed=nn.Embedding(2, 6), head=[6, 4]),
    **{
        f"embedding bag, {mode}": case(ROW, {"embed": 6}, bagged, embed=nn.EmbeddingBag(2, 6, mode=mode), head=[6, 4])
        for mode in ("sum", "mean", "max")
    },
    "fused attention": case(
        TOKENS,
        {"qkv": 4},
        fused_attention,
        written=HEADS,
        qkv=[8, 3 * 4 * 5],
        table=nn.Parameter(torch.randn(9, 4)),
        positions=nn.Buffer(torch.arange(25).reshape(5, 5) % 9),
        steps=4,
        num_heads=4,
        attn_dim=20,
        head=[20, 4],
    ),
    "separate attention": case(
        TOKENS,
        {"q": 4},
        separate_attention,
        q=[8, 12],
        k=[8, 12],
        v=[8, 12],
        temperature=nn.Parameter(torch.rand(4, 1, 1)),
        head=[12, 4],
    ),
    "attention whose heads grow wider": case(TOKENS, {"q": 6}, attention(lambda net, x: x.unflatten(2, (2, -1)))),
    "attention with a head dimension in its code": case(
        TOKENS, {"q": 4}, attention(lambda net, x: x.unflatten(2, (-1, 3)))
    ),
    "attention that asks for its head dimension": case(
        TOKENS,
        {"q": 6},
        attention(lambda net, x: x.unflatten(2, (2, net.head_dim)), head_dim=6),
        written=frozenset({HardcodedSize("", "head_dim")}),
    ),
    "attention with a scale of its own": case(
        TOKENS, {"q": 4}, attention(lambda net, x: x.unflatten(2, (-1, 3)), scale=0.3)
    ),
    "attention whose keys are values": case(
        TOKENS,
        {},
        lambda net, x: net.head(F.scaled_dot_product_attention(net.q(x), net.k(x), net.k(x)).mean(1)),
        q=[8, 6],
        k=[8, 6],
        head=[6, 4],
    ),
    "multi-head attention of torch": case(
        TOKENS,
        {"attend.out_proj": 8, "hidden": 6},
        lambda net, x: net.head(net.hidden(net.attend(x, x, x)[0]).mean(1)),
        attend=nn.MultiheadAttention(8, 2, batch_first=True),
        hidden=[8, 6],
        head=[6, 4],
    ),
    "multi-head attention of torch over a stream": case(
        TOKENS,
        {"inside": 4},
        residual_attention,
        written=frozenset(HardcodedSize(f"layers.{i}.1", name) for i in (0, 1) for name in ("embed_dim", "num_heads")),
        inside=[8, 12],
        layers=nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(12), nn.MultiheadAttention(12, 4, batch_first=True)]) for _ in "12"
        ),
        head=[12, 4],
    ),
    "windows of a stream as wide as its heads": case(
        TOKENS,
        {"inside": 4},
        lambda net, x: net.head((stream := net.inside(x)) + net.attention(net.norm(stream))).mean(1),
        written=frozenset({HardcodedSize("attention", "num_heads")}),
        inside=[8, 12],
        norm=nn.RMSNorm(12),
        attention=Around(attention_of_its_stream, qkv=nn.Linear(12, 36), out=nn.Linear(12, 12), num_heads=4),
        head=[12, 4],
    ),
    "lstm": case(
        TOKENS,
        {"inside": 6, "lstm": 5, "hidden": 8},
        recurrent,
        inside=[8, 6],
        lstm=nn.LSTM(6, 5, batch_first=True),
        hidden=[5, 8],
        head=[8, 4],
    ),
    "split by an attribute": case(
        ROW,
        {"inside": 4, "inside#2": 6},
        split_by_attribute,
        written=frozenset({HardcodedSize("", "sizes", 0), HardcodedSize("", "sizes", 1)}),
        inside=[8, 10],
        norm=nn.BatchNorm1d(4),
        sizes=(4, 6),
        head=[10, 4],
    ),
    "split by an attribute that cannot follow": case(
        ROW, {}, split_by_attribute, inside=[8, 10], norm=nn.Identity(), sizes=(4, 6), head=[10, 4]
    ),
    "casts": case(ROW, {"inside": 6}, through_casts, inside=[8, 6], head=[6, 4]),
    "a cast weight": case(
        ROW,
        {"inside": 6},
        lambda net, x: net.head(F.relu(F.linear(x, net.inside.weight.to(x.dtype), net.inside.bias.type_as(x)))),
        inside=[8, 6],
        head=[6, 4],
    ),
    "products with parameters": case(
        ROW,
        {"inside": 6, "outside": 7},
        lambda net, x: torch.addmm(net.bias, F.relu(x @ net.inside).mm(net.outside.T), net.head),
        inside=nn.Parameter(torch.randn(8, 6)),
        outside=nn.Parameter(torch.randn(7, 6)),
        head=nn.Parameter(torch.randn(7, 4)),
        bias=nn.Parameter(torch.randn(4)),
    ),
    "functions of channels and parameters": case(
        IMAGE,
        {"inside": 8},
        on_images(lambda x: torch.lerp(x, x.clamp(-1, 1).pow(2).isnan().logical_not() * x.double(), 0.3)),
    ),
    "indices": case(
        TOKENS,
        {"inside": 6},
        lambda net, x: net.head(placed(F.relu(net.inside(x))).sort(1).values.roll(1, 1).mean(1)),
        inside=[8, 6],
        head=[6, 4],
    ),
    "a state of zeros": case(
        TOKENS,
        {"inside": 6},
        with_state,
        written=frozenset({HardcodedSize("", "hidden")}),
        inside=[8, 6],
        state=[6, 6],
        head=[6, 4],
        hidden=6,
    ),
    "halves by slices": case(
        ROW,
        {"inside": 6},
        lambda net, x: net.head(F.silu((y := net.inside(x))[:, : y.shape[1] // 2]) * y[:, y.shape[1] // 2 :]),
        inside=[8, 12],
        head=[6, 4],
    ),
    "einsum with parameters": case(
        TOKENS,
        {"w": 6},
        lambda net, x: torch.einsum("bth,kh->btk", F.relu(torch.einsum("bti,ih->bth", x, net.w)), net.v).mean(1),
        w=nn.Parameter(torch.randn(8, 6)),
        v=nn.Parameter(torch.randn(4, 6)),
    ),
    "matrices of one parameter": stacked(
        lambda net, x: torch.bmm(F.silu(torch.bmm(x, net.up)), net.down), (5, 6, 9), (5, 9, 7)
    ),
    "transposed matrices of one parameter": stacked(
        lambda net, x: F.silu(x @ net.up.mT) @ net.down.transpose(1, 2), (5, 9, 6), (5, 7, 9)
    ),
    "permuted matrices of one parameter": stacked(
        lambda net, x: F.silu(x @ net.up.permute(0, 2, 1)) @ net.down.permute(0, 2, 1), (5, 9, 6), (5, 7, 9)
    ),
    "matrices on the left": stacked(lambda net, x: (net.down @ F.silu(net.up @ x.mT)).mT, (5, 9, 6), (5, 7, 9)),
    "transposed matrices on the left": stacked(
        lambda net, x: (net.down.mT @ F.silu(net.up.mT @ x.mT)).mT, (5, 6, 9), (5, 9, 7)
    ),
    "matrices for every row": stacked(
        lambda net, x: (F.silu(x[:, None] @ net.up) @ net.down).sum(1), (3, 6, 9), (3, 9, 7)
    ),
    "matrices of four dimensions": stacked(
        lambda net, x: (F.silu(x[None] @ net.up) @ net.down)[0], (1, 5, 6, 9), (1, 5, 9, 7)
    ),
    "matrices and added biases": stacked(
        lambda net, x: torch.bmm(F.silu(torch.bmm(x, net.up) + net.first), net.down) + net.second,
        (5, 6, 9),
        (5, 9, 7),
        first=(5, 1, 9),
        second=(1, 7),
    ),
    "baddbmm with matrices": stacked(
        lambda net, x: torch.baddbmm(net.second, F.silu(torch.baddbmm(net.first, x, net.up)), net.down),
        (5, 6, 9),
        (5, 9, 7),
        first=(5, 1, 9),
        second=(5, 1, 7),
    ),
    "einsum with matrices": stacked(
        lambda net, x: torch.einsum("ebh,eho->ebo", F.silu(torch.einsum("ebi,eih->ebh", x, net.up)), net.down),
        (5, 6, 9),
        (5, 9, 7),
    ),
    "einsum with matrices laid out otherwise": stacked(
        lambda net, x: torch.einsum("hbe,oeh->ebo", F.silu(torch.einsum("ebi,hei->hbe", x, net.up)), net.down),
        (9, 5, 6),
        (7, 5, 9),
    ),
    "einsum with every matrix": case(
        TOKENS,
        {"inside": 6, "up": 3, "up#2": 9, "down": 7},
        on_stacks(
            lambda net, x: torch.einsum("tbeh,eho->tbo", F.silu(torch.einsum("tbi,eih->tbeh", x, net.up)), net.down),
            up=(3, 6, 9),
            down=(3, 9, 7),
        ),
    ),
    "einsum with a matrix a head": case(
        TOKENS,
        {"inside": 6, "up": 2, "up#2": 5, "down": 7},
        on_stacks(
            lambda net, x: torch.einsum("tbhk,hko->tbo", F.silu(torch.einsum("tbi,ihk->tbhk", x, net.up)), net.down),
            up=(6, 2, 5),
            down=(2, 5, 7),
        ),
    ),
    "einsum with dots and a matrix a head": case(
        TOKENS,
        {"inside": 3, "up": 5, "down": 7},
        on_stacks(
            lambda net, x: torch.einsum(
                "...i,io->...o",
                F.silu(torch.einsum("...hd,hod->...ho", x.unflatten(-1, (2, -1)), net.up)).flatten(-2),
                net.down,
            ),
            up=(2, 5, 3),
            down=(10, 7),
        ),
    ),
    "a weight on the left": case(
        TOKENS,
        {"w": 9, "v": 7, "inside": 6},
        lambda net, x: net.head((net.v @ F.silu(net.w @ net.inside(x).mT)).mT.mean(1)),
        inside=[8, 6],
        w=nn.Parameter(torch.randn(9, 6)),
        v=nn.Parameter(torch.randn(7, 9)),
        head=[7, 4],
    ),
    "a transposed weight on the left": case(
        TOKENS,
        {"w": 9, "v": 7, "inside": 6},
        lambda net, x: net.head((net.v.T @ F.silu(net.w.T @ net.inside(x).mT)).mT.mean(1)),
        inside=[8, 6],
        w=nn.Parameter(torch.randn(6, 9)),
        v=nn.Parameter(torch.randn(9, 7)),
        head=[7, 4],
    ),
    "a kernel handed on without its single dimension": case(
        TOKENS,
        {"inside": 6},
        lambda net, x: net.head(
            F.silu(causal(net.inside(x).mT, net.filters.weight.squeeze(1), net.filters.bias)).mean(2)
        ),
        inside=[8, 6],
        filters=nn.Conv1d(6, 6, 2, groups=6),
        head=[6, 4],
    ),
    "a pointwise kernel handed on as a matrix": case(
        TOKENS,
        {"inside": 6, "mix": 7},
        lambda net, x: net.head(
            F.silu(F.conv1d(net.inside(x).mT, net.mix.weight.squeeze(-1).unsqueeze(-1), net.mix.bias)).mean(2)
        ),
        inside=[8, 6],
        mix=nn.Conv1d(6, 7, 1),
        head=[7, 4],
    ),
    "states read out": case(
        TOKENS,
        {"inside": 6},
        lambda net, x: net.head(
            (F.silu(net.inside(x)[..., None] * net.into(x)[:, :, None]) @ net.out(x)[..., None])[..., 0].mean(1)
        ),
        inside=[8, 6],
        into=[8, 3],
        out=[8, 3],
        head=[6, 4],
    ),
    "states read out by einsum": case(
        TOKENS,
        {"inside": 6},
        lambda net, x: net.head(
            torch.einsum("btcs,bts->btc", F.silu(net.inside(x)[..., None] * net.into(x)[:, :, None]), net.out(x)).mean(
                1
            )
        ),
        inside=[8, 6],
        into=[8, 3],
        out=[8, 3],
        head=[6, 4],
    ),
    "einsum that repeats a single position": case(
        TOKENS,
        {},
        lambda net, x: net.head(torch.einsum("bte,eho->bto", net.inside(x).mean(-1, keepdim=True), net.up).mean(1)),
        inside=[8, 6],
        up=nn.Parameter(torch.randn(3, 2, 7)),
        head=[7, 4],
    ),
    **{
        f"{name} over channels": case(
            TOKENS,
            {"outside": 7},
            lambda net, x: net.head(net.norm(net.inside(net.outside(x).tanh())).tanh()),
            outside=[8, 7],
            inside=[7, 6],
            norm=norm(),
            head=[6, 4],
        )
        for name, norm in (
            ("batch normalisation of tokens", lambda: nn.BatchNorm1d(5)),
            ("instance normalisation of tokens", lambda: nn.InstanceNorm1d(5, affine=True)),
            ("group normalisation of tokens", lambda: nn.GroupNorm(5, 5)),
        )
    },
    "one slope without a dimension": case(
        ROW,
        {"inside": 6},
        lambda net, x: net.head(F.prelu(net.inside(x), net.slope)),
        inside=[8, 6],
        slope=nn.Parameter(torch.tensor(0.3)),
        head=[6, 4],
    ),
    "vector of activations": case(
        TOKENS,
        {"hidden": 7},
        lambda net, x: net.head(net.hidden(x) * (net.inside(x) @ net.inside(x).mean((0, 1)))[..., None]),
        inside=[8, 6],
        hidden=[8, 7],
        head=[7, 4],
    ),
    "vector of numbers": case(
        TOKENS,
        {},
        lambda net, x: net.head(net.inside(x) @ torch.arange(6.0, dtype=x.dtype)),
        inside=[8, 6],
        head=[5, 4],
    ),
    "vector of every head": case(
        TOKENS,
        {"inside": 3},
        lambda net, x: net.head(
            (heads := net.inside(x).unflatten(2, (4, -1)))
            .mul((heads @ net.vector).sigmoid()[..., None])
            .flatten(2)
            .mean(1)
        ),
        inside=[8, 12],
        vector=nn.Parameter(torch.randn(3)),
        head=[12, 4],
    ),
    "matrix times a vector": case(
        ROW,
        {"inside": 6},
        lambda net, x: net.hidden(x) * torch.mv(net.inside(x), net.vector)[:, None],
        inside=[8, 6],
        hidden=[8, 4],
        vector=nn.Parameter(torch.randn(6)),
    ),
    "einsum over heads": case(
        TOKENS,
        {"q": 4},
        einsum_attention,
        written=frozenset({HardcodedSize("", "heads")}),
        q=[8, 12],
        k=[8, 12],
        v=[8, 12],
        heads=4,
        head=[12, 4],
    ),
    "windows as channels": case(
        IMAGE, {"inside": 8}, on_images(lambda x: F.fold(F.unfold(x, 3, padding=1), (6, 6), 3, padding=1))
    ),
    "under autocast": case(ROW, {"inside": 6, "middle": 7}, under_autocast, inside=[8, 6], middle=[6, 7], head=[7, 4]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_network_grows_exactly_around(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    fresh = copy.deepcopy(case.network).double()
    example = torch.randn(4, *case.input_shape, dtype=torch.float64)
    graph = trace(fresh, example)
    assert graph.full_widths == case.groups
    assert set(graph.written) == case.written
    widths = make_schedule(3, 1, num_stages=3).widths(graph)
    for method in (VarianceTransfer(), Net2Net()) if case.groups else (Net2Net(),):
        network = copy.deepcopy(fresh)
        state = make_seed(network, graph, method, widths[0], seed=0)
        roughen(network)
        for stage in widths[1:]:
            before = outputs(network, example, False)
            event = grow(network, graph, method, state, stage, seed=0, probe=(example,))
            assert event.parity_error_eval < 1e-12
            torch.testing.assert_close(outputs(network, example, False) * event.output_factor, before)
        assert not case.groups or before.abs().max() > 1e-3
        anneal_norms(network, graph, state, 1.0)
        finish(network, graph, method, state)
        grown, built = outputs(network, example, False), copy.deepcopy(fresh)
        finish(network, graph, method, state)
        built.load_state_dict(network.state_dict(), strict=True)
        assert repr(built) == repr(network)
        for place in case.written:
            kept = [getattr(net.get_submodule(place.module), place.attribute) for net in (network, built)]
            assert kept[0] == kept[1]
        assert torch.equal(outputs(built, example, False), grown)

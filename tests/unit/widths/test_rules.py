"""One row per channel rule: the groups that grow around an operation, exactly and into an ordinary network."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab.growth import Net2Net, VarianceTransfer
from growlab.widths import HardcodedSize, trace
from tests.cases import Around, check_growth

IMAGE, TOKENS, ROW = (3, 6, 6), (5, 8), (8,)
torch.manual_seed(0)


class Case(NamedTuple):
    """A network around one operation, the groups that must be found, and attributes that must follow the widths."""

    input_shape: tuple[int, ...]
    groups: Mapping[str, int]
    network: nn.Module
    written: set[HardcodedSize]


def case(
    input_shape: tuple[int, ...],
    groups: Mapping[str, int],
    network: nn.Module | Callable[..., Tensor],
    written: Collection[tuple[Any, ...]] = (),
    **layers: Any,
) -> Case:
    """A network, or a function of a network and its input, with linear layers [in, out] and other layers by name."""
    network = network if isinstance(network, nn.Module) else Around(network, **layers)
    return Case(input_shape, groups, network, {HardcodedSize(*place) for place in written})


def between(
    groups: Mapping[str, int],
    function: Callable[..., Tensor],
    *written: tuple[Any, ...],
    shape: Any = TOKENS,
    **layers: Any,
) -> Case:
    """A function of the network and the channels between the layers `inside` [8, 6] and `head` [6, 4] (defaults)."""
    layers = {"inside": [8, 6], "head": [6, 4]} | layers
    return case(shape, groups, lambda net, x: net.head(function(net, net.inside(x))), written, **layers)


def on_images(
    function: Callable[[Tensor], Tensor], width: int = 8, after: int = 8, written: Any = (), **groups: int
) -> Case:
    """A function or layer between a convolution to `width` channels and a linear layer on a mean of `after`."""
    return case(
        *(IMAGE, groups, lambda net, x: net.head(net.layer(net.inside(x)).square().mean((2, 3))), written),
        **{"inside": nn.Conv2d(3, width, 1), "layer": function, "head": [after, 4]},
    )


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(0.5 * torch.randn(shape))


def stacked(function: Callable[..., Tensor], up: Any, down: Any, groups: Any = None, **biases: Any) -> Case:
    """`function(network, x [tokens, samples, channels])` uses parameters that hold several matrices each."""
    return between(
        groups or {"inside": 6, "up": 9, "down": 7},
        lambda net, h: function(net, h.transpose(0, 1)).mean(0),
        **{"head": [7, 4], **{name: weight(*shape) for name, shape in {"up": up, "down": down, **biases}.items()}},
    )


def separate_attention(net: nn.Module, x: Tensor) -> Tensor:
    heads = [layer(x).unflatten(2, (-1, 3)).transpose(1, 2) for layer in (net.q, net.k, net.v)]
    weights = (heads[0] @ heads[1].transpose(-2, -1) * net.temperature).softmax(-1)
    return net.head((weights @ heads[2]).transpose(1, 2).flatten(2))


def residual_attention(net: nn.Module, x: Tensor) -> Tensor:
    for norm, attend in net.layers:
        y = norm(x)
        x = x + attend(y, y, y, need_weights=False)[0]
    return x


def attention_of_its_stream(net: nn.Module, x: Tensor) -> Tensor:
    batch, tokens, width = x.shape
    # This number equals the number of heads by chance; the forward works with any other number.
    x = x * sum(1 / (1 + i) for i in range(net.steps))
    qkv = net.qkv(x).reshape(batch, tokens, 3, net.num_heads, width // net.num_heads).permute(2, 0, 3, 1, 4)
    weights = (qkv[0] * (width // net.num_heads) ** -0.5 @ qkv[1].transpose(-2, -1)).softmax(-1)
    return net.out((weights @ qkv[2]).transpose(1, 2).reshape(batch, tokens, width))


QKV = {"q": [8, 12], "k": [8, 12], "v": [8, 12], "head": [12, 4]}


def attention(width: int, split: Callable[[nn.Module, Tensor], Tensor], *written: Any, **settings: Any) -> Case:
    """Attention with a mask over 12 channels, which `split` divides into heads."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        q, k, v = (split(net, layer(x)).transpose(1, 2) for layer in (net.q, net.k, net.v))
        mask = torch.ones(5, 5, dtype=torch.bool).tril()
        x = F.scaled_dot_product_attention(q, k, v, mask, scale=settings.get("scale"))
        return net.head(x.transpose(1, 2).flatten(2))

    return case(TOKENS, {"q": width}, forward, written, **QKV, **settings)


def split_by_attribute(net: nn.Module, x: Tensor) -> Tensor:
    values, gates = torch.split(x, net.sizes, dim=1)
    return torch.cat([F.silu(gates), net.norm(values)], 1)


def under_autocast(net: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return torch.tanh(net.middle(F.relu(x)))


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


def causal(net: nn.Module, x: Tensor) -> Tensor:
    """A separate causal filter [channels, 2] for each channel, as in state space models."""
    filters = net.filters.weight.squeeze(1)
    x = F.conv1d(x.mT, filters.unsqueeze(1), net.filters.bias, padding=1, groups=len(filters))
    return F.silu(x[..., :-1].mT)


def spread_over_states(net: nn.Module, x: Tensor) -> Tensor:
    return F.silu(net.inside(x)[..., None] * net.into(x)[:, :, None])


def einsum_attention(net: nn.Module, x: Tensor) -> Tensor:
    q, k, v = (layer(x).unflatten(-1, (net.heads, -1)) for layer in (net.q, net.k, net.v))
    weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) / 3**0.5).softmax(-1)
    return net.head(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2))


def graph_attention(net: nn.Module, x: Tensor) -> Tensor:
    """Graph attention (Velickovic et al. 2018) over given edges: a parameter weights the channels in a sum."""
    x = x.flatten(0, 1)
    source, target = (x[:, :1] > x[:, 1:2].T).nonzero().T
    h = net.inside(x).view(-1, net.heads, net.channels)
    scores = (h * net.source).sum(dim=-1)[source] + (h * net.target).sum(dim=-1)[target]
    weights = F.leaky_relu(scores, 0.2).exp()
    total = weights.new_zeros(len(x), net.heads).index_add(0, target, weights) + 1e-9
    messages = (weights / total[target]).unsqueeze(-1) * h[source]
    out = h.new_zeros(len(x), net.heads, net.channels).index_add(0, target, messages)
    return net.head(out.view(-1, net.heads * net.channels).relu())


#: Parameters that are sliced, reordered or reshaped before they meet the channels of `x` [4, 5, 6].
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
#: RMS normalisation by Euclidean norms and sums, scaled by a constant or by the number of channels.
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
#: Functions of `x` [4, 5, 6] that mix channels or treat them differently.
MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "pooled over channels": lambda x: F.max_pool1d(x, 3, 1, 1),
    "convolved over channels": lambda x: F.conv1d(x, torch.ones(5, 5, 3, dtype=x.dtype), padding=1),
    "every other one": lambda x: torch.cat([x[..., ::2], x[..., 1::2]], -1),
    "shifted by one": lambda x: x + F.pad(x, (1, 0))[..., :-1],
    "median over all": lambda x: x / (x.median() + 9),
    "split in two": lambda x: x.view(x.shape[0], 5, 2, 3).flatten(2),
    "mean over channels": lambda x: x - x.mean(-1, keepdim=True),
    "maximum over channels": lambda x: x / x.max(-1, keepdim=True)[0],
    "a constant per channel": lambda x: x + torch.arange(6.0, dtype=x.dtype),
}
PASSING: dict[str, Callable[[Tensor], Tensor]] = {
    "max pool": lambda x: F.max_pool1d(x.mT, 3, 1, 1).mT,
    "adaptive max pool": lambda x: F.adaptive_max_pool1d(x.mT, 2, return_indices=True)[0].mT,
    "maximum over positions": lambda x: x.max(1, keepdim=True)[0],
    "maximum of two": lambda x: torch.maximum(x, 0.1 * x),
    "minimum": lambda x: x.amax(1) + x.min(1).values,
    "moved around": lambda x: x.unsqueeze(1).permute(0, 2, 3, 1).squeeze(-1) / 2,
    "concatenated along positions": lambda x: torch.cat([x, x], 1),
    "indices": lambda x: placed(F.relu(x)).sort(1).values.roll(1, 1),
    "differences": lambda x: torch.diff(x, dim=1),
    "logarithm of a sum over positions": lambda x: x.logsumexp(1),
}
CASES = {
    **{
        name: between({"inside": 6} if function in PASSING.values() else {}, lambda net, h, f=function: f(h))
        for name, function in {**PASSING, **MIXED}.items()
    },
    **{
        f"a parameter, {name}": between(
            {"inside": 6},
            lambda net, h, use=use: use(net, h).tanh(),
            **{"rows": weight(5, 6), "columns": weight(1, 6, 5), "token": weight(1, 1, 6), "vector": weight(6)},
        )
        for name, use in REARRANGED.items()
    },
    "transposed convolution": on_images(nn.ConvTranspose2d(8, 6, 3, stride=2), after=6, inside=8, layer=6),
    "depthwise transposed convolution": on_images(nn.ConvTranspose2d(8, 8, 3, stride=2, groups=8), inside=8),
    "depthwise transposed convolution with a multiplier": on_images(nn.ConvTranspose2d(8, 16, 2, groups=8), after=16),
    "grouped transposed convolution": on_images(nn.ConvTranspose2d(8, 8, 3, groups=2)),
    "transposed convolution in 1d": between(
        {"inside": 8, "layer": 6},
        lambda net, h: net.layer(h).mean(2),
        **{"inside": nn.Conv1d(5, 8, 1), "layer": nn.ConvTranspose1d(8, 6, 2)},
    ),
    "pixel shuffle": on_images(lambda x: F.pixel_shuffle(x, 2), 24, after=6, inside=6),
    "pixel unshuffle": on_images(lambda x: F.pixel_unshuffle(x, 2), after=32, inside=8),
    "nearest interpolation": on_images(lambda x: F.interpolate(x, scale_factor=2), inside=8),
    "bilinear interpolation": on_images(lambda x: F.interpolate(x, (9, 7), mode="bilinear", antialias=True), inside=8),
    "instance norm": on_images(nn.InstanceNorm2d(8, affine=True), inside=8),
    "a group a channel": on_images(nn.GroupNorm(8, 8), written=[("layer", "num_groups")], inside=8),
    "group norm": on_images(nn.GroupNorm(2, 8), inside=4),
    "group norm of small groups": on_images(nn.GroupNorm(4, 8), inside=2),
    "group norm of two values": between({}, lambda net, h: net.norm(h).relu(), shape=ROW, norm=nn.GroupNorm(3, 6)),
    "layer norm over images": on_images(nn.LayerNorm([8, 6, 6])),
    "a norm used for two streams": case(
        *(ROW, {}, lambda net, x: net.head(net.norm(net.one(x)).tanh() * 2 + net.two(net.norm(net.three(x)).tanh()))),
        **{"one": [8, 8], "two": [8, 8], "three": [8, 8], "norm": nn.LayerNorm(8, elementwise_affine=False)},
        head=[8, 4],
    ),
    "a norm that is no module": on_images(lambda x: F.group_norm(x, 1), inside=8),
    **{
        f"a norm as {name}": between(
            {"inside": 6},
            lambda net, h: net.last(h + net.hidden(F.relu(net.norm(h)))),
            **{part: Around(norm, scale=6**0.5, gain=weight(6)) for part in ("norm", "last")},
            hidden=[6, 6],
        )
        for name, norm in EUCLIDEAN.items()
    },
    "a slope per channel": on_images(nn.PReLU(8), inside=8),
    "rms norm": between(
        {"inside": 6, "hidden": 6}, lambda net, h: net.norm(net.hidden(h.relu())), hidden=[6, 6], norm=nn.RMSNorm(6)
    ),
    "a layer scale that is reshaped": between(
        {"inside": 8},
        lambda net, h: (h * net.gamma.view(1, -1, 1, 1)).mean((2, 3)),
        **{"shape": IMAGE, "inside": nn.Conv2d(3, 8, 1), "gamma": weight(8), "head": [8, 4]},
    ),
    "glu": on_images(lambda x: F.glu(x, 1), 12, after=6, inside=6),
    "where": on_images(lambda x: torch.where(x > 0, x, 0.1 * x).masked_fill(x < -1, 0), inside=8),
    "a constant minus": on_images(lambda x: 1 - x.sigmoid(), inside=8),
    "stack": on_images(lambda x: torch.stack([x, -x], 1).amax(1), inside=8),
    "repeat": on_images(lambda x: x.repeat(1, 2, 1, 1), after=16, inside=8),
    "norm over pixels": on_images(lambda x: x / (1 + x.norm(dim=(2, 3), keepdim=True)), inside=8),
    "softmax over pixels": on_images(lambda x: x * x.flatten(2).softmax(2).unflatten(2, (6, 6)), inside=8),
    "embedding": case(
        *(ROW, {"embed": 6}, lambda net, x: net.head(F.relu(net.embed((x > 0).long())))),
        **{"embed": nn.Embedding(2, 6), "head": [6, 4]},
    ),
    **{
        f"embedding bag, {mode}": case(ROW, {"embed": 6}, bagged, embed=nn.EmbeddingBag(2, 6, mode=mode), head=[6, 4])
        for mode in ("sum", "mean", "max")
    },
    "separate attention": case(TOKENS, {"q": 4}, separate_attention, **QKV, temperature=weight(4, 1, 1)),
    "attention whose heads grow wider": attention(6, lambda net, x: x.unflatten(2, (2, -1))),
    "attention with a head dimension in its code": attention(4, lambda net, x: x.unflatten(2, (-1, 3))),
    "attention that asks for its head dimension": attention(
        6, lambda net, x: x.unflatten(2, (2, net.head_dim)), ("", "head_dim"), head_dim=6
    ),
    "attention with a scale of its own": attention(4, lambda net, x: x.unflatten(2, (-1, 3)), scale=0.3),
    "attention whose keys are values": case(
        *(TOKENS, {}, lambda net, x: net.head(F.scaled_dot_product_attention(net.q(x), net.k(x), net.k(x)))),
        **{"q": [8, 6], "k": [8, 6], "head": [6, 4]},
    ),
    "multi-head attention of torch": case(
        *(TOKENS, {"attend.out_proj": 8, "hidden": 6}, lambda net, x: net.head(net.hidden(net.attend(x, x, x)[0]))),
        **{"attend": nn.MultiheadAttention(8, 2, batch_first=True), "hidden": [8, 6], "head": [6, 4]},
    ),
    "multi-head attention of torch over a stream": between(
        {"inside": 4},
        residual_attention,
        *((f"layers.{i}.1", name) for i in (0, 1) for name in ("embed_dim", "num_heads")),
        **{"inside": [8, 12], "head": [12, 4]},
        layers=nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(12), nn.MultiheadAttention(12, 4, batch_first=True)]) for _ in "12"
        ),
    ),
    "windows of a stream as wide as its heads": between(
        {"inside": 4},
        lambda net, h: h + net.attention(net.norm(h)),
        ("attention", "num_heads"),
        **{"inside": [8, 12], "norm": nn.RMSNorm(12), "head": [12, 4]},
        attention=Around(attention_of_its_stream, qkv=[12, 36], out=[12, 12], num_heads=4, steps=4),
    ),
    **{
        f"split by an attribute{name}": between(
            *(groups, split_by_attribute, *written),
            **{"shape": ROW, "inside": [8, 10], "norm": norm, "sizes": (4, 6), "head": [10, 4]},
        )
        for name, groups, norm, *written in (
            ("", {"inside": 4, "inside#2": 6}, nn.BatchNorm1d(4, eps=1e-14), ("", "sizes", 0), ("", "sizes", 1)),
            (" that cannot follow", {}, nn.Identity()),
        )
    },
    "casts": case(ROW, {"inside": 6}, through_casts, inside=[8, 6], head=[6, 4]),
    "a cast weight": case(
        *(ROW, {"inside": 6}),
        lambda net, x: net.head(F.relu(F.linear(x, net.inside.weight.to(x.dtype), net.inside.bias.type_as(x)))),
        **{"inside": [8, 6], "head": [6, 4]},
    ),
    "products with parameters": case(
        *(ROW, {"inside": 6, "outside": 7}),
        lambda net, x: torch.addmm(net.bias, F.relu(x @ net.inside).mm(net.outside.T), net.head),
        **{"inside": weight(8, 6), "outside": weight(7, 6), "head": weight(7, 4), "bias": weight(4)},
    ),
    "functions of channels and parameters": on_images(
        lambda x: torch.lerp(x, x.clamp(-1, 1).pow(2).isnan().logical_not() * x.double(), 0.3), inside=8
    ),
    "a state of zeros": case(
        *(TOKENS, {"inside": 6}, with_state, [("", "hidden")]),
        **{"inside": [8, 6], "state": [6, 6], "head": [6, 4], "hidden": 6},
    ),
    "halves by slices": between(
        *({"inside": 6}, lambda net, h: F.silu(h[:, : h.shape[1] // 2]) * h[:, h.shape[1] // 2 :]),
        **{"shape": ROW, "inside": [8, 12]},
    ),
    "einsum with parameters": case(
        *(TOKENS, {"w": 6}),
        lambda net, x: torch.einsum("bth,kh->btk", F.relu(torch.einsum("bti,ih->bth", x, net.w)), net.v),
        **{"w": weight(8, 6), "v": weight(4, 6)},
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
        **{"up": (5, 6, 9), "down": (5, 9, 7), "first": (5, 1, 9), "second": (1, 7)},
    ),
    "baddbmm with matrices": stacked(
        lambda net, x: torch.baddbmm(net.second, F.silu(torch.baddbmm(net.first, x, net.up)), net.down),
        **{"up": (5, 6, 9), "down": (5, 9, 7), "first": (5, 1, 9), "second": (5, 1, 7)},
    ),
    "einsum with matrices": stacked(
        lambda net, x: torch.einsum("ebh,eho->ebo", F.silu(torch.einsum("ebi,eih->ebh", x, net.up)), net.down),
        *((5, 6, 9), (5, 9, 7)),
    ),
    "einsum with matrices laid out otherwise": stacked(
        lambda net, x: torch.einsum("hbe,oeh->ebo", F.silu(torch.einsum("ebi,hei->hbe", x, net.up)), net.down),
        *((9, 5, 6), (7, 5, 9)),
    ),
    "einsum with every matrix": stacked(
        lambda net, x: torch.einsum("tbeh,eho->tbo", F.silu(torch.einsum("tbi,eih->tbeh", x, net.up)), net.down),
        *((3, 6, 9), (3, 9, 7), {"inside": 6, "up": 3, "up#2": 9, "down": 7}),
    ),
    "einsum with a matrix a head": stacked(
        lambda net, x: torch.einsum("tbhk,hko->tbo", F.silu(torch.einsum("tbi,ihk->tbhk", x, net.up)), net.down),
        *((6, 2, 5), (2, 5, 7), {"inside": 6, "up": 2, "up#2": 5, "down": 7}),
    ),
    "einsum with dots and a matrix a head": stacked(
        lambda net, x: torch.einsum(
            "...i,io->...o",
            F.silu(torch.einsum("...hd,hod->...ho", x.unflatten(-1, (2, -1)), net.up)).flatten(-2),
            net.down,
        ),
        *((2, 5, 3), (10, 7), {"inside": 3, "up": 5, "down": 7}),
    ),
    "a weight on the left": between(
        {"w": 9, "v": 7, "inside": 6},
        lambda net, h: (net.v @ F.silu(net.w @ h.mT)).mT,
        **{"w": weight(9, 6), "v": weight(7, 9), "head": [7, 4]},
    ),
    "a transposed weight on the left": between(
        {"w": 9, "v": 7, "inside": 6},
        lambda net, h: (net.v.T @ F.silu(net.w.T @ h.mT)).mT,
        **{"w": weight(6, 9), "v": weight(9, 7), "head": [7, 4]},
    ),
    "a kernel handed on without its single dimension": between(
        {"inside": 6}, causal, filters=nn.Conv1d(6, 6, 2, groups=6)
    ),
    "a pointwise kernel handed on as a matrix": between(
        {"inside": 6, "mix": 7},
        lambda net, h: F.silu(F.conv1d(h.mT, net.mix.weight.squeeze(-1).unsqueeze(-1), net.mix.bias)).mT,
        **{"mix": nn.Conv1d(6, 7, 1), "head": [7, 4]},
    ),
    **{
        f"states read out by {name}": case(
            *(TOKENS, {"inside": 6}, lambda net, x, f=function: net.head(f(spread_over_states(net, x), net.out(x)))),
            **{"inside": [8, 6], "into": [8, 3], "out": [8, 3], "head": [6, 4]},
        )
        for name, function in {
            "a product": lambda states, weights: (states @ weights[..., None])[..., 0],
            "einsum": lambda states, weights: torch.einsum("btcs,bts->btc", states, weights),
        }.items()
    },
    "einsum that repeats a single position": between(
        *({}, lambda net, h: torch.einsum("bte,eho->bto", h.mean(-1, keepdim=True), net.up)),
        **{"up": weight(3, 2, 7), "head": [7, 4]},
    ),
    **{
        f"{name} of tokens": between(
            {"inside": 7},
            lambda net, h: net.norm(net.hidden(h.tanh())).tanh(),
            **{"inside": [8, 7], "hidden": [7, 6], "norm": norm},
        )
        for name, norm in {
            "batch normalisation": nn.BatchNorm1d(5),
            "instance normalisation": nn.InstanceNorm1d(5, affine=True),
            "group normalisation": nn.GroupNorm(5, 5),
        }.items()
    },
    "one slope without a dimension": between(
        {"inside": 6}, lambda net, h: F.prelu(h, net.slope), slope=nn.Parameter(torch.tensor(0.3))
    ),
    "vector of activations": case(
        *(TOKENS, {"hidden": 7}),
        lambda net, x: net.head(net.hidden(x) * (net.inside(x) @ net.inside(x).mean((0, 1)))[..., None]),
        **{"inside": [8, 6], "hidden": [8, 7], "head": [7, 4]},
    ),
    **{
        f"sum weighed by a parameter{name}": between(
            *(groups, lambda net, h, more=more: (h * (h * net.query).sum(-1, True).softmax(1)).sum(1) + more(net)),
            query=weight(6),
        )
        for name, groups, more in (
            ("", {"inside": 6}, lambda net: 0.0),
            (" that is read elsewhere too", {}, lambda net: net.query.square().sum()),
        )
    },
    "graph attention": case(
        *(TOKENS, {"inside": 8}, graph_attention, [("", "channels")]),
        **{"inside": [8, 32], "source": weight(1, 4, 8), "target": weight(1, 4, 8), "head": [32, 4]},
        **{"heads": 4, "channels": 8},
    ),
    "a size alone, of channels that are then forgotten": case(
        *(ROW, {"inside": 6}, lambda net, x: net.head(y := net.inside(x)) * y[:, -1].shape[0]),
        **{"inside": [8, 6], "head": [6, 4]},
    ),
    "vector of numbers": between({}, lambda net, h: h @ torch.arange(6.0, dtype=h.dtype), head=[5, 4]),
    "channels beside one another, each three times": between(
        {"inside": 6}, lambda net, h: F.relu(h).repeat_interleave(3, dim=-1), head=[18, 4]
    ),
    "vector of every head": between(
        {"inside": 3},
        lambda net, h: (y := h.unflatten(2, (4, -1))).mul((y @ net.vector).sigmoid()[..., None]).flatten(2),
        **{"inside": [8, 12], "vector": weight(3), "head": [12, 4]},
    ),
    "matrix times a vector": case(
        *(ROW, {"inside": 6}, lambda net, x: net.hidden(x) * torch.mv(net.inside(x), net.vector)[:, None]),
        **{"inside": [8, 6], "hidden": [8, 4], "vector": weight(6)},
    ),
    "einsum over heads": case(TOKENS, {"q": 4}, einsum_attention, [("", "heads")], **QKV, heads=4),
    "windows as channels": on_images(lambda x: F.fold(F.unfold(x, 3, padding=1), (6, 6), 3, padding=1), inside=8),
    "under autocast": between({"inside": 6, "middle": 7}, under_autocast, middle=[6, 7], head=[7, 4]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_network_grows_exactly_around(name: str) -> None:
    input_shape, groups, network, written = CASES[name]
    torch.manual_seed(0)
    x = torch.randn(4, *input_shape, dtype=torch.float64)
    graph = trace(network.double(), x)
    assert graph.full_widths == groups
    assert set(graph.written) == written
    check_growth(network, graph, x, *(VarianceTransfer(), Net2Net())[not groups :])

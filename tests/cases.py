"""Tables of small networks and growth methods that the shared tests run over: add a row for a new one."""

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from growlab.growth import (
    Bert2Bert,
    GrowthEvent,
    GrowthMethod,
    HyperCloning,
    Lemon,
    Net2Net,
    PairGrowth,
    RandomGrowth,
    VarianceTransfer,
    anneal_norms,
    finish,
    grow,
    make_schedule,
    make_seed,
)
from growlab.lab.networks import MLP, CifarResNet, WideResNet, convnet
from growlab.widths import WidthGraph, trace
from growlab.widths.places import kept_at

#: Skips tests of inputs that older releases of torch reject themselves.
OLD_TORCH = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


class Around(nn.Module):
    """Module with `function(self, *inputs)` as forward; `parts` are its attributes, `[in, out]` a linear layer."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, nn.Linear(*part) if isinstance(part, list) else part)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


class Residual(nn.Module):
    """Residual blocks without normalisation, one with a projection; biases everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.conv1 = nn.Conv2d(6, 5, 3, padding=1)
        self.conv2 = nn.Conv2d(5, 6, 3, padding=1)
        self.conv3 = nn.Conv2d(6, 9, 3, stride=2, padding=1)
        self.projection = nn.Conv2d(6, 9, 1, stride=2)
        self.classifier = nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.stem(x))
        x = F.leaky_relu(x + self.conv2(F.leaky_relu(self.conv1(x))))
        x = F.leaky_relu(self.projection(x) + self.conv3(x))
        return self.classifier(x.mean((2, 3)))


class DepthwiseSeparable(nn.Module):
    """Depthwise and pointwise convolutions, dropout, and a depthwise convolution with two filters a channel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.pointwise = nn.Conv2d(8, 7, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(7)
        self.dropout = nn.Dropout2d(0.5)
        self.narrow = nn.Conv2d(7, 4, 1)
        self.multiplied = nn.Conv2d(4, 8, 3, groups=4)
        self.classifier = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = self.dropout(F.relu(self.norm2(self.pointwise(self.depthwise(x)))))
        x = F.relu(self.multiplied(F.relu(self.narrow(x))))
        return self.classifier(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Dense(nn.Module):
    """A dense block: every convolution reads the concatenation of all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 5, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(5)
        self.conv1 = nn.Conv2d(5, 4, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(9)
        self.conv2 = nn.Conv2d(9, 6, 3, padding=1, bias=False)
        self.norm3 = nn.BatchNorm2d(15, affine=False)
        self.classifier = nn.Linear(15, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.cat([x, self.conv1(F.relu(self.norm1(x)))], 1)
        x = torch.cat([x, self.conv2(F.relu(self.norm2(x)))], 1)
        return self.classifier(F.relu(self.norm3(x)).mean((2, 3)))


class FlattenOdd(nn.Module):
    """Odd channels and odd sides flattened, then linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 5, (3, 2))
        self.pool = nn.MaxPool2d((1, 2))
        self.hidden = nn.Linear(5 * 3 * 2, 7)
        self.classifier = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.leaky_relu(self.conv(x)))
        return self.classifier(F.relu(self.hidden(x.view(x.shape[0], -1))))


class Shared(nn.Module):
    """One layer called twice, two layers that share a weight but not a bias, one norm called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(5, 6)
        self.twice = nn.Linear(6, 6)
        self.first = nn.Linear(6, 7)
        self.second = nn.Linear(6, 7)
        self.second.weight = self.first.weight
        # At width 1 the variances are so small that torch's own eps would be a good part of them.
        self.norm = nn.BatchNorm1d(7, eps=1e-9)
        self.classifier = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.inside(x))
        x = F.leaky_relu(self.twice(F.leaky_relu(self.twice(x))))
        x = F.leaky_relu(self.norm(self.first(x))) + F.leaky_relu(self.norm(self.second(x)))
        return self.classifier(x)


class Bare(nn.Module):
    """Bare parameters, gating, mixed activations, a frozen layer, a norm without running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3, padding=1, bias=False)
        self.shift = nn.Parameter(torch.randn(1, 6, 1, 1))
        self.norm = nn.BatchNorm2d(6, track_running_stats=False)
        self.conv2 = nn.Conv2d(6, 8, 3, padding=1)
        self.gate = nn.Linear(8, 8)
        self.gate.requires_grad_(False)
        self.scale = nn.Parameter(torch.rand(8))
        self.single = nn.Conv2d(8, 1, 1)
        self.classifier = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x) + self.shift))
        x = torch.tanh(self.conv2(x))
        x = x * torch.sigmoid(self.single(x))
        x = x.mean((2, 3)) * self.scale
        return self.classifier(x * torch.sigmoid(self.gate(x)))


class Grouped(nn.Module):
    """A bottleneck around a grouped convolution, which grows the width within its groups."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.norm = nn.Conv2d(2, 6, 1, bias=False), nn.BatchNorm2d(6)
        self.grouped = nn.Conv2d(6, 8, 3, padding=1, groups=2)
        self.reduce, self.norm2 = nn.Conv2d(8, 5, 1), nn.BatchNorm2d(5)
        self.classifier = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.grouped(F.relu(self.norm(self.expand(x)))))
        return self.classifier(F.relu(self.norm2(self.reduce(x))).mean((2, 3)))


class Gated(nn.Module):
    """One layer's output cut into values and gates, then a squeeze-and-excite gate over the product."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(5, 12)
        self.squeeze, self.excite = nn.Linear(6, 4), nn.Linear(4, 6)
        self.classifier = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        values, gates = self.both(x).chunk(2, dim=1)
        x = values * F.silu(gates)
        return self.classifier(x * torch.sigmoid(self.excite(F.relu(self.squeeze(x)))))


class Decoder(nn.Module):
    """A transposed convolution, a slope per channel and a pixel shuffle."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Conv2d(2, 6, 3, stride=2)
        self.decode, self.slopes = nn.ConvTranspose2d(6, 5, 2, stride=2), nn.PReLU(5)
        self.shuffled, self.out = nn.Conv2d(5, 12, 1), nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.slopes(self.decode(F.leaky_relu(self.encode(x))))
        return self.out(F.pixel_shuffle(self.shuffled(x), 2)).mean((2, 3))


class Heads(nn.Module):
    """Attention whose number of heads grows, with a bias per head from a table."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.attn_dim = 4, 12
        self.qkv, self.out, self.classifier = nn.Linear(5, 36), nn.Linear(12, 7), nn.Linear(7, 3)
        self.table = nn.Parameter(torch.randn(11, 4))
        self.register_buffer("positions", torch.arange(36).reshape(6, 6) % 11)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).reshape(len(x), 6, 3, self.num_heads, 3).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v, self.table[self.positions].permute(2, 0, 1))
        return self.classifier(F.relu(self.out(x.transpose(1, 2).reshape(len(x), 6, self.attn_dim)).mean(1)))


class TransformerLayer(nn.Module):
    """Residual attention and MLP with layer normalisation; the attention hard-codes its width."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(6, 8))
        self.embed, self.qkv, self.out = nn.Linear(5, 8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 9), nn.GELU(), nn.Linear(9, 8))
        self.classifier = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.position
        heads = self.qkv(self.norm1(x)).reshape(len(x), 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2])
        x = x + self.out(attended.transpose(1, 2).reshape(len(x), 6, 8))
        x = x + self.mlp(self.norm2(x))
        return self.classifier(x.mean(1))


class CausalAttention(nn.Module):
    """Causal attention with two heads whose dimension grows; rotary embeddings on the first two channels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(5, 8), nn.RMSNorm(8, eps=1e-6)
        self.q, self.k, self.v = nn.Linear(8, 14), nn.Linear(8, 14, bias=False), nn.Linear(8, 14)
        self.out, self.classifier = nn.Linear(14, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        q, k, v = (layer(self.norm(x)).unflatten(2, (2, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.out(
            F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return self.classifier(x.mean(1))


def turned(x: Tensor) -> Tensor:
    """Rotate the first two channels by the position."""
    angle = torch.arange(x.shape[2], dtype=x.dtype)[:, None]
    turning, rest = x.split([2, x.shape[-1] - 2], -1)
    other = torch.cat([-turning[..., 1:], turning[..., :1]], -1)
    return torch.cat([turning * angle.cos() + other * angle.sin(), rest], -1)


class Pooled(nn.Module):
    """Attention pooling by products with vector parameters: from the right, from the left, by einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.hidden, self.mixed = nn.Linear(5, 7), nn.Linear(7, 6), nn.Linear(6, 9)
        self.right, self.left, self.pooling = (nn.Parameter(torch.randn(size)) for size in (7, 6, 9))
        self.classifier = nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.encode(x))
        x = F.leaky_relu(self.hidden(x * (x @ self.right).softmax(1)[..., None]))
        x = F.leaky_relu(self.mixed(x * torch.sigmoid(self.left @ x.transpose(1, 2))[..., None]))
        weights = torch.einsum("btc,c->tb", x, self.pooling).softmax(0)
        return self.classifier((x * weights.t()[..., None]).sum(1))


class ChannelNorms(nn.Module):
    """Group, layer (channels last, one module called twice) and RMS normalisation, the last of a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.grouped = nn.Conv2d(2, 12, 1), nn.GroupNorm(2, 12)
        self.conv, self.flat = nn.Conv2d(12, 7, 1), nn.GroupNorm(1, 7, affine=False)
        self.layer = nn.LayerNorm(7)
        self.hidden, self.other = nn.Linear(7, 5), nn.Linear(7, 9)
        self.rms = nn.RMSNorm(14, eps=1e-6)
        self.classifier = nn.Linear(14, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.flat(self.conv(torch.tanh(self.grouped(self.stem(x)))))
        x = self.layer(x.permute(0, 2, 3, 1))
        x = self.layer(x + F.gelu(x)).mean((1, 2))
        return self.classifier(self.rms(torch.cat([self.hidden(x), self.other(x)], 1)))


class SampleNorms(nn.Module):
    """Instance norms with weights, with running averages, with neither; a group norm with a group per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 6, 1)
        self.tracked = nn.InstanceNorm2d(6, affine=True, track_running_stats=True)
        self.conv, self.plain = nn.Conv2d(6, 5, 3, padding=1), nn.InstanceNorm2d(5)
        self.conv2, self.single = nn.Conv2d(5, 7, 1), nn.GroupNorm(7, 7)
        self.line, self.affine = nn.Conv1d(7, 8, 3), nn.InstanceNorm1d(8, affine=True)
        self.classifier = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.plain(self.conv(F.leaky_relu(self.tracked(self.stem(x))))))
        x = torch.tanh(self.single(self.conv2(x))).flatten(2)
        return self.classifier(F.leaky_relu(self.affine(self.line(x))).mean(2))


class Lstm(nn.Module):
    """Convolution, then a bidirectional LSTM of two layers with dropout, then layer normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 5, 3, padding=1), nn.BatchNorm1d(5)
        self.lstm = nn.LSTM(5, 4, 2, dropout=0.5, bidirectional=True, batch_first=True)
        self.layer, self.hidden = nn.LayerNorm(8), nn.Linear(8, 7)
        self.classifier = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.lstm(F.relu(self.norm(self.conv(x))).transpose(1, 2))
        return self.classifier(F.relu(self.hidden(self.layer(x))).mean(1))


class Gru(nn.Module):
    """GRU without biases and with a computed initial state; a ReLU RNN reads its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.start = nn.Linear(3, 6), nn.Linear(3, 5)
        self.gru, self.rnn = nn.GRU(6, 5, bias=False), nn.RNN(5, 7, nonlinearity="relu")
        self.classifier = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(2, 0, 1)
        x, _ = self.gru(F.leaky_relu(self.inside(x)), F.leaky_relu(self.start(x[:1])))
        return self.classifier(self.rnn(x)[1][-1])


class Cells(nn.Module):
    """LSTM, GRU and RNN cells, stacked; the initial state of the GRU is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.rnn = nn.LSTMCell(3, 6), nn.GRUCell(6, 5, bias=False), nn.RNNCell(5, 7)
        self.state, self.classifier = nn.Parameter(torch.randn(1, 5)), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        lstm, gru, rnn = None, self.state.expand(len(x), -1), None
        for now in x.unbind(2):
            lstm = self.lstm(now, lstm)
            gru = self.gru(lstm[0], gru)
            rnn = self.rnn(gru, rnn)
        return self.classifier(rnn)


class WeightNorms(nn.Module):
    """Weights g v / |v| in both of torch's spellings: of rows, of a kernel's positions, and as a whole."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            # Deprecated, but still in use.
            warnings.simplefilter("ignore", FutureWarning)
            self.stem = nn.utils.weight_norm(nn.Conv1d(3, 8, 3, padding=1))
        self.grouped = weight_norm(nn.Conv1d(8, 8, 3, padding=1, groups=2), dim=2)
        self.filters = weight_norm(nn.Conv1d(8, 8, 3, groups=8))
        self.up = weight_norm(nn.ConvTranspose1d(8, 6, 2, stride=2))
        self.hidden = weight_norm(nn.Linear(6, 7), dim=None)
        self.classifier = weight_norm(nn.Linear(7, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.filters(F.leaky_relu(self.grouped(F.leaky_relu(self.stem(x))))))
        return self.classifier(torch.tanh(self.hidden(F.leaky_relu(self.up(x)).mean(2))))


@dataclass(frozen=True)
class NetworkCase:
    """A small network.

    Attributes:
        build: returns the network at full width.
        input_shape: shape of one sample.
        groups: expected full width of every width group.
    """

    build: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    groups: Mapping[str, int]

    def make(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """Build the network with fixed weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.build().to(dtype)

    def inputs(self, dtype: torch.dtype = torch.float64, num_samples: int = 8, seed: int = 1) -> Tensor:
        """Draw a fixed batch."""
        source = torch.Generator().manual_seed(seed)
        return torch.randn(num_samples, *self.input_shape, generator=source, dtype=torch.float64).to(dtype)


NETWORKS = {
    "resnet A": NetworkCase(
        lambda: CifarResNet(1, 4, channels=(5, 8, 13), shortcut="A"),
        (3, 4, 4),
        {
            "conv1": 5,
            "layers.0.0.conv1": 5,
            "layers.1.0.conv1": 8,
            "layers.1.0.conv2": 3,
            "layers.2.0.conv1": 13,
            "layers.2.0.conv2": 5,
        },
    ),
    "resnet B": NetworkCase(
        lambda: CifarResNet(1, 4, channels=(4, 7), shortcut="B"),
        (3, 8, 8),
        {"conv1": 4, "layers.0.0.conv1": 4, "layers.1.0.conv1": 7, "layers.1.0.conv2": 7},
    ),
    "convnet": NetworkCase(
        lambda: convnet((3, 8, 8), 4, [6, 7], [2, 2]), (3, 8, 8), {"features.0": 6, "features.4": 7}
    ),
    "mlp": NetworkCase(lambda: MLP(12, [9, 7, 8], 4), (3, 2, 2), {"hidden.0": 9, "hidden.2": 7, "hidden.4": 8}),
    "mlp batch norm": NetworkCase(
        lambda: MLP(12, [9, 7], 4, batch_norm=True), (3, 2, 2), {"hidden.0": 9, "hidden.3": 7}
    ),
    "mlp tanh": NetworkCase(lambda: MLP(12, [9, 7], 4, activation="tanh"), (3, 2, 2), {"hidden.0": 9, "hidden.2": 7}),
    "residual": NetworkCase(Residual, (3, 6, 6), {"stem": 6, "conv1": 5, "projection": 9}),
    "depthwise": NetworkCase(DepthwiseSeparable, (2, 6, 6), {"stem": 8, "pointwise": 7, "narrow": 4}),
    "dense": NetworkCase(Dense, (3, 5, 5), {"stem": 5, "conv1": 4, "conv2": 6}),
    "flatten": NetworkCase(FlattenOdd, (1, 5, 5), {"conv": 5, "hidden": 7}),
    "shared": NetworkCase(Shared, (5,), {"inside": 6, "first": 7}),
    "bare": NetworkCase(Bare, (2, 4, 4), {"conv": 6, "conv2": 8}),
    "grouped": NetworkCase(Grouped, (2, 5, 5), {"expand": 3, "grouped": 4, "reduce": 5}),
    "gated": NetworkCase(Gated, (5,), {"both": 6, "squeeze": 4}),
    "transformer": NetworkCase(TransformerLayer, (6, 5), {"embed": 8, "mlp.0": 9}),
    "attention": NetworkCase(CausalAttention, (6, 5), {"embed": 8, "q": 5}),
    "channel norms": NetworkCase(ChannelNorms, (2, 3, 3), {"stem": 6, "conv": 7, "hidden": 5, "other": 9}),
    "sample norms": NetworkCase(SampleNorms, (2, 5, 5), {"stem": 6, "conv": 5, "conv2": 7, "line": 8}),
    "decoder": NetworkCase(Decoder, (2, 5, 5), {"encode": 6, "decode": 5, "shuffled": 3}),
    "heads": NetworkCase(Heads, (6, 5), {"qkv": 4, "out": 7}),
    "pooled": NetworkCase(Pooled, (6, 5), {"encode": 7, "hidden": 6, "mixed": 9}),
    "lstm": NetworkCase(Lstm, (3, 6), {"conv": 5, "lstm": 4, "hidden": 7}),
    "gru": NetworkCase(Gru, (3, 6), {"inside": 6, "start": 5, "rnn": 7}),
    "cells": NetworkCase(Cells, (3, 6), {"lstm": 6, "gru": 5, "rnn": 7}),
    "weight norms": NetworkCase(WeightNorms, (3, 6), {"stem": 4, "grouped": 4, "up": 6, "hidden": 7}),
    "wrn no norm": NetworkCase(
        lambda: WideResNet(1, 1, 2, 3, batch_norm=False),
        (2, 8, 8),
        {
            **{"conv1": 16, "blocks.0.conv1": 16, "blocks.1.conv1": 32, "blocks.1.conv2": 32},
            **{"blocks.2.conv1": 64, "blocks.2.conv2": 64},
        },
    ),
}


@cache
def graph_of(name: str) -> WidthGraph:
    """Trace a network of the table, once."""
    case = NETWORKS[name]
    return trace(case.make(), case.inputs(num_samples=2))


@dataclass(frozen=True)
class MethodCase:
    """A growth method.

    Attributes:
        make: returns the method, given the standard deviation of its noise.
        preserves: True if it promises to preserve the function.
        parts_twins: True if identical new channels diverge without noise.
    """

    make: Callable[[float], GrowthMethod]
    preserves: bool = True
    parts_twins: bool = True


METHODS = {
    "random": MethodCase(lambda noise: RandomGrowth(noise_std=noise), preserves=False),
    "pairs": MethodCase(lambda noise: PairGrowth(noise_std=noise)),
    "net2net": MethodCase(lambda noise: Net2Net(noise_std=noise), parts_twins=False),
    "hypercloning": MethodCase(lambda noise: HyperCloning(noise_std=noise), parts_twins=False),
    "lemon": MethodCase(lambda noise: Lemon(noise_std=noise)),
    "bert2bert": MethodCase(lambda noise: Bert2Bert(noise_std=noise), preserves=False),
    "ours": MethodCase(lambda noise: VarianceTransfer(noise_std=noise)),
    "ours rescaled": MethodCase(
        lambda noise: VarianceTransfer(rescale_layers_without_batch_norm=True, noise_std=noise)
    ),
    "ours constraint": MethodCase(lambda noise: VarianceTransfer("constraint", noise_std=noise)),
    "ours literal": MethodCase(lambda noise: VarianceTransfer(output_multiplier=False, noise_std=noise)),
    "ours without multipliers": MethodCase(lambda noise: VarianceTransfer(layer_multipliers=False, noise_std=noise)),
    "ours by Table 1 alone": MethodCase(
        lambda noise: VarianceTransfer(as_published=True, noise_std=noise), preserves=False
    ),
}
PRESERVING = [name for name, case in METHODS.items() if case.preserves]


def widths_at(graph: WidthGraph, part: float) -> dict[str, int]:
    """Fraction of every group's width, rounded down, at least 1; at least 3 under layer normalisation.

    The output of a layer normalisation over one channel, or two nearly equal ones, hardly depends on its input.
    """
    normed = {group for norm in graph.channel_norms for group in norm.axis.groups}
    return {name: max(3 if name in normed else 1, int(group.full_width * part)) for name, group in graph.groups.items()}


def roughen(network: nn.Module, seed: int = 2) -> None:
    """Change every parameter and running statistic at random, in place of training."""
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=source, dtype=torch.float64).to(parameter)
        for name, buffer in network.named_buffers():
            noise = torch.rand(buffer.shape, generator=source, dtype=torch.float64)
            if name.endswith("running_var"):
                buffer.copy_(0.3 + noise)
            elif name.endswith("running_mean"):
                buffer.copy_(noise - 0.5)


def outputs(network: nn.Module, x: Tensor, training: bool) -> Tensor:
    """Outputs in train or eval mode, without dropout; modes and buffers of the network are restored."""
    modes = {module: module.training for module in network.modules()}
    buffers = [(buffer, buffer.clone()) for buffer in network.buffers()]
    with torch.no_grad():
        for module in modes:
            dropout = isinstance(module, (nn.Dropout, nn.Dropout2d)) or getattr(module, "dropout", 0.0)
            module.training = training and not dropout
        try:
            return network(x)
        finally:
            for buffer, content in buffers:
                buffer.copy_(content)
            for module, mode in modes.items():
                module.training = mode


class Growing:
    """A network that starts at a fraction of its widths, with `roughen` in place of training.

    Args:
        part: fraction of the widths to start at, or the widths themselves.
    """

    def __init__(
        self,
        network: nn.Module,
        x: Tensor | tuple[Tensor, ...],
        method: GrowthMethod,
        part: float | Mapping[str, int] = 0.5,
        seed: int = 0,
        graph: WidthGraph | None = None,
        rough: bool = True,
    ) -> None:
        self.network, self.method, self.x = network, method, x if isinstance(x, tuple) else (x,)
        self.graph = graph or trace(network, self.x)
        widths = widths_at(self.graph, part) if isinstance(part, float) else dict(part)
        self.state = make_seed(network, self.graph, method, widths, seed)
        if rough:
            roughen(network)

    def grow(self, part: float | Mapping[str, int] = 1.0, seed: int = 0, **how: Any) -> GrowthEvent:
        """Grow to a fraction of all widths, or to the given widths of some groups."""
        widths = widths_at(self.graph, part) if isinstance(part, float) else {**self.state.widths, **part}
        return grow(self.network, self.graph, self.method, self.state, widths, seed, self.x, **how)

    def outputs(self, training: bool = False, x: Tensor | None = None) -> Tensor:
        return outputs(self.network, self.x[0] if x is None else x, training)


def train(
    network: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor | None = None, steps: int = 1
) -> None:
    """Take steps on one batch: cross-entropy with the classes `y`, or else the mean squared distance from 1."""
    for _ in range(steps):
        network.zero_grad()
        output = network(x)
        loss = (output - 1).square().mean() if y is None else F.cross_entropy(output, y)
        loss.backward()
        optimizer.step()


def differing(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors that only one of them has, or that are not equal bit for bit."""
    names = sorted(one.keys() | other.keys())
    return [name for name in names if name not in one or name not in other or not torch.equal(one[name], other[name])]


def same_parameters(one: nn.Module, other: nn.Module) -> bool:
    """True if two networks have bit for bit the same parameters, by position."""
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def tracked(optimizer: torch.optim.Optimizer) -> list[int]:
    """Identities of the parameters in all groups, in order."""
    return [id(p) for group in optimizer.param_groups for p in group["params"]]


def planted(
    name: str, method: GrowthMethod, part: float = 0.5, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Growing:
    """`Growing` for a network of the table."""
    case = NETWORKS[name]
    return Growing(case.make(dtype), case.inputs(dtype), method, part, seed, graph_of(name))


def check_growth(
    network: nn.Module,
    graph: WidthGraph,
    inputs: Tensor | tuple[Tensor, ...],
    *methods: GrowthMethod,
    limit: float = 1e-10,
) -> None:
    """Assert that copies of a network grow exactly, up to rounding of `limit`, into the one that its class builds."""
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    for method in methods:
        whole, grown = copy.deepcopy(network).eval(), copy.deepcopy(network).eval()
        narrow, *wider = make_schedule(3, 1, num_stages=3).widths(graph)
        state = make_seed(grown, graph, method, narrow, seed=0)
        roughen(grown)
        for widths in wider:
            before = grown(*inputs)
            event = grow(grown, graph, method, state, widths, 0, inputs)
            assert event.parity_error_eval <= 1e-12 and event.parity_error_train <= 1e-12
            torch.testing.assert_close(grown(*inputs) * event.output_factor, before, rtol=limit, atol=limit)
            anneal_norms(grown, graph, state, 1.0)
        assert not graph.groups or before.abs().max() > 1e-3
        finish(grown, graph, method, state)
        finished = grown(*inputs)
        # A second call changes nothing.
        finish(grown, graph, method, state)
        whole.load_state_dict(grown.state_dict(), strict=True)
        assert repr(whole) == repr(grown)
        for place in graph.written:
            assert len({kept_at(each.get_submodule(place.module), place) for each in (whole, grown)}) == 1
        assert torch.equal(whole(*inputs), finished)

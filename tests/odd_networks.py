"""Networks that are in no other table: odd ends, casts, shared modules, several heads, no norms, many kinds of inputs.

Each is a forward function over a few modules, as someone writes it who has never heard of width groups.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# In train mode, variance transfer is exact up to batch normalisation's eps.
Norm1d, Norm2d = partial(nn.BatchNorm1d, eps=1e-14), partial(nn.BatchNorm2d, eps=1e-14)
Linear, Conv = nn.Linear, partial(nn.Conv2d, padding=1)

_SOURCE = torch.Generator().manual_seed(3)


@dataclass(frozen=True)
class OddNetwork:
    """A small network.

    Attributes:
        make: builds it at full width.
        inputs: example inputs.
        last: parts that no other affine map stands behind, by the rule for output layers.
    """

    make: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...]
    last: tuple[str, ...]


ODD_NETWORKS: dict[str, OddNetwork] = {}


class Net(nn.Module):
    """Modules, bare parameters and what is computed with them."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, *inputs: Tensor) -> Any:
        return self.run(self, *inputs)


def real(*shape: int) -> Tensor:
    """Numbers, [4, *shape]."""
    return torch.randn(4, *shape, generator=_SOURCE, dtype=torch.float64)


def tokens(length: int, count: int = 11) -> Tensor:
    """Indices below count, [4, length]."""
    return torch.randint(count, (4, length), generator=_SOURCE)


def odd(*inputs: Tensor, last: str = "c") -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Put a factory into the table, under its name."""

    def put(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        ODD_NETWORKS[make.__name__] = OddNetwork(make, inputs, tuple(last.split()))
        return make

    return put


# Odd ends ----------------------------------------------------------------------------------------------------


@odd(real(7))
def log_softmax_end():
    def run(m, x):
        return F.log_softmax(m.c(F.relu(m.b(F.relu(m.a(x))))), -1)

    return Net(run, a=Linear(7, 12), b=Linear(12, 16), c=Linear(16, 4))


@odd(real(7))
def softmax_of_a_learned_temperature():
    def run(m, x):
        return torch.softmax(m.c(torch.tanh(m.b(F.elu(m.a(x))))) / m.t.exp(), dim=1)

    return Net(run, a=Linear(7, 12), b=Linear(12, 15), c=Linear(15, 4), t=torch.zeros(()))


@odd(real(3, 6, 6))
def clamped_image():
    def run(m, x):
        return m.c(F.relu(m.n(m.b(F.silu(m.a(x)))))).clamp(-2.0, 2.0)

    return Net(run, a=Conv(3, 12, 3), b=Conv(12, 9, 3), n=Norm2d(9), c=Conv(9, 2, 3))


@odd(real(2, 8, 8))
def unit_sphere():
    def run(m, x):
        x = F.max_pool2d(F.relu(m.n(m.a(x))), 2)
        return F.normalize(m.c(F.adaptive_max_pool2d(F.relu(m.b(x)), 1).flatten(1)), dim=-1)

    return Net(run, a=Conv(2, 12, 3, bias=False), n=Norm2d(12), b=Conv(12, 18, 3), c=Linear(18, 5))


@odd(real(7))
def tanh_cap():
    def run(m, x):
        return 30 * torch.tanh(m.c(m.b(m.a(x).relu()).relu()) / 30)

    return Net(run, a=Linear(7, 12), b=Linear(12, 12, bias=False), c=Linear(12, 4))


@odd(real(7))
def one_added():
    def run(m, x):
        return m.c(m.b(m.a(x).relu()).relu()) + 1

    return Net(run, a=Linear(7, 12), b=Linear(12, 12), c=Linear(12, 4))


@odd(real(7), last="")
def cosine_classifier():
    def run(m, x):
        return 10 * F.linear(F.normalize(m.b(F.gelu(m.a(x))), dim=-1), F.normalize(m.w, dim=-1))

    return Net(run, a=Linear(7, 12), b=Linear(12, 8), w=torch.randn(4, 8))


@odd(real(5))
def mixture_density():
    def run(m, x):
        weights, means, scales = m.c(F.leaky_relu(m.b(torch.sin(m.a(x))))).chunk(3, -1)
        return weights.softmax(-1), means, F.softplus(scales) + 1e-3

    return Net(run, a=Linear(5, 16), b=Linear(16, 16), c=Linear(16, 9))


# Casts -------------------------------------------------------------------------------------------------------


@odd(torch.randint(256, (4, 3, 6, 6), generator=_SOURCE, dtype=torch.uint8))
def bytes_in():
    def run(m, x):
        x = m.a(x.to(m.a.weight.dtype) / 255 - 0.5)
        return m.c(F.relu(m.b(F.relu(x).double())).to(x.dtype).mean((2, 3)))

    return Net(run, a=Conv(3, 12, 3), b=Conv(12, 12, 3), c=Linear(12, 4))


@odd(tokens(6))
def rms_by_hand_in_double():
    def norm(x, gain):
        kept = x.dtype
        x = x.to(torch.float64)
        return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).to(kept) * gain

    def run(m, i):
        x = m.e(i)
        x = x + m.down(F.silu(m.gate(norm(x, m.g))) * m.up(norm(x, m.g)))
        return m.c(norm(x, m.h))

    parts = {"gate": Linear(12, 18, False), "up": Linear(12, 18, False), "down": Linear(18, 12, False)}
    return Net(run, e=nn.Embedding(11, 12), g=torch.ones(12), h=torch.ones(12), c=Linear(12, 11), **parts)


@odd(real(7), torch.rand(4, 7, generator=_SOURCE) > 0.3)
def missing_values():
    def run(m, x, known):
        x = torch.where(known, x, torch.zeros_like(x))
        x = F.relu(m.a(torch.cat([x, known.to(x)], 1)))
        return m.c(F.relu(m.n(m.b(x.type_as(m.b.weight)))))

    return Net(run, a=Linear(14, 12), b=Linear(12, 15), n=Norm1d(15), c=Linear(15, 2))


# Shared modules ----------------------------------------------------------------------------------------------


@odd(real(2, 6, 6), real(2, 6, 6))
def siamese():
    def run(m, x, y):
        x, y = (F.relu(m.b(F.relu(m.n(m.a(z))))).mean((2, 3)) for z in (x, y))
        return m.c((x - y).abs()).squeeze(1)

    return Net(run, a=Conv(2, 12, 3), n=Norm2d(12), b=Conv(12, 15, 3), c=Linear(15, 1))


@odd(real(9), last="")
def tied_autoencoder():
    def run(m, x):
        z = m.c(F.relu(m.b(F.relu(m.a(x)))))
        return F.linear(F.relu(z), m.a.weight.t(), m.back)

    return Net(run, a=Linear(9, 12), b=Linear(12, 15), c=Linear(15, 12), back=torch.zeros(9))


@odd(tokens(7), last="head")
def tied_language_model():
    def run(m, i):
        x = m.e(i)
        x = x + m.b(F.gelu(m.a(F.pad(x.transpose(1, 2), (2, 0))))).transpose(1, 2)
        return m.head(m.n(x))

    parts = {"a": nn.Conv1d(12, 15, 3), "b": nn.Conv1d(15, 12, 1), "head": Linear(12, 11, False)}
    net = Net(run, e=nn.Embedding(11, 12), n=nn.LayerNorm(12), **parts)
    net.head.weight = net.e.weight
    return net


@odd(real(5, 3))
def recurrence_by_hand():
    def run(m, x):
        h = m.start.expand(len(x), -1)
        for now in x.unbind(1):
            h = torch.tanh(m.a(now) + m.b(h))
        return m.c(h)

    return Net(run, a=Linear(3, 12), b=Linear(12, 12, bias=False), start=torch.zeros(1, 12), c=Linear(12, 2))


@odd(real(3, 8, 8), last="head")
def pyramid_with_one_head():
    def run(m, x):
        levels = [F.relu(m.a(x))]
        for layer in (m.b, m.c):
            levels.append(F.relu(layer(F.avg_pool2d(levels[-1], 2))))
        levels = [one(x) for one, x in zip(m.lateral, levels, strict=True)]
        levels[1] = levels[1] + F.interpolate(levels[2], scale_factor=2)
        return [m.head(F.relu(m.tower(x))) for x in levels]

    lateral = nn.ModuleList([nn.Conv2d(n, 9, 1) for n in (6, 9, 12)])
    parts = {"tower": Conv(9, 9, 3), "head": Conv(9, 2, 3)}
    return Net(run, a=Conv(3, 6, 3), b=Conv(6, 9, 3), c=Conv(9, 12, 3), lateral=lateral, **parts)


@odd(real(6, 5))
def layer_repeated():
    def run(m, x):
        x = m.a(x)
        for _ in range(3):
            x = x + m.down(F.relu(m.up(m.n(x))))
        return m.c(x.amax(1))

    return Net(run, a=Linear(5, 9), n=nn.LayerNorm(9), up=Linear(9, 18), down=Linear(18, 9), c=Linear(9, 3))


# Several heads -----------------------------------------------------------------------------------------------


@odd(real(3, 8, 8), last="head box mask")
def detector():
    def run(m, x):
        x = F.relu(m.n(m.b(F.relu(m.a(x)))))
        y = F.relu(m.neck(x)).mean((2, 3))
        return {"class": m.head(y), "box": m.box(y).sigmoid(), "mask": m.mask(x)}

    parts = {"head": Linear(15, 4), "box": Linear(15, 4), "mask": nn.ConvTranspose2d(9, 1, 2, stride=2)}
    return Net(run, a=Conv(3, 6, 3), b=Conv(6, 9, 3), n=Norm2d(9), neck=Conv(9, 15, 3), **parts)


@odd(real(6), last="actor critic")
def actor_and_critic():
    def run(m, x):
        x = torch.tanh(m.b(torch.tanh(m.a(x))))
        return m.actor(x).log_softmax(-1), m.critic(x).squeeze(-1)

    return Net(run, a=Linear(6, 12), b=Linear(12, 12), actor=Linear(12, 3), critic=Linear(12, 1))


@odd(real(10), last="d")
def autoencoder_with_codes():
    def run(m, x):
        mean, spread = m.b(F.softplus(m.a(x))).chunk(2, -1)
        return m.d(F.relu(m.c(mean + 0.1 * spread.exp()))), mean, spread

    return Net(run, a=Linear(10, 12), b=Linear(12, 8), c=Linear(4, 12), d=Linear(12, 10))


@odd(real(3, 8, 8), last="late early")
def deep_supervision():
    def run(m, x):
        x = F.relu(m.a(x))
        y = F.relu(m.n(m.b(F.max_pool2d(x, 2))))
        return m.late(y.flatten(1)), m.early(x.amax((-1, -2)))

    parts = {"early": Linear(9, 4), "late": Linear(9 * 16, 4)}
    return Net(run, a=Conv(3, 9, 3), b=Conv(9, 9, 3), n=Norm2d(9), **parts)


# No normalisation --------------------------------------------------------------------------------------------


@odd(real(6))
def highway():
    def run(m, x):
        x = m.a(x)
        for h, t in zip(m.hs, m.ts, strict=True):
            gate = torch.sigmoid(t(x) - 1)
            x = gate * F.relu(h(x)) + (1 - gate) * x
        return m.c(x)

    hs, ts = (nn.ModuleList([Linear(12, 12) for _ in range(2)]) for _ in range(2))
    return Net(run, a=Linear(6, 12), hs=hs, ts=ts, c=Linear(12, 3))


@odd(real(6))
def maxout():
    def run(m, x):
        for layer in (m.a, m.b):
            x = torch.maximum(*layer(x).chunk(2, -1))
        return m.c(x)

    return Net(run, a=Linear(6, 24), b=Linear(12, 24), c=Linear(12, 3))


@odd(real(3, 6, 6))
def both_signs():
    def run(m, x):
        for layer in (m.a, m.b):
            x = layer(x)
            x = torch.cat([F.relu(x), F.relu(-x)], 1)
        return m.c(x.mean((2, 3)))

    return Net(run, a=Conv(3, 6, 3), b=Conv(12, 9, 3, stride=2), c=Linear(18, 3))


@odd(real(8, 4))
def gated_wavenet():
    def run(m, x):
        x, skips = m.a(x.transpose(1, 2)), 0
        for step, layer in enumerate(m.layers):
            y = F.glu(layer(F.pad(x, (2**step, 0))), 1)
            x, skips = x + y, skips + m.skip(y)
        return m.c(F.relu(skips)).transpose(1, 2)

    layers = nn.ModuleList([nn.Conv1d(9, 18, 2, dilation=2**step) for step in range(2)])
    return Net(run, a=nn.Conv1d(4, 9, 1), layers=layers, skip=nn.Conv1d(9, 12, 1), c=nn.Conv1d(12, 3, 1))


@odd(real(6))
def rezero():
    def run(m, x):
        x = m.a(x)
        for alpha, up, down in zip(m.alphas.unbind(), m.ups, m.downs, strict=True):
            x = x + alpha * down(F.relu(up(x)).square())
        return m.c(x)

    ups, downs = (nn.ModuleList([Linear(n, k) for _ in range(2)]) for n, k in ((9, 15), (15, 9)))
    return Net(run, a=Linear(6, 9), ups=ups, downs=downs, alphas=torch.full((2,), 0.1), c=Linear(9, 3))


@odd(real(2))
def coordinates():
    def run(m, x):
        x = torch.cat([torch.sin(x @ m.waves), torch.cos(x @ m.waves)], -1)
        for layer in m.layers:
            x = torch.sin(3 * layer(x))
        return m.c(x)

    net = Net(run, layers=nn.ModuleList([Linear(10, 12), Linear(12, 12)]), c=Linear(12, 3))
    net.register_buffer("waves", torch.randn(2, 5))
    return net


# Embeddings --------------------------------------------------------------------------------------------------


@odd(tokens(5), last="c w")
def factorisation_machine():
    def run(m, i):
        v = m.e(i)
        pairs = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(-1, keepdim=True)
        return pairs + m.w(i).sum(1) + m.c(F.relu(m.b(v.flatten(1))))

    parts = {"b": Linear(40, 12), "c": Linear(12, 1)}
    return Net(run, e=nn.Embedding(11, 8), w=nn.Embedding(11, 1), **parts)


@odd(tokens(1), tokens(3), real(3), last="b d")
def two_towers():
    def run(m, user, items, about):
        u = m.b(F.relu(m.a(torch.cat([m.users(user[:, 0]), about], -1))))
        return (u[:, None] * m.d(F.relu(m.items(items)))).sum(-1)

    parts = {"users": nn.Embedding(11, 6), "items": nn.Embedding(11, 9)}
    return Net(run, a=Linear(9, 12), b=Linear(12, 8), d=Linear(9, 8), **parts)


@odd(tokens(6))
def bag_of_words():
    def run(m, i):
        return m.c(F.relu(m.n(m.b(m.e(i)))))

    return Net(run, e=nn.EmbeddingBag(11, 12), b=Linear(12, 15), n=Norm1d(15), c=Linear(15, 3))


# Sequences ---------------------------------------------------------------------------------------------------


@odd(real(6, 5), torch.arange(6).expand(4, 6) < torch.tensor([[6], [4], [5], [2]]))
def attention_pooling():
    def run(m, x, mask):
        x = F.relu(m.a(x))
        scores = m.score(torch.tanh(m.key(x))).squeeze(-1).masked_fill(~mask, -1e4)
        return m.c(torch.einsum("bl,blc->bc", scores.softmax(-1), x))

    return Net(run, a=Linear(5, 15), key=Linear(15, 9), score=Linear(9, 1), c=Linear(15, 3))


@odd(real(6, 5))
def latent_queries():
    def run(m, x):
        x = m.norm(m.a(x))
        q = m.q(m.latents).expand(len(x), -1, -1)
        mixed = torch.softmax(q @ m.k(x).transpose(1, 2) / 8**0.5, -1) @ m.v(x)
        return m.c(F.gelu(m.out(mixed)).flatten(1))

    parts = {"q": Linear(6, 8), "k": Linear(12, 8), "v": Linear(12, 10), "out": Linear(10, 9)}
    return Net(
        run, a=Linear(5, 12), norm=nn.LayerNorm(12), latents=torch.randn(3, 6), c=Linear(27, 3), **parts
    )


@odd(real(6, 5))
def mixer():
    def run(m, x):
        x = m.a(x)
        x = x + m.token2(F.gelu(m.token1(m.n1(x).transpose(1, 2)))).transpose(1, 2)
        x = x + m.channel2(F.gelu(m.channel1(m.n2(x))))
        return m.c(x.mean(1))

    parts = {"token1": Linear(6, 9), "token2": Linear(9, 6), "channel1": Linear(12, 18)}
    norms = {"n1": nn.LayerNorm(12), "n2": nn.LayerNorm(12), "channel2": Linear(18, 12)}
    return Net(run, a=Linear(5, 12), c=Linear(12, 3), **parts, **norms)


@odd(tokens(6))
def lstm_inside():
    def run(m, i):
        x, _ = m.lstm(F.relu(m.a(m.e(i))))
        return m.c(F.relu(m.b(x[:, -1])))

    lstm = nn.LSTM(8, 6, batch_first=True)
    return Net(run, e=nn.Embedding(11, 12), a=Linear(12, 8), lstm=lstm, b=Linear(6, 12), c=Linear(12, 3))


@odd(real(5, 4), real(5, 5))
def graph_convolution():
    def run(m, x, edges):
        edges = torch.softmax(edges, -1)
        x = F.relu(torch.bmm(edges, m.a(x)))
        x = F.relu((edges[..., None] * m.b(x)[:, None]).sum(2))
        return m.c(x.sum(1)).squeeze(-1)

    return Net(run, a=Linear(4, 12), b=Linear(12, 15), c=Linear(15, 1))


@odd(real(5, 4))
def set_of_points():
    def run(m, x):
        x = F.relu(m.b(F.relu(m.n(m.a(x).transpose(1, 2))).transpose(1, 2)))
        return m.c(torch.cat([x.mean(1), x.max(1).values, x.logsumexp(1)], -1))

    return Net(run, a=Linear(4, 9), n=Norm1d(9), b=Linear(9, 12), c=Linear(36, 3))


# Images ------------------------------------------------------------------------------------------------------


@odd(real(3, 8, 8), real(4))
def conditioned_convolution():
    def run(m, x, z):
        gain, shift = m.film(F.relu(m.z(z)))[:, :, None, None].chunk(2, 1)
        x = F.relu(m.n(m.a(x)) * (1 + gain) + shift)
        return m.c(F.relu(m.b(x)).mean((2, 3)))

    parts = {"z": Linear(4, 6), "film": Linear(6, 18), "n": Norm2d(9, affine=False)}
    return Net(run, a=Conv(3, 9, 3), b=Conv(9, 12, 3), c=Linear(12, 3), **parts)


@odd(real(3, 8, 8))
def inception():
    def run(m, x):
        x = F.relu(m.n(m.a(x)))
        branches = [m.one(x), m.three(x), F.conv2d(F.avg_pool2d(x, 3, 1, 1), m.pooled)]
        return m.c(F.relu(m.n2(torch.cat(branches, 1))).mean((2, 3)))

    parts = {"one": nn.Conv2d(9, 6, 1), "three": Conv(9, 9, 3), "pooled": torch.randn(3, 9, 1, 1) / 3}
    return Net(run, a=Conv(3, 9, 3), n=Norm2d(9), n2=Norm2d(18), c=Linear(18, 3), **parts)


@odd(real(2, 8, 8), last="out")
def u_net_with_group_norms():
    def run(m, x):
        x = F.silu(m.n(m.a(x)))
        y = F.silu(m.b(F.avg_pool2d(x, 2)))
        y = F.interpolate(m.up(y), scale_factor=2, mode="bilinear", align_corners=False)
        return m.out(F.silu(m.d(torch.cat([x, y], 1)))) + m.skip.to(x)

    parts = {"up": nn.Conv2d(15, 6, 1), "d": Conv(15, 9, 3), "out": nn.Conv2d(9, 2, 1)}
    return Net(
        run, a=Conv(2, 9, 3), n=nn.GroupNorm(1, 9), b=Conv(9, 15, 3), skip=torch.zeros(2, 1, 1), **parts
    )


@odd(real(1, 4, 6, 6))
def video():
    def run(m, x):
        x = F.relu(m.b(F.relu(m.n(m.a(x)))))
        return m.c(x.mean((2, 3, 4)))

    parts = {
        "n": nn.BatchNorm3d(9, eps=1e-14),
        "b": nn.Conv3d(9, 12, (1, 3, 3), groups=3),
        "c": Linear(12, 3),
    }
    return Net(run, a=nn.Conv3d(1, 9, 3, padding=1), **parts)


@odd(real(3, 6, 6))
def super_resolution():
    def run(m, x):
        y = F.leaky_relu(m.b(F.leaky_relu(m.a(x), 0.2)), 0.2)
        return F.pixel_shuffle(m.c(y), 2) + F.interpolate(x, scale_factor=2, mode="nearest")

    return Net(run, a=Conv(3, 12, 3), b=Conv(12, 12, 3), c=Conv(12, 12, 3))

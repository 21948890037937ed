"""Networks of vectors: odd ends, casts, no normalisation."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.odd_networks.table import SOURCE, Conv, Linear, Net, Norm1d, Norm2d, odd, real, tokens

# Odd ends ---------------------------------------------------------------------------------------------------


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


# Casts ------------------------------------------------------------------------------------------------------


@odd(torch.randint(256, (4, 3, 6, 6), generator=SOURCE, dtype=torch.uint8))
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


@odd(real(7), torch.rand(4, 7, generator=SOURCE) > 0.3)
def missing_values():
    def run(m, x, known):
        x = torch.where(known, x, torch.zeros_like(x))
        x = F.relu(m.a(torch.cat([x, known.to(x)], 1)))
        return m.c(F.relu(m.n(m.b(x.type_as(m.b.weight)))))

    return Net(run, a=Linear(14, 12), b=Linear(12, 15), n=Norm1d(15), c=Linear(15, 2))


# No normalisation -------------------------------------------------------------------------------------------


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


# Weights that lie bare, are cut up or computed --------------------------------------------------------------


@odd(real(7), last="w")
def bare_head_in_a_dictionary():
    def run(m, x):
        return {"logits": F.relu(m.b(F.relu(m.a(x)))) @ m.w}

    return Net(run, a=Linear(7, 12), b=Linear(12, 15), w=torch.randn(15, 4) / 4)


@odd(real(7))
def fixed_codes_behind_the_head():
    def run(m, x):
        return m.c(F.relu(m.b(F.relu(m.a(x))))) @ m.codes

    net = Net(run, a=Linear(7, 12), b=Linear(12, 15), c=Linear(15, 4))
    net.register_buffer("codes", torch.randn(4, 6))
    return net


@odd(real(5))
def slices_of_one_weight():
    def run(m, x):
        half, x = len(m.w) // 2, F.relu(m.a(x))
        return m.c(F.relu(F.linear(x, m.w[:half])) + F.linear(x, m.w[half:]))

    return Net(run, a=Linear(5, 15), w=torch.randn(24, 15) / 4, c=Linear(12, 3))


@odd(real(5))
def spectral_norm_inside():
    def run(m, x):
        return m.c(F.relu(m.b(F.relu(m.s(F.relu(m.a(x)))))))

    s = nn.utils.parametrizations.spectral_norm(Linear(12, 9))
    return Net(run, a=Linear(5, 12), s=s, b=Linear(9, 15), c=Linear(15, 3))


@odd(real(5), real(6))
def bilinear_fusion():
    def run(m, x, y):
        return m.c(F.relu(m.b(F.relu(m.pairs(F.relu(m.a(x)), y)))))

    return Net(run, a=Linear(5, 9), pairs=nn.Bilinear(9, 6, 12), b=Linear(12, 9), c=Linear(9, 3))

"""Networks of vectors: odd ends, casts, no normalisation."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.odd_networks.table import Conv, Linear, Net, Norm2d, odd, real, tokens

# Odd ends ---------------------------------------------------------------------------------------------------


@odd(real(2, 8, 8))
def unit_sphere():
    def run(m, x):
        x = F.max_pool2d(F.relu(m.n(m.a(x))), 2)
        return F.normalize(m.c(F.adaptive_max_pool2d(F.relu(m.b(x)), 1).flatten(1)), dim=-1)

    return Net(run, a=Conv(2, 12, 3, bias=False), n=Norm2d(12), b=Conv(12, 18, 3), c=Linear(18, 5))


# Casts ------------------------------------------------------------------------------------------------------


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


# No normalisation -------------------------------------------------------------------------------------------


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

"""Networks with shared modules or several heads."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.odd_networks.table import Conv, Linear, Net, Norm2d, odd, real, tokens

# Shared modules ---------------------------------------------------------------------------------------------


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


class TwoNames(nn.Module):
    """A block and a head that the network knows by two names each."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Linear(9, 12), Linear(6, 12)
        self.norm = self.norm_again = nn.LayerNorm(12)
        self.block = self.block_again = nn.Sequential(Linear(12, 18), nn.GELU(), Linear(18, 12))
        self.n, self.c = nn.LayerNorm(12), Linear(12, 3)
        self.c_again = self.c

    def forward(self, x, y):
        x, y = self.a(x), self.b(y)
        x = x + self.block(self.norm(x))
        y = y + self.block_again(self.norm_again(y))
        return self.c(self.n(x)), self.c_again(self.n(y))


@odd(real(9), real(6))
def modules_of_two_names():
    return TwoNames()


# Several heads ----------------------------------------------------------------------------------------------


@odd(real(3, 8, 8), last="head box mask")
def detector():
    def run(m, x):
        x = F.relu(m.n(m.b(F.relu(m.a(x)))))
        y = F.relu(m.neck(x)).mean((2, 3))
        return {"class": m.head(y), "box": m.box(y).sigmoid(), "mask": m.mask(x)}

    parts = {"head": Linear(15, 4), "box": Linear(15, 4), "mask": nn.ConvTranspose2d(9, 1, 2, stride=2)}
    return Net(run, a=Conv(3, 6, 3), b=Conv(6, 9, 3), n=Norm2d(9), neck=Conv(9, 15, 3), **parts)


@odd(real(10), last="d")
def autoencoder_with_codes():
    def run(m, x):
        mean, spread = m.b(F.softplus(m.a(x))).chunk(2, -1)
        return m.d(F.relu(m.c(mean + 0.1 * spread.exp()))), mean, spread

    return Net(run, a=Linear(10, 12), b=Linear(12, 8), c=Linear(4, 12), d=Linear(12, 10))

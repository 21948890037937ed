"""Normalisations as people write them: by hand, over the second dimension, with an activation, two in a forward."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.odd_networks.table import Conv, Linear, Net, odd, real


class LayerNorm2d(nn.Module):
    """Layer normalisation over the channels of images, as in ConvNeXt."""

    def __init__(self, channels):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(variance + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


@odd(real(3, 8, 8))
def convnext_by_hand():
    def run(m, x):
        x = m.n(m.a(x))
        y = m.up(m.norm(m.deep(x)).permute(0, 2, 3, 1))
        x = x + m.scale[:, None, None] * m.down(F.gelu(y)).permute(0, 3, 1, 2)
        return m.c(m.last(x.mean((-2, -1))))

    parts = {"up": Linear(12, 24), "down": Linear(24, 12), "last": nn.LayerNorm(12), "c": Linear(12, 4)}
    norms = {"n": LayerNorm2d(12), "norm": LayerNorm2d(12)}
    deep = nn.Conv2d(12, 12, 7, padding=3, groups=12)
    return Net(run, a=nn.Conv2d(3, 12, 2, 2), deep=deep, scale=torch.full((12,), 0.1), **norms, **parts)


class NormThenAct(nn.GroupNorm):
    """A module with a part, as in timm."""

    def __init__(self, groups, channels):
        super().__init__(groups, channels)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.act(F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps))


@odd(real(3, 8, 8))
def group_norms_with_an_activation():
    def run(m, x):
        x = m.n(m.a(x))
        x = x + m.b2(m.n2(m.b(m.n1(x))))
        return m.c(x.mean((2, 3)))

    norms = {"n": NormThenAct(3, 12), "n1": NormThenAct(1, 12), "n2": NormThenAct(2, 16)}
    return Net(run, a=Conv(3, 12, 3), b=Conv(12, 16, 3), b2=Conv(16, 12, 3), c=Linear(12, 4), **norms)


class Block(nn.Module):
    """Two normalisations of one stream in a forward that calls other modules too."""

    def __init__(self, width, hidden):
        super().__init__()
        self.gains = nn.ParameterList(torch.ones(width) for _ in range(2))
        self.shift = nn.Parameter(torch.zeros(width))
        self.mix, self.up, self.down = Linear(5, 5), Linear(width, hidden), Linear(hidden, width)

    def forward(self, x):
        y = F.layer_norm(x, x.shape[-1:], self.gains[0], self.shift)
        x = x + self.mix(y.transpose(1, 2)).transpose(1, 2)
        return x + self.down(F.gelu(self.up(F.rms_norm(x, x.shape[-1:], self.gains[1]))))


@odd(real(5, 7))
def mixer_with_norms_in_its_forward():
    def run(m, x):
        for block in m.blocks:
            x = block(m.a(x) if block is m.blocks[0] else x)
        return m.c(m.n(x).mean(1))

    blocks = nn.ModuleList(Block(12, 18) for _ in range(2))
    return Net(run, a=Linear(7, 12), blocks=blocks, n=nn.LayerNorm(12), c=Linear(12, 3))


@odd(real(5, 7))
def norms_of_two_streams_in_one_forward():
    """One weight a channel cannot be of both: the two keep their width."""

    def run(m, x):
        x = m.a(x)
        y = F.layer_norm(m.b(F.layer_norm(x, (12,))), (16,))
        return m.c(F.relu(m.d(y)).mean(1))

    return Net(run, a=Linear(7, 12), b=Linear(12, 16), d=Linear(16, 10), c=Linear(10, 3))


class Averages(nn.Module):
    """Means over positions and over channels."""

    def forward(self, x):
        return x - x.mean(1, keepdim=True) - x.mean(-1, keepdim=True)


@odd(real(5, 7))
def centred_both_ways():
    def run(m, x):
        x = m.b(F.relu(m.centre(m.a(x))))
        return m.c(m.n(x).flatten(1))

    return Net(run, a=Linear(7, 12), centre=Averages(), b=Linear(12, 9), n=nn.LayerNorm(9), c=Linear(9 * 5, 3))


class FrozenBatchNorm(nn.Module):
    """Batch normalisation by numbers in buffers, as detectors have it: torchvision's `FrozenBatchNorm2d`."""

    def __init__(self, channels):
        super().__init__()
        self.register_buffer("weight", torch.ones(channels))
        self.register_buffer("bias", torch.linspace(-0.1, 0.1, channels))
        self.register_buffer("running_mean", torch.linspace(-0.2, 0.2, channels))
        # Small ones beside their spread: draws of that mean and deviation are below 0.
        self.register_buffer("running_var", torch.linspace(0.8, 1.25, channels) ** 8)

    def forward(self, x):
        scale = self.weight * torch.rsqrt(self.running_var + 1e-5)
        shift = self.bias - self.running_mean * scale
        return x * scale[:, None, None] + shift[:, None, None]


@odd(real(3, 8, 8))
def frozen_batch_norms():
    def run(m, x):
        x = F.relu(m.n(m.a(x)))
        return m.c(F.relu(m.n2(m.b(x))).mean((2, 3)))

    norms = {"n": FrozenBatchNorm(12), "n2": FrozenBatchNorm(16)}
    return Net(run, a=Conv(3, 12, 3), b=Conv(12, 16, 3), c=Linear(16, 4), **norms)

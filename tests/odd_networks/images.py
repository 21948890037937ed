"""Networks of images, videos and volumes."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.odd_networks.table import Conv, Norm2d, odd, real


@odd(real(2, 8, 8), a=Conv(2, 12, 3, bias=False), n=Norm2d(12), b=Conv(12, 18, 3), c=[18, 5])
def unit_sphere(m, x):
    x = F.max_pool2d(F.relu(m.n(m.a(x))), 2)
    return F.normalize(m.c(F.adaptive_max_pool2d(F.relu(m.b(x)), 1).flatten(1)), dim=-1)


@odd(
    real(3, 8, 8),
    **{"a": Conv(3, 9, 3), "one": nn.Conv2d(9, 6, 1), "three": Conv(9, 9, 3), "pooled": torch.randn(3, 9, 1, 1) / 3},
    **{"n": Norm2d(9), "n2": Norm2d(18), "c": [18, 3]},
)
def inception(m, x):
    x = F.relu(m.n(m.a(x)))
    branches = [m.one(x), m.three(x), F.conv2d(F.avg_pool2d(x, 3, 1, 1), m.pooled)]
    return m.c(F.relu(m.n2(torch.cat(branches, 1))).mean((2, 3)))


@odd(
    real(1, 4, 6, 6),
    **{"a": nn.Conv3d(1, 9, 3, padding=1), "n": nn.BatchNorm3d(9, eps=1e-14)},
    **{"b": nn.Conv3d(9, 12, (1, 3, 3), groups=3), "c": [12, 3]},
)
def video(m, x):
    return m.c(F.relu(m.b(F.relu(m.n(m.a(x))))).mean((2, 3, 4)))


@odd(real(3, 6, 6), a=Conv(3, 12, 3), b=Conv(12, 12, 3), c=Conv(12, 12, 3))
def super_resolution(m, x):
    y = F.leaky_relu(m.b(F.leaky_relu(m.a(x), 0.2)), 0.2)
    return F.pixel_shuffle(m.c(y), 2) + F.interpolate(x, scale_factor=2, mode="nearest")


@odd(real(3, 8, 8), a=Conv(3, 12, 3), filter=torch.randn(12, 8, 5, 2), b=Conv(12, 16, 3), c=[16, 4])
def filters_of_frequencies(m, x):
    """A global filter (GFNet): each channel is multiplied by numbers of its own, frequency by frequency."""
    x = F.relu(m.a(x))
    spectrum = torch.fft.rfft2(x, dim=(2, 3), norm="ortho") * torch.view_as_complex(m.filter)
    x = torch.fft.irfft2(spectrum, s=(8, 8), dim=(2, 3), norm="ortho")
    return m.c(F.relu(m.b(x)).mean((2, 3)))


@odd(
    real(3, 8, 8),
    **{"last": "head box mask", "a": Conv(3, 6, 3), "b": Conv(6, 9, 3), "n": Norm2d(9), "neck": Conv(9, 15, 3)},
    **{"head": [15, 4], "box": [15, 4], "mask": nn.ConvTranspose2d(9, 1, 2, stride=2)},
)
def detector(m, x):
    x = F.relu(m.n(m.b(F.relu(m.a(x)))))
    y = F.relu(m.neck(x)).mean((2, 3))
    return {"class": m.head(y), "box": m.box(y).sigmoid(), "mask": m.mask(x)}


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


@odd(
    real(3, 8, 8),
    **{"groups": {"a": 12, "up": 24}, "a": nn.Conv2d(3, 12, 2, 2), "deep": nn.Conv2d(12, 12, 7, padding=3, groups=12)},
    **{"n": LayerNorm2d(12), "norm": LayerNorm2d(12), "up": [12, 24], "down": [24, 12]},
    **{"scale": torch.full((12,), 0.1), "last_norm": nn.LayerNorm(12), "c": [12, 4]},
)
def convnext_by_hand(m, x):
    x = m.n(m.a(x))
    y = m.up(m.norm(m.deep(x)).permute(0, 2, 3, 1))
    x = x + m.scale[:, None, None] * m.down(F.gelu(y)).permute(0, 3, 1, 2)
    return m.c(m.last_norm(x.mean((-2, -1))))


class NormThenAct(nn.GroupNorm):
    """A module with a part, as in timm."""

    def __init__(self, groups, channels):
        super().__init__(groups, channels)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.act(F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps))


@odd(
    real(3, 8, 8),
    **{"groups": {"a": 4, "b": 8}, "a": Conv(3, 12, 3), "b": Conv(12, 16, 3), "b2": Conv(16, 12, 3), "c": [12, 4]},
    **{"n": NormThenAct(3, 12), "n1": NormThenAct(1, 12), "n2": NormThenAct(2, 16)},
)
def group_norms_with_an_activation(m, x):
    x = m.n(m.a(x))
    x = x + m.b2(m.n2(m.b(m.n1(x))))
    return m.c(x.mean((2, 3)))


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


@odd(
    real(3, 8, 8),
    **{"groups": {"a": 12, "b": 16}, "a": Conv(3, 12, 3), "n": FrozenBatchNorm(12)},
    **{"b": Conv(12, 16, 3), "n2": FrozenBatchNorm(16), "c": [16, 4]},
)
def frozen_batch_norms(m, x):
    return m.c(F.relu(m.n2(m.b(F.relu(m.n(m.a(x)))))).mean((2, 3)))


@odd(
    real(3, 9, 9),
    **{"a": Conv(3, 9, 3), "n": Norm2d(9), "b": Conv(9, 18, 3), "back": Conv(18, 9, 3), "n2": Norm2d(9)},
    **{"c": Conv(9, 5, 3), "groups": {"a": 9, "b": 18}},
)
def unpooled(m, x):
    """The decoder returns values to where the encoder's maxima were (SegNet)."""
    x = F.relu(m.n(m.a(x)))
    first, i = F.max_pool2d(x, 2, return_indices=True)
    second, j = F.max_pool2d(F.relu(m.b(first)), 2, return_indices=True)
    y = F.relu(m.n2(m.back(F.max_unpool2d(second, j, 2))))
    return m.c(F.max_unpool2d(y, i, 2, output_size=x.shape))

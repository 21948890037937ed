"""Networks of images, videos and volumes."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.odd_networks.table import Conv, Linear, Net, Norm2d, odd, real


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


@odd(real(1, 4, 6, 6))
def video():
    def run(m, x):
        x = F.relu(m.b(F.relu(m.n(m.a(x)))))
        return m.c(x.mean((2, 3, 4)))

    parts = {"n": nn.BatchNorm3d(9, eps=1e-14), "b": nn.Conv3d(9, 12, (1, 3, 3), groups=3), "c": Linear(12, 3)}
    return Net(run, a=nn.Conv3d(1, 9, 3, padding=1), **parts)


@odd(real(3, 6, 6))
def super_resolution():
    def run(m, x):
        y = F.leaky_relu(m.b(F.leaky_relu(m.a(x), 0.2)), 0.2)
        return F.pixel_shuffle(m.c(y), 2) + F.interpolate(x, scale_factor=2, mode="nearest")

    return Net(run, a=Conv(3, 12, 3), b=Conv(12, 12, 3), c=Conv(12, 12, 3))


@odd(real(3, 8, 8))
def filters_of_frequencies():
    """A global filter (GFNet): each channel is multiplied by numbers of its own, frequency by frequency."""

    def run(m, x):
        x = F.relu(m.a(x))
        spectrum = torch.fft.rfft2(x, dim=(2, 3), norm="ortho") * torch.view_as_complex(m.filter)
        x = torch.fft.irfft2(spectrum, s=(8, 8), dim=(2, 3), norm="ortho")
        return m.c(F.relu(m.b(x)).mean((2, 3)))

    return Net(run, a=Conv(3, 12, 3), filter=torch.randn(12, 8, 5, 2), b=Conv(12, 16, 3), c=Linear(16, 4))

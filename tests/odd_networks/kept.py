"""Networks that keep what a forward has computed, and weights that hooks compute."""

import warnings

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

from tests.odd_networks.table import Conv, Linear, Net, odd, real


@odd(real(7))
def activations_in_attributes():
    """In a new attribute, in a dictionary and in a list."""

    def run(m, x):
        m.last = F.relu(m.a(x))
        m.kept["b"] = m.b(m.last)
        m.seen.append(m.last)
        return m.c(F.relu(m.kept["b"]))

    network = Net(run, a=Linear(7, 12), b=Linear(12, 16), c=Linear(16, 4))
    network.kept, network.seen = {}, []
    return network


def _last_layer_computed(change):
    def run(m, x):
        return m.c(F.relu(m.b(F.relu(m.a(x)))))

    with warnings.catch_warnings():
        # torch has others of the same purpose, and these are in use.
        warnings.simplefilter("ignore", FutureWarning)
        first = change(Linear(7, 12))
    network = Net(run, a=first, b=Linear(12, 16), c=Linear(16, 4))
    # A forward has been here: what it has computed is there to be copied.
    network(torch.zeros(2, 7))
    return network


@odd(real(7))
def weight_norm_by_hooks():
    return _last_layer_computed(nn.utils.weight_norm)


@odd(real(7))
def spectral_norm_by_hooks():
    return _last_layer_computed(nn.utils.spectral_norm)


@odd(real(7))
def pruned_before():
    return _last_layer_computed(lambda layer: prune.l1_unstructured(layer, "weight", 0.3))


@odd(real(3, 6, 6))
def instance_norm_without_weights():
    def run(m, x):
        x = F.relu(m.n(m.a(x)))
        return m.c(F.relu(m.b(x)).mean((2, 3)))

    return Net(run, a=Conv(3, 8, 3), n=nn.InstanceNorm2d(8), b=Conv(8, 12, 3), c=Linear(12, 4))


@odd(real(5, 12), last="last")
def weight_norms_of_a_vocoder():
    """HiFi-GAN's generator: transposed convolutions, and residual blocks of dilated ones."""

    def run(m, x):
        x = m.first(x)
        for up, block in zip(m.ups, m.blocks, strict=True):
            x = up(F.leaky_relu(x, 0.1))
            for one, two in zip(block, block, strict=True):
                x = x + two(F.leaky_relu(one(F.leaky_relu(x, 0.1)), 0.1))
        return torch.tanh(m.last(F.leaky_relu(x)))

    def conv(inputs, outputs, dilation=1):
        return weight_norm(nn.Conv1d(inputs, outputs, 3, dilation=dilation, padding=dilation))

    ups = [weight_norm(nn.ConvTranspose1d(n, n // 2, 4, 2, padding=1)) for n in (16, 8)]
    blocks = [nn.ModuleList(conv(n, n, d) for d in (1, 3)) for n in (8, 4)]
    return Net(run, first=conv(5, 16), ups=nn.ModuleList(ups), blocks=nn.ModuleList(blocks), last=conv(4, 1))

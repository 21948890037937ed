"""Networks of vectors, and of what forwards reach, keep, share and draw."""

import warnings
from functools import partial, reduce, wraps

import torch
from torch import nn
from torch.distributions import Normal
from torch.nn import functional as F
from torch.nn.utils import prune

from tests.odd_networks.table import Norm1d, made, net, odd, real, tokens

# Forwards that reach their parts otherwise than by attributes -------------------------------------------------


def _around(how):
    """A hidden layer beside a stream, which `how` makes a function of."""

    def run(m, x):
        x = m.a(x)
        return m.c(F.relu(x + m.mlp(F.relu(x))))

    network = net(run, a=[7, 12], up=[12, 16], down=[16, 12], c=[12, 4])
    network.mlp = how(network)
    return network


@made(real(7), groups={"a": 12, "up": 16})
def parts_bound_by_partial():
    def through(up, x, down):
        return down(F.relu(up(x)))

    return _around(lambda m: partial(through, m.up, down=m.down))


@made(real(7), groups={"a": 12, "up": 16})
def functions_in_containers():
    """Bound methods in a dictionary, lambdas in a list, all of them one function."""

    def how(m):
        m.functions = [{"up": m.up.forward}, lambda x: m.down(x)]
        steps = [lambda x: m.functions[0]["up"](x), F.relu, m.functions[1]]
        return reduce(lambda first, then: lambda x: then(first(x)), steps)

    return _around(how)


@made(real(7), groups={"a": 12, "up": 16})
def forwards_that_are_decorated():
    def doubled(forward):
        @wraps(forward)
        def call(*args):
            return 2 * forward(*args)

        return call

    def how(m):
        m.up.forward = doubled(m.up.forward)
        m.forward = doubled(m.forward)
        return lambda x, up=m.up, down=m.down: down(torch.tanh(up(x)))

    return _around(how)


@made(real(7), groups={"layers.0": 12, "layers.1": 16})
def layers_of_the_surrounding_function():
    a, b, c = nn.Linear(7, 12), nn.Linear(12, 16), nn.Linear(16, 4)

    class Closed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.c = nn.ModuleList([a, b]), c

        def forward(self, x):
            return c(F.relu(b(F.relu(a(x)))))

    return Closed()


# Random numbers in training -----------------------------------------------------------------------------------


@odd(real(7), a=[7, 12], n=Norm1d(12), b=[12, 16], c=[16, 4])
def noise_on_hidden_units(m, x):
    x = m.n(m.a(x))
    if m.training:
        x = x + 0.1 * torch.randn(x.shape, dtype=x.dtype) + torch.zeros_like(x).uniform_(-0.1, 0.2)
    return m.c(F.rrelu(m.b(F.relu(x)), training=m.training))


@odd(real(7), a=[7, 12], b=[12, 16], c=[16, 4])
def dropout_written_by_hand(m, x):
    x = F.relu(m.a(x))
    if m.training:
        x = x * torch.bernoulli(torch.full_like(x, 0.9)) / 0.9
    x = F.relu(m.b(x))
    if m.training:
        x = x * (torch.rand_like(x) < 0.9) / 0.9 * torch.empty_like(x).bernoulli_(0.9)
    return m.c(x)


@odd(real(9), a=[9, 16], mean=[16, 5], spread=[16, 5], b=[5, 12], c=[12, 9])
def variational(m, x):
    """Its latent numbers keep their number: as many are drawn."""
    x = F.relu(m.a(x))
    latent = Normal(m.mean(x), F.softplus(m.spread(x)))
    z = latent.rsample() if m.training else latent.mean
    return m.c(F.relu(m.b(z)))


@odd(tokens(6), e=nn.Embedding(11, 12), b=[12, 16], c=[16, 4])
def noisy_embeddings(m, i):
    x = m.e(i)
    if m.training:
        x = x + torch.normal(0.0, 0.1, x.shape, dtype=x.dtype)
    return m.c(F.relu(m.b(x)).mean(1))


# What a forward has computed, and weights that hooks compute --------------------------------------------------


@odd(real(7), a=[7, 12], b=[12, 16], c=[16, 4], kept={}, seen={"a": []})
def activations_in_attributes(m, x):
    """In a new attribute, in a dictionary and in a list."""
    m.last = F.relu(m.a(x))
    m.kept["b"] = m.b(m.last)
    m.seen["a"].append(m.last)
    return m.c(F.relu(m.kept["b"]))


def _first_layer_computed(change):
    network = net(lambda m, x: m.c(F.relu(m.b(F.relu(m.a(x))))), a=change(nn.Linear(7, 12)), b=[12, 16], c=[16, 4])
    # A forward has been here: what it has computed is there to be copied.
    network(torch.zeros(2, 7))
    return network


@made(real(7))
def spectral_norm_by_hooks():
    with warnings.catch_warnings():
        # torch has another of the same purpose, and this one is in use.
        warnings.simplefilter("ignore", FutureWarning)
        return _first_layer_computed(nn.utils.spectral_norm)


@made(real(7))
def pruned_before():
    return _first_layer_computed(lambda layer: prune.l1_unstructured(layer, "weight", 0.3))


# Shared modules, several heads --------------------------------------------------------------------------------


@odd(real(9), last="", a=[9, 12], b=[12, 15], c=[15, 12], back=torch.zeros(9))
def tied_autoencoder(m, x):
    z = m.c(F.relu(m.b(F.relu(m.a(x)))))
    return F.linear(F.relu(z), m.a.weight.t(), m.back)


class TwoNames(nn.Module):
    """A block and a head that the network knows by two names each."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(9, 12), nn.Linear(6, 12)
        self.norm = self.norm_again = nn.LayerNorm(12)
        self.block = self.block_again = nn.Sequential(nn.Linear(12, 18), nn.GELU(), nn.Linear(18, 12))
        self.n, self.c = nn.LayerNorm(12), nn.Linear(12, 3)
        self.c_again = self.c

    def forward(self, x, y):
        x, y = self.a(x), self.b(y)
        x = x + self.block(self.norm(x))
        y = y + self.block_again(self.norm_again(y))
        return self.c(self.n(x)), self.c_again(self.n(y))


@made(real(9), real(6))
def modules_of_two_names():
    return TwoNames()


@odd(real(10), last="d", a=[10, 12], b=[12, 8], c=[4, 12], d=[12, 10])
def autoencoder_with_codes(m, x):
    mean, spread = m.b(F.softplus(m.a(x))).chunk(2, -1)
    return m.d(F.relu(m.c(mean + 0.1 * spread.exp()))), mean, spread


@odd(
    tokens(1),
    tokens(3),
    real(3),
    last="b d",
    users=nn.Embedding(11, 6),
    items=nn.Embedding(11, 9),
    a=[9, 12],
    b=[12, 8],
    d=[9, 8],
)
def two_towers(m, user, items, about):
    u = m.b(F.relu(m.a(torch.cat([m.users(user[:, 0]), about], -1))))
    return (u[:, None] * m.d(F.relu(m.items(items)))).sum(-1)


# Weights that lie bare, are cut up or computed ----------------------------------------------------------------


@odd(real(7), last="w", a=[7, 12], b=[12, 15], w=torch.randn(15, 4) / 4)
def bare_head_in_a_dictionary(m, x):
    return {"logits": F.relu(m.b(F.relu(m.a(x)))) @ m.w}


@odd(real(5), a=[5, 15], w=torch.randn(24, 15) / 4, c=[12, 3])
def slices_of_one_weight(m, x):
    half, x = len(m.w) // 2, F.relu(m.a(x))
    return m.c(F.relu(F.linear(x, m.w[:half])) + F.linear(x, m.w[half:]))


@odd(real(5), a=[5, 12], s=nn.utils.parametrizations.spectral_norm(nn.Linear(12, 9)), b=[9, 15], c=[15, 3])
def spectral_norm_inside(m, x):
    return m.c(F.relu(m.b(F.relu(m.s(F.relu(m.a(x)))))))


@odd(real(5), real(6), a=[5, 9], pairs=nn.Bilinear(9, 6, 12), b=[12, 9], c=[9, 3])
def bilinear_fusion(m, x, y):
    return m.c(F.relu(m.b(F.relu(m.pairs(F.relu(m.a(x)), y)))))


@odd(
    real(7),
    a=[7, 12],
    n=nn.LayerNorm(12),
    centres=nn.Buffer(torch.linspace(-2, 2, 5)),
    b=[60, 16],
    c=[16, 4],
    groups={"a": 12, "b": 16},
)
def radial_basis_functions(m, x):
    """Each channel becomes its values under five functions, as in Kolmogorov-Arnold networks."""
    x_BC5 = torch.exp(-((m.n(m.a(x))[..., None] - m.centres) ** 2))
    return m.c(torch.tanh(m.b(x_BC5.flatten(1))))

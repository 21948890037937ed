"""Networks that draw random numbers of their own in training."""

import torch
from torch.distributions import Normal
from torch.nn import functional as F

from tests.odd_networks.table import Linear, Net, Norm1d, odd, real, tokens


@odd(real(7))
def noise_on_hidden_units():
    def run(m, x):
        x = m.n(m.a(x))
        if m.training:
            x = x + 0.1 * torch.randn(x.shape, dtype=x.dtype) + torch.zeros_like(x).uniform_(-0.1, 0.2)
        return m.c(F.rrelu(m.b(F.relu(x)), training=m.training))

    return Net(run, a=Linear(7, 12), n=Norm1d(12), b=Linear(12, 16), c=Linear(16, 4))


@odd(real(7))
def dropout_written_by_hand():
    def run(m, x):
        x = F.relu(m.a(x))
        if m.training:
            x = x * torch.bernoulli(torch.full_like(x, 0.9)) / 0.9
        x = F.relu(m.b(x))
        if m.training:
            x = x * (torch.rand_like(x) < 0.9) / 0.9 * torch.empty_like(x).bernoulli_(0.9)
        return m.c(x)

    return Net(run, a=Linear(7, 12), b=Linear(12, 16), c=Linear(16, 4))


@odd(real(9))
def variational():
    """Its latent numbers keep their number: as many are drawn."""

    def run(m, x):
        x = F.relu(m.a(x))
        latent = Normal(m.mean(x), F.softplus(m.spread(x)))
        z = latent.rsample() if m.training else latent.mean
        return m.c(F.relu(m.b(z)))

    return Net(run, a=Linear(9, 16), mean=Linear(16, 5), spread=Linear(16, 5), b=Linear(5, 12), c=Linear(12, 9))


@odd(tokens(6))
def noisy_embeddings():
    def run(m, i):
        x = m.e(i)
        if m.training:
            x = x + torch.normal(0.0, 0.1, x.shape, dtype=x.dtype)
        return m.c(F.relu(m.b(x)).mean(1))

    return Net(run, e=torch.nn.Embedding(11, 12), b=Linear(12, 16), c=Linear(16, 4))

"""Networks whose forwards reach their parts otherwise than by attributes: through closures, partials, bound methods."""

from functools import partial, reduce, wraps

import torch
from torch import nn
from torch.nn import functional as F

from tests.odd_networks.table import Linear, Net, odd, real


def _around(how):
    """A hidden layer beside a stream, which `how` makes a function of."""

    def run(m, x):
        x = m.a(x)
        return m.c(F.relu(x + m.mlp(F.relu(x))))

    network = Net(run, a=Linear(7, 12), up=Linear(12, 16), down=Linear(16, 12), c=Linear(12, 4))
    network.mlp = how(network)
    return network


@odd(real(7))
def lambda_over_the_network():
    """As minGPT's blocks have it."""
    return _around(lambda m: lambda x: m.down(F.relu(m.up(x))))


@odd(real(7))
def parts_bound_by_partial():
    def through(up, x, down):
        return down(F.relu(up(x)))

    return _around(lambda m: partial(through, m.up, down=m.down))


@odd(real(7))
def functions_in_containers():
    """Bound methods in a dictionary, lambdas in a list, all of them one function."""

    def how(m):
        m.functions = [{"up": m.up.forward}, lambda x: m.down(x)]
        steps = [lambda x: m.functions[0]["up"](x), F.relu, m.functions[1]]
        return reduce(lambda first, then: lambda x: then(first(x)), steps)

    return _around(how)


@odd(real(7))
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


@odd(real(7))
def layers_of_the_surrounding_function():
    a, b, c = Linear(7, 12), Linear(12, 16), Linear(16, 4)

    class Closed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([a, b])
            self.c = c

        def forward(self, x):
            return c(F.relu(b(F.relu(a(x)))))

    return Closed()

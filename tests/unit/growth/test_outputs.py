"""Inputs that a network is run on, and the outputs that are compared."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab import Grower, parts
from growlab.growth import GradMax, Net2Net, PairGrowth, RandomGrowth, VarianceTransfer
from growlab.growth.outputs import network_inputs
from growlab.growth.parity import ROUNDING, rounding
from growlab.widths.unchanged import unchanged
from tests.cases import Around

X = torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(1))


def turned() -> nn.Module:
    """All its parameters are complex."""
    return Around(lambda net, x: x * net.factor, factor=nn.Parameter(torch.ones(4, dtype=torch.cfloat)))


def filtered(net: Any, x: Tensor) -> Tensor:
    """A filter over frequencies for each channel."""
    return torch.fft.irfft(torch.fft.rfft(x, dim=1) * net.filter, n=x.shape[1], dim=1)


def spectral() -> nn.Module:
    """Its first parameter is complex."""
    known = {"filter": nn.Parameter(torch.randn(5, 8, dtype=torch.cfloat)), "up": [4, 8], "down": [8, 2]}
    return Around(lambda net, x: net.down(filtered(net, net.up(x))), **known)


def in_double(network: nn.Module) -> nn.Module:
    return network._apply(lambda x: x.to(torch.complex128 if x.is_complex() else torch.float64))


@pytest.mark.parametrize(
    ("network", "dtype"),
    [
        (spectral(), torch.float32),
        (in_double(spectral()), torch.float64),
        (turned(), torch.float32),
        (nn.Identity(), torch.float32),
        (nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)).double(), torch.float64),
    ],
    ids=["complex first", "complex first, in double", "complex alone", "no parameters", "double"],
)
def test_numbers_take_the_precision_of_real_parameters(network: nn.Module, dtype: torch.dtype) -> None:
    given = (torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.cfloat), "kept")
    number, index, turned, text = network_inputs(given, network)
    assert (number.dtype, index.dtype, turned.dtype) == (dtype, torch.int64, torch.cfloat)
    assert text == "kept"


def test_whole_numbers_among_the_parameters_are_no_precision() -> None:
    network = nn.Sequential(nn.Linear(4, 2))
    network[0].weight = nn.Parameter(torch.ones(2, 4, dtype=torch.int8), requires_grad=False)
    assert network_inputs(torch.full((2,), 0.5), network)[0].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("method", [Net2Net(), PairGrowth(), RandomGrowth(), GradMax()], ids=lambda m: m.name)
def test_a_network_whose_first_parameter_is_complex_grows(method) -> None:
    torch.manual_seed(0)
    network = in_double(spectral())
    grower = Grower(network, X, method=method, trigger={0: 0.5, 1: 1.0})
    grower.provide(lambda number: [(X, torch.zeros(4))] * number, lambda y, _: (y - 0.3).square().mean())
    before = network.filter.detach().clone()
    (event,) = grower.step(epoch=1)
    assert event.parity_error_eval < 1e-12 or not method.preserves
    assert torch.equal(network.filter[:, :4], before)
    # New entries are complex too, whoever draws them.
    assert network.filter.shape == (5, 8) and bool((network.filter[:, 4:].imag != 0).all())


def test_a_block_that_comes_in_keeps_its_complex_numbers() -> None:
    blocks = [
        Around(
            lambda net, x: x + net.down(filtered(net, x)),
            **{"filter": nn.Parameter(torch.randn(5, 8, dtype=torch.cfloat)), "down": [8, 8]},
        )
        for _ in "ab"
    ]
    network = nn.Sequential(nn.Linear(4, 8), *blocks, nn.Linear(8, 2))
    grower = Grower(network, X, method=PairGrowth(), trigger={0: 1.0, 1: 1.0}, parts=[parts.Depth()])
    grower.step(epoch=1)
    for name in ("1", "2"):
        assert network.get_submodule(name).filter.dtype == torch.cfloat
        assert bool(network.get_submodule(name).filter.imag.any())


def test_complex_parameters_round_as_their_real_parts_do() -> None:
    assert rounding(turned(), torch.zeros(2, dtype=torch.cfloat)) == ROUNDING[torch.float32]
    assert rounding(in_double(turned()), torch.zeros(2, dtype=torch.cdouble)) == ROUNDING[torch.float64]


class Functional(nn.Module):
    """Batch normalisation called as a function, of something else than what enters the module."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        statistics = self.running_mean, self.running_var, self.weight, self.bias
        return F.batch_norm(0.5 * x, *statistics, self.training, 0.1, 1e-3)


@pytest.mark.parametrize(
    ("kind", "multipliers"), [(Functional, True), (Functional, False), (lambda c: nn.BatchNorm2d(c, eps=1e-3), True)]
)
def test_batch_normalisation_by_a_function_may_be_off_by_its_eps(kind, multipliers) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), kind(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), kind(16)]
    network = nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))
    x = 0.3 * torch.randn(8, 3, 8, 8)
    method = VarianceTransfer(layer_multipliers=multipliers)
    grower = Grower(network, x, method=method, trigger={0: 0.5, 1: 1.0})
    for _ in range(3):
        network(0.3 * torch.randn(8, 3, 8, 8))
    (event,) = grower.step(epoch=1)
    assert max(event.parity_error_eval, event.parity_error_train) < 1e-6 < 1e-5 < event.eps_error_train < 1e-2


@pytest.mark.parametrize("of", ["hidden", "output"])
@pytest.mark.parametrize("method", [Net2Net(), VarianceTransfer()])
def test_terms_of_the_loss_that_change_at_an_event_cause_a_warning(of, method, caplog) -> None:
    """A forward returns a term of the loss beside its output while it trains."""

    def with_term(net: Any, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        y = net.head(h := torch.relu(net.hidden(x)))
        if not net.training:
            return y
        return y, torch.cdist(h, h).mean() if of == "hidden" else y.square().mean()

    torch.manual_seed(0)
    network = Around(with_term, hidden=[6, 16], head=[16, 3]).double()
    grower = Grower(network, torch.randn(8, 6).double(), method=method, trigger={0: 0.5, 1: 1.0})
    with caplog.at_level("WARNING"):
        (event,) = grower.step(epoch=1)
    assert event.parity_error_train < 1e-9
    told = "further training outputs of the network have changed at this growth event ("
    assert (told in caplog.text) == (of == "hidden")


@pytest.mark.parametrize("draw", [random.random, lambda: float(np.random.rand())])
def test_layers_dropped_by_pythons_or_numpys_numbers_are_compared_with_the_same_ones(draw: Callable[[], float]) -> None:
    def dropping(net: Any, x: Tensor) -> Tensor:
        x = net.first(x).relu()
        for layer in net.middle:
            if not net.training or draw() > 0.5:
                x = x + layer(x).relu()
        return net.last(x)

    x = torch.randn(32, 6)
    for seed in range(4):
        torch.manual_seed(seed)
        middle = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        network = Around(dropping, first=[6, 16], last=[16, 3], middle=middle)
        grower = Grower(network, x, method=PairGrowth(), trigger={0: 0.5, 1: 1.0})
        random.seed(seed), np.random.seed(seed)
        expected = draw()
        random.seed(seed), np.random.seed(seed)
        (event,) = grower.step(epoch=1)
        assert event.parity_error_train < 1e-5 and event.parity_tolerance_train < 1e-2
        assert draw() == expected


def test_parameters_that_a_forward_updates_stay_as_an_event_is_checked() -> None:
    """A slowly moving copy of a layer, as contrastive learning has."""

    def with_momentum(net: Any, x: Tensor) -> Tensor:
        if net.training:
            with torch.no_grad():
                net.slow.lerp_(net.last.weight.detach().mean() * torch.ones_like(net.slow), 0.1)
        return net.last(net.first(x).relu())

    torch.manual_seed(0)
    slow = nn.Parameter(torch.zeros(3, 16), requires_grad=False)
    network, x = Around(with_momentum, first=[6, 16], last=[16, 3], slow=slow), torch.randn(32, 6)
    grower = Grower(network, x, method=PairGrowth(), trigger={0: 0.5, 1: 1.0})
    network.train()(x)
    before, version = network.slow.clone(), network.slow._version
    assert before.any()
    grower.step(epoch=1)
    assert torch.equal(network.slow, before) and network.slow._version > version
    trained = network.last.weight
    loss = network(x).square().mean()
    changes = trained._version
    with unchanged(network):
        network(x)
    assert trained._version == changes
    loss.backward()

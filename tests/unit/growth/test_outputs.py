"""Inputs that a network is run on, and the outputs that are compared."""

import random
from collections.abc import Callable

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
from tests.parts_here import needs

X = torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(1))


class Spectral(nn.Module):
    """Its first parameter is complex: a filter over frequencies for each channel."""

    def __init__(self, width: int = 8, frequencies: int = 5) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(frequencies, width, dtype=torch.cfloat))
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        return self.down(torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.filter, n=x.shape[1], dim=1))


class Turned(nn.Module):
    """All its parameters are complex."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(4, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def in_double(network: nn.Module) -> nn.Module:
    return network._apply(lambda x: x.to(torch.complex128 if x.is_complex() else torch.float64))


@pytest.mark.parametrize(
    ("network", "dtype"),
    [
        (Spectral(), torch.float32),
        (in_double(Spectral()), torch.float64),
        (Turned(), torch.float32),
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
    network = in_double(Spectral())
    grower = Grower(network, X, method=method, trigger={0: 0.5, 1: 1.0})
    grower.provide(lambda number: [(X, torch.zeros(4))] * number, lambda y, _: (y - 0.3).square().mean())
    before = network.filter.detach().clone()
    (event,) = grower.step(epoch=1)
    assert event.parity_error_eval < 1e-12 or not method.preserves
    assert torch.equal(network.filter[:, :4], before)
    # New entries are complex too, whoever draws them.
    assert network.filter.shape == (5, 8) and bool((network.filter[:, 4:].imag != 0).all())


class Block(nn.Module):
    """A residual block with a filter over frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, 8, dtype=torch.cfloat))
        self.down = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.filter, n=x.shape[1], dim=1))


@needs("depth")
def test_a_block_that_comes_in_keeps_its_complex_numbers() -> None:
    network = nn.Sequential(nn.Linear(4, 8), Block(), Block(), nn.Linear(8, 2))
    grower = Grower(network, X, method=PairGrowth(), trigger={0: 1.0, 1: 1.0}, parts=[parts.Depth()])
    grower.step(epoch=1)
    for name in ("1", "2"):
        assert network.get_submodule(name).filter.dtype == torch.cfloat
        assert bool(network.get_submodule(name).filter.imag.any())


def test_complex_parameters_round_as_their_real_parts_do() -> None:
    assert rounding(Turned(), torch.zeros(2, dtype=torch.cfloat)) == ROUNDING[torch.float32]
    assert rounding(in_double(Turned()), torch.zeros(2, dtype=torch.cdouble)) == ROUNDING[torch.float64]


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


class WithTerm(nn.Module):
    """Returns a term of the loss beside its output while it trains."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.hidden, self.head, self.of = nn.Linear(6, 16), nn.Linear(16, 3), of

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        h = torch.relu(self.hidden(x))
        y = self.head(h)
        if not self.training:
            return y
        return y, torch.cdist(h, h).mean() if self.of == "hidden" else y.square().mean()


@pytest.mark.parametrize("of", ["hidden", "output"])
@pytest.mark.parametrize("method", [Net2Net(), VarianceTransfer()])
def test_terms_of_the_loss_that_change_at_an_event_cause_a_warning(of, method, caplog) -> None:
    torch.manual_seed(0)
    network = WithTerm(of).double()
    grower = Grower(network, torch.randn(8, 6).double(), method=method, trigger={0: 0.5, 1: 1.0})
    with caplog.at_level("WARNING"):
        (event,) = grower.step(epoch=1)
    assert event.parity_error_train < 1e-9
    told = "further training outputs of the network have changed at this growth event ("
    assert (told in caplog.text) == (of == "hidden")


@pytest.mark.parametrize("draw", [random.random, lambda: float(np.random.rand())])
def test_layers_dropped_by_pythons_or_numpys_numbers_are_compared_with_the_same_ones(draw: Callable[[], float]) -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)
            self.middle = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x).relu()
            for layer in self.middle:
                if not self.training or draw() > 0.5:
                    x = x + layer(x).relu()
            return self.last(x)

    x = torch.randn(32, 6)
    for seed in range(4):
        torch.manual_seed(seed)
        grower = Grower(Dropping(), x, method=PairGrowth(), trigger={0: 0.5, 1: 1.0})
        random.seed(seed), np.random.seed(seed)
        expected = draw()
        random.seed(seed), np.random.seed(seed)
        (event,) = grower.step(epoch=1)
        assert event.parity_error_train < 1e-5 and event.parity_tolerance_train < 1e-2
        assert draw() == expected


def test_parameters_that_a_forward_updates_stay_as_an_event_is_checked() -> None:
    class WithMomentum(nn.Module):
        """A slowly moving copy of a layer, as contrastive learning has."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)
            self.slow = nn.Parameter(torch.zeros(3, 16), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                with torch.no_grad():
                    self.slow.lerp_(self.last.weight.detach().mean() * torch.ones_like(self.slow), 0.1)
            return self.last(self.first(x).relu())

    torch.manual_seed(0)
    network, x = WithMomentum(), torch.randn(32, 6)
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

"""Parity finds an error of a thousandth in any tensor, in each mode, and stops no sound event."""

import contextlib
import copy
import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab import Grower
from growlab.growth import GrownTensors, GrowthContext, ParityError, VarianceTransfer, event, grow, make_seed
from growlab.growth.parity import Parity, compare, relative_error
from growlab.lab.networks import CifarResNet
from growlab.optim import SGD
from tests.cases import NETWORKS, Around, graph_of, outputs, roughen, widths_at


class OffByAThousandth(VarianceTransfer):
    """Gets entries of one tensor wrong by a thousandth of their size."""

    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.wrong = wrong

    def grow(self, context: GrowthContext) -> GrownTensors:
        growth = super().grow(context)
        wrong = off_by(growth.tensors[self.wrong], 1e-3)
        return replace(growth, tensors={**growth.tensors, self.wrong: wrong})


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[Parity]:
    """Parity of each event, kept or not."""
    found: list[Parity] = []

    def noted(*args: object, **named: object) -> Parity:
        found.append(compare(*args, **named))
        return found[-1]

    monkeypatch.setattr(event, "compare", noted)
    return found


def off_by(tensor: Tensor, size: float) -> Tensor:
    """A tensor with entries that are off by so much of their own size."""
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return tensor * (1 + size * noise.to(tensor))


def shows(network: nn.Module, tensor: Tensor, x: Tensor) -> list[bool]:
    """True for each of eval and train mode in which outputs depend on a tensor's entries.

    Batch statistics take no notice of a bias before them, softmax of the keys', train mode of running statistics.
    """
    expected, kept = (outputs(network, x, False), outputs(network, x, True)), tensor.clone()
    with torch.no_grad():
        tensor.copy_(off_by(tensor, 0.1))
        found = outputs(network, x, False), outputs(network, x, True)
        tensor.copy_(kept)
    return [relative_error(*pair) > 1e-9 for pair in zip(expected, found, strict=True)]


# Each tensor takes an event, and these have many, of kinds that other networks of the table have too.
LONG = ("resnet A", "resnet B", "wrn no norm", "lstm", "cells", "sample norms")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LONG else []) for name in NETWORKS]
)
def test_an_error_of_a_thousandth_in_any_tensor_is_found(name: str, compared: list[Parity]) -> None:
    case, graph, x = NETWORKS[name], graph_of(name), NETWORKS[name].inputs()
    seed = case.make()
    state = make_seed(seed, graph, VarianceTransfer(), widths_at(graph, 0.5), seed=0)
    roughen(seed)

    def grown(method: VarianceTransfer) -> tuple[nn.Module, Parity]:
        network = copy.deepcopy(seed)
        with contextlib.suppress(ParityError):
            grow(network, graph, method, copy.deepcopy(state), graph.full_widths, 0, (x,))
        return network, compared.pop()

    network, sound = grown(VarianceTransfer())
    assert max(sound.errors) < 1e-12
    # A method gets the ratio |v| / g in the place of g: no output depends on it.
    for wrong in graph.axes.keys() - graph.lengths.keys():
        expected = shows(network, network.state_dict()[wrong], x)
        _, found = grown(OffByAThousandth(wrong))
        seen = [error > most for error, most in zip(found.errors, found.tolerances, strict=True)]
        assert seen == expected, f"{wrong}: {found}"


class Repeating(nn.Module):
    """One batch normalisation that is applied several times, behind channels of which some are dead."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.first, self.again = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        for _ in range(self.times):
            x = F.relu(self.norm(self.again(x)))
        return self.head(x.mean((2, 3)))


def flat() -> nn.Module:
    """Batches are all that its statistics are taken over."""
    hidden = [(nn.Linear(i, 16), nn.BatchNorm1d(16), nn.ReLU()) for i in (6, 16, 16)]
    return nn.Sequential(*itertools.chain(*hidden), nn.Linear(16, 4))


SOUND = {
    "once": (lambda: Repeating(1), (3, 5, 5)),
    "six times": (lambda: Repeating(6), (3, 5, 5)),
    "flat": (flat, (6,)),
    "resnet": (lambda: CifarResNet(1, 4, channels=(8, 8, 16)), (3, 8, 8)),
}


def check_sound(name: str, dtype: torch.dtype, batch: int, steps: int, seed: int) -> None:
    """Train and grow twice; channels of the first norm or layer are dead all the time."""
    torch.manual_seed(seed)
    make, shape = SOUND[name]
    network, x, y = make().to(dtype), torch.randn(16, *shape, dtype=dtype), torch.randint(4, (16,))
    grower = Grower(network, x[:batch], method=VarianceTransfer(), trigger={0: 0.25, 1: 0.5, 2: 1.0})
    optimizer = SGD(network.parameters(), lr=0.05, momentum=0.9)
    grower.follow(optimizer)
    for epoch in range(3):
        events = grower.step(epoch=epoch)
        assert len(events) == (epoch > 0)
        for step in range(steps):
            rows = torch.arange(step, step + batch) % len(x)
            optimizer.zero_grad()
            F.cross_entropy(network(x[rows]), y[rows]).backward()
            optimizer.step()
            with torch.no_grad():
                norm = next(m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
                (norm.weight if seed % 2 else next(network.parameters()))[0] = 0.0


@pytest.mark.parametrize(
    ("name", "dtype", "batch", "steps", "seed"),
    [
        *(("once", torch.float64, 2, 3, 1), ("once", torch.float32, 8, 40, 1)),
        *(("six times", torch.float32, 2, 3, 0), ("six times", torch.float64, 8, 20, 0)),
        *(("flat", torch.float32, 8, 40, 1), ("flat", torch.float64, 2, 3, 1)),
        *(("resnet", torch.float64, 8, 20, 0), ("resnet", torch.float32, 2, 3, 0)),
    ],
)
def test_no_sound_event_is_stopped(name: str, batch: int, steps: int, dtype: torch.dtype, seed: int) -> None:
    check_sound(name, dtype, batch, steps, seed)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("batch", "steps"), [(2, 5), (2, 100), (16, 5), (16, 100)])
@pytest.mark.parametrize("name", SOUND)
def test_no_sound_event_of_many_runs_is_stopped(name: str, batch: int, steps: int, dtype: torch.dtype) -> None:
    for seed in range(25):
        check_sound(name, dtype, batch, steps, seed)


@pytest.mark.parametrize("tolerance", [1e-12, 1e-6, 1e-2])
def test_an_error_above_its_tolerance_in_either_mode_is_too_large(tolerance: float) -> None:
    for sizes, kept in (((1, 1), True), ((1.01, 0), False), ((0, 1.01), False), ((0, float("nan")), False)):
        errors = sizes[0] * tolerance, sizes[1] * tolerance
        assert Parity(errors, (tolerance, tolerance)).kept is kept
        assert Parity(errors, None).kept


@pytest.mark.parametrize(("affine", "running"), [(False, True), (True, False), (False, False)])
def test_batch_normalisation_whose_eps_no_weight_takes_up_grows_exactly(affine: bool, running: bool) -> None:
    """Without weights or without running statistics."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(16, affine=affine, track_running_stats=running)
    layers = nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), norm, nn.ReLU(), nn.Linear(16, 4)
    network, x = nn.Sequential(*layers).double(), 0.1 * torch.randn(8, 6, dtype=torch.float64)
    grower = Grower(network, x, method=VarianceTransfer(), trigger={0: 0.5, 1: 1.0})
    (event,) = grower.step(epoch=1)
    assert max(event.parity_error_eval, event.parity_error_train, event.eps_error_train) < 1e-12


def test_a_weight_of_two_norms_takes_up_no_eps() -> None:
    """Statistics of two domains and one weight."""
    torch.manual_seed(0)
    norms = nn.ModuleList(nn.BatchNorm1d(16) for _ in range(2))
    norms[1].weight = norms[0].weight
    network = Around(
        lambda net, x: net.head(torch.cat([norm(net.first(x)) for norm in net.norms], 1)),
        **{"first": [6, 16], "head": [32, 4], "norms": norms},
    ).double()
    x = 0.1 * torch.randn(8, 6, dtype=torch.float64)
    grower = Grower(network, x, method=VarianceTransfer(), trigger={0: 0.5, 1: 1.0})
    with torch.no_grad():
        network.norms[1].running_var *= 0.01
    (event,) = grower.step(epoch=1)
    assert max(event.parity_error_eval, event.parity_error_train) < 1e-12


class OtherKernel(nn.BatchNorm1d):
    """Normalises by another function than torch's, as synchronised normalisation does."""

    process_group = None

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        centred = input - input.mean(0)
        return centred * (input.var(0, correction=0) + self.eps).rsqrt() * self.weight + self.bias


def test_eps_follows_in_synchronised_normalisation_too() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 16), OtherKernel(16), nn.ReLU(), nn.Linear(16, 16), OtherKernel(16)]
    network, x = (nn.Sequential(*layers, nn.ReLU(), nn.Linear(16, 4)).double(), 0.1 * torch.randn(8, 6).double())
    eps, weights = network[4].eps, list(network.parameters())
    grower = Grower(network, x, method=VarianceTransfer(), trigger={0: 0.5, 1: 1.0})
    (event,) = grower.step(epoch=1)
    assert max(event.parity_error_eval, event.parity_error_train) < 1e-12 < 1e-6 < event.eps_error_train
    assert network[4].eps == eps and len(list(network.parameters())) == len(weights)

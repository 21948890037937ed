"""Parity checks: errors of a thousandth are found, rounding of deep networks is allowed, dtypes may be mixed."""

import contextlib
import copy
import itertools
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab import Grower
from growlab.growth import (
    GradMax,
    GrownTensors,
    GrowthContext,
    GrowthEvent,
    GrowthMethod,
    Net2Net,
    PairGrowth,
    ParityError,
    Tiny,
    VarianceTransfer,
    event,
)
from growlab.growth.outputs import observe
from growlab.growth.parity import ROUNDING, Parity, compare, relative_error, rounding, rounding_measured
from growlab.lab.networks import CifarResNet
from growlab.optim import SGD
from growlab.widths import UnsupportedOperation, trace
from tests.cases import NETWORKS, OLD_TORCH, Around, Growing, differing, graph_of, outputs, planted, train
from tests.unit.growth.test_event import Broken
from tests.unit.growth.test_new_statistics import Products, batch, settled


class OffByAThousandth(VarianceTransfer):
    """Grows one tensor with a relative error of a thousandth in each entry."""

    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.wrong = wrong

    def grow(self, context: GrowthContext) -> GrownTensors:
        growth = super().grow(context)
        wrong = off_by(growth.tensors[self.wrong], 1e-3)
        return replace(growth, tensors={**growth.tensors, self.wrong: wrong})


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[Parity]:
    """Collect the parity of each event, including events that are undone."""
    parities: list[Parity] = []

    def compare_and_record(*args: object, **named: object) -> Parity:
        parities.append(compare(*args, **named))
        return parities[-1]

    monkeypatch.setattr(event, "compare", compare_and_record)
    return parities


def off_by(tensor: Tensor, size: float) -> Tensor:
    """Add random relative errors of this size to the entries of a tensor."""
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return tensor * (1 + size * noise.to(tensor))


def output_depends_on(network: nn.Module, tensor: Tensor, x: Tensor) -> list[bool]:
    """For eval and train mode, return whether outputs depend on the entries of a tensor.

    Batch statistics cancel a bias before them, softmax cancels biases of keys, train mode ignores running statistics.
    """
    expected, kept = (outputs(network, x, False), outputs(network, x, True)), tensor.clone()
    with torch.no_grad():
        tensor.copy_(off_by(tensor, 0.1))
        found = outputs(network, x, False), outputs(network, x, True)
        tensor.copy_(kept)
    return [relative_error(*pair) > 1e-9 for pair in zip(expected, found, strict=True)]


# There is one event per tensor: these have many tensors, of kinds that other networks of the table cover.
LONG = ("resnet A", "resnet B", "wrn no norm", "lstm", "cells", "sample norms")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LONG else []) for name in NETWORKS]
)
def test_an_error_of_a_thousandth_in_any_tensor_is_found(name: str, compared: list[Parity]) -> None:
    graph, start = graph_of(name), planted(name, VarianceTransfer())

    def grown(method: VarianceTransfer) -> tuple[nn.Module, Parity]:
        run = copy.copy(start)
        run.network, run.state, run.method = copy.deepcopy(start.network), copy.deepcopy(start.state), method
        with contextlib.suppress(ParityError):
            run.grow()
        return run.network, compared.pop()

    network, sound = grown(VarianceTransfer())
    assert max(sound.errors) < 1e-12
    # Methods get |v| / g in place of g, and no output depends on this ratio.
    for wrong in graph.axes.keys() - graph.lengths.keys():
        expected = output_depends_on(network, network.state_dict()[wrong], *start.x)
        _, found = grown(OffByAThousandth(wrong))
        seen = [error > most for error, most in zip(found.errors, found.tolerances, strict=True)]
        assert seen == expected, f"{wrong}: {found}"


class Repeating(nn.Module):
    """A batch normalisation that is applied several times."""

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
    """Batch normalisations over samples alone, without positions."""
    hidden = [(nn.Linear(i, 16), nn.BatchNorm1d(16), nn.ReLU()) for i in (6, 16, 16)]
    return nn.Sequential(*itertools.chain(*hidden), nn.Linear(16, 4))


SOUND = {
    "once": (lambda: Repeating(1), (3, 5, 5)),
    "six times": (lambda: Repeating(6), (3, 5, 5)),
    "flat": (flat, (6,)),
    "resnet": (lambda: CifarResNet(1, 4, channels=(8, 8, 16)), (3, 8, 8)),
}


def check_sound(name: str, dtype: torch.dtype, batch: int, steps: int, seed: int) -> None:
    """Train through two events, with one channel of the first norm or layer kept at zero."""
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
            train(network, optimizer, x[rows], y[rows])
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
def test_correct_events_pass(name: str, batch: int, steps: int, dtype: torch.dtype, seed: int) -> None:
    check_sound(name, dtype, batch, steps, seed)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("batch", "steps"), [(2, 5), (2, 100), (16, 5), (16, 100)])
@pytest.mark.parametrize("name", SOUND)
def test_correct_events_pass_in_many_runs(name: str, batch: int, steps: int, dtype: torch.dtype) -> None:
    for seed in range(25):
        check_sound(name, dtype, batch, steps, seed)


@pytest.mark.parametrize("tolerance", [1e-12, 1e-6, 1e-2])
def test_an_error_above_its_tolerance_in_either_mode_is_too_large(tolerance: float) -> None:
    for sizes, kept in (((1, 1), True), ((1.01, 0), False), ((0, 1.01), False), ((0, float("nan")), False)):
        errors = sizes[0] * tolerance, sizes[1] * tolerance
        assert Parity(errors, (tolerance, tolerance)).kept is kept
        assert Parity(errors, None).kept


def half_grown(network: nn.Module, x: Tensor) -> GrowthEvent:
    """Grow from half to full width and return the event."""
    return Growing(network, x, VarianceTransfer(), rough=False).grow()


@pytest.mark.parametrize(("affine", "running"), [(False, True), (True, False), (False, False)])
def test_batch_normalisation_that_cannot_compensate_its_eps_grows_exactly(affine: bool, running: bool) -> None:
    """Without weights or without running statistics."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(16, affine=affine, track_running_stats=running)
    layers = nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), norm, nn.ReLU(), nn.Linear(16, 4)
    event = half_grown(nn.Sequential(*layers).double(), 0.1 * torch.randn(8, 6, dtype=torch.float64))
    assert max(event.parity_error_eval, event.parity_error_train, event.eps_error_train) < 1e-12


def test_a_weight_of_two_norms_does_not_compensate_eps() -> None:
    """Separate statistics for two domains, and one shared weight."""
    torch.manual_seed(0)
    norms = nn.ModuleList(nn.BatchNorm1d(16) for _ in range(2))
    norms[1].weight = norms[0].weight
    network = Around(
        lambda net, x: net.head(torch.cat([norm(net.first(x)) for norm in net.norms], 1)),
        **{"first": [6, 16], "head": [32, 4], "norms": norms},
    ).double()
    run = Growing(network, 0.1 * torch.randn(8, 6, dtype=torch.float64), VarianceTransfer(), rough=False)
    with torch.no_grad():
        network.norms[1].running_var *= 0.01
    event = run.grow()
    assert max(event.parity_error_eval, event.parity_error_train) < 1e-12


class OtherKernel(nn.BatchNorm1d):
    """Batch normalisation by another kernel than torch's, as in SyncBatchNorm."""

    process_group = None

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        centred = input - input.mean(0)
        return centred * (input.var(0, correction=0) + self.eps).rsqrt() * self.weight + self.bias


def test_eps_follows_in_synchronised_normalisation_too() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 16), OtherKernel(16), nn.ReLU(), nn.Linear(16, 16), OtherKernel(16)]
    network = nn.Sequential(*layers, nn.ReLU(), nn.Linear(16, 4)).double()
    eps, weights = network[4].eps, list(network.parameters())
    event = half_grown(network, 0.1 * torch.randn(8, 6).double())
    assert max(event.parity_error_eval, event.parity_error_train) < 1e-12 < 1e-6 < event.eps_error_train
    assert network[4].eps == eps and len(list(network.parameters())) == len(weights)


X = batch(1)


def cancelling(size: float, method: PairGrowth) -> Growing:
    """A network whose output contains a difference of two equal numbers, `size` times as large as the output."""
    torch.manual_seed(0)
    layers = {"a": nn.Linear(5, 8), "act": nn.Tanh(), "b": nn.Linear(8, 16), "relu": nn.ReLU()}
    network = nn.Sequential(OrderedDict(layers, classifier=nn.Linear(16, 3)))
    run = Growing(network, X, method, rough=False)
    with torch.no_grad():
        network.b.weight[5], network.b.bias[5] = network.b.weight[0], network.b.bias[0]
        network.classifier.weight[:, 0] = size
        network.classifier.weight[:, 5] = -size
    return run


@pytest.mark.parametrize("size", [1e4, 2e4])
def test_errors_as_large_as_rounding_every_weight_are_allowed(size):
    event, usual = cancelling(size, PairGrowth(noise_std=0.0)).grow(), ROUNDING[torch.float32]
    assert usual < event.parity_error_eval <= event.parity_tolerance_eval <= 100 * usual


@pytest.mark.parametrize("size, wrong", [(1.0, 1.0005), (1e4, 1.05)])
def test_a_broken_rule_is_not_mistaken_for_rounding(size, wrong):
    with pytest.raises(ParityError, match="changed the output"):
        cancelling(size, Broken(lambda w: w * wrong)).grow()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rounding_is_measured_on_the_network_and_leaves_it_unchanged(dtype):
    ratios = []
    for size in (1.0, 1e4):
        network = cancelling(size, PairGrowth()).network.to(dtype)
        before = copy.deepcopy(network.state_dict())
        outputs = observe(network, X.to(dtype))
        measured = rounding_measured(network, (X.to(dtype),), outputs)
        assert measured[0] == measured[1]
        ratios.append(measured[0] / rounding(network, outputs.eval))
        assert not differing(before, network.state_dict())
    assert ratios[0] == 1.0 <= ratios[1] <= 100.0
    assert ratios[1] > 1.0 or dtype == torch.float64


def test_an_error_while_it_is_measured_leaves_the_parameters_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    network, calls = cancelling(1.0, PairGrowth()).network, iter([False, True])
    before = copy.deepcopy(network.state_dict())
    outputs = observe(network, X)
    monkeypatch.setattr("growlab.growth.parity.placed", lambda tensor, like: 1 / 0 if next(calls) else tensor)
    with pytest.raises(ZeroDivisionError):
        rounding_measured(network, (X,), outputs)
    assert not differing(before, network.state_dict())


def lagging(method: PairGrowth) -> Growing:
    """A network whose running variances are far too large, so that almost nothing of its input is left in eval mode."""
    run = settled(lambda: Products(3), method)
    with torch.no_grad():
        run.network.classifier.bias.zero_()
        for norm in (run.network.norm, *run.network.norms):
            norm.running_var.fill_(1e12)
    return run


def test_train_mode_decides_if_eval_mode_outputs_only_rounding():
    event = lagging(PairGrowth(noise_std=0.0)).grow()
    assert event.parity_error_eval > 1e-2 and event.parity_tolerance_eval is None
    assert event.parity_error_train <= 1e-5 and event.parity_tolerance_train <= 1e-2
    with pytest.raises(ParityError, match="changed the output"):
        lagging(Broken(lambda w: w * 1.02)).grow()


class Counting(nn.Module):
    """Its output depends on the number of calls."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.a, self.b, self.factor = nn.Linear(6, 16), nn.Linear(16, 3), factor
        # growlab restores attributes and containers after observing a network, but cannot restore an iterator.
        self.calls = itertools.count()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x))) * torch.full((), self.factor ** next(self.calls))


@pytest.mark.parametrize(("factor", "ends"), [(1.0005, nullcontext()), (1.1, pytest.raises(ParityError))])
def test_a_network_with_irreproducible_outputs_causes_a_warning(
    factor: float, ends: AbstractContextManager[Any], caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(8, 6)
    grower = Grower(Counting(factor), x, method=Net2Net(), trigger={0: 0.5, 1: 1.0})
    warning = "Counting returns different outputs for the same inputs"
    with caplog.at_level("WARNING"):
        grower.step(epoch=0)
        assert not any(warning in message for message in caplog.messages)
        with ends:
            grower.step(epoch=1)
    assert any(warning in message for message in caplog.messages)


SAMPLES = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 5


class Mixed(nn.Module):
    """A body, norm and head of three types, with casts between them.

    Args:
        types: of the first layer, of the norm and the next layer, of the one after that.
        norm_first: register the norm before the layer that reads the input.
    """

    def __init__(self, types: tuple[torch.dtype, ...], norm_first: bool = False) -> None:
        super().__init__()
        first, second, third = types
        if norm_first:
            self.norm = nn.LayerNorm(16, dtype=second)
        self.a = nn.Linear(6, 16, dtype=first)
        self.norm = nn.LayerNorm(16, dtype=second)
        self.b, self.c = nn.Linear(16, 24, dtype=second), nn.Linear(24, 16, dtype=third)
        self.head = nn.Linear(16, 5, dtype=second)

    def forward(self, x: Tensor) -> Tensor:
        second, third = self.b.weight.dtype, self.c.weight.dtype
        x = self.b(self.norm(self.a(x).to(second))).relu()
        return self.head(self.c(x.to(third)).relu().to(second))


def loss(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.float(), y)


METHODS = [VarianceTransfer(), Net2Net(), GradMax(fallback="pairs"), Tiny(fallback="pairs")]
TYPES = [*permutations([torch.bfloat16, torch.float32, torch.float64])]


@pytest.mark.parametrize(
    ("method", "types", "norm_first"),
    # Every order of types with the norm registered first and later, with two methods.
    [(METHODS[(i + 2 * first) % 4], types, first) for i, types in enumerate(TYPES) for first in (False, True)],
)
def test_layers_keep_their_types(method: GrowthMethod, types: tuple[torch.dtype, ...], norm_first: bool) -> None:
    torch.manual_seed(0)
    network, x = Mixed(types, norm_first), SAMPLES.to(types[0])
    before = {name: parameter.dtype for name, parameter in network.named_parameters()}
    grower = Grower(network, x, method=method, trigger={0: 0.5, 1: 1.0})
    grower.provide(batches=lambda number: [(x, Y)] * number, loss=loss)
    grower.step(epoch=0)
    (event,) = grower.step(epoch=1)
    assert {name: parameter.dtype for name, parameter in network.named_parameters()} == before
    if method.preserves:
        assert event.parity_error_eval <= ROUNDING[torch.bfloat16]
    loss(network(x), Y).backward()


@pytest.mark.parametrize(
    ("network", "x", "sentence"),
    [
        (
            nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 5).double()),
            SAMPLES,
            "its layers are in torch.float32 and torch.float64: cast",
        ),
        (nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 5)), Y.expand(6, 8).T, "take .torch.float32, or int"),
        (nn.Sequential(nn.Embedding(6, 16), nn.Linear(16, 5)), SAMPLES, "take .torch.float32, or int"),
        (nn.Conv2d(3, 8, 3), torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "take .torch.float32, or int"),
    ],
    ids=["layers", "linear", "embedding", "convolution"],
)
def test_a_type_that_a_layer_does_not_take_is_named_at_the_trace(network: nn.Module, x: Tensor, sentence: str) -> None:
    if OLD_TORCH and any(isinstance(module, nn.Embedding) for module in network.modules()):
        pytest.skip("its embeddings on device meta take numbers of any type")
    with pytest.raises(UnsupportedOperation, match=sentence):
        trace(network, x)

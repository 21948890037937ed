"""Casting inputs, comparing outputs, and folding factors of the output into the last layers."""

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab import Grower, parts
from growlab.base.errors import UserError
from growlab.growth import GradMax, Net2Net, PairGrowth, RandomGrowth, VarianceTransfer, finish, make_seed
from growlab.growth.outputs import network_inputs
from growlab.growth.parity import ROUNDING, rounding
from growlab.lab.training import RateAdaptation
from growlab.lab.training.progress import first_line
from growlab.optim import SGD, NormRatio
from growlab.widths import WidthGraph, trace
from growlab.widths.unchanged import unchanged
from tests.cases import METHODS, PRESERVING, Around, Growing

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
        # Whole numbers among the parameters are no precision.
        (Around(len, weight=nn.Parameter(torch.ones(2, dtype=torch.int8), False), last=[2, 2]), torch.float32),
    ],
    ids=["complex first", "complex first, in double", "complex alone", "no parameters", "double", "whole numbers"],
)
def test_numbers_take_the_precision_of_real_parameters(network: nn.Module, dtype: torch.dtype) -> None:
    given = (torch.full((2,), 0.5), torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.cfloat), "kept")
    number, index, turned, text = network_inputs(given, network)
    assert (number.dtype, index.dtype, turned.dtype) == (dtype, torch.int64, torch.cfloat)
    assert number.tolist() == [0.5, 0.5]
    assert text == "kept"


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


@pytest.mark.parametrize("rule", ["fan_in", "as_network"])
def test_complex_layers_are_drawn_with_equal_variance_in_both_parts(rule: Any) -> None:
    torch.manual_seed(0)
    hidden = nn.Sequential(nn.Linear(400, 300, dtype=torch.cfloat), nn.Linear(300, 300, dtype=torch.cfloat))
    network = Around(lambda net, x: net.head(net.hidden(x).abs()), hidden=hidden, head=[300, 2])
    wanted = float(hidden[1].weight.detach().std(correction=0)) * sqrt(300) if rule == "as_network" else sqrt(2)
    x, method = torch.randn(4, 400, dtype=torch.cfloat), VarianceTransfer("constraint", new_weights=rule)
    grower = Grower(network, x, method=method, trigger={0: 0.5, 1: 1.0})
    for part in map(torch.view_as_real(hidden[1].weight.detach()).select, (2, 2), (0, 1)):
        assert float(part.std()) * sqrt(2 * 150) == pytest.approx(wanted, rel=0.02)
    (event,) = grower.step(epoch=1)
    assert max(event.parity_error_eval, event.parity_error_train) < 1e-5
    # The weights have their variance already, which is that of both parts together.
    factor = event.report["rescaled"]["hidden.1.weight"]
    assert factor == pytest.approx(sqrt(2) / wanted, rel=0.02)
    for part in map(torch.view_as_real(hidden[1].weight.detach()[150:]).select, (2, 2), (0, 1)):
        assert float(part.std()) * sqrt(2 * 300) == pytest.approx(wanted, rel=0.02)


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
    """Batch normalisation by a function call, on another tensor than the module's input."""

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
    warning = "further training outputs of the network have changed at this growth event ("
    assert (warning in caplog.text) == (of == "hidden")


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


@pytest.mark.parametrize(
    "drop",
    [
        torch.dropout,
        torch.alpha_dropout,
        torch.feature_dropout,
        torch.feature_alpha_dropout,
        lambda x, *rest: torch.dropout_(x.clone(), *rest),
    ],
)
def test_dropout_by_torchs_own_functions_is_disabled(drop: Callable[..., Tensor]) -> None:
    def dropping(net: Any, x: Tensor) -> Tensor:
        return net.last(drop(net.first(x).relu(), 0.5, net.training))

    network = Around(dropping, first=[6, 16], last=[16, 3])
    grower = Grower(network, torch.randn(32, 6), method=PairGrowth(), trigger={0: 0.5, 1: 1.0})
    assert grower.step(epoch=1)[0].parity_error_train < 1e-5


def test_parameters_that_a_forward_updates_stay_as_an_event_is_checked() -> None:
    """A momentum copy of a layer, as in contrastive learning."""

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


# Functions of the last hidden layer: an output factor can be folded into the first ones, but not into `PINNED`.
FOLDED = {
    "linear": lambda net, h: net.classifier(h),
    "relu": lambda net, h: F.relu(net.classifier(h)),
    "sum": lambda net, h: net.classifier(h) + net.other(h),
    "concatenation": lambda net, h: torch.cat([net.classifier(h), net.other(h)], 1),
    "divided": lambda net, h: net.classifier(h) / 2,
}
PINNED = {
    "log_softmax": lambda net, h: F.log_softmax(net.classifier(h), 1),
    "tanh": lambda net, h: torch.tanh(net.classifier(h)),
    "scaled": lambda net, h: net.classifier(h) * net.scale,
    "shifted": lambda net, h: net.classifier(h) + net.scale,
    "batch norm": lambda net, h: net.last_norm(net.classifier(h)),
    "product": lambda net, h: net.classifier(h) * net.other(h),
    "normalised": lambda net, h: F.normalize(net.classifier(h)),
    "softmax": lambda net, h: net.classifier(h).softmax(1),
    "clamp": lambda net, h: net.classifier(h).clamp(-1, 1),
    "cap": lambda net, h: 30 * torch.tanh(net.classifier(h) / 30),
    "plus one": lambda net, h: net.classifier(h) + 1,
    "mean": lambda net, h: h.mean(1, keepdim=True),
}
ENDS = FOLDED | PINNED


@cache
def made(end: str) -> tuple[Around, WidthGraph, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = Around(
            lambda net, x: ENDS[end](net, F.relu(net.norm(net.second(F.relu(net.first(x)))))),
            **{"first": [6, 12], "second": [12, 16], "norm": nn.BatchNorm1d(16), "last_norm": nn.BatchNorm1d(5)},
            **{"classifier": [16, 5], "other": [16, 5], "scale": nn.Parameter(torch.rand(5) + 0.5)},
        ).double()
        x = torch.randn(16, 6, dtype=torch.float64)
    return network, trace(network, x), x


# Every ending with the two methods that leave a factor, one ending with each of the others.
@pytest.mark.parametrize(
    ("end", "method"),
    [
        *((end, method) for end in ENDS for method in ("ours", "ours without multipliers")),
        *(("linear", method) for method in PRESERVING if method not in ("ours", "ours without multipliers")),
    ],
)
def test_the_remaining_factor_can_be_folded(end: str, method: str) -> None:
    network, graph, x = copy.deepcopy(made(end))
    run = Growing(network, x, METHODS[method].make(0.0), 0.25, graph=graph, rough=False)
    for part in (0.5, 1.0):
        run.grow(part)
    before = run.outputs() * run.state.output_factor
    if end in PINNED or method == "ours":
        assert run.state.output_factor == 1.0
    elif method == "ours without multipliers":
        assert run.state.output_factor == pytest.approx(4.0)
    finish(network, graph, run.method, run.state)
    torch.testing.assert_close(run.outputs(), before, rtol=1e-12, atol=1e-12)


class Halving(PairGrowth):
    """Reports an output factor for any network."""

    def grow(self, context):
        return replace(super().grow(context), output_factor=2.0)


@pytest.mark.parametrize("end", ENDS)
def test_a_factor_that_cannot_be_folded_raises_an_error_before_training(end: str) -> None:
    network, graph, _ = copy.deepcopy(made(end))
    widths = dict.fromkeys(graph.groups, 4)
    method = Halving()
    if end in FOLDED:
        make_seed(network, graph, method, widths, 0)
        return
    with pytest.raises(UserError, match="Halving rescales this network's output") as raised:
        make_seed(network, graph, method, widths, 0)
    assert "\n" not in str(raised.value)
    network, graph, _ = copy.deepcopy(made(end))
    method.output_multiplier = False
    make_seed(network, graph, method, widths, 0)


@pytest.mark.parametrize("end", ENDS)
def test_the_last_layers_are_found_behind_any_ending(end: str) -> None:
    """New weights have variance 1 / C'^2, old ones are rescaled by C / C', their rate is divided by C_0."""
    network, graph, x = copy.deepcopy(made(end))
    found = {layer.weight for layer in graph.layers if layer.is_output}
    several = end in ("sum", "concatenation", "product")
    last = "second" if end == "mean" else "classifier"
    assert found == {f"{last}.weight", *(["other.weight"] if several else [])}
    free = end in FOLDED or end in ("batch norm", "mean")
    assert graph.last_layers[last] is free
    assert f"output layers: {last}{'' if free else ' (something behind it fixes its scale)'}" in first_line(graph)
    method, other = METHODS["ours"].make(0.0), copy.deepcopy(network)
    run = Growing(network, x, method, dict.fromkeys(graph.groups, 4), graph=graph, rough=False)
    before = run.outputs()
    old = {name: network.get_parameter(name).detach().clone() for name in found}
    event = run.grow(dict.fromkeys(graph.groups, 8))
    assert event.parity_error_eval < 1e-10
    torch.testing.assert_close(run.outputs(), before, rtol=1e-10, atol=1e-12)
    for name in found:
        assert event.report["rescaled"][name] == pytest.approx(0.5)
        new = network.get_parameter(name).detach()
        torch.testing.assert_close(new[:, :4], old[name] / 2)
        assert 0.3 < float(new[:, 4:6].square().mean()) * 8**2 < 3.0
    grower = Grower(other, (x,), method=method, trigger={0: dict.fromkeys(graph.groups, 8)})
    optimizer = SGD(other.parameters(), 0.1)
    RateAdaptation(NormRatio(), divide_output_lr_by_fan_in=True).apply(optimizer)
    grower.follow(optimizer)
    for name in found:
        factors = optimizer.factors(other.get_parameter(name))
        assert float(factors[0]) == pytest.approx(1 / 8)


@pytest.mark.parametrize(
    ("follow", "last"),
    [
        (lambda net, h: net.last(F.relu(net.last(h))), {}),
        (lambda net, h: net.last(h) @ net.matrix, {"matrix": True}),
        (lambda net, h: net.recurrent(net.last(h))[0], {}),
    ],
    ids=["itself", "matrix", "recurrent"],
)
def test_a_layer_that_another_map_follows_is_not_the_last(
    follow: Callable[[Around, Tensor], Tensor], last: dict[str, bool]
) -> None:
    torch.manual_seed(0)
    network = Around(
        lambda net, x: follow(net, F.relu(net.first(x))),
        **{"first": [6, 8], "last": [8, 8], "recurrent": nn.GRU(8, 3, batch_first=True)},
        matrix=nn.Parameter(torch.randn(8, 3)),
    )
    assert trace(network, torch.randn(4, 5, 6)).last_layers == last


# Networks that return more than the output of their last layer.
FORMS = {
    "only logits": lambda net, h: {"logits": (logits := net.head(h)), "loss": logits.square().mean()},
    "hidden": lambda net, h: {"logits": net.head(F.relu(h)), "energy": h.mean(1)},
    "normed": lambda net, h: {"logits": net.head(F.relu(net.norm(h))), "energy": h.mean(1)},
    "layer twice": lambda net, h: {"hidden": h, "again": net.third(h), "logits": net.head(h)},
}


@pytest.mark.parametrize(
    ("method", "form"),
    [(method, list(FORMS)[(i + step) % 4]) for i, method in enumerate(PRESERVING) for step in (0, 1)],
)
def test_all_outputs_stay_even_if_layers_read_them(form: str, method: str) -> None:
    torch.manual_seed(0)
    network = Around(
        lambda net, x: FORMS[form](net, net.third(F.relu(net.second(F.relu(net.first(x)))))),
        **{"first": [6, 16], "second": [16, 16], "third": [16, 16], "norm": nn.BatchNorm1d(16), "head": [16, 3]},
    ).double()
    x = torch.randn(16, 6, dtype=torch.float64)
    grower = Grower(network, x, method=METHODS[method].make(0.0), trigger={0: 0.25, 1: 0.5, 2: 1.0})
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        network.train()(x)
    network.eval()
    before = network(x)
    for epoch in (1, 2):
        grower.step(epoch=epoch)
        torch.testing.assert_close(network.eval()(x), before, rtol=1e-9, atol=1e-10)
    grower.finish()
    torch.testing.assert_close(network.eval()(x), before, rtol=1e-9, atol=1e-10)

"""Factors that growth methods leave on the output, and the last layers that they are folded into."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab.base.errors import UserError
from growlab.grower import Grower
from growlab.growth import PairGrowth, finish, grow, make_seed
from growlab.lab.training import RateAdaptation
from growlab.lab.training.progress import first_line
from growlab.optim import SGD, NormRatio
from growlab.widths import WidthGraph, trace
from tests.cases import METHODS, PRESERVING, Around, outputs

# What networks make of their last hidden layer.
# The first ones end with affine layers, whose scale can be changed; the others do not.
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


def made(end: str) -> tuple[Around, WidthGraph, Tensor]:
    network, graph, x = _made(end)
    return copy.deepcopy(network), graph, x


@cache
def _made(end: str) -> tuple[Around, WidthGraph, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = Around(
            lambda net, x: ENDS[end](net, F.relu(net.norm(net.second(F.relu(net.first(x)))))),
            **{"first": [6, 12], "second": [12, 16], "norm": nn.BatchNorm1d(16), "last_norm": nn.BatchNorm1d(5)},
            **{"classifier": [16, 5], "other": [16, 5], "scale": nn.Parameter(torch.rand(5) + 0.5)},
        ).double()
        x = torch.randn(16, 6, dtype=torch.float64)
    return network, trace(network, x), x


# Every ending with methods that leave a factor, one with each of the others.
@pytest.mark.parametrize(
    ("end", "method"),
    [
        *((end, method) for end in ENDS for method in ("ours", "ours without multipliers")),
        *(("linear", method) for method in PRESERVING if method not in ("ours", "ours without multipliers")),
    ],
)
def test_the_remaining_factor_can_be_folded(end: str, method: str) -> None:
    network, graph, x = made(end)
    stages = [{name: max(2, group.full_width // part) for name, group in graph.groups.items()} for part in (4, 2, 1)]
    growing = METHODS[method].make(0.0)
    state = make_seed(network, graph, growing, stages[0], 0)
    for widths in stages[1:]:
        grow(network, graph, growing, state, widths, 0, (x,))
    before = outputs(network, x, training=False) * state.output_factor
    if end in PINNED or method == "ours":
        assert state.output_factor == 1.0
    elif method == "ours without multipliers":
        assert state.output_factor == pytest.approx(4.0)
    finish(network, graph, growing, state)
    torch.testing.assert_close(outputs(network, x, training=False), before, rtol=1e-12, atol=1e-12)


class Halving(PairGrowth):
    """Claims a factor whatever the network ends with."""

    def grow(self, context):
        return replace(super().grow(context), output_factor=2.0)


@pytest.mark.parametrize("end", ENDS)
def test_a_factor_that_could_not_be_folded_is_refused_before_training(end: str) -> None:
    network, graph, _ = made(end)
    widths = dict.fromkeys(graph.groups, 4)
    method = Halving()
    if end in FOLDED:
        make_seed(network, graph, method, widths, 0)
        return
    with pytest.raises(UserError, match="Halving rescales this network's output") as raised:
        make_seed(network, graph, method, widths, 0)
    assert "\n" not in str(raised.value)
    network, graph, _ = made(end)
    method.output_multiplier = False
    make_seed(network, graph, method, widths, 0)


@pytest.mark.parametrize("end", ENDS)
def test_the_last_layers_are_found_behind_any_ending(end: str) -> None:
    """New weights have variance 1 / C'^2, old ones are rescaled by C / C', their rate is divided by C_0."""
    network, graph, x = made(end)
    found = {layer.weight for layer in graph.layers if layer.is_output}
    several = end in ("sum", "concatenation", "product")
    last = "second" if end == "mean" else "classifier"
    assert found == {f"{last}.weight", *(["other.weight"] if several else [])}
    free = end in FOLDED or end in ("batch norm", "mean")
    assert graph.last_layers[last] is free
    told = f"output layers: {last}" + ("" if free else " (something behind it fixes its scale)")
    assert told in first_line(graph)
    method = METHODS["ours"].make(0.0)
    other = copy.deepcopy(network)
    state = make_seed(network, graph, method, dict.fromkeys(graph.groups, 4), 0)
    before = outputs(network, x, training=False)
    old = {name: network.get_parameter(name).detach().clone() for name in found}
    event = grow(network, graph, method, state, dict.fromkeys(graph.groups, 8), 0, (x,))
    assert event.parity_error_eval < 1e-10
    torch.testing.assert_close(outputs(network, x, training=False), before, rtol=1e-10, atol=1e-12)
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


# What a network returns beside what its last layer puts out.
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

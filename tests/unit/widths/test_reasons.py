"""Layers that keep their full width say why, down to the first cause."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from growlab import Grower
from growlab.widths import trace
from tests.cases import Around


def two(run: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """Two layers around a given function."""
    return Around(
        run,
        **{"table": nn.Embedding(7, 5), "a": [5, 8], "b": [8, 8], "last": [8, 3], "back": [8, 5]},
        table_of_numbers=torch.linspace(0.5, 1, 8).requires_grad_(),
        mask=nn.Buffer(torch.linspace(0.5, 1, 8)[None]),
    )


_FULL = "that keep their full width: "


@pytest.mark.parametrize(
    ("run", "reasons"),
    [
        (
            lambda net, x: net.last(net.a(x) * (1 / net.a(x).shape[-1])),
            {
                "a": r"the code computes something else at narrow widths: mul \(cases\.py:\d+\) takes 0\.5, and "
                r"0\.125 at full width"
            },
        ),
        (
            lambda net, x: net.last(net.a(x).view(4, 8)),
            {"a": r"the code fails at narrow widths: test_reasons\.py:\d+ raises .*shape '\[4, 8\]' is invalid.*"},
        ),
        (lambda net, x: net.back(net.a(x)) + x, {"back": rf".* {_FULL}the network's input"}),
        (
            lambda net, x: net.last(net.a(x) + net.table_of_numbers),
            {"a": rf".* {_FULL}table_of_numbers is neither a parameter nor a buffer"},
        ),
        (
            lambda net, x: net.last(net.a(x) + torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8], device=x.device)),
            {"a": rf".* {_FULL}numbers in the code"},
        ),
        (
            lambda net, x: net.back(net.a(x)) + x.reshape(2, 2, 5).reshape(4, 5).flip(-1),
            {"back": rf".* {_FULL}the network's input"},
        ),
        (
            lambda net, x: net.last(net.a(x) + net.b(net.a(x)).roll(1, -1)),
            {"a": rf"added to .* {_FULL}b \(reordered by roll\)", "b": "reordered by roll"},
        ),
        (
            lambda net, x: net.last((net.a(x) * net.mask).flip(-1)),
            {"a": "reordered by flip", "mask": "reordered by flip"},
        ),
        (lambda net, x: net.table(x.long() * 0), {"table": "the network's output"}),
    ],
)
def test_layers_at_full_width_have_a_reason(run: Callable[[Any, Tensor], Tensor], reasons: dict[str, str]) -> None:
    graph = trace(two(run), torch.randn(4, 5))
    for name, reason in reasons.items():
        assert re.fullmatch(reason, graph.fixed[name]), graph.fixed


@pytest.mark.parametrize(
    ("wrap", "name", "reason"),
    [
        (parametrizations.spectral_norm, "0.parametrizations.weight", r".* SpectralNorm computes a weight .*"),
        (parametrizations.orthogonal, "0.parametrizations.weight", r".* Orthogonal computes a weight .*"),
        (nn.utils.spectral_norm, "0", "a matrix product multiplies and sums over them"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_parametrizations_that_keep_a_width_are_named(
    wrap: Callable[[nn.Module], nn.Module], name: str, reason: str
) -> None:
    linear = nn.Sequential(wrap(nn.Linear(5, 8)), nn.ReLU(), nn.Linear(8, 3))
    layers = nn.Conv1d(3, 8, 1), nn.ReLU(), wrap(nn.Conv1d(8, 4, 3)), nn.ReLU(), nn.Conv1d(4, 6, 1), nn.Conv1d(6, 2, 1)
    graph = trace(linear, torch.randn(4, 5))
    assert re.fullmatch(reason, graph.fixed[name]), graph.fixed
    assert list(trace(nn.Sequential(*layers), torch.randn(2, 3, 5)).groups) == ["4"]


def test_statistics_that_no_state_dict_has_keep_their_width_and_the_network_trains() -> None:
    network = Around(
        lambda net, x: net.last(nn.functional.batch_norm(net.a(x), net.mean, net.var).relu()),
        **{"a": [6, 8], "last": [8, 3], "mean": torch.rand(8), "var": torch.rand(8) + 0.5},
    )
    x = torch.randn(4, 6)
    assert "neither a parameter nor a buffer" in trace(network, x).fixed["a"]
    before = network(x)
    grower = Grower(network, x, trigger={0: 0.5, 1: 1.0})
    grower.step(1)
    assert torch.equal(grower.finish()(x), before)


def test_weights_of_float8_keep_their_inputs_and_the_rest_grows() -> None:
    network = Around(
        lambda net, x: net.c(nn.functional.linear(net.a(x).relu(), net.b.weight.to(x.dtype)).relu()),
        **{"a": [5, 8], "b": nn.Linear(8, 6, bias=False), "c": [6, 3]},
    )
    network.b.weight = nn.Parameter(network.b.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    x = torch.randn(4, 5)
    graph = trace(network, x)
    assert list(graph.groups) == ["b"] and "float8_e4m3fn, which cannot be scaled" in graph.fixed["a"], graph.fixed
    kept, before = network.b.weight.detach().float(), network.b.weight.dtype
    grower = Grower(network, x, trigger={0: 0.5, 1: 1.0})
    (event,) = grower.step(1)
    assert event.parity_error_eval <= 1e-5 and network.b.weight.dtype == before
    grower.finish()
    assert torch.equal(network.b.weight.float(), kept)

"""Find the tensors in a network's output, for trials and growth events."""

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass
from transformers.modeling_outputs import CausalLMOutputWithPast

from growlab import Grower
from growlab.growth import Net2Net, PairGrowth
from growlab.widths import resize, tensors_in, trace
from tests.cases import Around

A, B, C = (torch.full((1,), float(number)) for number in range(3))
Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Out:
    """A container that is registered as a pytree node below."""

    logits: Any
    extra: Any


@dataclass
class Unknown:
    """A dataclass that is not registered as a pytree node."""

    logits: Any
    extra: Any = None


register_dataclass(Out)


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        (A, [A]),
        ([A, (B, [C])], [A, B, C]),
        ({"z": A, "a": [B], "n": None, "m": 3}, [A, B]),
        (OrderedDict(z=A, a=B), [A, B]),
        (UserDict(z=A, a={"y": B}), [A, B]),
        (Pair(B, {"a": A}), [B, A]),
        (CausalLMOutputWithPast(loss=C, logits=A, hidden_states=(B, A)), [C, A, B, A]),
        (Out(B, {"z": A, "a": UserDict(c=C)}), [B, A, C]),
        ((Out(A, None), [Out(C, "text")]), [A, C]),
        (Unknown(A), [A]),
        (SimpleNamespace(logits=A), []),
        (None, []),
        (3.0, []),
    ],
)
def test_tensors_in_containers_in_their_order(outputs: Any, expected: list[Tensor]) -> None:
    assert list(map(id, tensors_in(outputs))) == list(map(id, expected))


@pytest.mark.parametrize(
    "wrap", [lambda y, x: Out(y, y.mean()), lambda y, x: Unknown(y, "classes"), lambda y, x: [Unknown(y, x)]]
)
def test_a_network_that_returns_a_dataclass_grows(wrap: Callable[[Tensor, Tensor], Any]) -> None:
    network = Around(
        lambda net, x: wrap(net.out(torch.relu(net.norm(net.hidden(x)))), x),
        **{"hidden": [4, 16], "norm": nn.BatchNorm1d(16), "out": [16, 2]},
    )
    network, x = network.double().eval(), torch.randn(8, 4, dtype=torch.float64)

    def logits() -> Tensor:
        returned = network(x)
        return (returned[0] if isinstance(returned, list) else returned).logits

    grower = Grower(network, x, method=Net2Net(), trigger={0: 0.5, 1: 1.0})
    assert grower.state.widths == {"hidden": 8}
    before = logits()
    (event,) = grower.step(epoch=1)
    assert event.parity_error_eval < 1e-12
    torch.testing.assert_close(logits(), before)
    grower.finish()
    torch.testing.assert_close(logits(), before)


def test_trials_emit_no_warnings() -> None:
    """No warnings for trial widths: torch warns if `num_features` differs from the input's channels."""
    network = nn.Sequential(nn.Conv2d(2, 6, 1), nn.InstanceNorm2d(6), nn.Conv2d(6, 8, 1), nn.GroupNorm(8, 8))
    network.append(nn.Conv2d(8, 2, 1))
    grower = Grower(network, torch.randn(2, 2, 4, 4), method=PairGrowth(), trigger={0: 0.5, 1: 1.0})
    assert set(grower.graph.groups) == {"0", "2"}
    grower.step(epoch=1)


def test_the_input_of_a_layer_used_in_one_mode_keeps_its_width() -> None:
    """A stream is read by one layer in train mode, and by another layer of the same shape in eval mode."""
    network = Around(
        lambda net, x: (net.trained if net.training else net.evaluated)(torch.relu(net.body(x))),
        **{"body": [6, 16], "trained": [16, 3], "evaluated": [16, 3]},
    )
    x = torch.randn(4, 6)
    graph = trace(network, x)
    narrow = {name: max(1, group.full_width // 2) for name, group in graph.groups.items()}
    resize(network, graph, graph.full_widths, narrow)
    for training in (False, True):
        assert network.train(training)(x).shape == (4, 3)


def test_a_layer_that_exists_only_at_other_sizes_is_no_error() -> None:
    """Trials change sizes in attributes of a module, whose code then looks up a layer that does not exist."""

    class Changing(nn.Module):
        def __init__(self, size: int, size_out: int) -> None:
            super().__init__()
            self.size, self.size_out = size, size_out
            self.inside, self.out = nn.Linear(5, size), nn.Linear(size_out, 3)
            if size != size_out:
                self.between = nn.Linear(size, size_out)

        def forward(self, x: Tensor) -> Tensor:
            x = self.inside(x)
            x = self.between(x) if self.size != self.size_out else x
            return self.out(x.view(-1, self.size_out))

    assert trace(Changing(8, 8), torch.randn(2, 5)).full_widths == {"inside": 8}
    assert trace(Changing(8, 6), torch.randn(2, 5)).full_widths == {"inside": 8, "between": 6}

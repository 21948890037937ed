"""Recurrent layers: hidden and input channels grow exactly."""

import copy
import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from growlab import Grower
from growlab.base.errors import UserError
from growlab.grower.cost import forward_flops
from growlab.growth import (
    FireFly,
    GradMax,
    GrowthMethod,
    Net2Net,
    PairGrowth,
    Splitting,
    Tiny,
    VarianceTransfer,
)
from growlab.growth.parity import relative_error
from growlab.widths import WidthGraph, trace
from tests.cases import METHODS, PRESERVING, Growing, outputs, roughen
from tests.unit.growth.measured import Started

KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "tanh": nn.RNN,
    "ReLU": partial(nn.RNN, nonlinearity="relu"),
}
GATES = {"LSTM": 4, "GRU": 3, "tanh": 1}
PARTS = (0.3, 0.5, 0.8, 1.0)
BEFORE, AFTER = ("embedding", "linear", "convolution"), ("mean", "state", "norm", "attention", "sum")


class Sequences(nn.Module):
    """A recurrent module of any kind between layers of other kinds; inputs [B, 6] or [B, 6, 3]."""

    def __init__(self, kind: str, before: str, after: str, **settings: Any) -> None:
        super().__init__()
        self.before, self.after = before, after
        self.inside = {
            "embedding": lambda: nn.Embedding(11, 6),
            "linear": lambda: nn.Linear(3, 6),
            "convolution": lambda: nn.Conv1d(3, 6, 3, padding=1),
        }[before]()
        self.rnn = KINDS[kind](6, 8, **settings)
        self.width = 8 * (2 if self.rnn.bidirectional else 1)
        self.norm = nn.LayerNorm(self.width) if after == "norm" else nn.Identity()
        self.beside = nn.Linear(6, self.width) if after == "sum" else None
        self.attention = nn.MultiheadAttention(self.width, 2, batch_first=True) if after == "attention" else None
        self.last = nn.Linear(8 if after == "state" else self.width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x.mT).mT if self.before == "convolution" else self.inside(x)
        first = self.rnn.batch_first
        found, states = self.rnn(x if first else x.transpose(0, 1))
        if self.after == "state":
            return self.last((states[0] if isinstance(states, tuple) else states).sum(0))
        h = self.norm(found if first else found.transpose(0, 1))
        if self.beside is not None:
            h = h + torch.tanh(self.beside(x))
        if self.attention is not None:
            h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.last(h.mean(1))


@cache
def random_case(seed: int) -> tuple[Sequences, Tensor, WidthGraph]:
    """A network with random settings, an input, and its width graph."""
    choose = random.Random(seed)
    kind, before, after = list(KINDS)[seed % 4], choose.choice(BEFORE), AFTER[seed % 5]
    layers = choose.choice((1, 2, 3))
    settings = {name: choose.random() < 0.5 for name in ("bidirectional", "bias", "batch_first")}
    torch.manual_seed(seed)
    network = Sequences(kind, before, after, num_layers=layers, dropout=0.5 if layers > 1 else 0.0, **settings).double()
    x = examples(network, 3, seed)
    return network, x, trace(network, x)


def examples(network: Sequences, number: int, seed: int) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    if network.before == "embedding":
        return torch.randint(11, (number, 6), generator=source)
    return torch.randn(number, 6, 3, generator=source, dtype=torch.float64)


# Each method with a network of its own; the others are slow.
SAMPLED = {(i, i % 8) for i in range(len(PRESERVING))}
CASES = [
    pytest.param(method, seed, marks=[] if (i, seed) in SAMPLED else pytest.mark.slow)
    for i, method in enumerate(PRESERVING)
    for seed in range(20)
]


@pytest.mark.parametrize(("method", "seed"), CASES)
def test_any_recurrent_network_grows_three_times(method: str, seed: int) -> None:
    plain, x, graph = random_case(seed)
    network = copy.deepcopy(plain)
    assert {"inside", "rnn"} <= set(graph.groups)
    hidden, read = graph.axes["rnn.weight_hh_l0"][1], graph.axes["rnn.weight_ih_l0"][1]
    assert hidden.length(graph.full_widths) == 8 and graph.groups["inside"].full_width == 6
    run = Growing(network, x, METHODS[method].make(0.0), PARTS[0], 5, graph)
    fresh = examples(network, 5, 9)
    for part in PARTS[1:]:
        before = [run.outputs(training, fresh) for training in (False, True)]
        event = run.grow(part, seed=5)
        after = [run.outputs(training, fresh) * event.output_factor for training in (False, True)]
        # Attention and normalisation round more.
        assert max(map(relative_error, before, after)) < 1e-11
        # In train mode dropout between the layers is disabled.
        assert max(event.parity_error_eval, event.parity_error_train) < 1e-11
        assert network.rnn.hidden_size == hidden.length(event.widths_after)
        assert network.rnn.input_size == read.length(event.widths_after)
        roughen(network, seed=run.state.stage)
    assert repr(network) == repr(plain) and type(network.rnn) is type(plain.rnn)
    expected = {name: tensor.shape for name, tensor in plain.state_dict().items()}
    assert {n: t.shape for n, t in network.state_dict().items() if "unfinished" not in n} == expected


def sequences(
    kind: str,
    method: GrowthMethod,
    part: float | dict[str, int] = 0.5,
    dtype: torch.dtype = torch.float64,
    num_layers: int = 2,
    **settings: bool,
) -> Started:
    """A network that is about to grow, with a batch."""
    torch.manual_seed(0)
    network = Sequences(kind, "linear", "mean", num_layers=num_layers, **settings).to(dtype)
    x = examples(network, 7, 1).to(dtype)
    run = Started(network, x, method, part, 5)
    run.batches = [(x, torch.arange(7) % 4)]
    return run


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "tanh"])
def test_flops_of_each_stage_are_those_by_hand(kind: str) -> None:
    torch.manual_seed(0)
    network = Sequences(kind, "linear", "mean", num_layers=2, bidirectional=True).double()
    x = examples(network, 7, 1)
    grower = Grower(network, x, method=PairGrowth(), trigger={0: 0.5, 1: 0.75, 2: 1.0})
    for epoch, (inside, hidden) in enumerate([(3, 4), (5, 6), (6, 8)]):
        grower.step(epoch=epoch)
        widths = grower.state.widths
        assert widths["rnn"] == hidden
        inside = widths["inside"]
        gates = GATES[kind] * hidden
        layers = 2 * gates * (inside + hidden) + 2 * gates * (2 * hidden + hidden)
        assert forward_flops(network, x[:1]) == 2 * 6 * (3 * inside + layers) + 2 * 2 * hidden * 4


def test_new_forget_gates_begin_as_old_ones() -> None:
    network = Sequences("LSTM", "linear", "mean")
    with torch.no_grad():
        for name in ("bias_ih_l0", "bias_hh_l0"):
            network.rnn.get_parameter(name).copy_(torch.tensor([0.0, 1.0, 0.0, 0.0]).repeat_interleave(8))
    Growing(network, torch.randn(3, 6, 3), VarianceTransfer(), rough=False).grow()
    for name in ("bias_ih_l0", "bias_hh_l0"):
        bias = network.rnn.get_parameter(name).view(4, 8)
        assert torch.equal(bias, torch.tensor([0.0, 1.0, 0.0, 0.0])[:, None].expand(4, 8))


def test_new_weights_of_gates_vary_as_torchs_own() -> None:
    network = nn.Sequential()
    network.inside, network.rnn = nn.Linear(3, 256), nn.LSTM(256, 128)
    network.last = nn.Linear(128, 2)
    network.forward = lambda x: network.last(network.rnn(network.inside(x))[0])
    run = Growing(network, torch.randn(4, 2, 3), PairGrowth(), rough=False)
    for name, fan_in in (("weight_ih_l0", 128), ("weight_hh_l0", 64)):
        assert float(network.rnn.get_parameter(name).detach().var()) == pytest.approx(1 / (3 * fan_in), rel=0.05)
    event = run.grow()
    new = event.replaced["rnn.weight_hh_l0"][1].view(4, 128, 128)[:, 64:96]
    assert float(new.detach().var()) == pytest.approx(1 / (3 * 128), rel=0.05)


class States(nn.Module):
    """An LSTM with initial states from different sources; inputs [B, 6, 3]."""

    def __init__(self, where: str, **settings: Any) -> None:
        super().__init__()
        self.where, self.hidden = where, 8
        self.inside, self.rnn = nn.Linear(3, 6), nn.LSTM(6, 8, batch_first=True, **settings)
        self.last = nn.Linear(settings.get("proj_size", 8), 4)
        self.start, self.read = nn.Parameter(torch.randn(2, 1, 1, 8)), nn.Linear(3, 16)

    def forward(self, x: Tensor, given: Tensor | None = None) -> Any:
        states: Any = None
        if self.where == "literal":
            states = (x.new_zeros(1, len(x), 8), x.new_zeros(1, len(x), 8))
        if self.where == "attribute":
            states = tuple(torch.zeros(1, len(x), self.hidden, dtype=x.dtype) for _ in range(2))
        if self.where == "module":
            states = tuple(torch.zeros(1, len(x), self.rnn.hidden_size, dtype=x.dtype) for _ in range(2))
        if self.where == "parameter":
            states = tuple(state.expand(1, len(x), -1).contiguous() for state in self.start)
        if self.where == "computed":
            states = tuple(state.contiguous() for state in self.read(x.mean(1)[None]).chunk(2, dim=-1))
        if self.where == "input":
            states = (given, given)
        found, (hidden, _) = self.rnn(self.inside(x), states)
        return (self.last(found[:, -1]), hidden) if self.where == "output" else self.last(found[:, -1])


@pytest.mark.parametrize("where", ["attribute", "module", "parameter", "computed"])
def test_initial_states_that_the_network_creates_grow(where: str) -> None:
    torch.manual_seed(0)
    network, x = States(where).double(), torch.randn(2, 6, 3, dtype=torch.float64)
    grower = Grower(network, x, method=VarianceTransfer(), trigger={0: 0.5, 1: 0.75, 2: 1.0})
    full = grower.full_graph.full_widths
    assert (full.get("rnn") or full.get("start") or full.get("read")) == 8
    for epoch in range(3):
        before = outputs(network, x, False)
        for event in grower.step(epoch=epoch):
            assert relative_error(before, outputs(network, x, False)) < 1e-12
            assert event.parity_error_eval < 1e-12
        assert network.rnn.hidden_size == grower.state.widths[next(g for g in full if g != "inside")]
        roughen(network, seed=epoch)


@pytest.mark.parametrize(
    ("where", "settings", "reason"),
    [
        ("literal", {}, "the code fails at narrow widths: test_recurrent.py:"),
        ("input", {}, "its hidden state comes from outside"),
        ("output", {}, "the network's output"),
        ("none", {"proj_size": 4}, "a recurrent layer (LSTM) that projects its hidden state keeps its width"),
    ],
)
def test_hidden_channels_that_cannot_grow_have_a_reason(where, settings, reason) -> None:
    network, x = States(where, **settings), torch.randn(2, 6, 3)
    graph = trace(network, (x, torch.randn(1, 2, 8)) if where == "input" else x)
    assert graph.fixed["rnn"].startswith(reason)
    assert set(graph.groups) == {"inside"}


@pytest.mark.parametrize("method", [Net2Net(), VarianceTransfer()])
def test_inputs_of_a_projecting_layer_grow(method: GrowthMethod) -> None:
    torch.manual_seed(0)
    network = States("none", proj_size=4).double()
    run = Growing(network, torch.randn(2, 6, 3, dtype=torch.float64), method, rough=False)
    before = run.outputs()
    run.grow()
    assert relative_error(before, run.outputs()) < 1e-12
    assert network.rnn.input_size == 6 and network.rnn.hidden_size == 8


@pytest.mark.parametrize(("kind", "dtype"), [("LSTM", torch.float32), ("GRU", torch.float64), ("tanh", torch.float64)])
def test_gradmax_reaches_its_predicted_gradient(kind: str, dtype: torch.dtype) -> None:
    run = sequences(kind, GradMax(), dtype=dtype)
    before = run.outputs()
    event, _ = run.grow(run.graph.full_widths)
    assert relative_error(before, run.outputs()) < (1e-12 if dtype is torch.float64 else 1e-5)
    found = event.report["groups"]["rnn"]
    assert found["gradient_norm"] == pytest.approx(found["gradient_norm_bound"], rel=1e-3)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (partial(Splitting, iterations=None), "tanh"),
        pytest.param(partial(Splitting, iterations=None), "LSTM", marks=pytest.mark.slow),
        *((partial(FireFly, new_candidates=0), kind) for kind in ("GRU", "tanh")),
    ],
)
def test_splits_change_the_loss_as_predicted(make: Callable[..., GrowthMethod], kind: str) -> None:
    run = sequences(kind, make(epsilon=0.003), {"inside": 6, "rnn": 4})
    before = run.data().loss({})
    event, _ = run.grow(run.graph.full_widths)
    changed = run.data().loss({}) - before
    predicted = sum(group["predicted_change"] for group in event.report["groups"].values())
    assert predicted < 0 and changed == pytest.approx(predicted, rel=0.1)


def test_methods_that_cannot_measure_a_recurrent_layer_raise_an_error() -> None:
    def event(method: GrowthMethod) -> Any:
        run = sequences("ReLU", method, num_layers=1)
        return run.grow(run.graph.full_widths)[0]

    with pytest.raises(
        UserError, match=r"rnn: its channels are produced by rnn\.weight_ih_l0, rnn\.weight_hh_l0, not by one"
    ):
        event(Tiny())
    assert set(event(Tiny(fallback="pairs")).report["grown_by_pairs"]) == {"inside", "rnn"}
    with pytest.raises(
        UserError, match="second derivatives, which the ReLU inside torch's recurrent layers does not have"
    ):
        event(Splitting())
    with pytest.raises(UserError, match="GradMax cannot grow rnn: the gradient of its incoming weights is zero"):
        event(GradMax())
    assert set(event(GradMax(fallback="pairs")).report["grown_by_pairs"]) == {"rnn"}

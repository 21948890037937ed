"""Tables that stand beside growing channels end training as they began it, and growth is exact around them."""

import copy
import io
import pickle
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import growlab
from growlab.growth import (
    Bert2Bert,
    FireFly,
    GradMax,
    HyperCloning,
    Lemon,
    Net2Net,
    PairGrowth,
    RandomGrowth,
    Splitting,
    Tiny,
    VarianceTransfer,
)
from growlab.growth.parity import relative_error
from growlab.widths import WidthGraph, trace
from growlab.widths.places import plain_tensors
from tests.cases import Around, outputs

ROWS, WIDTH, ROUNDING = 5, 16, 1e-10
METHODS = {
    "pairs": PairGrowth,
    "ours": VarianceTransfer,
    "ours, all rescaled": lambda: VarianceTransfer(rescale_layers_without_batch_norm=True, layer_multipliers=False),
    "ours, by weights": lambda: VarianceTransfer(rule="constraint"),
    "net2net": Net2Net,
    "hypercloning": HyperCloning,
    "hypercloning with noise": lambda: HyperCloning(noise_std=0.1),
    "diagonal": lambda: HyperCloning("diagonal"),
    "lemon": Lemon,
    "bert2bert": Bert2Bert,
    "random": RandomGrowth,
    "gradmax": lambda: GradMax(fallback="pairs"),
    "tiny": lambda: Tiny(fallback="pairs"),
    "splitting": lambda: Splitting(fallback="pairs"),
    "firefly": lambda: FireFly(fallback="pairs"),
}
INEXACT = ("bert2bert", "random", "tiny", "splitting", "firefly")


def sinusoids(rows: int = ROWS, width: int = WIDTH) -> Tensor:
    return torch.sin(torch.arange(1.0, rows + 1)[:, None] * torch.arange(1.0, width + 1) / 7)


class Tabled(nn.Module):
    """A stream with a residual layer, and a table in one of many spellings beside it."""

    spelling = "TC"
    norm = False

    def __init__(self) -> None:
        super().__init__()
        self.a, self.m, self.b = nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.n = nn.LayerNorm(WIDTH) if self.norm else nn.Identity()
        self.keep(sinusoids())

    def keep(self, table: Tensor) -> None:
        self.register_buffer("table", table)

    def beside(self, x: Tensor) -> Tensor:
        return x + self.table

    def forward(self, x: Tensor) -> Tensor:
        x = self.beside(self.a(x))
        return self.b(torch.tanh(x + self.m(self.n(x)))).mean(1)


class Normed(Tabled):
    norm = True


class NotSaved(Tabled):
    def keep(self, table: Tensor) -> None:
        self.register_buffer("table", table, persistent=False)


class Plain(Tabled):
    """A tensor that is neither parameter nor buffer, and in no state_dict: SimpleViT's positions."""

    def keep(self, table: Tensor) -> None:
        self.table = table

    def beside(self, x: Tensor) -> Tensor:
        return x + self.table.to(x)


class PlainTwice(Plain):
    """The same tensor in two modules, under other names."""

    def keep(self, table: Tensor) -> None:
        self.table = self.m.positions = table

    def beside(self, x: Tensor) -> Tensor:
        return x + self.table.to(x) * self.m.positions.to(x)


class Longer(Normed):
    """Whisper's: more rows than an input has."""

    def keep(self, table: Tensor) -> None:
        self.register_buffer("table", sinusoids(9)[None], persistent=False)

    def beside(self, x: Tensor) -> Tensor:
        return x + self.table[:, : x.shape[1]]


class Vector(Tabled):
    def keep(self, table: Tensor) -> None:
        self.register_buffer("table", table[0])


class Frozen(Tabled):
    def keep(self, table: Tensor) -> None:
        self.table = nn.Parameter(table, requires_grad=False)


class FrozenEmbedding(Normed):
    def keep(self, table: Tensor) -> None:
        self.rows = nn.Embedding(9, WIDTH)
        self.rows.requires_grad_(False)

    @property
    def table(self) -> Tensor:
        return self.rows.weight

    def beside(self, x: Tensor) -> Tensor:
        return x + self.rows(torch.arange(x.shape[1], device=x.device))


class Masked(Tabled):
    def keep(self, table: Tensor) -> None:
        self.register_buffer("table", torch.arange(WIDTH) % 3 == 0)

    def beside(self, x: Tensor) -> Tensor:
        return x.masked_fill(self.table, 0.0)


class Computed(Tabled):
    def beside(self, x: Tensor) -> Tensor:
        return x + torch.exp(self.table).unsqueeze(0).expand(len(x), -1, -1)


class FrozenProjection(Normed):
    """The first layer is a fixed random projection."""

    def keep(self, table: Tensor) -> None:
        self.a.requires_grad_(False)

    @property
    def table(self) -> Tensor:
        return self.a.weight

    def beside(self, x: Tensor) -> Tensor:
        return x


class FrozenBatchNorm(nn.Module):
    """As detectors have it, by numbers in buffers."""

    def __init__(self) -> None:
        super().__init__()
        for row, name in enumerate(("weight", "bias", "running_mean", "running_var")):
            self.register_buffer(name, 1.5 + sinusoids()[row])

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)


class Statistics(nn.Module):
    """Learned gains beside statistics that no state_dict has and nothing updates."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Conv2d(6, WIDTH, 1), nn.Linear(WIDTH, 3)
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        for row, name in enumerate(("running_mean", "running_var")):
            self.register_buffer(name, 1.5 + sinusoids()[row], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x.transpose(1, 2)[..., None])
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)
        return self.c(torch.relu(x).mean((2, 3)))


class Convolved(nn.Module):
    """Images: a value per channel, and a batch normalisation of numbers in buffers behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(6, WIDTH, 1), nn.Conv2d(WIDTH, 8, 3, padding=1)
        self.frozen, self.n, self.c = FrozenBatchNorm(), nn.BatchNorm2d(8, eps=1e-14), nn.Linear(8, 3)
        self.register_buffer("table", sinusoids()[0].view(1, -1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.a(x.transpose(1, 2)[..., None]) + self.table)
        return self.c(torch.relu(self.n(self.b(x))).mean((2, 3)))


SPELLINGS = {
    cls.__name__: cls
    for cls in (
        *(Tabled, Normed, NotSaved, Plain, PlainTwice, Longer, Vector, Frozen, FrozenEmbedding),
        *(Masked, Computed, FrozenProjection, Statistics, Convolved),
    )
}


def untrained(network: nn.Module) -> dict[str, Tensor]:
    """All that training leaves alone: buffers but for live statistics, and frozen parameters."""
    found = {name: p for name, p in network.named_parameters() if not p.requires_grad}
    found |= {name: b for name, b in network.named_buffers() if not name.startswith("n.")}
    found |= plain_tensors(network)
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def built(cls: type[nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return cls().double()


@cache
def graph_of(cls: type[nn.Module]) -> WidthGraph:
    return trace(built(cls), inputs(0))


def inputs(seed: int) -> Tensor:
    return torch.randn(8, ROWS, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def grower(network: nn.Module, method: str) -> growlab.Grower:
    grower = growlab.Grower(
        network,
        inputs(0),
        method=METHODS[method](),
        trigger={0: 0.25, 1: 0.5, 2: 1.0},
        anneal_steps=1,
        graph=graph_of(type(network)),
    )
    grower.provide(lambda n: [(inputs(9), torch.zeros(8, 3, dtype=torch.float64))] * n, F.mse_loss)
    return grower


def trained(network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    network.train()
    for seed in range(2):
        optimizer.zero_grad()
        network(inputs(seed)).square().mean().backward()
        optimizer.step()


# Every spelling with one method, every method with one spelling: they do not interact.
WITH = {
    "Convolved": ("ours, all rescaled", "hypercloning with noise", "random", "gradmax", "firefly"),
    "Longer": ("pairs", "lemon", "tiny"),
    "Vector": ("net2net", "bert2bert", "splitting"),
    "Plain": ("ours, by weights", "hypercloning", "diagonal"),
}
PAIRS = [
    *(("ours", spelling) for spelling in SPELLINGS),
    *((method, spelling) for spelling, methods in WITH.items() for method in methods),
]


@pytest.mark.parametrize(("method", "spelling"), PAIRS)
def test_constants_end_as_they_began(method: str, spelling: str) -> None:
    network = built(SPELLINGS[spelling])
    begun, growing = untrained(network), grower(network, method)
    assert growing.full_graph.full_widths and growing.full_graph.constants
    optimizer = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], lr=0.01)
    growing.follow(optimizer)
    for epoch in range(3):
        before = [outputs(network, inputs(7), training) for training in (False, True)]
        events = growing.step(epoch=epoch)
        if events and method not in INEXACT:
            after = [outputs(network, inputs(7), training) for training in (False, True)]
            train = 1e-2 if "ours" in method and spelling == "Convolved" else ROUNDING
            noise = 0.1 if "noise" in method and spelling == "Convolved" else 0.0
            assert relative_error(before[0], after[0]) <= ROUNDING + noise
            assert relative_error(before[1], after[1]) <= train + noise
            assert events[0].parity_error_eval <= ROUNDING
        trained(network, optimizer)
    growing.finish()
    ended = untrained(network)
    assert ended.keys() == begun.keys()
    for name, tensor in begun.items():
        assert torch.equal(ended[name], tensor), name
    fresh = built(SPELLINGS[spelling], seed=0)
    fresh.load_state_dict(network.state_dict())
    assert relative_error(outputs(network, inputs(7), False), outputs(fresh, inputs(7), False)) <= ROUNDING


class Drawn(Normed):
    """A random table that no constructor makes again, and a buffer that the forward follows."""

    persistent = True

    def keep(self, table: Tensor) -> None:
        self.register_buffer("table", torch.randn_like(table), persistent=self.persistent)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def beside(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return x + self.table - self.mean


class DrawnNotSaved(Drawn):
    persistent = False


class DrawnPlain(DrawnNotSaved):
    def keep(self, table: Tensor) -> None:
        super().keep(table)
        drawn = self.table
        del self.table
        self.table = drawn.double()


@pytest.mark.parametrize("cls", [Drawn, DrawnNotSaved, DrawnPlain])
def test_a_resumed_run_ends_with_the_constants_that_the_first_one_began_with(cls) -> None:
    network = built(cls)
    begun, first = network.table.clone(), grower(network, "net2net")
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    first.follow(optimizer)
    first.step(epoch=1)
    trained(network, optimizer)
    saved = io.BytesIO()
    torch.save({"network": network.state_dict(), "growth": first.state_dict()}, saved)
    saved.seek(0)
    content = torch.load(saved, weights_only=True)
    # Made of another seed: what is saved counts.
    again = built(cls, seed=1 if cls.persistent else 0)
    second = grower(again, "net2net")
    second.load_state_dict(content["growth"])
    again.load_state_dict(content["network"])
    for run in (first, second):
        run.step(epoch=2)
        assert torch.equal(run.network.table, begun)
        # What training has written to is no constant: copies are of what it has become.
        assert run.network.mean.shape == (WIDTH,) and not torch.equal(run.network.mean[8:], torch.zeros(8))
    assert torch.equal(outputs(network, inputs(7), False), outputs(again, inputs(7), False))


@pytest.mark.parametrize("cls", [NotSaved, Plain])
def test_withdrawing_and_averages_leave_constants_whole(cls) -> None:
    network = built(cls)
    begun, growing = network.table.clone(), grower(network, "net2net")
    average = torch.optim.swa_utils.AveragedModel(network, use_buffers=True)
    growing.follow(average)
    for epoch in range(3):
        average.update_parameters(network)
        growing.step(epoch=epoch)
    assert torch.equal(average.module.table, begun)
    network = built(cls)
    grower(network, "net2net").restore_full_width()
    assert torch.equal(network.table, begun)


def test_a_constant_that_has_been_written_to_keeps_what_was_written() -> None:
    network = built(Tabled)
    growing = grower(network, "pairs")
    changed = network.table.add_(1.0).clone()
    (event,) = growing.step(epoch=1)
    assert torch.equal(network.table[:, : changed.shape[1]], changed) and event.parity_error_eval <= ROUNDING


def test_a_network_that_is_frozen_as_a_whole_has_no_constants_but_its_buffers() -> None:
    graph = trace(built(Frozen).requires_grad_(False), inputs(0))
    assert graph.full_widths and not graph.constants


def test_channels_that_a_constant_takes_stay_for_that_reason() -> None:
    """A frozen vector takes the channels of the first layer."""
    network = Around(
        lambda net, x: net.c(torch.relu(net.b(x))) * (torch.relu(net.a(x)) @ net.v)[..., None],
        **{"a": [6, WIDTH], "b": [6, 8], "c": [8, 3], "v": nn.Parameter(torch.randn(WIDTH), requires_grad=False)},
    )
    graph = trace(network.double(), inputs(0))
    assert set(graph.full_widths) == {"b"}
    assert graph.fixed["a"] == "v takes these channels and is not trained"


class InAList(Plain):
    def keep(self, table: Tensor) -> None:
        self.tables = [table]

    def beside(self, x: Tensor) -> Tensor:
        return x + self.tables[0].to(x)


class AlsoInAList(InAList):
    def keep(self, table: Tensor) -> None:
        self.table, self.tables = table, [table]

    def beside(self, x: Tensor) -> Tensor:
        return super().beside(x) + self.table.to(x)


class Learned(Plain):
    """No parameter, but with a gradient."""

    def keep(self, table: Tensor) -> None:
        self.table = table.requires_grad_()


class Updated(Plain):
    def beside(self, x: Tensor) -> Tensor:
        if self.training:
            self.table = self.table * 0.9
        return super().beside(x)


class UpdatedInPlace(Plain):
    def beside(self, x: Tensor) -> Tensor:
        if self.training:
            self.table.mul_(0.9)
        return super().beside(x)


class Statistics(Plain):
    """Those of a normalisation, which training may follow."""

    def keep(self, table: Tensor) -> None:
        self.mean, self.var = table[0].double(), 1.5 + table[1].double()

    def beside(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        return F.batch_norm(x, self.mean, self.var, training=self.training).transpose(1, 2)


@pytest.mark.parametrize("cls", [InAList, AlsoInAList, Learned, Updated, UpdatedInPlace, Statistics])
def test_plain_tensors_that_may_change_or_are_stored_twice_keep_their_channels(cls) -> None:
    network = built(cls)
    assert not trace(network, inputs(0)).grows("a.weight")


class Filled(Tabled):
    """A table that the forward computes at the width that the network has, if there is none."""

    def keep(self, table: Tensor) -> None:
        self.table = None

    def beside(self, x: Tensor) -> Tensor:
        if self.table is None or self.table.shape[0] < x.shape[1]:
            self.table = sinusoids(x.shape[1], WIDTH).to(x)
        return x + self.table


def test_a_cache_that_was_filled_before_the_trace_is_no_constant() -> None:
    network = built(Filled)
    network(inputs(0))
    full = network.table
    graph = trace(network, inputs(0))
    assert network.table is full and not graph.grows("a.weight")


def test_a_refused_event_leaves_a_plain_tensor_as_it_was(monkeypatch) -> None:
    network = built(Plain)
    growing = grower(network, "net2net")
    growing.step(epoch=0)
    before, number = network.table, network.table.clone()
    monkeypatch.setattr(growlab.growth.event, "_checked", None)
    with pytest.raises(TypeError):
        growing.step(epoch=1)
    assert network.table is before and torch.equal(before, number)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda network: pickle.loads(pickle.dumps(network))])
def test_copies_of_a_growing_network_have_a_plain_tensor_of_its_width(again) -> None:
    network = built(Plain)
    grower(network, "net2net").step(epoch=0)
    twin = again(network)
    assert twin.table is not network.table and torch.equal(twin.table, sinusoids()[:, :4])
    assert torch.equal(outputs(twin, inputs(7), False), outputs(network, inputs(7), False))

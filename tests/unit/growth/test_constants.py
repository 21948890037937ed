"""Constant tensors beside growing channels: unchanged at the end of training, and growth is exact around them."""

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import growlab
from growlab.growth import FireFly, GradMax, HyperCloning, Splitting, Tiny
from growlab.growth.parity import relative_error
from growlab.widths import trace
from growlab.widths.places import plain_tensors
from tests import cases
from tests.cases import Around, differing, outputs, train

ROWS, WIDTH, ROUNDING = 5, 16, 1e-10
METHODS = {
    **{name: partial(case.make, 0.0) for name, case in cases.METHODS.items()},
    "hypercloning with noise": lambda: HyperCloning(noise_std=0.1),
    "diagonal": lambda: HyperCloning("diagonal"),
    **{cls.__name__: partial(cls, fallback="pairs") for cls in (GradMax, Tiny, Splitting, FireFly)},
}
INEXACT = ("bert2bert", "random", "Tiny", "Splitting", "FireFly")


def sinusoids(rows: int = ROWS, width: int = WIDTH) -> Tensor:
    return torch.sin(torch.arange(1.0, rows + 1)[:, None] * torch.arange(1.0, width + 1) / 7)


Keep, Beside = Callable[[nn.Module, Tensor], object], Callable[[nn.Module, Tensor], Tensor]


def buffer(net: nn.Module, table: Tensor) -> None:
    net.register_buffer("table", table)


def unsaved(net: nn.Module, table: Tensor) -> None:
    net.register_buffer("table", table, persistent=False)


def plain(net: nn.Module, table: Tensor) -> None:
    """A tensor that is neither parameter nor buffer, and in no state_dict, like SimpleViT's positions."""
    net.table = table


def plain_twice(net: nn.Module, table: Tensor) -> None:
    """The same tensor in two modules under different names."""
    net.table = net.m.positions = table


def frozen_embedding(net: nn.Module, table: Tensor) -> None:
    net.rows = nn.Embedding(9, WIDTH).requires_grad_(False)


def added(net: nn.Module, x: Tensor) -> Tensor:
    return x + net.table.to(x)


def computed(net: nn.Module, x: Tensor) -> Tensor:
    return x + torch.exp(net.table).unsqueeze(0).expand(len(x), -1, -1)


class Tabled(nn.Module):
    """A residual layer and a constant table, which `keep` stores and `beside` combines with the stream."""

    def __init__(self, keep: Keep = buffer, beside: Beside = added, norm: bool = False) -> None:
        super().__init__()
        self.a, self.m, self.b = nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.n, self.beside = nn.LayerNorm(WIDTH) if norm else nn.Identity(), beside
        keep(self, sinusoids())

    def forward(self, x: Tensor) -> Tensor:
        x = self.beside(self, self.a(x))
        return self.b(torch.tanh(x + self.m(self.n(x)))).mean(1)


class FrozenBatchNorm(nn.Module):
    """Batch normalisation whose numbers are all buffers, as in torchvision's detectors."""

    def __init__(self) -> None:
        super().__init__()
        for row, name in enumerate(("weight", "bias", "running_mean", "running_var")):
            self.register_buffer(name, 1.5 + sinusoids()[row])

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)


class Statistics(nn.Module):
    """Learned gains with running statistics that are never saved or updated."""

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
    """Images plus a constant per channel, followed by a frozen batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(6, WIDTH, 1), nn.Conv2d(WIDTH, 8, 3, padding=1)
        self.frozen, self.n, self.c = FrozenBatchNorm(), nn.BatchNorm2d(8, eps=1e-14), nn.Linear(8, 3)
        self.register_buffer("table", sinusoids()[0].view(1, -1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.a(x.transpose(1, 2)[..., None]) + self.table)
        return self.c(torch.relu(self.n(self.b(x))).mean((2, 3)))


SPELLINGS: dict[str, Callable[[], nn.Module]] = {
    "buffer": Tabled,
    "before a norm": lambda: Tabled(norm=True),
    "not saved": lambda: Tabled(unsaved),
    "plain": lambda: Tabled(plain),
    "plain twice": lambda: Tabled(plain_twice, lambda net, x: x + net.table.to(x) * net.m.positions.to(x)),
    # As in Whisper: more rows than the input has positions.
    "longer": lambda: Tabled(
        lambda net, _: unsaved(net, sinusoids(9)[None]), lambda net, x: x + net.table[:, : x.shape[1]], norm=True
    ),
    "vector": lambda: Tabled(lambda net, table: buffer(net, table[0])),
    "frozen": lambda: Tabled(lambda net, table: plain(net, nn.Parameter(table, requires_grad=False))),
    "frozen embedding": lambda: Tabled(
        frozen_embedding, lambda net, x: x + net.rows(torch.arange(x.shape[1], device=x.device)), norm=True
    ),
    "masked": lambda: Tabled(
        lambda net, _: buffer(net, torch.arange(WIDTH) % 3 == 0), lambda net, x: x.masked_fill(net.table, 0.0)
    ),
    "computed": lambda: Tabled(beside=computed),
    # The first layer is a fixed random projection.
    "frozen projection": lambda: Tabled(lambda net, _: net.a.requires_grad_(False), lambda net, x: x, norm=True),
    "statistics": Statistics,
    "convolved": Convolved,
}


def untrained(network: nn.Module) -> dict[str, Tensor]:
    """Tensors that training must not change: frozen parameters, plain tensors, all buffers but live statistics."""
    found = {name: p for name, p in network.named_parameters() if not p.requires_grad}
    found |= {name: b for name, b in network.named_buffers() if not name.startswith("n.")}
    found |= plain_tensors(network)
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def built(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make().double()


def inputs(seed: int) -> Tensor:
    return torch.randn(8, ROWS, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def grower(network: nn.Module, method: str) -> growlab.Grower:
    trigger = {0: 0.25, 1: 0.5, 2: 1.0}
    grower = growlab.Grower(network, inputs(0), method=METHODS[method](), trigger=trigger, anneal_steps=1)
    grower.provide(lambda n: [(inputs(9), torch.zeros(8, 3, dtype=torch.float64))] * n, F.mse_loss)
    return grower


# Each spelling and each method once: they do not interact.
WITH = {
    "convolved": ("ours rescaled", "hypercloning with noise", "random", "GradMax", "FireFly"),
    "longer": ("pairs", "lemon", "Tiny"),
    "vector": ("net2net", "bert2bert", "Splitting"),
    "plain": ("ours constraint", "ours without multipliers", "hypercloning", "diagonal"),
}
PAIRS = [
    *(("ours", spelling) for spelling in SPELLINGS),
    *((method, spelling) for spelling, methods in WITH.items() for method in methods),
]


@pytest.mark.parametrize(("method", "spelling"), PAIRS)
def test_constants_end_as_they_began(method: str, spelling: str) -> None:
    network = built(SPELLINGS[spelling])
    constants, growing = untrained(network), grower(network, method)
    assert growing.full_graph.full_widths and growing.full_graph.constants
    optimizer = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], lr=0.01)
    growing.follow(optimizer)
    for epoch in range(3):
        before = [outputs(network, inputs(7), training) for training in (False, True)]
        events = growing.step(epoch=epoch)
        if events and method not in INEXACT:
            after = [outputs(network, inputs(7), training) for training in (False, True)]
            train_error = 1e-2 if "ours" in method and spelling == "convolved" else ROUNDING
            noise = 0.1 if "noise" in method and spelling == "convolved" else 0.0
            assert relative_error(before[0], after[0]) <= ROUNDING + noise
            assert relative_error(before[1], after[1]) <= train_error + noise
            assert events[0].parity_error_eval <= ROUNDING
        for seed in range(2):
            train(network.train(), optimizer, inputs(seed))
    growing.finish()
    assert not differing(constants, untrained(network))
    fresh = built(SPELLINGS[spelling], seed=0)
    fresh.load_state_dict(network.state_dict())
    assert relative_error(outputs(network, inputs(7), False), outputs(fresh, inputs(7), False)) <= ROUNDING


def followed(net: nn.Module, x: Tensor) -> Tensor:
    """Use a buffer that the forward updates in train mode."""
    if net.training:
        net.mean.lerp_(x.detach().mean((0, 1)), 0.1)
    return added(net, x) - net.mean


@pytest.mark.parametrize("keep", [buffer, unsaved, plain])
def test_a_resumed_run_ends_with_the_constants_that_the_first_one_began_with(keep: Keep) -> None:
    def drawn(net: nn.Module, table: Tensor) -> None:
        """A random table, which constructing the network again would not reproduce."""
        keep(net, torch.randn_like(table).double())
        net.register_buffer("mean", torch.zeros(WIDTH))

    def make() -> nn.Module:
        return Tabled(drawn, followed, norm=True)

    network = built(make)
    table, first = network.table.clone(), grower(network, "net2net")
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    first.follow(optimizer)
    first.step(epoch=1)
    train(network.train(), optimizer, inputs(0))
    saved = io.BytesIO()
    torch.save({"network": network.state_dict(), "growth": first.state_dict()}, saved)
    saved.seek(0)
    content = torch.load(saved, weights_only=True)
    # Built with another seed: the saved table must win.
    again = built(make, seed=1 if keep is buffer else 0)
    second = grower(again, "net2net")
    second.load_state_dict(content["growth"])
    again.load_state_dict(content["network"])
    for run in (first, second):
        run.step(epoch=2)
        assert torch.equal(run.network.table, table)
        # A buffer that training updates is no constant: new channels copy its current values.
        assert run.network.mean.shape == (WIDTH,) and not torch.equal(run.network.mean[8:], torch.zeros(8))
    assert torch.equal(outputs(network, inputs(7), False), outputs(again, inputs(7), False))


@pytest.mark.parametrize("spelling", ["not saved", "plain"])
def test_averages_and_restored_networks_keep_constants_at_full_width(spelling: str) -> None:
    network = built(SPELLINGS[spelling])
    table, growing = network.table.clone(), grower(network, "net2net")
    average = torch.optim.swa_utils.AveragedModel(network, use_buffers=True)
    growing.follow(average)
    for epoch in range(3):
        average.update_parameters(network)
        growing.step(epoch=epoch)
    assert torch.equal(average.module.table, table)
    network = built(SPELLINGS[spelling])
    grower(network, "net2net").restore_full_width()
    assert torch.equal(network.table, table)


def test_a_constant_that_has_been_written_to_keeps_what_was_written() -> None:
    network = built(Tabled)
    growing = grower(network, "pairs")
    changed = network.table.add_(1.0).clone()
    (event,) = growing.step(epoch=1)
    assert torch.equal(network.table[:, : changed.shape[1]], changed) and event.parity_error_eval <= ROUNDING


def test_a_network_that_is_frozen_as_a_whole_has_no_constants_but_its_buffers() -> None:
    graph = trace(built(SPELLINGS["frozen"]).requires_grad_(False), inputs(0))
    assert graph.full_widths and not graph.constants


def test_channels_multiplied_with_a_frozen_vector_keep_their_width() -> None:
    network = Around(
        lambda net, x: net.c(torch.relu(net.b(x))) * (torch.relu(net.a(x)) @ net.v)[..., None],
        **{"a": [6, WIDTH], "b": [6, 8], "c": [8, 3], "v": nn.Parameter(torch.randn(WIDTH), requires_grad=False)},
    )
    graph = trace(network.double(), inputs(0))
    assert set(graph.full_widths) == {"b"}
    assert graph.fixed["a"] == "v takes these channels and is not trained"


def in_a_list(net: nn.Module, table: Tensor) -> None:
    net.tables = [table]


def also_in_a_list(net: nn.Module, table: Tensor) -> None:
    net.table, net.tables = table, [table]


def statistics(net: nn.Module, table: Tensor) -> None:
    net.mean, net.var = table[0].double(), 1.5 + table[1].double()


def updated(net: nn.Module, x: Tensor) -> Tensor:
    if net.training:
        net.table = net.table * 0.9
    return added(net, x)


def updated_in_place(net: nn.Module, x: Tensor) -> Tensor:
    if net.training:
        net.table.mul_(0.9)
    return added(net, x)


def normalised(net: nn.Module, x: Tensor) -> Tensor:
    """Batch normalisation with plain tensors as running statistics."""
    return F.batch_norm(x.transpose(1, 2), net.mean, net.var, training=net.training).transpose(1, 2)


@pytest.mark.parametrize(
    ("keep", "beside"),
    [
        (in_a_list, lambda net, x: x + net.tables[0].to(x)),
        (also_in_a_list, lambda net, x: added(net, x) + net.tables[0].to(x)),
        # Not a parameter, but it requires a gradient.
        (lambda net, table: plain(net, table.requires_grad_()), added),
        *((plain, updated), (plain, updated_in_place), (statistics, normalised)),
    ],
    ids=["in a list", "also in a list", "learned", "updated", "updated in place", "statistics"],
)
def test_plain_tensors_that_may_change_or_are_stored_twice_keep_their_channels(keep: Keep, beside: Beside) -> None:
    assert not trace(built(lambda: Tabled(keep, beside)), inputs(0)).grows("a.weight")


def test_a_cache_that_was_filled_before_the_trace_is_no_constant() -> None:
    """The forward computes its table at the current width if there is none."""

    def filled(net: nn.Module, x: Tensor) -> Tensor:
        if net.table is None or net.table.shape[0] < x.shape[1]:
            net.table = sinusoids(x.shape[1], WIDTH).to(x)
        return x + net.table

    network = built(lambda: Tabled(lambda net, _: plain(net, None), filled))
    network(inputs(0))
    full = network.table
    graph = trace(network, inputs(0))
    assert network.table is full and not graph.grows("a.weight")


@pytest.mark.parametrize("again", [copy.deepcopy, lambda network: pickle.loads(pickle.dumps(network))])
def test_copies_of_a_growing_network_have_a_plain_tensor_of_its_width(again) -> None:
    network = built(SPELLINGS["plain"])
    grower(network, "net2net").step(epoch=0)
    twin = again(network)
    assert twin.table is not network.table and torch.equal(twin.table, sinusoids()[:, :4])
    assert torch.equal(outputs(twin, inputs(7), False), outputs(network, inputs(7), False))

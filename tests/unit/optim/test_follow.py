"""An optimizer through growth events: tracked parameters, carried state, refused state, ages, resumed runs."""

import gc
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from growlab.base.errors import UserError
from growlab.grower import Grower
from growlab.growth import Net2Net, PairGrowth, ParityError, RandomGrowth, VarianceTransfer, make_seed
from growlab.optim import (
    LARS,
    SGD,
    Adam,
    AvaGrad,
    BaseRate,
    Muon,
    NormRatio,
    default_inheritance,
    follow,
    running_gradients,
    weight_regions,
)
from growlab.optim.followers import replace_parameters
from growlab.widths import Carry, trace
from tests.cases import NETWORKS, Around, Growing, graph_of, tracked, train, widths_at
from tests.unit.optim.test_around import SlowOptimizer

# `growlab.widths.resize` is the function.
replacing = sys.modules["growlab.widths.resize"]


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(32, 10), nn.ReLU(), nn.Linear(10, 3)),
    )


GRAPH = trace(network(), torch.randn(2, 3, 4, 4))


class Run(Growing):
    """A plain training loop."""

    def __init__(self, make, method, inheritance="auto", regional=True):
        super().__init__(network(), torch.randn(4, 3, 4, 4), method, graph=GRAPH, rough=False)
        self.inheritance, self.optimizer = inheritance, make(self.network.parameters())
        self.regional = regional and hasattr(self.optimizer, "set_regions")
        self.relabel()
        self.step_index = 0

    def relabel(self):
        if self.regional:
            regions = weight_regions(GRAPH, self.state.births)
            self.optimizer.set_regions({p: regions[n] for n, p in self.network.named_parameters() if n in regions})

    def follow(self, event):
        widths = event.widths_before, event.widths_after
        follow(self.optimizer, event.replaced, GRAPH, *widths, self.inheritance, event.carry)

    def grow(self):
        event = super().grow(0.75)
        self.follow(event)
        self.relabel()
        return event

    def steps(self, number):
        for _ in range(number):
            source = torch.Generator().manual_seed(self.step_index)
            x, y = torch.randn(8, 3, 4, 4, generator=source), torch.randint(3, (8,), generator=source)
            self.optimizer.zero_grad()
            F.cross_entropy(self.network(x) * self.state.output_factor, y).backward()
            self.optimizer.step()
            self.step_index += 1
        return self

    def state_of(self, name):
        return self.optimizer.state[self.network.get_parameter(name)]


def test_defaults_are_the_papers():
    weight = [nn.Parameter(torch.zeros(2, 2))]
    assert default_inheritance(SGD(weight)) == default_inheritance(torch.optim.SGD(weight)) == "reset"
    rotated = Carry(bases={"hidden.0": torch.eye(3)})
    assert default_inheritance(SGD(weight), rotated) == "inherit"
    assert default_inheritance(SGD(weight), Carry()) == "reset"
    assert default_inheritance(Adam(weight)) == default_inheritance(torch.optim.RMSprop(weight)) == "inherit"


def test_running_gradients_are_first_moments_only():
    run = Run(lambda p: Adam(p, 0.01), PairGrowth()).steps(2)
    found = running_gradients(run.optimizer)
    assert {id(p) for p in found} == {id(p) for p in run.network.parameters()}
    assert all(found[p] is run.optimizer.state[p]["exp_avg"] for p in found)
    assert running_gradients(Run(lambda p: torch.optim.SGD(p, 0.01), PairGrowth()).optimizer) == {}


@pytest.mark.parametrize("inheritance", ["reset", "zero_new", "inherit"])
def test_parameters_are_tracked_once_and_state_follows_as_asked(inheritance):
    """`zero_new` keeps old entries, `inherit` follows the method, `reset` leaves nothing."""
    name, run = "4.weight", Run(lambda p: Adam(p, 0.01, rule=NormRatio()), Net2Net(1e-3), inheritance).steps(3)
    groups = run.optimizer.param_groups
    old = {key: run.state_of(name)[key].clone() for key in ("exp_avg", "exp_avg_sq")}
    event = run.grow()
    assert run.optimizer.param_groups is groups
    assert tracked(run.optimizer) == [id(p) for p in run.network.parameters()]
    assert set(run.optimizer.state) == (set() if inheritance == "reset" else set(run.network.parameters()))
    if inheritance != "reset":
        new = run.state_of(name)
        assert new["step"] == 3
        for key, power in (("exp_avg", 1), ("exp_avg_sq", 2)):
            carried = event.carry.carried(old[key], name, GRAPH, event.widths_before, event.widths_after, power)
            if inheritance == "inherit":
                assert torch.equal(new[key], carried) and (new[key] != 0).float().mean() > 0.4
            else:
                nonzero_after, nonzero_before = (state[state != 0].sort().values for state in (new[key], old[key]))
                assert torch.equal(nonzero_after, nonzero_before)
    before = [p.detach().clone() for p in run.network.parameters()]
    run.steps(1)
    assert all(not torch.equal(a, b) for a, b in zip(before, run.network.parameters(), strict=True))


def test_ages_start_at_birth_for_zeros_and_are_inherited_with_copies():
    for method, ages in ((VarianceTransfer(noise_std=1e-3), [5, 2]), (Net2Net(noise_std=1e-3), [5, 5])):
        run = Run(lambda p: Adam(p, 0.01, rule=BaseRate()), method).steps(3)
        run.grow()
        run.steps(2)
        for name in ("4.weight", "4.bias", "1.weight"):
            assert run.optimizer.region_ages(dict(run.network.named_parameters())[name]).tolist() == ages


class Unknown(torch.optim.Optimizer):
    """Sign descent with state under names that growlab does not know."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update(count=0, wobble=torch.zeros_like(p), flag=True)
            state["count"] += 1
            state["wobble"].mul_(0.9).add_(p.grad)
            p.sub_(0.01 * state["wobble"].sign())


@pytest.mark.parametrize("inheritance", ["inherit", "zero_new"])
@pytest.mark.parametrize(
    ("make", "key", "begins"),
    [
        (lambda p: torch.optim.Rprop(p, 0.03), "step_size", 0.03),
        (lambda p: torch.optim.Rprop([{"params": list(p), "lr": 0.02}], 0.5), "step_size", 0.02),
        (lambda p: torch.optim.Adagrad(p, 0.01, initial_accumulator_value=0.1), "sum", 0.1),
        (lambda p: torch.optim.Adagrad(p, 0.01), "sum", 0.0),
    ],
)
def test_new_entries_have_the_state_that_the_optimizer_begins_with(make, key, begins, inheritance):
    run = Run(make, VarianceTransfer(), inheritance).steps(3)
    rows, columns = run.state_of("4.weight")[key].shape
    run.grow()
    state = run.state_of("4.weight")[key]
    assert state.shape[0] > rows and state.shape[1] > columns
    assert torch.equal(state[rows:], torch.full_like(state[rows:], begins))
    assert torch.equal(state[:rows, columns:], torch.full_like(state[:rows, columns:], begins))
    assert not (state[:rows, :columns] == begins).all()


def slow(inner):
    return SlowOptimizer(inner, "inner")


@pytest.mark.parametrize(
    ("make", "key", "method"),
    [
        (lambda p: torch.optim.ASGD(p, 0.05, t0=0), "ax", VarianceTransfer()),
        (lambda p: torch.optim.ASGD(p, 0.05, t0=0), "ax", VarianceTransfer(layer_multipliers=False)),
        (lambda p: slow(torch.optim.SGD(p, 0.05)), "slow", VarianceTransfer(multipliers="keep")),
        (lambda p: slow(torch.optim.SGD(p, 0.05)), "slow", PairGrowth()),
        (lambda p: slow(torch.optim.AdamW(p, 0.01)), "slow", VarianceTransfer()),
        (lambda p: slow(torch.optim.AdamW(p, 0.01)), "slow", VarianceTransfer(multipliers="keep")),
    ],
)
def test_stored_weights_of_an_optimizer_keep_their_function(make, key, method):
    torch.manual_seed(0)
    x = torch.randn(16, 5, dtype=torch.float64)
    network = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 2)).double()
    grower = Grower(network, x, method=method, trigger={0: 0.5, 1: 1.0})
    optimizer = make(network.parameters())
    grower.follow(optimizer)

    def stored_output():
        stored = {name: optimizer.state[p][key] for name, p in network.named_parameters()}
        return torch.func.functional_call(network, stored, x).detach()

    # Slow weights are copied into the network after every fourth step.
    train(network, optimizer, x, steps=22)
    trained, average = network(x).detach(), stored_output()
    assert not torch.allclose(trained, average, rtol=1e-6)
    grower.step(epoch=1)
    assert torch.allclose(network(x), trained, rtol=1e-9, atol=1e-12)
    assert torch.allclose(stored_output(), average, rtol=1e-9, atol=1e-12)
    for p in network.parameters():
        assert optimizer.state[p][key].shape == p.shape
    train(network, optimizer, x, steps=5)
    assert all(torch.isfinite(p).all() for p in network.parameters())


@pytest.mark.parametrize(
    "make",
    [
        lambda p: SGD(p, 0.01, 0.9, dampening=0.1),
        lambda p: Adam(p, 0.01, amsgrad=True),
        lambda p: AvaGrad(p, 0.01),
        lambda p: LARS(p, 0.01, 0.9),
        lambda p: Muon(p, 0.01),
        lambda p: torch.optim.NAdam(p, 0.01),
        lambda p: torch.optim.RAdam(p, 0.01),
        lambda p: torch.optim.Adamax(p, 0.01, eps=1e-30),
        lambda p: torch.optim.Adagrad(p, 0.01),
        lambda p: torch.optim.Adadelta(p, eps=1e-30),
        lambda p: torch.optim.RMSprop(p, 0.01, eps=1e-30, momentum=0.9),
        lambda p: torch.optim.RMSprop(p, 0.01, eps=1e-30, momentum=0.9, centered=True),
        lambda p: torch.optim.Rprop(p, 0.01),
    ],
)
def test_state_follows_a_scaled_gradient(make):
    """State carried by a factor after gradients g equals the state after gradients factor * g."""
    factor, found = 4.0, []
    for scale in (1.0, factor):
        weight = nn.Parameter(torch.ones(3, 2, dtype=torch.float64))
        optimizer, source = make([weight]), torch.Generator().manual_seed(0)
        for _ in range(4):
            weight.grad = scale * torch.randn(3, 2, generator=source, dtype=torch.float64)
            optimizer.step()
        follow(optimizer, {}, graph_of("mlp"), {}, {}, "inherit", Carry(every=factor / scale))
        found.append((optimizer.state[weight], running_gradients(optimizer).get(weight)))
    (followed, mean), (expected, other) = found
    for key, value in expected.items():
        torch.testing.assert_close(followed[key], value, rtol=1e-9, atol=0, msg=key)
    assert (mean is None) == (other is None)
    assert mean is None or torch.allclose(mean, other, rtol=1e-9, atol=0)


def test_state_of_unknown_meaning_keeps_old_entries_as_they_are():
    run = Run(Unknown, Net2Net(), "inherit").steps(3)
    old = run.state_of("6.weight")["wobble"].clone()
    run.grow()
    new = run.state_of("6.weight")["wobble"]
    assert torch.equal(new[:, : old.shape[1]], old) and not new[:, old.shape[1] :].any()
    assert run.state_of("6.weight")["count"] == 3 and run.state_of("6.weight")["flag"] is True


def test_a_scaled_gradient_leaves_numbers_and_state_of_unknown_meaning_alone():
    weight = nn.Parameter(torch.ones(3, 2))
    optimizer = Unknown([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    before = {**optimizer.state[weight], "wobble": optimizer.state[weight]["wobble"].clone()}
    follow(optimizer, {}, graph_of("mlp"), {}, {}, "inherit", Carry(every=4.0))
    after = optimizer.state[weight]
    assert (after["count"], after["flag"]) == (before["count"], before["flag"]) == (1, True)
    assert torch.equal(after["wobble"], before["wobble"])


@pytest.mark.parametrize("rows", [3, 5])
def test_state_that_fits_stays_with_a_replaced_parameter(rows):
    old, other = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(4))
    new = nn.Parameter(torch.zeros(rows, 2))
    optimizer = Unknown([old, other])
    for parameter in (old, other):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = dict(optimizer.state)
    replace_parameters(optimizer, {id(old): new})
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(new), id(other)]
    expected = {new, other} if rows == 3 else {other}
    assert set(optimizer.state) == expected
    assert optimizer.state[other] is states[other]
    assert rows != 3 or optimizer.state[new] is states[old]


def test_follow_rejects_unknown_inheritance():
    with pytest.raises(ValueError, match="auto, inherit, reset, zero_new or reset_new"):
        Run(SGD, PairGrowth(), "keep").grow()


def test_new_columns_of_embeddings_and_tables_take_steps_as_long_as_those_of_weights():
    """A first step of Adam has length lr if bias correction uses the entries' own age, and 3.2 lr at a great age."""
    torch.manual_seed(0)
    made = Around(
        lambda net, x: net.head(torch.relu(net.hidden(torch.tanh(net.words(x) + net.positions) + net.shift)).mean(1)),
        # An embedding, a table of positions and a bare parameter whose third axis grows.
        **{"words": nn.Embedding(5, 8), "positions": nn.Parameter(0.1 * torch.randn(1, 4, 8))},
        **{"shift": nn.Parameter(0.1 * torch.randn(4, 8)), "hidden": [8, 12], "head": [12, 3]},
    )
    x, y = torch.arange(20).view(5, 4) % 5, torch.tensor([0, 1, 2, 0, 1])
    run = Growing(made, x, RandomGrowth(), rough=False)
    optimizer = Adam(made.parameters(), lr=0.01, rule=BaseRate())

    def step():
        regions = weight_regions(run.graph, run.state.births)
        optimizer.set_regions({p: regions[n] for n, p in made.named_parameters() if n in regions})
        train(made, optimizer, x, y)

    for _ in range(20):
        step()
    event = run.grow()
    follow(optimizer, event.replaced, run.graph, event.widths_before, event.widths_after, carry=event.carry)
    before = {name: p.detach().clone() for name, p in made.named_parameters()}
    step()
    for name in ("words.weight", "positions", "shift"):
        moved = (made.get_parameter(name) - before[name])[..., 4:].abs()
        torch.testing.assert_close(moved, torch.full_like(moved, 0.01), rtol=1e-2, atol=0)
    norms = Adam(made.parameters(), rule=NormRatio())
    norms.set_regions(optimizer._regions)
    rated = {name for name, p in made.named_parameters() if norms.factors(p) is not None}
    assert rated == {"hidden.weight", "head.weight"}


@pytest.mark.parametrize("name", NETWORKS)
def test_every_tensor_that_grows_has_regions(name):
    """The stage of an element is the latest of its channels' stages."""
    graph, seed = graph_of(name), widths_at(graph_of(name), 0.4)
    births = {
        group: [0] * seed[group] + [1 + c % 2 for c in range(found.full_width - seed[group])]
        for group, found in graph.groups.items()
    }
    regions = weight_regions(graph, births)
    by_group = {group: torch.tensor(stages) for group, stages in births.items()}
    for tensor, axes in graph.axes.items():
        if not graph.grows(tensor):
            continue
        expected = torch.zeros(graph.shape(tensor, graph.full_widths), dtype=torch.long)
        for dim, axis in enumerate(axes):
            own = axis.spread(by_group, graph.full_widths, fixed=0).long()
            expected = torch.maximum(expected, own.view(-1, *[1] * (expected.dim() - dim - 1)))
        found = regions[tensor]
        assert found.fits(expected)
        assert torch.equal(found.spread(found.stages, expected.dim()).expand_as(expected), expected), tensor
        inner = expected.numel() // int(found.counts.sum())
        assert [inner * n for n in found.counts.tolist()] == [int((expected == k).sum()) for k in found.stages]


class TestForgotten:
    """An optimizer that steps parameters which are no longer in the network."""

    def run(self, make, regional: bool = False) -> Run:
        run = Run(make, PairGrowth(), regional=regional).steps(1)
        run.event = Growing.grow(run, 0.75)
        return run

    @pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, SGD, Muon], ids=lambda o: o.__module__)
    def test_follow(self, make, monkeypatch):
        # Networks of other tests may still wait for an optimizer.
        monkeypatch.setattr(replacing, "_awaited", {})
        replacing._stop_listening()
        run = self.run(lambda p: make(p, lr=0.1))
        for _ in range(2):
            with pytest.raises(
                UserError, match=rf"{make.__name__} steps \S+ and \d+ other .* call growlab.optim.follow"
            ):
                run.steps(1)
        run.follow(run.event)
        assert replacing._hook is not None
        run.steps(1)
        assert replacing._hook is None  # Steps cost no more than before.

    def test_follow_of_one_optimizer_in_two(self):
        run = self.run(lambda p: torch.optim.SGD(list(p)[:2], lr=0.1))
        run.follow(run.event)
        other = torch.optim.Adam([old for old, _ in run.event.replaced.values() if isinstance(old, nn.Parameter)])
        run.steps(1)
        with pytest.raises(UserError, match="Adam steps"):
            other.step()

    def test_set_regions(self):
        run = self.run(lambda p: SGD(p, 0.1, rule=NormRatio()), regional=True)
        run.follow(run.event)
        with pytest.raises(UserError, match=r"SGD has regions of .* call optimizer.set_regions"):
            run.steps(1)
        run.relabel()
        run.steps(1)

    def test_deleted_networks_leave_no_entries(self, monkeypatch):
        for name in ("_awaited", "_replaced"):
            monkeypatch.setattr(replacing, name, {})
        run = self.run(lambda p: torch.optim.SGD(p, lr=0.1))
        assert len(replacing._awaited) == len(run.event.replaced) - 2  # Without running statistics.
        assert replacing._awaited.keys() & replacing._replaced.keys() == set()
        del run
        gc.collect()
        assert replacing._awaited == replacing._replaced == {}

    def test_make_seed(self):
        made = network()
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        make_seed(made, GRAPH, PairGrowth(), widths_at(GRAPH, 0.5), seed=0)
        with pytest.raises(UserError, match=r"make the optimizer after make_seed\(\)"):
            optimizer.step()

    def test_an_event_that_was_undone_has_replaced_nothing(self):
        class Wrong(PairGrowth):
            def expand(self, context, name, old):
                return 2 * super().expand(context, name, old)

        run = Run(lambda p: torch.optim.SGD(p, lr=0.1), PairGrowth()).steps(1)
        run.method = Wrong()
        with pytest.raises(ParityError):
            run.grow()
        run.steps(1)

    def test_other_networks_and_their_optimizers_are_unchanged(self):
        run, other = (Run(lambda p: torch.optim.SGD(p, lr=0.1), PairGrowth()) for _ in "ab")
        run.grow()
        other.steps(1)
        run.steps(1)


def test_gradients_that_a_cuda_graph_has_overwritten_are_gone_after_an_event() -> None:
    net, x = network(), torch.randn(2, 3, 4, 4)
    grower = Grower(net, x, method=PairGrowth(), trigger={0: 0.5, 1: 1.0}, verbose=False)
    grower.follow(torch.optim.SGD(net.parameters(), lr=0.1))
    grower.step(epoch=0)
    net(x).sum().backward()
    lost, kept = net[0].weight.grad, net[4].weight.grad.clone()
    # torch does this to the outputs of a CUDA graph when the graph runs again.
    torch._C._set_storage_access_error_msg(lost, "accessing tensor output of CUDAGraphs that has been overwritten")
    grower.step(epoch=1)
    assert net[0].weight.grad is None
    assert net[4].weight.grad.shape == net[4].weight.shape != kept.shape and net[4].weight.grad.any()

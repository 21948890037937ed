"""Auxiliary passes: results, side effects and costs; surrogates of activations and their derivatives."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

from growlab.base.errors import UserError
from growlab.growth import GradMax, Measurement, Tiny, measurement
from growlab.growth.fans import ChannelView, TensorDim, group_tensors
from growlab.growth.measurement import IdentityNorms, right_derivatives, smooth, twice_differentiable
from growlab.widths import tensors_of
from tests.cases import NETWORKS, Around, differing, graph_of
from tests.unit.growth.measured import started


def network() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(64, 3))
    )


def test_gradients_are_means_over_batches_and_the_network_stays_as_it_is() -> None:
    run = started(network(), (2, 6, 6), GradMax(), part=1.0)
    run.network[0].requires_grad_(False)
    before, modes = copy.deepcopy(run.network.state_dict()), [m.training for m in run.network.modules()]
    parameters = dict(run.network.named_parameters())
    found = run.data().gradients(run.tensors(), ["0.weight"])
    assert not differing(before, run.network.state_dict())
    assert all(parameters[name] is parameter for name, parameter in run.network.named_parameters())
    assert [m.training for m in run.network.modules()] == modes
    assert all(p.grad is None for p in run.network.parameters()) and not run.network[0].weight.requires_grad
    run.network[0].requires_grad_(True)
    run.network[3] = nn.Identity()
    (expected,) = torch.autograd.grad(run.loss(), run.network[0].weight)
    torch.testing.assert_close(found["0.weight"], expected)
    assert float(found[""]) == pytest.approx(float(run.loss().detach()))


class Remembering(nn.Module):
    """Its output depends on what earlier forwards left in a buffer, an attribute, a list and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.log = 0, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.log.append(self.calls)
        with torch.no_grad():
            self.seen += len(self.log)
            self.last.bias.mul_(1.5)
        return self.last(self.first(x).tanh()) * (1 + self.seen + self.calls)


@pytest.mark.parametrize("num_batches", [1, 2])
def test_runs_of_a_session_start_from_the_same_state_and_restore_it(num_batches: int) -> None:
    run = started(Remembering(), (4,), Tiny(), num_batches=num_batches)
    before, parameters = copy.deepcopy(run.network.state_dict()), dict(run.network.named_parameters())
    data, old = run.data(), run.tensors()
    alone = data.loss(old)
    with data.session():
        found = [data.loss(old), float(data.gradients(old, ["first.weight"])[""]), data.loss(old)]
    assert found == [alone] * 3
    assert (run.network.calls, run.network.log) == (0, [])
    assert not differing(before, run.network.state_dict())
    assert all(parameters[name] is parameter for name, parameter in run.network.named_parameters())
    # A training step in between is not undone by the next run.
    with torch.no_grad():
        run.network.last.weight.add_(1)
    data.loss(run.tensors())
    torch.testing.assert_close(run.network.last.weight, before["last.weight"] + 1)


def test_an_event_s_runs_over_one_batch_share_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    run = started(Remembering(), (4,), Tiny(amplitudes=[1.0, 0.5, 0.1]))
    made, plain = [], measurement.Snapshot
    monkeypatch.setattr(measurement, "Snapshot", lambda network: made.append(1) or plain(network))
    monkeypatch.setattr(
        Measurement, "run", (lambda run: lambda *a, **k: made.append(0) or run(*a, **k))(Measurement.run)
    )
    run.grow({"first": 5})
    assert made.count(0) >= 4 and made.count(1) == 1


def test_unused_parameters_have_a_gradient_of_zero() -> None:
    spare = Around(lambda net, x: net.last(net.first(x)), first=[4, 5], last=[5, 3], spare=[2, 2])
    run = started(spare, (4,), GradMax(), part=1.0)
    found = run.data().gradients(run.tensors(), ["first.weight", "spare.weight"])
    assert found["first.weight"].all()
    assert torch.equal(found["spare.weight"], torch.zeros(2, 2, dtype=torch.float64))


def test_products_are_those_of_the_hessian() -> None:
    run = started(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), (4,), GradMax(), part=1.0)
    direction = torch.randn(5, 4, dtype=torch.float64)
    found = run.data().products(run.tensors(), {"0.weight": direction}, ["0.weight"])

    def loss(weight: torch.Tensor) -> torch.Tensor:
        z = [
            F.cross_entropy(torch.func.functional_call(run.network, {"0.weight": weight}, (x,)), y)
            for x, y in run.batches
        ]
        return torch.stack(z).mean()

    hessian = torch.autograd.functional.hessian(loss, run.network[0].weight.detach())
    torch.testing.assert_close(found["0.weight"], torch.einsum("abcd,cd->ab", hessian, direction))


def test_flops_are_torchs_and_its_table_of_formulas_is_where_it_is_read() -> None:
    assert isinstance(flop_counter.flop_registry, dict)
    run = started(network(), (2, 6, 6), GradMax(), part=1.0, num_batches=1)
    data = run.data()
    names = [name for name, _ in run.network.named_parameters()]
    data.gradients({}, names)
    (x, y), counter = run.batches[0], FlopCounterMode(display=False)
    run.network.train()
    with counter:
        torch.autograd.grad(F.cross_entropy(run.network(x), y), list(run.network.parameters()))
    assert data.cost.flops == counter.get_total_flops() > 0
    assert data.cost.samples == len(x) and data.cost.held_bytes >= x.nbytes


def test_a_loss_that_is_not_finite_raises_an_error() -> None:
    run = started(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), (4,), GradMax())
    run.batches[1][0][0] = float("nan")
    with pytest.raises(UserError, match="NaN or infinite; lower the learning rate"):
        run.grow({"0": 4})


def test_missing_second_derivatives_raise_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    network = nn.Sequential(nn.Linear(4, 5), nn.SyncBatchNorm(5), nn.ReLU(), nn.Linear(5, 3))
    run = started(network, (4,), GradMax(), num_batches=1)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    with pytest.raises(UserError, match=r"which SyncBatchNorm \(1\) does not support: leave out sync_batchnorm=True"):
        run.data().products({}, {}, [])


@pytest.mark.parametrize("name", ["resnet A", "flatten", "dense", "shared", "decoder"])
def test_reading_back_what_was_written(name: str) -> None:
    """Entries of a channel, over flattening, concatenation, transposition and shared weights."""
    case, graph = NETWORKS[name], graph_of(name)
    tensors = tensors_of(case.make(), graph)
    widths = graph.full_widths
    among = {group: max(1, width - 2) for group, width in widths.items()}
    view = ChannelView(graph, widths, among)
    for group, width in widths.items():
        fans = group_tensors(graph, group)
        channels = torch.tensor([0, width - 1])
        for slots in (fans.incoming, fans.outgoing):
            values = torch.randn(2, view.size(slots, group), dtype=torch.float64)
            written = dict(tensors)
            if len({slot.name for slot in slots}) == len(slots):
                view.write(written, slots, group, channels, values)
                assert torch.equal(view.read(written, slots, group, channels), values)
    assert group_tensors(graph, next(iter(widths))).incoming[0] == TensorDim(graph.layers[0].weight, 0)


def test_passes_leave_nothing_behind() -> None:
    """Also with a retained graph, whose reference cycles Python's garbage collector cannot find."""
    run = started(network(), (2, 6, 6), GradMax(), part=1.0)
    alive = []

    def visit(one):
        for name in ("0", "2"):
            node = one.seen[name].output.grad_fn
            node.metadata["alive"] = alive_one = torch.nn.Module()
            alive.append(weakref.ref(alive_one))
        torch.autograd.grad(one.loss, one.seen["2"].output, retain_graph=True)
        return {}

    run.data().run(run.tensors(), visit, watched=["0", "2"])
    gc.collect()
    assert len(alive) == 4 and not any(one() for one in alive)


BENT = [
    *(nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU6(), nn.LeakyReLU(0.2), nn.Hardtanh(), nn.Hardsigmoid()),
    *(nn.Hardswish(), F.relu, F.relu6, torch.relu, Tensor.relu),
]


def points() -> Tensor:
    return torch.arange(-160.0, 161.0, dtype=torch.float64) / 20


@pytest.mark.parametrize("activation", BENT)
def test_smooth_is_close_and_has_a_second_derivative(activation) -> None:
    expected = activation(points())
    x = points().requires_grad_()
    with smooth(20.0):
        y = activation(x + 0.0)
    # softplus is off by log(2) / beta at most, at each of two corners; hardswish multiplies it by up to 3.
    assert float((y - expected).detach().abs().max()) < 0.11
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert float(second.abs().max()) > 0.5


@pytest.mark.parametrize("activation", [*BENT, F.leaky_relu, F.hardtanh])
def test_smooth_is_the_activation_itself_away_from_its_corners(activation) -> None:
    """With arguments that are given and with torch's defaults: softplus is off by exp(-beta |x|) / beta."""
    corners = torch.tensor([-3.0, -1.0, 0.0, 1.0, 3.0, 6.0], dtype=torch.float64)
    x = points()
    x = x[(x[:, None] - corners).abs().amin(1) > 0.4]
    with smooth(50.0):
        y = activation(x + 0.0)
    torch.testing.assert_close(y, activation(x + 0.0))


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.ReLU6(), nn.LeakyReLU(0.2), F.relu6, Tensor.relu])
def test_right_derivatives_are_one_at_zero_and_nothing_else_changes(activation) -> None:
    x = points().requires_grad_()
    plain = activation(x)
    (expected,) = torch.autograd.grad(plain.sum(), x)
    with right_derivatives():
        y = activation(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y, plain)
    assert torch.equal(slope, torch.where(x == 0, 1.0, expected))


def test_a_hard_sigmoid_is_itself_and_has_a_second_derivative() -> None:
    x = points().requires_grad_()
    with twice_differentiable():
        y = F.hardsigmoid(x)
    torch.testing.assert_close(y, F.hardsigmoid(x))
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    inside, corners = x.abs() < 3, x.abs() == 3
    torch.testing.assert_close(second[~corners], torch.where(inside, 2 / 36, 0.0).double()[~corners])


def test_new_channels_pass_norms_that_are_modules_and_norms_that_are_functions() -> None:
    x, norm = torch.randn(6, 4, 3, dtype=torch.float64), nn.BatchNorm1d(4).double()
    weight, bias, mean, var = norm.weight, norm.bias, norm.running_mean, norm.running_var
    new, plain = torch.tensor([False, True, False, True]), norm(x).detach()
    with IdentityNorms(lambda mean, weight: new if weight is norm.weight else None):
        found = [
            norm(x),
            F.batch_norm(x, mean, var, weight, bias, training=True),
            F.batch_norm(x, mean, var, weight=weight, bias=bias, training=True),
        ]
        torch.testing.assert_close(F.batch_norm(x, mean, var, training=True), plain)
    for y in found:
        assert torch.equal(y[:, new], x[:, new])
        torch.testing.assert_close(y[:, ~new], plain[:, ~new])


def test_second_derivatives_through_attention_and_hard_sigmoids() -> None:
    def attentive(net: Any, x: Tensor) -> Tensor:
        x = x.view(-1, 1, 2, 4)
        x = F.scaled_dot_product_attention(x, x, x).mean((1, 2))
        return net.last(net.first(x).tanh()) * F.hardsigmoid(x[:, :1])

    run = started(Around(attentive, first=[4, 8], last=[8, 3]), (8,), GradMax(), part=1.0)
    direction, data, tensors = torch.randn(8, 4, dtype=torch.float64), run.data(), run.tensors()
    found = data.products(tensors, {"first.weight": direction}, ["first.weight"])["first.weight"]
    step, weight = 1e-5, run.network.first.weight
    sides = [
        data.gradients({**tensors, "first.weight": weight.detach() + side * direction}, ["first.weight"])
        for side in (step, -step)
    ]
    expected = (sides[0]["first.weight"] - sides[1]["first.weight"]) / (2 * step)
    torch.testing.assert_close(found, expected, atol=1e-8, rtol=1e-5)


def test_an_operation_without_a_second_derivative_is_named() -> None:
    network = Around(lambda net, x: net.last(torch.ops.aten.hardsigmoid(net.first(x))), first=[4, 8], last=[8, 3])
    run = started(network, (4,), GradMax(), part=1.0)
    direction = torch.randn(8, 4, dtype=torch.float64)
    with pytest.raises(UserError, match="which torch does not implement for hardsigmoid_backward; choose another"):
        run.data().products(run.tensors(), {"first.weight": direction}, ["first.weight"])

"""TINY: new neurons are what least squares says (Verbockhaven et al. 2024, Propositions 3.1 and 3.2)."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab.base.errors import UserError
from growlab.growth import GrowthContext, Measurement, Tiny, grow
from growlab.growth.expressivity import bottleneck, moments
from growlab.growth.fans import group_tensors
from growlab.growth.methods.tiny import best_neurons, solved
from growlab.widths import tensors_of
from tests.cases import Around
from tests.unit.growth.measured import Started, started
from tests.unit.growth.test_splitting import Residual


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))


def conv() -> nn.Sequential:
    layers = nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 5, 1), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(20, 3))


def normed(norm: nn.Module | None = None) -> nn.Sequential:
    layers = nn.Conv2d(2, 6, 3, padding=1, bias=False), norm or nn.BatchNorm2d(6), nn.ReLU(inplace=True)
    return nn.Sequential(*layers, nn.Conv2d(6, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def measured(run: Started, group: str) -> tuple[Tensor, Tensor, Tensor]:
    """S, dW and N as the method measures them."""
    widths = run.state.widths
    context = GrowthContext(run.graph, tensors_of(run.network, run.graph), widths, widths, 5, 1)
    data = Measurement(run.network, run.graph, run.batches, F.cross_entropy)
    groups, modules = [group_tensors(run.graph, group)], dict(run.network.named_modules())
    found = moments(context, data, groups, modules)
    update = solved(found[f"square {group}"], found[f"goal {group}"])
    return (
        found[f"input {group}"],
        update,
        bottleneck(run.method, context, data, groups, {group: update}, modules)[group],
    )


def with_one(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones(*x.shape[:-1], 1, dtype=x.dtype)], -1)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_best_neurons_are_least_squares_of_their_rank(count: int) -> None:
    source = torch.Generator().manual_seed(0)
    h = torch.randn(200, 5, generator=source, dtype=torch.float64) @ torch.diag(torch.arange(1.0, 6.0).double())
    v = torch.randn(200, 4, generator=source, dtype=torch.float64) + h[:, :4] * torch.tensor([1.0, 0.5, 0.1, 0.0])
    alpha, omega, _ = best_neurons(h.T @ h / 200, h.T @ v / 200, count)
    solution = torch.linalg.lstsq(h, v).solution
    if count == 4:
        torch.testing.assert_close(alpha.T @ omega, solution)
    # Reduced-rank regression (Eckart and Young on what least squares predicts).
    left, values, right = torch.linalg.svd(h @ solution, full_matrices=False)
    predicted = left[:, :count] * values[:count] @ right[:count]
    torch.testing.assert_close(h @ alpha.T @ omega, predicted)
    # The sign of each is no matter of rounding: it follows the numbers into another order.
    order = torch.tensor([3, 0, 4, 1, 2])
    moved, same, _ = best_neurons((h.T @ h / 200)[order][:, order], (h.T @ v / 200)[order], count)
    torch.testing.assert_close(moved, alpha[:, order])
    torch.testing.assert_close(same, omega)


@pytest.mark.parametrize("ridge", [0.0, 1e-9, 0.1, 1.0])
def test_a_ridge_is_that_of_least_squares(ridge: float) -> None:
    """Also where the moments are singular without it, and where it is too small to help."""
    source = torch.Generator().manual_seed(0)
    h = torch.randn(50, 5, generator=source, dtype=torch.float64)
    h[:, 4] = h[:, 3]
    v = torch.randn(50, 3, generator=source, dtype=torch.float64)
    square, product = h.T @ h / 50, h.T @ v / 50
    rows = (ridge * square.diagonal().mean() * 50) ** 0.5 * torch.eye(5, dtype=torch.float64)
    stacked, goal = torch.cat([h, rows]), torch.cat([v, torch.zeros(5, 3, dtype=torch.float64)])
    best = torch.linalg.pinv(stacked, rtol=1e-4) @ goal
    torch.testing.assert_close(solved(square, product, ridge), best)
    alpha, omega, _ = best_neurons(square, product, 3, ridge)
    torch.testing.assert_close(alpha.T @ omega, best)


def test_moments_are_those_of_least_squares() -> None:
    run = started(mlp(), (5,), Tiny())
    reads, inner, goals = [], [], []
    for x, y in run.batches:
        b = run.network[:4](x)
        z = run.network[4](b)
        (slope,) = torch.autograd.grad(F.cross_entropy(z, y), z)
        reads.append(with_one(run.network[:2](x)).detach())
        inner.append(with_one(b).detach())
        goals.append(-len(x) * slope)
    h, b, v = torch.cat(reads), torch.cat(inner), torch.cat(goals)
    best = torch.linalg.lstsq(b, v).solution
    square, update, product = measured(run, "2")
    torch.testing.assert_close(update, best)
    torch.testing.assert_close(square, h.T @ h / len(h))
    torch.testing.assert_close(product, h.T @ (v - b @ best) / len(h))


def test_convolutions_whose_consumer_is_1x1_too() -> None:
    run = started(conv(), (2, 4, 4), Tiny())
    reads, inner, goals = [], [], []
    for x, y in run.batches:
        b = run.network[:2](x)
        z = run.network[2](b)
        (slope,) = torch.autograd.grad(F.cross_entropy(run.network[3:](z), y), z)
        reads.append(with_one(F.unfold(x, 3, padding=1).mT).flatten(0, 1))
        inner.append(with_one(b.flatten(2).mT).flatten(0, 1).detach())
        goals.append(-len(x) * slope.flatten(2).mT.flatten(0, 1))
    h, b, v = torch.cat(reads), torch.cat(inner), torch.cat(goals)
    samples = sum(len(x) for x, _ in run.batches)
    best = torch.linalg.lstsq(b, v).solution
    square, update, product = measured(run, "0")
    torch.testing.assert_close(update, best)
    torch.testing.assert_close(square, h.T @ h / samples)
    torch.testing.assert_close(product, h.T @ (v - b @ best) / samples)


@pytest.mark.parametrize("pool", [1, 2])
def test_a_position_counts_as_often_as_it_is_read(pool: int) -> None:
    """Patches laid out as channels, and unfolded as the consumer reads them; pooled ones all count."""
    reader = nn.Conv2d(4, 3, 3, stride=2, padding=1)
    layers = nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.AvgPool2d(pool), reader, nn.AdaptiveAvgPool2d(1)
    run = started(nn.Sequential(*layers, nn.Flatten()), (2, 8, 8), Tiny())
    square, *_ = measured(run, "0")
    x = torch.cat([x for x, _ in run.batches])
    patches = with_one(F.unfold(x, 3, padding=1).mT).mT.unflatten(2, (8, 8))
    expected = torch.zeros_like(square)
    for row in range(pool):
        for column in range(pool):
            part = patches[:, :, row::pool, column::pool]
            read = F.unfold(part, 3, stride=2, padding=1).unflatten(1, (-1, 9)).permute(0, 2, 3, 1).flatten(0, 2)
            expected += read.T @ read / len(x)
    torch.testing.assert_close(square, expected)


@pytest.mark.parametrize(("build", "shape"), [(mlp, (5,)), (conv, (2, 4, 4)), (normed, (2, 6, 6))])
def test_the_loss_falls_as_the_report_says(build, shape: tuple[int, ...]) -> None:
    run = started(build(), shape, Tiny(update_old=True), num_batches=1)
    before = float(run.loss().detach())
    event, _ = run.grow({group: width + 1 for group, width in run.state.widths.items()})
    assert event.report["loss_before"] == pytest.approx(before)
    assert event.report["loss_after"] == pytest.approx(float(run.loss().detach()), rel=1e-6)
    assert event.report["loss_after"] < before
    assert event.parity_tolerance_eval is None


def test_a_small_amplitude_goes_downhill_at_the_rate_that_the_moments_say() -> None:
    """New neurons alone: dL = -gamma alpha^T E[h v^T] omega."""
    gamma = 1e-6
    run = started(mlp(), (5,), Tiny(update_old=False, amplitudes=[gamma]), num_batches=1)
    before, slope = float(run.loss().detach()), torch.zeros(())
    for x, y in run.batches:
        z = run.network[4](run.network[:4](x))
        (gradient,) = torch.autograd.grad(F.cross_entropy(z, y), z)
        slope = slope + with_one(run.network[:2](x)).detach().T @ gradient / len(run.batches)
    run.grow({"2": 5})
    layer = run.network[2]
    alpha = torch.cat([layer.weight[3:], layer.bias[3:, None]], 1).detach()
    predicted = float((alpha @ slope * run.network[4].weight[:, 3:].detach().T).sum())
    assert predicted < 0
    assert float(run.loss().detach()) - before == pytest.approx(predicted, rel=1e-3)


def test_a_norm_lets_new_channels_pass_on_the_batches() -> None:
    run = started(normed(), (2, 6, 6), Tiny(amplitudes=[1.0]), num_batches=1)
    run.grow({"0": 5})
    x = run.batches[0][0]
    # Eval first: a forward in train mode moves the statistics.
    for training in (False, True):
        run.network.train(training)
        before = run.network[0](x)
        torch.testing.assert_close(run.network[1](before)[:, 3:], before[:, 3:])


def test_an_instance_norm_lets_new_channels_pass_by_the_means_over_the_samples() -> None:
    norm = nn.InstanceNorm2d(6, affine=True, track_running_stats=True)
    run = started(normed(norm), (2, 6, 6), Tiny(amplitudes=[1.0]), num_batches=1)
    run.grow({"0": 5})
    before = run.network[0](run.batches[0][0])
    torch.testing.assert_close(run.network[1].eval()(before)[:, 3:], before[:, 3:])
    before = before[:, 3:]
    weight, bias = run.network[1].weight[3:], run.network[1].bias[3:]
    torch.testing.assert_close(weight**2, before.var((2, 3), correction=0).mean(0) + norm.eps)
    torch.testing.assert_close(bias, before.mean((0, 2, 3)))


@pytest.mark.parametrize(
    "make",
    [
        lambda eps: nn.BatchNorm2d(6, eps=eps),
        lambda eps: nn.InstanceNorm2d(6, eps=eps, affine=True),
        lambda eps: nn.InstanceNorm2d(6, eps=eps, track_running_stats=True),
        lambda eps: nn.GroupNorm(6, 6, eps=eps),
    ],
)
def test_measurements_do_not_depend_on_the_eps_of_norms(make) -> None:
    products = [measured(started(normed(make(eps)), (2, 6, 6), Tiny()), "0")[2] for eps in (1e-6, 1e-9)]
    torch.testing.assert_close(*products, rtol=1e-3, atol=1e-6)


def test_an_instance_norm_that_reads_something_unknown_is_refused() -> None:
    """It is called by a module which computes something before it."""
    inside = Around(
        lambda net, x: F.instance_norm(x * net.scale, weight=net.weight),
        **{"scale": nn.Parameter(torch.ones(6, 1, 1)), "weight": nn.Parameter(torch.ones(6))},
    )
    with pytest.raises(UserError, match="1 normalises each sample, and is no module of torch"):
        started(normed(inside), (2, 6, 6), Tiny()).grow({"0": 5})


def test_shared_channels_are_refused_and_may_grow_by_pairs() -> None:
    run = started(Residual(), (2, 5, 5), Tiny())
    widths = {group: width + 1 for group, width in run.state.widths.items()}
    told = "Tiny cannot grow stem: its channels are put out by stem, back, not one layer; set fallback='pairs'"
    with pytest.raises(UserError, match=told):
        run.grow(widths)
    run.method = Tiny(fallback="pairs")
    event, _ = run.grow(widths)
    assert set(event.report["grown_by_pairs"]) == {"stem"}
    assert event.report["loss_after"] <= event.report["loss_before"]


@pytest.mark.parametrize(
    ("build", "shape", "update_old", "seed"),
    [
        *((mlp, (5,), False, 0), (mlp, (5,), True, 1), (conv, (2, 4, 4), True, 0)),
        *((conv, (2, 4, 4), False, 2), (normed, (2, 6, 6), False, 1), (normed, (2, 6, 6), True, 2)),
    ],
)
def test_the_loss_on_batches_that_are_held_out_never_rises(
    build, shape: tuple[int, ...], update_old: bool, seed: int
) -> None:
    """Targets are drawn: what helps on one batch may hurt on the next."""
    run = started(build(), shape, Tiny(update_old=update_old, amplitudes=[64.0, 1.0, 0.01]), num_batches=5)
    source = torch.Generator().manual_seed(seed)
    run.batches[:] = [(x, torch.randint(3, (len(x),), generator=source)) for x, _ in run.batches]
    every, run.batches[:] = list(run.batches), run.batches[3:]
    before = float(run.loss().detach())
    run.batches[:] = every
    event, _ = run.grow({group: width + 2 for group, width in run.state.widths.items()})
    run.batches[:] = every[3:]
    assert event.report["loss_before"] == pytest.approx(before)
    assert event.report["loss_after"] == pytest.approx(float(run.loss().detach()), rel=1e-6)
    assert event.report["loss_after"] <= event.report["loss_before"]


def test_the_amplitude_of_the_lowest_loss_is_found_from_the_largest_down() -> None:
    amplitudes = [0.01, 0.1, 1.0, 10.0, 100.0, 1000.0]
    losses = {}
    for amplitude in amplitudes:
        event, _ = started(mlp(), (5,), Tiny(amplitudes=[amplitude]), num_batches=1).grow({"2": 5})
        losses[amplitude] = event.report["loss_after"]
    event, _ = started(mlp(), (5,), Tiny(amplitudes=amplitudes), num_batches=1).grow({"2": 5})
    assert event.report["amplitude"] == min(losses, key=lambda one: losses[one])
    assert event.report["loss_after"] == pytest.approx(min(losses.values()))


def opposed(z: Tensor, y: Tensor) -> Tensor:
    """A loss whose sign is that of the targets, so that what lowers one batch's raises the other's."""
    return z.square().sum(1).mean() * y.to(z).mean()


@pytest.mark.parametrize("build", [mlp, lambda: nn.Sequential(*mlp()[:3], nn.BatchNorm1d(6), *mlp()[3:])])
def test_if_no_amplitude_helps_the_function_stays_and_new_neurons_learn(build) -> None:
    run = started(build(), (5,), Tiny(update_old=True))
    run.batches = [(x, torch.full((len(x),), sign)) for (x, _), sign in zip(run.batches, (1, -1), strict=True)]
    run.batches[1] = (run.batches[0][0], run.batches[1][1])
    widths = dict(run.state.widths)
    data = Measurement(run.network, run.graph, run.batches, opposed)
    grown = {group: width + 2 for group, width in widths.items()}
    event = grow(run.network, run.graph, run.method, run.state, grown, 5, (run.batches[0][0],), data=data)
    assert event.report["amplitude"] == 0.0
    assert event.report["loss_after"] == event.report["loss_before"]
    assert max(event.parity_error_eval, event.parity_error_train) < 1e-12
    last = run.network[-1].weight
    assert not last[:, widths["2"] :].any()
    (slope,) = torch.autograd.grad(opposed(run.network(run.batches[0][0]), run.batches[0][1]), last)
    assert slope[:, widths["2"] :].norm(dim=0).min() > 1e-4


def test_more_neurons_than_the_next_layer_asks_for_learn_too() -> None:
    """Three outputs ask for three of ten neurons."""
    network = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    run = started(network, (5,), Tiny(), num_batches=1, size=100)
    old = run.state.widths["0"]
    event, _ = run.grow({"0": old + 7})
    assert event.report["amplitude"] > 0
    rows, columns = run.network[0].weight[old:], run.network[2].weight[:, old:]
    silent = (columns == 0).all(0)
    assert 4 <= int(silent.sum()) < 7
    assert rows.norm(dim=1)[silent].min() > 0.1
    (slope,) = torch.autograd.grad(run.loss(), run.network[2].weight)
    assert slope[:, old:].norm(dim=0).min() > 1e-4


@pytest.mark.parametrize("kind", ["twins", "tiny", "constant"])
@pytest.mark.parametrize("update_old", [False, True])
def test_a_singular_second_moment_gives_bounded_weights(kind: str, update_old: bool) -> None:
    """Inputs of the growing layer hardly differ: twins, channels of length 1e-5, or nothing but a constant."""
    run = started(mlp(), (5,), Tiny(update_old=update_old, amplitudes=[1.0]), num_batches=1, size=60)
    with torch.no_grad():
        first = run.network[0]
        if kind == "twins":
            first.weight[1:], first.bias[1:] = first.weight[:1] * (1 + 1e-7), first.bias[:1]
        first.weight *= {"twins": 1.0, "tiny": 1e-5, "constant": 0.0}[kind]
    square = measured(run, "2")[0]
    before = {name: one.detach().clone() for name, one in run.network.named_parameters()}
    event, _ = run.grow({"2": 6})
    assert all(one.isfinite().all() for one in run.network.parameters())
    rows = torch.cat([run.network[2].weight[3:], run.network[2].bias[3:, None]], 1)
    bound = event.report["singular_values"]["2"][0] / (run.method.ridge * square.diagonal().mean())
    columns = run.network[4].weight[:, 3:]
    found = columns.any(0)
    assert bool(found.any()) and rows[found].square().sum(1).max() <= bound * (1 + 1e-9)
    assert columns.square().sum(0).max() <= event.report["singular_values"]["2"][0] * (1 + 1e-9)
    moved = run.network[4].weight[:, :3] - before["4.weight"]
    assert moved.abs().max() < 10.0 and bool(moved.any()) == update_old

"""Splitting against the Hessian of its loss (Liu et al. 2019), and FireFly to first order (Wu et al. 2020)."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab.base.errors import UserError
from growlab.growth import FireFly, Splitting
from growlab.growth.methods.firefly import _Neighbourhood
from growlab.growth.methods.splitting import splitting_eigen
from growlab.widths import replace_tensors
from tests.unit.growth.measured import Residual, Started, mlp, started, with_one

BETA = 3.0


def tanhs() -> nn.Sequential:
    return mlp(inputs=3)


def eigen(run: Started, iterations: int | None) -> dict[str, tuple[Tensor, Tensor]]:
    context, groups = run.context()
    return splitting_eigen(context, run.data(), groups, iterations, BETA)


def hessian_of_the_splitting_loss(run: Started, activation) -> Tensor:
    """Hessian by all moves of both layers, [all, all], of a split network written out by hand."""
    (w1, b1), (w2, b2), (w3, b3) = (
        (run.network[place].weight.detach(), run.network[place].bias.detach()) for place in (0, 2, 4)
    )
    theta1, theta2 = torch.cat([w1, b1[:, None]], 1), torch.cat([w2, b2[:, None]], 1)

    def loss(moves: Tensor) -> Tensor:
        u1, u2 = moves[: theta1.numel()].view_as(theta1), moves[theta1.numel() :].view_as(theta2)
        total = torch.zeros((), dtype=moves.dtype)
        for x, y in run.batches:
            for u, theta in ((u1, theta1), (u2, theta2)):
                x = sum(activation(with_one(x) @ (theta + sign * u).T) for sign in (1, -1)) / 2
            total = total + F.cross_entropy(x @ w3.T + b3, y) / len(run.batches)
        return total

    zero = torch.zeros(theta1.numel() + theta2.numel(), dtype=torch.float64)
    return torch.autograd.functional.hessian(loss, zero)


@pytest.mark.parametrize("kind", ["tanh", "relu"])
def test_eigenvalues_are_those_of_the_splitting_loss(kind: str) -> None:
    smooth = (lambda x: F.softplus(x, beta=BETA)) if kind == "relu" else torch.tanh
    run = started(mlp(nn.ReLU() if kind == "relu" else None, 3), (3,), Splitting())
    hessian = hessian_of_the_splitting_loss(run, smooth)
    exact, fast = eigen(run, None), eigen(run, 5)
    start = 0
    for group in ("0", "2"):
        values, vectors = exact[group]
        size = vectors.shape[1]
        for neuron in range(len(values)):
            rows = slice(start, start + size)
            block = hessian[rows, rows]
            assert float(values[neuron]) == pytest.approx(float(torch.linalg.eigvalsh(block)[0]), rel=1e-8)
            v = vectors[neuron]
            torch.testing.assert_close(block @ v, values[neuron] * v, atol=1e-10, rtol=0)
            # Moves of different neurons do not interact at second order.
            others = torch.cat([hessian[rows, :start], hessian[rows, start + size :]], 1)
            assert float(others.abs().max()) < 1e-12
            start += size
        # Five products span the whole space of five entries.
        torch.testing.assert_close(fast[group][0], values)
    few = eigen(run, 2)
    for group, (values, vectors) in few.items():
        assert bool((values >= exact[group][0] - 1e-12).all())
        torch.testing.assert_close(vectors.norm(dim=1), torch.ones(len(values), dtype=torch.float64))


@pytest.mark.parametrize("build", [tanhs, Residual])
def test_the_loss_falls_as_predicted_over_streams_norms_and_depthwise_filters(build) -> None:
    shape = (3,) if build is tanhs else (2, 5, 5)
    run = started(build(), shape, Splitting(epsilon=0.02, iterations=6))
    before = float(run.loss().detach())
    event, _ = run.widen(1)
    predicted = sum(group["predicted_change"] for group in event.report["groups"].values())
    assert predicted < 0
    assert float(run.loss().detach()) - before == pytest.approx(predicted, rel=0.02)
    for group, report in event.report["groups"].items():
        values = torch.tensor(report["eigenvalues"])
        assert report["split"] == [int(values.argmin())]
        # Its copy comes after the old channels.
        assert event.carry.sources[group].tolist() == [*range(len(values)), int(values.argmin())]


def step(run: Started, rate: float = 0.05) -> float:
    """Loss after a step of gradient descent, by plain autograd."""
    parameters = list(run.network.parameters())
    gradients = torch.autograd.grad(run.loss(), parameters, materialize_grads=True)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter -= rate * gradient
    return float(run.loss().detach())


@pytest.mark.parametrize("build", [tanhs, Residual])
def test_the_loss_falls_as_predicted(build) -> None:
    run = started(build(), (3,) if build is tanhs else (2, 5, 5), FireFly(epsilon=1e-3, steps=3))
    before = float(run.loss().detach())
    event, data = run.widen(2)
    groups = event.report["groups"].values()
    predicted = sum(group["predicted_change"] for group in groups)
    assert predicted < 0 and all(group["splits"] + group["new"] == 2 for group in groups)
    assert float(run.loss().detach()) - before == pytest.approx(predicted, rel=0.05)
    # Descent and the scores: a pass each over all batches.
    assert data.cost.samples == (3 + 1) * sum(len(x) for x, _ in run.batches)


def test_chosen_candidates_beat_random_ones() -> None:
    """Compare the first-order decrease, the loss, and the loss after a step."""
    run = started(Residual(), (2, 5, 5), FireFly(steps=3))
    old = dict(run.state.widths)
    (context, groups), data = run.context(more=1), run.data()
    around = _Neighbourhood.drawn(run.method, context, groups)
    for _ in range(3):
        around.descend(data, 0.3)
    decreases, signs = around.scores(data)

    def outcome(chosen: dict[str, int]) -> tuple[float, float, float]:
        grown = {
            group: (torch.tensor([at] if at < old[group] else []).long(), torch.tensor([at - old[group]]).long())
            for group, at in chosen.items()
        }
        grown = {g: (a, b if not len(a) else b[:0]) for g, (a, b) in grown.items()}
        trial = copy.copy(run)
        trial.network = copy.deepcopy(run.network)
        replace_tensors(trial.network, run.graph, around.result(grown, signs, {}).tensors)
        first_order = sum(float(decreases[group][at]) for group, at in chosen.items())
        return first_order, float(trial.loss().detach()), step(trial)

    best = outcome({group: int(found.argmax()) for group, found in decreases.items()})
    source = torch.Generator().manual_seed(0)
    others = [
        outcome({g: int(torch.randint(len(d), (), generator=source)) for g, d in decreases.items()}) for _ in range(20)
    ]
    assert best[0] >= max(one[0] for one in others)
    assert best[1] <= min(one[1] for one in others)
    assert best[2] <= min(one[2] for one in others)
    assert best[1] < sorted(one[1] for one in others)[10]


def test_descent_makes_better_candidates() -> None:
    reached = []
    for steps in (0, 6):
        run = started(tanhs(), (3,), FireFly(steps=steps))
        event, _ = run.grow({"0": 6})
        reached.append(event.report["groups"]["0"]["predicted_change"])
    assert reached[1] < reached[0] <= 0


def test_splits_alone() -> None:
    run = started(tanhs(), (3,), FireFly(new_candidates=0, steps=2))
    before = run.network(run.batches[0][0]).detach()
    event, _ = run.grow({"0": 6})
    assert event.method == "FireFlySplit" and event.report["groups"]["0"]["new"] == 0
    sources = event.carry.sources["0"]
    weight: Tensor = run.network[0].weight.detach()
    bias = run.network[0].bias.detach()
    theta = torch.cat([weight, bias[:, None]], 1)
    original = torch.cat([*event.replaced["0.weight"][:1], event.replaced["0.bias"][0][:, None]], 1).detach()
    for new in (4, 5):
        at = int(sources[new])
        torch.testing.assert_close((theta[at] + theta[new]) / 2, original[at])
        apart = (theta[at] - theta[new]).norm() / 2
        assert float(apart) == pytest.approx(0.01 * float(original[at].norm()), rel=1e-6)
    assert float((run.network(run.batches[0][0]).detach() - before).abs().max()) < 0.01
    with pytest.raises(UserError, match="FireFlySplit cannot grow 0: splitting makes at most twice as many"):
        run.grow({"0": 13})


def test_with_a_candidate_for_every_neuron_a_layer_may_more_than_double() -> None:
    run = started(tanhs(), (3,), FireFly(new_candidates=1.0, steps=1))
    width = run.state.widths["0"]
    event, _ = run.grow({"0": 2 * width + 1})
    report = event.report["groups"]["0"]
    assert report["splits"] + report["new"] == width + 1 and run.state.widths["0"] == 2 * width + 1


@pytest.mark.parametrize("num_batches", [1, 2])
def test_growth_does_not_depend_on_the_order_of_sums(num_batches: int) -> None:
    """If all ReLUs are linear, gradients by moves are only rounding, which steps of fixed length must not follow."""
    grown = []
    for backwards in (False, True):
        run = started(mlp(nn.ReLU(), 3), (3,), FireFly(steps=2), num_batches=num_batches, size=64)
        with torch.no_grad():
            for name in ("0", "2"):
                run.network.get_submodule(name).bias += 20.0
        if backwards:
            run.batches[:] = [(x.flip(0), y.flip(0)) for x, y in run.batches]
        event, _ = run.widen(2)
        grown.append(run.network.state_dict())
        report = event.report["groups"]["0"]
        assert report["decreases"][:4] == [0.0] * 4
    for name, tensor in grown[0].items():
        torch.testing.assert_close(tensor, grown[1][name], rtol=1e-9, atol=1e-12, msg=name)

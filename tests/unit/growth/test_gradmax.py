"""GradMax: no other new neurons of the same length have a larger gradient (Evci et al. 2022, Eqs. 8 and 11)."""

import pytest
import torch
from torch import Tensor, nn

from growlab.base.errors import UserError
from growlab.growth import GradMax
from growlab.lab.training.run import near_zero
from tests.cases import NETWORKS, Around
from tests.unit.growth.measured import Started, started

DRAWS = 1000


def mlp(activation: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 8), activation, nn.Linear(8, 6), activation, nn.Linear(6, 3))


def conv(activation: nn.Module) -> nn.Sequential:
    layers = nn.Conv2d(2, 4, 3, padding=1), activation, nn.Conv2d(4, 6, 3, stride=2), activation, nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(24, 3))


def normed(norm: nn.Module | None = None) -> nn.Sequential:
    layers = nn.Conv2d(2, 6, 3, bias=False), norm or nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(6, 3))


def gradient_into(run: Started, name: str, old: int) -> float:
    """Norm of the gradient of what leads into new channels, by plain autograd."""
    layer = run.network.get_submodule(name)
    weight, bias = torch.autograd.grad(run.loss(), [layer.weight, layer.bias])
    return float((weight[old:].square().sum() + bias[old:].square().sum()).sqrt())


@pytest.mark.parametrize("name", ["0", "2"])
def test_closed_form_beats_random_draws_and_meets_the_bound(name: str) -> None:
    run = started(mlp(nn.Tanh()), (5,), GradMax())
    before = run.network(run.batches[0][0])
    old = run.state.widths[name]
    event, _ = run.grow({name: old + 2})
    torch.testing.assert_close(run.network(run.batches[0][0]), before, rtol=1e-12, atol=1e-12)
    report = event.report["groups"][name]
    reached = gradient_into(run, name, old)
    assert reached == pytest.approx(report["gradient_norm"], rel=1e-9)
    # Orthogonal columns of length c: at most c sqrt(sigma_1^2 + sigma_2^2), by Ky Fan.
    columns = run.network.get_submodule(str(int(name) + 2)).weight
    with torch.no_grad():
        chosen = columns[:, old:]
        lengths = torch.linalg.vector_norm(chosen, dim=0)
        torch.testing.assert_close(chosen.T @ chosen, torch.diag(lengths**2), atol=1e-12, rtol=0)
        others = torch.linalg.vector_norm(columns[:, :old], dim=0)
        torch.testing.assert_close(lengths, others.mean().expand(2))
    bound = float(lengths[0]) * float(torch.tensor(report["singular_values"]).square().sum().sqrt())
    assert reached == pytest.approx(bound, rel=1e-6)
    norms = gradients_of_draws(run, int(name), old, float(lengths[0]))
    assert float(norms.max()) <= reached * (1 + 1e-9)
    assert float(norms.median()) < 0.9 * reached


def gradients_of_draws(run: Started, place: int, old: int, length: float) -> Tensor:
    """For random orthogonal columns, the norm of the gradient of what leads into them, [draws], all at once."""
    parameters = {name: tensor.detach() for name, tensor in run.network.named_parameters()}
    inner = {name: parameters.pop(name) for name in (f"{place}.weight", f"{place}.bias")}
    rows = len(parameters[f"{place + 2}.weight"])
    source = torch.Generator().manual_seed(0)
    draws = torch.linalg.qr(torch.randn(DRAWS, rows, 2, generator=source, dtype=torch.float64))[0] * length

    def loss(inner: dict[str, Tensor], columns: Tensor) -> Tensor:
        weight = torch.cat([parameters[f"{place + 2}.weight"][:, :old], columns], 1)
        tensors = {**parameters, **inner, f"{place + 2}.weight": weight}
        batches = [(torch.func.functional_call(run.network, tensors, (x,)), y) for x, y in run.batches]
        return torch.stack([nn.functional.cross_entropy(z, y) for z, y in batches]).mean()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(inner, draws)
    return sum(g[:, old:].flatten(1).square().sum(1) for g in found.values()).sqrt()


def test_the_matrix_is_the_mean_product_of_gradients_and_inputs() -> None:
    """Against dL/dz h^T from the network's own gradients."""
    run = started(mlp(nn.Tanh()), (5,), GradMax())
    network, total = run.network, torch.zeros((), dtype=torch.float64)
    for x, y in run.batches:
        hidden = network[:4](x)
        logits = network[4](hidden)
        (slope,) = torch.autograd.grad(nn.functional.cross_entropy(logits, y), logits)
        h = torch.cat([network[:2](x), torch.ones(len(x), 1, dtype=x.dtype)], 1)
        total = total + slope.T @ h / len(run.batches)
    event, _ = run.grow({"2": run.state.widths["2"] + 2})
    values = torch.linalg.svdvals(total)[:2]
    torch.testing.assert_close(
        torch.tensor(event.report["groups"]["2"]["singular_values"], dtype=torch.float64), values
    )


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.ReLU6(), nn.LeakyReLU(0.01), nn.GELU()])
def test_the_gradient_is_the_network_s_own_through_convolutions_and_flattening(activation: nn.Module) -> None:
    """Also where torch's derivative at 0 is not 1, and the function stays."""
    run = started(conv(activation), (2, 6, 6), GradMax())
    old = dict(run.state.widths)
    event, data = run.grow({name: width + 2 for name, width in old.items()})
    assert event.parity_error_eval < 1e-14
    for name, width in old.items():
        report = event.report["groups"][name]
        assert gradient_into(run, name, width) == pytest.approx(report["gradient_norm"], rel=1e-9)
        assert report["gradient_norm"] == pytest.approx(report["gradient_norm_bound"], rel=1e-9)
    assert data.cost.flops > 0 and data.cost.samples > 0 and data.cost.held_bytes > 0


def test_a_resting_point_is_searched_only_if_needed() -> None:
    """Tanh has a derivative at 0, and the first pass shows the gradient; ReLU takes a second."""
    samples = []
    for activation in (nn.Tanh(), nn.ReLU()):
        run = started(mlp(activation), (5,), GradMax())
        _, data = run.grow({group: width + 1 for group, width in run.state.widths.items()})
        samples.append(data.cost.samples)
    assert samples[1] - samples[0] == sum(len(x) for x, _ in run.batches)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_new_channels_behind_a_relu_learn(bias: bool, sign: float) -> None:
    """Also where the producer of the grown channels has no bias, and a filter turns them negative."""
    depthwise = Around(
        lambda net, x: net.last((sign * net.each(net.first(x))).relu().mean((2, 3))),
        **{"first": nn.Conv2d(2, 6, 3, bias=bias), "each": nn.Conv2d(6, 6, 1, groups=6, bias=False), "last": [6, 3]},
    )
    run = started(depthwise, (2, 6, 6), GradMax())
    old = run.state.widths["first"]
    event, _ = run.grow({"first": old + 2})
    assert event.parity_error_eval < 1e-14
    report = event.report["groups"]["first"]
    # Without a bias some positions lie to the left of zero.
    assert report["gradient_norm"] > (0.99 if bias else 0.2) * report["gradient_norm_bound"]
    (slope,) = torch.autograd.grad(run.loss(), run.network.first.weight)
    assert bool((slope[old:].flatten(1).norm(dim=1) > 0).all())


def test_a_network_without_gradients_is_refused() -> None:
    run = started(mlp(nn.ReLU()), (5,), GradMax())
    with torch.no_grad():
        run.network[2].bias.fill_(-1e3)
    with pytest.raises(UserError, match=r"get no gradient either: the network no longer learns \(lower"):
        run.grow({"0": 6})


def test_channels_that_no_gradient_reaches_are_refused() -> None:
    """An activation that is flat around 0."""
    late = Around(lambda net, x: net.last(nn.functional.softshrink(net.first(x))), first=[5, 6], last=[6, 3])
    run = started(late, (5,), GradMax())
    with pytest.raises(UserError, match="GradMax cannot grow first: the gradient"):
        run.grow({"first": 5})


def test_behind_batch_norm_ascent_beats_random_draws_and_the_function_stays() -> None:
    run = started(normed(), (2, 6, 6), GradMax(steps=15))
    event, _ = run.grow({"0": 5})
    assert event.parity_error_eval < 1e-12 and event.parity_error_train < 1e-12
    report = event.report["groups"]["0"]
    rows, columns = run.network[0].weight, run.network[5].weight
    assert bool((columns[:, 3:] == 0).all())

    def reached() -> float:
        total = sum(torch.autograd.grad(run.loss(), columns))[:, 3:]
        return float(torch.linalg.vector_norm(total))

    found = reached()
    assert found == pytest.approx(report["gradient_norm"], rel=1e-9)
    assert found >= report["gradient_norm_drawn"]

    def gradient(drawn: Tensor) -> Tensor:
        """The same, written out: gradients of the logits times what the new channels carry."""
        total = torch.zeros(3, 2, dtype=torch.float64)
        for (x, y), old in zip(run.batches, kept, strict=True):
            z = nn.functional.conv2d(x, drawn)
            z = (z - z.mean((0, 2, 3), keepdim=True)) / (z.var((0, 2, 3), correction=0, keepdim=True) + 1e-5).sqrt()
            slope = (old.softmax(1) - nn.functional.one_hot(y, 3)) / len(x)
            total = total + slope.T @ z.relu().mean((2, 3)) / len(run.batches)
        return torch.linalg.vector_norm(total)

    kept = [run.network(x).detach() for x, _ in run.batches]
    source = torch.Generator().manual_seed(0)
    draws = torch.randn(DRAWS, *rows[3:].shape, generator=source, dtype=torch.float64)
    norms = torch.func.vmap(gradient)(draws)
    assert float(gradient(rows[3:].detach())) == pytest.approx(found, rel=1e-6)
    # The optimum of each channel alone: no draw of both is past it.
    assert float(norms.max()) <= found
    assert float(norms.median()) < 0.8 * found


@pytest.mark.parametrize(
    "norm", [nn.InstanceNorm2d(6, affine=True), nn.InstanceNorm2d(6, track_running_stats=True), nn.GroupNorm(6, 6)]
)
def test_behind_a_norm_per_sample_outgoing_weights_are_zero(norm: nn.Module) -> None:
    """Channels of zeros would be divided by sqrt(eps), as behind batch normalisation."""
    run = started(normed(norm), (2, 5, 5), GradMax(steps=2))
    before = run.network(run.batches[0][0])
    event, _ = run.grow({"0": 5})
    torch.testing.assert_close(run.network(run.batches[0][0]), before, rtol=1e-12, atol=1e-12)
    assert event.report["groups"]["0"]["zero"] == "fan_out"
    assert not run.network[5].weight[:, 3:].any() and run.network[0].weight[3:].all()


def test_new_channels_without_a_gradient_are_refused() -> None:
    case = NETWORKS["gated"]
    run = started(case.make(), case.input_shape, GradMax())
    widths = {name: width + 1 for name, width in run.state.widths.items()}
    with pytest.raises(UserError, match=r"GradMax cannot grow both: the gradient .* set fallback='pairs'"):
        run.grow(widths)
    run.method = GradMax(fallback="pairs")
    event, _ = run.grow(widths)
    assert set(event.report["grown_by_pairs"]) == {"both"} and set(event.report["groups"]) == {"squeeze"}
    assert event.parity_error_eval < 1e-12


def test_channels_that_are_not_zero_are_refused_by_the_layer_s_name() -> None:
    run = started(mlp(nn.Sigmoid()), (5,), GradMax())
    with pytest.raises(UserError, match="GradMax cannot grow 2: behind 2 its channels are not zero where the"):
        run.grow({"2": 5})


@pytest.mark.parametrize(("precision", "dtype"), [("16-mixed", torch.float16), ("bf16-mixed", torch.bfloat16)])
def test_near_zero_by_precision(precision: str, dtype: torch.dtype) -> None:
    """It is not zero in the precision of training, and nothing beside a number of the network's."""
    near = torch.tensor(near_zero(precision))
    assert float(near.to(dtype)) > 0
    assert float(near.to(dtype) * 0.5) > 0
    assert float(torch.tensor(0.01, dtype=dtype) + near.to(dtype)) == float(torch.tensor(0.01, dtype=dtype))

"""GradMax reaches the largest gradient (Evci et al. 2022, Eqs. 8 and 11); promises of all data-driven methods."""

import copy
from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

from growlab.base.errors import UserError
from growlab.grower import Grower
from growlab.grower.triggers import OnDemand, Plateau, Trigger
from growlab.growth import FireFly, GradMax, GrowthEvent, GrowthMethod, Schedule, Splitting, Tiny
from growlab.lab.training.run import _HALF, _USUAL
from growlab.optim import follow
from growlab.parts import Part
from tests.cases import NETWORKS, Around, Growing, differing, graph_of, roughen, train, widths_at
from tests.unit.growth.measured import Started, mlp, started

DRAWS = 1000


def conv(activation: nn.Module) -> nn.Sequential:
    layers = nn.Conv2d(2, 4, 3, padding=1), activation, nn.Conv2d(4, 6, 3, stride=2), activation, nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(24, 3))


def normed(norm: nn.Module | None = None) -> nn.Sequential:
    layers = nn.Conv2d(2, 6, 3, bias=False), norm or nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(6, 3))


def gradient_into(run: Started, name: str, old: int) -> float:
    """Norm of the gradient of the new channels' incoming weights, by plain autograd."""
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
    """Norms of the gradient of the incoming weights for random orthogonal outgoing weights, [draws]."""
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


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.ReLU6(), nn.LeakyReLU(0.01), nn.GELU()])
def test_the_gradient_is_the_network_s_own_through_convolutions_and_flattening(activation: nn.Module) -> None:
    """Outputs stay the same, also with activations whose derivative at 0 is not 1."""
    run = started(conv(activation), (2, 6, 6), GradMax())
    old = dict(run.state.widths)
    event, data = run.widen(2)
    assert event.parity_error_eval < 1e-14
    for name, width in old.items():
        report = event.report["groups"][name]
        assert gradient_into(run, name, width) == pytest.approx(report["gradient_norm"], rel=1e-9)
        assert report["gradient_norm"] == pytest.approx(report["gradient_norm_bound"], rel=1e-9)
    assert data.cost.flops > 0 and data.cost.samples > 0 and data.cost.held_bytes > 0


def test_a_resting_point_is_searched_only_if_needed() -> None:
    """Tanh has a derivative at 0, so one pass is enough; ReLU needs a second one."""
    samples = []
    for activation in (nn.Tanh(), nn.ReLU()):
        run = started(mlp(activation), (5,), GradMax())
        _, data = run.widen(1)
        samples.append(data.cost.samples)
    assert samples[1] - samples[0] == sum(len(x) for x, _ in run.batches)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_new_channels_behind_a_relu_learn(bias: bool, sign: float) -> None:
    """Also without a bias, and with a filter that makes the channels negative."""
    depthwise = Around(
        lambda net, x: net.last((sign * net.each(net.first(x))).relu().mean((2, 3))),
        **{"first": nn.Conv2d(2, 6, 3, bias=bias), "each": nn.Conv2d(6, 6, 1, groups=6, bias=False), "last": [6, 3]},
    )
    run = started(depthwise, (2, 6, 6), GradMax())
    old = run.state.widths["first"]
    event, _ = run.grow({"first": old + 2})
    assert event.parity_error_eval < 1e-14
    report = event.report["groups"]["first"]
    # Without a bias some positions are negative and pass no gradient.
    assert report["gradient_norm"] > (0.99 if bias else 0.2) * report["gradient_norm_bound"]
    (slope,) = torch.autograd.grad(run.loss(), run.network.first.weight)
    assert bool((slope[old:].flatten(1).norm(dim=1) > 0).all())


def test_a_network_without_gradients_raises_an_error() -> None:
    run = started(mlp(nn.ReLU()), (5,), GradMax())
    with torch.no_grad():
        run.network[2].bias.fill_(-1e3)
    with pytest.raises(UserError, match=r"get no gradient either: the network no longer learns \(lower"):
        run.grow({"0": 6})


def test_channels_without_gradient_raise_an_error() -> None:
    """An activation that is flat around 0."""
    late = Around(lambda net, x: net.last(nn.functional.softshrink(net.first(x))), first=[5, 6], last=[6, 3])
    with pytest.raises(UserError, match="GradMax cannot grow first: the gradient"):
        started(late, (5,), GradMax()).grow({"first": 5})


def test_an_activation_without_a_derivative_at_0_is_refused() -> None:
    root = Around(lambda net, x: net.last(net.first(x).abs().sqrt()), first=[5, 6], last=[6, 3])
    with pytest.raises(UserError, match=r"GradMax cannot grow first: the gradient .* is NaN or infinite"):
        started(root, (5,), GradMax()).grow({"first": 5})


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
        """The direct formula: gradients of the logits times activations of the new channels."""
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
    # Each channel is optimal alone, so no joint draw is better.
    assert float(norms.max()) <= found
    assert float(norms.median()) < 0.8 * found


@pytest.mark.parametrize(
    "norm", [nn.InstanceNorm2d(6, affine=True), nn.InstanceNorm2d(6, track_running_stats=True), nn.GroupNorm(6, 6)]
)
def test_behind_a_norm_per_sample_outgoing_weights_are_zero(norm: nn.Module) -> None:
    """Zero channels would be divided by sqrt(eps), as with batch normalisation."""
    run = started(normed(norm), (2, 5, 5), GradMax(steps=2))
    before = run.network(run.batches[0][0])
    event, _ = run.grow({"0": 5})
    torch.testing.assert_close(run.network(run.batches[0][0]), before, rtol=1e-12, atol=1e-12)
    assert event.report["groups"]["0"]["zero"] == "fan_out"
    assert not run.network[5].weight[:, 3:].any() and run.network[0].weight[3:].all()


def test_new_channels_without_a_gradient_raise_an_error() -> None:
    case = NETWORKS["gated"]
    run = started(case.make(), case.input_shape, GradMax())
    with pytest.raises(UserError, match=r"GradMax cannot grow both: the gradient .* set fallback='pairs'"):
        run.widen(1)
    run.method = GradMax(fallback="pairs")
    event, _ = run.widen(1)
    assert set(event.report["grown_by_pairs"]) == {"both"} and set(event.report["groups"]) == {"squeeze"}
    assert event.parity_error_eval < 1e-12


def test_channels_that_are_not_zero_raise_an_error_with_the_layers_name() -> None:
    run = started(mlp(nn.Sigmoid()), (5,), GradMax())
    with pytest.raises(UserError, match="GradMax cannot grow 2: behind 2 its channels are not zero although"):
        run.grow({"2": 5})


@pytest.mark.parametrize(("number", "dtype"), [(_HALF, torch.float16), (_USUAL, torch.bfloat16)])
def test_near_zero_by_precision(number: float, dtype: torch.dtype) -> None:
    """The number is not 0 in the training precision, but vanishes in a sum with an ordinary weight."""
    near = torch.tensor(number)
    assert float(near.to(dtype)) > 0
    assert float(near.to(dtype) * 0.5) > 0
    assert float(torch.tensor(0.01, dtype=dtype) + near.to(dtype)) == float(torch.tensor(0.01, dtype=dtype))


METHODS: dict[str, Callable[[], GrowthMethod]] = {
    "gradmax": lambda: GradMax(steps=2, fallback="pairs"),
    "tiny": lambda: Tiny(fallback="pairs"),
    "splitting": lambda: Splitting(iterations=2, fallback="pairs"),
    "firefly": lambda: FireFly(steps=1, fallback="pairs"),
    "firefly_split": lambda: FireFly(new_candidates=0, steps=1, fallback="pairs"),
}
SOME = [
    "flatten",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("resnet B", "dense", "attention", "transformer")),
]


class Run(Started):
    """A network of the table at half its width, with batches."""

    def __init__(self, network: str, method: GrowthMethod, seed: int = 2) -> None:
        case = NETWORKS[network]
        super().__init__(case.make(), case.inputs(), method, 0.5, 5, graph_of(network), rough=False)
        roughen(self.network, seed)
        classes = self.outputs().shape[1]
        self.batches = [(case.inputs(seed=seed), torch.arange(8) % classes) for seed in (3, 4)]

    def event(self) -> GrowthEvent:
        return self.grow(widths_at(self.graph, 0.8))[0]


@pytest.mark.parametrize("network", SOME)
@pytest.mark.parametrize("method", METHODS)
def test_events(method: str, network: str) -> None:
    run = Run(network, METHODS[method]())
    start, before = copy.deepcopy(run.network.state_dict()), run.outputs(training=True)
    optimizer = torch.optim.AdamW(run.network.parameters())
    train(run.network.train(), optimizer, *run.x)
    run.network.load_state_dict(start)
    again = copy.deepcopy(run)
    event = run.event()
    # Shapes, and nearly unchanged outputs where the method promises them.
    for name, tensor in run.tensors().items():
        assert tuple(tensor.shape) == run.graph.shape(name, event.widths_after)
        assert bool(tensor.isfinite().all())
    moved = float((run.outputs(training=True) - before).abs().max() / before.abs().max())
    assert moved < {"gradmax": 1e-10, "tiny": 100.0}.get(method, 0.2)
    # Draws depend on seed, stage and name alone, so repeating the event gives the same bits.
    torch.manual_seed(123)
    again.event()
    assert not differing(run.network.state_dict(), again.network.state_dict())
    # Optimizer state grows with the parameters.
    follow(optimizer, event.replaced, run.graph, event.widths_before, event.widths_after, "inherit", event.carry)
    for parameter in run.network.parameters():
        assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape


def test_channels_that_norms_and_attention_sum_over_grow_by_pairs_and_the_others_do_not() -> None:
    run = Run("attention", Tiny(fallback="pairs"))
    before = run.outputs()
    assert run.event().report["grown_by_pairs"] == {
        "embed": "norm takes its statistics over its channels",
        "q": "attention sums over its channels",
    }
    assert torch.allclose(run.outputs(), before)
    event = Run("transformer", GradMax(fallback="pairs")).event()
    assert set(event.report["grown_by_pairs"]) == {"embed"} and set(event.report["groups"]) == {"mlp.0"}
    assert event.parity_error_eval < 1e-10


@pytest.mark.parametrize("method", METHODS)
def test_an_average_goes_through_the_same_map_without_data(method: str) -> None:
    """Growing the average of two networks gives the average of the grown networks."""
    growth_method = METHODS[method]()
    run, other = Run("resnet B", growth_method), Run("resnet B", growth_method, seed=7)
    mean, leader = copy.deepcopy(run), run.tensors()
    with torch.no_grad():
        for name, tensor in mean.network.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_((run.network.state_dict()[name] + other.network.state_dict()[name]) / 2)
    event = run.event()
    for one in (other, mean):
        Growing.grow(one, event.widths_after, 5, averaged=leader, averaged_event=event)
    for name, tensor in mean.network.state_dict().items():
        if tensor.is_floating_point():
            expected = (run.network.state_dict()[name] + other.network.state_dict()[name]) / 2
            torch.testing.assert_close(tensor, expected)


def test_data_is_required_unless_nothing_grows() -> None:
    run = Run("mlp", METHODS["firefly"]())
    with pytest.raises(UserError, match="FireFly needs training data"):
        Growing.grow(run)
    assert Growing.grow(run, {}).replaced == {}


def test_unsupported_width_groups_raise_an_error_before_training() -> None:
    class WidensItself(Part):
        groups = ("0",)

    def grower(trigger: Trigger | dict, fallback: str | None = None, parts: Sequence[Part] = ()) -> Grower:
        network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        method = Splitting(fallback=fallback)
        return Grower(network, torch.ones(2, 3), method=method, trigger=trigger, parts=parts)

    def on_demand(*quarters: int) -> OnDemand:
        number = len(quarters)
        schedule = Schedule((1,) * number, tuple(Fraction(one, 4) for one in quarters), (4,) * number)
        return OnDemand(Plateau(groups="gradient"), schedule, 8)

    for too_much in ({0: 0.25, 1: 1.0}, on_demand(1, 4)):
        with pytest.raises(UserError, match="Splitting cannot grow 0: splitting makes at most twice as many"):
            grower(too_much)
        grower(too_much, fallback="pairs")
        grower(too_much, parts=[WidensItself()])
    for fits in ({0: 0.25, 1: 0.5, 2: 1.0}, on_demand(1, 2, 4)):
        grower(fits)

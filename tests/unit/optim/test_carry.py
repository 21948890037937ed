"""Gradients and moments carried to the grown network equal those computed on it; steps keep their length."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import growlab.optim
from growlab import Grower
from growlab.growth import HyperCloning, Lemon, Net2Net, PairGrowth, VarianceTransfer
from growlab.growth.methods.variance_transfer import Treatment
from growlab.growth.multipliers import multiplied_weights, row_multipliers
from growlab.optim import LARS, follow
from growlab.optim.carry import normalises
from growlab.widths import Carry
from tests.cases import NETWORKS, Around, graph_of, planted, same_parameters, train, widths_at
from tests.unit.optim.test_around import Shell

BETAS = (0.9, 0.99)
# Networks of the table with depthwise filters, flattening, a residual stream, gates; those with dropout in eval mode.
DROPOUT = {"depthwise": True, "flatten": False, "resnet B": False, "lstm": True, "gru": False}
CASES = [(name, training) for name, dropout in DROPOUT.items() for training in (False, True)[: 2 - dropout]]


class Grown:
    """A network of the table before and after an event, from half to full width."""

    def __init__(self, method, name):
        run = planted(name, method)
        self.graph, self.network, self.before, self.state = run.graph, run.network, dict(run.state.widths), run.state
        self.small, self.event = copy.deepcopy(run.network), run.grow()
        case = NETWORKS[name]
        self.batches = [(case.inputs(seed=seed), torch.arange(8) % run.outputs().shape[1]) for seed in range(3, 7)]

    def gradients(self, network, training=False, loss=F.cross_entropy):
        """Yield the gradients of each batch by parameter name."""
        network.train(training)
        for x, y in self.batches:
            network.zero_grad()
            loss(network(x), y).backward()
            yield {name: parameter.grad.clone() for name, parameter in network.named_parameters()}

    def moments(self, network, training=False):
        """Gradient of the last batch, momentum and Adam's moments at fixed weights: name -> (tensors, power)."""
        gradient = {name: torch.zeros_like(p) for name, p in network.named_parameters()}
        momentum, mean, square = (copy.deepcopy(gradient) for _ in range(3))
        for found in self.gradients(network, training):
            for name, now in found.items():
                gradient[name] = now
                momentum[name].mul_(0.9).add_(now)
                mean[name].lerp_(now, 1 - BETAS[0])
                square[name].mul_(BETAS[1]).addcmul_(now, now, value=1 - BETAS[1])
        return {"gradient": (gradient, 1), "momentum": (momentum, 1), "mean": (mean, 1), "square": (square, 2)}

    def compared(self, training=False):
        """Yield (name of the state, carried value, value in the grown network, mask of old entries)."""
        before, after = self.moments(self.small, training), self.moments(self.network, training)
        for what, (tensors, power) in before.items():
            for name, tensor in tensors.items():
                yield f"{what} of {name}", self.carried(name, tensor, power), after[what][0][name], self.old(name)

    def carried(self, name, tensor, power, carry=None):
        widths = self.before, self.event.widths_after
        return (carry or self.event.carry).carried(tensor, name, self.graph, *widths, power)

    def old(self, name):
        """Mask of the entries that existed before the event."""
        return self.carried(name, torch.ones_like(self.small.get_parameter(name)), 0, Carry()).bool()


class Halving(PairGrowth):
    """Pairs, with logits halved by the classifier."""

    def __init__(self, output_multiplier: bool) -> None:
        super().__init__()
        self.output_multiplier = output_multiplier

    def grow(self, context):
        growth = super().grow(context)
        halved = {name: growth.tensors[name] / 2 for name in ("classifier.weight", "classifier.bias")}
        carry = replace(growth.carry, scales=dict.fromkeys(halved, 2.0))
        return replace(growth, tensors={**growth.tensors, **halved}, output_factor=2.0, carry=carry)


COPIES = [Net2Net(), HyperCloning(), HyperCloning("diagonal"), Lemon()]


@pytest.mark.parametrize(("name", "training"), CASES)
@pytest.mark.parametrize("method", [*COPIES, PairGrowth(noise_std=0.0)], ids=lambda m: m.name)
def test_gradient_and_moments_follow_exactly(method, name, training):
    """With copies at every entry; with pairs at old entries, while new ones start at zero."""
    for what, got, expected, old in Grown(method, name).compared(training):
        known = old | (method in COPIES)
        torch.testing.assert_close(got[known], expected[known], rtol=1e-8, atol=1e-12, msg=what)
        assert (got[~known] == 0).all(), what


# Several batches are possible only if all gradients change by one factor: if each channel has equally many copies.
@pytest.mark.parametrize(
    ("method", "batches", "name"),
    [
        *((Net2Net(), 1, "resnet B"), (Lemon(), 1, "flatten")),
        *((HyperCloning(form), 4, "wrn no norm") for form in ("symmetric", "diagonal")),
    ],
)
def test_larss_momentum_is_as_long_as_the_grown_weights_make_it(method, batches, name):
    """The momentum contains layers' rates, which are norms of weights over norms of gradients."""
    run, optimizers = Grown(method, name), []
    for network in (run.small, run.network):
        # The rate is so small that weights hardly move.
        optimizers.append(LARS(network.parameters(), lr=1e-14, momentum=0.9))
        for _, gradient in zip(range(batches), run.gradients(network), strict=False):
            for key, parameter in network.named_parameters():
                parameter.grad = gradient[key]
            optimizers[-1].step()
    optimizer, expected = optimizers
    named = dict(run.small.named_parameters())
    pairs = {key: (p, run.event.replaced[key][1]) for key, p in named.items() if key in run.event.replaced}
    follow(optimizer, pairs, run.graph, run.before, run.event.widths_after, "inherit", run.event.carry)
    for key, parameter in run.network.named_parameters():
        got = optimizer.state[parameter if key in pairs else named[key]]["momentum_buffer"]
        torch.testing.assert_close(got, expected.state[parameter]["momentum_buffer"], rtol=1e-7, atol=1e-24, msg=key)


def error(got, expected):
    return float((got - expected).norm() / (expected.norm() + 1e-9))


@pytest.mark.parametrize(("name", "training"), CASES)
@pytest.mark.parametrize("rule", ["fan_in_ratio", "constraint"])
def test_variance_transfer_divides_gradients_by_the_scale_of_the_weights(rule, name, training):
    """Exact in eval mode; in train mode up to batch normalisation's eps."""
    run = Grown(VarianceTransfer(rule, noise_std=0.0), name)
    assert row_multipliers(run.network)
    assert any(not torch.as_tensor(scale == 1).all() for scale in run.event.carry.scales.values())
    for what, got, expected, old in run.compared(training):
        assert error(got[old], expected[old]) < (1e-3 if training else 1e-8), what


@pytest.mark.parametrize(("name", "training"), [("resnet B", True), ("depthwise", False), ("flatten", True)])
@pytest.mark.parametrize("method", [VarianceTransfer, Halving], ids=lambda m: m.__name__)
def test_without_the_multiplier_all_state_follows_the_logits_that_shrink(method, name, training):
    """Exact if the loss is linear in the logits, also for parameters that the event does not change."""
    run = Grown(method(output_multiplier=False), name)
    assert run.state.output_factor == 1.0 != run.event.output_factor
    weight = torch.randn(run.batches[0][1].max() + 1, generator=torch.Generator().manual_seed(5)).double()
    before, after = (
        next(run.gradients(one, training, lambda z, _: (z * weight).sum())) for one in (run.small, run.network)
    )
    for key, gradient in before.items():
        old = run.old(key)
        for power in (1, 2):
            got = run.carried(key, gradient**power, power)
            assert error(got[old], after[key][old] ** power) < (1e-3 if training else 1e-9), (key, power)


def test_channels_that_come_after_an_event_have_no_gradient() -> None:
    carry = Carry({"a": torch.tensor([0, 1, 0])}, {"a": torch.tensor([0.5, 1.0, 0.5])}, {}, {"b": torch.eye(2)})
    longer = carry.extended({"a": 5, "b": 3, "c": 7})
    assert longer.sources["a"].tolist() == [0, 1, 0, -1, -1]
    assert longer.rows["a"].tolist() == [0.5, 1.0, 0.5, 1.0, 1.0]
    assert longer.bases["b"].tolist() == [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize("power", [0, 1, 2])
def test_channels_without_sources_are_carried_as_those_that_name_their_own(power: int) -> None:
    """Without sources, whole blocks are copied at once, also for axes of several parts."""
    graph = graph_of("dense")
    before, after = widths_at(graph, 0.5), graph.full_widths
    rows = {name: 1.0 + torch.rand(width) for name, width in after.items()}
    kept = {name: torch.arange(width) for name, width in after.items()}
    named = {name: torch.where(kept[name] < before[name], kept[name], -1) for name in kept}
    for name, axes in graph.axes.items():
        old = torch.randn([axis.length(before) for axis in axes], dtype=torch.float64)
        scales = {name: 0.5}
        ours = Carry(rows=rows, scales=scales, every=3.0).carried(old, name, graph, before, after, power)
        theirs = Carry(named, rows, scales, every=3.0).carried(old, name, graph, before, after, power)
        assert torch.equal(ours, theirs) and ours.data_ptr() != old.data_ptr()


Make = Callable[[Any], torch.optim.Optimizer]


class Lion(torch.optim.Optimizer):
    """A sign-based optimizer that growlab does not know (Chen et al. 2023, Algorithm 2)."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                mean = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.sub_(group["lr"] * torch.lerp(param.grad, mean, 0.9).sign())
                mean.lerp_(param.grad, 0.01)


EPS = {"lr": 1e-3, "eps": 1e-30}
#: Each element's step depends only on its own gradients and its own value.
ELEMENTWISE: dict[str, Make] = {
    "Adam": lambda p: torch.optim.Adam(p, **EPS),
    "Adam with a penalty": lambda p: torch.optim.Adam(p, weight_decay=0.1, **EPS),
    "AdamW": lambda p: torch.optim.AdamW(p, weight_decay=0.1, **EPS),
    "AMSGrad": lambda p: torch.optim.AdamW(p, weight_decay=0.1, amsgrad=True, **EPS),
    "NAdam": lambda p: torch.optim.NAdam(p, weight_decay=0.1, decoupled_weight_decay=True, **EPS),
    "RAdam": lambda p: torch.optim.RAdam(p, weight_decay=0.1, decoupled_weight_decay=True, **EPS),
    "Adamax": lambda p: torch.optim.Adamax(p, **EPS),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, **EPS),
    "Adagrad": lambda p: torch.optim.Adagrad(p, **EPS),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Rprop": lambda p: torch.optim.Rprop(p, 1e-3),
    "growlab's AdamW": lambda p: growlab.optim.AdamW(p, weight_decay=0.1, rule=growlab.optim.BaseRate(), **EPS),
    "Lion": Lion,
    "SGD": lambda p: torch.optim.SGD(p, 1e-3, 0.9, weight_decay=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, 1e-3),
}
#: Not compensated, because eps is not negligible or there is no division by a norm of gradients.
NOT_COMPENSATED = {"Adadelta", "Lion", "SGD", "ASGD"}
#: The step of an element depends on the whole weight.
WHOLE: dict[str, Make] = {
    "Muon": lambda p: torch.optim.Muon([w for w in p if w.dim() == 2], 1e-3),
    "growlab's Muon": lambda p: growlab.optim.Muon(p, 1e-3),
    "AvaGrad": lambda p: growlab.optim.AvaGrad(p, 1e-3),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 1e-3),
}


def normalised() -> nn.Module:
    """Layer normalisation and a residual stream, as in a Transformer's MLP."""
    return Around(
        lambda net, x: net.head((h := net.first(x)) + net.down(F.gelu(net.up(net.norm(h))))),
        **{"first": [6, 16], "norm": nn.LayerNorm(16), "up": [16, 32], "down": [32, 16], "head": [16, 5]},
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 5))


class Training:
    """A network that grows from a quarter of its widths, and its optimizer."""

    def __init__(
        self,
        make: Make,
        treatment: Treatment = "auto",
        network: Callable[[], Any] = mlp,
        state: growlab.optim.Inheritance = "inherit",
    ) -> None:
        torch.manual_seed(0)
        self.network = network().double()
        self.x, self.y = torch.randn(64, 6).double(), torch.randint(0, 5, (64,))
        method, trigger = VarianceTransfer(multipliers=treatment), {0: 0.25, 1: 0.5, 2: 1.0}
        self.grower = Grower(self.network, self.x[:8], method=method, trigger=trigger, anneal_steps=0)
        self.optimizer = make(self.network.parameters())
        self.grower.follow(self.optimizer, state=state)

    def step(self) -> dict[str, Tensor]:
        """Take a step; return by how much the weights that the network uses moved, by name."""
        before = self.used()
        train(self.network, self.optimizer, self.x, self.y)
        return {name: weight - before[name] for name, weight in self.used().items()}

    def load(self, other: "Training") -> None:
        for name in ("network", "grower", "optimizer"):
            getattr(self, name).load_state_dict(copy.deepcopy(getattr(other, name).state_dict()))

    def used(self) -> dict[str, Tensor]:
        known = multiplied_weights(self.network)
        return {name: known.get(name, p).detach().clone() for name, p in self.network.named_parameters()}

    def moves(self) -> list[tuple[str, Tensor, Tensor]]:
        """Grow; return (name, next step without the event, next step with it) on old entries."""
        # RAdam's first five steps are proportional to the gradient.
        for _ in range(6):
            self.step()
        narrow, optimizer = copy.deepcopy((self.grower, self.optimizer))
        other = copy.copy(self)
        other.grower, other.network, other.optimizer = narrow, narrow.network, optimizer
        self.grower.step(epoch=self.grower.state.stage + 1)
        grown, narrow_step = self.step(), other.step()
        return [(n, step, grown[n][tuple(map(slice, step.shape))]) for n, step in narrow_step.items()]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_event_changes_no_step_on_old_entries(name: str) -> None:
    """The step after an event is the step that the network would have taken without it."""
    training = Training(ELEMENTWISE[name])
    for _ in range(2):
        for weight, before, after in training.moves():
            # If the gradient is almost zero, its sign depends on rounding.
            far = (before - after).abs() > 1e-9 * before.abs().max()
            assert far.double().mean() <= (0.02 if name in ("Lion", "Rprop") else 0), weight
    assert bool(row_multipliers(training.network)) is (name in ("SGD", "ASGD"))


@pytest.mark.parametrize("name", [name for name in ELEMENTWISE if name not in NOT_COMPENSATED])
def test_compensated_steps_are_those_without_multipliers(name: str) -> None:
    training = Training(ELEMENTWISE[name], "compensate")
    for weight, before, after in training.moves():
        assert (before - after).abs().max() <= 1e-6 * before.abs().max(), weight
    assert row_multipliers(training.network)


@pytest.mark.parametrize("name", WHOLE)
def test_steps_on_whole_matrices_are_about_as_long(name: str) -> None:
    for weight, before, after in Training(WHOLE[name], state="auto").moves():
        if before.dim() > 1:
            assert 0.3 < float(after.norm() / before.norm()) < 1.5, weight


@pytest.mark.parametrize("network", [mlp, normalised])
def test_kept_multipliers_lengthen_the_steps_of_adam(network: Callable[[], nn.Module]) -> None:
    training = Training(ELEMENTWISE["Adam"], "keep", network)
    training.moves()
    moves = training.moves()
    multipliers = row_multipliers(training.network)
    assert len(multipliers) >= 2
    for weight, before, after in moves:
        ratio = float((after.abs() / before.abs())[before != 0].median())
        # The second event doubles the width: a factor of sqrt(2) in hidden layers and 2 in the last.
        expected = {True: (2**0.5, 2.0), False: (1.0,)}[weight in multipliers]
        assert any(ratio == pytest.approx(one, rel=0.05) for one in expected), (weight, ratio)


@pytest.mark.parametrize("treatment", get_args(Treatment))
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_every_treatment_keeps_the_function_and_ends_as_a_plain_network(name: str, treatment: Treatment) -> None:
    training = Training(ELEMENTWISE[name], treatment, normalised)
    average = torch.optim.swa_utils.AveragedModel(training.network)
    training.grower.follow(average)
    for epoch in (1, 2):
        training.step()
        (event,) = training.grower.step(epoch=epoch)
        assert max(event.parity_error_eval, event.parity_error_train) < 1e-10
        assert bool(row_multipliers(average.module)) is bool(row_multipliers(training.network))
    folds = treatment == "fold" or (treatment == "auto" and name == "AdamW")
    assert bool(training.grower.state.multipliers) is not folds
    training.step()
    expected = training.network(training.x)
    training.grower.finish()
    plain = normalised().double()
    plain.load_state_dict(training.network.state_dict())
    torch.testing.assert_close(plain(training.x), expected, rtol=1e-10, atol=1e-10)


def test_each_weight_is_treated_by_its_own_optimizer() -> None:
    training = Training(lambda p: torch.optim.SGD(list(p)[:4], 1e-3))
    other = torch.optim.AdamW(training.network[4].parameters(), 1e-3)
    training.grower.follow(other)
    training.step()
    training.grower.step(epoch=1)
    assert set(row_multipliers(training.network)) == {"2.weight"}
    assert training.grower.followers.normalised() == {"4.weight", "4.bias"}


def test_a_checkpoint_with_multipliers_gets_no_new_ones() -> None:
    """A checkpoint with Adam's multipliers kept loads unchanged, and the next event is exact."""
    kept, now = Training(ELEMENTWISE["AdamW"], "keep"), Training(ELEMENTWISE["AdamW"])
    kept.moves()
    now.load(kept)
    assert torch.equal(now.network(now.x), kept.network(kept.x))
    known = {name: rows.flatten() for name, rows in row_multipliers(now.network).items()}
    for weight, before, after in now.moves():
        assert (before - after).abs().max() <= 1e-8 * before.abs().max(), weight
    assert now.grower.events[-1].parity_error_eval < 1e-10
    for name, rows in row_multipliers(now.network).items():
        assert torch.equal(rows.flatten()[: len(known[name])], known[name])
        assert bool((rows.flatten()[len(known[name]) :] == 1).all())


@pytest.mark.parametrize("treatment", ["auto", "compensate"])
def test_training_resumes_bit_for_bit(treatment: Treatment) -> None:
    uninterrupted, resumed = (Training(ELEMENTWISE["AdamW"], treatment) for _ in range(2))
    uninterrupted.moves()
    resumed.load(uninterrupted)
    for training in (uninterrupted, resumed):
        training.step()
        training.grower.step(epoch=2)
        training.step()
    assert same_parameters(uninterrupted.network, resumed.network)


def test_a_closure_and_an_optimizer_around_another_are_compensated_once() -> None:
    plain = Training(ELEMENTWISE["AdamW"], "compensate")
    around = Training(lambda p: Shell(ELEMENTWISE["AdamW"](p)), "compensate")
    for training in (plain, around):
        training.step()
        training.grower.step(epoch=1)
    plain.step()
    around.network.zero_grad()

    def closure() -> Tensor:
        loss = F.cross_entropy(around.network(around.x), around.y)
        loss.backward()
        return loss

    around.optimizer.step(closure)
    for name, weight in plain.used().items():
        torch.testing.assert_close(weight, around.used()[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", [*ELEMENTWISE, *WHOLE])
def test_optimizers_that_normalise_gradients_are_known(name: str) -> None:
    """Doubling all gradients leaves the length of steps unchanged, or else doubles it."""
    moved = []
    for scale in (1.0, 2.0):
        weight = nn.Parameter(torch.eye(3).double())
        optimizer = {**ELEMENTWISE, **WHOLE}[name]([weight])
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
        for _ in range(8):
            weight.grad, before = scale * 0.01 * torch.ones(3, 3).double().tril(), weight.detach().clone()
            optimizer.step()
        moved.append(float((weight.detach() - before).norm()))
    assert moved[1] / moved[0] == pytest.approx(1.0 if normalises(optimizer) else 2.0, rel=0.05)

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
from growlab.widths import Carry, trace
from tests.cases import Around, Growing
from tests.unit.optim.test_around import Shell


class Everything(nn.Module):
    """Convolution, depthwise convolution, batch norm, a residual stream, flattening, linear layers with biases."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.depthwise, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8)
        self.pointwise, self.norm3 = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)
        self.hidden, self.classifier = nn.Linear(32, 10), nn.Linear(10, 4)

    def forward(self, x):
        x = F.relu(self.norm1(self.stem(x)))
        y = F.relu(self.norm2(self.depthwise(x)))
        x = F.relu(x + self.norm3(self.pointwise(y)))
        return self.classifier(F.relu(self.hidden(F.max_pool2d(x, 2).flatten(1))))


GRAPH = trace(Everything(), torch.randn(2, 3, 4, 4))
BEFORE = {name: group.full_width // 2 for name, group in GRAPH.groups.items()}
AFTER = {name: group.full_width for name, group in GRAPH.groups.items()}
BETAS = (0.9, 0.99)


def grown(method):
    """The network before, after, and the event."""
    torch.manual_seed(0)
    run = Growing(Everything(), torch.randn(8, 3, 4, 4).double(), method, BEFORE, 1, GRAPH, rough=False)
    network = run.network.double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for _ in range(20):
            network(torch.randn(16, 3, 4, 4).double())
    return copy.deepcopy(network), network, run.grow()


def some_gradients(network, training=False, loss=F.cross_entropy):
    """Gradients of batches, one after the other, by parameter name."""
    network.train(training)
    source = torch.Generator().manual_seed(3)
    while True:
        x, y = torch.randn(8, 3, 4, 4, generator=source).double(), torch.randint(4, (8,), generator=source)
        network.zero_grad()
        loss(network(x), y).backward()
        yield {name: parameter.grad.clone() for name, parameter in network.named_parameters()}


def moments(network, training=False):
    """Gradient of the last batch, momentum, and Adam's moments of a few batches, by name, at fixed weights."""
    gradient = {name: torch.zeros_like(p) for name, p in network.named_parameters()}
    momentum, mean, square = (copy.deepcopy(gradient) for _ in range(3))
    for _, found in zip(range(4), some_gradients(network, training), strict=False):
        for name, now in found.items():
            gradient[name] = now
            momentum[name].mul_(0.9).add_(now)
            mean[name].lerp_(now, 1 - BETAS[0])
            square[name].mul_(BETAS[1]).addcmul_(now, now, value=1 - BETAS[1])
    return {"gradient": (gradient, 1), "momentum": (momentum, 1), "mean": (mean, 1), "square": (square, 2)}


def carried(event, name, tensor, power):
    return event.carry.carried(tensor, name, GRAPH, BEFORE, AFTER, power)


def old_entries(name):
    """Mask of the entries that were there before."""
    ones = torch.ones(GRAPH.shape(name, BEFORE))
    return Carry().carried(ones, name, GRAPH, BEFORE, AFTER, 0).bool()


class Halving(PairGrowth):
    """Pairs that halve the logits through the head alone."""

    def __init__(self, output_multiplier: bool) -> None:
        super().__init__()
        self.output_multiplier = output_multiplier

    def grow(self, context):
        growth = super().grow(context)
        halved = {name: growth.tensors[name] / 2 for name in ("classifier.weight", "classifier.bias")}
        carry = replace(growth.carry, scales=dict.fromkeys(halved, 2.0))
        return replace(growth, tensors={**growth.tensors, **halved}, output_factor=2.0, carry=carry)


COPIES = [Net2Net(), HyperCloning(), HyperCloning("diagonal"), Lemon()]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("method", [*COPIES, PairGrowth(noise_std=0.0)], ids=lambda m: m.name)
def test_gradient_and_moments_follow_exactly(method, training):
    """Those of copies at every entry; those of pairs at old entries, new ones start at zero."""
    small, large, event = grown(method)
    before, after = moments(small, training), moments(large, training)
    for what, (tensors, power) in before.items():
        for name, tensor in tensors.items():
            got, expected = carried(event, name, tensor, power), after[what][0][name]
            known = old_entries(name) if method not in COPIES else torch.ones_like(got, dtype=torch.bool)
            torch.testing.assert_close(got[known], expected[known], rtol=1e-8, atol=1e-12, msg=f"{what} of {name}")
            assert (got[~known] == 0).all(), f"{what} of {name}"


def larss_momentum(network, batches):
    """V of LARS after so many batches, at weights that hardly move."""
    optimizer = LARS(network.parameters(), lr=1e-14, momentum=0.9)
    for _, gradient in zip(range(batches), some_gradients(network), strict=False):
        for name, parameter in network.named_parameters():
            parameter.grad = gradient[name]
        optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    "method, batches", [(Net2Net(), 1), (HyperCloning(), 4), (HyperCloning("diagonal"), 4), (Lemon(), 1)]
)
def test_larss_momentum_is_as_long_as_the_grown_weights_make_it(method, batches):
    """Beside gradients it holds the rates of its layers, which are their weights' norms over their gradients'."""
    small, large, event = grown(method)
    optimizer, expected = larss_momentum(small, batches), larss_momentum(large, batches)
    named = dict(small.named_parameters())
    pairs = {name: (p, event.replaced[name][1]) for name, p in named.items() if name in event.replaced}
    follow(optimizer, pairs, GRAPH, BEFORE, AFTER, "inherit", event.carry)
    for name, parameter in large.named_parameters():
        followed = parameter if name in pairs else named[name]
        torch.testing.assert_close(
            optimizer.state[followed]["momentum_buffer"],
            expected.state[parameter]["momentum_buffer"],
            rtol=1e-7,
            atol=1e-24,
            msg=lambda told, name=name: f"{name}: {told}",
        )


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("rule", ["fan_in_ratio", "constraint"])
def test_variance_transfer_divides_gradients_by_the_scale_of_the_weights(rule, training):
    """Exact in eval mode; in train mode up to batch normalisation's eps."""
    small, large, event = grown(VarianceTransfer(rule, noise_std=0.0))
    assert row_multipliers(large)
    scaled = {name for name in event.carry.scales if not torch.as_tensor(event.carry.scales[name] == 1).all()}
    assert {"depthwise.weight", "pointwise.weight", "hidden.weight", "classifier.weight"} & scaled
    before, after = moments(small, training), moments(large, training)
    for what, (tensors, power) in before.items():
        for name, tensor in tensors.items():
            got, expected, old = carried(event, name, tensor, power), after[what][0][name], old_entries(name)
            error = (got[old] - expected[old]).norm() / (expected[old].norm() + 1e-9)
            assert error < (1e-3 if training else 1e-8), f"{what} of {name}: {error:.1e}"


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("method", [VarianceTransfer, Halving], ids=lambda m: m.__name__)
def test_without_the_multiplier_all_state_follows_the_logits_that_shrink(method, training):
    """Exact where the loss is linear in the logits, for parameters too that the event leaves alone."""
    small, large, event = grown(method(output_multiplier=False))
    assert event.output_factor != 1.0
    weight = torch.randn(4, generator=torch.Generator().manual_seed(5)).double()
    before, after = (next(some_gradients(one, training, lambda z, _: (z * weight).sum())) for one in (small, large))
    for name, gradient in before.items():
        old = old_entries(name)
        for power in (1, 2):
            got, expected = carried(event, name, gradient**power, power)[old], after[name][old] ** power
            error = (got - expected).norm() / (expected.norm() + 1e-9)
            assert error < (1e-3 if training else 1e-9), f"{name}, power {power}: {error:.1e}"


def test_channels_that_come_behind_an_event_have_no_gradient() -> None:
    carry = Carry({"a": torch.tensor([0, 1, 0])}, {"a": torch.tensor([0.5, 1.0, 0.5])}, {}, {"b": torch.eye(2)})
    longer = carry.extended({"a": 5, "b": 3, "c": 7})
    assert longer.sources["a"].tolist() == [0, 1, 0, -1, -1]
    assert longer.rows["a"].tolist() == [0.5, 1.0, 0.5, 1.0, 1.0]
    assert longer.bases["b"].tolist() == [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize("power", [0, 1, 2])
def test_channels_without_sources_are_carried_as_those_that_name_their_own(power: int) -> None:
    """Blocks are copied at once where no channel takes over another's gradient; several parts of an axis too."""
    rows = {name: 1.0 + torch.rand(width) for name, width in AFTER.items()}
    kept = {name: torch.arange(width) for name, width in AFTER.items()}
    named = {name: torch.where(kept[name] < BEFORE[name], kept[name], -1) for name in kept}
    for name, axes in GRAPH.axes.items():
        old = torch.randn([axis.length(BEFORE) for axis in axes], dtype=torch.float64)
        scales = {name: 0.5}
        ours = Carry(rows=rows, scales=scales, every=3.0).carried(old, name, GRAPH, BEFORE, AFTER, power)
        theirs = Carry(named, rows, scales, every=3.0).carried(old, name, GRAPH, BEFORE, AFTER, power)
        assert torch.equal(ours, theirs) and ours.data_ptr() != old.data_ptr()


Make = Callable[[Any], torch.optim.Optimizer]


class Lion(torch.optim.Optimizer):
    """Sign-based, of no library (Chen et al. 2023, Algorithm 2)."""

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
#: What each element steps by follows from its own gradients, and from itself by weight decay.
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
#: Their divisors would differ for what they add to the square root, or they know no divisors.
NOT_COMPENSATED = {"Adadelta", "Lion", "SGD", "ASGD"}
#: What they do to a weight depends on all of it.
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
    """A network on its way from a quarter of its widths, and its optimizer."""

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
        """Step of the weights that the network uses, by name."""
        before = self.used()
        self.network.zero_grad()
        F.cross_entropy(self.network(self.x), self.y).backward()
        self.optimizer.step()
        return {name: weight - before[name] for name, weight in self.used().items()}

    def load(self, other: "Training") -> None:
        for name in ("network", "grower", "optimizer"):
            getattr(self, name).load_state_dict(copy.deepcopy(getattr(other, name).state_dict()))

    def used(self) -> dict[str, Tensor]:
        known = multiplied_weights(self.network)
        return {name: known.get(name, p).detach().clone() for name, p in self.network.named_parameters()}

    def moves(self) -> list[tuple[str, Tensor, Tensor]]:
        """Steps that come next, without an event and with one, on old entries."""
        # RAdam's first five are proportional to the gradient.
        for _ in range(6):
            self.step()
        narrow, optimizer = copy.deepcopy((self.grower, self.optimizer))
        other = copy.copy(self)
        other.grower, other.network, other.optimizer = narrow, narrow.network, optimizer
        self.grower.step(epoch=self.grower.state.stage + 1)
        now, then = self.step(), other.step()
        return [(n, then[n], now[n][tuple(map(slice, then[n].shape))]) for n in then]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_event_changes_no_step_on_old_entries(name: str) -> None:
    """The step after an event is the one that the network before it would have taken."""
    training = Training(ELEMENTWISE[name])
    for _ in range(2):
        for weight, before, after in training.moves():
            # Where the gradient is all but zero, rounding decides on its sign.
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
        # Of two events by two, each sqrt(2) in hidden layers and 2 in the last; before the second the first was there.
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
    """Saved while Adam's multipliers were kept: loaded as it is, and exact at the next event."""
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
    whole, resumed = (Training(ELEMENTWISE["AdamW"], treatment) for _ in range(2))
    whole.moves()
    resumed.load(whole)
    for training in (whole, resumed):
        training.step()
        training.grower.step(epoch=2)
        training.step()
    for (name, one), other in zip(whole.network.named_parameters(), resumed.network.parameters(), strict=True):
        assert torch.equal(one, other), name


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
    """Steps on gradients that are all twice as large are as long, or else twice as long."""
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

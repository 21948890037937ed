"""Steps on weights that variance transfer would multiply: as long after an event as before it."""

import copy
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import growlab.optim
from growlab import Grower, VarianceTransfer
from growlab.growth.methods.variance_transfer import Treatment
from growlab.growth.multipliers import multiplied_weights, row_multipliers
from growlab.optim.carry import normalises
from tests.cases import Around

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
        self.grower = Grower(
            self.network,
            self.x[:8],
            method=VarianceTransfer(multipliers=treatment),
            trigger={0: 0.25, 1: 0.5, 2: 1.0},
            anneal_steps=0,
        )
        self.optimizer = make(self.network.parameters())
        self.grower.follow(self.optimizer, state=state)

    def step(self) -> dict[str, Tensor]:
        """Step of the weights that the network uses, by name."""
        before = self.used()
        self.network.zero_grad()
        F.cross_entropy(self.network(self.x), self.y).backward()
        self.optimizer.step()
        return {name: weight - before[name] for name, weight in self.used().items()}

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
    saved = copy.deepcopy([one.state_dict() for one in (kept.network, kept.grower, kept.optimizer)])
    for one, state in zip((now.network, now.grower, now.optimizer), saved, strict=True):
        one.load_state_dict(state)
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
    saved = copy.deepcopy([one.state_dict() for one in (whole.network, whole.grower, whole.optimizer)])
    for one, state in zip((resumed.network, resumed.grower, resumed.optimizer), saved, strict=True):
        one.load_state_dict(state)
    for training in (whole, resumed):
        training.step()
        training.grower.step(epoch=2)
        training.step()
    for (name, one), other in zip(whole.network.named_parameters(), resumed.network.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_a_closure_and_an_optimizer_around_another_are_compensated_once() -> None:
    class Around(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            super().__init__(optimizer.param_groups, {})
            self.optimizer, self.param_groups = optimizer, optimizer.param_groups

        def step(self, closure: Any = None) -> Any:
            return self.optimizer.step(closure)

    plain = Training(ELEMENTWISE["AdamW"], "compensate")
    around = Training(lambda p: Around(ELEMENTWISE["AdamW"](p)), "compensate")
    for training in (plain, around):
        training.step()
        training.grower.step(epoch=1)
    plain.step()
    before = around.network.zero_grad()

    def closure() -> Tensor:
        loss = F.cross_entropy(around.network(around.x), around.y)
        loss.backward()
        return loss

    assert before is None
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


def test_an_unknown_treatment_is_refused() -> None:
    with pytest.raises(ValueError, match="auto, keep, fold or compensate"):
        VarianceTransfer(multipliers="drop")  # type: ignore[arg-type]

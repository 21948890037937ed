"""Plans of small networks: cost, probes, rates that go wrong, and refusals."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from growlab import Net2Net
from growlab.base.errors import UserError
from growlab.grower.cost import forward_flops
from growlab.lab.planner import Candidate, Planned, Settings, plan, table
from growlab.lab.planner.fit import Measured
from growlab.lab.planner.probes import FULL, Account, Probe
from growlab.lab.planner.search import _Search
from growlab.lab.training.learning_rate import LearningRate
from tests.plan.problems import BATCH, BATCHES, WIDTH, batches, network, problem, sgd


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return []


@pytest.fixture(scope="module")
def planned(lines: list[str]) -> Planned:
    return plan(problem(), Settings(), lines.append)


def test_the_cap_is_never_exceeded(planned: Planned, lines: list[str]) -> None:
    account = planned.account
    # It is used, too.
    assert 0.12 < account.spent <= 0.15 and 0 < account.training < account.spent and account.seconds > 0
    assert any("rate x0.5" in line for line in lines) and "grown" in lines[-1]
    assert f"(spent {100 * account.spent:.2f} %)" in lines[-1]
    text = table(planned)
    assert all(f"| {name} |" in text for name in ("half", "quarter")) and "| full | 100 |" in text


@pytest.mark.parametrize(("max_cost", "epochs"), [(0.12, 30), (0.5, 20)])
def test_no_cap_is_exceeded(max_cost: float, epochs: float) -> None:
    account = plan(problem(epochs), Settings(max_cost=max_cost)).account
    assert 0.6 * max_cost < account.spent <= max_cost


def test_costs_are_those_of_the_training(planned: Planned) -> None:
    """Every probe's training, from its steps and the FLOPs of its network, adds up to what was spent on training."""
    whole = forward_flops(network(), torch.zeros(1, 8))
    one = BATCH / (40 * BATCH * BATCHES)
    assert planned.account.total_flops == 3 * whole * 40 * BATCH * BATCHES
    for probe in planned.tried:
        assert probe["cost"] == pytest.approx(probe["steps"] * one * planned.flops[str(probe["candidate"])])
    trained = sum(float(probe["cost"]) for probe in planned.tried)
    further = sum(trial.further for trial in planned.trials.values())
    assert planned.account.training == pytest.approx(trained + further)


def test_the_full_network_is_probed_as_far_as_it_has_to_be(planned: Planned) -> None:
    full = planned.measured["full"]
    assert 1 / 16 <= full.cost[-1] < 1.1 / 16 and list(full.cost) == sorted(full.cost)
    assert all(loss < 1.3 for loss in full.loss) and full.loss[-1] < full.loss[0]


def test_the_trial_growth_preserves_the_function(planned: Planned) -> None:
    ((name, trial),) = planned.trials.items()
    assert name in ("half", "quarter") and trial.loss_after == pytest.approx(trial.loss_before, abs=1e-3)
    assert trial.further > 0 and planned.measured[name].cost[-1] == trial.cost


def test_a_plan_is_a_function_of_its_seed(planned: Planned) -> None:
    again = plan(problem(), Settings())
    assert again.trials == planned.trials and again.verdict.kind == planned.verdict.kind
    assert again.measured["full"].loss == planned.measured["full"].loss
    other = plan(problem(seed=1), Settings(charge=True))
    assert other.measured["full"].loss != planned.measured["full"].loss
    # What was spent can be charged.
    assert other.budget == pytest.approx(1 - other.account.spent)


# Probes ------------------------------------------------------------------------------------------------------


def test_evaluating_leaves_training_as_it_is() -> None:
    weights = []
    for looks in (0, 5):
        probe = Probe(problem(), None, 1.0, Account(1.0, 1e9), 100)
        for _ in range(4):
            for _ in range(looks):
                probe.measure()
            probe._step()
        weights.append({name: tensor.clone() for name, tensor in probe.network.state_dict().items()})
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_a_probe_trains_as_a_plain_loop_does() -> None:
    probe = Probe(problem(), None, 2.0, Account(1.0, 1e9), 100)
    probe.train(steps=7)
    torch.manual_seed(0)
    plain = network()
    optimizer = sgd(plain, 2.0)
    for x, y in list(batches(0))[:7]:
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        optimizer.step()
    ours = probe.network.state_dict()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in plain.state_dict().items())
    assert probe.points[-1].steps == 7


def test_averages_grow_along() -> None:
    probe = Probe(problem(), Candidate("half", 0.5), 1.0, Account(1.0, 1e9), 200)
    probe.train(steps=12)
    before = probe.measure()
    assert probe.grow() == pytest.approx(before, abs=1e-3)
    assert probe.forward_cost == forward_flops(network(), torch.zeros(1, 8)) / 1e9
    probe.train(steps=20)
    assert probe.loss < before


def test_starts_are_from_before_the_trial_growth(planned: Planned) -> None:
    assert planned.starts.keys() == planned.measured.keys()
    widths = {"full": WIDTH, "half": WIDTH // 2, "quarter": WIDTH // 4}
    for name, (weights, optimizer) in planned.starts.items():
        assert len(weights["0.weight"]) == widths[name]
        assert (
            optimizer is not None and optimizer["state"].keys() == dict(network().named_parameters()).keys()
        )
        for key, state in optimizer["state"].items():
            assert state["momentum_buffer"].shape == weights[key].shape


# Wrong input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("known", "settings", "message"),
    [
        ({"budget_samples": 500.0}, {}, "too small to probe: 15% of it are 5 steps"),
        ({}, {"max_cost": 0.05, "multiple": 16}, "has to be probed for 6.2% of it"),
        ({"held_out": []}, {}, "needs held-out batches"),
        ({"batches": lambda epoch: []}, {}, "no training batches"),
        ({"candidates": (Candidate("same", 1.0),)}, {}, "same: it costs nearly as much as the full network"),
        ({"candidates": (Candidate("a", 0.5), Candidate("a", 0.25))}, {}, "two candidates are called a"),
        ({"make_optimizer": lambda n, m: sgd(n, 1e30)}, {}, "breaks down at every rate (1, 0.5, 2 times"),
        ({"make_optimizer": lambda n, m: sgd(n, 1e30)}, {"rates": [1]}, "breaks down at every rate (1 times"),
    ],
)
def test_problems_that_cannot_be_planned_are_refused(
    known: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        plan(problem(**known), Settings(**settings))


def test_a_custom_growth_method_is_tried() -> None:
    made: list[Net2Net] = []

    def method() -> Net2Net:
        made.append(Net2Net())
        return made[-1]

    found = plan(problem(make_method=method), Settings())
    assert made and found.trials


def test_losses_below_zero_are_refused() -> None:
    def shifted(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, y) - 3

    with pytest.raises(UserError, match=r"a plan needs a loss that is never below 0, and this one's .* is -"):
        plan(problem(loss=shifted))
    with pytest.raises(ValueError, match=r"losses of at least 0, not -0\.5"):
        Measured((0.1, 0.2, 0.3, 0.4), (1.0, 0.5, 0.1, -0.5))
    Measured((0.1, 0.2, 0.3, 0.4), (1.0, 0.5, 0.1, 0.0))


def rising(parameters: Any, multiple: float) -> torch.optim.Optimizer:
    """Twice the rate trains best at first and goes wrong a little later."""

    class Rising(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> None:
            self.steps += 1
            if multiple == 2 and self.steps > 16:
                with torch.no_grad():
                    for p in parameters.parameters():
                        p.mul_(1.3)
            super().step(closure)

    return Rising(parameters.parameters(), lr=0.1 if multiple == 2 else 0.02, momentum=0.9)


def test_where_the_loss_rises_at_a_higher_rate_the_usual_one_takes_its_place() -> None:
    said: list[str] = []
    planned = plan(problem(make_optimizer=rising), Settings(max_cost=0.3), said.append)
    assert any("rate x2" in line for line in said)
    tried = [(one["candidate"], one["rate"]) for one in planned.tried]
    assert (FULL, 1.0) in tried and planned.rates[FULL] == 1.0
    assert all(planned.rates[name] == 1.0 for name in planned.rates if (name, 1.0) in tried)
    assert planned.account.spent <= 0.3


def test_the_usual_rate_stays_whatever_the_loss_does() -> None:
    def worse(module: nn.Module, multiple: float) -> torch.optim.Optimizer:
        return rising(module, 2.0)

    search = _Search(problem(make_optimizer=worse), Settings(rates=(1.0, 0.5)), lambda line: None)
    search.best[FULL] = search.full
    search._train(FULL, cost=0.05)
    assert search.best[FULL] is search.full and search.full.rises


@pytest.mark.parametrize(
    "wrong",
    [
        *({"multiple": "abc"}, {"max_cost": True}, {"latest": float("nan")}, {"rates": [float("inf")]}),
        *({"rates": "1"}, {"rates": 1.0}, {"seed": -1}, {"charge": -2}, {"rates": []}, {"size": "half"}),
        *({"max_cost": 1.0}, {"multiple": 0.5}, {"latest": 1.0}),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        Settings(**wrong)


@pytest.mark.parametrize("depth", [-3, 1.5, float("nan")])
def test_a_depth_that_cannot_be_is_refused(depth: float) -> None:
    with pytest.raises(ValidationError, match="depth"):
        Candidate("odd", 0.5, depth=depth)
    with pytest.raises(ValidationError, match="width"):
        Candidate("odd", width=0.0)


@pytest.mark.parametrize(("warmup", "decay"), [(0.8, 0.2), (0.9, 0.1), (0.7, 0.3), (0.0, 1.0)])
def test_warm_up_and_decay_that_fill_a_run_are_a_schedule(warmup: float, decay: float) -> None:
    assert LearningRate(shape="wsd", warmup_fraction=warmup, decay_fraction=decay).decay_fraction == decay
    with pytest.raises(ValueError, match="at most what warm-up leaves"):
        LearningRate(shape="wsd", warmup_fraction=warmup, decay_fraction=decay + 0.01)

"""What plans refuse, and what they do where training at a chosen rate goes wrong."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from growlab.base.errors import UserError
from growlab.lab.planner import Candidate, plan
from growlab.lab.planner.fit import Measured
from growlab.lab.planner.probes import FULL, Settings
from growlab.lab.planner.search import _Search
from growlab.lab.training.learning_rate import LearningRate
from tests.plan.problems import problem


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
    with pytest.raises(UserError, match="the depth of candidate odd must be from 0 to 1"):
        Candidate("odd", 0.5, depth=depth)
    with pytest.raises(UserError, match="width of candidate"):
        Candidate("odd", 0.0)


@pytest.mark.parametrize(("warmup", "decay"), [(0.8, 0.2), (0.9, 0.1), (0.7, 0.3), (0.0, 1.0)])
def test_warm_up_and_decay_that_fill_a_run_are_a_schedule(warmup: float, decay: float) -> None:
    assert LearningRate(shape="wsd", warmup_fraction=warmup, decay_fraction=decay).decay_fraction == decay
    with pytest.raises(ValueError, match="at most what warm-up leaves"):
        LearningRate(shape="wsd", warmup_fraction=warmup, decay_fraction=decay + 0.01)

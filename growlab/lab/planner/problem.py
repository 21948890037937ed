"""What is asked: a network, its training and its data, the budget, and the candidates to start small from."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from growlab.base.errors import UserError
from growlab.growth import GrowthMethod, PairGrowth
from growlab.parts import Part

#: The name of the full network among the candidates.
WHOLE = "full"
Batch = tuple[Any, ...]


@dataclass(frozen=True)
class Candidate:
    """A smaller network that growing could start from, or that could stay as it is.

    Attributes:
        name: what it is called.
        width: of every width group, relative to the full network.
        parts: makes the parts that leave something else out, such as blocks.
        settings: of the configuration, where the plan writes experiments.
        depth: part of those blocks that a network which never grows has.
        alone: whether it could be trained to the end as it is; False where only its inputs are smaller at first.
    """

    name: str
    width: float = 1.0
    parts: Callable[[], Sequence[Part]] = list
    settings: Mapping[str, Any] = field(default_factory=dict)
    depth: float = 1.0
    alone: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.width <= 1:
            raise UserError(f"plan: the width of candidate {self.name} must be above 0 and at most 1.")
        if not 0 <= self.depth <= 1:
            raise UserError(f"plan: the depth of candidate {self.name} must be from 0 to 1.")


@dataclass(frozen=True)
class Problem:
    """A training whose budget is to be planned.

    Attributes:
        make_network: makes the full network.
        make_optimizer: makes the optimizer of a network with a multiple of its usual rate.
        batches: maps a number (of an epoch) to its training batches: tuples of inputs and, last, the target.
        loss: mean loss of a batch from the network's output and the target.
        held_out: batches that are not trained on, and no test set.
        example: inputs to trace the network with, [B, ...] with B >= 2 or a tuple.
        budget_samples: training samples that the full network would see in the whole run.
        make_method: makes the growth method.
        candidates: to start small from.
        seed: of networks and growth.
        device: where probes train.
        precision: a context in which networks are called.
        clip: largest norm of the gradient; None: any.
        accumulate: batches whose gradients make a step.
    """

    make_network: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module, float], Optimizer]
    batches: Callable[[int], Iterable[Batch]]
    loss: Callable[[Any, Tensor], Tensor]
    held_out: Sequence[Batch]
    example: Any
    budget_samples: float
    make_method: Callable[[], GrowthMethod] = PairGrowth
    candidates: Sequence[Candidate] = (Candidate("half_width", 0.5),)
    seed: int = 0
    device: torch.device | str = "cpu"
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext
    clip: float | None = None
    accumulate: int = 1


@dataclass(frozen=True)
class Settings:
    """How a plan goes about it; `conf/plan/default.yaml` has the same.

    Attributes:
        size: "full": the full network is wanted in any case; "any": a smaller one will do where it is better.
        max_cost: part of the budget that probing may spend.
        multiple: curves are trusted up to so many times the cost that was probed.
        rates: multiples of the optimizer's rate to choose from, the first in doubt; fewer are tried
            where little can be spent.
        latest: part of the budget behind which there is no growing.
        charge: what was spent on probing counts as part of the budget.
        start: experiments go on from their probes' last weights, whose cost is taken off their budget.
        seed: of the draws.

    Raises:
        UserError: they cannot be.
    """

    size: Literal["any", "full"] = "any"
    max_cost: float = 0.15
    multiple: float = 16.0
    rates: Sequence[float] = (1.0, 0.5, 2.0)
    latest: float = 0.75
    charge: bool = False
    start: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.size not in ("any", "full"):
            raise UserError(f"plan.size={self.size} must be any or full.")
        numbers = {name: getattr(self, name) for name in ("max_cost", "multiple", "latest")}
        rates = self.rates if isinstance(self.rates, Sequence) and not isinstance(self.rates, str) else [None]
        for name, value in (*numbers.items(), *(("rates", rate) for rate in rates)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
                told = "be a list of numbers" if name == "rates" else "be a number"
                raise UserError(f"plan.{name}={getattr(self, name)} must {told}.")
        for name in ("charge", "start"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"plan.{name}={getattr(self, name)} must be true or false.")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise UserError(f"plan.seed={self.seed} must be a whole number from 0.")
        if not 0 < self.max_cost < 1:
            raise UserError(f"plan.max_cost={self.max_cost} must be a part of the budget, between 0 and 1.")
        if not self.multiple >= 1:
            raise UserError(f"plan.multiple={self.multiple} must be at least 1.")
        if not self.rates or any(not rate > 0 for rate in self.rates):
            raise UserError(
                f"plan.rates={list(self.rates)} must be multiples of the optimizer's rate above 0."
            )
        if not 0 < self.latest < 1:
            raise UserError(f"plan.latest={self.latest} must be a part of the budget, between 0 and 1.")

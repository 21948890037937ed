"""Probes of a plan: short trainings at a constant learning rate, evaluated on held-out data.

Weights are averaged in power form (Karras et al. 2024, Section 3.1): the average always covers the same fraction of
the training so far, so a checkpoint's loss is about that of a decayed rate. Normalisation uses the statistics of the
held-out batch.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, count, islice
from math import inf, isfinite
from statistics import median
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from growlab.base.errors import UserError
from growlab.grower import Grower
from growlab.grower.cost import forward_flops
from growlab.grower.triggers import At
from growlab.growth import GrowthMethod, PairGrowth
from growlab.growth.outputs import network_inputs
from growlab.lab.planner.fit import MIN_POINTS, Measured, settled
from growlab.optim import named_state
from growlab.parts import Part

# A forward and a backward pass cost about three forward passes.
_TRAINING_FACTOR = 3
# Exponent of the average: weights of steps grow as step^6, a window of about an eighth of the training.
_POWER = 6
# The step at which the small network grows: when the trial asks for it.
_WHEN_ASKED = 10**9
_FIRST_CHECKPOINT = 5  # steps
# Times the lowest loss so far that a loss is not by noise.
_RISE = 1.15
# Checkpoints count from this part of the probe's cost on.
_WINDOW = 8
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


#: The name of the full network among the candidates.
FULL = "full"
Batch = tuple[Any, ...]


# Settings of another type or out of their range raise pydantic.ValidationError, a ValueError.
_checked = pydantic.dataclasses.dataclass(
    frozen=True, config=pydantic.ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")
)


@_checked
class Candidate:
    """A smaller network to grow from, or to train without growing.

    Attributes:
        name: in tables and figures.
        width: of every width group, relative to the full network.
        parts: makes parts that shrink the network otherwise, such as by leaving out blocks.
        settings: of the configuration, for the experiments that the plan writes.
        depth: fraction of those blocks in the network that never grows.
        alone: True if it could be trained without growing; False if only its inputs are smaller at first.
    """

    name: str
    width: Annotated[float, Field(gt=0, le=1)] = 1.0
    parts: Callable[[], Sequence[Part]] = list
    settings: Mapping[str, Any] = field(default_factory=dict)
    depth: Annotated[float, Field(ge=0, le=1)] = 1.0
    alone: bool = True


@dataclass(frozen=True)
class Problem:
    """A training to plan.

    Attributes:
        make_network: makes the full network.
        make_optimizer: makes the optimizer of a network with a multiple of its usual rate.
        batches: maps an epoch's number to its training batches: tuples of inputs and, last, the target.
        loss: mean loss of a batch from the network's output and the target.
        held_out: batches from neither the training set nor the test set.
        example: inputs to trace the network with, [B, ...] with B >= 2 or a tuple.
        budget_samples: training samples that the full network would see in the whole run.
        make_method: makes the growth method.
        candidates: smaller networks.
        seed: of networks and growth.
        device: where probes train.
        precision: a context in which networks are called.
        clip: largest norm of the gradient; None: unlimited.
        accumulate: number of batches per optimizer step.
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


@_checked
class Settings:
    """Settings of a plan; `conf/plan/default.yaml` has the same.

    Attributes:
        size: "full": the full network is required; "any": a smaller one may be recommended.
        max_cost: part of the budget that probing may spend.
        multiple: curves are trusted up to this multiple of the probed cost.
        rates: multiples of the optimizer's rate to choose from, the first in doubt; fewer are tried
            where little can be spent.
        latest: latest growth, as a fraction of the budget.
        charge: count the cost of probing as part of the budget.
        start: experiments start from their probes' last weights, whose cost is taken off their budget.
        seed: of the draws.
    """

    size: Literal["any", "full"] = "any"
    max_cost: Annotated[float, Field(gt=0, lt=1)] = 0.15
    multiple: Annotated[float, Field(ge=1)] = 16.0
    rates: Annotated[Sequence[Annotated[float, Field(gt=0)]], Field(min_length=1)] = (1.0, 0.5, 2.0)
    latest: Annotated[float, Field(gt=0, lt=1)] = 0.75
    charge: bool = False
    start: bool = False
    seed: Annotated[int, Field(ge=0)] = 0


@dataclass
class Account:
    """Cost of probing so far, in parts of the budget; it never exceeds its limit.

    Attributes:
        limit: part of the budget that may be spent.
        total_flops: of the whole budget, forward and backward.
        spent: so far.
        training: the part of it that trained.
        seconds: measured.
    """

    limit: float
    total_flops: float
    spent: float = 0.0
    training: float = 0.0
    seconds: float = 0.0

    def affords(self, cost: float) -> bool:
        """Return True if the amount is left."""
        return self.spent + cost <= self.limit

    def pay(self, cost: float, trains: bool) -> None:
        """Spend it."""
        self.spent += cost
        self.training += cost if trains else 0.0


@dataclass(frozen=True)
class Checkpoint:
    """Measurement of a probe: optimizer steps, training cost in parts of the budget, held-out loss."""

    steps: int
    cost: float
    loss: float


class Start(NamedTuple):
    """State to start a further training from: weights by name, and `growlab.optim.named_state` if possible."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Any] | None


@dataclass
class Probe:
    """A candidate (None: the full network) in training at one multiple of the usual rate.

    Attributes:
        problem: what is trained.
        candidate: its start.
        rate: the multiple.
        account: pays for the probe.
        samples: held-out samples of an evaluation.
        cost: training so far, in parts of the budget.
        spent: the same with evaluations.
        points: its checkpoints.
    """

    problem: Problem
    candidate: Candidate | None
    rate: float
    account: Account
    samples: int
    cost: float = 0.0
    spent: float = 0.0
    steps: int = 0
    points: list[Checkpoint] = field(default_factory=list)

    def __post_init__(self) -> None:
        problem, began = self.problem, time.perf_counter()
        torch.manual_seed(problem.seed)
        self.network = problem.make_network().to(problem.device)
        self._grower = self._small(self.candidate) if self.candidate is not None else None
        if any(map(is_parametrized, self.network.modules())):
            raise UserError("weights that are computed from others, as growth=hyperfan's, cannot be probed.")
        self._optimizer = problem.make_optimizer(self.network, self.rate)
        self._average = AveragedModel(self.network, multi_avg_fn=_power_average)
        self._average.requires_grad_(False)
        if self._grower is not None:
            self._grower.follow(self._optimizer, self._average)
        self._batches = _forever(problem.batches)
        self._seconds: list[float] = []
        self._count_flops(0.0)
        self.network.train()
        self.account.seconds += time.perf_counter() - began

    def _small(self, candidate: Candidate) -> Grower:
        problem = self.problem
        grower = Grower(
            self.network,
            problem.example,
            method=problem.make_method(),
            verbose=False,
            trigger=At({0: candidate.width, _WHEN_ASKED: 1.0}, unit="step"),
            parts=candidate.parts(),
            seed=problem.seed,
        )
        grower.check_ranks = False
        grower.provide(
            lambda number: [self._placed(b) for b in islice(problem.batches(0), number)], problem.loss
        )
        return grower

    def _count_flops(self, share: float) -> None:
        """Count the FLOPs of a sample in training, at a fraction of growth, and in evaluation."""
        inputs = network_inputs(self.problem.example, self.network)
        one = tuple(x[:1] if isinstance(x, Tensor) else x for x in inputs)
        self.evaluation_cost = forward_flops(self.network, one) / self.account.total_flops
        for part in self._grower.parts if self._grower is not None else ():
            one = part.inputs_at(one, share)
        self.forward_cost = forward_flops(self.network, one) / self.account.total_flops

    @property
    def loss(self) -> float:
        """The last checkpoint's loss; infinite before the first and after a breakdown."""
        return self.points[-1].loss if self.points else inf

    @property
    def broken(self) -> bool:
        """True if the last loss was not finite."""
        return bool(self.points) and not isfinite(self.points[-1].loss)

    @property
    def seconds_per_cost(self) -> float:
        """Seconds of training per unit of cost: the median over steps, without the first."""
        steps = self._seconds[1:] or self._seconds
        return median(steps) / self._step_cost if steps else 0.0

    @property
    def rises(self) -> bool:
        """True if training breaks down, or its loss is well above its lowest."""
        return self.broken or (bool(self.points) and self.loss > _RISE * min(p.loss for p in self.points))

    @property
    def finite(self) -> list[Checkpoint]:
        """Checkpoints with a finite loss."""
        return [point for point in self.points if isfinite(point.loss)]

    def measured(self) -> Measured:
        """The measured curve, without the beginning of training, which follows no power law.

        Raises:
            UserError: there are too few checkpoints.
        """
        points = [point for point in self.finite if point.cost >= self.points[-1].cost / _WINDOW]
        points = points if len(points) >= MIN_POINTS else self.finite[-MIN_POINTS:]
        cost, loss = tuple(p.cost for p in points), tuple(p.loss for p in points)
        first, steady = settled(cost, loss)
        try:
            return Measured(cost[first:], loss[first:], self.seconds_per_cost, steady)
        except ValueError as error:
            name = self.candidate.name if self.candidate else "the full network"
            raise UserError(
                f"the budget is too small to probe: {error} (of {name}); raise schedule.budget or plan.max_cost."
            ) from error

    def start(self) -> Start:
        """The current weights (not averaged) and the optimizer's state, for a run to start from."""
        weights = {name: tensor.detach().cpu().clone() for name, tensor in self.network.state_dict().items()}
        try:
            return Start(weights, named_state(self._optimizer, self.network))
        except ValueError:
            # Of a kind that no file of weights may contain; `start_from` then begins it from nothing.
            return Start(weights, None)

    # Training ----------------------------------------------------------------------------------------------

    def train(self, cost: float = inf, steps: float = inf, spend: float = inf, wary: bool = False) -> bool:
        """Train to a cost, a number of steps or a total spent, whichever comes first, and evaluate at the end.

        Args:
            cost: training, in parts of the budget.
            steps: of the optimizer.
            spend: with evaluations.
            wary: stop if the loss rises.

        Returns:
            True if the target was reached; False if the account was empty, training broke down, or the loss rose.
        """
        due = self._next_checkpoint()
        while self.cost < cost and self.steps < steps and not self.broken:
            if self.spent + self._step_cost + self._measure_cost > spend:
                break
            if not self.account.affords(self._step_cost + self._measure_cost):
                self.evaluate()
                return False
            if not self._step():
                self.points.append(Checkpoint(self.steps, self.cost, inf))
                return False
            if self.steps >= due:
                self.evaluate()
                due = self._next_checkpoint()
                if wary and self.rises:
                    return False
        self.evaluate()
        return not self.broken

    def _next_checkpoint(self) -> int:
        done = self.points[-1].steps if self.points else 0
        return max(_FIRST_CHECKPOINT, done + 1, round(1.4 * done))

    @property
    def _step_cost(self) -> float:
        size = self.problem.accumulate * _size(self._peek())
        return _TRAINING_FACTOR * self.forward_cost * size

    @property
    def _measure_cost(self) -> float:
        return self.evaluation_cost * self.samples

    def _peek(self) -> Batch:
        if not hasattr(self, "_first"):
            self._first = next(self._batches)
            self._batches = chain([self._first], self._batches)
        return self._first

    def _step(self) -> bool:
        """Do an optimizer step; return False if the loss is not finite."""
        problem, began, fine = self.problem, time.perf_counter(), True
        self._optimizer.zero_grad()
        for _ in range(problem.accumulate):
            *inputs, target = self._placed(next(self._batches))
            with problem.precision():
                output = self.network(*inputs)
                if self._grower is not None:
                    target = self._grower.targets(target)
                loss = problem.loss(output, target) / problem.accumulate
            loss.backward()
            fine = fine and bool(torch.isfinite(loss.detach()))
        if problem.clip:
            nn.utils.clip_grad_norm_(self.network.parameters(), problem.clip)
        if fine:
            self._optimizer.step()
            self._average.update_parameters(self.network)
        self.steps += 1
        cost, seconds = self._step_cost, time.perf_counter() - began
        self._seconds.append(seconds)
        self.account.seconds += seconds
        self.cost += cost
        self._pay(cost, True)
        return fine

    def evaluate(self) -> float:
        """Measure the held-out loss of the averaged weights, and add a checkpoint, once for each step."""
        if self.points and self.points[-1].steps == self.steps:
            return self.points[-1].loss
        loss = self.measure()
        self.points.append(Checkpoint(self.steps, self.cost, loss))
        return loss

    @torch.no_grad()
    def measure(self) -> float:
        """Measure the held-out loss of the averaged weights, without a checkpoint."""
        began, network = time.perf_counter(), self._average.module
        total, seen = 0.0, 0
        with _own_statistics(network):
            for batch in self._held_out():
                *inputs, target = self._placed(batch)
                with self.problem.precision():
                    value = float(self.problem.loss(network(*inputs), target))
                total, seen = total + value * _size(batch), seen + _size(batch)
        self._pay(self.evaluation_cost * seen, False)
        self.account.seconds += time.perf_counter() - began
        if total < 0:
            raise UserError(
                f"a plan needs a loss that is never below 0, and this one's held-out loss is {total / seen:.3g}: laws "
                "of falling losses are fitted to it; add the constant that makes its lowest possible value 0."
            )
        return total / seen if isfinite(total) else inf

    def _held_out(self) -> Iterator[Batch]:
        left = self.samples
        for batch in self.problem.held_out:
            if left <= 0:
                return
            part = tuple(x[:left] if isinstance(x, Tensor) else x for x in batch)
            left -= _size(part)
            yield part

    def _pay(self, cost: float, trains: bool) -> None:
        self.spent += cost
        self.account.pay(cost, trains)

    def _placed(self, batch: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(x.to(self.problem.device) if isinstance(x, Tensor) else x for x in batch)

    # Growth --------------------------------------------------------------------------------------------------

    def grow(self) -> float | None:
        """Grow to the full network, with averages and optimizer.

        Returns:
            The loss after the event; None if the account cannot pay for measuring it and one more step.
        """
        assert self._grower is not None
        began = time.perf_counter()
        self._grower.step(step=_WHEN_ASKED)
        self._count_flops(1.0)
        self._seconds.clear()
        self.account.seconds += time.perf_counter() - began
        return self.measure() if self.account.affords(2 * self._measure_cost + self._step_cost) else None


def _power_average(averaged: Any, current: Any, number: Any) -> None:
    decay = (1 - 1 / (int(number) + 1)) ** (_POWER + 1)
    torch._foreach_lerp_(averaged, current, 1 - decay)


@contextmanager
def _own_statistics(network: nn.Module) -> Iterator[None]:
    """Evaluate batch normalisation with each batch's statistics, without changing the running ones."""
    network.eval()
    norms = [module for module in network.modules() if isinstance(module, _BATCH_NORMS)]
    kept = [(module, module.momentum) for module in norms]
    for module in norms:
        module.training, module.momentum = True, 0.0
    try:
        yield
    finally:
        for module, momentum in kept:
            module.training, module.momentum = False, momentum


def _forever(batches: Callable[[int], Any]) -> Iterator[Batch]:
    for epoch in count():
        number = 0
        for batch in batches(epoch):
            number += 1
            yield tuple(batch)
        if not number:
            raise UserError("there are no training batches to probe with.")


def _size(batch: Sequence[Any]) -> int:
    return len(batch[-1])

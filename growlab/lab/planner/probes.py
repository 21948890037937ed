"""Short trainings of one network at several rates, of which the best one is kept."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count, islice
from math import inf, isfinite
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from growlab.base.errors import UserError
from growlab.optim import named_state

Batch = tuple[Any, ...]
# Steps at each rate, at least: fewer do not show which rate is better.
_LEAST_STEPS = 8
# A rate has to be better by so much of the loss to be taken in place of the first one.
_MARGIN = 0.01


@dataclass(frozen=True)
class Problem:
    """A network to train, and its data.

    Attributes:
        make_network: makes it, with the hooks that it trains with.
        make_optimizer: makes the optimizer of a network with a multiple of its usual rate.
        batches: maps the number of an epoch to its training batches: tuples of inputs and, last, the target.
        loss: mean loss of a batch from the network's output and the target.
        accumulate: batches whose gradients make a step.
    """

    make_network: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module, float], Optimizer]
    batches: Callable[[int], Iterable[Batch]]
    loss: Callable[[Any, Tensor], Tensor]
    device: torch.device
    precision: Callable[[], AbstractContextManager[Any]]
    clip: float | None
    accumulate: int


@dataclass(frozen=True)
class Probe:
    """Training at one rate.

    Attributes:
        loss: mean training loss of the later half of its steps, each batch before it is learned from.
        optimizer: `growlab.optim.named_state`; None if no file of weights can contain it.
    """

    rate: float
    loss: float
    steps: int
    seconds_per_step: float
    weights: dict[str, Tensor]
    optimizer: dict[str, Any] | None


def train(problem: Problem, rate: float, steps: int, seed: int) -> Probe:
    """Train from the beginning for so many steps."""
    torch.manual_seed(seed)
    network = problem.make_network().to(problem.device).train()
    optimizer, losses, seconds = problem.make_optimizer(network, rate), list[float](), list[float]()
    batches = (batch for epoch in count() for batch in problem.batches(epoch))
    for _ in range(steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        total = 0.0
        for batch in islice(batches, problem.accumulate):
            *inputs, target = (x.to(problem.device) if isinstance(x, Tensor) else x for x in batch)
            with problem.precision():
                loss = problem.loss(network(*inputs), target) / problem.accumulate
            loss.backward()
            total += float(loss.detach())
        if problem.clip:
            nn.utils.clip_grad_norm_(network.parameters(), problem.clip)
        optimizer.step()
        losses.append(total)
        seconds.append(time.perf_counter() - began)
        if not isfinite(total):
            break
    later = mean(losses[len(losses) // 2 :])
    try:
        state: dict[str, Any] | None = named_state(optimizer, network)
    except ValueError:
        # `start_from` then begins the optimizer from nothing.
        state = None
    weights = {name: tensor.detach().cpu().clone() for name, tensor in network.state_dict().items()}
    return Probe(rate, later if isfinite(later) else inf, len(losses), median(seconds), weights, state)


def best_rate(problem: Problem, rates: Sequence[float], steps: int, seed: int, say: Callable[[str], None]) -> Probe:
    """Train at each rate for as many steps; the first one in doubt."""
    each = steps // len(rates)
    if each < _LEAST_STEPS:
        raise UserError(
            f"plan.probe allows {each} steps at each of {len(rates)} rates, and {_LEAST_STEPS} are needed: raise it or "
            "schedule.budget, try fewer plan.rates, or leave plan.probe=0."
        )
    best: Probe | None = None
    for rate in rates:
        probe = train(problem, rate, each, seed)
        say(f"  {rate:g} x optimizer.lr: training loss {probe.loss:.3f} after {probe.steps} steps")
        if best is None or probe.loss < (1 - _MARGIN) * best.loss:
            best = probe
    assert best is not None
    if best.loss == inf:
        listed = ", ".join(f"{rate:g}" for rate in rates)
        raise UserError(f"training breaks down at every rate ({listed} x optimizer.lr): lower that, or plan.rates.")
    return best

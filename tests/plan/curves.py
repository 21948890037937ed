"""Curves with a known answer, for the fit and the verdict."""

from collections.abc import Callable

import numpy as np

from growlab.lab.planner.fit import Curves, Measured, fit
from growlab.lab.planner.verdict import Trial, Verdict, judge

Law = tuple[float, float, float]


def loss(law: Law, cost: float | np.ndarray) -> float | np.ndarray:
    a, b, c = law
    return a + b * np.asarray(cost) ** -c


def cost_at(law: Law, value: np.ndarray) -> np.ndarray:
    a, b, c = law
    return (b / np.maximum(value - a, 1e-9)) ** (1 / c)


def measured(law: Law, until: float, noise: float, rng: np.random.Generator, first: float = 8.0) -> Measured:
    cost = np.geomspace(until / first, until, 8)
    # Neighbours share a part of what they average.
    shared = np.convolve(rng.normal(0, noise, 9), [0.7, 0.7], "valid")
    return Measured(tuple(cost), tuple(loss(law, cost) + shared))


def world(
    full: Law,
    small: Law,
    seed: int,
    noise: float = 0.01,
    lost: float = 0.2,
    probed: tuple[float, float] = (0.0626, 0.04),
) -> tuple[dict[str, Curves], dict[str, Trial]]:
    """Curves and trial of two networks as a plan would see them; growing loses a part of the progress."""
    rng = np.random.default_rng(seed)
    seen = {"full": measured(full, probed[0], noise, rng), "small": measured(small, probed[1], noise, rng)}
    at, further = probed[1], 0.01
    place = cost_at(full, loss(small, at)) * (1 - lost) + further
    before = float(loss(small, at))
    trial = Trial(at, before, before, further, float(loss(full, place)) + rng.normal(0, noise))
    return fit(seen, "full", draws=200, seed=seed), {"small": trial}


def verdict(full: Law, small: Law, seed: int, size: str = "any", **known: float) -> Verdict:
    curves, trials = world(full, small, seed, **known)
    return judge(curves, trials, "full", {"full": 1.0, "small": 1.0}, size=size, seed=seed)


def gain_of_growing(full: Law, small: Law, lost: float = 0.2, latest: float = 0.75) -> float:
    """By how much the best switch would really lower the full network's last loss."""
    switch = np.linspace(0.04, latest, 300)
    place = cost_at(full, loss(small, switch)) * (1 - lost) + 1 - switch
    return float(loss(full, 1.0) - np.min(loss(full, place)))


def share(says: Callable[[int], bool], seeds: range) -> float:
    return sum(map(says, seeds)) / len(seeds)

"""Loss over cost: saturating power laws with their uncertainty.

A candidate's held-out loss is modelled as `L(C) = a + b C^-c` with `a >= 0`, `b, c > 0` (Hestness et al. 2017,
Section 3; Hoffmann et al. 2022, Eq. 2). A short probe does not identify both `a` and `c`, so there is no single fit:
each draw weighs the checkpoints at random (Rubin's Bayesian bootstrap, 1981) and then takes (a, c) from the
likelihood of
the weighted residuals on a grid, `b` being the least-squares one. Two assumptions tie the candidates of one plan
together: their exponents are similar (within a quarter of each other, one deviation), and a smaller network's limit
is
no lower than the full one's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

# Exponents that were met in practice lie between 0.05 and 0.5 (Hestness et al. 2017); short runs fall faster.
_EXPONENTS = np.geomspace(0.03, 1.5, 24)
# Limits relative to the lowest loss that was measured.
_LIMITS = np.linspace(0.0, 0.97, 25)
# Deviation of a candidate's exponent from the others', in logarithms.
_SIMILAR = 0.25
# No curve is known better than this, relative to its loss: a law is no more than a description.
_LEAST_ERROR = 0.004
# Neighbouring checkpoints share most of the average that is evaluated, so two of them tell little more than one.
_INDEPENDENT = 0.45
# By so much steeper than at first that noise does not make it so.
_STEEPER = 1.3
# Relative; noise and averaging do less.
_RISE = 0.05
# Trusted multiple of a curve that does not fall as by a law.
_UNSTEADY = 2.0
#: Checkpoints that a curve has at least.
MIN_POINTS = 4


@dataclass(frozen=True)
class Measured:
    """Measurements of a candidate by its probe.

    Attributes:
        cost: training spent at each checkpoint, in parts of the budget; increasing.
        loss: held-out loss at each.
        seconds_per_cost: seconds that training takes for each unit of cost.
        steady: True if the loss follows a law, see `settled`; else it is hardly trusted beyond the probe.

    Raises:
        ValueError: there are too few checkpoints, or a loss is below 0.
    """

    cost: tuple[float, ...]
    loss: tuple[float, ...]
    seconds_per_cost: float = 1.0
    steady: bool = True

    def __post_init__(self) -> None:
        if len(self.cost) != len(self.loss) or len(self.cost) < MIN_POINTS:
            raise ValueError(f"a curve needs at least {MIN_POINTS} checkpoints, not {len(self.cost)}.")
        if min(self.loss) < 0:
            raise ValueError(f"a law is fitted to losses of at least 0, not {min(self.loss):g}.")


@dataclass(frozen=True)
class Curves:
    """Draws of the laws of one candidate, `L(C) = a + b C^-c`.

    Attributes:
        a: [draws].
        b: [draws].
        c: [draws].
        error: [draws] deviation of a measured loss from the law.
        reach: cost up to which the law is trusted; beyond it the loss is that at `reach`, an upper bound.
        steady: True if the measured loss follows a law.
        probed: cost of the last checkpoint.
    """

    a: np.ndarray
    b: np.ndarray
    c: np.ndarray
    error: np.ndarray
    reach: float
    steady: bool = True
    probed: float = 0.0

    def loss(self, cost: np.ndarray | float) -> np.ndarray:
        """Loss at costs [...] or [..., draws], which broadcast against the draws: [..., draws]."""
        return self.law(np.minimum(cost, self.reach))

    def law(self, cost: np.ndarray | float) -> np.ndarray:
        """Loss by the law also beyond `reach`: the standard that a gain is compared with."""
        return self.a + self.b * np.maximum(cost, 1e-12) ** -self.c

    def cost_at(self, loss: np.ndarray) -> np.ndarray:
        """Cost at which the law reaches a loss [..., draws]; infinite at or below its limit."""
        above = np.asarray(loss, dtype=float) - self.a
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            found = (self.b / np.maximum(above, 0.0)) ** (1 / self.c)
        return np.where(above > 0, found, np.inf)


def settled(cost: Sequence[float], loss: Sequence[float]) -> tuple[int, bool]:
    """Find the checkpoint from which training has settled.

    The slope of `ln L` over `ln C` of a law only flattens. Training that still accelerates, as after many
    initialisations, follows no law, nor does one whose loss rises.

    Returns:
        The first checkpoint to fit a law from (those before the steepest part are left out, but the last few always
        stay), and True if the rest follows a law, which takes more checkpoints than parameters to see.
    """
    x, y = np.log(cost), np.log(np.maximum(loss, 1e-12))
    first, forced = 0, False
    if len(x) > MIN_POINTS:
        # Over two intervals each, of noise the less.
        slopes = (y[:-2] - y[2:]) / (x[2:] - x[:-2])
        steepest = int(np.argmax(slopes))
        if slopes[steepest] >= _STEEPER * max(slopes[0], 0.0):
            first, forced = min(steepest, len(x) - MIN_POINTS), steepest > len(x) - MIN_POINTS
    rises = bool((np.diff(y[first:]) > _RISE).any())
    return first, not (forced or rises) and len(x) - first > MIN_POINTS


def fit(
    measured: Mapping[str, Measured], whole: str, multiple: float = 16.0, draws: int = 400, seed: int = 0
) -> dict[str, Curves]:
    """Draw laws for every candidate.

    Args:
        measured: of each candidate, by name.
        whole: name of the full network's.
        multiple: laws are trusted up to this multiple of the probed cost.
        draws: number of draws.
        seed: of the draws.

    Raises:
        ValueError: the full network was not measured.
    """
    if whole not in measured:
        raise ValueError(f"{whole} was not measured.")
    rng = np.random.default_rng(seed)
    names = [whole, *(name for name in measured if name != whole)]
    grids = {name: _Grid(measured[name], draws, rng) for name in names}
    # [draws, exponents]: what all curves say of a common exponent.
    common = _choose(sum(grid.of_exponents() for grid in grids.values()), rng)
    found: dict[str, Curves] = {}
    for name in names:
        floor = found[whole].a if name != whole else np.zeros(draws)
        a, b, c, error = grids[name].draw(_EXPONENTS[common], floor, rng)
        one = measured[name]
        reach = (multiple if one.steady else min(multiple, _UNSTEADY)) * one.cost[-1]
        found[name] = Curves(a, b, c, error, reach, one.steady, one.cost[-1])
    return found


class _Grid:
    """Log-likelihood of a curve's limits and exponents, for each random weighting of its checkpoints."""

    def __init__(self, measured: Measured, draws: int, rng: np.random.Generator) -> None:
        cost, loss = np.asarray(measured.cost), np.asarray(measured.loss)
        weights = rng.dirichlet(np.ones(len(cost)), draws) * len(cost)
        # Of the later checkpoints, which what is to come resembles most, each counts most.
        later = np.linspace(0.5, 1.5, len(cost))
        weights = weights * later / later.mean()
        self.limits = _LIMITS * loss.min()
        basis = cost[None, :] ** -_EXPONENTS[:, None]  # [exponents, points]
        above = loss[None, :] - self.limits[:, None]  # [limits, points]
        num = np.einsum("dp,ep,lp->dle", weights, basis, above)
        den = np.einsum("dp,ep->de", weights, basis**2)[:, None, :]
        self.b = np.maximum(num, 1e-12) / den  # [draws, limits, exponents]
        squares = np.einsum("dp,lp->dl", weights, above**2)[:, :, None]
        residual = np.maximum(squares - 2 * self.b * num + self.b**2 * den, 0.0)
        floor = max(_LEAST_ERROR * loss.min(), 1e-12) ** 2
        self.variance = residual / max(1, len(cost) - 2) + floor
        # Marginal over an unknown variance (Student's t), of so many independent points.
        self.log = -0.5 * _INDEPENDENT * len(cost) * np.log(residual / len(cost) + floor)

    def of_exponents(self) -> np.ndarray:
        """[draws, exponents], limits summed over."""
        top = self.log.max(axis=1, keepdims=True)
        return np.log(np.exp(self.log - top).sum(axis=1)) + top[:, 0]

    def draw(self, common: np.ndarray, floor: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        """Draw a limit of at least `floor`, factor, exponent and error for each draw, given the common exponents."""
        near = -0.5 * ((np.log(_EXPONENTS)[None, :] - np.log(common)[:, None]) / _SIMILAR) ** 2
        log = self.log + near[:, None, :]
        allowed = self.limits[None, :] >= floor[:, None] - 1e-12
        allowed[:, -1] = True
        log = np.where(allowed[:, :, None], log, -np.inf)
        draws = len(log)
        chosen = _choose(log.reshape(draws, -1), rng)
        limit, exponent = np.divmod(chosen, len(_EXPONENTS))
        rows = np.arange(draws)
        error = np.sqrt(self.variance[rows, limit, exponent])
        return self.limits[limit], self.b[rows, limit, exponent], _EXPONENTS[exponent], error


def _choose(log: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw an index for each row of log-weights [draws, choices]."""
    weights = np.exp(log - log.max(axis=1, keepdims=True)).cumsum(axis=1)
    return (weights < rng.random(len(log))[:, None] * weights[:, -1:]).sum(axis=1)


def interval(draws: np.ndarray, level: float = 0.9) -> tuple[float, float]:
    """Central interval of draws."""
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def quantiles(curves: Curves, cost: Sequence[float] | np.ndarray) -> np.ndarray:
    """5 %, 50 % and 95 % of the loss at costs, [3, costs]."""
    return np.quantile(curves.loss(np.asarray(cost)[:, None]), [0.05, 0.5, 0.95], axis=1)

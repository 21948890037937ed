"""Rate rules: how fast each region of a weight learns (Yuan et al. 2023, Eq. 5, Tables 1 and 9, Appendix D)."""

import warnings
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor

from growlab.base.errors import UserError

# Ratios of norms below this say nothing of how fast a region should learn; 0.056 is the least of measured runs.
_SMALL = 1e-3
_LOOK_EVERY = 100


class RateRule(Protocol):
    """Turns the norms of a weight's regions into factors on the learning rate."""

    def factors(self, norms_K: Tensor) -> Tensor:
        """Factors [..., K] from the Frobenius norms [..., K] of the regions, oldest first.

        Leading dimensions are weights; one with fewer regions has norms 0 at the end of its row.
        """


class BaseRate:
    """Every region at the base rate; Adam and AvaGrad still treat regions apart (Table 9)."""

    def factors(self, norms_K: Tensor) -> Tensor:
        """Factors [..., K] from the norms [..., K] of the regions, oldest first."""
        return torch.ones_like(norms_K)


class _Bounded:
    """Factors up to a bound, with a warning the first time that it binds.

    Args:
        max_factor: the largest factor on the base rate, at least 1.

    Raises:
        UserError: a smaller bound.
    """

    def __init__(self, max_factor: float) -> None:
        given: Any = max_factor
        if isinstance(given, bool) or not isinstance(given, Real) or not float(given) >= 1:
            raise UserError(
                f"max_factor={max_factor!r} must be at least 1: it bounds the factors on the base rate."
            )
        self.max_factor = float(max_factor)
        self._calls, self._warned = 0, False

    def _bounded(self, factors_K: Tensor) -> Tensor:
        # Reading a number back stalls a GPU.
        self._calls += 1
        if not self._warned and (factors_K.device.type == "cpu" or self._calls % _LOOK_EVERY == 1):
            largest = float(factors_K.nan_to_num(0.0).max()) if factors_K.numel() else 0.0
            if largest > self.max_factor:
                self._warned = True
                warnings.warn(
                    f"{type(self).__name__} asks for {largest:.3g} times the base rate in a region of a weight and is "
                    f"held at max_factor={self.max_factor:g}: the weight's regions differ much in norm.",
                    stacklevel=3,
                )
        return factors_K.clamp(max=self.max_factor)


class NormRatio(_Bounded):
    """Rate in proportion to the region's norm: `||W_k|| / ||W_0||` (Eq. 5).

    **Departs from the paper** at both ends. The ratio is held at `max_factor`, also where the oldest region has no
    weight. Below 0.001 the factor rises again, evenly to 1 at 0: new weights that start at or beside zero (GradMax)
    would not move otherwise. A norm that is NaN gives NaN.

    Args:
        max_factor: the largest factor, at least 1. The regions of growing from a quarter of the width have ratios of
            at most sqrt(15) at equal variances; 0.056 to 3.3 in the runs on digits and CIFAR-10.

    Raises:
        UserError: a smaller bound.
    """

    def __init__(self, max_factor: float = 10.0) -> None:
        super().__init__(max_factor)

    def factors(self, norms_K: Tensor) -> Tensor:
        """Factors [..., K] from the norms [..., K] of the regions, oldest first."""
        ratios = torch.where(norms_K == 0, norms_K, norms_K / norms_K[..., :1])
        rising = 1.0 - (1.0 / _SMALL - 1.0) * ratios
        return self._bounded(torch.where(ratios < _SMALL, rising, ratios))


class MaxOne(_Bounded):
    """Rate `max(1, ||W_k||)`: the paper's control (Appendix D, Table 12).

    Args:
        max_factor: the largest factor, at least 1. New weights of variance 2 / C have norm sqrt(2 * out_channels), 64
            for 2048 channels.

    Raises:
        UserError: a smaller bound.
    """

    def __init__(self, max_factor: float = 100.0) -> None:
        super().__init__(max_factor)

    def factors(self, norms_K: Tensor) -> Tensor:
        """Factors [..., K] from the norms [..., K] of the regions, oldest first."""
        return self._bounded(norms_K.clamp(min=1.0))

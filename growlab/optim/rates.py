"""Learning rate rules for regions of a weight (Yuan et al. 2023, Eq. 5, Tables 1 and 9, Appendix D)."""

import warnings
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor

from growlab.base.errors import UserError

# Ratios of norms below this are not meaningful as rates; 0.056 is the smallest in measured runs.
_SMALL = 1e-3
# Calls between two reads of the largest factor from a GPU.
_READ_EVERY = 100


class RateRule(Protocol):
    """Protocol of rules: they map the norms of a weight's regions to factors on the learning rate."""

    def factors(self, norms_K: Tensor) -> Tensor:
        """Return factors [..., K] from the Frobenius norms [..., K] of the regions, oldest first.

        Leading dimensions enumerate weights, whose norms are padded with 0.
        """


class BaseRate:
    """Base rate for every region, though Adam and AvaGrad keep separate ages and normalisers (Table 9)."""

    def factors(self, norms_K: Tensor) -> Tensor:
        """Return factors [..., K] from the norms [..., K] of the regions, oldest first."""
        return torch.ones_like(norms_K)


class _Bounded:
    """Base of rules with an upper bound on factors, at least 1, and a warning when it first applies."""

    def __init__(self, max_factor: float) -> None:
        value: Any = max_factor
        if isinstance(value, bool) or not isinstance(value, Real) or not float(value) >= 1:
            raise UserError(f"max_factor={max_factor!r} must be at least 1: it bounds the factors on the base rate.")
        self.max_factor = float(max_factor)
        self._calls, self._warned = 0, False
        self._copied: Tensor | None = None

    def _bounded(self, factors_K: Tensor) -> Tensor:
        if not self._warned and (largest := self._largest(factors_K)) > self.max_factor:
            self._warned = True
            warnings.warn(
                f"{type(self).__name__} asks for {largest:.3g} times the base rate in a region of a weight and "
                f"is limited to max_factor={self.max_factor:g}: the norms of the weight's regions differ much.",
                stacklevel=3,
            )
        return factors_K.clamp(max=self.max_factor)

    def _largest(self, factors_K: Tensor) -> float:
        """Return the largest factor; on a GPU, to avoid synchronisation, mostly 0 or an earlier value."""
        self._calls += 1
        on_cpu = factors_K.device.type == "cpu"
        if not factors_K.numel() or not (on_cpu or self._calls % _READ_EVERY == 1):
            return 0.0
        earlier = self._copied
        # An asynchronous copy, read _READ_EVERY calls later.
        self._copied = factors_K.nan_to_num(0.0).max().to("cpu", non_blocking=self._calls > 1)
        return float(self._copied if on_cpu or earlier is None else earlier)


class NormRatio(_Bounded):
    """Rate proportional to the region's norm: `||W_k|| / ||W_0||` (Eq. 5).

    **Departs from the paper** at both ends. The ratio is clamped to `max_factor`, also if the oldest region is zero.
    Below 0.001 the factor rises again, linearly to 1 at 0, since new weights that start at or near zero (GradMax) would
    not move otherwise. A norm that is NaN gives NaN.

    Args:
        max_factor: the largest factor, at least 1. Growth from a quarter of the width gives ratios of at most sqrt(15)
            at equal variances; in runs on digits and CIFAR-10 they were 0.056 to 3.3.

    Raises:
        UserError: `max_factor` is below 1.
    """

    def __init__(self, max_factor: float = 10.0) -> None:
        super().__init__(max_factor)

    def factors(self, norms_K: Tensor) -> Tensor:
        """Return factors [..., K] from the norms [..., K] of the regions, oldest first."""
        ratios = torch.where(norms_K == 0, norms_K, norms_K / norms_K[..., :1])
        rising = 1.0 - (1.0 / _SMALL - 1.0) * ratios
        return self._bounded(torch.where(ratios < _SMALL, rising, ratios))


class MaxOne(_Bounded):
    """Rate `max(1, ||W_k||)`: the paper's control (Appendix D, Table 12).

    Args:
        max_factor: the largest factor, at least 1. New weights of variance 2 / C have norm sqrt(2 * out_channels), 64
            for 2048 channels.

    Raises:
        UserError: `max_factor` is below 1.
    """

    def __init__(self, max_factor: float = 100.0) -> None:
        super().__init__(max_factor)

    def factors(self, norms_K: Tensor) -> Tensor:
        """Return factors [..., K] from the norms [..., K] of the regions, oldest first."""
        return self._bounded(norms_K.clamp(min=1.0))

"""Rate rules: how fast each region of a weight learns (Yuan et al. 2023, Eq. 5, Table 1, Appendix D)."""

from typing import Protocol

import torch
from torch import Tensor


class RateRule(Protocol):
    """Turns the norms of a weight's regions into factors on the learning rate."""

    def factors(self, norms_K: Tensor) -> Tensor:
        """Factors [K] from the Frobenius norms [K] of the regions, oldest first."""


class NormRatio:
    """Rate in proportion to the region's norm: `||W_k|| / ||W_0||` (Eq. 5).

    Regions without weight, and all regions while the oldest has none, take factor 1.
    """

    def factors(self, norms_K: Tensor) -> Tensor:
        """Factors [K] from the norms [K] of the regions, oldest first."""
        ratios = norms_K / norms_K[0]
        usable = (norms_K > 0) & (norms_K[0] > 0)
        return torch.where(usable, ratios, torch.ones_like(ratios))


class MaxOne:
    """Rate `max(1, ||W_k||)`: the paper's control (Appendix D, Table 12)."""

    def factors(self, norms_K: Tensor) -> Tensor:
        """Factors [K] from the norms [K] of the regions, oldest first."""
        return norms_K.clamp(min=1.0)

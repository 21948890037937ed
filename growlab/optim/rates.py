"""Rate rules: how fast each region of a weight learns (Yuan et al. 2023, Eq. 5, Tables 1 and 9, Appendix D)."""

from typing import Protocol

import torch
from torch import Tensor


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


class NormRatio:
    """Rate in proportion to the region's norm: `||W_k|| / ||W_0||` (Eq. 5).

    Regions without weight (to float rounding), and all regions while the oldest has none, take factor 1.
    """

    def factors(self, norms_K: Tensor) -> Tensor:
        """Factors [..., K] from the norms [..., K] of the regions, oldest first."""
        oldest = norms_K[..., :1]
        usable = (norms_K > torch.finfo(norms_K.dtype).eps * oldest) & (oldest > 0)
        return torch.where(usable, norms_K / oldest, 1.0)


class MaxOne:
    """Rate `max(1, ||W_k||)`: the paper's control (Appendix D, Table 12)."""

    def factors(self, norms_K: Tensor) -> Tensor:
        """Factors [..., K] from the norms [..., K] of the regions, oldest first."""
        return norms_K.clamp(min=1.0)

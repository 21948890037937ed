"""LEMON, lossless model context (Wang et al., ICLR 2024)."""

import torch
from torch import Tensor

from growlab.base.pieces import OneByOne
from growlab.base.settings import finite
from growlab.growth.method import GrownTensors, GrowthContext, GrowthMethod, WeightRule
from growlab.growth.methods.hypercloning import cloned
from growlab.growth.methods.net2net import copies, divided, replicate


class Lemon(GrowthMethod):
    """Copy channels in order and divide their outgoing weights unevenly, so that copies get different gradients.

    Channel j copies channel j mod D. Its consumers' columns are multiplied by a share a(j),

        W'[i, j] = a(j) W[pi(i), pi(j)],    sum over the copies j of a channel of a(j) = 1,    all a(j) different

    (Section 4.1 and Figure 3: alpha + beta = 1, alpha unlike beta). Rows, biases, norm parameters, statistics and whole
    heads are copied. Copies get unequal gradients a(j) g, so no noise is needed.

    **Preserves** exactly, in eval and train mode, residual streams included, at any widths. Layer and RMS normalisation
    with a whole number of copies computes the same with plain statistics.
    **Gradients** follow exactly: rows are copied and multiplied by a, columns copied.
    **Departs from the paper**: shares are drawn once for a whole width group. Where a stream under layer or RMS
    normalisation does not grow by a whole factor, the paper fills the rest with the mean of the channels, or with
    zeros, and changes gain and eps; here copies are weighted by their shares in the statistics (`weighted_norms`), and
    the weights are annealed to 1 in the first part of a stage. For a saved model `growlab.widen` follows the paper.
    Where channels differ by constants, old channels keep the whole share, as in `Net2Net`.

    Args:
        spread: shares are drawn from 1 - spread to 1 + spread, and then divided by their sum over the copies.
        noise_std: see `GrowthMethod`.
        gain: see `NewWeights`.
        new_weights: rule of `NewWeights`.

    Raises:
        ValueError: the spread is not between 0 and 1.
    """

    def __init__(
        self, spread: float = 0.5, noise_std: float = 0.0, gain: float = 2.0, new_weights: WeightRule = "fan_in"
    ) -> None:
        super().__init__(noise_std, gain, new_weights)
        finite(spread=spread)
        if not 0 < spread < 1:
            raise ValueError(f"spread must be between 0 and 1, not {spread}.")
        self.spread = spread

    def grow(self, context: GrowthContext) -> GrownTensors:
        """Compute every tensor at the new widths."""
        sources = cloned(context)
        shares = {group: self._shares(context, group, source) for group, source in sources.items()}
        divisors = {group: 1.0 / share for group, share in shares.items()}
        divisors, carry = divided(context, sources, divisors)
        tensors = OneByOne(context.old, lambda name: replicate(context, name, sources, divisors))
        return GrownTensors(tensors, carry=carry)

    def _shares(self, context: GrowthContext, group: str, source: Tensor) -> Tensor:
        """Draw the share a(j) of each channel, float64 [new width]; it is 1 for channels without copies."""
        draws = context.generator(f"shares of {group}")
        sizes = 1 + self.spread * (2 * torch.rand(len(source), generator=draws, dtype=torch.float64) - 1)
        totals = torch.zeros(context.old_widths[group], dtype=torch.float64).index_add_(0, source, sizes)
        return torch.where(copies(source) == 1, 1.0, sizes / totals[source])

"""Alternative interpretations of Yuan et al. (2023), whose code is not published.

Each class changes one rule of `growth=ours lr_adapt=stagewise_norm`; choose it in a configuration, for instance by
`optimizer._target_=tests.gpu.readings.PerElement`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from growlab.growth import VarianceTransfer
from growlab.optim import SGD


class PerElement(SGD):
    """Norms per element, `||W_k|| / sqrt(n_k)`, with the number n_k of a region's elements."""

    def _squares(self, params: Sequence[Tensor]) -> Tensor:
        if (counts_PK := self._kept.get(params[0])) is None:
            found = [self._regions[p] for p in params]
            counts = [r.counts * (p.numel() // int(r.counts.sum())) for r, p in zip(found, params, strict=True)]
            counts_PK = pad_sequence([c.float() for c in counts], batch_first=True, padding_value=1.0)
            self._kept[params[0]] = counts_PK = counts_PK.to(params[0].device)
        return super()._squares(params) / counts_PK


class InitialNorm(SGD):
    """Expected initial `||W_0||`: sqrt(2 rows) in hidden layers, sqrt(rows / C_0) in the last one."""

    def _squares(self, params: Sequence[Tensor]) -> Tensor:
        if (first_P1 := self._kept.get(params[0])) is None:
            rows = [float((self._regions[p].rows_O == self._regions[p].stages[0]).sum()) for p in params]
            variances = [self._scales.get(p, 2.0) for p in params]  # of a row; the output layer's scale is 1 / C_0
            first = [number * variance for number, variance in zip(rows, variances, strict=True)]
            self._kept[params[0]] = first_P1 = torch.tensor(first, device=params[0].device)[:, None]
        return torch.cat([first_P1, super()._squares(params)[:, 1:]], 1)


class DecayAtBaseRate(SGD):
    """Weight decay at the base rate in every region: the gradient gets decay * w / factor."""

    def _step_regional(self, group: dict[str, Any], factors_PK: Tensor) -> None:
        self._decay, self._current = group["weight_decay"], factors_PK
        super()._step_regional(group, factors_PK)

    def _gradients(self, params: Sequence[Tensor]) -> list[Tensor]:
        regions = [self._regions[p].to(p.device) for p in params]
        rows = [row[: r.num_regions] for row, r in zip(self._current, regions, strict=True)]
        extra = [r.spread(1.0 / row - 1.0, p.dim()) for r, row, p in zip(regions, rows, params, strict=True)]
        return [
            torch.addcmul(grad, p, spread, value=self._decay)
            for grad, p, spread in zip(super()._gradients(params), params, extra, strict=True)
        ]


class UsualOutput(VarianceTransfer):
    """Output weights of variance 1 / C' instead of Table 1's 1 / C'^2; old ones are rescaled by sqrt(C / C')."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.new_weights = replace(self.new_weights, output_power=1)

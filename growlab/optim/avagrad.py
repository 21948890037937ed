"""AvaGrad (Savarese, McAllester, Babu, Maire, CVPR 2021) with a normaliser per stage."""

from collections import defaultdict
from collections.abc import Iterable
from math import sqrt
from typing import Any, Literal

import torch
from torch import Tensor

from growlab.base.settings import above, one_of
from growlab.optim.rates import RateRule
from growlab.optim.regional import Regional
from growlab.optim.settings import check_settings


class AvaGrad(Regional):
    """AvaGrad: Adam's adaptivity with a rate that does not depend on eps (arXiv:1912.01823, Algorithm 2).

        m <- beta1 m + (1 - beta1) g
        eta = 1 / (sqrt(v) + eps)
        w <- w - lr * eta / ||eta / sqrt(d)|| * m          d = number of elements of the parameter group
        v <- beta2 v + (1 - beta2) g^2                      after the weights: the paper's delay

    With a rule, norm and d are taken over the elements added at one stage (Yuan et al. 2023, Table 9), so that young
    elements, whose v is small, do not determine the step of old ones:

        w_k <- w_k - lr * scale * factor_k * eta_k / ||eta_k / sqrt(d_k)|| * m_k

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        betas: decay of the moments.
        eps: added to sqrt(v).
        weight_decay: L2 penalty, part of the gradient.
        maximize: ascend instead.
        normaliser: scope of k. "stage": all elements added at a stage, over all tensors of the parameter group, so that
            a network of one stage is trained by AvaGrad as published. "region": each tensor separately.
        rule: see `Regional`; without one the normaliser is the whole group's.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 0.1,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        normaliser: Literal["stage", "region"] = "stage",
        rule: RateRule | None = None,
    ) -> None:
        check_settings({"betas": betas})
        above(0, eps=eps)
        one_of(("stage", "region"), normaliser=normaliser)
        defaults = {"lr": lr, "weight_decay": weight_decay, "betas": tuple(betas), "maximize": maximize}
        super().__init__(params, {**defaults, "eps": eps, "normaliser": normaliser}, rule=rule)

    def _step_group(self, group: dict[str, Any], params: list[Tensor]) -> None:
        rates = [self._start(param).sqrt().add_(group["eps"]).reciprocal_() for param in params]
        normalisers = self._normalisers(group, params, rates)
        beta1, beta2 = group["betas"]
        for param, rate, normaliser in zip(params, rates, normalisers, strict=True):
            state, grad = self.state[param], param.grad
            assert grad is not None
            grad = -grad if group["maximize"] else grad
            if group["weight_decay"] != 0:
                grad = grad.add(param, alpha=group["weight_decay"])
            state["step"] += 1
            state["exp_avg"].lerp_(grad, 1 - beta1)
            update = rate.mul_(state["exp_avg"]).mul_(normaliser)
            if self._is_regional(param):
                factors_K = self._factors([param])[0]
                update.mul_(self._regions[param].spread(factors_K, param.dim()).to(param.dtype))
            param.sub_(update * group["lr"])
            state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)

    def _start(self, param: Tensor) -> Tensor:
        """Return the second moments of a parameter, and initialise its state with zeros if it has none."""
        state = self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0, device="cpu")
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        return state["exp_avg_sq"]

    def _normalisers(self, group: dict[str, Any], params: list[Tensor], rates: list[Tensor]) -> list[Any]:
        """Normaliser 1 / ||eta / sqrt(d)|| of each parameter: a number, or a tensor that broadcasts with it."""
        squares: dict[Any, Any] = defaultdict(float)
        counts: dict[Any, int] = defaultdict(int)
        keys: list[list[Any]] = []
        for i, (param, rate) in enumerate(zip(params, rates, strict=True)):
            scope = i if group["normaliser"] == "region" and self._rule is not None else None
            regions = self._regions.get(param) if self._rule is not None else None
            if regions is None:
                keys.append([(scope, 0)])
                sums, numbers = [rate.double().square().sum()], [rate.numel()]
            else:
                keys.append([(scope, stage) for stage in regions.stage_list])
                sums = list(regions.sums(rate.double().square()).unbind(0))
                inner = rate.numel() // sum(regions.count_list)
                numbers = [n * inner for n in regions.count_list]
            for key, total, number in zip(keys[-1], sums, numbers, strict=True):
                squares[key] = squares[key] + total
                counts[key] += number
        normaliser = {key: sqrt(counts[key]) / squares[key].sqrt() for key in counts}
        result: list[Any] = []
        for param, keys_K in zip(params, keys, strict=True):
            if len(keys_K) == 1:
                result.append(normaliser[keys_K[0]].to(param.dtype))
            else:
                values_K = torch.stack([normaliser[key] for key in keys_K]).to(param.dtype)
                result.append(self._regions[param].spread(values_K, param.dim()))
        return result

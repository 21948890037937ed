"""LARS: a rate per layer from the norms of weight and gradient (You, Gitman, Ginsburg 2017)."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from growlab.optim.rates import RateRule
from growlab.optim.regional import Regional


class LARS(Regional):
    """Layer-wise adaptive rate scaling (You et al. 2017, arXiv:1708.03888, Algorithm 1).

        rate = trust_coefficient * ||W|| / (||G|| + weight_decay * ||W|| + eps)
        V <- momentum * V + lr * rate * (G + weight_decay * W)
        W <- W - V

    If weight or gradient has norm 0, the rate is 1. With a rule, region k moves by factor_k * V_k.

    **Departs from the paper**: vectors (biases, norm parameters) take rate 1, as is usual since; eps.

    Args:
        params: parameters or groups of them.
        lr: global learning rate.
        momentum: decay of V; V includes the rates of the steps that built it up.
        weight_decay: L2 penalty.
        trust_coefficient: relative size of an update; 0.001 in the paper.
        eps: added to the denominator.
        maximize: ascend instead.
        rule: see `Regional`.

    Raises:
        ValueError: an argument is negative.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
        eps: float = 0.0,
        *,
        maximize: bool = False,
        rule: RateRule | None = None,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        defaults |= {"trust_coefficient": trust_coefficient, "eps": eps, "maximize": maximize}
        super().__init__(params, defaults, rule=rule)

    def _step_plain(self, group: dict[str, Any]) -> None:
        for param, update in self._updates(group):
            param.sub_(update)

    def _step_regional(self, group: dict[str, Any], factors_PK: Tensor) -> None:
        for (param, update), factors_K in zip(self._updates(group), factors_PK.unbind(0), strict=True):
            factors = self._regions[param].spread(factors_K, param.dim()).to(param.dtype)
            param.addcmul_(update, factors, value=-1)

    def factors(self, param: Tensor) -> Tensor | None:
        """Rate factor of each region of a weight, times the layer's rate, [K]; None without regions."""
        factors_K = super().factors(param)
        if factors_K is None or param.grad is None:
            return factors_K
        group = next(g for g in self.param_groups if any(p is param for p in g["params"]))
        norms = torch.stack(_norms([param.detach(), param.grad]))
        return factors_K * _trust(group, norms[0], norms[1])

    def inherited(self, old: Tensor, new: Tensor, momentum: Tensor, carried: Tensor) -> Tensor:
        """Rescale the momentum V of a grown weight that was `carried` like a gradient, at the shape of the new W'.

        V is proportional to the weight's norm and has the gradients' direction; it does not depend on their scale:

            V' = carried * (||V|| / ||carried||) * (||W'|| / ||W||)

        If all gradients are scaled by the same factor, this is the V of a weight that always had its present size.
        Weight decay's share of V is carried with the gradients' share. Vectors are carried like gradients.
        """
        if old.dim() < 2:
            return carried
        before, after, length, moved = _norms([old.detach(), new.detach(), momentum, carried])
        factor = (length * after) / (moved * before)
        return carried * torch.where(factor.isfinite() & (factor > 0), factor, 1.0).to(carried.dtype)

    def _updates(self, group: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
        params: list[Tensor] = group["params"]
        grads = [p.grad for p in params if p.grad is not None]
        norms = _norms([*params, *grads])
        updates = []
        for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
            rate = group["lr"]
            if param.dim() > 1:
                rate = rate * _trust(group, norms[i], norms[len(params) + i])
            update = (-grad if group["maximize"] else grad).add(param, alpha=group["weight_decay"]).mul_(rate)
            if group["momentum"] != 0:
                state = self.state[param]
                if "momentum_buffer" in state:
                    update = state["momentum_buffer"].mul_(group["momentum"]).add_(update)
                state["momentum_buffer"] = update
            updates.append((param, update))
        return updates


def _norms(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    dtypes = {tensor.dtype for tensor in tensors}
    if dtypes <= {torch.float32, torch.float64}:
        return torch._foreach_norm(tensors)
    return tuple(torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in tensors)


def _trust(group: dict[str, Any], weight_norm: Tensor, grad_norm: Tensor) -> Tensor:
    """Return the layer's rate (trust ratio); 1 if a norm is 0."""
    trust = group["trust_coefficient"] * weight_norm
    trust = trust / (grad_norm + group["weight_decay"] * weight_norm + group["eps"])
    return torch.where((weight_norm > 0) & (grad_norm > 0), trust, 1.0)

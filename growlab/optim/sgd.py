"""SGD with a rate per region of a weight."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from growlab.optim.regional import Regional

_FUSED_DTYPES = (torch.float32, torch.float64)


class SGD(Regional, torch.optim.SGD):
    """`torch.optim.SGD` with a rate per region (Yuan et al. 2023, Eq. 5).

    Takes every argument of `torch.optim.SGD`, and `rule`; see `Regional`. With all factors 1 the result equals torch's
    bit for bit (up to rounding with `fused=True`, which uses torch's fused kernels and is the fastest on a CPU).

    Examples:
        >>> from growlab.optim import NormRatio
        >>> weight = torch.nn.Parameter(torch.eye(2))
        >>> optimizer = SGD([weight], lr=0.1, momentum=0.9, rule=NormRatio())
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as torch's optimizers do.

        Raises:
            ValueError: its dampening is not between 0 and 1, which torch does not check.
        """
        super().add_param_group(param_group)
        if not 0 <= (dampening := self.param_groups[-1]["dampening"]) <= 1:
            raise ValueError(f"Invalid dampening value: {dampening}; it must lie between 0 and 1")

    def _step_plain(self, group: dict[str, Any]) -> None:
        params: list[Tensor] = []
        grads: list[Tensor] = []
        buffers: list[Tensor | None] = []
        has_sparse_grad = self._init_group(group, params, grads, buffers)
        sgd(
            params,
            grads,
            buffers,
            has_sparse_grad=has_sparse_grad,
            foreach=self._foreach(group),
            fused=group["fused"],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )
        if group["momentum"] != 0:
            for param, buffer in zip(params, buffers, strict=True):
                self.state[param]["momentum_buffer"] = buffer

    def _step_regional(self, group: dict[str, Any], factors_PK: Tensor) -> None:
        params, rates_PK = group["params"], factors_PK * -group["lr"]
        if group["momentum"] == 0:
            self._sweep_sgd(group, params, rates_PK)
            return
        # torch starts the buffer with the undamped gradient.
        first = [self.state[p].get("momentum_buffer") is None for p in params]
        for param, is_first in zip(params, first, strict=True):
            if is_first:
                self.state[param]["momentum_buffer"] = torch.zeros_like(param)
        if group["dampening"] == 0 or not any(first):
            self._sweep_sgd(group, params, rates_PK)
            return
        for at_first, settings in ((True, {**group, "dampening": 0.0}), (False, group)):
            indices = [i for i, is_first in enumerate(first) if is_first == at_first]
            if indices:
                self._sweep_sgd(settings, [params[i] for i in indices], rates_PK[indices])

    def _sweep_sgd(self, group: dict[str, Any], params: Sequence[Tensor], rates_PK: Tensor) -> None:
        tensors = [self._gradients(params)]
        if group["momentum"] != 0:
            tensors.append([self._aligned_state(p, "momentum_buffer") for p in params])
        one_dtype = all(t.dtype == params[0].dtype for entries in tensors for t in entries)
        fused = (
            group["fused"]
            and self._is_cut(params[0])
            and params[0].dtype in _FUSED_DTYPES
            and one_dtype
            and group["momentum"] != 0
            and not (group["nesterov"] or group["differentiable"])
        )
        update = _fused_update if fused else _update
        self._sweep(params, tensors, [rates_PK], lambda *pieces: update(group, *pieces))


def _update(group: dict[str, Any], weights: Any, grads: Any, *rest: Any) -> None:
    rates = rest[-1]
    if group["maximize"]:
        grads = torch._foreach_neg(grads)
    if group["weight_decay"] != 0:
        grads = torch._foreach_add(grads, weights, alpha=group["weight_decay"])
    if group["momentum"] != 0:
        buffers = rest[0]
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, grads, alpha=1 - group["dampening"])
        grads = torch._foreach_add(grads, buffers, alpha=group["momentum"]) if group["nesterov"] else buffers
    torch._foreach_addcmul_(weights, grads, rates)


def _fused_update(group: dict[str, Any], weights: Any, grads: Any, buffers: Any, rates: Any) -> None:
    """Compute `_update` in two passes; torch's fused kernel at rate 0 updates only the momentum."""
    torch._fused_sgd_(
        weights,
        grads,
        buffers,
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=0.0,
        dampening=group["dampening"],
        nesterov=False,
        maximize=group["maximize"],
        is_first_step=False,
    )
    torch._foreach_addcmul_(weights, buffers, rates)

"""Muon whose rate differs between the regions of a weight; only where torch has Muon (2.9 and later)."""

from typing import Any

import torch
from torch import Tensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz, muon

from growlab.optim.regional import Regional


class Muon(Regional, torch.optim.Muon):
    """`torch.optim.Muon` with a rate per region.

    The momentum of a weight is orthogonalised as a whole; the regions of the update, and of the decoupled weight
    decay, are then scaled by their factors. Takes every argument of `torch.optim.Muon`, and `rule`.
    """

    def _step_plain(self, group: dict[str, Any]) -> None:
        lists: tuple[list[Tensor], ...] = ([], [], [])
        has_complex = self._init_group(group, *lists)
        names = (
            "lr",
            "weight_decay",
            "momentum",
            "nesterov",
            "ns_coefficients",
            "eps",
            "ns_steps",
            "adjust_lr_fn",
        )
        muon(*lists, **{name: group[name] for name in names}, has_complex=has_complex)

    def _step_regional(self, group: dict[str, Any], factors_PK: Tensor) -> None:
        params: list[Tensor] = []
        grads: list[Tensor] = []
        buffers: list[Tensor] = []
        self._init_group(group, params, grads, buffers)
        lr = float(group["lr"])
        for param, grad, buffer, factors_K in zip(params, grads, buffers, factors_PK.unbind(0), strict=True):
            buffer.lerp_(grad, 1 - group["momentum"])
            update = grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
            update = _zeropower_via_newtonschulz(
                update, group["ns_coefficients"], group["ns_steps"], group["eps"]
            )
            factors = self._regions[param].spread(factors_K, param.dim()).to(param.dtype)
            param.mul_(1 - lr * group["weight_decay"] * factors)
            adjusted = _adjust_lr(lr, group["adjust_lr_fn"], param.shape)
            param.addcmul_(update.to(param.dtype), factors, value=-adjusted)

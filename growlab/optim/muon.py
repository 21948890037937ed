"""Muon with a rate per region of a weight, for all parameters of a network."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# Private, but the longest part of Muon; tests compare with `torch.optim.Muon` bit for bit.
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz
from torch.optim.adamw import adamw

from growlab.base.settings import whole
from growlab.optim.rates import RateRule
from growlab.optim.regional import Regional
from growlab.optim.settings import check_settings

# Least number of Newton-Schulz steps that torch rejects, only at the first step.
_TOO_MANY = 100


class Muon(Regional):
    """`torch.optim.Muon` with a rate per region, and AdamW for vectors (Jordan 2024; Liu et al., arXiv:2502.16982).

        B <- momentum * B + (1 - momentum) * G
        W_k <- (1 - lr * factor_k * weight_decay) W_k - lr * factor_k * adjustment * NS(B, or Nesterov's)_k

    The momentum of a weight is orthogonalised as a whole; the update and the decoupled weight decay are then scaled by
    each region's factor. A matrix without regions is updated as by `torch.optim.Muon`, bit for bit.

    **Departs from torch**, which accepts only matrices: a convolution's weight is orthogonalised as the matrix
    [out_channels, everything else]; vectors and scalars use `torch.optim.AdamW` at the same `lr` and `weight_decay`.
    With `adjust_lr_fn="match_rms_adamw"` one rate suits both.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        weight_decay: decoupled weight decay.
        betas: AdamW's betas, for vectors.
        adam_eps: AdamW's eps.
        rule: see `Regional`.
        options: arguments of `torch.optim.Muon`: momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn.

    Raises:
        ValueError: an argument is out of range.
        RuntimeError: at a step, complex parameters or sparse gradients.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        adam_eps: float = 1e-8,
        rule: RateRule | None = None,
        **options: Any,
    ) -> None:
        check_settings({"lr": lr, "weight_decay": weight_decay, "betas": betas, "adam_eps": adam_eps, **options})
        if "ns_steps" in options:
            whole(1, ns_steps=options["ns_steps"])
            if options["ns_steps"] >= _TOO_MANY:
                raise ValueError(f"ns_steps must be below {_TOO_MANY}, not {options['ns_steps']}.")
        # torch checks its arguments; a list (from a file) is accepted in place of a tuple.
        if "ns_coefficients" in options:
            options["ns_coefficients"] = tuple(options["ns_coefficients"])
        matrix = [torch.zeros(1, 1, device="cpu", requires_grad=True)]
        defaults = torch.optim.Muon(matrix, lr, weight_decay, **options).defaults  # type: ignore[arg-type]
        betas = (betas[0], betas[1])
        torch.optim.AdamW(matrix, betas=betas, eps=adam_eps)
        super().__init__(params, {**defaults, "betas": betas, "adam_eps": adam_eps}, rule=rule)

    def _step_plain(self, group: dict[str, Any]) -> None:
        vectors = [p for p in group["params"] if p.dim() < 2]
        for param in group["params"]:
            if param.dim() > 1:
                self._move(group, param, 1.0)
        if vectors:
            self._step_vectors(group, vectors)

    def _step_regional(self, group: dict[str, Any], factors_PK: Tensor) -> None:
        for param, factors_K in zip(group["params"], factors_PK.unbind(0), strict=True):
            self._move(group, param, self._regions[param].spread(factors_K, param.dim()).to(param.dtype))

    def _move(self, group: dict[str, Any], param: Tensor, factors: Tensor | float) -> None:
        grad, state = _gradient(param), self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
        buffer = state["momentum_buffer"]
        buffer.lerp_(grad, 1 - group["momentum"])
        update = grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        matrix = update.flatten(1)
        direction = _zeropower_via_newtonschulz(
            matrix, group["ns_coefficients"], group["ns_steps"], group["eps"]
        ).reshape(param.shape)
        lr: Any = group["lr"].squeeze() if isinstance(group["lr"], Tensor) else group["lr"]
        rate = _adjust_lr(lr, group["adjust_lr_fn"], matrix.shape)
        if isinstance(factors, Tensor):
            param.mul_(1 - lr * group["weight_decay"] * factors)
            param.addcmul_(direction.to(param.dtype), factors * -rate)
        else:
            param.mul_(1 - lr * group["weight_decay"])
            param.add_(direction, alpha=-rate)

    def _step_vectors(self, group: dict[str, Any], vectors: list[Tensor]) -> None:
        for param in vectors:
            if not self.state[param]:
                self.state[param]["step"] = torch.tensor(0.0, device="cpu")
                self.state[param]["exp_avg"] = torch.zeros_like(param)
                self.state[param]["exp_avg_sq"] = torch.zeros_like(param)
        adamw(
            vectors,
            [_gradient(p) for p in vectors],
            [self.state[p]["exp_avg"] for p in vectors],
            [self.state[p]["exp_avg_sq"] for p in vectors],
            [],
            [self.state[p]["step"] for p in vectors],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["adam_eps"],
            maximize=False,
        )


def _gradient(param: Tensor) -> Tensor:
    grad = param.grad
    assert grad is not None
    if param.is_complex() or grad.is_sparse:
        raise RuntimeError("Muon does not support complex parameters or sparse gradients")
    return grad

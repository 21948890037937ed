"""Surrogate activations and norms, with the derivatives that growth methods need while they measure."""

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from growlab.base.errors import UserError

_RELU = (F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_)


class _InPlaceOf(TorchFunctionMode):
    """Replaces calls of some torch functions by others."""

    def __init__(self, others: Mapping[Any, Callable[..., Tensor]]) -> None:
        super().__init__()
        self._others = others

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._others.get(func, func)(*args, **(kwargs or {}))


def right_derivatives() -> TorchFunctionMode:
    """Mode in which ReLU and similar have the derivative 1 at 0 (torch: 0), for channels at zero (Evci et al. 2022)."""

    def relu(x: Tensor, inplace: bool = False) -> Tensor:
        return torch.where(x >= 0, x, torch.zeros_like(x))

    def hardtanh(x: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Tensor:
        return (min_val + relu(x - min_val)).clamp(max=max_val)

    def relu6(x: Tensor, inplace: bool = False) -> Tensor:
        return hardtanh(x, 0.0, 6.0)

    def leaky(x: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
        return torch.where(x >= 0, x, negative_slope * x)

    # torch's module ReLU6 calls hardtanh.
    return _InPlaceOf(
        {**dict.fromkeys(_RELU, relu), F.relu6: relu6, F.hardtanh: hardtanh, F.leaky_relu: leaky}
    )


def twice_differentiable() -> TorchFunctionMode:
    """Mode in which hard sigmoids are composed of operations that have second derivatives in torch."""

    def hardsigmoid(x: Tensor, inplace: bool = False) -> Tensor:
        return (x + 3.0).clamp(0.0, 6.0) / 6.0

    return _InPlaceOf({F.hardsigmoid: hardsigmoid})


def smooth(beta: float) -> TorchFunctionMode:
    """Mode that replaces ReLU, which has no second derivative, and similar by softplus (Liu et al. 2019)."""

    def softplus(x: Tensor, inplace: bool = False) -> Tensor:
        return F.softplus(x, beta=beta)

    def hardtanh(x: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Tensor:
        return max_val - softplus(max_val - min_val - softplus(x - min_val))

    def softplus6(x: Tensor, inplace: bool = False) -> Tensor:
        return hardtanh(x, 0.0, 6.0)

    def leaky(x: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
        return negative_slope * x + (1.0 - negative_slope) * softplus(x)

    def hardsigmoid(x: Tensor, inplace: bool = False) -> Tensor:
        return softplus6(x + 3.0) / 6.0

    def hardswish(x: Tensor, inplace: bool = False) -> Tensor:
        return x * hardsigmoid(x)

    def recurrent(*_: Any, **__: Any) -> Any:
        raise UserError(
            "this growth method takes second derivatives, which the ReLU inside of torch's recurrent layers has not: "
            "give them nonlinearity='tanh', or choose another growth method."
        )

    return _InPlaceOf(
        {
            **dict.fromkeys((torch.rnn_relu, torch.rnn_relu_cell), recurrent),
            **dict.fromkeys(_RELU, softplus),
            F.relu6: softplus6,
            F.hardtanh: hardtanh,
            F.leaky_relu: leaky,
            F.hardsigmoid: hardsigmoid,
            F.hardswish: hardswish,
        }
    )


class IdentityNorms(TorchFunctionMode):
    """Mode in which batch and instance normalisations are the identity on new channels.

    Args:
        new: maps a norm's running mean and weight (None if absent) to a mask of its new channels, [channels]; None
            leaves the norm unchanged.
    """

    _KINDS = frozenset({F.batch_norm, F.instance_norm, F.group_norm})

    def __init__(self, new: Callable[[Tensor | None, Tensor | None], Tensor | None]) -> None:
        super().__init__()
        self._new = new
        self._hook: RemovableHandle | None = None

    def __enter__(self) -> "IdentityNorms":
        # Synchronised batch normalisations do not call `F.batch_norm`.
        self._hook = register_module_forward_hook(self._after)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        assert self._hook is not None
        self._hook.remove()
        super().__exit__(*error)

    def _after(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            return output
        return self._passed(inputs[0], output, module.running_mean, module.weight)

    def _passed(self, x: Tensor, result: Tensor, mean: Tensor | None, weight: Tensor | None) -> Tensor:
        new = self._new(mean, weight)
        if new is None:
            return result
        return torch.where(new.to(x.device).view([1, -1, *[1] * (x.dim() - 2)]), x, result)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in self._KINDS:
            return result
        given = signature(func).bind(*args, **kwargs).arguments
        return self._passed(given["input"], result, given.get("running_mean"), given.get("weight"))

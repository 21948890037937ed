"""Run a network on device meta, for the shapes of its tensors alone.

torch computes most shapes there in Python, which takes longer than the arithmetic of a small network. The functions
that networks call most often have faster shape rules here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, _meta_registrations, nn
from torch._decomp import decompositions
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree


class Shapes(TorchFunctionMode):
    """Record function calls and the parameters they read; on device meta, compute common output shapes by faster rules.

    Args:
        detailed: also record all arguments, with shapes in place of tensors.
    """

    def __init__(self, detailed: bool = False) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.details: list[Any] = []
        self._detailed = detailed

    def __enter__(self) -> "Shapes":
        # A compiled module would get guards on what is recorded here.
        self._stance = torch.compiler.set_stance("force_eager")
        self._stance.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._stance.__exit__(*raised)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.calls.append((func, *(id(x) for x in args if isinstance(x, nn.Parameter))))
        if self._detailed:
            leaves = pytree.tree_leaves((args, kwargs or {}))
            self.details.append((func, [x.shape if isinstance(x, Tensor) else x for x in leaves]))
        rule = _RULES.get(func)
        if rule is not None and args and isinstance(args[0], Tensor) and args[0].is_meta:
            known = rule(*args, **(kwargs or {}))
            if known is not NotImplemented:
                return known
        return func(*args, **(kwargs or {}))


@contextmanager
def corrected_shapes() -> Iterator[None]:
    """Patch shape functions that older versions of torch get wrong or lack.

    torch before 2.13 leaves a dimension of 1 in front of an LSTM's last states of each layer, in exported programs
    among others; torch 2.11 takes `F.grouped_mm` in bfloat16 alone.
    """
    lstm, grouped = decompositions.one_layer_lstm, _meta_registrations._meta_grouped_mm_common

    def one_layer_lstm(x: Tensor, hidden: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        output, states = lstm(x, hidden, *args, **kwargs)
        return output, tuple(state.view(h.shape) for state, h in zip(states, hidden, strict=True))

    def grouped_mm(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> Any:
        if "scale_a" not in kwargs or kwargs["scale_a"] is not None:
            return grouped(a, b, *args, **kwargs)
        return _meta_registrations._create_grouped_mm_output_tensor(a, b, kwargs["offs"], kwargs["out_dtype"])

    decompositions.one_layer_lstm = one_layer_lstm  # type: ignore[assignment]
    _meta_registrations._meta_grouped_mm_common = grouped_mm  # type: ignore[assignment]
    try:
        yield
    finally:
        decompositions.one_layer_lstm = lstm
        _meta_registrations._meta_grouped_mm_common = grouped


def _batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    *_: Any,
    **__: Any,
) -> Tensor:
    if training and x.numel() == x.shape[1]:
        raise ValueError(f"batch statistics of {list(x.shape)}, a single value per channel")
    for tensor in (running_mean, running_var, weight, bias):
        if tensor is not None and len(tensor) != x.shape[1]:
            raise ValueError(f"{len(tensor)} statistics for {x.shape[1]} channels")
    return torch.empty_like(x)


def _layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    shape = tuple(normalized_shape)
    for tensor in (weight, bias):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"parameters of the shape {tuple(tensor.shape)} to normalise {shape}")
    if tuple(x.shape[x.dim() - len(shape) :]) != shape:
        raise ValueError(f"{shape} cannot be normalised in {tuple(x.shape)}")
    return torch.empty_like(x)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if input.dtype != weight.dtype and not any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        raise ValueError(f"a weight of {weight.dtype} for {input.dtype}")
    if weight.dim() != 2 or input.shape[-1] != weight.shape[1]:
        raise ValueError(f"a weight of {tuple(weight.shape)} for {tuple(input.shape)}")
    if bias is not None and tuple(bias.shape) not in ((), (1,), (weight.shape[0],)):
        raise ValueError(f"a bias of {tuple(bias.shape)} for {weight.shape[0]} rows")
    return input.new_empty(*input.shape[:-1], weight.shape[0])


def _transposed_convolution(input: Tensor, weight: Tensor, *_: Any, **__: Any) -> Any:
    # On device meta torch accepts any number of channels here, while other devices raise.
    if input.dim() >= weight.dim() - 1 and input.shape[1 - weight.dim()] != weight.shape[0]:
        raise ValueError(f"a transposed weight of {tuple(weight.shape)} for {tuple(input.shape)}")
    return NotImplemented


def _index_add(input: Tensor, dim: int, index: Tensor, source: Tensor, **_: Any) -> Any:
    # As above: sizes of dimensions other than `dim` are not compared.
    if input.dim() == source.dim() and any(
        one != other and axis != dim % input.dim()
        for axis, (one, other) in enumerate(zip(input.shape, source.shape, strict=True))
    ):
        raise ValueError(f"{tuple(source.shape)} cannot be added into {tuple(input.shape)}")
    return NotImplemented


def _gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    return torch.empty_like(input)


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    own = not args and set(kwargs) <= {"dropout_p", "scale", "is_causal"}
    alike = query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
    if not own or not alike:
        return NotImplemented
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        raise ValueError(f"{tuple(query.shape)} cannot attend to {tuple(key.shape)}, {tuple(value.shape)}")
    return query.new_empty(*query.shape[:-1], value.shape[-1])


def _element_wise(input: Tensor, other: Any, **kwargs: Any) -> Tensor:
    if kwargs or not isinstance(other, (Tensor, int, float)):
        return NotImplemented
    shape = torch.broadcast_shapes(input.shape, other.shape) if isinstance(other, Tensor) else input.shape
    return input.new_empty(shape, dtype=torch.result_type(input, other))


_RULES: dict[Any, Callable[..., Tensor]] = {
    F.batch_norm: _batch_norm,
    F.layer_norm: _layer_norm,
    F.linear: _linear,
    F.gelu: _gelu,
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), _transposed_convolution),
    **dict.fromkeys((torch.index_add, Tensor.index_add, Tensor.index_add_), _index_add),
    F.scaled_dot_product_attention: _attention,
    **dict.fromkeys((torch.Tensor.add, torch.Tensor.mul, torch.Tensor.sub), _element_wise),
    **dict.fromkeys((torch.add, torch.mul, torch.sub), _element_wise),
}

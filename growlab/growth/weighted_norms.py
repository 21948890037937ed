"""Normalisations whose statistics run over channels, kept exact while the number of channels grows.

Layer, RMS and group normalisation take statistics over the channels of a stream, so a wider stream has other ones. With
a weight w_j per channel,

    mean = sum_j w_j x_j / sum_j w_j,    variance = sum_j w_j (x_j - mean)^2 / sum_j w_j

they stay the same if new channels have weight 0, or if the copies of a channel share its weight. A Euclidean norm or
sum of squares becomes sum_j w_j x_j^2; or n times the weighted mean if the code multiplies it by a power of the number
n of channels (`x / x.norm() * x.shape[-1] ** 0.5`). Over the first part of a stage the weights are annealed to 1, which
is the plain normalisation. Weights other than 1 are not part of the network's parameters, buffers or classes: hooks on
the normalising modules apply them. They are entries of the `state_dict`, so that a network that is not plain yet cannot
be loaded into a plain one unnoticed.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from growlab.growth.hooks import ModuleHook, check_reached
from growlab.widths import Carry, WidthGraph

# Attribute of a module in which its channel weights are stored while they differ.
_ATTRIBUTE = "_weighted_statistics"
# Their entry in the module's state_dict, an unexpected key for a plain network.
_KEY = "unfinished_growth_channel_weights"


def carried_weights(
    graph: WidthGraph,
    weights: Mapping[str, Sequence[float]],
    carry: Carry,
    before: Mapping[str, int],
    after: Mapping[str, int],
) -> dict[str, list[float]]:
    """Return channel weights that preserve statistics when widths change, for groups where they are not all 1.

    A channel keeps its weight or shares it with its copies, like its gradient (`Carry.sources` and `Carry.rows`); a new
    channel that is no copy gets 0.
    """
    result = {}
    for group in dict.fromkeys(group for norm in graph.channel_norms for group in norm.axis.groups):
        old = torch.tensor(weights.get(group, [1.0] * before[group]), dtype=torch.float64)
        channels = torch.arange(after[group])
        sources = carry.sources.get(group, torch.where(channels < before[group], channels, -1))
        carried = torch.where(sources >= 0, old[sources.clamp(min=0)], 0.0)
        if group in carry.rows:
            carried = carried * carry.rows[group].double()
        if not bool((carried == 1).all()):
            result[group] = carried.tolist()
    return result


def annealed(starts: Mapping[str, Sequence[float]], progress: float) -> dict[str, list[float]]:
    """Interpolate weights between their start and 1."""
    if progress >= 1:
        return {}
    return {group: [w + progress * (1 - w) for w in start] for group, start in starts.items()}


def weigh(
    model: nn.Module, graph: WidthGraph, widths: Mapping[str, int], weights: Mapping[str, Sequence[float]]
) -> list[str]:
    """Set the channel weights of a network's normalisations (default 1); return the paths of weighted modules."""
    modules = dict(model.named_modules())
    weighted: list[str] = []
    for norm in graph.channel_norms:
        module, groups = modules[norm.name], norm.axis.groups
        each = {g: torch.tensor(weights.get(g, [1.0] * widths[g]), dtype=torch.float64) for g in groups}
        on_axis = norm.axis.spread(each, widths, fixed=1.0)
        hook: _Weighing | None = module.__dict__.get(_ATTRIBUTE)
        # Equal weights are plain, except for Bessel's correction of a written-out variance, which counts channels.
        plain = 1.0 if norm.mean_over is not None else on_axis[0]
        if bool((on_axis == plain).all()):
            if hook is not None:
                hook.remove()
            continue
        if hook is None:
            hook = _Weighing(module)
        hook.set(on_axis)
        if norm.mean_over is not None:
            (hook.sums if norm.summed else hook.means)[norm.mean_over] = norm.counted
        if norm.name not in weighted:
            weighted.append(norm.name)
    return weighted


def weighted_modules(model: nn.Module) -> list[str]:
    """Paths of the modules whose statistics over channels are weighted."""
    return [name for name, module in model.named_modules() if _ATTRIBUTE in module.__dict__]


class _Weighing(ModuleHook):
    """Weights the statistics of the normalisation that a module's forward calls."""

    attribute = _ATTRIBUTE

    def __init__(self, module: nn.Module) -> None:
        self.weights = torch.empty(0)
        # By reduced dimension: True if the code multiplies the result by a power of the number of channels.
        self.means: dict[int, bool] = {}
        self.sums: dict[int, bool] = {}
        super().__init__(module)

    def set(self, weights: Tensor) -> None:
        if weights.shape == self.weights.shape:
            # In place: a compiled forward has captured this tensor.
            self.weights.copy_(weights)
        else:
            self.weights = weights

    def entries(self) -> dict[str, tuple[Tensor, Callable[[Tensor], Any]]]:
        return {_KEY: (self.weights, self.weights.copy_)}

    def mode(self, inputs: tuple[Any, ...]) -> TorchFunctionMode:
        example = next(self.module.parameters(), inputs[0])
        if self.weights.device != example.device:
            self.weights = self.weights.to(example.device)
        return _Weighted(self.module, self.weights, self.means, self.sums)


class _Weighted(TorchFunctionMode):
    """Replaces normalisations and reductions over channels by weighted ones."""

    def __init__(self, module: nn.Module, weights: Tensor, means: Collection[int], sums: Mapping[int, bool]) -> None:
        super().__init__()
        self._module, self._weights, self._means, self._sums = module, weights, means, sums

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for weighted, dims in ((_REDUCED, self._means), (_SUMMED, self._sums)):
            if func in weighted and dims:
                check_reached(self._module, f"a {func.__name__} over channels")
                return weighted[func](func, self._weights, dims, *args, **(kwargs or {}))
        if func not in _WEIGHTED:
            return func(*args, **(kwargs or {}))
        check_reached(self._module, "a normalisation")
        return _WEIGHTED[func](self._weights, *args, **(kwargs or {}))


def _layer_norm(
    weights: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
    **__: Any,
) -> Tensor:
    x, share_C = _precisely(input, weights)
    x = x - (x * share_C).sum(-1, keepdim=True)
    variance = (x.square() * share_C).sum(-1, keepdim=True)
    return _affine(x * torch.rsqrt(variance + eps), weight, bias).to(input.dtype)


def _rms_norm(
    weights: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    x, share_C = _precisely(input, weights)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    square = (x.square() * share_C).sum(-1, keepdim=True)
    return _affine(x * torch.rsqrt(square + eps), weight, None).to(input.dtype)


def _group_norm(
    weights: Tensor,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
    **__: Any,
) -> Tensor:
    x, _share = _precisely(input, weights)
    shape = x.shape
    x_BGCS = x.reshape(shape[0], num_groups, shape[1] // num_groups, -1)
    weights_GC1 = weights.to(x).view(num_groups, -1, 1)
    share_GC1 = weights_GC1 / (weights_GC1.sum(1, keepdim=True) * x_BGCS.shape[-1])
    x_BGCS = x_BGCS - (x_BGCS * share_GC1).sum((2, 3), keepdim=True)
    variance = (x_BGCS.square() * share_GC1).sum((2, 3), keepdim=True)
    x = (x_BGCS * torch.rsqrt(variance + eps)).view(shape)
    ones = [1] * (len(shape) - 2)
    weight = None if weight is None else weight.view(-1, *ones)
    bias = None if bias is None else bias.view(-1, *ones)
    return _affine(x, weight, bias).to(input.dtype)


def _mean(
    func: Callable[..., Tensor],
    weights: Tensor,
    means: Collection[int],
    input: Tensor,
    dim: Any = None,
    keepdim: bool = False,
    *,
    axis: Any = None,
    keepdims: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    # torch accepts numpy's names too.
    dim, keepdim = (axis if dim is None else dim), keepdim or keepdims
    over = _weighted_dim(input, dim, means)
    if over is None:
        return input.mean(dim, keepdim, dtype=dtype)
    x, share_C = _precisely(input if dtype is None else input.to(dtype), weights)
    share = share_C.view(-1, *[1] * (input.dim() - 1 - over))
    return (x * share).sum(over, keepdim=keepdim).to(dtype or input.dtype)


def _spread(
    func: Callable[..., Any],
    weights: Tensor,
    means: Collection[int],
    input: Tensor,
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    axis: Any = None,
    keepdims: bool = False,
    correction: float | None = 1,
) -> Any:
    """Weighted variance or standard deviation, alone or with the mean; Bessel's correction takes the sum of weights."""
    dim = axis if dim is None else dim
    over = _weighted_dim(input, dim, means)
    correction, keepdim = (1 if correction is None else correction) * unbiased, keepdim or keepdims
    if over is None:
        # As in `x.var(False)`: over all entries, with or without the correction.
        if isinstance(dim, bool):
            dim, correction = None, int(dim)
        return func(input, dim, correction=correction, keepdim=keepdim)
    x, share_C = _precisely(input, weights)
    share, number = share_C.view(-1, *[1] * (input.dim() - 1 - over)), weights.sum().to(x)
    mean = (x * share).sum(over, keepdim=True)
    variance = ((x - mean).square() * share).sum(over, keepdim=keepdim) * (number / (number - correction))
    spread = (variance if "var" in func.__name__ else variance.sqrt()).to(input.dtype)
    if not func.__name__.endswith("_mean"):
        return spread
    return spread, (mean if keepdim else mean.squeeze(over)).to(input.dtype)


def _sum(
    func: Callable[..., Tensor],
    weights: Tensor,
    sums: Mapping[int, bool],
    input: Tensor,
    dim: Any = None,
    keepdim: bool = False,
    **settings: Any,
) -> Tensor:
    dim, keepdim = settings.pop("axis", dim), keepdim or settings.pop("keepdims", False)
    over = _weighted_dim(input, dim, sums)
    if over is None:
        return func(input, **({} if dim is None else {"dim": dim, "keepdim": keepdim}), **settings)
    x = input if settings.get("dtype") is None else input.to(settings["dtype"])
    return (x * _summands(x, weights, over, sums)).sum(over, keepdim=keepdim).to(x.dtype)


def _norm(
    func: Callable[..., Tensor],
    weights: Tensor,
    sums: Mapping[int, bool],
    input: Tensor,
    p: Any = None,
    dim: Any = None,
    keepdim: bool = False,
    **settings: Any,
) -> Tensor:
    p, dim, keepdim = settings.pop("ord", p), settings.pop("axis", dim), keepdim or settings.pop("keepdims", False)
    over = _weighted_dim(input, dim, sums)
    if over is None or p not in (None, 2, "fro"):
        return func(input, *([] if p is None else [p]), dim=dim, keepdim=keepdim, **settings)
    x = input if settings.get("dtype") is None else input.to(settings["dtype"])
    return torch.linalg.vector_norm(x * _summands(x, weights, over, sums).sqrt(), 2, over, keepdim).to(x.dtype)


def _normalize(
    func: Callable[..., Tensor],
    weights: Tensor,
    sums: Mapping[int, bool],
    input: Tensor,
    p: float = 2.0,
    dim: int = 1,
    eps: float = 1e-12,
    out: Tensor | None = None,
) -> Tensor:
    if _weighted_dim(input, dim, sums) is None or p != 2 or out is not None:
        return func(input, p, dim, eps, out)
    return input / _norm(torch.norm, weights, sums, input, 2, dim, keepdim=True).clamp_min(eps)


def _summands(x: Tensor, weights: Tensor, over: int, sums: Mapping[int, bool]) -> Tensor:
    counted = next(counted for dim, counted in sums.items() if dim % x.dim() == over)
    counts = weights * (len(weights) / weights.sum()) if counted else weights
    dtype = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    return counts.to(x.device, dtype).view(-1, *[1] * (x.dim() - 1 - over))


def _weighted_dim(x: Tensor, dim: Any, means: Collection[int]) -> int | None:
    """Return the reduced dimension if its reductions are weighted, else None."""
    (over,) = dim if isinstance(dim, (tuple, list)) and len(dim) == 1 else (dim,)
    if isinstance(over, bool) or not isinstance(over, int):
        return None
    return over % x.dim() if over % x.dim() in [mean % x.dim() for mean in means] else None


def _precisely(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input in at least float32, and each channel's share of the statistics."""
    x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    return x, (weights / weights.sum()).to(x)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


_WEIGHTED: Mapping[Any, Callable[..., Tensor]] = {
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.group_norm: _group_norm,
    torch.group_norm: _group_norm,
}
_REDUCED: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.mean, Tensor.mean), _mean),
    **dict.fromkeys((torch.var, Tensor.var, torch.std, Tensor.std, torch.var_mean, torch.std_mean), _spread),
}
_SUMMED: Mapping[Any, Callable[..., Tensor]] = {
    **dict.fromkeys((torch.sum, Tensor.sum), _sum),
    **dict.fromkeys((torch.norm, Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm), _norm),
    F.normalize: _normalize,
}

"""Isotropic activations and normaliser, equivariant to rotations (Bird, "On De-Individuated Neurons").

A vector of channels is multiplied by a number that depends only on its length. Dimension 1 is the channel dimension: x
is [B, n] or [B, n, H, W], and the vector at each position is treated separately.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from growlab.base.settings import finite, one_of

# Squared radius below which tanh(r) / r and its slope are computed by a series, whose omitted terms are below float64's
# rounding.
_SMALL = 1e-3
# Taylor coefficients of tanh(sqrt(s)) / sqrt(s) in s.
_TANH_SERIES = (1.0, -1 / 3, 2 / 15, -17 / 315, 62 / 2835)
_HALF = (torch.float16, torch.bfloat16)


def squared_norm(x: Tensor) -> Tensor:
    """Compute ||x||^2 over dimension 1 (kept) in at least float32: in float16 a norm of 256 would overflow.

    Autocast runs `vecdot` in half precision for any input, but not `vector_norm`, which is slower on a CPU.
    """
    if x.dtype in _HALF or torch.is_autocast_enabled(x.device.type):
        dtype = torch.promote_types(x.dtype, torch.float32)
        return torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=dtype).square()
    return torch.linalg.vecdot(x, x, dim=1).unsqueeze(1)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor to a dtype, if it has another."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def tanh_gain(square: Tensor) -> Tensor:
    """Gain tanh(r) / r of the squared radius s = r^2; 1 and smooth at 0, without NaN gradients."""
    small = square < _SMALL
    radius = torch.where(small, 1.0, square).sqrt()
    series: Tensor | float = 0.0
    for coefficient in reversed(_TANH_SERIES):
        series = series * square + coefficient
    return torch.where(small, series, torch.tanh(radius) / radius)


GAINS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": tanh_gain,
    # Bounded like tanh, but cheaper and slower to saturate.
    "softsign": lambda square: torch.rsqrt(1 + square),
    # Short vectors vanish, long ones pass, like a ReLU along the radius.
    "soft_relu": lambda square: 1 - tanh_gain(square),
    # Short vectors are scaled to a tenth, long ones pass.
    "leaky": lambda square: 1 - 0.9 * tanh_gain(square),
}


@dataclass(frozen=True)
class IntrinsicLength:
    """Intrinsic length o of an activation (Eq. 29).

    Attributes:
        start: initial value of o.
        kind: "trained": trained as ln o, so that it stays positive; "constant": only changed by growth and pruning;
            "signed": trained as o, which may become negative; the norm is then sqrt(| ||x||^2 + o |).

    Raises:
        ValueError: the kind is unknown, or the length is invalid for it.
    """

    start: float = 0.01
    kind: Literal["trained", "constant", "signed"] = "trained"

    def __post_init__(self) -> None:
        one_of(("trained", "constant", "signed"), length_kind=self.kind)
        finite(length=self.start)
        if self.kind != "signed" and not self.start > 0:
            raise ValueError(
                f"length must be above 0, or None to leave it out; not {self.start} (a signed one may be negative)."
            )


class IsotropicActivation(nn.Module):
    """Isotropic activation f(x; o) = g(sqrt(||x||^2 + o)) x; commutes with rotations of channels (Eqs. 3, 26, 29).

    Args:
        kind: the gain g, a name in `GAINS`; "tanh" is Eq. 37.
        length: intrinsic length o, an `IntrinsicLength` or the initial value of a trained one; stored as `log_length` =
            ln o, a signed one as `length` = o. None: o = 0, so that a pruned channel's bias cannot be absorbed.
        gain_channel: append g as the last output channel, a constant neuron times its gain. Layers that read it
            (`add_gain_column`) have a vector psi in addition to their bias, W f(x) + psi g + b, as in the author's
            later code, which exactly absorbs the contribution of a removed neuron's bias.

    Raises:
        ValueError: the gain is unknown, or the length is invalid.

    Examples:
        >>> x, o = torch.tensor([[3.0, 4.0]]), 0.5
        >>> torch.allclose(IsotropicActivation("tanh", o)(x), math.tanh(25.5**0.5) / 25.5**0.5 * x)
        True
    """

    def __init__(
        self, kind: str = "tanh", length: float | IntrinsicLength | None = 0.01, gain_channel: bool = False
    ) -> None:
        super().__init__()
        one_of(GAINS, kind=kind)
        self.kind = kind
        # Growth finds the gain channel and the intrinsic length by these names (`growlab.widths.rules.norms`).
        self.gain_channel = gain_channel
        self.log_length: nn.Parameter | None = None
        self.length: nn.Parameter | None = None
        settings = IntrinsicLength(length) if isinstance(length, int | float) else length
        if settings is not None and settings.kind == "signed":
            self.length = nn.Parameter(torch.tensor(float(settings.start)))
        elif settings is not None:
            start = torch.tensor(math.log(settings.start))
            self.log_length = nn.Parameter(start, requires_grad=settings.kind == "trained")

    @property
    def intrinsic_length(self) -> Tensor | None:
        """Intrinsic length o, a single number, or None."""
        return self.length if self.log_length is None else self.log_length.exp()

    def gain(self, x: Tensor) -> Tensor:
        """Compute the gain of each vector: the shape of x with a single channel, in at least float32."""
        square = squared_norm(x)
        if self.log_length is not None:
            square = square + cast(self.log_length, square.dtype).exp()
        elif self.length is not None:
            square = (square + cast(self.length, square.dtype)).abs()
        return GAINS[self.kind](square)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply every vector of channels by its gain; keeps dtype and shape, or [B, n + 1, ...] with the gain."""
        gain = self.gain(x)
        y = gain * x
        return cast(torch.cat([y, gain], 1) if self.gain_channel else y, x.dtype)

    def extra_repr(self) -> str:
        """Return the arguments for `repr`."""
        value = self.intrinsic_length
        length = "None" if value is None else f"{float(value.detach()):.3g}"
        return f"{self.kind!r}, length={length}{', gain_channel=True' if self.gain_channel else ''}"


def add_gain_column(layer: nn.Linear | nn.Conv2d) -> None:
    """Add an input for a gain channel to a layer, as its last, with zero weights psi; the output is unchanged."""
    if isinstance(layer, nn.Linear):
        layer.in_features += 1
    else:
        layer.in_channels += 1
    weight = layer.weight.detach()
    layer.weight = nn.Parameter(torch.cat([weight, torch.zeros_like(weight[:, :1])], 1))
    # For `GainWeights` and `orthogonal_weights`. Not by setattr, whose type in nn.Module only allows tensors.
    vars(layer)["reads_gain"] = True


class Blend(nn.Module):
    """Blend f*(x; a) = a x + (1 - a) f(x) with a trained a, the identity at a = 1 (Section 3.2).

    Args:
        activation: f.
        start: initial value of a.

    Raises:
        ValueError: the activation has a gain channel, for which x has no counterpart.
    """

    def __init__(self, activation: nn.Module, start: float = 1.0) -> None:
        super().__init__()
        if getattr(activation, "gain_channel", False):
            raise ValueError("a blend needs an activation without a gain channel")
        self.activation = activation
        self.blend = nn.Parameter(torch.tensor(float(start)))

    def become_identity(self) -> None:
        """Reset a to 1, for a layer that is inserted while a network trains."""
        with torch.no_grad():
            self.blend.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Blend x and f(x); keeps the shape."""
        return self.blend * x + (1 - self.blend) * self.activation(x)


class ChiNorm(nn.Module):
    """Chi-normaliser: subtracts the mean vector and divides by one scale, `(x - mean) sqrt(n / E||x - mean||^2)`.

    The paper only names a Chi-normaliser; this is our interpretation. Unlike batch normalisation it has one scale for
    all channels, so it commutes with rotations; unlike layer normalisation it preserves the vectors' different lengths,
    without which an isotropic network would be affine (Appendix C). Eval mode uses running statistics.

    n stays the original number of channels after some are added or removed, so that a channel of zeros has no effect.

    Args:
        num_features: n.
        eps: added to E||x - mean||^2 / n.
        momentum: weight of a batch in the running statistics.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [B, n, ...]; keeps shape and dtype, with statistics in at least float32."""
        shape, dtype = (-1, *[1] * (x.dim() - 2)), torch.promote_types(x.dtype, torch.float32)
        if not self.training:
            mean, var = cast(self.running_mean, dtype), cast(self.running_var, dtype)
            return cast((x - mean.view(shape)) * torch.rsqrt(var + self.eps), x.dtype)
        mean = x.mean([dim for dim in range(x.dim()) if dim != 1], dtype=dtype)
        centred = x - mean.view(shape)
        var = squared_norm(centred).mean() / self.num_features
        with torch.no_grad():
            self.running_mean.lerp_(cast(mean, self.running_mean.dtype), self.momentum)
            self.running_var.lerp_(cast(var, self.running_var.dtype), self.momentum)
        return cast(centred * torch.rsqrt(var + self.eps), x.dtype)

    def extra_repr(self) -> str:
        """Return the arguments for `repr`."""
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}"

"""Isotropic primitives: activations and a normaliser that know no basis (Bird, "On De-Individuated Neurons").

A vector of channels is only ever multiplied by a number that depends on its length. Dimension 1 holds the channels:
x is [B, n] or [B, n, H, W], where the vector at each position stands for itself.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

# Below this squared radius tanh(r) / r and its slope are summed up as a series; the terms that are left out are
# smaller than float64's rounding.
_SMALL = 1e-3
# Taylor coefficients of tanh(sqrt(s)) / sqrt(s) in s.
_TANH_SERIES = (1.0, -1 / 3, 2 / 15, -17 / 315, 62 / 2835)


_HALF = (torch.float16, torch.bfloat16)


def squared_norm(x: Tensor) -> Tensor:
    """||x||^2 over dimension 1, which is kept, in at least float32: in float16 a norm of 256 would overflow.

    Autocast takes `vecdot` in half precision whatever it is given, but not `vector_norm`, which on a CPU is slower.
    """
    if x.dtype in _HALF or torch.is_autocast_enabled(x.device.type):
        dtype = torch.promote_types(x.dtype, torch.float32)
        return torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=dtype).square()
    return torch.linalg.vecdot(x, x, dim=1).unsqueeze(1)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a dtype; the tensor itself, without an operation, where it has that already."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def tanh_gain(square: Tensor) -> Tensor:
    """tanh(r) / r of the squared radius s = r^2: 1 at 0, smooth there, no NaN in its gradient."""
    small = square < _SMALL
    radius = torch.where(small, 1.0, square).sqrt()
    series: Tensor | float = 0.0
    for coefficient in reversed(_TANH_SERIES):
        series = series * square + coefficient
    return torch.where(small, series, torch.tanh(radius) / radius)


def softsign_gain(square: Tensor) -> Tensor:
    """1 / sqrt(1 + r^2): bounded like tanh, cheaper, with heavier tails."""
    return torch.rsqrt(1 + square)


def soft_relu_gain(square: Tensor) -> Tensor:
    """1 - tanh(r) / r: short vectors vanish, long ones pass, like a ReLU along the radius."""
    return 1 - tanh_gain(square)


def leaky_gain(square: Tensor) -> Tensor:
    """0.1 + 0.9 (1 - tanh(r) / r): short vectors are kept at a tenth, long ones pass."""
    return 1 - 0.9 * tanh_gain(square)


GAINS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": tanh_gain,
    "softsign": softsign_gain,
    "soft_relu": soft_relu_gain,
    "leaky": leaky_gain,
}


@dataclass(frozen=True)
class IntrinsicLength:
    """The intrinsic length o of an activation (Eq. 29).

    Attributes:
        start: o at the beginning.
        kind: "trained" as ln o, so that it stays above 0; "constant": only growth and pruning change it; "signed":
            trained as it is, and may become negative, where the norm is sqrt(| ||x||^2 + o |).

    Raises:
        ValueError: there is no such kind, or no such length of this kind.
    """

    start: float = 0.01
    kind: Literal["trained", "constant", "signed"] = "trained"

    def __post_init__(self) -> None:
        if self.kind not in ("trained", "constant", "signed"):
            raise ValueError(f"an intrinsic length is trained, constant or signed, not {self.kind!r}")
        if self.kind == "signed" and not math.isfinite(self.start):
            raise ValueError(f"an intrinsic length must be a number, not {self.start}")
        if self.kind != "signed" and not 0 < self.start < math.inf:
            raise ValueError(
                f"an intrinsic length must be above 0, or None to leave it out; not {self.start} (one that is signed "
                "may be negative)"
            )


class IsotropicActivation(nn.Module):
    """f(x; o) = g(sqrt(||x||^2 + o)) x, which commutes with every rotation of the channels (Eqs. 3, 26, 29).

    Args:
        kind: the gain g, a name in `GAINS`; "tanh" is Eq. 37.
        length: the intrinsic length o, an `IntrinsicLength` or the start of one that is trained; it is held as
            `log_length` = ln o, a signed one as `length` = o. None leaves it out: o = 0 for good, and a pruned
            channel's bias has nowhere to go.
        gain_channel: put out g itself as one more channel, behind the others: a neuron that is constant, but for
            its gain. What reads it (`add_gain_column`) then has a vector psi beside its bias, W f(x) + psi g + b, as
            in the author's later code: it takes up exactly what a removed neuron's bias contributed.

    Raises:
        ValueError: there is no such gain, or no such length.

    Examples:
        >>> x, o = torch.tensor([[3.0, 4.0]]), 0.5
        >>> torch.allclose(IsotropicActivation("tanh", o)(x), math.tanh(25.5**0.5) / 25.5**0.5 * x)
        True
    """

    def __init__(
        self, kind: str = "tanh", length: float | IntrinsicLength | None = 0.01, gain_channel: bool = False
    ) -> None:
        super().__init__()
        if kind not in GAINS:
            raise ValueError(f"an isotropic activation is one of {', '.join(GAINS)}, not {kind!r}")
        self.kind = kind
        # Growth finds the gain channel and the intrinsic length by these names (`growlab.widths.rules.rotation`).
        self.gain_channel = gain_channel
        self.log_length: nn.Parameter | None = None
        self.length: nn.Parameter | None = None
        if length is None:
            return
        length = length if isinstance(length, IntrinsicLength) else IntrinsicLength(length)
        if length.kind == "signed":
            self.length = nn.Parameter(torch.tensor(float(length.start)))
        else:
            start = torch.tensor(math.log(length.start))
            self.log_length = nn.Parameter(start, requires_grad=length.kind == "trained")

    @property
    def intrinsic_length(self) -> Tensor | None:
        """o, a single number; None where it is left out."""
        return self.length if self.log_length is None else self.log_length.exp()

    def gain(self, x: Tensor) -> Tensor:
        """The number that each vector is multiplied by: x with a single channel, in at least float32."""
        square = squared_norm(x)
        if self.log_length is not None:
            square = square + cast(self.log_length, square.dtype).exp()
        elif self.length is not None:
            square = (square + cast(self.length, square.dtype)).abs()
        return GAINS[self.kind](square)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply every vector of channels by its gain; dtype and shape as given, or [B, n + 1, ...] with the gain."""
        gain = self.gain(x)
        y = gain * x
        return cast(torch.cat([y, gain], 1) if self.gain_channel else y, x.dtype)

    def extra_repr(self) -> str:
        """What `print` shows."""
        known = self.intrinsic_length
        length = "None" if known is None else f"{float(known.detach()):.3g}"
        return f"{self.kind!r}, length={length}{', gain_channel=True' if self.gain_channel else ''}"


def add_gain_column(layer: nn.Linear | nn.Conv2d) -> None:
    """Let a layer read a gain channel behind its other inputs, with weights psi of zero: it computes what it did."""
    if isinstance(layer, nn.Linear):
        layer.in_features += 1
    else:
        layer.in_channels += 1
    weight = layer.weight.detach()
    layer.weight = nn.Parameter(torch.cat([weight, torch.zeros_like(weight[:, :1])], 1))
    # `GainWeights` and `orthogonal_weights` find them by this; torch's type says that attributes are tensors.
    vars(layer)["reads_gain"] = True


class Blend(nn.Module):
    """f*(x; a) = a x + (1 - a) f(x), a from 1, where it is the identity, to learned (Section 3.2).

    Args:
        activation: f.
        start: a at the beginning.

    Raises:
        ValueError: the activation puts out a gain channel, which x has no counterpart of.
    """

    def __init__(self, activation: nn.Module, start: float = 1.0) -> None:
        super().__init__()
        if getattr(activation, "gain_channel", False):
            raise ValueError("a blend needs an activation without a gain channel")
        self.activation = activation
        self.blend = nn.Parameter(torch.tensor(float(start)))

    def become_identity(self) -> None:
        """Begin again at a = 1, as in a layer that comes in while a network trains."""
        with torch.no_grad():
            self.blend.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Shape as given."""
        return self.blend * x + (1 - self.blend) * self.activation(x)


class ChiNorm(nn.Module):
    """Subtract the mean vector and divide by one number: `(x - mean) sqrt(n / E||x - mean||^2)`.

    The paper only names a Chi-normaliser; this is our reading of it. Unlike batch normalisation it has one scale
    for all channels, so it commutes with rotations; unlike layer normalisation it leaves vectors their different
    lengths, without which an isotropic network would be affine (Appendix C). Eval mode takes running statistics.

    n is the number of channels that the layer was made for, also after some were added or removed: a channel that
    carries nothing then changes nothing.

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
        """Normalise [B, n, ...]; shape and dtype as given, statistics in at least float32."""
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
        """What `print` shows."""
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}"

"""What the paper leaves open about neurons that come and go, and scores that say which of them matter."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from growlab.base.settings import finite, flag, one_of

Columns = Literal["orthogonal", "zero", "copy", "random", "small"]
Correction = Literal["bias", "batch", "none"]
Direction = Literal["forward", "backward"]
COLUMNS = ("orthogonal", "zero", "copy", "random", "small")
CORRECTIONS = ("bias", "batch", "none")
DIRECTIONS = ("forward", "backward")


# Scores [n] of the neurons of a spectrum: (left [n, n], values [n], right [K, n], gradient [n, K] or None) -> [n].
Importance = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def singular_value(left: Tensor, values: Tensor, right: Tensor, gradient: Tensor | None) -> Tensor:
    """How much a neuron lets through: its singular value."""
    return values


def gradient_times_value(left: Tensor, values: Tensor, right: Tensor, gradient: Tensor | None) -> Tensor:
    """How much the loss would change to first order without the neuron: |s_i dL/ds_i|, dL/ds_i = u_i^T G v_i.

    Raises:
        ValueError: there is no gradient.
    """
    if gradient is None:
        raise ValueError(
            "importance='gradient' needs an optimizer that keeps a running mean of the gradient, such as "
            "adam or sgd with momentum, and one step of it."
        )
    return (values * ((left.T @ gradient.to(left)) * right.T).sum(1)).abs()


IMPORTANCES: dict[str, Importance] = {"singular_value": singular_value, "gradient": gradient_times_value}


@dataclass(frozen=True)
class Choices:
    """What the paper leaves open.

    Attributes:
        columns: outgoing weights U* of a new neuron. "orthogonal": to those of all others (Gram-Schmidt), at their
            root mean square norm, a random direction where all are taken; "zero"; "copy": of the neuron with the
            largest singular value; "random": at that norm; "small": random, of 0.01 a weight, as in the author's later
            code.
        bias: b* of a new neuron in units of sqrt(o), within (-1, 1). Not 0 with columns other than "zero", growth
            is exact only on average (E[g]), or with a gain channel.
        correction: where a removed neuron's constant part goes. "bias": b*^2 into the intrinsic length and
            E[g] U* b* into the next biases, as in the paper; where layers read a gain channel, U* b* into their
            weights for it, which is exact. "batch": the mean and the mean square of what the neuron carried on the
            batch take the place of b* and b*^2; the same where its singular value is 0. "none": it is lost.
        least_squares: let the others stand in for a removed neuron: the next weights are those that reproduce its
            linear contribution best on the batch (Eq. 30 with the batch's covariance in the place of a white
            input's, for which Eq. 30 is the plain deletion).
        importance: score of a neuron, a name in `IMPORTANCES`; those with the lowest are removed.
        rotate: turn the basis on growth too (optimizers such as Adam depend on it); on removal it always is.
        direction: "forward": singular values are those of the weights that a layer is produced by; "backward": of those
            that it is read by (Section 2.3.2, the right-sided form). A neuron that nothing reads still counts in the
            norm, so its removal is never exact: the intrinsic length takes its mean square on the batch, also with
            the correction "bias". Growth that is exact in this direction has `columns="zero"` and a bias, without
            which such a neuron would have no gradient.

    Raises:
        ValueError: a choice is none of these.
    """

    columns: Columns = "orthogonal"
    bias: float = 0.0
    correction: Correction = "bias"
    least_squares: bool = False
    importance: Literal["singular_value", "gradient"] = "singular_value"
    rotate: bool = True
    direction: Direction = "forward"

    def __post_init__(self) -> None:
        one_of(IMPORTANCES, importance=self.importance)
        one_of(COLUMNS, columns=self.columns)
        one_of(CORRECTIONS, correction=self.correction)
        one_of(DIRECTIONS, direction=self.direction)
        flag(least_squares=self.least_squares, rotate=self.rotate)
        finite(bias=self.bias)
        if not -1 < self.bias < 1:
            raise ValueError(f"bias must lie between -1 and 1 (b*^2 < o), not {self.bias}.")

"""Options for adding and removing neurons that the paper does not specify, and importance scores of neurons."""

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
    """Score neurons by their singular values."""
    return values


def gradient_times_value(left: Tensor, values: Tensor, right: Tensor, gradient: Tensor | None) -> Tensor:
    """Score neurons by the first-order change of the loss without them: |s_i dL/ds_i|, dL/ds_i = u_i^T G v_i.

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
    """Options for details that the paper does not specify.

    Attributes:
        columns: outgoing weights U* of a new neuron. "orthogonal": orthogonal to those of all others (Gram-Schmidt),
            with their root mean square norm, or random if they span the space; "zero"; "copy": those of the neuron with
            the largest singular value; "random": random with that norm; "small": random, 0.01 per weight, as in the
            author's later code.
        bias: b* of a new neuron in units of sqrt(o), within (-1, 1). If it is not 0 and columns are not "zero", growth
            is exact only on average (E[g]), or with a gain channel.
        correction: compensation for a removed neuron's constant part. "bias": b*^2 is added to the intrinsic length and
            E[g] U* b* to the next biases, as in the paper; if layers read a gain channel, U* b* is added to their
            weights psi, which is exact. "batch": the mean and mean square of the neuron's input on the batch are used
            instead of b* and b*^2; equal if its singular value is 0. "none": no compensation.
        least_squares: let the remaining neurons replace a removed one: the next weights reproduce its linear
            contribution best on the batch (Eq. 30 with the batch's covariance instead of that of white inputs, for
            which Eq. 30 is plain deletion).
        importance: score of a neuron, a name in `IMPORTANCES`; neurons with the lowest scores are removed.
        rotate: rotate the basis on growth too (optimizers such as Adam depend on it); on removal it is always rotated.
        direction: "forward": singular values of the incoming weights; "backward": of the outgoing ones (Section 2.3.2,
            the right-sided form). A neuron without outgoing weights still counts in the norm, so its removal is never
            exact: its mean square on the batch is added to the intrinsic length, also with the correction "bias". Exact
            growth in this direction needs `columns="zero"` and a bias, without which such a neuron would have no
            gradient.

    Raises:
        ValueError: a choice is unknown, or `bias` is out of range.
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

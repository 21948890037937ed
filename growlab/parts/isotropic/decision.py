"""Rules for when isotropic layers are resized, and to which width."""

from dataclasses import dataclass

from torch import Tensor

from growlab.base.settings import at_least, flag, not_none, whole


@dataclass(frozen=True)
class Boundaries:
    """Epochs or steps at which the widths of layers are decided.

    Attributes:
        every_n_epochs: number of epochs between two boundaries.
        every_n_steps: number of optimizer steps between two boundaries instead, or None.
        first: epoch (or step) of the first boundary; None for `every_n_epochs` (`every_n_steps`).
        last: epoch (or step) of the last boundary, or None.

    Raises:
        ValueError: a number is below 1, or `last` is before the first boundary.
    """

    every_n_epochs: int = 1
    every_n_steps: int | None = None
    first: int | None = None
    last: int | None = None

    def __post_init__(self) -> None:
        whole(1, every_n_epochs=self.every_n_epochs)
        whole(1, **not_none(every_n_steps=self.every_n_steps, first=self.first))
        whole(0, **not_none(last=self.last))
        of_first = self.every_n_epochs if self.every_n_steps is None else self.every_n_steps
        if self.last is not None and self.last < (earliest := self.first or of_first):
            raise ValueError(
                f"last={self.last} lies before the first look at the layers, at {earliest}: none follows."
            )

    def before(self, epoch: int, step: int) -> int | None:
        """Number of the latest boundary up to this batch, ascending over a run, or None.

        Args:
            epoch: the current epoch.
            step: number of optimizer steps done.
        """
        now, every = (
            (epoch, self.every_n_epochs) if self.every_n_steps is None else (step, self.every_n_steps)
        )
        first = self.first or every
        if now < first or (self.last is not None and now > self.last):
            return None
        # Between two boundaries the previous one is returned: it may not have been evaluated yet.
        return now - (now - first) % every


@dataclass(frozen=True)
class Widths:
    """Rule for the width of a layer.

    Attributes:
        scaffold: Xi, number of neurons kept below the threshold.
        threshold: theta.
        relative: the threshold is theta times the layer's largest score instead of theta.
        target_width: width that every layer moves towards instead, or None.
        neurons_per_event: largest number of neurons that one event adds to or removes from a layer; None for no limit.
        min_width: smallest width of a layer.
        max_width: largest width of a layer; None for no limit.

    Raises:
        ValueError: a value is invalid.
    """

    scaffold: int = 1
    threshold: float = 0.1
    relative: bool = True
    target_width: int | None = None
    neurons_per_event: int | None = None
    min_width: int = 1
    max_width: int | None = None

    def __post_init__(self) -> None:
        limits = {"neurons_per_event": self.neurons_per_event, "max_width": self.max_width}
        whole(1, min_width=self.min_width, **not_none(target_width=self.target_width, **limits))
        whole(0, scaffold=self.scaffold)
        at_least(0, threshold=self.threshold)
        flag(relative=self.relative)
        if self.max_width is not None and self.max_width < self.min_width:
            raise ValueError(f"max_width={self.max_width} is below min_width={self.min_width}.")

    def after(self, width: int, scores: Tensor | None) -> int:
        """Return the width of a layer after a boundary.

        Args:
            width: its current width.
            scores: scores of its neurons, [width]; None with a target width.
        """
        wanted = width if self.target_width is None else self.target_width
        if scores is not None:
            limit = self.threshold * (float(scores.max()) if self.relative else 1.0)
            wanted = width + self.scaffold - int((scores < limit).sum())
        if self.neurons_per_event is not None:
            wanted = min(max(wanted, width - self.neurons_per_event), width + self.neurons_per_event)
        return max(self.min_width, wanted if self.max_width is None else min(wanted, self.max_width))

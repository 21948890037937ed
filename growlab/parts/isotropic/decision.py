"""When isotropic layers are looked at, and how wide they become."""

from dataclasses import dataclass

from torch import Tensor

from growlab.base.settings import at_least, flag, not_none, whole


@dataclass(frozen=True)
class Boundaries:
    """Moments at which layers are looked at.

    Attributes:
        every_n_epochs: epochs between two of them.
        every_n_steps: optimizer steps between two of them instead, or None.
        first: the first one: the epoch (or step) before which neurons may first come or go; None for
            `every_n_epochs` (`every_n_steps`).
        last: the last one, or None for none.

    Raises:
        ValueError: a number is below 1.
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
        """Number of the boundary that lies before a batch, ascending over a run; None if there is none.

        Args:
            epoch: the current epoch.
            step: optimizer steps done.
        """
        now, every = (
            (epoch, self.every_n_epochs) if self.every_n_steps is None else (step, self.every_n_steps)
        )
        first = self.first or every
        if now < first or (self.last is not None and now > self.last):
            return None
        # Between two boundaries the last one counts: it may not have been asked yet.
        return now - (now - first) % every


@dataclass(frozen=True)
class Widths:
    """How wide a layer becomes.

    Attributes:
        scaffold: Xi, neurons kept below the threshold.
        threshold: theta.
        relative: compare scores with theta times the layer's largest score instead of with theta.
        target_width: width that every layer moves to instead, or None.
        neurons_per_event: most neurons of a layer that one event adds or removes; None for no limit.
        min_width: of every layer.
        max_width: of every layer; None for no limit.

    Raises:
        ValueError: a value cannot be used.
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
        """Width of a layer after a boundary.

        Args:
            width: its width now.
            scores: of its neurons, [width]; not needed with a target width.
        """
        wanted = width if self.target_width is None else self.target_width
        if scores is not None:
            limit = self.threshold * (float(scores.max()) if self.relative else 1.0)
            wanted = width + self.scaffold - int((scores < limit).sum())
        if self.neurons_per_event is not None:
            wanted = min(max(wanted, width - self.neurons_per_event), width + self.neurons_per_event)
        return max(self.min_width, wanted if self.max_width is None else min(wanted, self.max_width))

"""The learning rate over a run whose steps an epoch change with the batch size."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import cos, inf, pi, sqrt
from typing import Literal

from growlab.errors import UserError
from growlab.growth import Schedule

_CHOICES = {
    "shape": ("cosine", "constant", "steps", "inverse_sqrt"),
    "restarts": ("none", "stage"),
    "batch_rule": ("none", "linear", "sqrt"),
}


@dataclass(frozen=True)
class LearningRate:
    """How the rate runs; the base rate is the optimizer's own `lr`.

    Attributes:
        shape: "cosine" from the base rate to 0; "constant"; "steps", constant but for the milestones; or
            "inverse_sqrt", which falls with the root of the number of steps and passes the base rate where the
            warm-up ends (Vaswani et al. 2017, Eq. 3, by its peak as fairseq has it).
        warmup_epochs: epochs of linear rise from 0 at the beginning.
        restarts: run the shape once over the whole run ("none"), or anew in each stage ("stage").
        batch_rule: scale the rate with the stage's batch size over `batch_size`: "none", "linear", "sqrt".
        milestones: epochs of the run at which "steps" multiplies the rate by `decay`.
        decay: that factor.
        warmup_steps: the rise in optimizer steps, of "inverse_sqrt".
        batch_size: the size that the optimizer's rate is for, which `batch_rule` compares with; None: the last stage's.

    Raises:
        ValueError: a value is none of these.
    """

    shape: Literal["cosine", "constant", "steps", "inverse_sqrt"] = "cosine"
    warmup_epochs: float = 0.0
    restarts: Literal["none", "stage"] = "none"
    batch_rule: Literal["none", "linear", "sqrt"] = "none"
    milestones: Sequence[float] = ()
    decay: float = 0.1
    warmup_steps: int | None = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be {' or '.join(known)}, not {getattr(self, name)!r}.")
        if not 0 <= self.warmup_epochs < inf:
            raise ValueError(f"warmup_epochs must be 0 or more, not {self.warmup_epochs}.")
        if (self.warmup_steps is not None) != (self.shape == "inverse_sqrt"):
            raise ValueError(
                "warmup_steps, such as 4000, goes with shape=inverse_sqrt; other shapes warm up over warmup_epochs."
            )
        if self.warmup_steps is not None and (
            self.warmup_steps < 1 or self.warmup_epochs or self.restarts != "none"
        ):
            raise ValueError(
                "warmup_steps must be at least 1, with warmup_epochs=0 and restarts=none beside it."
            )
        if not self.decay > 0:
            raise ValueError(f"decay must be positive, not {self.decay}.")
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {self.batch_size}.")

    def factor_at_step(self, schedule: Schedule, steps_in_epoch: Sequence[int]) -> Callable[[int], float]:
        """The factor on the base rate as a function of the number of optimizer steps done.

        Args:
            schedule: stages of the run.
            steps_in_epoch: optimizer steps of each epoch.

        Raises:
            UserError: the warm-up takes the whole run.
        """
        if self.warmup_epochs >= schedule.total_epochs:
            raise UserError(
                f"schedule.learning_rate.warmup_epochs={self.warmup_epochs} leaves none of "
                f"{schedule.total_epochs} epochs to train at the full rate."
            )
        starts = [0, *accumulate(steps_in_epoch)]

        def factor(step: int) -> float:
            epoch = min(bisect_right(starts, step) - 1, schedule.total_epochs - 1)
            progress = min(epoch + (step - starts[epoch]) / steps_in_epoch[epoch], schedule.total_epochs)
            return self._factor(schedule, epoch, progress, step)

        return factor

    def _factor(self, schedule: Schedule, epoch: int, progress: float, step: int) -> float:
        stage = schedule.stage_at(epoch)
        ratio = schedule.batch_sizes[stage] / (self.batch_size or schedule.batch_sizes[-1])
        scale = {"none": 1.0, "linear": ratio, "sqrt": sqrt(ratio)}[self.batch_rule]
        if self.warmup_steps is not None:
            return scale * min(step / self.warmup_steps, sqrt(self.warmup_steps / max(step, 1)))
        if progress < self.warmup_epochs:
            return scale * progress / self.warmup_epochs
        if self.shape == "constant":
            return scale
        if self.shape == "steps":
            return scale * self.decay ** sum(progress >= milestone for milestone in self.milestones)
        begin, end = self.warmup_epochs, float(schedule.total_epochs)
        if self.restarts == "stage":
            begin = max(begin, schedule.starts[stage])
            end = schedule.starts[stage] + schedule.epochs[stage]
        return scale * 0.5 * (1 + cos(pi * (progress - begin) / (end - begin)))

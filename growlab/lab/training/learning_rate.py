"""Learning rate schedules for runs whose steps per epoch change with the batch size."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import cos, pi, sqrt
from typing import Literal, get_args, get_origin, get_type_hints

import torch

from growlab.base.errors import UserError
from growlab.base.settings import above, at_least, one_of
from growlab.growth import Schedule
from growlab.optim import RateRule, Regional

# Defaults of torch.optim.lr_scheduler.OneCycleLR: the rise takes 0.3 of the run and begins at 1 / 25 of the base rate;
# the fall ends at 1e-4 of that.
_RISE, _FIRST, _LAST = 0.3, 1 / 25, 1 / 25e4
# Shapes with a unit of their own: milestones in epochs, or steps.
_OWN_UNIT = ("steps", "inverse_sqrt")
# Tolerance for rounding errors in sums of decimal fractions.
_ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class LearningRate:
    """Schedule of the learning rate; the base rate is the optimizer's `lr`.

    Attributes:
        shape: "cosine" from the base rate to 0; "constant"; "steps", piecewise constant between milestones;
            "inverse_sqrt", proportional to 1 / sqrt(step) with its peak, the base rate, at the end of warm-up (Vaswani
            et al. 2017, Eq. 3, scaled as in fairseq); "wsd" (warm-up, stable, decay), constant and then down to 0
            over the last `decay_fraction` (Hu et al. 2024, MiniCPM, Section 4); or "one_cycle" (Smith and Topin 2018),
            half a cosine up to the base rate over `warmup_fraction` (0.3 if that is 0) and half a cosine down to
            nearly 0, as torch's OneCycleLR with a constant momentum.
        warmup_epochs: epochs of linear rise from 0 at the beginning.
        restarts: run the shape once over the whole run ("none"), or once in each stage ("stage").
        batch_rule: scale the rate with the stage's batch size over `batch_size`: "none", "linear", "sqrt".
        milestones: epochs at which "steps" multiplies the rate by `decay`.
        decay: that factor.
        warmup_steps: length of a linear warm-up in optimizer steps, instead of `warmup_epochs`; required by
            "inverse_sqrt".
        batch_size: batch size that the optimizer's rate is for, used by `batch_rule`; None: the last stage's.
        progress_unit: unit of the shape's progress and of milestones: "epochs", or optimizer steps if the run's length
            is in steps; "steps"; "cost", forward FLOPs relative to the run's planned total; "auto": cost if it is known
            before the run and no other setting is in epochs or steps, else as "epochs".
        warmup_fraction: length of the warm-up as a fraction of the run in that unit, instead of `warmup_epochs`; of
            the stage for "one_cycle" with `restarts="stage"`.
        decay_fraction: fraction of the run in that unit (of the stage with `restarts="stage"`) over which "wsd"
            decays.
        decay_shape: of "wsd", over the decay's progress x: "linear", 1 - x, or "1-sqrt", 1 - sqrt(x) (Haegele et al.
            2024, Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations, Section 3).
        warmup_steps_after_growth: optimizer steps of linear rise from 0 after each scheduled growth event.

    Raises:
        ValueError: a value is invalid.
    """

    shape: Literal["cosine", "constant", "steps", "inverse_sqrt", "wsd", "one_cycle"] = "cosine"
    warmup_epochs: float = 0.0
    restarts: Literal["none", "stage"] = "none"
    batch_rule: Literal["none", "linear", "sqrt"] = "none"
    milestones: Sequence[float] = ()
    decay: float = 0.1
    warmup_steps: int | None = None
    batch_size: int | None = None
    progress_unit: Literal["epochs", "steps", "cost", "auto"] = "epochs"
    warmup_fraction: float = 0.0
    decay_fraction: float = 0.5
    decay_shape: Literal["linear", "1-sqrt"] = "linear"
    warmup_steps_after_growth: int = 0

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            if get_origin(hint) is Literal:
                one_of(get_args(hint), **{name: getattr(self, name)})
        at_least(0, warmup_epochs=self.warmup_epochs, warmup_fraction=self.warmup_fraction)
        at_least(0, warmup_steps_after_growth=self.warmup_steps_after_growth)
        above(0, decay=self.decay)
        at_least(1, batch_size=1 if self.batch_size is None else self.batch_size)
        for milestone in self.milestones:
            above(0, milestones=milestone)
        if reason := next(self._contradictions(), None):
            raise ValueError(reason)

    def _contradictions(self) -> Iterator[str]:
        steps, in_epochs, fraction = self.warmup_steps, self.warmup_epochs, self.warmup_fraction
        if steps is None and self.shape == "inverse_sqrt":
            yield "shape=inverse_sqrt needs warmup_steps, such as 4000."
        if steps is not None and steps < 1:
            yield f"warmup_steps must be at least 1, not {steps}."
        if steps is not None and (in_epochs or fraction or self.restarts != "none"):
            yield "warmup_steps needs warmup_epochs=0, warmup_fraction=0 and restarts=none."
        if in_epochs and self.progress_unit == "steps":
            yield "warmup_epochs goes with progress_unit=epochs; with steps set warmup_epochs=0 and warmup_steps."
        if fraction >= 1:
            yield f"warmup_fraction must be below 1, not {fraction}."
        if in_epochs and fraction:
            yield "warmup_epochs and warmup_fraction both set the warm-up: leave one at 0."
        if self.shape == "one_cycle" and (in_epochs or steps is not None):
            other = "warmup_epochs at 0" if in_epochs else "warmup_steps out"
            yield f"shape=one_cycle rises over warmup_fraction ({_RISE} if that is 0): leave {other}."
        if in_epochs and self.progress_unit == "cost":
            yield "warmup_epochs goes with progress_unit=epochs; with cost set warmup_fraction, a fraction of the cost."
        if self.progress_unit == "cost" and self.shape in _OWN_UNIT:
            counted = "milestones in epochs" if self.shape == "steps" else "steps"
            yield f"progress_unit=cost cannot be used with shape={self.shape}, which counts its own {counted}."
        if self.shape == "wsd" and not 0 < self.decay_fraction <= (1 - fraction) * _ROUNDING:
            yield (
                f"decay_fraction must be above 0 and at most what warm-up leaves of the run, not {self.decay_fraction}."
            )

    @property
    def needs_stages(self) -> str | None:
        """The setting that needs the stages to be known before the run, or None."""
        if self.progress_unit == "cost":
            return "progress_unit=cost"
        rewarm = self.warmup_steps_after_growth
        return f"warmup_steps_after_growth={rewarm}" if rewarm else None

    def by_steps(self, knows_cost: bool = True) -> "LearningRate":
        """Convert the schedule for a run whose length is in steps; `knows_cost`: its FLOPs are known before the run."""
        if self.warmup_epochs:
            raise UserError(
                "schedule.learning_rate.warmup_epochs counts epochs, but this run's length is in steps: set "
                "warmup_epochs=0 and warmup_steps."
            )
        in_steps = self.progress_unit == "epochs" or (
            self.progress_unit == "auto" and (self.shape in _OWN_UNIT or not knows_cost)
        )
        return replace(self, progress_unit="steps") if in_steps else self

    def factor_at_step(
        self, schedule: Schedule, steps_in_epoch: Sequence[int], flops_in_epoch: Sequence[float] | None = None
    ) -> Callable[[int], float]:
        """Return the factor on the base rate as a function of the number of optimizer steps done.

        Args:
            schedule: stages of the run.
            steps_in_epoch: optimizer steps of each epoch.
            flops_in_epoch: forward FLOPs of each epoch, for `progress_unit="cost"`.
        """
        total = schedule.total_epochs
        if self.progress_unit == "cost" and flops_in_epoch is None:
            raise UserError(
                "schedule.learning_rate.progress_unit=cost needs to know the FLOPs of each epoch before the run."
            )
        starts = [0, *accumulate(steps_in_epoch)]
        by_cost = self.progress_unit == "cost" or (
            self.progress_unit == "auto" and not self.warmup_epochs and self.shape not in _OWN_UNIT
        )
        lengths: Sequence[float] = steps_in_epoch if self.progress_unit == "steps" else [1] * total
        lengths = flops_in_epoch if by_cost and flops_in_epoch else lengths
        clock = [0, *accumulate(lengths)]

        def position(step: int) -> tuple[int, float]:
            """Epoch of a step, and its time by the clock."""
            epoch = min(bisect_right(starts, step) - 1, total - 1)
            fraction = min((step - starts[epoch]) / steps_in_epoch[epoch], 1.0)
            return epoch, clock[epoch] + fraction * lengths[epoch]

        warm = self.warmup_epochs or self.warmup_fraction * clock[-1]
        if self.warmup_steps is not None:
            warm = position(self.warmup_steps)[1]

        def factor(step: int) -> float:
            epoch, moment = position(step)
            stage = schedule.stage_at(epoch)
            begin, end = 0, total
            if self.restarts == "stage":
                begin, end = schedule.starts[stage], schedule.starts[stage] + schedule.epochs[stage]
            shape = self._shape(step, moment, clock[begin], clock[end], warm)
            since = step - starts[schedule.starts[stage]]
            rewarm = min(1.0, since / again) if stage and (again := self.warmup_steps_after_growth) else 1.0
            ratio = schedule.batch_sizes[stage] / (self.batch_size or schedule.batch_sizes[-1])
            return {"none": 1.0, "linear": ratio, "sqrt": sqrt(ratio)}[self.batch_rule] * rewarm * shape

        return factor

    def _shape(self, step: int, moment: float, begin: float, end: float, warmup: float) -> float:
        """Factor at a moment of the clock, for a shape that spans `begin` to `end` with a warm-up."""
        if self.warmup_steps is not None and self.shape == "inverse_sqrt":
            return min(step / self.warmup_steps, sqrt(self.warmup_steps / max(step, 1)))
        if self.shape == "one_cycle":
            done, rise = (moment - begin) / (end - begin), self.warmup_fraction or _RISE
            first, last, x = (_FIRST, 1.0, done / rise) if done < rise else (1.0, _LAST, (done - rise) / (1 - rise))
            return last + (first - last) * 0.5 * (1 + cos(pi * x))
        if self.warmup_steps is not None and step < self.warmup_steps:
            return step / self.warmup_steps
        if moment < warmup:
            return moment / warmup
        if self.shape == "constant":
            return 1.0
        if self.shape == "steps":
            return self.decay ** sum(moment >= milestone for milestone in self.milestones)
        if self.shape == "wsd":
            left = min(1.0, (end - moment) / (self.decay_fraction * (end - begin)))
            return left if self.decay_shape == "linear" else 1 - sqrt(1 - left)
        begin = max(begin, warmup)
        # No decay if the warm-up takes the whole run.
        return 0.5 * (1 + cos(pi * (moment - begin) / (end - begin))) if end > begin else 1.0


@dataclass(frozen=True)
class RateAdaptation:
    """Settings for learning rate factors per region; see `growlab.optim`.

    Attributes:
        rule: computes the factors from the regions' norms; None: one global rate.
        divide_output_lr_by_fan_in: divide the output layers' rate by their fan-in in the seed (Table 1: 1 / C_0).
        optimizers: class names of supported optimizers; empty for all of `growlab.optim`.
    """

    rule: RateRule | None = None
    divide_output_lr_by_fan_in: bool = False
    optimizers: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.divide_output_lr_by_fan_in and self.rule is None:
            raise UserError(
                "lr_adapt.divide_output_lr_by_fan_in=true needs rates by region: choose lr_adapt=mup for one rate."
            )

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an optimizer adapt its rates, in place."""
        if self.rule is None:
            return
        if not isinstance(optimizer, Regional) or (self.optimizers and type(optimizer).__name__ not in self.optimizers):
            raise UserError(
                f"this lr_adapt works with the optimizers {', '.join(self.optimizers) or 'of growlab.optim'}, not "
                f"{type(optimizer).__module__}.{type(optimizer).__name__}; choose one of them with optimizer=..., or "
                "lr_adapt=none."
            )
        optimizer.rule, optimizer.divide_output_lr_by_fan_in = self.rule, self.divide_output_lr_by_fan_in

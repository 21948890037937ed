"""Callbacks of the user's own in a run, and runs that one of them ends early."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import hydra
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
    WeightAveraging,
)
from omegaconf import DictConfig, ListConfig

from growlab.base.errors import UserError
from growlab.lab.training.plan import Plan
from growlab.lab.training.task import Task

_AVERAGED = (
    "keeps an average of the weights that does not grow with the network; use ema.decay=0.999 instead."
)
# Callbacks of Lightning's that do not go with a growing run, and why.
_REFUSED: dict[type[Callback], str] = {
    StochasticWeightAveraging: _AVERAGED,
    WeightAveraging: _AVERAGED,
    LearningRateFinder: (
        "changes no rate of a growing run: optimizer.lr is its rate, and growlab plan chooses one for a network and a "
        "budget."
    ),
    BatchSizeFinder: (
        "changes no batch size of a growing run: schedule.batch_size=auto finds those that fit."
    ),
    GradientAccumulationScheduler: (
        "changes the steps of an epoch, which the run's schedule counts before: set trainer.accumulate_grad_batches "
        "for all epochs, or a batch size for each stage (schedule.batch_sizes)."
    ),
    BackboneFinetuning: (
        "freezes the module `backbone` of a LightningModule, which a run of growlab's has not: train in a script of "
        "your own with the callback growlab.Growth."
    ),
}


class StayStopped(Callback):
    """Lets a run that a callback has ended early stay ended when it is resumed behind its last epoch."""

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._stopped = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Know whom to ask."""
        self._trainer = trainer

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop again."""
        trainer.should_stop = trainer.should_stop or self._stopped

    def state_dict(self) -> dict[str, Any]:
        """Whether the run has been ended."""
        return {"stopped": self._trainer is not None and self._trainer.should_stop}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._stopped = state_dict["stopped"]


def user_callbacks(cfg: DictConfig, validates: bool) -> list[Callback]:
    """The callbacks of the group `callbacks`, and those of the list `trainer.callbacks`.

    Args:
        cfg: the run's configuration.
        validates: whether something is held out that a callback may decide by.

    Raises:
        UserError: one is no callback, does not go with a growing run, or decides by the test set or by what is not
            recorded.
    """
    named = {f"callbacks.{name}": settings for name, settings in (cfg.get("callbacks") or {}).items()}
    listed = cfg.trainer.get("callbacks") or []
    if not isinstance(listed, ListConfig | list):
        raise UserError(
            f"trainer.callbacks={listed} must be a list; callbacks.NAME._target_=MODULE.CLASS adds one."
        )
    named |= {f"trainer.callbacks[{place}]": settings for place, settings in enumerate(listed)}
    made = [_made(name, settings) for name, settings in named.items() if settings is not None]
    for callback in made:
        _check_monitor(callback, validates)
    return [*made, StayStopped()] if made else []


def _check_monitor(callback: Callback, validates: bool) -> None:
    """Refuse what could select on the test set, and what Lightning would miss behind the first epoch."""
    name, monitor = type(callback).__name__, getattr(callback, "monitor", None)
    if not isinstance(monitor, str):
        return
    if monitor.startswith("test_"):
        raise UserError(
            f"{name} would decide by {monitor}, and nothing may be selected on the test set: monitor val_loss with "
            "data.validation=split, or train_loss."
        )
    if monitor.startswith("val_") and not validates:
        raise UserError(
            f"{name} monitors {monitor}, which this run does not record: set data.validation=split, or monitor "
            "train_loss."
        )


def _made(name: str, settings: Any) -> Callback:
    callback = (
        hydra.utils.instantiate(settings, _convert_="all") if isinstance(settings, DictConfig) else settings
    )
    if not isinstance(callback, Callback):
        given = settings if callback is settings else f"a {type(callback).__name__}"
        raise UserError(
            f"{name} is {given}, not a callback of Lightning: give it a _target_ and its arguments."
        )
    for kind, why in _REFUSED.items():
        if isinstance(callback, kind):
            raise UserError(f"{type(callback).__name__} {why}")
    return callback


def completed(plan: Plan, rows: Sequence[Mapping[str, Any]], task: Task, max_time: bool) -> Plan:
    """The plan as far as it was carried out: all of it, or less where a callback ended the run behind the last growth.

    Args:
        plan: of the whole run.
        rows: one for each epoch that was trained.
        task: trained.
        max_time: `trainer.max_time` is set.

    Raises:
        UserError: the run was ended before the network had grown to its end, or because its time was over.
    """
    done, wanted = len(rows), plan.schedule.total_epochs
    if done >= wanted:
        return plan
    if max_time:
        raise UserError(
            f"training was stopped after {done} of {wanted} epochs (trainer.max_time), so there is no result yet; go "
            "on with ckpt_path=last and the run's hydra.run.dir."
        )
    state = task.growth_state
    # A method that decides widths by itself does not say how far it is.
    grown = task.grower.trigger.fraction_grown(state.scheduled_stage, state.widths) in (None, 1.0)
    stage = plan.schedule.stage_at(done - 1) if done else -1
    if not grown or stage < plan.schedule.num_stages - 1:
        raise UserError(
            f"training was stopped after {done} of {wanted} epochs, before the network has grown to its end, so there "
            "is no result: let the callback that stops it wait for longer."
        )
    epochs = (*plan.schedule.epochs[:-1], done - sum(plan.schedule.epochs[:-1]))
    parts = {name: getattr(plan, name)[:done] for name in ("batches", "steps", "samples")}
    return replace(plan, schedule=replace(plan.schedule, epochs=epochs), **parts)

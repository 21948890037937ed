"""Callbacks that the user adds to a run, and runs that one of them ends early."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import hydra
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
    WeightAveraging,
)
from omegaconf import DictConfig, ListConfig

from growlab.base.errors import UserError
from growlab.lab.training.plan import Plan
from growlab.lab.training.task import Task


class StayStopped(Callback):
    """Keeps a run that a callback has ended early from training on when it is resumed."""

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._stopped = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the trainer, whose `should_stop` goes into checkpoints."""
        self._trainer = trainer

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop again."""
        trainer.should_stop = trainer.should_stop or self._stopped

    def state_dict(self) -> dict[str, Any]:
        """Return whether a callback has ended the run."""
        return {"stopped": self._trainer is not None and self._trainer.should_stop}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore it."""
        self._stopped = state_dict["stopped"]


def user_callbacks(cfg: DictConfig) -> list[Callback]:
    """Make the callbacks of the group `callbacks`, and those of the list `trainer.callbacks`.

    Raises:
        UserError: one is no callback, decides by the test set, or changes the number of steps.
    """
    named = {f"callbacks.{name}": settings for name, settings in (cfg.get("callbacks") or {}).items()}
    listed = cfg.trainer.get("callbacks") or []
    if not isinstance(listed, ListConfig | list):
        raise UserError(
            f"trainer.callbacks={listed} must be a list; callbacks.NAME._target_=MODULE.CLASS adds one."
        )
    named |= {f"trainer.callbacks[{place}]": settings for place, settings in enumerate(listed)}
    made = [_made(name, settings) for name, settings in named.items() if settings is not None]
    return [*made, StayStopped()] if made else []


def _check(callback: Callback) -> None:
    """Refuse what would silently spoil the numbers of a run; other callbacks are the user's affair."""
    monitor = getattr(callback, "monitor", None)
    if isinstance(monitor, str) and monitor.startswith("test_"):
        raise UserError(
            f"{type(callback).__name__} would decide by {monitor}, and nothing may be selected on the test set: "
            "monitor val_loss with data.validation=split, or train_loss."
        )
    if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
        raise UserError(
            f"{type(callback).__name__} keeps an average of the weights that does not grow with the network; use "
            "ema.decay=0.999 instead."
        )
    if isinstance(callback, GradientAccumulationScheduler):
        raise UserError(
            "GradientAccumulationScheduler changes the steps of an epoch, which the schedule of rates counts before: "
            "set trainer.accumulate_grad_batches, or a batch size for each stage (schedule.batch_sizes)."
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
    _check(callback)
    return callback


def completed(plan: Plan, rows: Sequence[Mapping[str, Any]], task: Task, max_time: bool) -> Plan:
    """Shorten the plan to what was trained, if a callback ended the run after the last growth event.

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

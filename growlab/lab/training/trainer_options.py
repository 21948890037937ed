"""Options of Lightning's Trainer that a growing run sets itself, or that would spoil its numbers."""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, open_dict

from growlab.base.errors import UserError, as_user_errors
from growlab.base.settings import at_least, whole

# Lightning would take these, and the run would be shorter, longer or measured on less than its results say.
_OURS = frozenset(
    (
        *(
            "max_epochs",
            "min_epochs",
            "max_steps",
            "min_steps",
            "fast_dev_run",
            "overfit_batches",
            "barebones",
        ),
        *("limit_val_batches", "limit_test_batches", "check_val_every_n_epoch", "val_check_interval"),
        *("num_sanity_val_steps", "reload_dataloaders_every_n_epochs", "use_distributed_sampler"),
        *("logger", "log_every_n_steps", "default_root_dir", "enable_checkpointing", "plugins"),
        *("enable_progress_bar", "enable_model_summary"),
    )
)
# Keys of `conf/trainer` that Lightning's Trainer does not know.
_NOT_LIGHTNINGS = ("max_restarts",)


def for_lightning(trainer: DictConfig) -> DictConfig:
    """Copy the configuration's `trainer` without the keys that Lightning's Trainer does not know."""
    copied = trainer.copy()
    with open_dict(copied):
        for name in _NOT_LIGHTNINGS:
            copied.pop(name, None)
    return copied


def check_trainer_options(trainer: Mapping[str, Any]) -> None:
    """Refuse options that would be ignored or change what the numbers of a run mean.

    Args:
        trainer: the configuration's `trainer`.

    Raises:
        UserError: growlab sets the option itself, or its value is out of range.
    """
    if taken := [str(name) for name in trainer if name in _OURS]:
        raise UserError(
            f"trainer.{taken[0]} is set by growlab: schedule has the length of a run, trainer.limit_train_batches that "
            "of an epoch, data what is held out, logger and hydra.run.dir where results go."
        )
    with as_user_errors():
        whole(1, **{"trainer.accumulate_grad_batches": trainer.get("accumulate_grad_batches", 1)})
        for name in ("limit_train_batches", "gradient_clip_val"):
            if (value := trainer.get(name)) is not None:
                at_least(0, **{f"trainer.{name}": value})

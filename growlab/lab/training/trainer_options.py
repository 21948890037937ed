"""Options of Lightning's Trainer that a growing run does not take, and what to set in place of each."""

from collections.abc import Mapping
from math import inf
from typing import Any

from omegaconf import DictConfig, open_dict

from growlab.base.errors import UserError

_LENGTH = "schedule.total_epochs=N says how many epochs a run has, trainer.limit_train_batches=N how many steps each"
_TRIAL = "to try a run out set trainer.limit_train_batches=1, a step an epoch that reaches every growth event"
_FIXED = "growlab sets it itself"
_UNVALIDATED = "data.validation=none (data.split.validation=0 with data=custom)"
# Whether they are given as `trainer.NAME` or `+trainer.NAME`.
INSTEAD = {
    **dict.fromkeys(("max_epochs", "min_epochs", "max_steps", "min_steps"), _LENGTH),
    "fast_dev_run": _TRIAL,
    "overfit_batches": _TRIAL,
    "limit_val_batches": f"{_UNVALIDATED} leaves validation out",
    "limit_test_batches": "data.limit_test=N tests on fewer images",
    "check_val_every_n_epoch": f"validation follows every epoch; {_UNVALIDATED} leaves it out",
    "val_check_interval": f"validation follows every epoch; {_UNVALIDATED} leaves it out",
    "logger": "logger=csv, logger=tensorboard or logger=wandb chooses where numbers go",
    "default_root_dir": "hydra.run.dir=FOLDER is where a run's files go",
    "enable_checkpointing": "checkpoints are what resuming needs; checkpoint.every_minutes=null makes one an epoch",
    "log_every_n_steps": "log_rates_every_n_steps=N says how often rates are recorded",
    **dict.fromkeys(
        (
            *("plugins", "enable_progress_bar", "enable_model_summary", "num_sanity_val_steps", "barebones"),
            *("reload_dataloaders_every_n_epochs", "use_distributed_sampler"),
        ),
        _FIXED,
    ),
}


# Options that are true or false, which Lightning and torch take for true, or fail on later, with any other word.
_FLAGS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("detect_anomaly", "inference_mode"), (True, False)),
    "benchmark": (True, False),
    "deterministic": (True, False, "warn"),
}

# Keys of `conf/trainer` that are growlab's own.
_OWN = {"max_restarts"}


def for_lightning(trainer: DictConfig) -> DictConfig:
    """Copy the configuration's `trainer` without the keys that Lightning's Trainer does not know."""
    copied = trainer.copy()
    with open_dict(copied):
        for name in _OWN:
            copied.pop(name, None)
    return copied


def refused(name: str) -> str:
    """The sentence that refuses an option of `INSTEAD`."""
    return f"trainer.{name} is not for growing runs: {INSTEAD[name]}."


def check_trainer_options(trainer: Mapping[str, Any]) -> None:
    """Refuse options that would be ignored, stop a run before its result or fail in the middle of it.

    Args:
        trainer: the configuration's `trainer`.

    Raises:
        UserError: an option is in `INSTEAD`, or has an impossible value.
    """
    for name in trainer:
        if name in INSTEAD:
            raise UserError(refused(str(name)))
    accumulate = trainer.get("accumulate_grad_batches", 1)
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise UserError(
            f"trainer.accumulate_grad_batches={_told(accumulate)} must be at least 1, a whole number."
        )
    for name, words in _FLAGS.items():
        value = trainer.get(name)
        if value is not None and value not in words:
            raise UserError(f"trainer.{name}={_told(value)} must be {' or '.join(map(_told, words))}.")
    if trainer.get("gradient_clip_algorithm") is not None and trainer.get("gradient_clip_val") is None:
        raise UserError(
            f"trainer.gradient_clip_algorithm={trainer['gradient_clip_algorithm']} has no effect while "
            "trainer.gradient_clip_val=null."
        )
    for name in ("limit_train_batches", "gradient_clip_val"):
        value = trainer.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # Not `value < 0`, which is false of nan.
        if value is not None and not (is_number and 0 <= value < inf):
            raise UserError(f"trainer.{name}={_told(value)} must be a number from 0, or null.")


def _told(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

"""Settings of the command line without effect: the run would not be what was asked for."""

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from growlab.base.errors import UserError
from growlab.base.settings import left_out

# Which settings of the schedule come before each, where they are given.
_BEFORE = {
    "total_epochs": ("budget", "epochs"),
    "num_stages": ("epochs", "widths"),
    "initial_epochs": ("epochs",),
    "initial_fraction": ("initial_epochs", "epochs"),
    "initial_width": ("widths",),
}


_SHAPE = "schedule.learning_rate.shape"
# Settings that one value of another setting uses, and no other value does.
_NEEDS = {
    "schedule.learning_rate.milestones": (_SHAPE, "steps"),
    "schedule.learning_rate.decay": (_SHAPE, "steps"),
    "schedule.learning_rate.decay_fraction": (_SHAPE, "wsd"),
    "schedule.learning_rate.decay_shape": (_SHAPE, "wsd"),
    "data.validation_fraction": ("data.validation", "split"),
    "data.split_seed": ("data.validation", "split"),
    **dict.fromkeys(("data.mean", "data.std"), ("data.standardise", "channel")),
    "schedule.max_memory_gib_per_device": ("schedule.batch_size", "auto"),
}
# Of these, those that a value of null does not use either.
_NEED_ONE = {"schedule.max_memory_gib_per_device"}


def check_overruled(cfg: DictConfig, overrides: Sequence[str], is_sweep: bool = False) -> None:
    """Refuse settings that were typed and have no effect.

    Args:
        cfg: composed.
        overrides: of the command line.
        is_sweep: whether the command line starts several runs; then a setting may concern only some of them.

    Raises:
        UserError: naming the setting that comes before it, or without which it is not used.
    """
    typed = {
        name: value for name, _, value in (override.lstrip("+").partition("=") for override in overrides)
    }
    for name, stronger in _BEFORE.items():
        if f"schedule.{name}" not in typed:
            continue
        given = cfg.schedule.get(name)
        for other in stronger:
            value = cfg.schedule.get(other)
            if value is not None and f"schedule.{other}" not in typed and not _agree(name, given, value):
                raise UserError(
                    f"schedule.{name}={given} has no effect with schedule.{other}={_text(value)}, which the "
                    f"experiment sets: set that, or add schedule.{other}=null."
                )
    if not is_sweep:
        _check_needs(cfg, typed)
        _check_parts(cfg, typed)


def _check_needs(cfg: DictConfig, typed: Mapping[str, str]) -> None:
    for name, (other, needed) in _NEEDS.items():
        value = OmegaConf.select(cfg, other)
        if name in typed and value != needed and (value is not None or name in _NEED_ONE):
            raise UserError(
                f"{name}={typed[name]} has no effect with {other}={_text(value)}: it is of {other}={needed}."
            )


def _check_parts(cfg: DictConfig, typed: Mapping[str, str]) -> None:
    """Refuse settings of a part that is left out."""
    for name, part in (cfg.get("parts") or {}).items():
        settings = cfg.get(name)
        if not isinstance(settings, DictConfig) or part is None or not left_out(part):
            continue
        switch = next((str(key) for key in part if key != "_target_"), "")
        for key, value in settings.items():
            full = f"{name}.{key}"
            if key != switch and value is not None and full in typed:
                raise UserError(
                    f"{full}={typed[full]} has no effect: {name} is left out while {name}.{switch}=null."
                )


def _agree(name: str, given: Any, value: Any) -> bool:
    if name == "total_epochs":
        return isinstance(value, ListConfig) and sum(value) == given
    if name == "num_stages":
        return len(value) == given
    if name == "initial_epochs":
        return bool(given == value[0])
    return name == "initial_width" and bool(given == value[0])


def _text(value: Any) -> str:
    listed = OmegaConf.to_container(value) if isinstance(value, ListConfig) else value
    return "null" if value is None else str(listed).replace(" ", "")

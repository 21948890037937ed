"""Settings of the command line that others put out of force: the run would not be what was asked for."""

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from growlab.errors import UserError
from growlab.planning import left_out

# Which settings of the schedule come before each, where they are given.
_BEFORE = {
    "total_epochs": ("budget", "epochs"),
    "num_stages": ("epochs", "widths"),
    "initial_epochs": ("epochs",),
    "initial_fraction": ("initial_epochs", "epochs"),
    "initial_width": ("widths",),
}


# Which shape of the learning rate each setting is of.
_OF_SHAPE = {"milestones": "steps", "decay": "steps", "decay_fraction": "wsd", "decay_shape": "wsd"}


def check_overruled(cfg: DictConfig, overrides: Sequence[str], is_sweep: bool = False) -> None:
    """Refuse settings that were typed and have no effect.

    Args:
        cfg: composed.
        overrides: of the command line.
        is_sweep: the command line is of several runs, of which a setting may concern some only: what a shape or a part
            does not use is let pass.

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
            # Who types both knows of both.
            if value is not None and f"schedule.{other}" not in typed and not _agree(name, given, value):
                raise UserError(
                    f"schedule.{name}={given} has no effect beside schedule.{other}={_text(value)}, which the "
                    f"experiment sets: set that, or add schedule.{other}=null."
                )
    if not is_sweep:
        _check_shape(cfg, typed)
        _check_parts(cfg, typed)


def _check_shape(cfg: DictConfig, typed: Mapping[str, str]) -> None:
    rate = cfg.schedule.get("learning_rate") or {}
    for name, shape in _OF_SHAPE.items():
        key = f"schedule.learning_rate.{name}"
        if key in typed and rate.get("shape") not in (None, shape):
            raise UserError(
                f"{key}={typed[key]} has no effect with "
                f"schedule.learning_rate.shape={rate.shape}: it is of shape={shape}."
            )


def _check_parts(cfg: DictConfig, typed: Mapping[str, str]) -> None:
    """A part that is left out uses none of its settings."""
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
    return str(listed).replace(" ", "")

"""Settings of the command line that others put out of force: the run would not be what was asked for."""

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from growlab.errors import UserError

# Which settings of the schedule come before each, where they are given.
_BEFORE = {
    "total_epochs": ("budget", "epochs"),
    "num_stages": ("epochs", "widths"),
    "initial_epochs": ("epochs",),
    "initial_fraction": ("initial_epochs", "epochs"),
    "initial_width": ("widths",),
}


def check_overruled(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Refuse settings that were typed and have no effect.

    Args:
        cfg: composed.
        overrides: of the command line.

    Raises:
        UserError: naming the setting that comes before it.
    """
    typed = {override.lstrip("+").partition("=")[0] for override in overrides}
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

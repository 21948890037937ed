"""Check a composed configuration before anything is built: types, ranges, settings without effect.

Groups such as `data` and `model` accept any class, so values are checked against the annotations of its constructor.
"""

import json
import math
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from hydra.utils import get_object
from omegaconf import MISSING
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import SchemaError

from growlab.base.errors import UserError, as_user_errors
from growlab.base.settings import at_least, left_out, whole
from growlab.growth import make_schedule
from growlab.growth.schedule import MOST_EPOCHS
from growlab.optim import Inheritance

_ANY_CLASS = ConfigDict(arbitrary_types_allowed=True)
_Count = Annotated[int, Field(ge=1)]
# Settings at the top level of the configuration.
_TOP = {
    **dict.fromkeys(("compile", "check_ranks"), bool),
    "seed": Annotated[int, Field(ge=0, lt=2**32)],
    "batch_norm_samples": Annotated[int, Field(ge=0)],
    "log_rates_every_n_steps": _Count,
    **dict.fromkeys(("log_every_n_steps", "log_layers_every_n_steps"), _Count | None),
    "num_threads": Annotated[int, Field(ge=1, le=1024)] | None,
    # Batch normalisation needs two samples.
    "probe_size": Annotated[int, Field(ge=2)] | None,
    "gain": float,
    "norm_anneal_fraction": Annotated[float, Field(ge=0, lt=1)],
    **dict.fromkeys(("ckpt_path", "start_from"), str | None),
    "name": str | int,
    "keep_full": list[str],
    "optimizer_state": Inheritance,
}
# Settings of `schedule`, which has no class of its own, in addition to the arguments of `make_schedule`.
_SCHEDULE = {
    "batch_size": Literal["auto"] | None,
    "max_memory_gib_per_device": Annotated[float, Field(gt=0)] | None,
    "equal_flops": bool,
    "budget": Annotated[float, Field(gt=0, le=MOST_EPOCHS)] | None,
    **dict.fromkeys(("total_steps", "total_tokens", "eval_every_n_steps", "repeat_batches"), _Count | None),
    "steps": list[int] | None,
}
# Options of Lightning's Trainer that would change a run's length or evaluation behind growlab's back, and what to use
# instead.
_OURS = {
    **dict.fromkeys(
        (
            *("min_epochs", "min_steps", "barebones", "limit_val_batches", "limit_test_batches", "logger"),
            *("num_sanity_val_steps", "reload_dataloaders_every_n_epochs", "use_distributed_sampler"),
            "default_root_dir",
            *("enable_checkpointing", "plugins", "enable_progress_bar", "enable_model_summary"),
        ),
        "schedule has the length of a run, trainer.limit_train_batches that of an epoch, data what is held out, logger "
        "and hydra.run.dir where results go",
    ),
    "max_epochs": "set schedule.total_epochs={}",
    "max_steps": "set schedule.total_steps={}",
    "val_check_interval": "set schedule.eval_every_n_steps={} with schedule.total_steps=N",
    "check_val_every_n_epoch": "every epoch is evaluated; with schedule.total_steps=N set schedule.eval_every_n_steps",
    "log_every_n_steps": "set log_every_n_steps={} (without trainer.)",
    "fast_dev_run": "add debug=fast",
    "overfit_batches": "add debug=overfit",
    "max_time": "`timeout 3h growlab ...` ends a run with a signal, at which it saves for ckpt_path=last",
}
# Settings of the schedule, and those that override each.
_OVERRIDDEN_BY = {
    "total_epochs": ("budget", "epochs", "total_steps", "total_tokens", "steps"),
    "total_steps": ("budget", "total_tokens", "steps"),
    "total_tokens": ("budget", "steps"),
    "num_stages": ("epochs", "steps", "widths"),
    "initial_epochs": ("epochs",),
    "initial_fraction": ("initial_epochs", "epochs", "steps"),
    "initial_width": ("widths",),
}


def check_types(settings: Any, name: str = "") -> dict[str, Any]:
    """Reject values that constructors of growlab and Lightning would misinterpret, or fail on later.

    Entries with a `_target_` are checked against its annotations; numbers must be finite. Returns the values of
    settings annotated as floats, by dotted name, with integers converted.
    """
    floats: dict[str, Any] = {}
    if isinstance(settings, list):
        for index, value in enumerate(settings):
            check_types(value, f"{name}[{index}]")
    if not isinstance(settings, Mapping):
        return floats
    target = str(settings.get("_target_", "growlab"))
    full_names = {f"{name}.{key}" if name else str(key): key for key in settings}
    if target.partition(".")[0] in ("growlab", "lightning", "torch"):
        # Before nested settings, which may refer to these by interpolation.
        for full_name, key in full_names.items():
            _check_finite(settings[key], full_name)
    hints = hints_of(name, target)
    for full_name, key in full_names.items():
        value = settings[key]
        if key in hints and value != MISSING:
            if misfit := _misfit(value, hints[key]):
                raise UserError(f"{full_name} {misfit}.")
            # Not if integers and floats have different meanings, such as pixels and fractions.
            if "float" in str(hints[key]) and "Sequence[int]" not in str(hints[key]):
                floats[full_name] = _as_floats(value)
        floats |= check_types(value, full_name)
    return floats


def in_words(hint: Any) -> str:
    """Format an annotation for messages, without modules."""
    plain = re.sub(r"typing\.Annotated\[(\w+), .*?\)\]\)\]", r"\1", str(hint))
    return re.sub(r"\b(\w+\.)+|<class '|'>", "", plain)


def hints_of(name: str, target: str) -> dict[str, Any]:
    """Annotations of a group's settings: those of the top level (""), the schedule, or the class in `_target_`."""
    if name == "schedule":
        return {**_hints(make_schedule), **_SCHEDULE}
    if not name:
        return _TOP
    if not target.startswith(("growlab.", "lightning.")):
        return {}
    try:
        return _hints(get_object(target))
    except Exception:  # Raised again, with its reason, when it is called.
        return {}


def _check_finite(value: Any, name: str) -> None:
    """Reject NaN and infinity: range checks would let NaN pass."""
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, float) and not math.isfinite(number):
            raise UserError(f"{name} must be a finite number, not {number}.")


def _hints(made: Any) -> dict[str, Any]:
    if not isinstance(made, type):
        return typing.get_type_hints(made, include_extras=True)
    # Constructors may pass `**kwargs` on to their base classes, such as torch's optimizers.
    constructors = [vars(owner)["__init__"] for owner in reversed(made.__mro__) if "__init__" in vars(owner)]
    sources = (*getattr(made, "SETTINGS", ()), *constructors)
    return {name: hint for source in sources for name, hint in _hints(source).items()}


def _misfit(value: Any, hint: Any) -> str:
    """Describe how a value violates a type or its range; "" if it is valid, or if Hydra may make an object of it."""
    if isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(v, Mapping) for v in value)):
        return ""
    try:
        # As JSON, where lists are valid tuples, and strings are valid paths and enumeration members.
        TypeAdapter(hint, config=_ANY_CLASS).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        if (said := error.errors()[0]["msg"]).startswith(("Input should be greater", "Input should be less")):
            return f"must be {said.removeprefix('Input should be ')}, not {value!r}"
        return f"must be {in_words(hint)}, not {value!r}"
    except (PydanticUserError, SchemaError, TypeError):
        pass  # an annotation that pydantic cannot check
    return ""


def _as_floats(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_floats(item) for item in value]
    return float(value) if type(value) is int else value


def check_trainer_options(trainer: Mapping[str, Any]) -> None:
    """Reject options of Lightning's Trainer that would be ignored or change the meaning of a run's numbers."""
    if taken := [str(name) for name in trainer if name in _OURS]:
        instead = _OURS[taken[0]].format(trainer[taken[0]])
        raise UserError(f"trainer.{taken[0]} cannot be set here: {instead}.")
    with as_user_errors():
        whole(1, **{"trainer.accumulate_grad_batches": trainer.get("accumulate_grad_batches", 1)})
        for name in ("limit_train_batches", "gradient_clip_val"):
            if (value := trainer.get(name)) is not None:
                at_least(0, **{f"trainer.{name}": value})


def check_effects(settings: Mapping[str, Any], overrides: Sequence[str], is_sweep: bool = False) -> None:
    """Reject overrides that have no effect; in a sweep, an override of a part may be for some of the runs."""
    typed = dict(override.lstrip("+").partition("=")[::2] for override in overrides)
    schedule = settings["schedule"]
    for name, stronger in _OVERRIDDEN_BY.items():
        for other in stronger if f"schedule.{name}" in typed else ():
            value, winner = schedule.get(name), schedule.get(other)
            if winner is not None and f"schedule.{other}" not in typed and not _agree(name, value, winner):
                raise UserError(
                    f"schedule.{name}={value} has no effect with schedule.{other}={str(winner).replace(' ', '')}, "
                    f"which the experiment sets: set that, or add schedule.{other}=null."
                )
    in_steps = any(schedule.get(name) is not None for name in ("total_steps", "total_tokens", "steps"))
    for name in ("eval_every_n_steps", "repeat_batches"):
        value = schedule.get(name) if f"schedule.{name}" in typed else None
        if value is not None and (schedule.get("budget") is not None or not in_steps):
            raise UserError(
                f"schedule.{name}={value} has no effect, since the run's length is in epochs: set "
                "schedule.total_steps, without schedule.budget."
            )
    if is_sweep:
        return
    for name, part in (settings.get("parts") or {}).items():
        group = settings.get(name)
        if not isinstance(group, Mapping) or part is None or not left_out(part):
            continue
        switch = next((str(key) for key in part if key != "_target_"), "")
        for key, value in group.items():
            full = f"{name}.{key}"
            if key != switch and value is not None and full in typed:
                raise UserError(f"{full}={typed[full]} has no effect: {name} is left out while {name}.{switch}=null.")


def _agree(name: str, value: Any, winner: Any) -> bool:
    """Return True if a setting of the schedule has the value that the list overriding it implies."""
    if not isinstance(winner, list):
        return False
    implied = {"total_epochs": sum(winner), "total_steps": sum(winner), "num_stages": len(winner)}
    return bool(value == implied.get(name, winner[0]))

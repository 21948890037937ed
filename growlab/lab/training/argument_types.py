"""Check values of the configuration against the annotations of what takes them, with pydantic.

Groups such as `data` and `model` are open: any class may stand there, so Hydra knows no types of theirs.
"""

import json
import math
import re
import typing
from collections.abc import Mapping
from typing import Any

from hydra.utils import get_object
from omegaconf import MISSING
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import SchemaError

from growlab.base.errors import UserError

_LARGEST = 2**63 - 1
_ANY_CLASS = ConfigDict(arbitrary_types_allowed=True)


def check_types(settings: Any, name: str = "") -> None:
    """Refuse values that the constructors of growlab and Lightning would take for something else, or fail on later.

    Args:
        settings: nested plain containers; what has a `_target_` in growlab or Lightning is checked against its
            annotations. Numbers for growlab, Lightning and torch must be finite and fit into 64 bits.
        name: of the settings, in front of those inside.

    Raises:
        UserError: a value has another type than its parameter, or is not finite.
    """
    if isinstance(settings, list):
        for index, value in enumerate(settings):
            check_types(value, f"{name}[{index}]")
    if not isinstance(settings, Mapping):
        return
    target = str(settings.get("_target_", "growlab"))
    full_names = {f"{name}.{key}" if name else str(key): key for key in settings}
    if target.partition(".")[0] in ("growlab", "lightning", "torch"):
        # Before those inside, which may refer to them.
        for full_name, key in full_names.items():
            _check_finite(settings[key], full_name)
    hints = _hints(target)
    for full_name, key in full_names.items():
        value = settings[key]
        if key in hints and value != MISSING and not _fits(value, hints[key]):
            wanted = re.sub(r"\b(\w+\.)+|<class '|'>", "", str(hints[key]))
            raise UserError(f"{full_name} must be {wanted}, not {value!r}.")
        check_types(value, full_name)


def _check_finite(value: Any, name: str) -> None:
    """Refuse nan and infinity, since comparisons let nan pass, and integers that do not fit into 64 bits."""
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, float) and not math.isfinite(number):
            raise UserError(f"{name} must be a finite number, not {number}.")
        if isinstance(number, int) and abs(number) > _LARGEST:
            raise UserError(f"{name} must lie between -2^63 and 2^63, not {number}.")


def _hints(target: str) -> dict[str, Any]:
    """Annotations of the parameters of a class or function of growlab or Lightning, by name; else none."""
    if not target.startswith(("growlab.", "lightning.")):
        return {}
    try:
        made = get_object(target)
        if not isinstance(made, type):
            return typing.get_type_hints(made)
        # A constructor that hands on `**kwargs` takes what those behind it take, such as torch's optimizers.
        owners = [
            owner for kind in (*getattr(made, "SETTINGS", ()), made) for owner in reversed(kind.__mro__)
        ]
        constructors = [vars(owner)["__init__"] for owner in owners if "__init__" in vars(owner)]
        return {name: hint for one in constructors for name, hint in typing.get_type_hints(one).items()}
    except Exception:  # Making it says what is wrong with it.
        return {}


def _fits(value: Any, hint: Any) -> bool:
    """Return True if a value is one of a type; mappings may become objects, which Hydra makes."""
    if isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(v, Mapping) for v in value)):
        return True
    try:
        # As JSON: lists stand for tuples, text for paths and members of enumerations.
        TypeAdapter(hint, config=_ANY_CLASS).validate_json(json.dumps(value), strict=True)
    except ValidationError:
        return False
    except (PydanticUserError, SchemaError, TypeError):
        return True  # an annotation that pydantic cannot check
    return True

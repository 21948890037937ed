"""Types of the configuration's values, checked against the annotations of what takes them.

Groups such as `data` and `model` are open: any class may stand there, so Hydra knows no types of theirs.
"""

import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from hydra.utils import get_object
from omegaconf import MISSING

from growlab.errors import UserError

_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "null"}


def check_types(settings: Any, name: str = "") -> None:
    """Refuse values that the constructors of growlab would take for something else, or fail on much later.

    Args:
        settings: nested plain containers; of those with a `_target_` in growlab every value is checked.
        name: of the settings, in front of those inside.

    Raises:
        UserError: a value has another type than its parameter.
    """
    if isinstance(settings, Mapping):
        hints = _hints(settings.get("_target_"))
        for key, value in settings.items():
            full_name = f"{name}.{key}" if name else str(key)
            # A value that is missing is told by what needs it.
            if key in hints and value != MISSING and not _fits(value, hints[key]):
                wanted = " or ".join(dict.fromkeys(_wanted(hints[key])))
                given = "null" if value is None else repr(value)
                raise UserError(f"{full_name} must be {wanted}, not {given}.")
            check_types(value, full_name)
    elif isinstance(settings, list):
        for index, value in enumerate(settings):
            check_types(value, f"{name}[{index}]")


def _hints(target: Any) -> dict[str, Any]:
    """Annotations of the parameters of a class or function; none for what is not growlab's own."""
    if not isinstance(target, str) or not target.startswith("growlab."):
        return {}
    try:
        made = get_object(target)
        if not isinstance(made, type):
            return typing.get_type_hints(made)
        # A constructor that hands on `**kwargs` takes what those behind it take, such as torch's optimizers.
        constructors = [
            vars(owner)["__init__"]
            for kind in (*getattr(made, "SETTINGS", ()), made)
            for owner in reversed(kind.__mro__)
            if "__init__" in vars(owner)
        ]
        return {name: hint for one in constructors for name, hint in typing.get_type_hints(one).items()}
    except Exception:  # Making it tells what is wrong with it.
        return {}


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    return any(_fits_one(value, one) for one in _alternatives(hint))


def _fits_one(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint) or hint
    if origin is typing.Literal:
        return value in typing.get_args(hint)
    if not isinstance(origin, type):
        return True  # Any, a type variable
    if origin is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if origin in (int, bool, type(None)):
        return type(value) is origin
    if origin is str or issubclass(origin, Path | Enum):
        return isinstance(value, str | Enum)
    if issubclass(origin, Mapping):
        return isinstance(value, Mapping)
    if issubclass(origin, Sequence):
        items = [arg for arg in typing.get_args(hint) if arg is not Ellipsis]
        return isinstance(value, list) and (not items or all(any(_fits(v, i) for i in items) for v in value))
    # An object: made from a `_target_` of its own.
    return isinstance(value, Mapping)


def _wanted(hint: Any) -> Iterator[str]:
    for one in _alternatives(hint):
        origin = typing.get_origin(one) or one
        if origin in _NAMES:
            yield _NAMES[origin]
        elif origin is typing.Literal:
            yield from map(repr, typing.get_args(one))
        elif isinstance(origin, type) and issubclass(origin, Path | Enum):
            yield "text"
        elif isinstance(origin, type) and issubclass(origin, Sequence):
            inside = [arg for arg in typing.get_args(one) if arg in _NAMES]
            yield "a list" + (f" with {_NAMES[inside[0]]} in each place" if inside else "")
        else:
            yield "a mapping" if origin in (dict, Mapping) else "a mapping with a _target_"

"""Types of the configuration's values, checked against the annotations of what takes them.

Groups such as `data` and `model` are open: any class may stand there, so Hydra knows no types of theirs.
"""

import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from hydra.utils import get_object
from omegaconf import MISSING

from growlab.base.errors import UserError

_COMPUTING = ("growlab", "lightning", "torch")
_LARGEST = 2**63 - 1
_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "null"}


def check_types(settings: Any, name: str = "") -> None:
    """Refuse values that the constructors of growlab would take for something else, or fail on much later.

    Args:
        settings: nested plain containers; of those with a `_target_` in growlab every value is checked, and nan and
            infinity are refused, but where a `_target_` of others than growlab, Lightning and torch takes them.
        name: of the settings, in front of those inside.

    Raises:
        UserError: a value has another type than its parameter, or is not finite.
    """
    if isinstance(settings, Mapping):
        hints = _hints(settings.get("_target_"))
        if _is_ours(settings.get("_target_")):
            # Before those inside, which may refer to them.
            for key, value in settings.items():
                _check_finite(value, f"{name}.{key}" if name else str(key))
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


def _is_ours(target: Any) -> bool:
    """Whether numbers of a target go to growlab, Lightning or torch, which compute with them; those of no target do."""
    return not isinstance(target, str) or target.partition(".")[0] in _COMPUTING


def _check_finite(value: Any, name: str) -> None:
    """Refuse nan and infinity, since comparisons let nan pass, and integers that do not fit into 64 bits."""
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, float) and not math.isfinite(number):
            raise UserError(f"{name} must be a finite number, not {number}.")
        if isinstance(number, int) and abs(number) > _LARGEST:
            raise UserError(f"{name} must lie between -2^63 and 2^63, not {number}.")


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
        if not isinstance(value, list):
            return False
        if _length(hint) not in (None, len(value)):
            return False
        items = [arg for arg in typing.get_args(hint) if arg is not Ellipsis]
        return not items or all(any(_fits(v, i) for i in items) for v in value)
    # An object: made from a `_target_` of its own.
    return isinstance(value, Mapping)


def _length(hint: Any) -> int | None:
    """Entries of a tuple that has so many of them; None: any number."""
    items = typing.get_args(hint)
    fixed = typing.get_origin(hint) is tuple and Ellipsis not in items
    return len(items) if fixed else None


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
            length = _length(one)
            yield ("a list" if length is None else f"a list of {length} values") + (
                f" with {_NAMES[inside[0]]} in each place" if inside else ""
            )
        else:
            yield "a mapping" if origin in (dict, Mapping) else "a mapping with a _target_"

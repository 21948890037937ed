"""Checks and names of arguments, and a readable `repr`.

A class that takes the fields of dataclasses as keyword arguments lists these dataclasses in `SETTINGS`; `parameters`
and `growlab.lab.training.checks` treat the fields as the class's arguments.
"""

import functools
import math
import reprlib
import textwrap
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from inspect import Parameter, signature
from numbers import Integral, Real
from typing import Any


def parameters(made: Callable[..., Any]) -> dict[str, Parameter]:
    """Parameters of a callable by name, with the fields of a class's `SETTINGS` instead of its `**settings`."""
    result = dict(signature(made).parameters)
    if kinds := getattr(made, "SETTINGS", ()):
        result = {name: p for name, p in result.items() if p.kind is not Parameter.VAR_KEYWORD}
    return result | {name: p for kind in kinds for name, p in parameters(kind).items()}


def left_out(part: Any) -> bool:
    """Return True if a part's settings are null, or its first argument is, which leaves the part out."""
    if not isinstance(part, Mapping):
        return part is None
    arguments = [value for key, value in part.items() if key != "_target_"]
    return bool(arguments) and arguments[0] is None


def finite(**given: float | Fraction) -> None:
    """Raise a ValueError that names the first argument that is not a finite number.

    Examples:
        >>> finite(initial_width="a quarter")
        Traceback (most recent call last):
        ValueError: initial_width must be a finite number, not 'a quarter'.
    """
    _refuse(given, lambda value: _is_number(value, Real), "a finite number")


def not_none(**arguments: Any) -> dict[str, Any]:
    """Return the arguments that are not None."""
    return {name: value for name, value in arguments.items() if value is not None}


def at_least(least: float, **given: float | Fraction) -> None:
    """Raise a ValueError that names the first argument that is below `least`, or not finite.

    Examples:
        >>> at_least(1, batches=0)
        Traceback (most recent call last):
        ValueError: batches must be at least 1, not 0.
    """
    finite(**given)
    for name, value in given.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}.")


def above(bound: float, **given: float) -> None:
    """Raise a ValueError that names the first argument that is not above `bound`, or not finite."""
    finite(**given)
    for name, value in given.items():
        if value <= bound:
            raise ValueError(f"{name} must be above {bound}, not {value}.")


def whole(least: int, **given: int) -> None:
    """Raise a ValueError that names the first argument that is not an integer, or is below `least`.

    Examples:
        >>> whole(1, patience=2.5)
        Traceback (most recent call last):
        ValueError: patience must be an integer, not 2.5.
    """
    _refuse(given, lambda value: _is_number(value, Integral), "an integer")
    at_least(least, **given)


def flag(**given: bool) -> None:
    """Raise a ValueError that names the first argument that is not a bool, such as "false", which is true in Python.

    Examples:
        >>> flag(rotate="false")
        Traceback (most recent call last):
        ValueError: rotate must be True or False, not 'false'.
    """
    _refuse(given, lambda value: isinstance(value, bool), "True or False")


def one_of(known: Iterable[str | None], **given: str | None) -> None:
    """Raise a ValueError that names the first argument that is not among the known words.

    Examples:
        >>> one_of(("ratio", "constraint"), rule="mean")
        Traceback (most recent call last):
        ValueError: rule must be ratio or constraint, not 'mean'.
    """
    words = [*known]
    for name, value in given.items():
        if value not in words:
            *others, last = map(str, words)
            listed = f"{', '.join(others)} or {last}" if others else last
            raise ValueError(f"{name} must be {listed}, not {value!r}.")


def _refuse(given: Mapping[str, Any], fits: Callable[[Any], bool], what: str) -> None:
    for name, value in given.items():
        if not fits(value):
            raise ValueError(f"{name} must be {what}, not {value!r}.")


def _is_number(value: Any, kind: type) -> bool:
    # Not math.isfinite, which fails for integers beyond the largest float.
    return isinstance(value, kind) and not isinstance(value, bool) and abs(value) < math.inf  # type: ignore[arg-type]


class _Short(reprlib.Repr):
    """Arguments in Python's notation; long ones are shortened."""

    def __init__(self) -> None:
        super().__init__()
        self.maxother = self.maxstring = 200
        self.maxdict = self.maxlist = self.maxtuple = 12

    def repr_Tensor(self, tensor: Any, level: int) -> str:
        """A tensor's shape."""
        return f"<Tensor {list(tensor.shape)}>"

    def repr_function(self, function: Any, level: int) -> str:
        """A function's name."""
        return str(function.__qualname__)


_SHORT = _Short()


class Described:
    """Mixin whose `repr` is the constructor call, with the arguments that were passed.

    Examples:
        >>> class Bird(Described):
        ...     def __init__(self, wings=2, name="bird"):
        ...         self.all = (wings, name)
        >>> Bird(3)
        Bird(wings=3)
    """

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        if "__init__" in vars(cls):
            cls.__init__ = _noting(cls.__init__)  # type: ignore[method-assign]

    def __repr__(self) -> str:
        positional, named = vars(self).get("_given", ((), {}))
        given = {**dict(zip(signature(type(self)).parameters, positional, strict=False)), **named}
        written = ", ".join(f"{name}={_SHORT.repr(value)}" for name, value in given.items())
        call = f"{type(self).__name__}({written})"
        return textwrap.fill(call, 110, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _noting(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: Any, *positional: Any, **named: Any) -> None:
        # The first call is the user's; later ones are those of base classes.
        vars(self).setdefault("_given", (positional, named))
        init(self, *positional, **named)

    return __init__

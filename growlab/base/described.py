"""Readable `repr`: the call that makes an object again."""

import functools
import reprlib
import textwrap
from collections.abc import Callable
from inspect import signature
from typing import Any


class _Short(reprlib.Repr):
    """Arguments as they are written, long ones shortened."""

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
    """Mixin: `repr` is the call that makes such an object, with the arguments that it was given.

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
        # Of a class's own call and those of its bases the first is the user's.
        vars(self).setdefault("_given", (positional, named))
        init(self, *positional, **named)

    return __init__

"""growlab creates its tensors on the CPU, whatever torch's default device is; networks run with the user's."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Class = TypeVar("_Class", bound=type)

# Default device that the user has set, inside of growlab's functions; None outside, and where it is the CPU.
_users: ContextVar[torch.device | None] = ContextVar("_users", default=None)


@contextlib.contextmanager
def _default(device: torch.device, users: torch.device | None) -> Iterator[None]:
    token = _users.set(users)
    try:
        with device:
            yield
    finally:
        _users.reset(token)


def on_cpu(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorator: tensors that a function creates without a device are on the CPU, where its generators are.

    It hides `torch.set_default_device` and `with torch.device(...)` from the function.
    """

    @wraps(function)
    def called(*args: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
        given = torch.get_default_device()
        if given.type == "cpu":
            return function(*args, **named)
        with _default(torch.device("cpu"), given):
            return function(*args, **named)

    return called


def methods_on_cpu(*names: str) -> Callable[[_Class], _Class]:
    """Class decorator: `on_cpu` for the methods of these names."""

    def decorated(kind: _Class) -> _Class:
        for name in names:
            setattr(kind, name, on_cpu(getattr(kind, name)))
        return kind

    return decorated


def as_given() -> contextlib.AbstractContextManager[None]:
    """Context for the user's code that growlab's functions call: the default device is the user's own again."""
    given = _users.get()
    return contextlib.nullcontext() if given is None else _default(given, None)

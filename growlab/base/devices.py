"""Create growlab's tensors on the CPU for any default device of torch, and run networks with the user's default."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Class = TypeVar("_Class", bound=type)

# The user's default device, within growlab's functions; None outside of them, and if it is the CPU.
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
    """Decorator: a function creates tensors without a device on the CPU, where its generators are.

    It hides `torch.set_default_device` and `with torch.device(...)` from the function.
    """

    @wraps(function)
    def wrapper(*args: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
        users = torch.get_default_device()
        if users.type == "cpu":
            return function(*args, **named)
        with _default(torch.device("cpu"), users):
            return function(*args, **named)

    return wrapper


def methods_on_cpu(*names: str) -> Callable[[_Class], _Class]:
    """Class decorator: `on_cpu` for the named methods."""

    def decorated(kind: _Class) -> _Class:
        for name in names:
            setattr(kind, name, on_cpu(getattr(kind, name)))
        return kind

    return decorated


def as_given() -> contextlib.AbstractContextManager[None]:
    """Context that restores the user's default device, for the user's code called from growlab's functions."""
    users = _users.get()
    return contextlib.nullcontext() if users is None else _default(users, None)

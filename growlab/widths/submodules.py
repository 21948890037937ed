"""Trace a submodule alone: capture its inputs, and wrap it under the names of the whole network."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from growlab.widths.inputs import arguments, call_with, changed
from growlab.widths.program import UnsupportedOperation


class _Called(BaseException):
    """Raised to end a call once the inputs are known; not an Exception, which user code may catch."""


def captured(call: Callable[[], Any], network: nn.Module, whole: nn.Module) -> tuple[Any, ...] | None:
    """Capture the inputs of a submodule's first call, which ends the surrounding call at once.

    Args:
        call: function that eventually calls the submodule.
        network: the submodule.
        whole: the network that contains it; in eval mode during the call.

    Returns:
        The inputs, detached; None if the submodule was not called.

    Raises:
        Exception: any error of the call before it reaches the submodule.
    """
    found: list[tuple[Any, ...]] = []

    def note(module: nn.Module, args: Any, named: Any) -> None:
        found.append(as_example(module, args, named))
        raise _Called

    modes = {module: module.training for module in whole.modules()}
    handle = network.register_forward_pre_hook(note, with_kwargs=True)
    try:
        whole.eval()
        with torch.no_grad(), torch.random.fork_rng():
            call()
    except _Called:
        pass
    finally:
        handle.remove()
        for module, training in modes.items():
            module.training = training
    return found[0] if found else None


def as_example(network: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """Convert the arguments of a call into example inputs of the network, detached."""
    return changed(
        lambda value: value.detach() if isinstance(value, Tensor) else value, arguments(network, args, named)
    )


class Alone(nn.Module):
    """Wrapper that calls a single submodule; its modules, parameters and their names are those of the whole network.

    Args:
        whole: the network, whose dictionaries this shares.
        path: name of the submodule.
    """

    def __init__(self, whole: nn.Module, path: str) -> None:
        super().__init__()
        kept = vars(whole)
        vars(self).update({name: kept[name] for name in ("_modules", "_parameters", "_buffers", "training")})
        part = whole.get_submodule(path)
        # For messages, which name its class, and for the names of its forward's arguments.
        self.__class__ = type(type(part).__name__, (Alone,), {})
        vars(self)["forward"] = wraps(part.forward)(lambda *args, **named: part(*args, **named))


def path_of(whole: nn.Module, submodule: "str | nn.Module") -> str:
    """Return the first name of a submodule, given any of its names or the module itself.

    Raises:
        UnsupportedOperation: the network has no such submodule.
    """
    for path, module in whole.named_modules(remove_duplicate=False):
        if submodule in (path, module) and module is not whole:
            return next(first for first, same in whole.named_modules() if same is module)
    name = submodule if isinstance(submodule, str) else type(submodule).__name__
    raise UnsupportedOperation(
        f"{type(whole).__name__} has no submodule {name!r} to trace: give the name of one, or the module itself."
    )


def inputs_to(whole: nn.Module, path: str, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the inputs of a submodule's first call when the network is called with the given inputs.

    Raises:
        UnsupportedOperation: the network does not call the submodule.
    """
    found = captured(lambda: call_with(whole, inputs), whole.get_submodule(path), whole)
    if found is None:
        raise UnsupportedOperation(
            f"{type(whole).__name__} does not call its submodule {path} with this example."
        )
    return found

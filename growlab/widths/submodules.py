"""A part of a network: what it is called with when the whole is called, and itself under the names of the whole."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from growlab.widths.inputs import arguments, call_with, changed
from growlab.widths.program import UnsupportedOperation


class _Called(BaseException):
    """Ends a call once the network's inputs are known; no Exception, which the code called may catch."""


def captured(call: Callable[[], Any], network: nn.Module, whole: nn.Module) -> tuple[Any, ...] | None:
    """Inputs that `network` gets when something is called, which then ends at once.

    Args:
        call: calls the network sooner or later.
        network: a submodule.
        whole: the module around it, in eval mode meanwhile.

    Returns:
        The inputs, detached; None where the network was not called.

    Raises:
        Exception: what the call raised before it reached the network.
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
    """The arguments of a call as an example of a network's inputs, detached."""
    return changed(
        lambda value: value.detach() if isinstance(value, Tensor) else value, arguments(network, args, named)
    )


class Alone(nn.Module):
    """A network of which one submodule alone is called; modules, parameters and their names are the network's.

    Args:
        whole: the network, whose dictionaries this shares.
        path: name of the submodule.
    """

    def __init__(self, whole: nn.Module, path: str) -> None:
        super().__init__()
        kept = vars(whole)
        vars(self).update({name: kept[name] for name in ("_modules", "_parameters", "_buffers", "training")})
        part = whole.get_submodule(path)
        # Messages call it by its class, and inputs by name are those that it takes.
        self.__class__ = type(type(part).__name__, (Alone,), {})
        vars(self)["forward"] = wraps(part.forward)(lambda *args, **named: part(*args, **named))


def path_of(whole: nn.Module, submodule: "str | nn.Module") -> str:
    """First name of a submodule that is given by any of its names, or itself.

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
    """What a submodule is called with first when the network is called with these inputs.

    Raises:
        UnsupportedOperation: it is not called.
    """
    found = captured(lambda: call_with(whole, inputs), whole.get_submodule(path), whole)
    if found is None:
        raise UnsupportedOperation(
            f"{type(whole).__name__} does not call its submodule {path} with this example."
        )
    return found

"""What a network is called with, found out by calling something that calls it."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from growlab.errors import UserError


class _Called(BaseException):
    """Ends a call once the network's inputs are known; no Exception, which the code called may catch."""


def captured(call: Callable[[], Any], network: nn.Module, whole: nn.Module) -> tuple[Any, ...] | None:
    """Positional inputs that `network` gets when something is called, which then ends at once.

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
        found.append(positional(module, args, named))
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


def positional(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a forward as positional ones, defaults between them filled in.

    Raises:
        UserError: an argument can only be given by name.
    """
    parameters = list(inspect.signature(module.forward).parameters.values())[len(args) :]
    values = list(args)
    missing = dict(named)
    for parameter in parameters:
        if not missing:
            break
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            raise UserError(
                f"{type(module).__name__} takes {', '.join(missing)} by name alone; give an example of its positional "
                "inputs."
            )
        values.append(missing.pop(parameter.name, parameter.default))
    return tuple(value.detach() if isinstance(value, Tensor) else value for value in values)

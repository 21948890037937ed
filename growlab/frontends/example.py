"""What a network is called with, found out by calling something that calls it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from growlab.widths.inputs import arguments, changed


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

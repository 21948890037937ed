"""Hooks that a growing network carries: the output's factor, and state_dicts that bring their own widths.

They are no part of its parameters, buffers, class or state_dict keys, and go at the end of growth.
"""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from growlab.growth import caches, entries
from growlab.growth.state import GrowthState
from growlab.widths import WidthGraph

#: Where a state_dict's metadata, which other code leaves alone, holds the state of growth.
METADATA = "growlab"


#: Called with a network that is about to load tensors, these, and `GrowthState.as_dict()` where it came along.
Resize = Callable[[nn.Module, Mapping[str, Tensor], Mapping[str, Any] | None], None]


class OutputScale:
    """A forward hook that multiplies what a module puts out by the output factor of a growth state."""

    def __init__(self, state: GrowthState) -> None:
        self.state = state

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Multiply."""
        factor = self.state.output_factor
        return output if factor == 1.0 else output * factor


class _Eager(OutputScale):
    """The same where the compiler does not inline hooks: of a network that was compiled by its own `compile`."""

    @torch.compiler.disable
    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        return super().__call__(module, inputs, output)


class _WriteState:
    """A state_dict hook that adds the state of growth to the metadata."""

    def __init__(self, state: GrowthState) -> None:
        self.state = state

    def __call__(self, module: nn.Module, tensors: Any, prefix: str, metadata: dict[str, Any]) -> None:
        metadata[METADATA] = self.state.as_dict()


class _ReadState:
    """A load_state_dict pre-hook that resizes the network to tensors before they are loaded."""

    def __init__(self, resize: Resize | None) -> None:
        self._resize = None if resize is None else weakref.WeakMethod(resize)

    def __reduce__(self) -> Any:
        # A pickled network leaves its grower behind.
        return _ReadState, (None,)

    def __deepcopy__(self, memo: Any) -> "_ReadState":
        return _ReadState(None if self._resize is None else self._resize())

    def __call__(
        self,
        module: nn.Module,
        tensors: Mapping[str, Tensor],
        prefix: str,
        metadata: Mapping[str, Any],
        *_: Any,
    ) -> None:
        resize = None if self._resize is None else self._resize()
        if resize is not None:
            own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            resize(module, own, metadata.get(METADATA))


def attach(
    network: nn.Module, graph: WidthGraph, state: GrowthState, resize: Resize, probe: tuple[Any, ...]
) -> None:
    """Let a network multiply its output by `state.output_factor`, and its state_dicts bring their widths.

    A network that returns one tensor multiplies that. Of others (a dictionary of a loss and logits) the layers that
    set the output's scale do, so that what is computed from it inside the network is right too.

    Args:
        network: the network, or a copy of it, which may have hooks of the original already.
        graph: its width graph.
        state: looked at in every forward pass and by every state_dict.
        resize: a method of the grower, referenced weakly.
        probe: positional inputs.
    """
    detach(network)
    scale = OutputScale(state)
    # Some return terms of the loss too while they train.
    if all(isinstance(output, Tensor) for output in caches.find(network, probe)):
        network.register_forward_hook(scale if network._compiled_call_impl is None else _Eager(state))
    else:
        layers = (layer for layer in graph.layers if layer.scale_out == graph.output_class)
        names = {path for layer in layers for path in layer.callers}
        for name in sorted(names):
            network.get_submodule(name).register_forward_hook(scale)
    network.register_state_dict_post_hook(_WriteState(state))
    network.register_load_state_dict_pre_hook(_ReadState(resize))
    entries.stay(network)


def detach(network: nn.Module) -> None:
    """Take away what `attach` added."""
    for module in network.modules():
        for hooks in (module._forward_hooks, module._state_dict_hooks, module._load_state_dict_pre_hooks):
            for key, hook in list(hooks.items()):
                if isinstance(getattr(hook, "hook", hook), (OutputScale, _WriteState, _ReadState)):
                    del hooks[key]
    entries.forget(network)


def state_of(network: nn.Module) -> GrowthState | None:
    """The state that a network's hooks go by: of a copy, its own."""
    for module in network.modules():
        for hook in module._state_dict_hooks.values():
            if isinstance(hook, _WriteState):
                return hook.state
    return None

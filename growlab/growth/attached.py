"""Hooks of a growing network: the output factor, and state_dicts that restore the widths they were saved at.

They add no parameters, buffers or state_dict keys, leave the class as it is, and are removed when growth ends.
"""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from growlab.growth import caches, entries
from growlab.growth.state import GrowthState
from growlab.widths import WidthGraph

#: Key of the growth state in a state_dict's metadata, which other code does not change.
METADATA = "growlab"


#: Called before a network loads tensors: with the network, the tensors by name, and the saved `GrowthState.as_dict()`
#: or None; resizes the network to their widths.
Resize = Callable[[nn.Module, Mapping[str, Tensor], Mapping[str, Any] | None], None]


class OutputScale:
    """Forward hook that multiplies a module's output by `GrowthState.output_factor`."""

    def __init__(self, state: GrowthState) -> None:
        self.state = state

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Return the output times the factor; the output itself if the factor is 1."""
        factor = self.state.output_factor
        return output if factor == 1.0 else output * factor


class _Eager(OutputScale):
    """`OutputScale` for networks compiled with `Module.compile`, where the compiler does not inline hooks."""

    @torch.compiler.disable
    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        return super().__call__(module, inputs, output)


class _WriteState:
    """State_dict post-hook that adds the growth state to the metadata."""

    def __init__(self, state: GrowthState) -> None:
        self.state = state

    def __call__(self, module: nn.Module, tensors: Any, prefix: str, metadata: dict[str, Any]) -> None:
        metadata[METADATA] = self.state.as_dict()


class _ReadState:
    """Load_state_dict pre-hook that resizes the network to the tensors before they are loaded."""

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
    """Add hooks that scale the output by `state.output_factor` and store the growth state in state_dicts.

    If the network returns only tensors, its output is multiplied. Otherwise (a dictionary of a loss and logits) the
    outputs of the layers that set its scale are, so that values computed from them inside the network, such as the
    loss, are correct too.

    Args:
        network: the network, or a copy of it, which may have hooks of the original already.
        graph: its width graph.
        state: read in every forward pass and written into every state_dict.
        resize: method of the grower, kept by a weak reference; see `Resize`.
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
    """Remove the hooks that `attach` added."""
    for module in network.modules():
        for hooks in (module._forward_hooks, module._state_dict_hooks, module._load_state_dict_pre_hooks):
            for key, hook in list(hooks.items()):
                if isinstance(getattr(hook, "hook", hook), (OutputScale, _WriteState, _ReadState)):
                    del hooks[key]
    entries.forget(network)


def state_of(network: nn.Module) -> GrowthState | None:
    """Return the growth state that a network's hooks use (a copied network has its own), or None."""
    for module in network.modules():
        for hook in module._state_dict_hooks.values():
            if isinstance(hook, _WriteState):
                return hook.state
    return None

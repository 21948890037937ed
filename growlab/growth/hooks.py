"""Hooks of a growing network: the output factor, contexts around modules' forwards, and entries of state_dicts.

They add no parameters or buffers, do not change classes, and are removed when growth ends. Loading a state_dict
restores the widths at which it was saved.
"""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from growlab.base.errors import UserError
from growlab.growth import outputs
from growlab.growth.state import GrowthState, OutputScale
from growlab.widths import WidthGraph
from growlab.widths.meta import called_apart

#: Key of the growth state in a state_dict's metadata.
METADATA = "growlab"
#: Resizes a network to the tensors that it is about to load. Called with the network, the tensors by name, and the
#: saved `GrowthState.as_dict()` or None.
Resize = Callable[[nn.Module, Mapping[str, Tensor], Mapping[str, Any] | None], None]
# Attribute of a module in which its `_Entries` are stored.
_ENTRIES = "_growth_entries"


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
        self, module: nn.Module, tensors: Mapping[str, Tensor], prefix: str, metadata: Mapping[str, Any], *_: Any
    ) -> None:
        resize = None if self._resize is None else self._resize()
        if resize is not None:
            of_module = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            resize(module, of_module, metadata.get(METADATA))


def attach(network: nn.Module, graph: WidthGraph, state: GrowthState, resize: Resize, probe: tuple[Any, ...]) -> None:
    """Add hooks that scale the output by `state.output_factor` and store the growth state in state_dicts.

    If the network returns only tensors, its output is multiplied. If it returns a dictionary of a loss and logits, for
    example, the outputs of the layers that set their scale are multiplied instead, so that values computed from them
    inside the network, such as the loss, are correct too. `resize`, the grower's method, is kept by a weak reference.
    """
    detach(network)
    scale = OutputScale(state)
    # Both modes count: some networks return terms of the loss too in train mode.
    if all(isinstance(output, Tensor) for output in outputs.find_caches(network, probe)):
        if network._compiled_call_impl is not None:
            # Not at the top: it imports torch._dynamo, which takes longer than all of growlab.
            from growlab.growth.compiled import EagerOutputScale

            scale = EagerOutputScale(state)
        network.register_forward_hook(scale)
    else:
        layers = (layer for layer in graph.layers if layer.scale_out == graph.output_class)
        for name in sorted({path for layer in layers for path in layer.callers}):
            network.get_submodule(name).register_forward_hook(scale)
    network.register_state_dict_post_hook(_WriteState(state))
    network.register_load_state_dict_pre_hook(_ReadState(resize))
    # Registered last, since the hook that resizes may change which entries there are.
    entries = _entries(network)
    entries.load.remove()
    entries.load, entries.stays = network.register_load_state_dict_pre_hook(_load), True


def detach(network: nn.Module) -> None:
    """Remove the hooks that `attach` added."""
    for module in network.modules():
        for hooks in (module._forward_hooks, module._state_dict_hooks, module._load_state_dict_pre_hooks):
            for key, hook in list(hooks.items()):
                if isinstance(getattr(hook, "hook", hook), (OutputScale, _WriteState, _ReadState)):
                    del hooks[key]
    if _ENTRIES in network.__dict__:
        _entries(network).stays = False
        _tidy(network)


def state_of(network: nn.Module) -> GrowthState | None:
    """Return the growth state that a network's hooks use, or None; a copied network has its own."""
    for module in network.modules():
        for hook in module._state_dict_hooks.values():
            if isinstance(hook, _WriteState):
                return hook.state
    return None


class ModuleHook:
    """Runs a module's forward in a torch function mode or another context, and adds entries to the module's state_dict.

    It is stored in the module's `__dict__` and copied with the module.

    Attributes:
        attribute: key of the hook in the `__dict__`.
    """

    attribute: ClassVar[str]

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._open: list[Any] = []
        self._handles = (
            module.register_forward_pre_hook(self._enter),
            module.register_forward_hook(self._leave, always_call=True),
        )
        # In `__dict__`, since compiled modules delegate attributes to the module that they wrap. An attribute for each
        # entry, as `torch.distributed.checkpoint` expects.
        self._names = (self.attribute, *self.entries())
        module.__dict__.update(dict.fromkeys(self._names, self))
        _entries(module).holders.append(self)

    def remove(self) -> None:
        """Remove the hook and its entries from the module."""
        for handle in self._handles:
            handle.remove()
        for name in self._names:
            self.module.__dict__.pop(name, None)
        holders = _entries(self.module).holders
        holders[:] = [holder for holder in holders if holder is not self]
        _tidy(self.module)

    def mode(self, inputs: tuple[Any, ...]) -> Any:
        """Return the context in which a forward with these inputs runs."""
        raise NotImplementedError

    def entries(self) -> dict[str, tuple[Tensor, Callable[[Tensor], Any]]]:
        """Return extra state_dict entries of a module, by name without prefix: the tensor and its setter."""
        raise NotImplementedError

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        # No public attribute marks replicas of `nn.DataParallel`; a test checks that this one does.
        if "_is_replica" in module.__dict__:
            raise UserError(
                f"torch.nn.DataParallel copies {type(module).__name__} to several devices in each step, which growth "
                "does not support: use DistributedDataParallel with a process for each device."
            )
        mode = self.mode(inputs)
        mode.__enter__()
        self._open.append(mode)

    def _leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)


@dataclass
class _Entries:
    """Hooks of a module that save and load the entries of its `holders`; with `stays` kept if there are none."""

    save: RemovableHandle
    load: RemovableHandle
    holders: list[ModuleHook]
    stays: bool = False


def _entries(module: nn.Module) -> _Entries:
    # torch iterates over a module's pre-hooks while it calls them, and they may add or remove `ModuleHook`s: the hook
    # that loads their entries must already be registered.
    if _ENTRIES not in module.__dict__:
        load = module.register_load_state_dict_pre_hook(_load)
        module.__dict__[_ENTRIES] = _Entries(module.register_state_dict_post_hook(_save), load, [])
    return module.__dict__[_ENTRIES]


def _tidy(module: nn.Module) -> None:
    entries = _entries(module)
    if not entries.stays and not entries.holders:
        entries.load.remove()
        entries.save.remove()
        del module.__dict__[_ENTRIES]


def _save(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for holder in _entries(module).holders:
        state.update({prefix + name: tensor for name, (tensor, _) in holder.entries().items()})


def _load(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    for holder in _entries(module).holders:
        for name, (tensor, load) in holder.entries().items():
            saved = state.pop(prefix + name, None)
            if saved is None:
                missing.append(prefix + name)
            elif saved.shape != tensor.shape:
                errors.append(f"{prefix + name} has {len(saved)} channels, the network has {len(tensor)}.")
            else:
                load(saved)


def check_reached(module: nn.Module, what: str) -> None:
    """Raise a UserError inside activation checkpointing or a custom `autograd.Function`, whose backward bypasses hooks.

    `what` names the tensor or operation that the hooked module uses there.
    """
    if torch.compiler.is_compiling():
        return
    _, apart = called_apart(module)
    if apart:
        raise UserError(
            f"{type(module).__name__} uses {what} inside {apart}, whose backward pass does not see how growth changes "
            "it: let it call a submodule there that has it, such as nn.Linear or nn.LayerNorm."
        )

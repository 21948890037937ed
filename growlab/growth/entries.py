"""One pre-hook per module that loads growlab's extra state_dict entries.

torch iterates over a module's load_state_dict pre-hooks while it calls them. The network's own pre-hook may resize it
there and so change which entries are loaded; the hook that loads them must be registered before.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

# Attribute of a module in which its `_Entries` are stored.
_ATTRIBUTE = "_growth_entries"


class Loading(Protocol):
    """Protocol of objects that load their own entries of a state_dict."""

    def load(self, state: dict[str, Any], prefix: str, missing: list[str], errors: list[str]) -> None:
        """Load this object's entries (names begin with `prefix`) and remove them from `state`."""
        ...


@dataclass
class _Entries:
    """Hook of a module; `stays` keeps it without holders; `holders` are called with the state_dict."""

    handle: RemovableHandle
    stays: bool
    holders: list[Loading]


def listen(module: nn.Module, holder: Loading, names: Iterable[str]) -> None:
    """Register an object that loads its entries whenever the module loads a state_dict.

    Args:
        module: the module whose state_dict has the entries.
        holder: its `load` is called with each state_dict that is loaded.
        names: names of the entries; `torch.distributed.checkpoint` expects a module attribute for each.
    """
    module.__dict__.update(dict.fromkeys(names, holder))
    known: _Entries | None = module.__dict__.get(_ATTRIBUTE)
    if known is None:
        known = _Entries(module.register_load_state_dict_pre_hook(_load), False, [])
        module.__dict__[_ATTRIBUTE] = known
    known.holders.append(holder)


def leave(module: nn.Module, holder: Loading, names: Iterable[str]) -> None:
    """Unregister an object that `listen` registered, with the same arguments."""
    for name in names:
        module.__dict__.pop(name, None)
    known: _Entries = module.__dict__[_ATTRIBUTE]
    known.holders[:] = [one for one in known.holders if one is not holder]
    _tidy(module, known)


def stay(module: nn.Module) -> None:
    """Register the hook behind all others of the module, and keep it until `forget` even if it has no holders."""
    known: _Entries | None = module.__dict__.get(_ATTRIBUTE)
    if known is not None:
        known.handle.remove()
    handle = module.register_load_state_dict_pre_hook(_load)
    module.__dict__[_ATTRIBUTE] = _Entries(handle, True, [] if known is None else known.holders)


def forget(module: nn.Module) -> None:
    """Remove a module's hook, if it has one, as soon as it has no holders."""
    known: _Entries | None = module.__dict__.get(_ATTRIBUTE)
    if known is not None:
        known.stays = False
        _tidy(module, known)


def _tidy(module: nn.Module, known: _Entries) -> None:
    if not known.stays and not known.holders:
        known.handle.remove()
        del module.__dict__[_ATTRIBUTE]


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
    known: _Entries = module.__dict__[_ATTRIBUTE]
    for holder in known.holders:
        holder.load(state, prefix, missing, errors)

"""Entries of a growing network's state_dict beside its tensors: which hook loads them, once a module.

torch walks through a module's load_state_dict pre-hooks while it calls them. A network's own hook may bring it to
another state of growth there, so that what is loaded differs; what loads it must have been a hook before.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

# The attribute of a module that holds its `_Entries`.
_ATTRIBUTE = "_growth_entries"


class Loading(Protocol):
    """What takes entries out of a state_dict."""

    def load(self, state: dict[str, Any], prefix: str, missing: list[str], errors: list[str]) -> None:
        """Called before the module loads `state`: takes its entries out, whose names begin with `prefix`."""
        ...


@dataclass
class _Entries:
    """The hook of a module, whether it stays while nothing needs it, and what it hands the state_dict to."""

    handle: RemovableHandle
    stays: bool
    holders: list[Loading]


def listen(module: nn.Module, holder: Loading, names: Iterable[str]) -> None:
    """Let a holder load its entries with a module.

    Args:
        module: whose state_dict has them.
        holder: takes them out of one that is loaded.
        names: of the entries; `torch.distributed.checkpoint` asks modules for an attribute of each.
    """
    module.__dict__.update(dict.fromkeys(names, holder))
    known: _Entries | None = module.__dict__.get(_ATTRIBUTE)
    if known is None:
        known = _Entries(module.register_load_state_dict_pre_hook(_load), False, [])
        module.__dict__[_ATTRIBUTE] = known
    known.holders.append(holder)


def leave(module: nn.Module, holder: Loading, names: Iterable[str]) -> None:
    """Let a holder load nothing any more; arguments as of `listen`."""
    for name in names:
        module.__dict__.pop(name, None)
    known: _Entries = module.__dict__[_ATTRIBUTE]
    known.holders[:] = [one for one in known.holders if one is not holder]
    _tidy(module, known)


def stay(module: nn.Module) -> None:
    """Give a module the hook behind all that are there, until `forget`, whether or not anything needs it."""
    known: _Entries | None = module.__dict__.get(_ATTRIBUTE)
    if known is not None:
        known.handle.remove()
    handle = module.register_load_state_dict_pre_hook(_load)
    module.__dict__[_ATTRIBUTE] = _Entries(handle, True, [] if known is None else known.holders)


def forget(module: nn.Module) -> None:
    """Take a module's hook away, if it has one, once nothing needs it."""
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

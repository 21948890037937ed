"""Entries of a growing network's state_dict beside its tensors: which hook loads them, once a module.

torch walks through a module's load_state_dict pre-hooks while it calls them. A network's own hook may bring it to
another state of growth there, so that what is loaded differs; what loads it must have been a hook before.
"""

from typing import Any, Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

# The attribute of a module that holds the handle of its hook, and whether the hook stays.
_ATTRIBUTE = "_growth_entries"
#: Attributes of a module that hold what `Loading.load` is called of, where they are there.
HOLDERS = ("_row_multipliers", "_weighted_statistics")


class Loading(Protocol):
    """What takes entries out of a state_dict."""

    def load(self, state: dict[str, Any], prefix: str, missing: list[str], errors: list[str]) -> None:
        """Called before the module loads `state`: takes its entries out, whose names begin with `prefix`."""
        ...


def listen(module: nn.Module, stays: bool = False) -> None:
    """Let a module's holders load their entries.

    Args:
        module: any.
        stays: `leave` does not end it, `forget` does: the hook comes behind all that are there.
    """
    known: tuple[RemovableHandle, bool] | None = module.__dict__.get(_ATTRIBUTE)
    if known is not None and not stays:
        return
    if known is not None:
        known[0].remove()
    module.__dict__[_ATTRIBUTE] = module.register_load_state_dict_pre_hook(_load), stays


def leave(module: nn.Module) -> None:
    """Take a module's hook away where nothing needs it any more."""
    if not module.__dict__[_ATTRIBUTE][1] and not any(name in module.__dict__ for name in HOLDERS):
        forget(module)


def forget(module: nn.Module) -> None:
    """Take a module's hook away, if it has one, but where holders need it."""
    known = module.__dict__.get(_ATTRIBUTE)
    if known is None:
        return
    if any(name in module.__dict__ for name in HOLDERS):
        module.__dict__[_ATTRIBUTE] = known[0], False
        return
    known[0].remove()
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
    for name in HOLDERS:
        holder: Loading | None = module.__dict__.get(name)
        if holder is not None:
            holder.load(state, prefix, missing, errors)

"""Find and map tensors in an optimizer's state of a parameter: in containers at any depth, or in objects."""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

#: Maps the name of an entry and a tensor of the parameter's shape to its replacement.
Change = Callable[[str, Tensor], Tensor]


def mapped(value: Any, shape: torch.Size, new_shape: torch.Size, change: Change, key: str = "") -> Any:
    """Copy a parameter's state and replace the tensors in it that have the parameter's shape.

    Args:
        value: a tensor, containers of tensors at any depth, or anything else, which is returned unchanged.
        shape: the parameter's shape.
        new_shape: replaces the shape itself if the state contains it.
        change: called with the innermost name of a tensor, and the tensor; returns its replacement.
        key: name of `value` itself.
    """
    if isinstance(value, Tensor):
        return change(key, value) if value.shape == shape else value
    if isinstance(value, torch.Size):
        return new_shape if value == shape else value
    if isinstance(value, dict):
        new = copy.copy(value)
        named = ((name, name if isinstance(name, str) else key, one) for name, one in value.items())
        new.update({name: mapped(one, shape, new_shape, change, label) for name, label, one in named})
        return new
    if not isinstance(value, (list, tuple, deque)):
        return value
    items = [mapped(one, shape, new_shape, change, key) for one in value]
    if isinstance(value, tuple):
        return rebuilt(value, items)
    sequence: Any = copy.copy(value)
    sequence.clear()
    sequence.extend(items)
    return sequence


def rebuilt(value: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    """Make a tuple, or namedtuple of the same class, from other items."""
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def shaped(value: Any, shape: torch.Size, key: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of all tensors that `mapped` would replace."""
    found: list[tuple[str, Tensor]] = []

    def note(name: str, tensor: Tensor) -> Tensor:
        found.append((name, tensor))
        return tensor

    mapped(value, shape, shape, note, key)
    yield from found


def misfit(value: Any, shape: torch.Size) -> str:
    """Return the shape or class, in words, that `mapped` could not bring to another shape, or "".

    Single numbers fit any parameter; objects that contain tensors or arrays may depend on their shapes.
    """
    if isinstance(value, Tensor):
        return "" if value.shape == shape or value.numel() <= 1 else str(tuple(value.shape))
    if isinstance(value, (dict, list, tuple, deque)):
        held = (*value.keys(), *value.values()) if isinstance(value, dict) else value
        return next((told for one in held if (told := misfit(one, shape))), "")
    return type(value).__name__ if any(True for _ in _arrays(value, set())) else ""


def tensors_within(value: Any) -> Iterator[Tensor]:
    """Iterate over all tensors in a value, its containers and objects, in order."""
    return (one for one in _arrays(value, set()) if isinstance(one, Tensor))


def _arrays(value: Any, seen: set[int]) -> Iterator[Any]:
    if isinstance(value, Tensor) or hasattr(value, "__array_interface__"):
        yield value
        return
    if isinstance(value, (type, str, bytes, int, float)) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        held: Any = (*value.keys(), *value.values())
    elif isinstance(value, (list, tuple, deque, set, frozenset)):
        held = value
    else:
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        held = [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]
    for one in held:
        yield from _arrays(one, seen)

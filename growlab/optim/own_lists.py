"""Parameters that optimizers hold outside of `param_groups[...]["params"]`: lists of their own, by size or by kind.

Such as `group["matrices"]` of a Muon, or `self.by_size`. They are exchanged in place where growth exchanges parameters.
"""

from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from growlab.optim.regional import Regional

# What torch's Optimizer holds itself, and growlab carries.
_KNOWN = ("state", "param_groups", "defaults")


def exchange_own(optimizer: Optimizer, replaced: Mapping[int, Tensor]) -> None:
    """Let an optimizer's own lists, tuples, sets and dictionaries hold other parameters in place of those they hold.

    Args:
        optimizer: any.
        replaced: the new parameter by `id` of the old one.
    """
    for owner, name, value in _own(optimizer):
        owner[name] = _exchanged(value, replaced, set())


def holds_own(optimizer: Optimizer, wanted: Container[int]) -> str:
    """Name of an attribute or an entry of a group in which an optimizer holds parameters of these `id`s; "": none."""
    for _, name, value in _own(optimizer):
        if any(id(tensor) in wanted for tensor in _tensors(value, set())):
            return name
    return ""


def cannot_exchange(optimizer: Optimizer, wanted: Container[int]) -> str:
    """Says which of an optimizer's own containers would not fit parameters of other shapes; "": none.

    Args:
        optimizer: any.
        wanted: the `id`s of those of its parameters that are replaced.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    lists = [*groups, [param for group in groups for param in group]]
    shapes = [[param.shape for param in one] for one in lists if any(id(param) in wanted for param in one)]
    for _, name, value in _own(optimizer):
        for container in _containers(value, set()):
            if isinstance(container, dict):
                placed = [
                    (key, one)
                    for key, held in container.items()
                    for one in _tensors(held, set())
                    if id(one) in wanted
                ]
                # One key that is a size may be a number of something else.
                bad = bool(placed) and all(_is_size(key, one) for key, one in placed)
                how = "holds parameters by their size in"
            else:
                tensors = [one for one in container if isinstance(one, Tensor)]
                apart = not any(one is param for one in tensors for group in groups for param in group)
                bad = apart and len(tensors) > 0 and [one.shape for one in tensors] in shapes
                how = "holds tensors like its parameters, beside its state, in"
            if bad:
                return f"{type(optimizer).__name__} {how} {name!r}, which growlab cannot carry through growth"
    return ""


def _own(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Attributes and entries of groups that are the optimizer's own: where they are, name, value."""
    if isinstance(optimizer, Regional):
        # Growlab's know their parameters by `set_regions`.
        return
    for group in optimizer.param_groups:
        yield from ((group, name, value) for name, value in list(group.items()) if name != "params")
    known = vars(optimizer)
    yield from ((known, name, value) for name, value in list(known.items()) if name not in _KNOWN)


def _exchanged(value: Any, replaced: Mapping[int, Tensor], seen: set[int]) -> Any:
    if isinstance(value, Tensor):
        return replaced.get(id(value), value)
    if not isinstance(value, (list, tuple, dict, set)) or id(value) in seen:
        return value
    seen.add(id(value))
    if isinstance(value, dict):
        items = [
            (_exchanged(key, replaced, seen), _exchanged(held, replaced, seen)) for key, held in value.items()
        ]
        if any(
            one is not key or held is not value[key] for (one, held), key in zip(items, value, strict=True)
        ):
            value.clear()
            value.update(items)
        return value
    items = [_exchanged(held, replaced, seen) for held in value]
    if all(one is held for one, held in zip(items, value, strict=True)):
        return value
    if isinstance(value, list):
        value[:] = items
    elif isinstance(value, set):
        value.clear()
        value.update(items)
    else:
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _containers(value: Any, seen: set[int]) -> Iterator[Any]:
    if not isinstance(value, (list, tuple, dict, set)) or id(value) in seen:
        return
    seen.add(id(value))
    yield value
    for held in (*value.keys(), *value.values()) if isinstance(value, dict) else value:
        yield from _containers(held, seen)


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    for container in _containers(value, seen):
        held = (*container.keys(), *container.values()) if isinstance(container, dict) else container
        yield from (one for one in held if isinstance(one, Tensor))


def _is_size(key: Any, tensor: Tensor) -> bool:
    if isinstance(key, tuple):
        # Among others perhaps, such as a dtype.
        return key == tuple(tensor.shape) or any(isinstance(one, torch.Size) for one in key)
    return isinstance(key, int) and tensor.numel() > 1 and key == tensor.numel()

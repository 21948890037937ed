"""Replace parameters in containers that an optimizer keeps besides `param_groups[...]["params"]`.

Examples are `group["matrices"]` of a Muon, `self.by_size`, or `self.state["all"]`. They are updated in place when
growth replaces parameters; values of dictionaries with parameters as keys are carried like state.
"""

from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from growlab.optim.contents import misfit, rebuilt
from growlab.optim.regional import Regional

# Attributes of torch's Optimizer, which growlab carries separately.
_KNOWN = ("state", "param_groups", "defaults")
#: Maps an old parameter, its value in a dictionary and the dictionary's name to the new parameter's value.
Moved = Callable[[Tensor, Any, str], Any]


def _kept(parameter: Tensor, value: Any, name: str) -> Any:
    return value


def exchange_own(optimizer: Optimizer, replaced: Mapping[int, Tensor], moved: Moved = _kept) -> None:
    """Replace parameters in the lists, tuples, sets and dictionaries that an optimizer keeps itself.

    Args:
        optimizer: any.
        replaced: the new parameter by `id` of the old one.
        moved: applied to the dictionary values of parameters that are replaced.
    """
    for owner, name, value in _own(optimizer):
        if (exchanged := _exchanged(value, replaced, set(), moved, name)) is not value:
            owner[name] = exchanged


def kept_by_parameter(optimizer: Optimizer) -> Iterator[tuple[Tensor, Any, str]]:
    """Yield (parameter, value, name) of all dictionaries keyed by parameter that an optimizer keeps itself."""
    for _, name, value in _own(optimizer):
        for container in _containers(value, set()):
            for key, held in container.items() if isinstance(container, dict) else ():
                if isinstance(key, Tensor):
                    yield key, held, name


def inside(holder: Any) -> Iterator[Optimizer]:
    """Optimizers wrapped by another one or any object: its attributes, or in lists and dictionaries there."""
    for value in getattr(holder, "__dict__", {}).values():
        held = value.values() if isinstance(value, dict) else value
        for one in held if isinstance(value, (list, tuple, dict)) else (value,):
            if isinstance(one, Optimizer):
                yield one


def holds_own(optimizer: Optimizer, wanted: Container[int]) -> str:
    """Name of an optimizer's attribute or group entry that contains parameters with these `id`s; "" if none."""
    for _, name, value in _own(optimizer):
        if any(id(tensor) in wanted for tensor in _tensors(value, set())):
            return name
    return ""


def cannot_exchange(optimizer: Optimizer, wanted: Container[int]) -> str:
    """Describe the optimizer's container that would not fit parameters of other shapes, or "".

    Args:
        optimizer: any.
        wanted: `id`s of the parameters that will be replaced.
    """
    for parameter, held, name in kept_by_parameter(optimizer):
        if id(parameter) in wanted and (found := misfit(held, parameter.shape)):
            return (
                f"{type(optimizer).__name__} holds {found} of a parameter {tuple(parameter.shape)} in {name!r}, which "
                "growlab cannot carry through growth"
            )
    groups = [group["params"] for group in getattr(optimizer, "param_groups", ())]
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
                # A single key that equals a size may be another number by chance.
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


def _own(optimizer: Optimizer) -> Iterator[tuple[Any, Any, Any]]:
    """Yield (container, name, value) of attributes and of entries of groups and state that torch does not define."""
    if isinstance(optimizer, Regional):
        # Growlab's optimizers get their parameters by `set_regions`.
        return
    for group in getattr(optimizer, "param_groups", ()):
        yield from ((group, name, value) for name, value in list(group.items()) if name != "params")
    state = getattr(optimizer, "state", {})
    yield from ((state, name, value) for name, value in list(state.items()) if not isinstance(name, Tensor))
    known = vars(optimizer)
    yield from ((known, name, value) for name, value in list(known.items()) if name not in _KNOWN)


def _exchanged(value: Any, replaced: Mapping[int, Tensor], seen: set[int], moved: Moved, name: str) -> Any:
    if isinstance(value, Tensor):
        return replaced.get(id(value), value)
    if not isinstance(value, (list, tuple, dict, set)) or id(value) in seen:
        return value
    seen.add(id(value))
    if isinstance(value, dict):
        items = [
            (replaced[id(key)], moved(key, _exchanged(held, replaced, seen, moved, name), name))
            if isinstance(key, Tensor) and id(key) in replaced
            else (key, _exchanged(held, replaced, seen, moved, name))
            for key, held in value.items()
        ]
        if any(
            one is not key or held is not value[key] for (one, held), key in zip(items, value, strict=True)
        ):
            value.clear()
            value.update(items)
        return value
    items = [_exchanged(held, replaced, seen, moved, name) for held in value]
    if all(one is held for one, held in zip(items, value, strict=True)):
        return value
    if isinstance(value, list):
        value[:] = items
    elif isinstance(value, set):
        value.clear()
        value.update(items)
    else:
        return rebuilt(value, items)
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
        # Perhaps together with other keys, such as a dtype.
        return key == tuple(tensor.shape) or any(isinstance(one, torch.Size) for one in key)
    return isinstance(key, int) and tensor.numel() > 1 and key == tensor.numel()

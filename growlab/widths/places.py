"""Source line of a traced operation; module attributes with hard-coded sizes."""

import copy
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from growlab.widths.groups import Written
from growlab.widths.layout import Axis, Part

# Attributes for torch's bookkeeping in every module.
_TORCHS = frozenset(vars(nn.Module()))
# Most dots in the path of an attribute; `attention.config.heads` has two.
_DEEPEST = 3
# Folders of torch and of this package, whose code is not the user's.
_NOT_THE_USERS = tuple(os.path.dirname(path) + os.sep for path in (torch.__file__, __file__))


def module_of(node: Any) -> str:
    """Path of the module whose forward calls a node's operation; empty for the network itself."""
    stack = node.meta.get("nn_module_stack") or {}
    # A module that is called again has `@1` behind its path.
    return next((entry[0].partition("@")[0] for entry in reversed(stack.values())), "")


def place_of(node: Any) -> str:
    """` in module PATH (File "...", line N, in FUNCTION)` of a node's operation, as much of it as is known."""
    module = module_of(node)
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    where = next((line for line in reversed(lines) if line.startswith("File ")), "")
    return (f" in module {module}" if module else "") + (f" ({where})" if where else "")


def line_of(frames: Iterable[tuple[str, int | None]]) -> str:
    """`FILE:LINE` of the innermost call in the user's code; empty if not found.

    Args:
        frames: file and line of calls, outermost first.
    """
    own = [(path, line) for path, line in frames if not path.startswith(_NOT_THE_USERS)]
    return f"{os.path.basename(own[-1][0])}:{own[-1][1]}" if own else ""


def line_of_node(node: Any) -> str:
    """`FILE:LINE` of the user's code that runs a node's operation; empty if unknown."""
    frames = re.findall(r'File "(.+)", line (\d+)', node.meta.get("stack_trace") or "")
    return line_of((path, int(line)) for path, line in frames)


def plain_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Tensors that modules keep as plain attributes, by name: not in any state_dict, and not moved with the network."""
    modules = model.named_modules(remove_duplicate=False)
    named = ((path, name, content) for path, module in modules for name, content in vars(module).items())
    return {f"{path}.{name}".lstrip("."): held for path, name, held in named if isinstance(held, Tensor)}


def written_sizes(
    model: nn.Module,
    sizes: Iterable[tuple[str, int, tuple[Part, ...]]],
    inside: Iterable[tuple[str, int, tuple[Part, ...]]] = (),
) -> dict[Written, Axis]:
    """Find attributes of modules whose integer equals a size that a forward asks for.

    `narrowing` tests whether the forward really takes the size from there. Integers are sought on the module that asks;
    if it has none of that size, on its submodules, then on the modules that contain it.

    Args:
        model: the network at full width.
        sizes: module path, size at full width, and the parts of the axis it belongs to.
        inside: the same for inputs of layers. Modules that contain the layer may check such a size without a forward
            asking for it.

    Returns:
        The axis that each attribute counts. Attributes that match several axes are left out.
    """
    modules = dict(model.named_modules())
    # A module that is registered under several names is known by the first one.
    names = {module: path for path, module in reversed(list(model.named_modules()))}
    aliases = {path: names[m] for path, m in model.named_modules(remove_duplicate=False)}
    kept = {path: list(_integers_of(module)) for path, module in modules.items()}
    found: dict[Written, Axis] = {}
    ambiguous = set()
    for path, size, parts in dict.fromkeys(sizes):
        for paths in _nearest(aliases.get(path, path), modules):
            places = [
                Written(aliases[owner], attribute, index)
                for owner in paths
                for attribute, index, number in kept[aliases[owner]]
                if number == size
            ]
            for place in places:
                axis = Axis(parts, "out")
                if found.setdefault(place, axis) != axis:
                    ambiguous.add(place)
            if places:
                break
    asked = set(found)
    for path, size, parts in dict.fromkeys(inside):
        while path:
            path = path.rpartition(".")[0]
            for attribute, index, number in kept[aliases[path]]:
                place, axis = Written(aliases[path], attribute, index), Axis(parts, "out")
                if number == size and place not in asked and found.setdefault(place, axis) != axis:
                    ambiguous.add(place)
    return {place: axis for place, axis in found.items() if place not in ambiguous}


def _nearest(path: str, modules: Mapping[str, nn.Module]) -> Iterator[list[str]]:
    if path not in modules:
        return
    yield [path]
    yield [f"{path}.{name}" if path else name for name, _ in modules[path].named_children()]
    while path:
        path = path.rpartition(".")[0]
        yield [path]


def _integers_of(module: nn.Module) -> Iterator[tuple[str, int | str | None, int]]:
    """Yield (path of the attribute, index or key in it, integer) for a module, its class and plain objects in them."""
    own = {name: content for name, content in vars(module).items() if name not in _TORCHS}
    classes = [kind for kind in type(module).__mro__ if kind.__module__.partition(".")[0] != "torch"]
    inherited = {name: content for kind in reversed(classes) for name, content in vars(kind).items()}
    waiting: list[tuple[str, Any]] = [
        (name, content) for name, content in {**inherited, **own}.items() if not name.startswith("__")
    ]
    for attribute, content in waiting:
        if type(content) is int:
            yield attribute, None, content
        elif isinstance(content, (tuple, list)):
            yield from ((attribute, i, item) for i, item in enumerate(content) if type(item) is int)
        elif type(content) is dict:
            yield from ((attribute, key, item) for key, item in content.items() if type(item) is int)
        elif _is_plain(content) and attribute.count(".") < _DEEPEST:
            waiting += [(f"{attribute}.{name}", item) for name, item in _attributes(content).items()]


def _is_plain(content: Any) -> bool:
    """Return True for an object with attributes of a user's class or of a settings class."""
    library = type(content).__module__.partition(".")[0]
    return library not in ("torch", "builtins", "typing", "enum", "abc", "collections") and bool(
        _attributes(content)
    )


def _attributes(content: Any) -> dict[str, Any]:
    if isinstance(content, partial):
        return {"keywords": content.keywords}
    return {} if isinstance(content, (type, nn.Module)) else dict(getattr(content, "__dict__", {}))


def kept_at(module: nn.Module, place: Written) -> Any:
    """Return the size stored at a place; None if it cannot be read, as when a forward has replaced a module."""
    content: Any = module
    for name in place.attribute.split("."):
        try:
            content = getattr(content, name)
        except Exception:
            # Configurations may raise for a setting that differs from layer to layer.
            return None
    return content if place.index is None else content[place.index]


def write(module: nn.Module, place: Written, size: int) -> None:
    """Store a size at a place of a module; objects on the path are replaced by copies, since they may be shared."""
    first, *rest = place.attribute.split(".")
    setattr(module, first, _with(getattr(module, first), rest, place.index, size))


def _with(holder: Any, path: Sequence[str], index: int | str | None, size: int) -> Any:
    """Return a copy of an attribute's value with another size at the given path and index."""
    if isinstance(holder, partial):
        return partial(holder.func, *holder.args, **{**holder.keywords, str(index): size})
    if path:
        changed = copy.copy(holder)
        content = _with(getattr(holder, path[0]), path[1:], index, size)
        object.__setattr__(changed, path[0], content)
        return changed
    if index is None:
        return size
    if isinstance(holder, dict):
        return {**holder, index: size}
    changed = [size if i == index else item for i, item in enumerate(holder)]
    return type(holder)._make(changed) if hasattr(holder, "_make") else type(holder)(changed)

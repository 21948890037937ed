"""Find, read and write the attributes of modules from which a forward takes its sizes."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from growlab.widths.groups import Axis, HardcodedSize, Part

# Attributes that every module has.
_TORCHS = frozenset(vars(nn.Module()))
# Most dots in the path of an attribute; `attention.config.heads` has two.
_DEEPEST = 3


def plain_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Tensors that modules have as plain attributes, by name: not in any state_dict, and not moved with the network."""
    return {
        f"{path}.{name}".lstrip("."): content
        for path, module in model.named_modules(remove_duplicate=False)
        for name, content in vars(module).items()
        if isinstance(content, Tensor)
    }


def written_sizes(
    model: nn.Module,
    sizes: Iterable[tuple[str, int, tuple[Part, ...]]],
    inside: Iterable[tuple[str, int, tuple[Part, ...]]] = (),
) -> dict[HardcodedSize, Axis]:
    """Find attributes of modules whose integer equals a size that a forward uses, and the axis that each counts.

    `trials` tests whether the forward really reads the size there. Integers are looked up in the module that uses the
    size; if none equals it, in its submodules, then in the modules that contain it. A module's own sizes take
    precedence over those of others; attributes that match several axes are ignored. `sizes` are module path, size at
    full width, and the parts of its axis. `inside` has the same for inputs of layers, whose size the modules that
    contain the layer may check.
    """
    modules = dict(model.named_modules())
    # Path of a module -> its first path, if it is registered under several names.
    first = {module: path for path, module in model.named_modules()}
    aliases = {path: first[module] for path, module in model.named_modules(remove_duplicate=False)}
    integers = {path: list(_integers_of(module)) for path, module in modules.items()}
    own: dict[HardcodedSize, dict[Axis, None]] = {}
    matches: dict[HardcodedSize, dict[Axis, None]] = {}

    def places(path: str, size: int) -> list[HardcodedSize]:
        owner = aliases[path]
        return [HardcodedSize(owner, attribute, index) for attribute, index, n in integers[owner] if n == size]

    for path, size, parts in dict.fromkeys(sizes):
        user = aliases.get(path, path)
        for paths in _nearest(user, modules):
            if near := [place for owner in paths for place in places(owner, size)]:
                for place in near:
                    (own if place.module == user else matches).setdefault(place, {})[Axis(parts, "out")] = None
                break
    matches |= own
    used = set(matches)
    for path, size, parts in dict.fromkeys(inside):
        while path:
            path = path.rpartition(".")[0]
            for place in (place for place in places(path, size) if place not in used):
                matches.setdefault(place, {})[Axis(parts, "out")] = None
    return {place: next(iter(axes)) for place, axes in matches.items() if len(axes) == 1}


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
    classes = [kind for kind in type(module).__mro__ if kind.__module__.partition(".")[0] != "torch"]
    attributes = {name: content for kind in reversed(classes) for name, content in vars(kind).items()}
    attributes |= {name: content for name, content in vars(module).items() if name not in _TORCHS}
    waiting: list[tuple[str, Any]] = [(n, content) for n, content in attributes.items() if not n.startswith("__")]
    for attribute, content in waiting:
        if type(content) is int:
            yield attribute, None, content
        elif isinstance(content, (tuple, list)):
            yield from ((attribute, i, item) for i, item in enumerate(content) if type(item) is int)
            if _has_keys(content):
                yield from ((attribute, key, item) for key, item in content if type(item) is int)
        elif type(content) is dict:
            yield from ((attribute, key, item) for key, item in content.items() if type(item) is int)
        elif _is_plain(content) and attribute.count(".") < _DEEPEST:
            waiting += [(f"{attribute}.{name}", item) for name, item in _attributes(content).items()]


def _has_keys(content: Any) -> bool:
    """Return True for a sequence of (name, value) pairs, in which einops' layers store their sizes."""
    pairs = isinstance(content, (tuple, list)) and bool(content)
    return pairs and all(type(i) is tuple and len(i) == 2 and type(i[0]) is str for i in content)


def _is_plain(content: Any) -> bool:
    """Return True for an object with attributes, of a user's class or a configuration class."""
    library = type(content).__module__.partition(".")[0]
    return library not in ("torch", "builtins", "typing", "enum", "abc", "collections") and bool(_attributes(content))


def _attributes(content: Any) -> dict[str, Any]:
    if isinstance(content, partial):
        return {"keywords": content.keywords}
    return {} if isinstance(content, (type, nn.Module)) else dict(getattr(content, "__dict__", {}))


def kept_at(module: nn.Module, place: HardcodedSize) -> Any:
    """Return the size stored at a place; None if it cannot be read, such as after a forward has replaced a module."""
    content: Any = module
    for name in place.attribute.split("."):
        try:
            content = getattr(content, name)
        except Exception:
            # Configurations may raise errors for settings that differ between layers.
            return None
    content = dict(content) if _has_keys(content) else content
    return content if place.index is None else content[place.index]


def write(module: nn.Module, place: HardcodedSize, size: int) -> None:
    """Store a size at a place of a module; objects on the path are replaced by copies, since they may be shared."""
    first, *rest = place.attribute.split(".")
    before = getattr(module, first)
    if _has_keys(before):
        # einops' layers are copied and pickled by another dictionary of the same sizes.
        for name in [n for n, c in vars(module).items() if type(c) is dict and c == dict(before)]:
            setattr(module, name, _with(getattr(module, name), (), place.index, size))
    setattr(module, first, _with(before, rest, place.index, size))


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
    if _has_keys(holder):
        return type(holder)({**dict(holder), index: size}.items())
    changed = [size if i == index else item for i, item in enumerate(holder)]
    return type(holder)._make(changed) if hasattr(holder, "_make") else type(holder)(changed)

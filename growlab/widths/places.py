"""Where in the user's code an operation stands, and where its module keeps the sizes that it asks for."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from growlab.widths.groups import Written
from growlab.widths.layout import Axis, Part


def module_of(node: Any) -> str:
    """Path of the module whose forward calls the node's operation; empty for the network itself."""
    stack = node.meta.get("nn_module_stack") or {}
    # A module that is called again has `@1` behind its path.
    return next((entry[0].partition("@")[0] for entry in reversed(stack.values())), "")


def place_of(node: Any) -> str:
    """` in module PATH (File "...", line N, in FUNCTION)`, as much of it as is known."""
    module = module_of(node)
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    where = next((line for line in reversed(lines) if line.startswith("File ")), "")
    return (f" in module {module}" if module else "") + (f" ({where})" if where else "")


def written_sizes(
    model: nn.Module, sizes: Iterable[tuple[str, int, tuple[Part, ...]]]
) -> dict[Written, Axis]:
    """Integers on modules that are as large as a size that the module's forward asks for.

    Whether the forward really takes the size from there has to be tried: `narrowing` does.

    Args:
        model: the network at full width.
        sizes: module path, size at full width, and what it is made of.
    """
    modules = dict(model.named_modules())
    found: dict[Written, Axis] = {}
    ambiguous = set()
    for path, size, parts in sizes:
        module = modules.get(path)
        if module is None:
            continue
        for attribute, content in vars(module).items():
            for index, number in _integers(content):
                if number != size:
                    continue
                place, axis = Written(path, attribute, index), Axis(parts, "out")
                if found.setdefault(place, axis) != axis:
                    ambiguous.add(place)
    return {place: axis for place, axis in found.items() if place not in ambiguous}


def _integers(content: Any) -> Sequence[tuple[int | None, int]]:
    if type(content) is int:
        return [(None, content)]
    if type(content) in (tuple, list) and all(type(item) is int for item in content):
        return list(enumerate(content))
    return []

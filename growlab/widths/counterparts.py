"""Compare the exported programs of a network at two sizes; trace entries of activations back to rows of weights."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from growlab.widths.places import module_of
from growlab.widths.program import operation_of, shapes_of

#: Operations that change nothing but the shape.
RESHAPING = (
    *("flatten", "view", "reshape", "reshape_as", "_unsafe_view", "unflatten"),
    *("squeeze", "unsqueeze", "view_as", "squeeze_"),
)
# Operations that move entries without changing their values.
_MOVING = frozenset(
    (
        *(*RESHAPING, "permute", "transpose", "swapaxes", "swapdims", "mT", "mH", "adjoint", "moveaxis"),
        *("t", "slice", "select", "narrow", "split", "chunk"),
        *("split_with_sizes", "unbind", "getitem", "contiguous", "clone", "alias", "expand", "movedim"),
    )
)
_LAYERS = frozenset(("linear", "matmul", "mm", "addmm"))


def spans(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[range, range]]:
    """Yield the shortest runs of dimensions with equal numbers of entries in two shapes of the same entries."""
    old = new = 0
    while old < len(before) or new < len(after):
        old_end, new_end = min(old + 1, len(before)), min(new + 1, len(after))
        while math.prod(before[old:old_end]) != math.prod(after[new:new_end]):
            if math.prod(before[old:old_end]) < math.prod(after[new:new_end]) and old_end < len(before):
                old_end += 1
            elif new_end < len(after):
                new_end += 1
            else:
                old_end += 1
        yield range(old, old_end), range(new, new_end)
        old, new = old_end, new_end


def growing_dimensions(
    wide: torch.export.ExportedProgram, narrow: torch.export.ExportedProgram, source: Callable[[str], str]
) -> dict[str, int]:
    """Find the dimension that each reshape makes larger in a wider network than in a narrower one.

    Args:
        wide: exported program of the wider network.
        narrow: exported program of a narrower network of the same class.
        source: maps the path of a module of the wider network to that of its counterpart.

    Returns:
        By node name, how many dimensions split from the same one are to the right of it, sizes of 1 not counted.
    """
    own, others = _reshapes(wide), _reshapes(narrow)
    found = {}
    for path, nodes in own.items():
        theirs = others.get(source(path), [])
        for node, other in zip(nodes, theirs, strict=True) if len(nodes) == len(theirs) else ():
            (after,), (less,) = shapes_of(node), shapes_of(other)
            if len(after) != len(less):
                continue
            for _, span in spans(shapes_of(node.args[0])[0], after):
                several = [place for place in span if after[place] != 1]
                grown = [index for index, place in enumerate(several) if after[place] != less[place]]
                if len(grown) == 1 and len(several) > 1:
                    found[node.name] = len(several) - 1 - grown[0]
    return found


def _reshapes(program: torch.export.ExportedProgram) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for node in program.graph_module.graph.nodes:
        if node.op == "call_function" and operation_of(node) in RESHAPING:
            found.setdefault(module_of(node), []).append(node)
    return found


def rows_of(node: Any) -> tuple[int, ...] | None:
    """Return the rows of the linear layer's weight that a node's entries come from; None if they cannot be followed."""
    path = []
    while operation_of(node) not in _LAYERS:
        if node.op != "call_function" or not node.all_input_nodes:
            return None
        path.append(node)
        node = node.all_input_nodes[0]
    (shape,) = shapes_of(node)
    rows: Any = torch.arange(shape[-1]).expand(shape).contiguous()
    for each in reversed(path):
        if operation_of(each) == "getitem":
            rows = rows[each.args[1]]
        elif operation_of(each) in _MOVING:
            rows = each.target(rows, *each.args[1:], **each.kwargs)
        elif shapes_of(each)[0] != tuple(rows.shape):
            return None
    return tuple(rows.unique().tolist())

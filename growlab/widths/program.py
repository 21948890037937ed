"""Queries on exported programs: operations, shapes, source lines, reshapes, dependence on data."""

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.export import default_decompositions
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from growlab.base.errors import UserError
from growlab.widths.places import plain_tensors

# Folders of torch and of this package, whose code is not the user's.
_NOT_THE_USERS = tuple(os.path.dirname(path) + os.sep for path in (torch.__file__, __file__))
#: Operations that only change the shape.
RESHAPING = (
    *("flatten", "view", "reshape", "reshape_as", "_unsafe_view", "unflatten"),
    *("squeeze", "unsqueeze", "view_as", "squeeze_"),
)
# Other operations that move entries without changing their values.
_MOVING = """
permute transpose swapaxes swapdims mT mH adjoint moveaxis t slice select narrow split chunk split_with_sizes unbind
getitem contiguous clone alias expand movedim
"""
_FROM_DATA = "sizes from data"
_LAYERS = frozenset(("linear", "matmul", "mm", "addmm"))


class UnsupportedOperation(UserError, ValueError):
    """A network cannot be traced, for example because an operation has no channel rule; the message says where."""


def operation_of(node: Any) -> str:
    """Name of a node's operation without namespace and overload."""
    schema = getattr(node.target, "_schema", None)
    name = getattr(node.target, "__name__", str(node.target)) if schema is None else schema.name
    return str(name.rpartition("::")[2])


def module_of(node: Any) -> str:
    """Path of the module whose forward calls a node's operation; empty for the network itself."""
    stack = node.meta.get("nn_module_stack") or {}
    # A repeated call of a module has `@1` after its path.
    return next((entry[0].partition("@")[0] for entry in reversed(stack.values())), "")


def place_of(node: Any) -> str:
    """Return ` in module PATH (File "...", line N, in FUNCTION)` for a node's operation, as much of it as is known."""
    module = module_of(node)
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    where = next((line for line in reversed(lines) if line.startswith("File ")), "")
    return (f" in module {module}" if module else "") + (f" ({where})" if where else "")


def line_of(frames: Iterable[tuple[str, int | None]]) -> str:
    """Return `FILE:LINE` of the innermost frame in the user's code, or ""; `frames` are outermost first."""
    users = [(path, line) for path, line in frames if not path.startswith(_NOT_THE_USERS)]
    return f"{os.path.basename(users[-1][0])}:{users[-1][1]}" if users else ""


def line_of_node(node: Any) -> str:
    """Return `FILE:LINE` of the user's code that runs a node's operation; "" if unknown."""
    frames = re.findall(r'File "(.+)", line (\d+)', node.meta.get("stack_trace") or "")
    return line_of((path, int(line)) for path, line in frames)


def operations(part: torch.fx.GraphModule) -> Iterator[str]:
    """Yield the names of all operations of a program, including those of its subprograms."""
    for node in part.graph.nodes:
        if node.op == "call_function":
            yield operation_of(node)
        elif node.op == "get_attr" and isinstance(inner := getattr(part, node.target), torch.fx.GraphModule):
            yield from operations(inner)


def angles_from(node: Any) -> bool:
    """Return True if the argument of any sine or cosine depends on a node."""
    seen, waiting = {node}, [node]
    while waiting:
        for user in waiting.pop().users:
            attributes = (arg for arg in user.args if isinstance(arg, torch.fx.Node) and arg.op == "get_attr")
            parts = (getattr(each.graph.owning_module, str(each.target)) for each in attributes)
            nested = {name for part in parts if isinstance(part, torch.fx.GraphModule) for name in operations(part)}
            if {operation_of(user), *nested} & {"sin", "cos"}:
                return True
            if user not in seen:
                seen.add(user)
                waiting.append(user)
    return False


def is_pointwise(node: Any) -> bool:
    """Return True if a node computes every entry from the entries at the same position, without random numbers."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def parts_of(node: Any) -> torch.fx.GraphModule | None:
    """Decompose a composite operation into a graph over its input tensors; None if it is not composite."""
    leaves, spec = tree_flatten((node.args, node.kwargs))
    nodes = [leaf for leaf in leaves if isinstance(leaf, torch.fx.Node)]
    tensors = [value for leaf in nodes if isinstance(value := leaf.meta.get("val"), FakeTensor)]
    if getattr(node.target, "namespace", None) != "aten" or not tensors or len(tensors) < len(nodes):
        return None

    def call(*operands: Tensor) -> Any:
        operand = iter(operands)
        args, kwargs = tree_unflatten([next(operand) if leaf in nodes else leaf for leaf in leaves], spec)
        return node.target(*args, **kwargs)

    table = _decompositions()
    mode: Any = tensors[0].fake_mode
    try:
        with mode:
            graph = make_fx(call, {node.target: table[node.target]} if node.target in table else None)(*tensors)
    except RuntimeError:
        # Its decomposition depends on numbers in the data.
        return None
    calls = [each for each in graph.graph.nodes if each.op == "call_function"]
    for each in calls:
        each.meta |= {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}
    return None if node.target in [each.target for each in calls] else graph


@cache
def _decompositions() -> dict[Any, Any]:
    """Cache the table of decompositions, for which torch searches all registered operations."""
    return dict(default_decompositions().items())


def shapes_of(node: Any) -> list[tuple[int, ...]]:
    """Full-width shapes of all tensors that a node computes; raise if a size depends on numbers in the data."""
    value = node.meta.get("val")
    tensors = [x for x in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(x, Tensor)]
    if any(type(size) is not int for tensor in tensors for size in tensor.shape):
        raise UnsupportedOperation(
            f"the size of the output of {operation_of(node)}{place_of(node)} depends on numbers in the data; train the "
            "network at a fixed size, or keep all entries and mask those that do not count."
        )
    return [tuple(tensor.shape) for tensor in tensors]


def as_computed(node: Any, results: Sequence[Any]) -> Any:
    """Return the results of a node in the form of its output: a list, a single result, or None."""
    several = isinstance(node.meta.get("val"), (tuple, list))
    return list(results) if several else next(iter(results), None)


def shape_of(node: Any) -> tuple[int, ...]:
    """Full-width shape of the (first) tensor that a node computes; see `shapes_of`."""
    return shapes_of(node)[0]


def depends_on_data(program: torch.export.ExportedProgram) -> bool:
    """Return True if sizes in a program, or numbers that it computes with, depend on numbers in the data."""
    values = (tree_leaves(node.meta.get("val")) for node in _nodes(program))
    return any(_is_symbolic(value) for leaves in values for value in leaves)


def unread_parameters(program: torch.export.ExportedProgram, model: nn.Module) -> list[str]:
    """Names of the model's parameters that a program does not read under any of their names."""
    first, names = canonical_names(model), program.graph_signature.inputs_to_parameters
    read = {first[names[node.name]] for node in _nodes(program) if node.users and node.name in names}
    return [name for name, _ in model.named_parameters() if name not in read]


class _Settling(torch.fx.Interpreter):
    """Run a program on real tensors and replace symbolic sizes and numbers by those of the run."""

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        values, spec = tree_flatten(n.meta.get("val"))
        # A size that torch.export has specialised on the example's value has no symbol, but its input's has a mark.
        inputs = [pair for i in n.all_input_nodes for pair in zip(shapes_of(i), sizes_from_data(i), strict=False)]
        marks = [
            [
                isinstance(size, torch.SymInt)
                or any(marked[d : d + 1] == [True] and shape[d] == size for shape, marked in inputs)
                for d, size in enumerate(value.shape)
            ]
            for value in values
            if isinstance(value, Tensor)
        ]
        if any(map(any, marks)):
            n.meta[_FROM_DATA] = marks
        if any(map(_is_symbolic, values)):
            n.meta["val"] = tree_unflatten(map(_settled, values, tree_leaves(result)), spec)
        return result


def settle(program: torch.export.ExportedProgram, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Replace sizes and numbers that depend on data by those of an example, in place; runs the program."""
    _Settling(program.graph_module).run(*program._graph_module_flat_inputs(inputs, named))


def sizes_from_data(node: Any) -> list[list[bool]]:
    """For each output tensor of a node, True for every size that depends on numbers in the data; [] if none does."""
    return node.meta.get(_FROM_DATA, [])


def _nodes(program: torch.export.ExportedProgram) -> Iterator[torch.fx.Node]:
    parts = (part for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule))
    return (node for part in parts for node in part.graph.nodes)


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, Tensor):
        return any(isinstance(size, torch.SymInt) for size in value.shape)
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _settled(value: Any, real: Any) -> Any:
    if not isinstance(value, FakeTensor) or not _is_symbolic(value):
        return real if _is_symbolic(value) else value
    with value.fake_mode:
        return torch.empty(real.shape, dtype=value.dtype, device=value.device)


def is_dead(node: Any) -> bool:
    """Return True if nothing uses a node's result, except perhaps for its sizes."""
    # In-place operations have an effect without users, and checks have no result.
    return not node.users and node.meta.get("val") is not None and not _writes(node)


def bases_of(node: Any) -> Iterator[Any]:
    """Yield the other nodes whose tensors an in-place operation changes: its operand, and what that is a view of."""
    if not _writes(node):
        return
    viewed = node.args[0] if node.args else None
    while isinstance(viewed, torch.fx.Node):
        yield viewed
        # Views in a list, such as chunks, are selected by getitem.
        is_view = operation_of(viewed) == "getitem" or _alias(viewed) is not None
        viewed = viewed.args[0] if viewed.op == "call_function" and is_view and viewed.args else None


def _alias(node: Any) -> Any:
    arguments = getattr(getattr(node.target, "_schema", None), "arguments", None)
    return arguments[0].alias_info if arguments else None


def _writes(node: Any) -> bool:
    alias = _alias(node)
    return alias is not None and bool(alias.is_write)


def constants_of(program: torch.export.ExportedProgram) -> dict[Any, Tensor]:
    """Tensors that the forward creates from numbers, by the placeholder node for them."""
    lifted = program.graph_signature.inputs_to_lifted_tensor_constants
    return {
        node: program.constants[lifted[node.name]]
        for node in program.graph.nodes
        if node.op == "placeholder" and isinstance(program.constants.get(lifted.get(node.name)), Tensor)
    }


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Map every name of a parameter, buffer or plain tensor to the first name of the same tensor."""
    first: dict[int, str] = {}
    named = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
        *plain_tensors(model).items(),
    )
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def name_modules_once(program: torch.export.ExportedProgram, model: nn.Module) -> None:
    """Rename modules that are registered under several names to the first name, in place, as in `named_modules`."""
    first = {module: path for path, module in model.named_modules()}
    names = {path: first[module] for path, module in model.named_modules(remove_duplicate=False)}
    if len(first) == len(names):
        return

    def named(path: str) -> str:
        # A repeated call of a module has `@1` after its path.
        module, at, number = path.partition("@")
        return names.get(module, module) + at + number

    for part in program.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            stack = node.meta.get("nn_module_stack") or {}
            if stack:
                node.meta["nn_module_stack"] = {key: (named(path), *rest) for key, (path, *rest) in stack.items()}


def spans(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[range, range]]:
    """Yield the shortest runs of dimensions with equal numbers of entries in two shapes of the same size."""
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
    """Find the dimension that each reshape makes larger in a wider network than in a narrower one of its class.

    `source` maps a module's path to that in the narrower network. Returns, by node name, the number of dimensions to
    the right of it that are split from the same one, without those of size 1.
    """
    wide_nodes, narrow_nodes = _reshapes(wide), _reshapes(narrow)
    moved = {}
    for path, nodes in wide_nodes.items():
        counterparts = narrow_nodes.get(source(path), [])
        for node, other in zip(nodes, counterparts, strict=True) if len(nodes) == len(counterparts) else ():
            (shape,), (narrow_shape,) = shapes_of(node), shapes_of(other)
            if len(shape) != len(narrow_shape):
                continue
            for _, span in spans(shapes_of(node.args[0])[0], shape):
                dims = [dim for dim in span if shape[dim] != 1]
                grown = [index for index, dim in enumerate(dims) if shape[dim] != narrow_shape[dim]]
                if len(grown) == 1 and len(dims) > 1:
                    moved[node.name] = len(dims) - 1 - grown[0]
    return moved


def _reshapes(program: torch.export.ExportedProgram) -> dict[str, list[Any]]:
    nodes: dict[str, list[Any]] = {}
    for node in program.graph_module.graph.nodes:
        if node.op == "call_function" and operation_of(node) in RESHAPING:
            nodes.setdefault(module_of(node), []).append(node)
    return nodes


def rows_of(node: Any) -> tuple[int, ...] | None:
    """Return the rows of the linear layer's weight that a node's entries come from; None if unknown."""
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
        elif operation_of(each) in (*RESHAPING, *_MOVING.split()):
            rows = each.target(rows, *each.args[1:], **each.kwargs)
        elif shapes_of(each)[0] != tuple(rows.shape):
            return None
    return tuple(rows.unique().tolist())

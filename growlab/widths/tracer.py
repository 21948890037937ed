"""Interpret an exported program with axes in place of numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from growlab.widths.atoms import Run, fixed
from growlab.widths.groups import WidthGraph
from growlab.widths.places import line_of_node, module_of, place_of
from growlab.widths.predictions import Call, computes, name_of, numbers_of
from growlab.widths.program import (
    UnsupportedOperation,
    angles_from,
    bases_of,
    canonical_names,
    constants_of,
    is_dead,
    is_pointwise,
    parts_of,
)
from growlab.widths.recorder import Heads, Recorder
from growlab.widths.rules import (
    AFFINE,
    MIXING,
    RULES,
    SIZES_ALONE,
    Value,
    keep_full_width,
    linear_in,
    overwritten,
    values_in,
)
from growlab.widths.rules.elementwise import broadcast
from growlab.widths.rules.rotation import individuated

#: Reason why a network's output channels keep their width.
OUTPUT = "the network's output"
_INPUT = "the network's input"
# Operations that run a subprogram under a setting; the subprogram's inputs are their last arguments.
_SETTINGS = ("wrap_with_autocast", "wrap_with_set_grad_enabled")


class Tracer(Recorder):
    """Interpret an exported program over axes instead of numbers.

    Args:
        program: exported program of the model.
        model: the network at full width.
        opaque: names of operations that growth need not pass.
        moved: see `Recorder`.
        follow_norms: see `trace`.
        heads: see `Recorder`.
        tied: see `Recorder`.
        weighted_norms: see `Recorder`.
        plain: names of plain tensors of modules that are constants of the program.
    """

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        model: nn.Module,
        opaque: frozenset[str] = frozenset(),
        moved: Mapping[str, int] | None = None,
        follow_norms: bool = False,
        heads: Heads = "dimensions",
        tied: frozenset[str] = frozenset(),
        weighted_norms: bool = True,
        plain: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(model, moved or {}, heads, tied, weighted_norms)
        self._plain = plain
        self.buffers |= plain
        self._still |= plain
        self._program, self._opaque, self.follow_norms = program, opaque, follow_norms
        lifted = program.graph_signature.inputs_to_lifted_tensor_constants
        self._names = {
            **program.graph_signature.inputs_to_parameters,
            **program.graph_signature.inputs_to_buffers,
            **{node: name for node, name in lifted.items() if name in plain},
        }
        self._canonical = canonical_names(model)
        self._known: dict[str, Value] = {}
        self._visited: list[tuple[str, tuple[float, ...], list[Value], Any]] = []
        # Nesting depth of the composite operations that are being visited.
        self._inside = 0
        self._constants = constants_of(program)

    def run(self, several_outputs: bool = False, updated: frozenset[str] = frozenset()) -> WidthGraph:
        """Visit every node once in forward order and return the width graph; `calls` lists the operations.

        Args:
            several_outputs: True if the output in any mode is not a single tensor.
            updated: names of buffers and plain tensors that the forward writes to.
        """
        self._still -= updated
        output_class = self.scales.new()
        for value in values_in(self._visit(self._program.graph_module, [])):
            output_class = self.scales.union(output_class, value.scale)
            self._reaching |= value.made_by
            for axis in value.axes:
                self.atoms.freeze(axis, OUTPUT)
        for name in self._plain & {each for x in self._norms for each in (x.running_mean, x.running_var)}:
            # Training may change them, and no state_dict has them.
            for axis in self._parameters[name]:
                self.atoms.freeze(axis, f"{name} is neither a parameter nor a buffer")
        self._tie_heads_to_streams()
        if several_outputs or not self._program.call_spec.out_spec.is_leaf():
            self._pin_what_is_more_than_an_output(output_class)
        graph = self._collect(output_class)
        self.calls = [
            Call(
                operation,
                numbers,
                tuple(tuple(self._named(axis, "fixed") for axis in value.axes) for value in values),
                tuple(norm for norm in graph.channel_norms if norm.summed and norm.name == module_of(node)),
                line_of_node(node),
            )
            for operation, numbers, values, node in self._visited
            if not any(self._is_nameless(axis) for value in values for axis in value.axes)
        ]
        return graph

    def _visit(self, part: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Visit the program, or a subprogram that is called with these inputs, and return its outputs."""
        values: dict[Any, Any] = {}
        outer, self._values = self._values, values
        given = iter(inputs)
        for node in part.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given) if inputs else self._placeholder(node)
            elif node.op == "get_attr":
                held = getattr(part, node.target)
                values[node] = self._constant(held) if isinstance(held, Tensor) else held
            elif node.op == "call_function" and is_dead(node):
                values[node] = self._of_fixed(node)
                if is_pointwise(node):
                    # Its result is not used, but it is run: its operands must fit at any width.
                    operands = list(values_in([values[each] for each in node.all_input_nodes]))
                    broadcast(self, self.shape(node), operands)
            elif node.op == "call_function":
                values[node] = result = self._call(node, values)
                for base in bases_of(node):
                    values[base] = overwritten(values[base], result)
                if not self._inside and computes(operation := self.operation(node)):
                    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), _known_number)
                    numbers = numbers_of(node.target, args, kwargs, self._constants)
                    self._visited.append((name_of(operation), numbers, list(values_in(result)), node))
            elif node.op == "output":
                self._values = outer
                return torch.fx.node.map_arg(node.args, lambda n: values[n])[0]
        return None

    def _constant(self, held: Tensor) -> Value:
        shape = tuple(held.shape)
        return Value(shape, tuple(map(fixed, shape)), self.scales.new(unit=True))

    def _of_fixed(self, node: Any) -> Any:
        values = [
            Value(shape, tuple(map(fixed, shape)), self.scales.new(unit=True)) for shape in self.shapes(node)
        ]
        return values if self.has_several_outputs(node) else (values[0] if values else None)

    # Visiting ------------------------------------------------------------------------------------------

    def _placeholder(self, node: Any) -> Any:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return value
        shape = tuple(int(size) for size in value.shape)
        name = self._names.get(node.name)
        name = self._canonical.get(name, name) if name is not None else None
        if name is not None and node.users:
            self._used.add(name)
        if name in self._known:
            return self._known[name]
        scale = self.scales.new(unit=True)
        if name is None:
            root = self._origin_of(node)
            return Value(shape, tuple(fixed(size, root) for size in shape), scale)
        # A single channel may be broadcast against many: it stays single.
        axes = [self.atoms.new(size) if size > 1 else fixed(size) for size in shape]
        self._parameters[name] = axes
        self._roles[name] = [None] * len(axes)
        self._known[name] = Value(shape, tuple(axes), scale, name)
        unsaved = {*self._program.graph_signature.non_persistent_buffers, *self._plain}
        if name in unsaved and len(axes) == 1 and angles_from(node):
            self.frequencies.add(name)
        return self._known[name]

    def numbers(self, node: Any) -> list[int]:
        """Return the integers of a tensor that the forward creates from numbers; [] for any other tensor."""
        while node not in self._constants and self.operation(node).startswith("lift_fresh"):
            node = node.args[0]
        constant = self._constants.get(node)
        if constant is None or constant.is_meta or constant.dtype != torch.int64:
            return []
        return [int(entry) for entry in constant.flatten().tolist()]

    def _origin_of(self, node: Any) -> str:
        """Describe the origin of a tensor that is not a parameter or buffer, for reasons why channels stay."""
        lifted = self._program.graph_signature.inputs_to_lifted_tensor_constants.get(node.name)
        if lifted is None:
            return _INPUT
        modules = self._model.named_modules()
        kept = {f"{path}.{name}".lstrip(".") for path, module in modules for name in vars(module)}
        return f"{lifted} is neither a parameter nor a buffer" if lifted in kept else "numbers in the code"

    def _call(self, node: Any, values: Mapping[Any, Any]) -> Any:
        operation = self.operation(node)
        args = torch.fx.node.map_arg(node.args, lambda n: values[n])
        kwargs = torch.fx.node.map_arg(node.kwargs, lambda n: values[n])
        if operation in _SETTINGS:
            part = next(i for i, arg in enumerate(args) if isinstance(arg, torch.fx.GraphModule))
            return self._visit(args[part], args[part + 1 :])
        schema = getattr(node.target, "_schema", None)
        names = ["a", "b"] if schema is None else [argument.name for argument in schema.arguments]
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        is_number = _known_number(node) is not node
        if not (is_number or operation in RULES or operation in self._opaque or self._is_fixed(named)):
            if not is_pointwise(node) or self.has_several_outputs(node):
                return self._taken_apart(node, operation, named)
            # The rule for element-wise functions of several operands.
            operation = "where"
        result = self._rooted(operation, named, self._apply(node, operation, named))
        return result if operation in AFFINE else self._with_makers(operation, named, result)

    def _rooted(self, operation: str, named: dict[str, Any], result: Any) -> Any:
        """Set the origin of a result's fixed axes: that of an operand's axis as long, the only one, or this."""
        results = result if isinstance(result, list) else [result]
        if not any(run.unrooted for value in values_in(results) for axis in value.axes for run in axis):
            return result
        entering = [axis for value in values_in(named) for axis in value.axes]
        runs = [run for axis in entering for run in self.atoms.resolve(axis)]
        roots = {run.outer: run.root for run in runs if run.root is not None}
        alone = next(iter(roots.values())) if len({*roots.values()}) == 1 else f"what {operation} puts out"

        def rooted(run: Run) -> Run:
            return replace(run, root=roots.get(run.outer, alone)) if run.unrooted else run

        told = [
            replace(value, axes=tuple(tuple(map(rooted, axis)) for axis in value.axes))
            if isinstance(value, Value)
            else value
            for value in results
        ]
        return told if isinstance(result, list) else told[0]

    def _apply(self, node: Any, operation: str, named: dict[str, Any]) -> Any:
        """Apply an operation's channel rule to its arguments and return the result."""
        if _known_number(node) is not node or not (any(True for _ in values_in(named)) or self.shapes(node)):
            # A number made of numbers, or read from a tensor, whose scale stays.
            for value in values_in(named) if operation == "item" else ():
                self.scales.pin(value.scale)
            return node.meta.get("val")
        if operation in self._opaque or operation not in RULES:
            return keep_full_width(self, node, named)
        if self.follow_norms:
            where = f"{self.operation(node)}{place_of(node)}"
            shape = next(iter(self.shapes(node)), ())
            self._individuated += [(axis, where) for axis in individuated(operation, named, shape)]
        self.placed.clear()
        result = RULES[operation](self, node, named)
        self._spread_rearranged(operation, named, list(values_in(result)))
        if linear := linear_in(operation, named):
            if isinstance(result, Value):
                return replace(result, linear_in=linear)
            return [replace(value, linear_in=linear) for value in result]
        return result

    def _spread_rearranged(self, operation: str, named: dict[str, Any], results: list[Value]) -> None:
        """Let parameters carry channels that enter a rule's result without a role assigned by the rule."""
        if operation in AFFINE or operation in MIXING or operation in SIZES_ALONE:
            return
        kept = {
            one.name
            for value in results
            for one in (value, value.turned, value.squeezed, value.rows_of)
            if one is not None
        }
        operands = list(values_in(named))
        for value in operands[:1] if operation.endswith("_as") else operands:
            value = value.turned or value
            if results and value.name not in self.placed | kept:
                self.spread(value)

    def _taken_apart(self, node: Any, operation: str, named: dict[str, Any]) -> Any:
        """Visit the decomposition of a composite operation that has no channel rule."""
        if (parts := parts_of(node)) is not None:
            self._inside += 1
            result = self._visit(parts, list(values_in(list(named.values()))))
            self._inside -= 1
            return result
        if getattr(node.target, "__module__", "").startswith("torch._functorch"):
            raise UnsupportedOperation(
                f"torch.vmap cannot be followed{place_of(node)}; write it out over one more dimension, as torch.einsum "
                "or torch.bmm do, or train the network at a fixed size."
            )
        raise UnsupportedOperation(
            f"no channel rule for {node.target}{place_of(node)}; let the channels that enter it keep their full "
            f"width: python -m growlab ... opaque=[{operation}], python -m growlab widths ... --keep-full "
            f"{operation}, or trace(..., opaque=[{operation!r}])."
        )

    def _with_makers(self, operation: str, args: Mapping[str, Any], result: Any) -> Any:
        """Set the layers that made a result to those that made its operands."""
        operands = list(values_in(args))
        made_by = frozenset[str]().union(*(value.made_by for value in operands))
        mixed = operation in self._opaque or operation in MIXING or operation not in RULES
        if mixed and any(self._is_matrix(value) for value in operands):
            # An affine map: its rule has set `made_by`, if it is a layer of the graph.
            self._followed |= made_by
            return result
        if isinstance(result, Value):
            return replace(result, made_by=made_by)
        if isinstance(result, list):
            return [replace(v, made_by=made_by) if isinstance(v, Value) else v for v in result]
        return result

    def _is_matrix(self, value: Value) -> bool:
        value = value.turned or value
        return value.name is not None and value.name not in self.buffers and len(value.shape) > 1

    def _is_fixed(self, args: Mapping[str, Any]) -> bool:
        runs = [run for value in values_in(args) for axis in value.axes for run in self.atoms.resolve(axis)]
        return all(run.atom is None for run in runs)


def _known_number(node: Any) -> Any:
    """Return the number that a node stands for, or the node itself."""
    return value if isinstance(value := node.meta.get("val"), (int, float)) else node

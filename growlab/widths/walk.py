"""Interpret an exported program with axes in place of numbers, and build the width graph from what its rules record."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from growlab.widths.atoms import Run, Runs, fixed
from growlab.widths.groups import Axis, ChannelLength, ChannelNorm, Group, Part, Role, WidthGraph, layer_name, owner_of
from growlab.widths.places import written_sizes
from growlab.widths.predictions import Call, computes, name_of, numbers_of
from growlab.widths.program import (
    UnsupportedOperation,
    angles_from,
    bases_of,
    canonical_names,
    constants_of,
    is_dead,
    is_pointwise,
    line_of_node,
    module_of,
    operation_of,
    parts_of,
    place_of,
    shapes_of,
    sizes_from_data,
)
from growlab.widths.rules.elementwise import broadcast
from growlab.widths.rules.norms import GAIN_CHANNEL, LENGTHS, basis_dependent
from growlab.widths.rules.registry import AFFINE, MIXING, RULES, keep_full_width, linear_in, overwritten
from growlab.widths.rules.shapes import SIZES_ALONE
from growlab.widths.values import NormCall, Record, Value, values_in

#: Reason why a network's output channels keep their width.
OUTPUT = "the network's output"
_INPUT = "the network's input"
# Operations that run a subprogram under a setting; the subprogram's inputs are their last arguments.
_SETTINGS = ("wrap_with_autocast", "wrap_with_set_grad_enabled")


class Walk:
    """Visit every node of an exported program once, in forward order, and apply its channel rule.

    `plain` has the names of modules' plain tensors that are constants of the program, `updated` those of buffers and
    plain tensors that the forward writes to; `several_outputs` is True if the output in any mode is not a single
    tensor. `settings` are arguments of `Record`, which the rules fill.
    """

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        model: nn.Module,
        keep_full: frozenset[str] = frozenset(),
        plain: frozenset[str] = frozenset(),
        updated: frozenset[str] = frozenset(),
        several_outputs: bool = False,
        **settings: Any,
    ) -> None:
        self._program, self._keep_full, self._plain = program, keep_full, plain
        self._constants = constants_of(program)
        self.record = Record(model, self._constants, plain, **settings)
        self.record.untrained -= updated
        self._several = several_outputs or not program.call_spec.out_spec.is_leaf()
        signature = program.graph_signature
        lifted = signature.inputs_to_lifted_tensor_constants
        constants = {node: name for node, name in lifted.items() if name in plain}
        self._names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers, **constants}
        self._canonical = canonical_names(model)
        self._unsaved = frozenset(signature.non_persistent_buffers)
        self._known: dict[str, Value] = {}
        self._visited: list[tuple[str, tuple[float, ...], list[Value], Any]] = []
        # Nesting depth of the composite operations that are being visited.
        self._inside = 0

    def run(self) -> WidthGraph:
        """Visit the program and return the width graph."""
        record = self.record
        output_class = record.scales.new()
        for value in values_in(self._visit(self._program.graph_module, [])):
            output_class = record.scales.union(output_class, value.scale)
            record.reaching |= value.made_by
            record.freeze_all(value.axes, OUTPUT)
        for name in self._plain & {each for x in record.norms for each in (x.running_mean, x.running_var)}:
            # Training may change plain tensors, which are not in any state_dict.
            record.freeze_all(record.parameters[name], f"{name} is neither a parameter nor a buffer")
        record.tie_heads_to_streams()
        if self._several:
            _pin_shared_outputs(record, output_class)
        self._graph, self._groups = _collect(record, output_class, self._unsaved)
        return self._graph

    @cached_property
    def calls(self) -> list[Call]:
        """Operations with their predicted shapes, once `run` has returned."""
        names, norms = self._groups, [norm for norm in self._graph.channel_norms if norm.summed]
        return [
            Call(
                operation,
                numbers,
                tuple(tuple(names.axis(axis, "fixed") for axis in value.axes) for value in values),
                tuple(norm for norm in norms if norm.name == module_of(node)),
                line_of_node(node),
                sizes_from_data(node),
            )
            for operation, numbers, values, node in self._visited
            if all(names.cover(axis) for value in values for axis in value.axes)
        ]

    def _visit(self, part: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Visit the program, or a subprogram that is called with these inputs, and return its outputs."""
        record, values = self.record, dict[Any, Any]()
        outer, record.values = record.values, values
        arguments = iter(inputs)
        for node in part.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(arguments) if inputs else self._placeholder(node)
            elif node.op == "get_attr":
                values[node] = content = getattr(part, node.target)
                if isinstance(content, Tensor):
                    values[node] = record.unit(tuple(content.shape), map(fixed, content.shape))
            elif node.op == "call_function" and is_dead(node):
                values[node] = record.fixed_outputs(node)
                if is_pointwise(node):
                    # The result is not used, but the operation runs: its operands must match at any width.
                    broadcast(record, node, list(values_in([values[each] for each in node.all_input_nodes])))
            elif node.op == "call_function":
                values[node] = result = self._call(node, values)
                for base in bases_of(node):
                    values[base] = overwritten(values[base], result)
                if not self._inside and computes(operation := operation_of(node)):
                    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), _known_number)
                    numbers = numbers_of(node.target, args, kwargs, self._constants)
                    self._visited.append((name_of(operation), numbers, list(values_in(result)), node))
            elif node.op == "output":
                record.values = outer
                return torch.fx.node.map_arg(node.args, lambda n: values[n])[0]
        return None

    def _placeholder(self, node: Any) -> Any:
        value, record = node.meta.get("val"), self.record
        if not isinstance(value, Tensor):
            return value
        shape = tuple(int(size) for size in value.shape)
        name = self._names.get(node.name)
        name = self._canonical.get(name, name) if name is not None else None
        if name is not None and node.users:
            record.used.add(name)
        if name in self._known:
            return self._known[name]
        if name is None:
            root = self._origin_of(node)
            return record.unit(shape, [fixed(size, root) for size in shape])
        scale = record.scales.new(unit=True)
        # A dimension of size 1 may be broadcast, so it stays.
        axes = [record.atoms.new(size) if size > 1 else fixed(size) for size in shape]
        record.parameters[name], record.roles[name] = axes, [None] * len(axes)
        self._known[name] = Value(shape, tuple(axes), scale, name)
        if name in self._unsaved | self._plain and len(axes) == 1 and angles_from(node):
            record.frequencies.add(name)
        return self._known[name]

    def _origin_of(self, node: Any) -> str:
        """Describe the origin of a tensor that is not a parameter or buffer, for reasons why channels stay."""
        lifted = self._program.graph_signature.inputs_to_lifted_tensor_constants.get(node.name)
        if lifted is None:
            return _INPUT
        modules = self.record.model.named_modules()
        attributes = {f"{path}.{name}".lstrip(".") for path, module in modules for name in vars(module)}
        return f"{lifted} is neither a parameter nor a buffer" if lifted in attributes else "numbers in the code"

    def _call(self, node: Any, values: Mapping[Any, Any]) -> Any:
        operation = operation_of(node)
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
        if operation in _SETTINGS:
            part = next(i for i, arg in enumerate(args) if isinstance(arg, torch.fx.GraphModule))
            return self._visit(args[part], args[part + 1 :])
        schema = getattr(node.target, "_schema", None)
        names = ["a", "b"] if schema is None else [argument.name for argument in schema.arguments]
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        operands = list(values_in(named))
        if _known_number(node) is not node or not (operands or shapes_of(node)):
            # A number, computed from numbers or read from a tensor, whose scale then must not change.
            if operation == "item":
                self.record.pin(operands)
            return self._with_makers(operation, operands, node.meta.get("val"))
        has_rule = operation in RULES or operation in self._keep_full
        if not has_rule and any(self.record.grows(axis) for value in operands for axis in value.axes):
            if not is_pointwise(node) or len(shapes_of(node)) > 1:
                return self._decomposed(node, operation, named)
            # Its rule fits all element-wise functions of several operands.
            operation = "where"
        result = self._rooted(operation, operands, self._apply(node, operation, named, operands))
        return result if operation in AFFINE else self._with_makers(operation, operands, result)

    def _rooted(self, operation: str, operands: Sequence[Value], result: Any) -> Any:
        """Set the origin of a result's fixed axes: that of an equally long axis of an operand, else the common one.

        If the operands have no common origin, it is this operation.
        """
        if not any(run.unrooted for value in values_in(result) for axis in value.axes for run in axis):
            return result
        resolve = self.record.atoms.resolve
        runs = [run for value in operands for axis in value.axes for run in resolve(axis)]
        roots = {run.outer: run.root for run in runs if run.root is not None}
        common = next(iter(roots.values())) if len({*roots.values()}) == 1 else f"what {operation} puts out"

        def rooted(axis: Runs) -> Runs:
            return tuple(replace(r, root=roots.get(r.outer, common)) if r.unrooted else r for r in axis)

        return _map_values(lambda value: replace(value, axes=tuple(map(rooted, value.axes))), result)

    def _apply(self, node: Any, operation: str, named: dict[str, Any], operands: Sequence[Value]) -> Any:
        """Apply an operation's channel rule to its arguments and return the result."""
        record = self.record
        if operation in self._keep_full or operation not in RULES:
            return keep_full_width(record, node, named)
        if record.follow_norms:
            where = f"{operation_of(node)}{place_of(node)}"
            shape = next(iter(shapes_of(node)), ())
            record.basis_dependent += [(axis, where) for axis in basis_dependent(operation, named, shape)]
        record.placed.clear()
        result = RULES[operation](record, node, named)
        if not (operation in AFFINE or operation in MIXING or operation in SIZES_ALONE):
            self._spread_rearranged(operands[:1] if operation.endswith("_as") else operands, result)
        linear = linear_in(operation, named)
        return _map_values(lambda value: replace(value, linear_in=linear), result) if linear else result

    def _spread_rearranged(self, operands: Sequence[Value], result: Any) -> None:
        """Let parameters carry channels that enter a rule's result without a role assigned by the rule."""
        results = list(values_in(result))
        sources = (source for v in results for source in (v, v.turned, v.squeezed, v.rows_of) if source is not None)
        passed_on = {source.name for source in sources}
        for value in operands if results else ():
            value = value.turned or value
            if value.name not in self.record.placed | passed_on:
                self.record.spread(value)

    def _decomposed(self, node: Any, operation: str, named: dict[str, Any]) -> Any:
        """Visit the decomposition of a composite operation that has no channel rule."""
        if (parts := parts_of(node)) is not None:
            self._inside += 1
            result = self._visit(parts, list(values_in(list(named.values()))))
            self._inside -= 1
            return result
        if getattr(node.target, "__module__", "").startswith("torch._functorch"):
            raise UnsupportedOperation(
                f"torch.vmap cannot be traced{place_of(node)}; replace it by operations on one more dimension, such as "
                "torch.einsum or torch.bmm, or train the network at a fixed size."
            )
        raise UnsupportedOperation(
            f"no channel rule for {node.target}{place_of(node)}; keep the channels that enter it at full width: "
            f"python -m growlab ... keep_full=[{operation}], python -m growlab widths ... --keep-full {operation}, "
            f"or trace(..., keep_full=[{operation!r}])."
        )

    def _with_makers(self, operation: str, operands: Sequence[Value], result: Any) -> Any:
        """Set the layers that made a result to those that made its operands."""
        made_by = frozenset[str]().union(*(value.made_by for value in operands))
        mixed = operation in self._keep_full or operation in MIXING or operation not in RULES
        matrices = (value.turned or value for value in operands)
        if mixed and any(self.record.is_weight(value) and len(value.shape) > 1 for value in matrices):
            # An affine map: its rule has set `made_by`, if it is a layer of the graph.
            self.record.followed |= made_by
            return result
        return _map_values(lambda v: v if v.made_by == made_by else replace(v, made_by=made_by), result)


def _map_values(function: Any, result: Any) -> Any:
    """Apply a function to a Value, or to all that a list contains."""
    if isinstance(result, list):
        return [_map_values(function, item) for item in result]
    return function(result) if isinstance(result, Value) else result


def _known_number(node: Any) -> Any:
    """Return the number that a node stands for, or the node itself."""
    return value if isinstance(value := node.meta.get("val"), (int, float)) else node


def _pin_shared_outputs(record: Record, output_class: int) -> None:
    """Pin the scale of the outputs unless it can be changed at the modules that produce them.

    It cannot for a bare parameter, nor if another layer or norm reads them: a factor would reach its output twice.
    """
    find = record.scales.find
    read = [*(layer.scale_in for layer in record.layers), *(norm.scale_in for norm in record.norms)]
    if find(output_class) in set(map(find, read)):
        record.scales.pin(output_class)
        return
    modules, names = dict(record.model.named_modules()), canonical_names(record.model)
    for layer in record.layers:
        if find(layer.scale_out) != find(output_class):
            continue
        for path in record.callers[layer.weight]:
            parameters = {names[f"{path}.{name}" if path else name] for name, _ in modules[path].named_parameters()}
            length, _ = record.weight_norms.get(layer.weight, (None, 0))
            if not parameters <= {layer.weight, layer.bias, length}:
                record.scales.pin(output_class)


class _Names:
    """Names of the groups that atoms become; rewrites axes in terms of groups."""

    def __init__(self, record: Record) -> None:
        self._resolve = record.atoms.resolve
        self.by_atom: dict[int, str] = {}
        # Layers in forward order, then other tensors that produce channels.
        for name in dict.fromkeys([layer.weight for layer in record.layers] + list(record.parameters)):
            for axis, role in zip(record.parameters[name], record.roles[name], strict=True):
                for run in self._resolve(axis) if role == "out" else ():
                    if run.atom is not None and run.atom not in self.by_atom:
                        base = owner_of(name)
                        taken = sum(name == base or name.startswith(f"{base}#") for name in self.by_atom.values())
                        self.by_atom[run.atom] = base if not taken else f"{base}#{taken + 1}"

    def parts(self, axis: Runs) -> tuple[Part, ...]:
        def part(run: Run) -> Part:
            if run.atom is None:
                return Part(None, run.outer * run.inner)
            return Part(self.by_atom[run.atom], run.outer, run.inner)

        return tuple(map(part, self._resolve(axis)))

    def axis(self, axis: Runs, role: Role = "out") -> Axis:
        return Axis(self.parts(axis), role)

    def cover(self, axis: Runs) -> bool:
        """Return True if parameters produce all channels of an axis."""
        return all(run.atom is None or run.atom in self.by_atom for run in self._resolve(axis))

    def groups_on(self, axis: Runs) -> tuple[str, ...]:
        atoms = (run.atom for run in self._resolve(axis) if run.atom is not None)
        return tuple(dict.fromkeys(self.by_atom[atom] for atom in atoms if atom in self.by_atom))


def _collect(record: Record, output_class: int, unsaved: frozenset[str]) -> tuple[WidthGraph, _Names]:
    """Build the width graph from what rules have recorded; return it with the names of its groups."""
    atoms, find = record.atoms, record.scales.find
    _place_lengths(record)
    atoms.settle()
    _freeze_norms_that_need_several_weights(record)
    _freeze_what_no_rule_placed(record)
    _freeze_what_constants_consume(record)
    atoms.freeze_single()
    untrained = _constants(record, unsaved)
    names = _Names(record)
    scaled = {name for x in record.layers for name in (x.weight, x.bias)}
    scaled |= {name for x in record.norms for name in (x.weight, x.bias, x.running_mean, x.running_var)}
    scaled |= {length for length, _ in record.weight_norms.values()}
    axes = {
        name: tuple(
            names.axis(axis, (role or "fixed") if record.grows(axis) else "fixed")
            for axis, role in zip(runs, record.roles[name], strict=True)
        )
        for name, runs in record.parameters.items()
        if name in scaled or any(map(record.grows, runs))
    }
    fixed_because = _reasons(record, axes)
    radii = [_radius(record, module, names.groups_on(axis)) for module, axis in record.radii.items()]
    axes |= {radius.length: () for radius in radii if radius.length is not None}
    constants = {name: _varies_along(record, name, axes[name]) for name in untrained}
    basis_dependent = dict.fromkeys((group for groups in constants.values() for group in groups), "is constant")
    for axis, where in record.basis_dependent:
        for group in names.groups_on(axis):
            basis_dependent.setdefault(group, where)
    inputs = [
        (layer_name(layer.weight), atoms.length(axis), axis)
        for layer in record.layers
        for axis in record.parameters[layer.weight][1:2]
    ]
    sizes = (
        [(module, n, names.parts(axis)) for module, n, axis in asked if record.grows(axis) and names.cover(axis)]
        for asked in (record.sizes, inputs)
    )
    layers = (
        replace(
            x,
            scale_in=find(x.scale_in),
            scale_out=find(x.scale_out),
            is_output=x.weight in record.reaching - record.followed,
            callers=tuple(record.callers.get(x.weight, ())),
        )
        for x in record.layers
    )
    graph = WidthGraph(
        {name: Group(name, atoms.sizes[atom], atoms.below[atom]) for atom, name in names.by_atom.items()},
        axes,
        tuple(layers),
        tuple(replace(norm, scale_in=find(norm.scale_in)) for norm in record.norms),
        record.scales.units(),
        find(output_class),
        fixed_because,
        tuple(radius for radius in radii if radius.groups),
        basis_dependent,
        written=written_sizes(record.model, *sizes),
        channel_norms=_norms_over_channels(record, names),
        attentions=tuple(replace(a, axis=names.axis(x)) for x, a in record.attentions if record.grows(x)),
        tied_outputs=tuple(sorted(name for name in record.reaching if record.roles[name] == [None, "out"])),
        offsets={name: offset for name, offset in record.offsets.items() if name in axes},
        constants=constants,
        weight_norms=record.weight_norms,
    )
    return graph, names


def _place_lengths(record: Record) -> None:
    """Give g of each weight normalisation the role of the dimension that it runs over."""
    for name, (length, dim) in record.weight_norms.items():
        record.roles[length] = ["fixed"] * len(record.roles[length])
        if dim >= 0:
            record.roles[length][dim] = record.roles[name][dim]


def _reasons(record: Record, axes: Mapping[str, Sequence[Axis]]) -> dict[str, str]:
    """Return the reason why each layer that keeps its width does, by module path."""
    atoms, because = record.atoms, dict[str, str]()
    named = [(layer_name(name), axis) for name, runs in record.parameters.items() for axis in runs]
    # Atom -> the layer whose tensors it was ever part of.
    owners = {atom: name for name, axis in reversed(named) for atom in atoms.parts(axis)}

    def why(axis: Runs) -> str:
        """Return the reason why an axis was frozen, followed by that of the axis which caused it."""
        reason, root = atoms.why_fixed(axis), atoms.root(axis)
        if root is None or isinstance(root, str):
            return f"{reason}: {root}" if root else reason
        cause = atoms.frozen_because[root]
        return f"{reason}: {owners[root]} ({cause})" if root in owners else f"{reason}: {cause}"

    lengths = {length for length, _ in record.weight_norms.values()}
    parameters = {name: runs for name, runs in record.parameters.items() if name not in lengths}
    for name, runs in parameters.items():
        makes = name.endswith("weight") or name in record.weight_norms
        if makes and record.roles[name][:1] == ["out"] and not record.grows(runs[0]):
            because[owner_of(name)] = why(runs[0]) or "a single channel"
    for name, runs in parameters.items():
        # Recurrent layers and bare parameters have weights of other names than `weight`.
        path = name.rpartition(".")[0] if "weight" in name and name not in record.buffers else name
        path = owner_of(name) if name in record.weight_norms else path
        # Produced channels come first: their reason explains more than that of the inputs.
        axes_by_role = sorted(zip(record.roles[name], runs, strict=True), key=lambda entry: entry[0] != "out")
        reason = next(filter(None, (why(axis) for _, axis in axes_by_role)), "") if len(runs) > 1 else ""
        if reason and path not in because and not any(a.groups for a in axes.get(name, ())):
            because[path] = reason
    return {path: _by_parametrization(record.model, path, reason) for path, reason in because.items()}


def _by_parametrization(model: nn.Module, path: str, reason: str) -> str:
    """Name the parametrization if it is the reason that a weight keeps its width, not the network around it."""
    owner, parametrized, name = path.partition("parametrizations.")
    if not parametrized or reason == OUTPUT or ": " in reason:
        return reason
    kind = type(model.get_submodule(f"{owner}parametrizations.{name.partition('.')[0]}.0")).__name__
    why = f"computes a weight from it ({reason}): remove it until growth has ended"
    return f"the parametrization {kind.lstrip('_')} {why}"


def _freeze_norms_that_need_several_weights(record: Record) -> None:
    """Freeze channels whose statistics growth cannot reweight.

    Growth applies the same weights to all statistics that a module and its submodules take, so these must run over the
    same channels.
    """
    for call in record.norm_calls:
        inside = f"{call.path}." if call.path else ""
        for other in record.norm_calls:
            same = other.path == call.path
            if not (same or other.path.startswith(inside)) or _same_call(record, call, other):
                continue
            reason = f"{call.operation} is called outside of its own module"
            if same:
                reason = f"{call.path or 'the network'} normalises several streams of channels"
            for frozen in (call, other) if same else (call,):
                record.atoms.freeze(frozen.axis or (), reason)


def _same_call(record: Record, left: NormCall, right: NormCall) -> bool:
    if left.axis is None or right.axis is None:
        return left.axis is right.axis
    # A mean over another dimension, which does not grow, needs no weights.
    over_others = None not in (left.mean_over, right.mean_over) and left.mean_over != right.mean_over
    axes = [record.atoms.resolve(axis) for axis in (left.axis, right.axis)]
    return axes[0] == axes[1] or (over_others and not all(map(record.grows, axes)))


def _norms_over_channels(record: Record, names: _Names) -> tuple[ChannelNorm, ...]:
    norms: dict[ChannelNorm, None] = {}
    for call in record.norm_calls:
        axis = names.axis(call.axis or ())
        if axis.groups:
            tensors = call.names["weight"], call.names["bias"]
            norms[ChannelNorm(call.path, axis, *tensors, call.mean_over, call.summed)] = None
    return tuple(norms)


def _radius(record: Record, module: str, groups: tuple[str, ...]) -> ChannelLength:
    lengths = (f"{module}.{name}" if module else name for name in LENGTHS)
    length = next((name for name in lengths if record.parameters.get(name) == []), None)
    return ChannelLength(module, groups, length, bool(getattr(record.model.get_submodule(module), GAIN_CHANNEL, False)))


def _freeze_what_no_rule_placed(record: Record) -> None:
    for name, runs in record.parameters.items():
        for axis, role in zip(runs, record.roles[name], strict=True):
            if role is None:
                unclear = "is used in a way that growlab has no rule for"
                why = unclear if name in record.used else "is not used in the forward on this example"
                record.atoms.freeze(axis, f"{name} {why}")
    resolve = record.atoms.resolve
    produced = {
        run.atom
        for name, runs in record.parameters.items()
        for axis, role in zip(runs, record.roles[name], strict=True)
        if role == "out" and name not in record.buffers
        for run in resolve(axis)
    }
    for name, runs in record.parameters.items():
        for run in (run for axis in runs for run in resolve(axis)):
            if run.atom is not None and run.atom not in produced:
                record.atoms.freeze((run,), f"{name} consumes channels that no layer produces")


def _freeze_what_constants_consume(record: Record) -> None:
    """Freeze channels read by float8 tensors or by untrained ones outside of layers: growth cannot extend them."""
    layers = {layer.weight for layer in record.layers} | record.gains
    for name in record.untrained & record.parameters.keys():
        path, _, attribute = name.rpartition(".")
        dtype = getattr(record.model.get_submodule(path), attribute).dtype
        is_float8 = dtype.is_floating_point and dtype.itemsize == 1
        for axis, role in zip(record.parameters[name], record.roles[name], strict=True):
            if role == "in" and (is_float8 or name not in layers):
                reason = f"has dtype {dtype}, which cannot be scaled" if is_float8 else "is not trained"
                record.atoms.freeze(axis, f"{name} takes these channels and {reason}")


def _constants(record: Record, unsaved: frozenset[str]) -> list[str]:
    """Return tensors that grow but are not trained and only accompany channels; pin the scale of what they scale.

    Running statistics do not count, nor does a frozen layer whose inputs grow.
    """
    untrained, grows = record.untrained, record.grows
    consumes = {
        name
        for name, runs in record.parameters.items()
        if any(r == "in" and grows(a) for r, a in zip(record.roles[name], runs, strict=True))
    }
    frozen = [x for x in record.layers if x.weight in consumes & untrained]
    trained = (norm for norm in record.norms if not {norm.weight, norm.bias} & untrained)
    statistics = {name for norm in trained for name in (norm.running_mean, norm.running_var)}
    # Statistics that the forward does not update and no state_dict has must not change.
    statistics -= unsaved & untrained
    others = {name for x in frozen for name in (x.weight, x.bias)} | record.gains | statistics
    constants = [n for n, runs in record.parameters.items() if n in untrained - others and any(map(grows, runs))]
    for layer in record.layers:
        if {layer.weight, layer.bias} & set(constants):
            record.scales.pin(layer.scale_out)
    for norm in record.norms:
        if {norm.weight, norm.bias, norm.running_mean, norm.running_var} & set(constants):
            record.scales.pin(norm.scale_in)
    return constants


def _varies_along(record: Record, name: str, axes: Sequence[Axis]) -> tuple[str, ...]:
    """Return the groups along whose channels the entries of a tensor differ; on the meta device all of its groups."""
    path, _, attribute = name.rpartition(".")
    tensor, groups = getattr(record.model.get_submodule(path), attribute), dict[str, None]()
    for dim, axis in enumerate(axes):
        if axis.groups and (tensor.is_meta or bool((tensor != tensor.narrow(dim, 0, 1)).any())):
            groups.update(dict.fromkeys(axis.groups))
    return tuple(groups)

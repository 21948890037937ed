"""Tensors of a traced program over axes, and the record of layers, norms and sizes that channel rules fill."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from growlab.widths.atoms import STAYING, Atoms, Run, Runs, ScaleClasses, fixed
from growlab.widths.groups import VARIANCE_OF_GATES, Attention, Axis, Layer, Norm, Role, layer_name
from growlab.widths.program import as_computed, module_of, operation_of, rows_of, shape_of, shapes_of

Heads = Literal["dimensions", "number", "values", "sizes"]
#: Reason why dimensions that windows slide over keep their size.
SLID_OVER = "neighbouring channels are pooled or convolved"
_AS_WIDE = "attention as wide as its stream"
# Roles of an embedding's dimensions.
_TABLE = [None, "out"]


@dataclass(frozen=True)
class Value:
    """A tensor of the traced program.

    Attributes:
        shape: shape at full width.
        axes: one axis for each dimension.
        scale: its scale class.
        name: parameter or buffer name, or None for activations.
        linear_in: names of the parameters of one layer that it is linear in, if it is a layer's output, scaled,
            rearranged or summed with itself.
        made_by: weights of the affine layers that it is computed from with no other affine layer in between.
        turned: the parameter that it is the transpose of (last two dimensions), or None.
        squeezed: the parameter that it is a reshape of, if all its users restore the shape; or None.
        rows_of: the parameter that it is a slice of rows of, if only linear layers read it; or None.
    """

    shape: tuple[int, ...]
    axes: tuple[Runs, ...]
    scale: int
    name: str | None = None
    linear_in: frozenset[str] = frozenset()
    made_by: frozenset[str] = frozenset()
    turned: "Value | None" = None
    squeezed: "Value | None" = None
    rows_of: "Value | None" = None


def values_in(argument: Any) -> Iterator[Value]:
    """Yield every Value in an argument, including those in lists and dicts."""
    if isinstance(argument, Value):
        yield argument
    elif isinstance(argument, (dict, list, tuple)):
        for item in argument.values() if isinstance(argument, dict) else argument:
            yield from values_in(item)


@dataclass(frozen=True)
class NormCall:
    """A call that takes statistics over channels (`axis`; None: growth does not reweight them); see `ChannelNorm`."""

    path: str
    operation: str
    axis: Runs | None = None
    names: Mapping[str, str | None] = field(default_factory=dict)
    mean_over: int | None = None
    summed: bool = False


class Record:
    """State of a trace that rules read and write, in terms of atoms.

    Args:
        model: the network at full width.
        constants: tensors that the forward creates from numbers, by node.
        plain: names of plain tensors of modules that are constants of the program.
        moved: node name -> how many dimensions to the left of the last one a reshape's growing dimension is.
        heads: part of attention that may grow: head "dimensions", where that can be exact; the "number" of heads;
            "values", whose channels pass hand-written products; or "sizes": dimensions in such products too, for a
            network whose code computes its scale from them.
        tied: paths of attention modules whose heads together are assumed to have the width of their stream.
        weighted_norms: True if channels that normalisations take their statistics over may grow.
        follow_norms: see `trace`.
    """

    def __init__(
        self,
        model: nn.Module,
        constants: Mapping[Any, Tensor],
        plain: frozenset[str] = frozenset(),
        moved: Mapping[str, int] | None = None,
        heads: Heads = "dimensions",
        tied: frozenset[str] = frozenset(),
        weighted_norms: bool = True,
        follow_norms: bool = False,
    ) -> None:
        self.atoms, self.scales = Atoms(), ScaleClasses()
        self.model, self.moved, self.heads, self.follow_norms = model, moved or {}, heads, follow_norms
        self._constants, self._tied, self._weighted_norms = constants, tied, weighted_norms
        #: Names of buffers, and of plain tensors of modules that the forward does not write to.
        self.buffers = {name for name, _ in model.named_buffers()} | plain
        trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        #: Tensors that training does not change; in a network that is frozen as a whole, only the buffers.
        self.untrained = self.buffers | {n for n, t in trained.items() if not t and any(trained.values())}
        #: Axes and roles of the dimensions of every parameter and buffer, and names of those that any operation reads.
        self.parameters: dict[str, list[Runs]] = {}
        self.roles: dict[str, list[Role | None]] = {}
        self.used: set[str] = set()
        self.layers: list[Layer] = []
        #: Paths of the modules that apply each weight.
        self.callers: dict[str, dict[str, None]] = {}
        #: Weights that another layer follows, and weights that the output depends on with no other layer in between.
        self.followed: set[str] = set()
        self.reaching: set[str] = set()
        #: Gains and biases in front of a layer tied to an embedding, which consume the channels instead of its weight.
        self.gains: set[str] = set()
        self.norms: list[Norm] = []
        self.norm_calls: list[NormCall] = []
        self.offsets: dict[str, float] = {}
        #: See `WidthGraph.weight_norms`.
        self.weight_norms: dict[str, tuple[str, int]] = {}
        self.attentions: list[tuple[Runs, Attention]] = []
        self.radii: dict[str, Runs] = {}
        self.basis_dependent: list[tuple[Runs, str]] = []
        #: Module path, size and axis of every size that the forward asks for.
        self.sizes: list[tuple[str, int, Runs]] = []
        #: Buffers that angles are computed from, whose values are only valid at their size and in their order.
        self.frequencies: set[str] = set()
        #: Paths of modules that compute attention.
        self.attending: set[str] = set()
        #: True if activations are multiplied with each other outside of `scaled_dot_product_attention`.
        self.multiplies = False
        #: Parameters to whose dimensions the current rule has assigned roles.
        self.placed: set[str] = set()
        #: Values by node of the (sub)program that is being visited.
        self.values: dict[Any, Any] = {}
        self._calls: Counter[str] = Counter()
        self._choices: dict[str, tuple[str, Runs, int]] = {}
        self._as_wide: list[tuple[Runs, Runs]] = []

    def unit(self, shape: tuple[int, ...], axes: Iterable[Runs]) -> Value:
        """Return an activation in a scale class of its own, whose scale must not change."""
        return Value(shape, tuple(axes), self.scales.new(unit=True))

    def fixed_outputs(self, node: Any) -> Any:
        """Return a node's outputs as activations of fixed width; None if it computes no tensor."""
        return as_computed(node, [self.unit(shape, map(fixed, shape)) for shape in shapes_of(node)])

    def grows(self, axis: Runs) -> bool:
        """Return True if any part of an axis may grow."""
        return any(run.atom is not None for run in self.atoms.resolve(axis))

    def atoms_of_matrices(self) -> set[int | None]:
        """Return the atoms on the axes of trained parameters of two or more dimensions."""
        matrices = (runs for name, runs in self.parameters.items() if len(runs) > 1 and name not in self.untrained)
        return {run.atom for runs in matrices for axis in runs for run in self.atoms.resolve(axis)}

    def freeze_all(self, axes: Iterable[Runs], reason: str) -> None:
        """Freeze several axes."""
        for axis in axes:
            self.atoms.freeze(axis, reason)

    def pin(self, values: Iterable[Value]) -> None:
        """Pin the scales of several values."""
        for value in values:
            self.scales.pin(value.scale)

    def is_table(self, weight: Value) -> bool:
        """Return True if a weight [V, C] is an embedding's table, whose columns produce the channels."""
        return weight.name is not None and self.roles[weight.name] == _TABLE

    def is_weight(self, value: Value) -> bool:
        """Return True for a parameter."""
        return value.name is not None and value.name not in self.buffers

    def consume(self, name: str, dimension: int | None = None) -> None:
        """Turn role "out" of a parameter into "in", along one dimension or all: it consumes the channels."""
        roles = self.roles[name]
        chosen = range(len(roles)) if dimension is None else [dimension % len(roles)]
        self.roles[name] = ["in" if role == "out" and i in chosen else role for i, role in enumerate(roles)]

    def follow(self, node: Any, x: Value, weight: Value, axes: Iterable[Runs]) -> Value:
        """Record a layer that is not part of the graph and return its output: layers before it are not last ones."""
        assert weight.name is not None
        self.followed |= x.made_by | {weight.name}
        self.scales.pin(x.scale)
        return replace(self.unit(shape_of(node), axes), made_by=frozenset((weight.name,)))

    def has_no_parts(self, node: Any) -> bool:
        """Return True if a module without submodules runs the node, so that growth can reweight its statistics."""
        path = module_of(node)
        return bool(path) and not any(self.model.get_submodule(path).children())

    def numbers(self, node: Any) -> list[int]:
        """Return the integers of a tensor that the forward creates from numbers; [] for any other tensor."""
        while node not in self._constants and operation_of(node).startswith("lift_fresh"):
            node = node.args[0]
        constant = self._constants.get(node)
        if constant is None or constant.is_meta or constant.dtype != torch.int64:
            return []
        return [int(entry) for entry in constant.flatten().tolist()]

    def note_offset(self, value: Value, offset: float) -> None:
        """Record a constant that the forward adds to a parameter [C] before applying it, as the 1 of a gain 1 + w."""
        if self.is_weight(value) and len(value.shape) == 1:
            self.offsets[str(value.name)] = offset

    def note_size(self, node: Any, size: int, axis: Runs, repeated: bool = True) -> None:
        """Record a size that the forward asks for, which its module may keep in an attribute.

        With `repeated`, also record the length of one run of channels, if the axis repeats it.
        """
        self.sizes.append((module_of(node), size, axis))
        runs = self.atoms.resolve(axis) if repeated else ()
        times = sum(run.outer for run in runs)
        single = {replace(run, outer=1) for run in runs} if times > 1 else ()
        if len(single) == 1:
            # Such as the number of heads, if the axis is batch size times heads.
            self.sizes.append((module_of(node), size // times, (*single,)))

    def note_sizes(self, node: Any, axes: Sequence[Runs]) -> None:
        """Record the sizes of all dimensions of a node's result; see `note_size`."""
        for size, axis in zip(shape_of(node), axes, strict=True):
            self.note_size(node, size, axis)

    def note_attention(self, node: Any) -> None:
        """Record that the node's module computes attention: its reshapes make heads and head dimensions."""
        self.attending.add(module_of(node))

    def note_width_of_stream(self, node: Any, rows: Runs, columns: Runs) -> None:
        """Record a layer of attention whose rows, for all heads together, are assumed to be as wide as the stream."""
        # Adapters of peft wrap the layer.
        path = module_of(node).removesuffix(".base_layer")
        multiple = self.atoms.length(rows) % self.atoms.length(columns) == 0
        if multiple and not {path, path.rpartition(".")[0]}.isdisjoint(self._tied):
            self._as_wide.append((rows, columns))

    def tie_heads_to_streams(self) -> None:
        """Unify the rows recorded by `note_width_of_stream` with the stream, so that both grow at the same rate."""
        for rows, columns in self._as_wide:
            heads, stream = self.atoms.resolve(rows), self.atoms.resolve(columns)
            if len(heads) == len(stream) == 1 and heads[0].atom == stream[0].atom:
                continue
            length = self.atoms.length(stream)
            times, rest = divmod(self.atoms.length(heads), length)
            if rest or not times:
                # Another layer that the same module runs.
                continue
            size = self.atoms.sizes[heads[0].atom] if len(heads) == 1 and heads[0].atom is not None else 0
            if times > 1 and size and length % size == 0:
                # Rows may have another order than the stream's channels: (heads, 3, head dimension).
                self.atoms.unify(stream, (Run(heads[0].atom, 1, length // size),), _AS_WIDE)
            else:
                self.atoms.unify(heads, self.atoms.nest(stream, times, 1), _AS_WIDE)

    def note_choice(self, node: Any, axis: Runs, remaining: int) -> None:
        """Record which output dimension of a reshape grows, and how many candidates remain to the left of it."""
        self._choices[node.name] = (module_of(node), axis, remaining)

    def summed_over(self) -> list[str]:
        """Names of reshapes whose growing dimension was frozen since attention sums or a window slides over it."""
        return [
            node
            for node, (module, axis, remaining) in self._choices.items()
            if remaining
            and self.atoms.frozen_whole(axis)
            # A layer of einops reshapes for its parent module.
            and (
                not self.attending.isdisjoint((module, module.rpartition(".")[0]))
                or self.atoms.why_fixed(axis) == SLID_OVER
            )
        ]

    def weight_axes(
        self, weight: Value, row_role: Role, column_role: Role, kernel: Sequence[Runs] = ()
    ) -> tuple[Runs, Runs]:
        """Set the roles of an affine map's weight and return its first two axes; the others are the kernel's."""
        rows, columns = weight.axes[:2]
        if weight.rows_of is not None and self.is_weight(weight.rows_of):
            weight, kernel = weight.rows_of, ()
        elif not self.is_weight(weight):
            what = "computed in the forward" if weight.name is None else "no parameter"
            self.freeze_all(weight.axes, f"a weight that is {what}")
            if weight.name is None:
                return rows, columns
        self.set_role(weight, 0, row_role)
        self.set_role(weight, 1, column_role)
        for index, axis in enumerate(kernel, start=2):
            self.set_role(weight, index, "fixed")
            self.atoms.unify(weight.axes[index], axis, "kernel")
        if column_role == "fixed":
            self.atoms.freeze(columns, "kernel")
        return rows, columns

    def parameter_axis(self, value: Value, role: Role, axis: Runs, dimension: int = 0) -> Runs:
        """Unify one dimension of a parameter or buffer with an axis and set its role; return the dimension's axis."""
        self.atoms.unify(value.axes[dimension], axis, f"a parameter next to channels {STAYING}")
        self.set_role(value, dimension, role)
        return value.axes[dimension]

    def set_role(self, value: Value, dimension: int, role: Role) -> None:
        """Set the role of one dimension of a parameter or buffer; a dimension of two roles is frozen."""
        if value.name is None:
            return
        self.placed.add(value.name)
        roles = self.roles[value.name]
        if roles[dimension] not in (None, role):
            self.atoms.freeze(value.axes[dimension], f"{value.name} both produces and consumes the channels")
        roles[dimension] = role

    def spread(self, value: Value) -> None:
        """Let any dimension of a parameter carry channels that the code rearranges or reads entry by entry.

        If the result is used as a weight, they are frozen like those of all computed weights.
        """
        if value.name in self.frequencies:
            self.freeze_all(value.axes, f"{value.name} is a table of as many channels")
        elif value.name is not None:
            for dimension, size in enumerate(value.shape):
                self.set_role(value, dimension, "out" if size > 1 else "fixed")

    def affine(
        self,
        node: Any,
        weight: Value,
        bias: Value | None,
        x: Value,
        axes: Sequence[Runs],
        channel_axis: int = -1,
        shape: tuple[int, ...] | None = None,
        depthwise: bool = False,
        transposed: bool = False,
        gates: int = 0,
    ) -> Value:
        """Record an affine map and return its output, whose channels are on `channel_axis`.

        `shape` is the output's if it is not the node's; for `depthwise`, `transposed` and `gates` see `Layer`.
        """
        shape, axes, weight = shape or shape_of(node), tuple(axes), weight.rows_of or weight
        if bias is not None and bias.rows_of is not None:
            self.atoms.unify(bias.axes[0], axes[channel_axis], "rows of a bias")
            self.set_role(bias.rows_of, 0, "out")
            bias = bias.rows_of
        elif bias is not None:
            self.parameter_axis(bias, "out", axes[channel_axis])
        if weight.name in self.buffers and bias is None:
            # A constant weight does not grow: it is not a layer, and the result is linear in the input.
            return Value(shape, axes, x.scale, made_by=x.made_by)
        self.followed |= x.made_by | weight.made_by
        if weight.name is None or (bias is not None and bias.name is None):
            self.scales.pin(x.scale)
        if weight.name is None:
            return self.unit(shape, axes)
        # Concatenated biases are not parameters of the layer: its output keeps its scale.
        scale = self.scales.new(unit=bias is not None and bias.name is None)
        bias_name = None if bias is None else bias.name
        # A tensor that is used twice has the same scales in both uses, because it can be rescaled in one way only.
        for other in self.layers:
            if other.weight == weight.name:
                self.scales.union(other.scale_in, x.scale)
            if other.weight == weight.name or (bias_name is not None and other.bias == bias_name):
                self.scales.union(other.scale_out, scale)
        if not any((other.weight, other.bias) == (weight.name, bias_name) for other in self.layers):
            layer = Layer(
                layer_name(weight.name), weight.name, bias_name, depthwise, x.scale, scale, transposed=transposed
            )
            variance = VARIANCE_OF_GATES if gates else 1.0
            self.layers.append(replace(layer, gates=gates, variance_per_entry=variance))
        names = frozenset(tensor for tensor in (weight.name, bias_name) if tensor is not None)
        self._calls.update(names)
        self.callers.setdefault(weight.name, {})[module_of(node)] = None
        return Value(shape, axes, scale, linear_in=names, made_by=frozenset((weight.name,)))

    def attend(self, query: Value, key: Value, value: Value, nodes: Sequence[Any]) -> bool:
        """Let the head dimension of attention grow if that can be exact; return True if it can.

        It can if queries and keys are each linear in a separate layer: new products cancel by the keys' signs, as new
        channels do by the signs of the weights that consume them, and the queries absorb the scale 1 / sqrt(d).
        """
        if self.heads == "sizes":
            return self.multiply(query, key, key.axes[-1], nodes)
        layers = (query.linear_in, key.linear_in, value.linear_in)
        alone = all(layers[:2]) and sum(map(len, layers)) == len(frozenset().union(*layers))
        once = all(self._calls[name] == 1 for name in query.linear_in | key.linear_in)
        if not (self.heads == "dimensions" and alone and once and self.grows(query.axes[-1])):
            return False
        self.atoms.unify(query.axes[-1], key.axes[-1], "queries and keys laid out otherwise")
        if query.shape[-1] == value.shape[-1]:
            # One head dimension, as code that reads it from a module assumes.
            self.atoms.unify(query.axes[-1], value.axes[-1], "queries and values laid out otherwise")
        self._note_attended(query, key)
        return True

    def multiply(self, query: Value, key: Value, summed: Runs, nodes: Sequence[Any]) -> bool:
        """Return True, and let the dimension grow that a product of queries and keys sums over, if both are linear.

        It is the last dimension of the queries and `summed` of the keys; `nodes` are both in the program.
        """
        shared = query.linear_in & key.linear_in
        if not (query.linear_in and key.linear_in and self.grows(query.axes[-1]) and self.grows(summed)):
            return False
        rows = [indices for node in nodes if shared and (indices := rows_of(node)) is not None]
        if shared and len(rows) < len(nodes):
            return False
        self.atoms.unify(query.axes[-1], summed, "queries and keys laid out otherwise")
        if shared:
            fused = Attention(Axis((), "out"), (), tuple(sorted(shared)), *rows)
            self.attentions.append((query.axes[-1], fused))
        else:
            self._note_attended(query, key)
        return True

    def _note_attended(self, query: Value, key: Value) -> None:
        for name in key.linear_in:
            self.consume(name)
        attention = Attention(Axis((), "out"), tuple(sorted(query.linear_in)))
        self.attentions.append((query.axes[-1], attention))

    def note_norm(
        self, node: Any, names: Mapping[str, str | None], eps: float, x: Value, per_sample: bool = False
    ) -> None:
        """Record a normalisation by statistics of each channel, over the batch or over each sample."""
        tensors = [tensor for tensor in names.values() if tensor is not None]
        name = tensors[0].rpartition(".")[0] if tensors else node.name
        for other in self.norms:
            others = {other.weight, other.bias, other.running_mean, other.running_var} - {None}
            if not others & {*tensors}:
                continue
            self.scales.union(other.scale_in, x.scale)
            if others == {*tensors}:
                return
            # One weight cannot compensate for eps in two variances.
            self.scales.pin(x.scale)
        self.norms.append(Norm(name=name, eps=float(eps), scale_in=x.scale, per_sample=per_sample, **names))

    def note_channel_norm(
        self, node: Any, axis: Runs, names: Mapping[str, str | None], mean_over: int | None = None, summed: bool = False
    ) -> None:
        """Record a normalisation by statistics over the channels of an axis."""
        if not self._weighted_norms:
            reason = "takes its statistics over these channels, and an operation on them has no channel rule"
            self.atoms.freeze(axis, f"{operation_of(node)} {reason}")
        call = NormCall(module_of(node), operation_of(node), axis, names, mean_over, summed)
        self.norm_calls.append(call)

    def note_other_norm(self, node: Any) -> None:
        """Record a normalisation whose statistics growth does not reweight."""
        self.norm_calls.append(NormCall(module_of(node), operation_of(node)))

    def note_radius(self, node: Any, axis: Runs) -> None:
        """Record a Euclidean norm over the channels of an axis."""
        name = module_of(node)
        self.radii[name] = self.radii.get(name, ()) + axis

"""State of a trace that channel rules read and write: layers, norms, attention, sizes and roles."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from growlab.widths.atoms import STAYING, Run, Runs
from growlab.widths.counterparts import rows_of
from growlab.widths.findings import Findings, NormCall, layer_name
from growlab.widths.groups import VARIANCE_OF_GATES, Attention, Layer, Norm
from growlab.widths.layout import Axis, Role
from growlab.widths.places import module_of
from growlab.widths.program import operation_of, shapes_of
from growlab.widths.rules import Value
from growlab.widths.rules.registry import SLID_OVER

Heads = Literal["dimensions", "number", "values", "sizes"]
_AS_WIDE = "attention as wide as its stream"


class Recorder(Findings):
    """Record layers, norms, attention and sizes during a trace, and unify the axes that they connect.

    Args:
        model: the network at full width.
        moved: node name -> result of `to_the_left`.
        heads: part of attention that may grow: head "dimensions", where that can be exact; the "number" of heads;
            "values", whose channels pass hand-written products; or "sizes": dimensions in such products too, for a
            network whose code computes its scale from them.
        tied: paths of attention modules whose heads together are assumed to have the width of their stream.
        weighted_norms: True if channels may grow that normalisations take their statistics over.
    """

    def __init__(
        self,
        model: nn.Module,
        moved: Mapping[str, int],
        heads: Heads,
        tied: frozenset[str],
        weighted_norms: bool,
    ) -> None:
        super().__init__(model)
        self.moved, self.heads = moved, heads
        self._tied, self._weighted_norms = tied, weighted_norms
        #: Buffers that angles are computed from: at another size or in another order their values would be wrong.
        self.frequencies: set[str] = set()
        self._calls: Counter[str] = Counter()
        self._choices: dict[str, tuple[str, Runs, int]] = {}
        #: Paths of modules that compute attention.
        self.attending: set[str] = set()
        #: True if activations are multiplied with each other outside of `scaled_dot_product_attention`.
        self.multiplies = False
        self._as_wide: list[tuple[Runs, Runs]] = []
        #: Parameters to whose dimensions the current rule has assigned roles.
        self.placed: set[str] = set()
        # Values by node of the (sub)program that is being visited.
        self._values: dict[Any, Any] = {}

    def shape(self, node: Any) -> tuple[int, ...]:
        """Full-width shape of the (first) tensor that the node computes."""
        return self.shapes(node)[0]

    def shapes(self, node: Any) -> list[tuple[int, ...]]:
        """Full-width shapes of all tensors that the node computes."""
        return shapes_of(node)

    def has_several_outputs(self, node: Any) -> bool:
        """Return True if a node computes a list of tensors."""
        return isinstance(node.meta.get("val"), (tuple, list))

    def operation(self, node: Any) -> str:
        """Name of the node's operation without namespace and overload."""
        return operation_of(node)

    def value_of(self, node: Any) -> Any:
        """Return the value of a node of the (sub)program that is being visited; None if it was not visited yet."""
        return self._values.get(node)

    def note_size(self, node: Any, size: int, axis: Runs, repeated: bool = True) -> None:
        """Record a size that the forward asks for, which its module may keep in an attribute.

        Args:
            node: node of the program.
            size: size at full width.
            axis: the positions that it counts.
            repeated: also record the length of one run of channels, if the axis repeats it.
        """
        self._sizes.append((module_of(node), size, axis))
        if not repeated:
            return
        runs = self.atoms.resolve(axis)
        times = sum(run.outer for run in runs)
        if times > 1 and all(replace(run, outer=1) == replace(runs[0], outer=1) for run in runs):
            # Heads of each sample of a batch: the module keeps the number of heads.
            self._sizes.append((module_of(node), size // times, (replace(runs[0], outer=1),)))

    def note_attention(self, node: Any) -> None:
        """Record that the node's module computes attention: its reshapes make heads and head dimensions."""
        self.attending.add(module_of(node))

    def takes_width_of_stream(self, node: Any) -> bool:
        """Return True if a node is in attention whose heads together are assumed to have the width of their stream."""
        path = module_of(node)
        return path in self._tied or path.rpartition(".")[0] in self._tied

    def note_width_of_stream(self, rows: Runs, columns: Runs) -> None:
        """Record a layer in such attention: its columns are the stream's channels, its rows a multiple of them."""
        self._as_wide.append((rows, columns))

    def _tie_heads_to_streams(self) -> None:
        """Unify the rows of layers in such attention with their stream, so that both grow at the same rate."""
        for rows, columns in self._as_wide:
            own, stream = self.atoms.resolve(rows), self.atoms.resolve(columns)
            if len(own) == len(stream) == 1 and own[0].atom == stream[0].atom:
                continue
            length = self.atoms.length(stream)
            times, rest = divmod(self.atoms.length(own), length)
            if rest or not times:
                # Another layer, which the same module's forward runs.
                continue
            size = self.atoms.sizes[own[0].atom] if len(own) == 1 and own[0].atom is not None else 0
            if times > 1 and size and length % size == 0:
                # Rows may have another order than the stream's channels: (heads, 3, head dimension).
                self.atoms.unify(stream, (Run(own[0].atom, 1, length // size),), _AS_WIDE)
            else:
                self.atoms.unify(own, self.atoms.nest(stream, times, 1), _AS_WIDE)

    def note_choice(self, node: Any, axis: Runs, remaining: int) -> None:
        """Record which output dimension of a reshape grows, and how many candidates remain to the left of it."""
        self._choices[node.name] = (module_of(node), axis, remaining)

    def to_the_left(self, node: Any) -> int:
        """Return how many dimensions left of the last one a reshape's growing dimension is sought."""
        return self.moved.get(node.name, 0)

    def summed_over(self) -> list[str]:
        """Names of reshapes whose growing dimension was frozen: attention sums or a convolution slides over it."""
        return [
            node
            for node, (module, axis, remaining) in self._choices.items()
            if remaining
            and self.atoms.frozen_whole(axis)
            and (module in self.attending or self.atoms.why_fixed(axis) == SLID_OVER)
        ]

    def weight_axes(
        self, weight: Value, row_role: Role, column_role: Role, kernel: Sequence[Runs]
    ) -> tuple[Runs, Runs]:
        """Set the roles of an affine map's weight and return its first two axes; the rest is the kernel."""
        if weight.rows_of is not None and weight.rows_of.name not in self.buffers:
            self._set_role(weight.rows_of, 0, row_role)
            self._set_role(weight.rows_of, 1, column_role)
            return weight.axes[0], weight.axes[1]
        if weight.name is None or weight.name in self.buffers:
            what = "computed in the forward" if weight.name is None else "no parameter"
            for axis in weight.axes:
                self.atoms.freeze(axis, f"a weight that is {what}")
        if weight.name is None:
            return weight.axes[0], weight.axes[1]
        self._set_role(weight, 0, row_role)
        self._set_role(weight, 1, column_role)
        for index, axis in enumerate(kernel, start=2):
            self._set_role(weight, index, "fixed")
            self.atoms.unify(weight.axes[index], axis, "kernel")
        if column_role == "fixed":
            self.atoms.freeze(weight.axes[1], "kernel")
        return weight.axes[0], weight.axes[1]

    def parameter_axis(self, value: Value, role: Role, axis: Runs, dimension: int = 0) -> Runs:
        """Unify one dimension of a parameter or buffer with an axis and set its role; return the dimension's axis."""
        self.atoms.unify(value.axes[dimension], axis, f"a parameter beside channels {STAYING}")
        self._set_role(value, dimension, role)
        return value.axes[dimension]

    def spread(self, value: Value) -> None:
        """Let any dimension of a parameter carry channels that the code rearranges or reads entry by entry.

        If the result then serves as a weight, they are frozen, as those of all computed weights are.
        """
        if value.name in self.frequencies:
            for axis in value.axes:
                self.atoms.freeze(axis, f"{value.name} is a table of as many channels")
        elif value.name is not None:
            for dimension, size in enumerate(value.shape):
                self._set_role(value, dimension, "out" if size > 1 else "fixed")

    def affine(
        self,
        node: Any,
        weight: Value,
        bias: Value | None,
        depthwise: bool,
        x: Value,
        shape: tuple[int, ...],
        axes: tuple[Runs, ...],
        channel_axis: int,
        transposed: bool = False,
        gates: int = 0,
    ) -> Value:
        """Record an affine map and return its output."""
        weight = weight.rows_of or weight
        if bias is not None and bias.rows_of is not None:
            self.atoms.unify(bias.axes[0], axes[channel_axis], "rows of a bias")
            self._set_role(bias.rows_of, 0, "out")
            bias = bias.rows_of
        elif bias is not None:
            self.parameter_axis(bias, "out", axes[channel_axis])
        if weight.name in self.buffers and bias is None:
            # A constant weight does not grow: it is not a layer, and the result is linear in the input.
            return Value(shape, axes, x.scale, made_by=x.made_by)
        self._followed |= x.made_by | weight.made_by
        if weight.name is None or (bias is not None and bias.name is None):
            self.scales.pin(x.scale)
        if weight.name is None:
            return Value(shape, axes, self.scales.new(unit=True))
        # Concatenated biases are not parameters of the layer: its output keeps its scale.
        scale = self.scales.new(unit=bias is not None and bias.name is None)
        bias_name = None if bias is None else bias.name
        # A tensor that is used twice can be rescaled in one way only: both uses have the same scales.
        for other in self._layers:
            if other.weight == weight.name:
                self.scales.union(other.scale_in, x.scale)
            if other.weight == weight.name or (bias_name is not None and other.bias == bias_name):
                self.scales.union(other.scale_out, scale)
        if not any((other.weight, other.bias) == (weight.name, bias_name) for other in self._layers):
            self._layers.append(
                Layer(
                    layer_name(weight.name),
                    weight.name,
                    bias_name,
                    depthwise,
                    x.scale,
                    scale,
                    transposed=transposed,
                    gates=gates,
                    variance_per_entry=VARIANCE_OF_GATES if gates else 1.0,
                )
            )
        names = frozenset(tensor for tensor in (weight.name, bias_name) if tensor is not None)
        self._calls.update(names)
        self._callers.setdefault(weight.name, {})[module_of(node)] = None
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
        if not (self.heads == "dimensions" and alone and once and self._grows(query.axes[-1])):
            return False
        self.atoms.unify(query.axes[-1], key.axes[-1], "queries and keys laid out otherwise")
        if query.shape[-1] == value.shape[-1]:
            # One head dimension, as code that reads it from a module assumes.
            self.atoms.unify(query.axes[-1], value.axes[-1], "queries and values laid out otherwise")
        self._note_attended(query, key)
        return True

    def multiply(self, query: Value, key: Value, summed: Runs, nodes: Sequence[Any]) -> bool:
        """Let the dimension grow that a product of queries and keys sums over, if both are linear in a layer.

        Args:
            query: factor whose last dimension is summed over.
            key: the other factor.
            summed: the same dimension of the keys.
            nodes: nodes of both in the program.

        Returns:
            True if the dimension may grow.
        """
        shared = query.linear_in & key.linear_in
        if not (query.linear_in and key.linear_in and self._grows(query.axes[-1]) and self._grows(summed)):
            return False
        rows = [found for node in nodes if shared and (found := rows_of(node)) is not None]
        if shared and len(rows) < len(nodes):
            return False
        self.atoms.unify(query.axes[-1], summed, "queries and keys laid out otherwise")
        if shared:
            fused = Attention(Axis((), "out"), (), tuple(sorted(shared)), *rows)
            self._attentions.append((query.axes[-1], fused))
        else:
            self._note_attended(query, key)
        return True

    def _note_attended(self, query: Value, key: Value) -> None:
        for name in key.linear_in:
            self._roles[name] = ["in" if role == "out" else role for role in self._roles[name]]
        attention = Attention(Axis((), "out"), tuple(sorted(query.linear_in)))
        self._attentions.append((query.axes[-1], attention))

    def record_norm(
        self, node: Any, names: Mapping[str, str | None], eps: float, x: Value, per_sample: bool = False
    ) -> None:
        """Record a normalisation by statistics of each channel, over the batch or over each sample."""
        known = next((name for name in names.values() if name is not None), None)
        name = node.name if known is None else known.rpartition(".")[0]
        used = {tensor for tensor in names.values() if tensor is not None}
        for other in self._norms:
            theirs = {other.weight, other.bias, other.running_mean, other.running_var}
            if used & theirs:
                self.scales.union(other.scale_in, x.scale)
            if used and used == theirs - {None}:
                return
            if used & theirs:
                # One weight cannot compensate for eps in two variances.
                self.scales.pin(x.scale)
        self._norms.append(Norm(name=name, eps=float(eps), scale_in=x.scale, per_sample=per_sample, **names))

    def record_channel_norm(
        self,
        node: Any,
        axis: Runs,
        names: Mapping[str, str | None],
        mean_over: int | None = None,
        summed: bool = False,
    ) -> None:
        """Record a normalisation by statistics over the channels of an axis."""
        if not self._weighted_norms:
            reason = "takes its statistics over these channels, and an operation on them has no channel rule"
            self.atoms.freeze(axis, f"{self.operation(node)} {reason}")
        call = NormCall(module_of(node), self.operation(node), axis, names, mean_over, summed)
        self._channel_norms.append(call)

    def record_other_norm(self, node: Any) -> None:
        """Record a normalisation whose statistics growth does not reweight."""
        self._channel_norms.append(NormCall(module_of(node), self.operation(node)))

    def record_radius(self, node: Any, axis: Runs) -> None:
        """Record a norm over the channels of an axis."""
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        name = stack[-1][0] if stack else ""
        self._radii[name] = self._radii.get(name, ()) + axis

    def _set_role(self, value: Value, dimension: int, role: Role) -> None:
        if value.name is None:
            return
        self.placed.add(value.name)
        roles = self._roles[value.name]
        if roles[dimension] not in (None, role):
            self.atoms.freeze(value.axes[dimension], f"{value.name} both produces and consumes the channels")
        roles[dimension] = role

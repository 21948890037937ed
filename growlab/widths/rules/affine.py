"""Rules for affine maps: convolutions, linear layers, embeddings, and recurrent layers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from growlab.widths.atoms import Run, Runs, fixed
from growlab.widths.program import as_computed, is_dead, operation_of, shape_of, shapes_of
from growlab.widths.rules.registry import CELLS, CHECKS, MODULES, Arguments, freeze_windows, keep_full_width, rule
from growlab.widths.values import Record, Value, values_in


@rule("conv1d", "conv2d", "conv3d")
def convolution(record: Record, node: Any, args: Arguments) -> Value:
    """Convolution with a weight [O, I / groups, ...]; with groups, the width within each group grows."""
    x, weight, bias, groups = args["input"], args["weight"], args.get("bias"), args.get("groups", 1)
    kernel = [fixed(size) for size in weight.shape[2:]]
    channels = len(x.shape) - len(kernel) - 1  # 0 without a batch dimension
    depthwise = groups > 1 and groups == x.shape[channels]
    # A 1x1 convolution is a linear layer over the channels: positions pass.
    single = set(weight.shape[2:]) <= {1} and _all(args, "stride", 1) and _all(args, "padding", 0)
    if not single:
        freeze_windows(record, x, len(kernel))
    rows, columns = record.weight_axes(weight, "out", "fixed" if depthwise else "in", kernel)
    if depthwise:
        # Each channel has separate filters: one, or several with a channel multiplier.
        filters = record.atoms.nest(x.axes[channels], 1, weight.shape[0] // groups)
        record.atoms.unify(rows, filters, "depthwise convolution")
    elif groups > 1:
        # Every group has the same width: the axis is `groups` repetitions of one set of channels.
        (within,) = record.atoms.new(weight.shape[0] // groups)
        record.atoms.unify(rows, (Run(within.atom, groups),), f"{groups}-group convolution")
        within = columns[0] if len(columns) == 1 else Run(None)
        if within.bare:
            record.atoms.unify(x.axes[channels], (Run(within.atom, groups),), f"{groups}-group convolution")
        else:
            record.atoms.freeze(columns + x.axes[channels], f"{groups}-group convolution")
    else:
        record.atoms.unify(columns, x.axes[channels], "input of a convolution")
    positions = x.axes[channels + 1 :] if single else map(fixed, shape_of(node)[channels + 1 :])
    axes = (*x.axes[:channels], rows, *positions)
    return record.affine(node, weight, bias, x, axes, channels, depthwise=depthwise)


def _all(args: Arguments, name: str, value: int) -> bool:
    setting = args.get(name, value)
    return set(setting) <= {value} if isinstance(setting, (tuple, list)) else setting == value


@rule("linear")
def linear(record: Record, node: Any, args: Arguments) -> Value:
    """Linear layer with a weight [O, I] on the last dimension."""
    x, weight, bias = args["input"], args["weight"], args.get("bias")
    if record.is_table(weight):
        if gains := gains_before(record, node):
            return tied_to_embedding(record, node, args, gains)
        reason = "is both an embedding's table and a layer's weight, and no gain before the layer can be scaled"
        record.atoms.freeze(weight.axes[1], f"{weight.name} {reason}")
    rows, columns = record.weight_axes(weight, "out", "in")
    record.atoms.unify(columns, x.axes[-1], "input of a linear layer")
    record.note_width_of_stream(node, rows, columns)
    return record.affine(node, weight, bias, x, (*x.axes[:-1], rows))


def are_weights(record: Record, node: Any) -> bool:
    """Return True if all outputs of a split are weights of linear layers, or all of them biases."""
    readers = [(piece, reader) for piece in node.users for reader in piece.users]
    places = {place for piece, reader in readers for place, arg in enumerate(reader.args) if arg is piece}
    return len(places) == 1 and places <= {1, 2} and all(operation_of(r) == "linear" for _, r in readers)


def tied_to_embedding(record: Record, node: Any, args: Arguments, gains: Sequence[str]) -> Value:
    """Layer whose weight E is tied to an embedding: its columns produce the channels.

    In E diag(g) x the gain g, with the bias of the same normalisation, consumes the channels instead of E.
    """
    x, weight, bias = args["input"], args["weight"], args.get("bias")
    record.atoms.unify(weight.axes[1], x.axes[-1], "input of a layer that is tied to an embedding")
    for name in gains:
        record.consume(name)
        record.gains.add(name)
    if bias is not None:
        record.parameter_axis(bias, "out", weight.axes[0])
    return record.follow(node, x, weight, (*x.axes[:-1], weight.axes[0]))


_CASTS = ("to", "_to_copy", "type_as", "contiguous", "clone", "alias", "float")
# Operations that are linear and equal for all channels: a gain commutes with them.
_PASSING = """
dropout mul div neg mean sum getitem view reshape flatten unflatten squeeze unsqueeze permute transpose swapaxes movedim
expand repeat slice narrow select index index_select gather unbind split split_with_sizes chunk roll flip cumsum mT
"""
_NORMS = {"layer_norm": (2, 3), "rms_norm": (2, 2)}


def gains_before(record: Record, node: Any) -> list[str]:
    """Names of the per-channel gain and bias that are applied last to a layer's input, and to nothing else.

    [] if there is no gain, or if another operation reads its result.
    """
    names: list[str] = []
    source = node.args[0]
    channels = record.atoms.resolve(record.values[source].axes[-1])
    while isinstance(source, torch.fx.Node) and source.op == "call_function" and _used_once(record, source):
        operation = operation_of(source)
        if operation in _NORMS:
            first, last = _NORMS[operation]
            vectors = [_vector(record, arg) for arg in source.args[first : last + 1]]
            return [*names, *filter(None, vectors)] if vectors and vectors[0] else []
        nodes = source.all_input_nodes
        vector = next(filter(None, (_vector(record, node) for node in nodes)), None)
        factors = nodes if operation in ("mul", "div") else nodes[:1]
        carrying = [factor for factor in factors if _carries(record, factor, channels)]
        if operation in ("mul", "add") and vector is not None and len(nodes) == 2:
            names.append(vector)
            if operation == "mul":
                return names
            source = next(node for node in nodes if _vector(record, node) != vector)
        elif operation in (*_CASTS, *_PASSING.split()) and len(carrying) == 1:
            (source,) = carrying
        else:
            return []
    return []


def _used_once(record: Record, node: Any) -> bool:
    return sum(operation_of(user) not in CHECKS and not is_dead(user) for user in node.users) == 1


def _carries(record: Record, node: Any, channels: Runs) -> bool:
    """Return True if these channels are on a dimension of a node's tensor, or of its first of several."""
    value = next(values_in(record.values.get(node)), None)
    return value is not None and channels in map(record.atoms.resolve, value.axes)


def _vector(record: Record, node: Any) -> str | None:
    """Name of the parameter [C] that a node is, perhaps plus a constant, if nothing else uses it; else None."""
    while isinstance(node, torch.fx.Node) and _used_once(record, node):
        value = record.values.get(node)
        if not isinstance(value, Value) or len(value.shape) != 1:
            return None
        if node.op != "call_function":
            return value.name
        plus = operation_of(node) == "add" and not node.kwargs and isinstance(node.args[1], (int, float))
        if not plus and operation_of(node) not in _CASTS:
            return None
        node = node.args[0]
    return None


def weight_in_product(factor: Value) -> bool:
    """Return True if the right factor of a product is a weight [I, O], or the transpose of a weight [O, I]."""
    return len(factor.shape) == 2 and (factor.turned is not None or factor.name is not None)


def product_with_weight(record: Record, node: Any, x: Value, factor: Value, bias: Value | None = None) -> Value:
    """Product of activations [..., I] with a weight [I, O], or the transpose of one, plus a bias [O]."""
    if factor.turned is not None:
        return linear(record, node, {"input": x, "weight": factor.turned, "bias": bias})
    columns, rows = record.weight_axes(factor, "in", "out")
    record.atoms.unify(columns, x.axes[-1], "input of a linear layer")
    record.note_width_of_stream(node, rows, columns)
    return record.affine(node, factor, bias, x, (*x.axes[:-1], rows), transposed=True)


def product_from_left(record: Record, node: Any, factor: Value, x: Value) -> Value:
    """Product of a weight [O, I], or the transpose of one [I, O], with activations [..., I, N]."""
    weight, transposed = factor.turned or factor, factor.turned is not None
    first, second = record.weight_axes(weight, *(("in", "out") if transposed else ("out", "in")))
    columns, rows = (first, second) if transposed else (second, first)
    record.atoms.unify(columns, x.axes[-2], "input of a linear layer")
    axes = (*x.axes[:-2], rows, x.axes[-1])
    return record.affine(node, weight, None, x, axes, -2, transposed=transposed)


@rule("_grouped_mm", "grouped_mm_fallback")
def product_per_expert(record: Record, node: Any, args: Arguments) -> Value:
    """Product of rows [N, I], sorted by expert, with the experts' matrices [E, I, O] or the transpose of [E, O, I]."""
    x, factor, *rest = values_in(args)
    if x.name is not None or len(factor.shape) != 3 or not is_stack(record, factor):
        return keep_full_width(record, node, args)
    for value in rest:
        record.freeze_all(value.axes, "where experts' rows end")
    return product_with_stack(record, node, x, factor, x.axes[:-1])


def is_stack(record: Record, factor: Value) -> bool:
    """Return True if a factor is a weight of several matrices, [..., I, O], or the transpose of [..., O, I]."""
    weight = factor.turned or factor
    return len(weight.shape) > 2 and record.is_weight(weight)


def product_with_stack(
    record: Record, node: Any, x: Value, factor: Value, kept: Sequence[Runs], left: bool = False
) -> Value:
    """Product of activations with a weight of several matrices (see `is_stack`), which all grow together.

    `kept` are the output's axes without the channels. The channels are last; with `left`, where the weight is the left
    factor, second to last.
    """
    weight, rank = factor.turned or factor, len(factor.shape)
    columns, rows = (rank - 1, rank - 2) if (factor.turned is not None) != left else (rank - 2, rank - 1)
    record.freeze_all(weight.axes[:-2], "one matrix for each of several")
    record.parameter_axis(weight, "in", x.axes[-2 if left else -1], dimension=columns)
    record.parameter_axis(weight, "out", weight.axes[rows], dimension=rows)
    axes = (*kept[:-1], weight.axes[rows], kept[-1]) if left else (*kept, weight.axes[rows])
    return record.follow(node, x, weight, axes)


@rule("addmm")
def product_plus_bias(record: Record, node: Any, args: Arguments) -> Value:
    """Linear layer with a bias [O] and a weight [I, O]."""
    bias, x, factor = args["self"], args["mat1"], args["mat2"]
    plain = args.get("beta", 1) == 1 and args.get("alpha", 1) == 1 and bias.name is not None and len(bias.shape) == 1
    if not (plain and weight_in_product(factor)):
        return keep_full_width(record, node, args)
    return product_with_weight(record, node, x, factor, bias)


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def transposed_convolution(record: Record, node: Any, args: Arguments) -> Value:
    """Transposed convolution with a weight [I, O / groups, ...]; grouped convolutions only grow if depthwise."""
    x, weight, bias, groups = args["input"], args["weight"], args.get("bias"), args.get("groups", 1)
    kernel = [fixed(size) for size in weight.shape[2:]]
    channels = len(x.shape) - len(kernel) - 1
    depthwise = groups > 1 and groups == x.shape[channels] and weight.shape[1] == 1
    freeze_windows(record, x, len(kernel))
    if depthwise:
        rows, _ = record.weight_axes(weight, "out", "fixed", kernel)
        record.atoms.unify(rows, x.axes[channels], "depthwise convolution")
    else:
        columns, rows = record.weight_axes(weight, "in", "out", kernel)
        record.atoms.unify(columns, x.axes[channels], "input of a transposed convolution")
        if groups > 1:
            record.atoms.freeze(columns, f"{groups}-group transposed convolution")
            record.atoms.freeze(rows, f"{groups}-group transposed convolution")
            rows = fixed(weight.shape[1] * groups)
    axes = (*x.axes[:channels], rows, *map(fixed, shape_of(node)[channels + 1 :]))
    return record.affine(node, weight, bias, x, axes, channels, depthwise=depthwise, transposed=not depthwise)


@rule("bilinear")
def bilinear(record: Record, node: Any, args: Arguments) -> Value:
    """Bilinear layer with a weight [O, I, J]: its outputs grow; the channels of both inputs keep their width."""
    weight, bias, shape = args["weight"], args.get("bias"), shape_of(node)
    for x in (args["input1"], args["input2"]):
        record.scales.pin(x.scale)
        record.atoms.freeze(x.axes[-1], "input of a bilinear layer")
    record.freeze_all(weight.axes[1:], "input of a bilinear layer")
    rows = weight.axes[0]
    if weight.name is None:
        record.atoms.freeze(rows, "a weight that is computed in the forward")
    else:
        record.parameter_axis(weight, "out", rows)
    if bias is not None and bias.name is not None:
        record.parameter_axis(bias, "out", rows)
    return record.unit(shape, (*args["input1"].axes[:-1], rows))


@rule("embedding", "embedding_bag")
def embedding(record: Record, node: Any, args: Arguments) -> Any:
    """Embedding with a weight [V, C]: its channels grow, the number of indices stays."""
    weight = args["weight"]
    record.atoms.freeze(weight.axes[0], "one row for each index")
    if weight.name is not None:
        record.parameter_axis(weight, "out", weight.axes[1], dimension=1)
    for value in values_in(args):
        if value is not weight:
            record.scales.pin(value.scale)
            record.freeze_all(value.axes, "indices of an embedding")
    shape, *others = shapes_of(node)
    channels = record.unit(shape, (*map(fixed, shape[:-1]), weight.axes[1]))
    # The others are offsets, bag sizes and indices of maxima, which F.embedding_bag does not return.
    return as_computed(node, [channels, *(record.unit(each, map(fixed, each)) for each in others)])


@rule("embedding_renorm_")
def embedding_renorm(record: Record, node: Any, args: Arguments) -> Value:
    """In-place renormalisation of an embedding's rows [V, C] (`max_norm`): more channels would change the norms."""
    weight = args["self"]
    keep_full_width(record, node, args, "rows of an embedding of a largest norm (max_norm)")
    return weight


# Number of gates, whose rows are stacked in the weights.
_GATES = {"lstm": 4, "gru": 3, "rnn": 1}


@rule(*MODULES)
def recurrent_layers(record: Record, node: Any, args: Arguments) -> Any:
    """Recurrent module: all layers and directions [gates x H, ...] have the same hidden channels (one `hidden_size`).

    An LSTM that projects its hidden state (`proj_size`) keeps its width: at equal widths torch would treat it as an
    LSTM without projection.
    """
    weights, states = args["params"], list(values_in(args["hx"]))
    if not all(map(record.is_weight, weights)) or "batch_sizes" in args:
        return keep_full_width(record, node, args, _stays(node, "whose weights are computed"))
    x, hidden = args["input"], record.atoms.new(states[-1].shape[-1])
    time, batch = (1, 0) if args["batch_first"] else (0, 1)
    record.atoms.freeze(x.axes[time], "steps of a recurrent layer")
    projected = states[0].shape[-1] != states[-1].shape[-1]
    state = fixed(states[0].shape[-1]) if projected else hidden
    for value, axis in zip(states, (state, hidden), strict=False):
        _enter(record, value, (fixed(value.shape[0]), x.axes[batch], axis))
    directions = 2 if args["bidirectional"] else 1
    number = len(weights) // (args["num_layers"] * directions)
    first = replace(states[0], shape=states[0].shape[1:], axes=states[0].axes[1:])
    read = x
    for layer in range(args["num_layers"]):
        for direction in range(directions):
            start = (layer * directions + direction) * number
            _one_direction(record, node, read, first, weights[start : start + number], hidden, state)
        width = directions * states[0].shape[-1]
        axes = (*x.axes[:-1], record.atoms.nest(state, directions, 1))
        read = record.unit((*x.shape[:-1], width), axes)
    if projected:
        axes = (hidden, *(axis for weight in weights[number - 1 :: number] for axis in weight.axes))
        record.freeze_all(axes, _stays(node, "that projects its hidden state"))
    last = [
        record.unit(value.shape, (fixed(value.shape[0]), x.axes[batch], axis))
        for value, axis in zip(states, (state, hidden), strict=False)
    ]
    return [read, *last]


@rule(*CELLS)
def recurrent_cell(record: Record, node: Any, args: Arguments) -> Any:
    """One step of a recurrent cell."""
    weights = [args[name] for name in ("w_ih", "w_hh", "b_ih", "b_hh") if args.get(name) is not None]
    if not all(map(record.is_weight, weights)):
        return keep_full_width(record, node, args, _stays(node, "whose weights are computed"))
    x, states = args["input"], list(values_in(args["hx"]))
    hidden = record.atoms.new(states[0].shape[-1])
    for value in states:
        _enter(record, value, (x.axes[0], hidden))
    _one_direction(record, node, x, states[0], weights, hidden, hidden)
    new = [record.unit(each.shape, (x.axes[0], hidden)) for each in states]
    return as_computed(node, new)


def _stays(node: Any, which: str) -> str:
    return f"a recurrent layer ({operation_of(node).partition('_')[0].upper()}) {which} keeps its width"


def _enter(record: Record, state: Value, axes: Sequence[Runs]) -> None:
    """Unify an initial hidden state with the layer's channels; its scale enters the gates and must not change."""
    record.scales.pin(state.scale)
    for dimension, axis in enumerate(axes):
        if state.name is None:
            record.atoms.unify(state.axes[dimension], axis, "its hidden state comes from outside")
        else:
            last = dimension == len(axes) - 1
            if not last:
                record.atoms.freeze(state.axes[dimension] + axis, "a parameter is the hidden state of all")
            record.parameter_axis(state, "out" if last else "fixed", axis, dimension=dimension)


def _one_direction(
    record: Record, node: Any, x: Value, state: Value, weights: Sequence[Value], hidden: Runs, projected: Runs
) -> None:
    """Record one direction of a layer: the weights of its input and hidden state, whose products sum to the gates."""
    gates = _GATES[operation_of(node).partition("_")[0]]
    rows_of_gates = record.atoms.nest(hidden, gates, 1)
    biases = list(weights[2:4]) if len(weights) >= 4 else [None, None]
    read = replace(state, axes=(*state.axes[:-1], projected))
    for weight, bias, source in zip(weights, biases, (x, read), strict=False):
        rows, columns = record.weight_axes(weight, "out", "in")
        why = record.atoms.why_fixed(hidden) or "gates of a recurrent layer laid out otherwise"
        record.atoms.unify(rows, rows_of_gates, why)
        record.atoms.unify(columns, source.axes[-1], "input of a recurrent layer")
        shape, axes = (*source.shape[:-1], weight.shape[0]), (*source.axes[:-1], rows)
        made = record.affine(node, weight, bias, source, axes, shape=shape, gates=gates)
        record.scales.pin(made.scale)

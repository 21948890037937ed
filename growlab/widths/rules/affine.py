"""Rules for affine maps: convolutions, linear layers, embeddings."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from growlab.widths.atoms import Run, Runs, fixed
from growlab.widths.program import is_dead
from growlab.widths.rules.opaque import CHECKS
from growlab.widths.rules.registry import Arguments, Value, freeze_windows, keep_full_width, rule, values_in

if TYPE_CHECKING:
    from growlab.widths.tracer import Tracer

#: Operations whose rules record an affine layer.
AFFINE = frozenset(("linear", *(f"conv{kind}{d}d" for kind in ("", "_transpose") for d in (1, 2, 3))))


@rule("conv1d", "conv2d", "conv3d")
def convolution(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Convolution with a weight [O, I / groups, ...]; with groups, the width within each group grows."""
    x, weight, bias, groups = args["input"], args["weight"], args.get("bias"), args.get("groups", 1)
    kernel = [fixed(size) for size in weight.shape[2:]]
    channels = len(x.shape) - len(kernel) - 1  # 0 without a batch dimension
    depthwise = groups > 1 and groups == x.shape[channels]
    # With a window of one position the others pass, like a linear layer over another dimension than the last.
    single = set(weight.shape[2:]) <= {1} and _all(args, "stride", 1) and _all(args, "padding", 0)
    if not single:
        freeze_windows(tracer, x, len(kernel))
    rows, columns = tracer.weight_axes(weight, "out", "fixed" if depthwise else "in", kernel)
    if depthwise:
        # Each channel has separate filters: one, or several with a channel multiplier.
        filters = tracer.atoms.nest(x.axes[channels], 1, weight.shape[0] // groups)
        tracer.atoms.unify(rows, filters, "depthwise convolution")
    elif groups > 1:
        # Every group has the same width: the axis is `groups` repetitions of one set of channels.
        (within,) = tracer.atoms.new(weight.shape[0] // groups)
        tracer.atoms.unify(rows, (Run(within.atom, groups),), f"{groups}-group convolution")
        within = columns[0] if len(columns) == 1 else Run(None)
        if within.bare:
            tracer.atoms.unify(x.axes[channels], (Run(within.atom, groups),), f"{groups}-group convolution")
        else:
            tracer.atoms.freeze(columns + x.axes[channels], f"{groups}-group convolution")
    else:
        tracer.atoms.unify(columns, x.axes[channels], "input of a convolution")
    shape = tracer.shape(node)
    positions = x.axes[channels + 1 :] if single else map(fixed, shape[channels + 1 :])
    axes = (*x.axes[:channels], rows, *positions)
    return tracer.affine(node, weight, bias, depthwise, x, shape, axes, channel_axis=channels)


def _all(args: Arguments, name: str, value: int) -> bool:
    given = args.get(name, value)
    return set(given) <= {value} if isinstance(given, (tuple, list)) else given == value


@rule("linear")
def linear(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Linear layer with a weight [O, I] on the last dimension."""
    x, weight, bias = args["input"], args["weight"], args.get("bias")
    if tracer.is_table(weight):
        if gains := gains_before(tracer, node):
            return tied_to_embedding(tracer, node, args, gains)
        reason = "is an embedding's table and a layer's weight, and before the layer no gain is a parameter of its own"
        tracer.atoms.freeze(weight.axes[1], f"{weight.name} {reason}")
    rows, columns = tracer.weight_axes(weight, "out", "in", [])
    tracer.atoms.unify(columns, x.axes[-1], "input of a linear layer")
    if tracer.takes_width_of_stream(node) and weight.shape[0] % weight.shape[1] == 0:
        tracer.note_width_of_stream(rows, columns)
    shape = tracer.shape(node)
    return tracer.affine(
        node, weight, bias, False, x, shape, (*x.axes[:-1], rows), channel_axis=len(shape) - 1
    )


def are_weights(tracer: "Tracer", node: Any) -> bool:
    """Return True if the pieces that a node cuts are all weights of linear layers, or all of them biases."""
    readers = [(piece, reader) for piece in node.users for reader in piece.users]
    places = {place for piece, reader in readers for place, arg in enumerate(reader.args) if arg is piece}
    return len(places) == 1 and places <= {1, 2} and all(tracer.operation(r) == "linear" for _, r in readers)


def tied_to_embedding(tracer: "Tracer", node: Any, args: Arguments, gains: Sequence[str]) -> Value:
    """Layer whose weight E is also the table of an embedding: its columns produce the channels, as the table's do.

    E diag(g) x is a layer of weight g: the channels are consumed by the gain g and the bias of the normalisation
    before it.
    """
    x, weight, bias = args["input"], args["weight"], args.get("bias")
    tracer.atoms.unify(weight.axes[1], x.axes[-1], "input of a layer that is tied to an embedding")
    for name in gains:
        tracer.consume(name)
    shape = tracer.shape(node)
    if bias is not None:
        tracer.parameter_axis(bias, "out", weight.axes[0])
    tracer.scales.pin(x.scale)
    return tracer.follow(
        x, weight, Value(shape, (*x.axes[:-1], weight.axes[0]), tracer.scales.new(unit=True))
    )


_CASTS = frozenset(("to", "_to_copy", "type_as", "contiguous", "clone", "alias", "float"))
# Operations that are linear and the same for each channel: a gain may be applied before or after them.
_PASSING = _CASTS | {
    *("dropout", "mul", "div", "neg", "mean", "sum", "getitem", "view", "reshape", "flatten", "unflatten"),
    *("squeeze", "unsqueeze", "permute", "transpose", "swapaxes", "movedim", "expand", "repeat", "slice"),
    *("narrow", "select", "index", "index_select", "gather", "unbind", "split", "split_with_sizes", "chunk"),
    *("roll", "flip", "cumsum", "mT"),
}
_NORMS = {"layer_norm": (2, 3), "rms_norm": (2, 2)}


def gains_before(tracer: "Tracer", node: Any) -> list[str]:
    """Names of the gain and bias per channel that are applied last to a layer's input, and to nothing else.

    An empty list if there is no gain, or if something else reads its result.
    """
    names: list[str] = []
    source = node.args[0]
    channels = tracer.atoms.resolve(tracer.value_of(source).axes[-1])
    while isinstance(source, torch.fx.Node) and source.op == "call_function" and _used_once(tracer, source):
        operation = tracer.operation(source)
        if operation in _NORMS:
            first, last = _NORMS[operation]
            given = [_vector(tracer, arg) for arg in source.args[first : last + 1]]
            return [*names, *filter(None, given)] if given and given[0] else []
        nodes = source.all_input_nodes
        vector = next(filter(None, (_vector(tracer, one) for one in nodes)), None)
        factors = nodes if operation in ("mul", "div") else nodes[:1]
        carrying = [one for one in factors if _carries(tracer, one, channels)]
        if operation in ("mul", "add") and vector is not None and len(nodes) == 2:
            names.append(vector)
            if operation == "mul":
                return names
            source = next(one for one in nodes if _vector(tracer, one) != vector)
        elif operation in _PASSING and len(carrying) == 1:
            (source,) = carrying
        else:
            return []
    return []


def _used_once(tracer: "Tracer", node: Any) -> bool:
    return sum(tracer.operation(user) not in CHECKS and not is_dead(user) for user in node.users) == 1


def _carries(tracer: "Tracer", node: Any, channels: Runs) -> bool:
    """Return True if these channels are on a dimension of a node's tensor, or of its first of several."""
    value = next(values_in(tracer.value_of(node)), None)
    return value is not None and channels in map(tracer.atoms.resolve, value.axes)


def _vector(tracer: "Tracer", node: Any) -> str | None:
    """Name of the parameter [C] that a node stands for, alone or plus a constant, if nothing else uses it, or None."""
    while isinstance(node, torch.fx.Node) and _used_once(tracer, node):
        value = tracer.value_of(node)
        if not isinstance(value, Value) or len(value.shape) != 1:
            return None
        if node.op != "call_function":
            return value.name
        plus = tracer.operation(node) == "add" and not node.kwargs and isinstance(node.args[1], (int, float))
        if not plus and tracer.operation(node) not in _CASTS:
            return None
        node = node.args[0]
    return None


def weight_in_product(factor: Value) -> bool:
    """Return True if the right factor of a product is a weight [I, O], or the transpose of a weight [O, I]."""
    return len(factor.shape) == 2 and (factor.turned is not None or factor.name is not None)


def product_with_weight(
    tracer: "Tracer", node: Any, x: Value, factor: Value, bias: Value | None = None
) -> Value:
    """Product of activations [..., I] with a weight [I, O], or the transpose of one, plus a bias [O]."""
    if factor.turned is not None:
        return linear(tracer, node, {"input": x, "weight": factor.turned, "bias": bias})
    columns, rows = tracer.weight_axes(factor, "in", "out", [])
    tracer.atoms.unify(columns, x.axes[-1], "input of a linear layer")
    if tracer.takes_width_of_stream(node) and factor.shape[1] % factor.shape[0] == 0:
        tracer.note_width_of_stream(rows, columns)
    shape = tracer.shape(node)
    return tracer.affine(
        node,
        factor,
        bias,
        False,
        x,
        shape,
        (*x.axes[:-1], rows),
        channel_axis=len(shape) - 1,
        transposed=True,
    )


def product_from_left(tracer: "Tracer", node: Any, factor: Value, x: Value) -> Value:
    """Product of a weight [O, I], or the transpose of one [I, O], with activations [..., I, N]."""
    weight, transposed = factor.turned or factor, factor.turned is not None
    first, second = tracer.weight_axes(weight, *(("in", "out") if transposed else ("out", "in")), [])
    columns, rows = (first, second) if transposed else (second, first)
    tracer.atoms.unify(columns, x.axes[-2], "input of a linear layer")
    shape, axes = tracer.shape(node), (*x.axes[:-2], rows, x.axes[-1])
    return tracer.affine(
        node, weight, None, False, x, shape, axes, channel_axis=len(shape) - 2, transposed=transposed
    )


@rule("_grouped_mm", "grouped_mm_fallback")
def product_per_expert(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Product of rows [N, I], sorted by expert, with their expert's matrix in [E, I, O] or a transposed [E, O, I]."""
    x, factor, *rest = values_in(args)
    if x.name is not None or len(factor.shape) != 3 or not is_stack(tracer, factor):
        return keep_full_width(tracer, node, args)
    for value in rest:
        for axis in value.axes:
            tracer.atoms.freeze(axis, "where experts' rows end")
    return product_with_stack(tracer, node, x, factor, x.axes[:-1])


def is_stack(tracer: "Tracer", factor: Value) -> bool:
    """Return True if a factor is a weight of several matrices, [..., I, O], or a transposed [..., O, I]."""
    weight = factor.turned or factor
    return len(weight.shape) > 2 and weight.name is not None and weight.name not in tracer.buffers


def product_with_stack(
    tracer: "Tracer", node: Any, x: Value, factor: Value, kept: Sequence[Runs], left: bool = False
) -> Value:
    """Product of activations with a weight of several matrices, which all grow together.

    Args:
        tracer: tracer of the program.
        node: node of the product.
        x: activations, [..., I], or [..., I, N] with `left`.
        factor: the weight, see `is_stack`; with `left` [..., O, I], or a transposed [..., I, O].
        kept: the output's axes without that of the channels, which is the last, or the last but one with `left`.
        left: True if the weight is the left factor.
    """
    weight, rank = factor.turned or factor, len(factor.shape)
    columns, rows = (rank - 1, rank - 2) if (factor.turned is not None) != left else (rank - 2, rank - 1)
    for axis in weight.axes[:-2]:
        tracer.atoms.freeze(axis, "one matrix for each of several")
    tracer.parameter_axis(weight, "in", x.axes[-2 if left else -1], dimension=columns)
    tracer.parameter_axis(weight, "out", weight.axes[rows], dimension=rows)
    tracer.scales.pin(x.scale)
    axes = (*kept[:-1], weight.axes[rows], kept[-1]) if left else (*kept, weight.axes[rows])
    return tracer.follow(x, weight, Value(tracer.shape(node), axes, tracer.scales.new(unit=True)))


@rule("addmm")
def product_plus_bias(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Linear layer with a bias [O] and a weight that is stored as [I, O]."""
    bias, x, factor = args["self"], args["mat1"], args["mat2"]
    plain = (
        args.get("beta", 1) == 1
        and args.get("alpha", 1) == 1
        and bias.name is not None
        and len(bias.shape) == 1
    )
    if not (plain and weight_in_product(factor)):
        return keep_full_width(tracer, node, args)
    return product_with_weight(tracer, node, x, factor, bias)


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def transposed_convolution(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Transposed convolution with a weight [I, O / groups, ...]; of grouped ones only depthwise ones grow."""
    x, weight, bias, groups = args["input"], args["weight"], args.get("bias"), args.get("groups", 1)
    kernel = [fixed(size) for size in weight.shape[2:]]
    channels = len(x.shape) - len(kernel) - 1
    depthwise = groups > 1 and groups == x.shape[channels] and weight.shape[1] == 1
    freeze_windows(tracer, x, len(kernel))
    if depthwise:
        rows, _ = tracer.weight_axes(weight, "out", "fixed", kernel)
        tracer.atoms.unify(rows, x.axes[channels], "depthwise convolution")
    else:
        columns, rows = tracer.weight_axes(weight, "in", "out", kernel)
        tracer.atoms.unify(columns, x.axes[channels], "input of a transposed convolution")
        if groups > 1:
            tracer.atoms.freeze(columns, f"{groups}-group transposed convolution")
            tracer.atoms.freeze(rows, f"{groups}-group transposed convolution")
            rows = fixed(weight.shape[1] * groups)
    shape = tracer.shape(node)
    axes = (*x.axes[:channels], rows, *map(fixed, shape[channels + 1 :]))
    return tracer.affine(
        node, weight, bias, depthwise, x, shape, axes, channel_axis=channels, transposed=not depthwise
    )


@rule("bilinear")
def bilinear(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Bilinear layer with a weight [O, I, J]: its outputs grow; the channels of both inputs keep their width."""
    weight, bias, shape = args["weight"], args.get("bias"), tracer.shape(node)
    for x in (args["input1"], args["input2"]):
        tracer.scales.pin(x.scale)
        tracer.atoms.freeze(x.axes[-1], "input of a bilinear layer")
    for axis in weight.axes[1:]:
        tracer.atoms.freeze(axis, "input of a bilinear layer")
    rows = weight.axes[0]
    if weight.name is None:
        tracer.atoms.freeze(rows, "a weight that is computed in the forward")
    else:
        tracer.parameter_axis(weight, "out", rows)
    if bias is not None and bias.name is not None:
        tracer.parameter_axis(bias, "out", rows)
    return Value(shape, (*args["input1"].axes[:-1], rows), tracer.scales.new(unit=True))


@rule("embedding", "embedding_bag")
def embedding(tracer: "Tracer", node: Any, args: Arguments) -> Value | list[Value]:
    """Embedding with a weight [V, C]: its channels grow, the number of indices stays."""
    weight = args["weight"]
    tracer.atoms.freeze(weight.axes[0], "one row for each index")
    if weight.name is not None:
        tracer.parameter_axis(weight, "out", weight.axes[1], dimension=1)
    for value in values_in(args):
        if value is not weight:
            tracer.scales.pin(value.scale)
            for axis in value.axes:
                tracer.atoms.freeze(axis, "indices of an embedding")
    found, *positions = tracer.shapes(node)
    channels = Value(found, (*map(fixed, found[:-1]), weight.axes[1]), tracer.scales.new(unit=True))
    if not tracer.has_several_outputs(node):
        return channels
    # Offsets and sizes of bags and the indices of largest entries, which F.embedding_bag does not return.
    rest = [Value(shape, tuple(map(fixed, shape)), tracer.scales.new(unit=True)) for shape in positions]
    return [channels, *rest]


@rule("embedding_renorm_")
def embedding_renorm(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Renormalisation of an embedding's rows [V, C] in place (`max_norm`): more channels would change the norms."""
    weight = args["self"]
    keep_full_width(tracer, node, args, "rows of an embedding of a largest norm (max_norm)")
    return weight

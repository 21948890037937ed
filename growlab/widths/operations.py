"""Channel rules: what each ATen operation does to axes and scales.

A rule is called with the trace, the graph node and the operation's arguments by name; tensors arrive as `Value`s.
It returns the output's Value (or a list of them) and records layers and norms on the way.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from growlab.widths.atoms import Runs, fixed

if TYPE_CHECKING:
    from growlab.widths.trace import Tracer

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Value:
    """A tensor of the traced program.

    Attributes:
        shape: at full width.
        axes: one axis a dimension.
        scale: its scale class.
        name: parameter or buffer name, or None for activations.
    """

    shape: tuple[int, ...]
    axes: tuple[Runs, ...]
    scale: int
    name: str | None = None


Rule = Callable[["Tracer", Any, Arguments], Any]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operations of these names (without the `aten::` prefix and overload)."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


# Affine maps -----------------------------------------------------------------------------------------------


@rule("conv1d", "conv2d", "conv3d")
def _convolution(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    x, weight, bias, groups = args["input"], args["weight"], args.get("bias"), args.get("groups", 1)
    kernel = [fixed(size) for size in weight.shape[2:]]
    channels = len(x.shape) - len(kernel) - 1  # 0 without a batch dimension
    depthwise = groups > 1 and groups == x.shape[channels] == weight.shape[0]
    _freeze_windows(tracer, x, len(kernel))
    reason = f"{groups}-group convolution"
    rows, columns = tracer.weight_axes(weight, "out", "fixed" if depthwise else "in", kernel)
    if depthwise:
        tracer.atoms.unify(rows, x.axes[channels], reason)
    elif groups > 1:
        tracer.atoms.freeze(rows, reason)
        tracer.atoms.freeze(columns, reason)
        tracer.atoms.freeze(x.axes[channels], reason)
    else:
        tracer.atoms.unify(columns, x.axes[channels], "input of a convolution")
    shape = tracer.shape(node)
    axes = (*x.axes[:channels], rows, *map(fixed, shape[channels + 1 :]))
    return tracer.affine(weight, bias, depthwise, x, shape, axes, channel_axis=channels)


@rule("linear")
def _linear(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    x, weight, bias = args["input"], args["weight"], args.get("bias")
    rows, columns = tracer.weight_axes(weight, "out", "in", [])
    tracer.atoms.unify(columns, x.axes[-1], "input of a linear layer")
    shape = tracer.shape(node)
    return tracer.affine(weight, bias, False, x, shape, (*x.axes[:-1], rows), channel_axis=len(shape) - 1)


# Normalisation ---------------------------------------------------------------------------------------------


@rule("batch_norm")
def _batch_norm(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    x = args["input"]
    names = {}
    for role in ("weight", "bias", "running_mean", "running_var"):
        value = args.get(role)
        names[role] = None if value is None else value.name
        if value is not None:
            tracer.parameter_axis(value, "out", x.axes[1])
    tracer.record_norm(node, names, args["eps"], x)
    return Value(x.shape, x.axes, tracer.scales.new(unit=True))


# Element by element ----------------------------------------------------------------------------------------


@rule(
    *("relu", "relu_", "leaky_relu", "leaky_relu_", "dropout", "dropout_", "feature_dropout", "clone"),
    *("contiguous", "alias", "detach", "to", "_to_copy", "neg", "abs", "lift_fresh_copy"),
)
def _homogeneous(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    x = _first_tensor(args)
    return Value(x.shape, x.axes, x.scale)


@rule(
    *("tanh", "tanh_", "sigmoid", "sigmoid_", "gelu", "silu", "silu_", "elu", "elu_", "selu", "softplus"),
    *("hardtanh", "hardtanh_", "hardswish", "hardswish_", "hardsigmoid", "hardsigmoid_", "mish", "exp"),
    *("sqrt", "rsqrt", "pow", "log", "sin", "cos", "relu6", "relu6_", "clamp", "celu"),
)
def _pointwise(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    x = _first_tensor(args)
    tracer.scales.pin(x.scale)
    return Value(x.shape, x.axes, tracer.scales.new(unit=True))


@rule("add", "add_", "sub", "sub_")
def _sum(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    operands = [value for value in args.values() if isinstance(value, Value)]
    result = _broadcast(tracer, node, operands)
    if len(operands) == 1:
        tracer.scales.pin(operands[0].scale)
        return Value(result.shape, result.axes, operands[0].scale)
    scale = tracer.scales.union(operands[0].scale, operands[1].scale)
    return Value(result.shape, result.axes, scale)


@rule("mul", "mul_", "div", "div_")
def _product(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    operands = [value for value in args.values() if isinstance(value, Value)]
    result = _broadcast(tracer, node, operands)
    if len(operands) == 1 and args.get("rounding_mode") is None:
        return Value(result.shape, result.axes, operands[0].scale)
    for operand in operands:
        tracer.scales.pin(operand.scale)
    return Value(result.shape, result.axes, tracer.scales.new(unit=True))


def _broadcast(tracer: "Tracer", node: Any, operands: Sequence[Value]) -> Value:
    shape = tracer.shape(node)
    axes: list[Runs] = [fixed(1)] * len(shape)
    for operand in operands:
        offset = len(shape) - len(operand.shape)
        for index, (size, axis) in enumerate(zip(operand.shape, operand.axes, strict=True), start=offset):
            if size == 1:
                continue
            if operand.name is not None:
                axis = tracer.parameter_axis(operand, "out", axis, dimension=index - offset)
            if tracer.atoms.length(axes[index]) == 1:
                axes[index] = axis
            else:
                tracer.atoms.unify(axes[index], axis, "added or multiplied with channels laid out otherwise")
    return Value(shape, tuple(axes), operands[0].scale)


# Pooling and reductions ------------------------------------------------------------------------------------


@rule(
    *("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d"),
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
    *("upsample_nearest2d", "upsample_bilinear2d"),
)
def _pool(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    x, shape = _first_tensor(args), tracer.shape(node)
    num_windows = next(int(char) for char in tracer.operation(node) if char.isdigit())
    _freeze_windows(tracer, x, num_windows)
    return Value(shape, (*x.axes[:-num_windows], *map(fixed, shape[-num_windows:])), x.scale)


@rule(
    *("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
    *("max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices"),
)
def _pool_with_indices(tracer: "Tracer", node: Any, args: Arguments) -> list[Value]:
    pooled = _pool(tracer, node, args)
    return [pooled, Value(pooled.shape, pooled.axes, tracer.scales.new(unit=True))]


def _freeze_windows(tracer: "Tracer", x: Value, num_windows: int) -> None:
    for axis in x.axes[len(x.axes) - num_windows :]:
        tracer.atoms.freeze(axis, "neighbouring channels are pooled or convolved")


@rule("mean", "sum", "amax", "amin")
def _reduce(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    x, keep, dims = args["self"], args.get("keepdim", False), args.get("dim")
    dims = [dims] if isinstance(dims, int) else dims or range(len(x.shape))
    reduced = {dim % len(x.shape) for dim in dims}
    axes = []
    for index, axis in enumerate(x.axes):
        if index in reduced:
            tracer.atoms.freeze(axis, f"reduced by {tracer.operation(node)} over the channels")
            if keep:
                axes.append(fixed(1))
        else:
            axes.append(axis)
    return Value(tracer.shape(node), tuple(axes), x.scale)


@rule("max", "min", "maximum", "minimum")
def _extreme(tracer: "Tracer", node: Any, args: Arguments) -> Value | list[Value]:
    if "other" in args:
        return _sum(tracer, node, args)
    reduced = _reduce(tracer, node, args)
    if "dim" not in args:
        return reduced
    return [reduced, Value(reduced.shape, reduced.axes, tracer.scales.new(unit=True))]


# Shape -----------------------------------------------------------------------------------------------------


@rule("constant_pad_nd", "pad")
def _pad(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    x, pad = args["self"], args["pad"]
    value = args.get("value") or 0.0
    axes = list(x.axes)
    for index in range(len(pad) // 2):
        before, after = pad[2 * index], pad[2 * index + 1]
        dim = len(axes) - 1 - index
        runs = tracer.atoms.resolve(axes[dim])
        if not before and not after:
            continue
        if all(run.atom is None for run in runs):
            axes[dim] = fixed(x.shape[dim] + before + after)
        elif before < 0 or after < 0 or value != 0.0 or args.get("mode", "constant") != "constant":
            tracer.atoms.freeze(runs, "cropped or padded with something else than zeros")
            axes[dim] = fixed(x.shape[dim] + before + after)
        else:
            # The added zeros are a group of their own: it completes this stream to a wider one.
            first = tracer.atoms.new(before, below=x.shape[dim]) if before else ()
            last = tracer.atoms.new(after, below=x.shape[dim] + before) if after else ()
            axes[dim] = first + runs + last
    scale = x.scale
    if value != 0.0:
        tracer.scales.pin(scale)
    return Value(tracer.shape(node), tuple(axes), scale)


@rule("slice")
def _slice(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    x, dim = args["self"], args.get("dim", 0) % len(args["self"].shape)
    shape = tracer.shape(node)
    axes = list(x.axes)
    if shape[dim] != x.shape[dim]:
        tracer.atoms.freeze(axes[dim], "a slice of the channels is taken")
        axes[dim] = fixed(shape[dim])
    return Value(shape, tuple(axes), x.scale)


@rule("cat", "concat", "concatenate")
def _concatenate(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    values, shape = args["tensors"], tracer.shape(node)
    dim = args.get("dim", 0) % len(shape)
    axes: list[Runs] = []
    scale = values[0].scale
    for other in values[1:]:
        scale = tracer.scales.union(scale, other.scale)
    for index in range(len(shape)):
        if index == dim:
            axes.append(tuple(run for value in values for run in value.axes[index]))
        else:
            for other in values[1:]:
                tracer.atoms.unify(values[0].axes[index], other.axes[index], "concatenated")
            axes.append(values[0].axes[index])
    return Value(shape, tuple(axes), scale)


@rule("permute")
def _permute(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    x = args["self"]
    return Value(tracer.shape(node), tuple(x.axes[dim] for dim in args["dims"]), x.scale)


@rule("transpose")
def _transpose(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    x = args["self"]
    axes = list(x.axes)
    axes[args["dim0"]], axes[args["dim1"]] = axes[args["dim1"]], axes[args["dim0"]]
    return Value(tracer.shape(node), tuple(axes), x.scale)


@rule("flatten", "view", "reshape", "_unsafe_view", "unflatten", "squeeze", "unsqueeze")
def _reshape(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Match runs of input and output dimensions with equal products; merge or split inside each."""
    x, shape = args["self"], tracer.shape(node)
    axes: list[Runs] = []
    old = new = 0
    while old < len(x.shape) or new < len(shape):
        old_end, new_end = min(old + 1, len(x.shape)), min(new + 1, len(shape))
        while math.prod(x.shape[old:old_end]) != math.prod(shape[new:new_end]):
            if math.prod(x.shape[old:old_end]) < math.prod(shape[new:new_end]) and old_end < len(x.shape):
                old_end += 1
            elif new_end < len(shape):
                new_end += 1
            else:
                old_end += 1
        axes += _reshape_span(tracer, x, range(old, old_end), shape[new:new_end])
        old, new = old_end, new_end
    return Value(shape, tuple(axes), x.scale)


def _reshape_span(tracer: "Tracer", x: Value, span: range, sizes: Sequence[int]) -> list[Runs]:
    moving = [index for index in span if any(r.atom is not None for r in tracer.atoms.resolve(x.axes[index]))]
    if not moving:
        return [fixed(size) for size in sizes]
    if sum(size != 1 for size in sizes) > 1 or len(moving) > 1:
        for index in moving:
            tracer.atoms.freeze(x.axes[index], "reshaped into several dimensions")
        return [fixed(size) for size in sizes]
    # One growing dimension among fixed ones: they become its repetitions before and behind.
    outer = math.prod(x.shape[index] for index in span if index < moving[0])
    inner = math.prod(x.shape[index] for index in span if index > moving[0])
    merged = tracer.atoms.nest(x.axes[moving[0]], outer, inner)
    return [merged if size != 1 else fixed(1) for size in sizes]


@rule("getitem")
def _getitem(tracer: "Tracer", node: Any, args: Arguments) -> Any:
    return operator.getitem(args["a"], args["b"])


def _first_tensor(args: Arguments) -> Value:
    return next(value for value in args.values() if isinstance(value, Value))

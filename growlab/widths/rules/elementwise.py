"""Rules for element-wise operations."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from growlab.widths.atoms import STAYING, Runs, fixed
from growlab.widths.groups import Role
from growlab.widths.program import operation_of, shape_of
from growlab.widths.rules.registry import DRAWN, Arguments, first_tensor, keep_full_width, rule
from growlab.widths.values import Record, Value

# f(a x) = a f(x) for a > 0.
_HOMOGENEOUS = """
relu relu_ leaky_relu leaky_relu_ rrelu dropout dropout_ feature_dropout feature_dropout_ alpha_dropout neg neg_
positive abs abs_ real imag _conj conj conj_physical resolve_conj resolve_neg
"""
# Casts and copies, which keep every value.
_CASTS = """
clone contiguous alias detach detach_ detach_copy to _to_copy lift_fresh_copy type_as float double half bfloat16
"""
_POINTWISE = """
tanh tanh_ sigmoid sigmoid_ gelu gelu_ silu silu_ elu elu_ selu selu_ softplus hardtanh hardtanh_ hardswish hardswish_
hardsigmoid hardsigmoid_ mish mish_ exp exp_ exp2 sqrt sqrt_ rsqrt rsqrt_ log log2 log10 sin cos tan sinh cosh asin
acos asinh acosh atanh relu6 relu6_ celu celu_ square square_ erf erf_ erfc erfinv reciprocal reciprocal_ softsign
log_sigmoid threshold threshold_ sign sgn floor ceil round trunc frac log1p expm1 atan logit softshrink hardshrink
nan_to_num zero_ isnan isinf isfinite signbit sinc digamma lgamma logical_not bitwise_not
"""
_CHOOSING = """
where masked_fill masked_fill_ eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or
bitwise_xor __and__ __or__ __xor__ pow pow_ clamp clamp_ clamp_min clamp_min_ clamp_max clamp_max_ clip lerp
addcmul addcdiv atan2 eq_ ne_ lt_ le_ gt_ ge_ fmod remainder floor_divide floor_divide_ copysign_ hypot
logaddexp logaddexp2 xlogy copysign isclose complex polar copy copy_ fill fill_
"""


@rule(*_HOMOGENEOUS.split())
def homogeneous(record: Record, node: Any, args: Arguments) -> Value:
    """Positively homogeneous function, f(a x) = a f(x) for a > 0, or real or imaginary part: axes and scale pass."""
    x = first_tensor(args)
    return Value(x.shape, x.axes, x.scale)


@rule(*_CASTS.split())
def cast(record: Record, node: Any, args: Arguments) -> Value:
    """Cast or copy: everything passes, and a parameter still counts as one."""
    return first_tensor(args)


@rule(*_POINTWISE.split())
def pointwise(record: Record, node: Any, args: Arguments) -> Value:
    """Element-wise function: axes pass, the scale of the input must not change."""
    x = first_tensor(args)
    record.scales.pin(x.scale)
    return record.unit(x.shape, x.axes)


@rule("prelu", "prelu_", "_prelu_kernel")
def prelu(record: Record, node: Any, args: Arguments) -> Value:
    """PReLU with one slope, or one slope per channel."""
    x, weight = args["self"], args["weight"]
    if weight.shape and weight.shape[0] > 1:
        record.parameter_axis(weight, "out", x.axes[1])
    elif weight.name is not None:
        record.freeze_all(weight.axes, "one slope for all channels")
    return Value(x.shape, x.axes, x.scale)


@rule("add", "add_", "sub", "sub_", "rsub", "maximum", "minimum", "fmax", "fmin")
def total(record: Record, node: Any, args: Arguments) -> Value:
    """Sum, difference, maximum or minimum: operands have the same channels at the same scale."""
    operands = [value for value in args.values() if isinstance(value, Value)]
    result = broadcast(record, node, operands)
    if len(operands) == 1:
        record.scales.pin(operands[0].scale)
        if operation_of(node) == "add" and not node.kwargs:
            record.note_offset(operands[0], args["other"])
        return Value(result.shape, result.axes, operands[0].scale)
    scale = record.scales.union(operands[0].scale, operands[1].scale)
    return Value(result.shape, result.axes, scale)


@rule("mul", "mul_", "multiply", "multiply_", "div", "div_", "divide", "divide_", "true_divide")
def product(record: Record, node: Any, args: Arguments) -> Value:
    """Element-wise product or quotient: operands have the same channels; scales of two tensors must not change."""
    operands = [value for value in args.values() if isinstance(value, Value)]
    result = broadcast(record, node, operands)
    if len(operands) == 1 and args.get("rounding_mode") is None:
        return Value(result.shape, result.axes, operands[0].scale)
    record.pin(operands)
    return record.unit(result.shape, result.axes)


@rule(*_CHOOSING.split())
def chosen(record: Record, node: Any, args: Arguments) -> Any:
    """Comparison, mask or other function of several operands: they have the same channels; scales must not change."""
    if operation_of(node) == "where" and len(args) == 1:
        # `torch.where(condition)` gives positions, as `nonzero` does.
        return keep_full_width(record, node, args)
    operands = [value for value in args.values() if isinstance(value, Value)]
    record.pin(operands)
    result = broadcast(record, node, operands)
    return record.unit(result.shape, result.axes)


@rule("glu")
def gated(record: Record, node: Any, args: Arguments) -> Value:
    """Gated linear unit: one half of the channels gates the other, so both have the same channels."""
    x, dim = args["self"], args.get("dim", -1) % len(args["self"].shape)
    shape = shape_of(node)
    values, gates = record.atoms.cut(x.axes[dim], [shape[dim], shape[dim]])
    record.atoms.unify(values, gates, "halves of a gate laid out otherwise")
    record.scales.pin(x.scale)
    axes = (*x.axes[:dim], record.atoms.resolve(values), *x.axes[dim + 1 :])
    return record.unit(shape, axes)


@rule("broadcast_tensors")
def broadcast_tensors(record: Record, node: Any, args: Arguments) -> list[Value]:
    """Tensors that are broadcast to one shape: they have the same channels."""
    result = broadcast(record, node, args["tensors"])
    return [replace(result, scale=operand.scale) for operand in args["tensors"]]


@rule("normal")
def normal(record: Record, node: Any, args: Arguments) -> Value:
    """Random draws around given means: all axes keep their width."""
    drawn = chosen(record, node, args)
    record.freeze_all(drawn.axes, DRAWN)
    return drawn


def broadcast(record: Record, node: Any, operands: Sequence[Value]) -> Value:
    """Unify the axes of operands that are broadcast to the shape that a node computes."""
    shape = shape_of(node)
    axes: list[Runs] = [fixed(1)] * len(shape)
    for operand in operands:
        offset = len(shape) - len(operand.shape)
        for index, (size, axis) in enumerate(zip(operand.shape, operand.axes, strict=True), start=offset):
            if operand.name is not None:
                role: Role = "out" if size > 1 else "fixed"
                axis = record.parameter_axis(operand, role, axis, dimension=index - offset)
            if size == 1:
                record.atoms.freeze(axis, "a single value for all channels")
                continue
            if record.atoms.length(axes[index]) == 1:
                axes[index] = axis
            else:
                record.atoms.unify(axes[index], axis, f"added to or multiplied with channels {STAYING}")
    return Value(shape, tuple(axes), operands[0].scale)

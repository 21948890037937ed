"""Rules for attention and products of activations: heads pass; the head dimension of attention may grow."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from string import ascii_letters
from typing import Any

from growlab.widths.atoms import Runs, fixed
from growlab.widths.groups import Role
from growlab.widths.program import operation_of, shape_of
from growlab.widths.rules.affine import (
    is_stack,
    product_from_left,
    product_with_stack,
    product_with_weight,
    weight_in_product,
)
from growlab.widths.rules.registry import RULES, Arguments, keep_full_width, rule
from growlab.widths.values import Record, Value

_ATTENTION = "attention multiplies and sums over them"
_PRODUCT = "a matrix product multiplies and sums over them"
_EINSUM = "einsum multiplies or sums over them"


@rule("matmul", "bmm", "mm", "mv")
def matmul(record: Record, node: Any, args: Arguments) -> Any:
    """Matrix product: leading dimensions (heads) pass, the last two of each operand keep their width.

    If `Record.heads` is "values", the rows of the first operand and the columns of the second pass too. Activations
    times a parameter of two dimensions are a linear layer; of more dimensions, a linear layer for each matrix; of one
    dimension, a weighted sum.
    """
    first, second = args["self"], next(args[name] for name in ("other", "mat2", "vec") if name in args)
    if min(len(first.shape), len(second.shape)) == 1:
        return _with_vector(record, node, args, first, second)
    if first.name is None and len(first.shape) > 1 and weight_in_product(second):
        return product_with_weight(record, node, first, second)
    if _is_activation(second) and weight_in_product(first):
        return product_from_left(record, node, first, second)
    for left, (factor, x) in enumerate(((second, first), (first, second))):
        if _is_activation(x) and is_stack(record, factor):
            kept = _leading_axes(record, node, x, factor, x.axes[-1 if left else -2])
            return product_with_stack(record, node, x, factor, kept, left=bool(left))
    rank, activations = len(shape_of(node)), first.name is None and second.name is None
    sizes = record.heads == "sizes" and activations
    # The read-out of a state-space model is not attention: rows are independent.
    read_out = second.shape[-1] == 1 and activations
    if not (sizes or _of_activations(record, [first, second]) or read_out):
        return _product(record, node, [first, second], rank)
    result = _product(record, node, [first, second], rank, num_summed=0)
    if not (sizes and record.multiply(first, second, second.axes[-2], node.args[-2:])):
        record.atoms.freeze(first.axes[-1] + second.axes[-2], _PRODUCT)
    return replace(result, axes=(*result.axes[:-2], first.axes[-2], second.axes[-1]))


def _with_vector(record: Record, node: Any, args: Arguments, first: Value, second: Value) -> Any:
    """Sum of activations [..., I] or [..., I, N] over their channels I, weighted by a parameter [I]."""
    vector, x, dim = (second, first, -1) if len(second.shape) == 1 else (first, second, -2)
    if not (_is_activation(x) and record.is_weight(vector)):
        return keep_full_width(record, node, args, _PRODUCT)
    axes = list(x.axes)
    return _weighted_sum(record, node, x, vector, axes.pop(dim), axes)


def _weighted_sum(record: Record, node: Any, x: Value, vector: Value, summed: Runs, kept: Sequence[Runs]) -> Value:
    record.parameter_axis(vector, "in", summed)
    return record.follow(node, x, vector, kept)


def _is_activation(value: Value) -> bool:
    return value.name is None and value.turned is None and len(value.shape) > 1


def _leading_axes(record: Record, node: Any, x: Value, factor: Value, positions: Runs) -> list[Runs]:
    """Axes of a product with a stack of matrices, without the channels; dimensions of the stack are frozen."""
    leading = shape_of(node)[:-2]
    axes: list[Runs] = [fixed(size) for size in leading]
    for dim, axis in enumerate(x.axes[:-2], start=len(leading) - len(x.shape) + 2):
        from_end = dim - len(leading) - 2
        if len(factor.shape) >= -from_end and factor.shape[from_end] > 1:
            record.atoms.freeze(axis, "one matrix for each of several")
        elif record.atoms.length(axis) == leading[dim]:
            axes[dim] = axis
    return [*axes, positions]


def _of_activations(record: Record, values: Sequence[Value]) -> bool:
    """Return True if all factors are activations and `Record.heads` lets their values grow."""
    activations = all(value.name is None for value in values)
    record.multiplies |= activations
    return activations and record.heads == "values"


@rule("baddbmm")
def biased_matmul(record: Record, node: Any, args: Arguments) -> Any:
    """Batched matrix product plus a bias."""
    x, factor, bias = args["batch1"], args["batch2"], args["self"]
    if (_is_activation(x) and is_stack(record, factor)) or record.heads == "sizes":
        product = matmul(record, node, {"self": x, "mat2": factor})
        return RULES["add"](record, node, {"self": product, "other": bias})
    return _product(record, node, [x, factor, bias], len(shape_of(node)))


@rule("einsum")
def einsum(record: Record, node: Any, args: Arguments) -> Any:
    """Einsum: letters of the output pass, letters that are summed over keep their width.

    Activations times a parameter of two dimensions, one of them summed over, are a linear layer; of more dimensions,
    several linear layers; of one dimension, a weighted sum. Other parameters keep their width.
    """
    operands = args["tensors"]
    equation = _without_dots(args["equation"].replace(" ", ""), [value.shape for value in operands])
    inputs, arrow, output = equation.partition("->")
    letters = inputs.split(",")
    if "." in equation or not arrow or any(len(set(term)) < len(term) for term in letters):
        return keep_full_width(record, node, args)
    terms = dict(zip(letters, operands, strict=True))
    if (result := _einsum_with_weight(record, node, terms, output)) is not None:
        return result
    record.note_attention(node)
    # As in a matrix product of activations: letters that are not in all operands keep their width.
    passing = any(v.name for v in operands) or _of_activations(record, operands)
    # It is no attention if one operand has all letters of the other: rows are independent.
    passing |= len(letters) == 2 and (set(letters[0]) <= set(letters[1]) or set(letters[1]) <= set(letters[0]))
    element_wise = set(output) if passing else set(output).intersection(*letters)
    axes: dict[str, Runs] = {}
    for term, value in zip(letters, operands, strict=True):
        record.scales.pin(value.scale)
        for letter, axis in zip(term, value.axes, strict=True):
            if value.name is not None or letter not in element_wise:
                record.atoms.freeze(axis, _EINSUM)
            if record.atoms.length(axes.setdefault(letter, axis)) == record.atoms.length(axis):
                record.atoms.unify(axes[letter], axis, "letters of an einsum laid out otherwise")
            else:
                record.freeze_all((axis, axes[letter]), _EINSUM)
    shape = shape_of(node)
    sized = zip((axes[letter] for letter in output), shape, strict=True)
    return record.unit(shape, [axis if record.atoms.length(axis) == size else fixed(size) for axis, size in sized])


def _without_dots(equation: str, shapes: Sequence[tuple[int, ...]]) -> str:
    """Replace the dots in an equation by letters, if they are the same sizes in all operands that have them."""
    terms = zip(equation.partition("->")[0].split(","), shapes, strict=True)
    sizes = {
        shape[term.index(".") : len(shape) - len(term) + term.index(".") + 3] for term, shape in terms if "..." in term
    }
    unused = (letter for letter in ascii_letters if letter not in equation)
    return equation.replace("...", "".join(islice(unused, *map(len, sizes)))) if len(sizes) == 1 else equation


def _einsum_with_weight(record: Record, node: Any, operands: dict[str, Value], output: str) -> Value | None:
    """Einsum of activations and a parameter as a linear layer, a stack of them or a weighted sum; None otherwise."""
    weights = [(term, v) for term, v in operands.items() if v.name is not None]
    others = [(term, v) for term, v in operands.items() if v.name is None]
    if len(weights) != 1 or len(others) != 1:
        return None
    (term, weight), (x_term, x) = weights[0], others[0]
    summed = [letter for letter in term if letter in x_term and letter not in output]
    new = [letter for letter in term if letter in output and letter not in x_term]
    axes = dict(zip(x_term, x.axes, strict=True))
    if len(term) == 2:
        if len(summed) != 1 or len(new) != 1 or set(x_term) - set(summed) != set(output) - set(new):
            return None
        transposed = term[0] == summed[0]
        roles: tuple[Role, Role] = ("in", "out") if transposed else ("out", "in")
        weight_axes = dict(zip(term, record.weight_axes(weight, *roles), strict=True))
        record.atoms.unify(weight_axes[summed[0]], axes[summed[0]], "input of a linear layer")
        axes[new[0]] = weight_axes[new[0]]
        result = [axes[letter] for letter in output]
        return record.affine(node, weight, None, x, result, output.index(new[0]), transposed=transposed)
    if not record.is_weight(weight) or not summed:
        return None
    if len(term) == 1:
        if set(x_term) != {*summed, *output}:
            return None
        return _weighted_sum(record, node, x, weight, axes[term], [axes[letter] for letter in output])
    if not new or set(term + x_term) - set(output) - set(summed):
        return None
    for dim, letter in enumerate(term):
        if letter in summed:
            record.parameter_axis(weight, "in", axes[letter], dimension=dim)
        elif letter in new:
            axes[letter] = record.parameter_axis(weight, "out", weight.axes[dim], dimension=dim)
        else:
            record.atoms.freeze(weight.axes[dim] + axes[letter], "one matrix for each of several")
    return record.follow(node, x, weight, [axes[letter] for letter in output])


@rule("scaled_dot_product_attention")
def scaled_dot_product_attention(record: Record, node: Any, args: Arguments) -> Value:
    """Attention: heads pass, with their masks or biases; for the head dimension see `Record.attend`."""
    values = [args["query"], args["key"], args["value"]]
    if args.get("attn_mask") is not None:
        values.append(args["attn_mask"])
    # A scale given as a number may or may not depend on the head dimension.
    grows = args.get("scale") is None and record.attend(args["query"], args["key"], args["value"], node.args[:2])
    result = _product(record, node, values, len(shape_of(node)), 1 if grows else 2, _ATTENTION)
    return replace(result, axes=(*result.axes[:-1], args["value"].axes[-1])) if grows else result


def _product(
    record: Record, node: Any, values: list[Value], rank: int, num_summed: int = 2, reason: str = _PRODUCT
) -> Value:
    shape = shape_of(node)
    record.note_attention(node)
    axes: list[Runs] = [fixed(1)] * (rank - 2)
    for position, value in enumerate(values):
        record.scales.pin(value.scale)
        # If the head dimension grows, only positions are frozen; of a mask, both dimensions.
        frozen = value.axes[-2:-1] if num_summed == 1 and position < 3 else value.axes[-2:] if num_summed else ()
        record.freeze_all(frozen if value.name is None else value.axes, reason)
        leading = value.axes[:-2]
        for index, axis in enumerate(leading, start=rank - 2 - len(leading)):
            length = record.atoms.length(axes[index])
            if length == 1:
                axes[index] = axis
            elif record.atoms.length(axis) == length:
                record.atoms.unify(axes[index], axis, "heads laid out otherwise")
            elif record.atoms.length(axis) == 1:
                record.atoms.freeze(axis, "a single value for all heads")
            else:
                # Several query heads share a key head.
                record.freeze_all((axis, axes[index]), "heads shared by others")
    return record.unit(shape, (*axes, *map(fixed, shape[rank - 2 :])))


@rule("softmax", "log_softmax", "_softmax", "_log_softmax", "cumsum", "cumsum_", "cumprod", "cumprod_")
def over_one_dimension(record: Record, node: Any, args: Arguments) -> Value:
    """Softmax, cumulative sum or product: the dimension that it runs over keeps its width, the others pass."""
    x = args["self"]
    record.atoms.freeze(x.axes[args["dim"]], f"{operation_of(node)} runs over these channels")
    record.scales.pin(x.scale)
    return record.unit(x.shape, x.axes)

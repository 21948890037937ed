"""Rules for attention and products of activations: heads pass; in attention the head dimension may grow."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from string import ascii_letters
from typing import TYPE_CHECKING, Any

from growlab.widths.atoms import Runs, fixed
from growlab.widths.layout import Role
from growlab.widths.rules.affine import (
    is_stack,
    product_from_left,
    product_with_stack,
    product_with_weight,
    weight_in_product,
)
from growlab.widths.rules.registry import RULES, Arguments, Value, keep_full_width, rule

if TYPE_CHECKING:
    from growlab.widths.tracer import Tracer

_ATTENTION = "attention multiplies and sums over them"
_PRODUCT = "a matrix product multiplies and sums over them"
_EINSUM = "einsum multiplies or sums over them"


@rule("matmul", "bmm", "mm")
def matmul(tracer: "Tracer", node: Any, args: Arguments) -> Any:
    """Matrix product: leading dimensions (heads) pass, the last two of each operand keep their width.

    If `Tracer.heads` is "values", the rows of the first operand and the columns of the second pass too. Activations
    times a parameter of two dimensions are a linear layer, times a parameter of more dimensions one for each of its
    matrices, times a parameter of a single dimension a weighted sum.
    """
    first, second = args["self"], args["other"] if "other" in args else args["mat2"]
    if min(len(first.shape), len(second.shape)) == 1:
        return _with_vector(tracer, node, args, first, second)
    if first.name is None and len(first.shape) > 1 and weight_in_product(second):
        return product_with_weight(tracer, node, first, second)
    if _is_activation(second) and weight_in_product(first):
        return product_from_left(tracer, node, first, second)
    for left, (factor, x) in enumerate(((second, first), (first, second))):
        if _is_activation(x) and is_stack(tracer, factor):
            kept = _beside_matrices(tracer, node, x, factor, x.axes[-1 if left else -2])
            return product_with_stack(tracer, node, x, factor, kept, left=bool(left))
    rank = len(tracer.shape(node))
    if tracer.heads == "sizes" and first.name is None and second.name is None:
        result = _product(tracer, node, [first, second], rank, num_summed=0)
        if not tracer.multiply(first, second, second.axes[-2], node.args[-2:]):
            tracer.atoms.freeze(first.axes[-1] + second.axes[-2], _PRODUCT)
        return replace(result, axes=(*result.axes[:-2], first.axes[-2], second.axes[-1]))
    # The read-out of a state-space model is not attention: rows are independent.
    read_out = second.shape[-1] == 1 and first.name is None and second.name is None
    if not (_of_activations(tracer, [first, second]) or read_out):
        return _product(tracer, node, [first, second], rank)
    result = _product(tracer, node, [first, second], rank, num_summed=0)
    tracer.atoms.freeze(first.axes[-1] + second.axes[-2], _PRODUCT)
    return replace(result, axes=(*result.axes[:-2], first.axes[-2], second.axes[-1]))


@rule("mv")
def matrix_times_vector(tracer: "Tracer", node: Any, args: Arguments) -> Any:
    """Matrix-vector product: with a parameter as the vector a weighted sum of channels."""
    return _with_vector(tracer, node, args, args["self"], args["vec"])


def _with_vector(tracer: "Tracer", node: Any, args: Arguments, first: Value, second: Value) -> Any:
    """Sum of activations [..., I] or [..., I, N] over their channels I, weighted by a parameter [I]."""
    vector, x, place = (second, first, -1) if len(second.shape) == 1 else (first, second, -2)
    if not (_is_activation(x) and _is_weight(tracer, vector)):
        return keep_full_width(tracer, node, args, _PRODUCT)
    axes = list(x.axes)
    return _weighed_sum(tracer, node, x, vector, axes.pop(place), axes)


def _weighed_sum(
    tracer: "Tracer", node: Any, x: Value, vector: Value, summed: Runs, kept: Sequence[Runs]
) -> Value:
    tracer.parameter_axis(vector, "in", summed)
    tracer.scales.pin(x.scale)
    return tracer.follow(x, vector, Value(tracer.shape(node), tuple(kept), tracer.scales.new(unit=True)))


def _is_weight(tracer: "Tracer", value: Value) -> bool:
    return value.name is not None and value.name not in tracer.buffers


def _is_activation(value: Value) -> bool:
    return value.name is None and value.turned is None and len(value.shape) > 1


def _beside_matrices(tracer: "Tracer", node: Any, x: Value, factor: Value, positions: Runs) -> list[Runs]:
    """Axes of a product with a stack of matrices, without the channels; dimensions with a matrix each are frozen."""
    leading = tracer.shape(node)[:-2]
    axes: list[Runs] = [fixed(size) for size in leading]
    for place, axis in enumerate(x.axes[:-2], start=len(leading) - len(x.shape) + 2):
        from_end = place - len(leading) - 2
        if len(factor.shape) >= -from_end and factor.shape[from_end] > 1:
            tracer.atoms.freeze(axis, "one matrix for each of several")
        elif tracer.atoms.length(axis) == leading[place]:
            axes[place] = axis
    return [*axes, positions]


def _of_activations(tracer: "Tracer", values: Sequence[Value]) -> bool:
    """Return True if all factors are activations and `Tracer.heads` lets their values grow."""
    activations = all(value.name is None for value in values)
    tracer.multiplies |= activations
    return activations and tracer.heads == "values"


@rule("baddbmm")
def biased_matmul(tracer: "Tracer", node: Any, args: Arguments) -> Any:
    """Batched matrix product plus a bias."""
    x, factor, bias = args["batch1"], args["batch2"], args["self"]
    if _is_activation(x) and is_stack(tracer, factor):
        kept = _beside_matrices(tracer, node, x, factor, x.axes[-2])
        product = product_with_stack(tracer, node, x, factor, kept)
        return RULES["add"](tracer, node, {"self": product, "other": bias})
    if tracer.heads == "sizes":
        product = matmul(tracer, node, {"self": x, "mat2": factor})
        return RULES["add"](tracer, node, {"self": product, "other": bias})
    return _product(tracer, node, [x, factor, bias], len(tracer.shape(node)))


@rule("einsum")
def einsum(tracer: "Tracer", node: Any, args: Arguments) -> Any:
    """Einsum: letters of the output pass, letters that are summed over keep their width.

    Activations and a parameter of two dimensions, of which one is summed over, are a linear layer; a parameter of more
    dimensions is several layers, and one of a single dimension weights a sum. Other parameters keep their width.
    """
    operands = args["tensors"]
    equation = _without_dots(args["equation"].replace(" ", ""), [value.shape for value in operands])
    inputs, arrow, output = equation.partition("->")
    letters = inputs.split(",")
    if "." in equation or not arrow or any(len(set(term)) < len(term) for term in letters):
        return keep_full_width(tracer, node, args)
    terms = dict(zip(letters, operands, strict=True))
    for layer in (_linear_einsum, _stacked_einsum, _weighed_einsum):
        if (result := layer(tracer, node, terms, output)) is not None:
            return result
    tracer.note_attention(node)
    # As in a matrix product of activations: letters that are not in all operands keep their width.
    passing = any(v.name for v in operands) or _of_activations(tracer, operands)
    # If the other operand has all letters of one, its rows are independent: no attention.
    passing |= len(letters) == 2 and (
        set(letters[0]) <= set(letters[1]) or set(letters[1]) <= set(letters[0])
    )
    one_by_one = set(output) if passing else set(output).intersection(*letters)
    found: dict[str, Runs] = {}
    for term, value in zip(letters, operands, strict=True):
        tracer.scales.pin(value.scale)
        for letter, axis in zip(term, value.axes, strict=True):
            if value.name is not None or letter not in one_by_one:
                tracer.atoms.freeze(axis, _EINSUM)
            if tracer.atoms.length(found.setdefault(letter, axis)) == tracer.atoms.length(axis):
                tracer.atoms.unify(found[letter], axis, "letters of an einsum laid out otherwise")
            else:
                tracer.atoms.freeze(axis, _EINSUM)
                tracer.atoms.freeze(found[letter], _EINSUM)
    axes = tuple(found[letter] for letter in output)
    sizes = zip(axes, tracer.shape(node), strict=True)
    axes = tuple(axis if tracer.atoms.length(axis) == size else fixed(size) for axis, size in sizes)
    return Value(tracer.shape(node), axes, tracer.scales.new(unit=True))


def _without_dots(equation: str, shapes: Sequence[tuple[int, ...]]) -> str:
    """Replace dots in an equation by letters, if they stand for the same sizes in all operands that have them."""
    terms = zip(equation.partition("->")[0].split(","), shapes, strict=True)
    sizes = {
        shape[term.index(".") : len(shape) - len(term) + term.index(".") + 3]
        for term, shape in terms
        if "..." in term
    }
    unused = (letter for letter in ascii_letters if letter not in equation)
    return equation.replace("...", "".join(islice(unused, *map(len, sizes)))) if len(sizes) == 1 else equation


def _linear_einsum(tracer: "Tracer", node: Any, operands: dict[str, Value], output: str) -> Value | None:
    weights = [(term, v) for term, v in operands.items() if v.name is not None and len(term) == 2]
    others = [(term, v) for term, v in operands.items() if v.name is None]
    if len(operands) != 2 or len(weights) != 1 or len(others) != 1:
        return None
    (term, weight), (given, x) = weights[0], others[0]
    summed = [letter for letter in term if letter in given and letter not in output]
    made = [letter for letter in term if letter in output and letter not in given]
    if len(summed) != 1 or len(made) != 1 or set(given) - set(summed) != set(output) - set(made):
        return None
    transposed = term[0] == summed[0]
    roles: tuple[Role, Role] = ("in", "out") if transposed else ("out", "in")
    axes = dict(zip(term, tracer.weight_axes(weight, *roles, []), strict=True))
    known = {**dict(zip(given, x.axes, strict=True))}
    tracer.atoms.unify(axes[summed[0]], known[summed[0]], "input of a linear layer")
    known[made[0]] = axes[made[0]]
    shape, result = tracer.shape(node), tuple(known[letter] for letter in output)
    return tracer.affine(
        node, weight, None, False, x, shape, result, output.index(made[0]), transposed=transposed
    )


def _stacked_einsum(tracer: "Tracer", node: Any, operands: dict[str, Value], output: str) -> Value | None:
    """Einsum of activations and a parameter of 3 or more dimensions as a stack of linear layers; None if it is not."""
    weights = [(term, v) for term, v in operands.items() if is_stack(tracer, v) and v.turned is None]
    others = [(term, v) for term, v in operands.items() if v.name is None]
    if len(operands) != 2 or len(weights) != 1 or len(others) != 1:
        return None
    (term, weight), (given, x) = weights[0], others[0]
    summed = [letter for letter in term if letter in given and letter not in output]
    made = [letter for letter in term if letter in output and letter not in given]
    if not (summed and made) or set(term + given) - set(output) - set(summed):
        return None
    known = dict(zip(given, x.axes, strict=True))
    for place, letter in enumerate(term):
        if letter in summed:
            tracer.parameter_axis(weight, "in", known[letter], dimension=place)
        elif letter in made:
            known[letter] = tracer.parameter_axis(weight, "out", weight.axes[place], dimension=place)
        else:
            tracer.atoms.freeze(weight.axes[place] + known[letter], "one matrix for each of several")
    tracer.scales.pin(x.scale)
    axes = tuple(known[letter] for letter in output)
    return tracer.follow(x, weight, Value(tracer.shape(node), axes, tracer.scales.new(unit=True)))


def _weighed_einsum(tracer: "Tracer", node: Any, operands: dict[str, Value], output: str) -> Value | None:
    """Einsum of activations and a parameter of one dimension as a weighted sum; None if it is not."""
    weights = [(term, v) for term, v in operands.items() if len(term) == 1 and _is_weight(tracer, v)]
    others = [(term, v) for term, v in operands.items() if v.name is None]
    if len(operands) != 2 or len(weights) != 1 or len(others) != 1:
        return None
    (summed, vector), (given, x) = weights[0], others[0]
    if summed in output or set(given) != {summed, *output}:
        return None
    known = dict(zip(given, x.axes, strict=True))
    return _weighed_sum(tracer, node, x, vector, known[summed], [known[letter] for letter in output])


@rule("scaled_dot_product_attention")
def scaled_dot_product_attention(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Attention: heads pass, with their masks or biases; for the head dimension see `Tracer.attend`."""
    values = [args["query"], args["key"], args["value"]]
    if args.get("attn_mask") is not None:
        values.append(args["attn_mask"])
    # A scale that is given as a number may depend on the head dimension or not.
    grows = args.get("scale") is None and tracer.attend(
        args["query"], args["key"], args["value"], node.args[:2]
    )
    result = _product(tracer, node, values, len(tracer.shape(node)), 1 if grows else 2, _ATTENTION)
    return replace(result, axes=(*result.axes[:-1], args["value"].axes[-1])) if grows else result


def _product(
    tracer: "Tracer", node: Any, values: list[Value], rank: int, num_summed: int = 2, reason: str = _PRODUCT
) -> Value:
    shape = tracer.shape(node)
    tracer.note_attention(node)
    axes: list[Runs] = [fixed(1)] * (rank - 2)
    for position, value in enumerate(values):
        tracer.scales.pin(value.scale)
        # If the head dimension grows, only positions are fixed; of a mask, both dimensions.
        kept = value.axes[-2:-1] if num_summed == 1 and position < 3 else value.axes[-2:]
        if not num_summed:
            kept = ()
        for axis in kept if value.name is None else value.axes:
            tracer.atoms.freeze(axis, reason)
        leading = value.axes[:-2]
        for index, axis in enumerate(leading, start=rank - 2 - len(leading)):
            known = tracer.atoms.length(axes[index])
            if known == 1:
                axes[index] = axis
            elif tracer.atoms.length(axis) == known:
                tracer.atoms.unify(axes[index], axis, "heads laid out otherwise")
            elif tracer.atoms.length(axis) == 1:
                tracer.atoms.freeze(axis, "a single value for all heads")
            else:
                # Several query heads share a key head.
                tracer.atoms.freeze(axis, "heads shared by others")
                tracer.atoms.freeze(axes[index], "heads shared by others")
    return Value(shape, (*axes, *map(fixed, shape[rank - 2 :])), tracer.scales.new(unit=True))


@rule("softmax", "log_softmax", "_softmax", "_log_softmax", "cumsum", "cumsum_", "cumprod", "cumprod_")
def over_one_dimension(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Softmax or cumulative sum or product: the dimension that it runs over keeps its width, the others pass."""
    x = args["self"]
    tracer.atoms.freeze(x.axes[args["dim"]], f"{tracer.operation(node)} runs over these channels")
    tracer.scales.pin(x.scale)
    return Value(x.shape, x.axes, tracer.scales.new(unit=True))

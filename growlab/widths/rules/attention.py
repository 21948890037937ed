"""Rules for products of activations and attention: heads pass; what a head sums over may grow in attention proper."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from growlab.widths.atoms import Runs, fixed
from growlab.widths.rules.affine import product_with_weight, weight_in_product
from growlab.widths.rules.registry import Arguments, Value, rule

if TYPE_CHECKING:
    from growlab.widths.tracer import Tracer

_REASON = "attention multiplies and sums over them"


@rule("matmul", "bmm", "mm")
def matmul(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Leading dimensions (heads) are worked on one by one: they pass. The last two of each operand keep their width.

    Activations times a parameter of two dimensions are a linear layer. Other parameters keep their width.
    """
    first, second = args["self"], args["other"] if "other" in args else args["mat2"]
    if first.name is None and len(first.shape) > 1 and weight_in_product(second):
        return product_with_weight(tracer, node, first, second)
    return _product(tracer, node, [first, second], len(tracer.shape(node)))


@rule("scaled_dot_product_attention")
def scaled_dot_product_attention(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Every head attends by itself; a mask or bias per head belongs to it. See `Tracer.attend` for its dimension."""
    values = [args["query"], args["key"], args["value"]]
    if args.get("attn_mask") is not None:
        values.append(args["attn_mask"])
    # A scale that is given as a number may follow the dimension or not.
    grows = args.get("scale") is None and tracer.attend(*values[:3])
    result = _product(tracer, node, values, len(tracer.shape(node)), num_summed=1 if grows else 2)
    return replace(result, axes=(*result.axes[:-1], args["value"].axes[-1])) if grows else result


def _product(tracer: "Tracer", node: Any, values: list[Value], rank: int, num_summed: int = 2) -> Value:
    shape = tracer.shape(node)
    tracer.note_attention(node)
    axes: list[Runs] = [fixed(1)] * (rank - 2)
    for position, value in enumerate(values):
        tracer.scales.pin(value.scale)
        # Of an attention whose dimension grows, only positions are fixed; of its mask, both dimensions.
        kept = value.axes[-2:-1] if num_summed == 1 and position < 3 else value.axes[-2:]
        for axis in kept if value.name is None else value.axes:
            tracer.atoms.freeze(axis, _REASON)
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


@rule("softmax", "log_softmax", "_softmax", "cumsum")
def over_one_dimension(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Over one dimension, which keeps its width; the others pass."""
    x = args["self"]
    tracer.atoms.freeze(x.axes[args["dim"]], f"{tracer.operation(node)} runs over these channels")
    tracer.scales.pin(x.scale)
    return Value(x.shape, x.axes, tracer.scales.new(unit=True))

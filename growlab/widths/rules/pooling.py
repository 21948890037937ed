"""Rules for pooling, interpolation and reductions."""

from typing import TYPE_CHECKING, Any

from growlab.widths.atoms import Runs, fixed
from growlab.widths.rules.elementwise import total
from growlab.widths.rules.registry import Arguments, Value, first_tensor, freeze_windows, rule

if TYPE_CHECKING:
    from growlab.widths.tracer import Tracer

_WEIGHED = frozenset({"mean", "var", "std", "var_mean", "std_mean"})


@rule(
    *("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d"),
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
    *(
        "upsample_nearest1d",
        "upsample_nearest2d",
        "upsample_linear1d",
        "upsample_bilinear2d",
        "upsample_bicubic2d",
        "upsample_nearest3d",
        "upsample_trilinear3d",
        "_upsample_bilinear2d_aa",
        "_upsample_bicubic2d_aa",
        "_upsample_nearest_exact1d",
        "_upsample_nearest_exact2d",
        "_upsample_nearest_exact3d",
    ),
)
def pool(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Pooling or interpolation of each channel; positions keep their number."""
    x, shape = first_tensor(args), tracer.shape(node)
    num_windows = next(int(char) for char in tracer.operation(node) if char.isdigit())
    freeze_windows(tracer, x, num_windows)
    return Value(shape, (*x.axes[:-num_windows], *map(fixed, shape[-num_windows:])), x.scale)


@rule(
    *("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
    *("max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices"),
)
def pool_with_indices(tracer: "Tracer", node: Any, args: Arguments) -> list[Value]:
    """Max pooling of each channel, with indices, which have no scale."""
    pooled = pool(tracer, node, args)
    return [pooled, Value(pooled.shape, pooled.axes, tracer.scales.new(unit=True))]


@rule("mean", "sum", "amax", "amin")
def reduce(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Reduction: reduced dimensions keep their width, since a mean over channels would change with their number.

    Growth reweights a mean, a variance, a standard deviation, a sum of squares or its root over one dimension in a
    module without submodules, such as a hand-written normalisation: there the channels may grow. So may those of a
    product with a parameter that is summed over them, `(x * weight).sum(-1)`: a hand-written linear layer.
    """
    x, keep, dims = args["self"], args.get("keepdim", False), args.get("dim")
    dims = [dims] if isinstance(dims, int) else dims or range(len(x.shape))
    reduced = {dim % len(x.shape) for dim in dims}
    summed = x.name is None and (args.get("summed", False) or _of_squares(tracer, node))
    if (tracer.operation(node) in _WEIGHED or summed) and len(reduced) == 1 and tracer.has_no_parts(node):
        (dim,) = reduced
        before, axis, behind = x.axes[:dim], x.axes[dim], x.axes[dim + 1 :]
        tracer.scales.pin(x.scale)
        names = {"weight": None, "bias": None}
        tracer.record_channel_norm(node, axis, names, dim if behind else -1, summed)
        return Value(tracer.shape(node), (*before, *([fixed(1)] if keep else []), *behind), x.scale)
    if len(reduced) == 1 and (weight := _weight_of(tracer, node, x, *reduced)) is not None:
        (dim,) = reduced
        assert weight.name is not None
        tracer.consume(weight.name, dim - len(x.shape))
        tracer.scales.pin(x.scale)
        kept = (*x.axes[:dim], *([fixed(1)] if keep else []), *x.axes[dim + 1 :])
        return tracer.follow(x, weight, Value(tracer.shape(node), kept, tracer.scales.new(unit=True)))
    axes: list[Runs] = []
    for index, axis in enumerate(x.axes):
        if index in reduced:
            tracer.atoms.freeze(axis, f"reduced by {tracer.operation(node)}")
            if keep:
                axes.append(fixed(1))
        else:
            axes.append(axis)
    return Value(tracer.shape(node), tuple(axes), x.scale)


def _weight_of(tracer: "Tracer", node: Any, x: Value, dim: int) -> Value | None:
    """Return the parameter that weights a sum over channels and that nothing else reads, or None."""
    product = node.args[0]
    if tracer.operation(node) != "sum" or product.op != "call_function" or tracer.operation(product) != "mul":
        return None
    factors = [tracer.value_of(one) for one in product.all_input_nodes]
    alone = all(len(one.users) == 1 for one in product.all_input_nodes if one.op == "placeholder")
    weights = [value for value in factors if isinstance(value, Value) and value.name is not None]
    if not alone or len(factors) != 2 or len(weights) != 1 or len(product.users) != 1:
        return None
    (weight,) = weights
    within = len(x.shape) - dim <= len(weight.shape) and weight.shape[dim - len(x.shape)] == x.shape[dim] > 1
    return weight if within and weight.name not in tracer.buffers else None


def _of_squares(tracer: "Tracer", node: Any) -> bool:
    source = node.args[0]
    if tracer.operation(node) != "sum" or source.op != "call_function":
        return False
    operation, factors = tracer.operation(source), source.args
    squared = operation == "square" or (operation == "pow" and factors[1] == 2)
    return squared or (operation == "mul" and factors[0] is factors[1])


@rule("var", "std", "var_mean", "std_mean", "logsumexp", "all", "any", "count_nonzero")
def reduce_beyond_scale(tracer: "Tracer", node: Any, args: Arguments) -> Value | list[Value]:
    """Reduction whose result has another scale: reduced dimensions keep their width, and the input its scale."""
    tracer.scales.pin(args["self"].scale)
    reduced = reduce(tracer, node, args)
    results = [Value(shape, reduced.axes, tracer.scales.new(unit=True)) for shape in tracer.shapes(node)]
    return results if tracer.has_several_outputs(node) else results[0]


@rule("_is_all_true", "_is_any_true")
def checked(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Check of `torch.distributions` over all entries, whatever their number."""
    return Value((), (), tracer.scales.new(unit=True))


@rule("max", "min")
def extreme(tracer: "Tracer", node: Any, args: Arguments) -> Value | list[Value]:
    """Maximum or minimum of two tensors, over a dimension (with indices), or over all entries."""
    if "other" in args:
        return total(tracer, node, args)
    reduced = reduce(tracer, node, args)
    if "dim" not in args:
        return reduced
    return [reduced, Value(reduced.shape, reduced.axes, tracer.scales.new(unit=True))]

"""Rules for pooling, interpolation, reductions and Fourier transforms."""

from typing import Any

from growlab.widths.atoms import Runs, fixed
from growlab.widths.program import as_computed, operation_of, shape_of, shapes_of
from growlab.widths.rules.elementwise import total
from growlab.widths.rules.registry import Arguments, first_tensor, freeze_windows, rule
from growlab.widths.values import Record, Value

_WEIGHED = ("mean", "var", "std", "var_mean", "std_mean")
_POOLING = """
max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
adaptive_avg_pool3d upsample_nearest1d upsample_nearest2d upsample_linear1d upsample_bilinear2d upsample_bicubic2d
upsample_nearest3d upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_nearest_exact1d
_upsample_nearest_exact2d _upsample_nearest_exact3d
"""


@rule(*_POOLING.split())
def pool(record: Record, node: Any, args: Arguments) -> Value:
    """Pooling or interpolation of each channel; positions keep their number."""
    x, shape = first_tensor(args), shape_of(node)
    num_windows = next(int(char) for char in operation_of(node) if char.isdigit())
    freeze_windows(record, x, num_windows)
    return Value(shape, (*x.axes[:-num_windows], *map(fixed, shape[-num_windows:])), x.scale)


@rule(
    *("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
    *("max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices"),
)
def pool_with_indices(record: Record, node: Any, args: Arguments) -> list[Value]:
    """Max pooling of each channel, with indices, which have no scale."""
    pooled = pool(record, node, args)
    return [pooled, record.unit(pooled.shape, pooled.axes)]


@rule("mean", "sum", "amax", "amin")
def reduce(record: Record, node: Any, args: Arguments) -> Value:
    """Reduction: reduced dimensions keep their width, since a mean over channels would change with their number.

    Growth reweights a mean, a variance, a standard deviation, a sum of squares or its root over one dimension in a
    module without submodules, such as a hand-written normalisation: there the channels may grow. So may those of a
    product with a parameter that is summed over them, `(x * weight).sum(-1)`: a hand-written linear layer.
    """
    x, keep, dims = args["self"], args.get("keepdim", False), args.get("dim")
    dims = [dims] if isinstance(dims, int) else dims or range(len(x.shape))
    reduced = {dim % len(x.shape) for dim in dims}
    summed = x.name is None and (args.get("summed", False) or _of_squares(record, node))
    if (operation_of(node) in _WEIGHED or summed) and len(reduced) == 1 and record.has_no_parts(node):
        (dim,) = reduced
        before, axis, behind = x.axes[:dim], x.axes[dim], x.axes[dim + 1 :]
        record.scales.pin(x.scale)
        names = {"weight": None, "bias": None}
        record.note_channel_norm(node, axis, names, dim if behind else -1, summed)
        return Value(shape_of(node), (*before, *([fixed(1)] if keep else []), *behind), x.scale)
    if len(reduced) == 1 and (weight := _weight_of(record, node, x, *reduced)) is not None:
        (dim,) = reduced
        assert weight.name is not None
        record.consume(weight.name, dim - len(x.shape))
        return record.follow(node, x, weight, (*x.axes[:dim], *([fixed(1)] if keep else []), *x.axes[dim + 1 :]))
    axes: list[Runs] = []
    for index, axis in enumerate(x.axes):
        if index in reduced:
            record.atoms.freeze(axis, f"reduced by {operation_of(node)}")
            if keep:
                axes.append(fixed(1))
        else:
            axes.append(axis)
    return Value(shape_of(node), tuple(axes), x.scale)


def _weight_of(record: Record, node: Any, x: Value, dim: int) -> Value | None:
    """Return the parameter that weights a sum over channels and that nothing else reads, or None."""
    product = node.args[0]
    if operation_of(node) != "sum" or product.op != "call_function" or operation_of(product) != "mul":
        return None
    factors = [record.values.get(one) for one in product.all_input_nodes]
    alone = all(len(one.users) == 1 for one in product.all_input_nodes if one.op == "placeholder")
    weights = [value for value in factors if isinstance(value, Value) and value.name is not None]
    if not alone or len(factors) != 2 or len(weights) != 1 or len(product.users) != 1:
        return None
    (weight,) = weights
    within = len(x.shape) - dim <= len(weight.shape) and weight.shape[dim - len(x.shape)] == x.shape[dim] > 1
    return weight if within and weight.name not in record.buffers else None


def _of_squares(record: Record, node: Any) -> bool:
    source = node.args[0]
    if operation_of(node) != "sum" or source.op != "call_function":
        return False
    operation, factors = operation_of(source), source.args
    squared = operation == "square" or (operation == "pow" and factors[1] == 2)
    return squared or (operation == "mul" and factors[0] is factors[1])


@rule("var", "std", "var_mean", "std_mean", "logsumexp", "all", "any", "count_nonzero")
def reduce_beyond_scale(record: Record, node: Any, args: Arguments) -> Value | list[Value]:
    """Reduction whose result has another scale: reduced dimensions keep their width, and the input its scale."""
    record.scales.pin(args["self"].scale)
    reduced = reduce(record, node, args)
    results = [record.unit(shape, reduced.axes) for shape in shapes_of(node)]
    return as_computed(node, results)


@rule("_is_all_true", "_is_any_true")
def checked(record: Record, node: Any, args: Arguments) -> Value:
    """Check of `torch.distributions` over all entries, whatever their number."""
    return record.unit((), ())


@rule("max", "min")
def extreme(record: Record, node: Any, args: Arguments) -> Value | list[Value]:
    """Maximum or minimum of two tensors, over a dimension (with indices), or over all entries."""
    if "other" in args:
        return total(record, node, args)
    reduced = reduce(record, node, args)
    if "dim" not in args:
        return reduced
    return [reduced, record.unit(reduced.shape, reduced.axes)]


# Number of trailing dimensions that are transformed by default.
_DIMENSIONS = {"": 1, "2": 2}


@rule(
    *(f"fft_{kind}fft{dims}" for kind in ("", "i", "r", "ir", "h", "ih") for dims in ("", "2", "n")),
    *("_fft_c2c", "_fft_r2c", "_fft_c2r", "fft_fftshift", "fft_ifftshift"),
)
def transformed(record: Record, node: Any, args: Arguments) -> Value:
    """Fourier transform: dimensions that are transformed keep their width, channels pass."""
    x, shape = first_tensor(args), shape_of(node)
    dims = args.get("dim")
    if dims is None:
        number = _DIMENSIONS.get(operation_of(node).rpartition("fft")[2], len(shape))
        dims = range(-number, 0)
    places = {dim % len(shape) for dim in ([dims] if isinstance(dims, int) else dims)}
    for place in places:
        record.atoms.freeze(x.axes[place], "Fourier transform over these channels")
    axes = tuple(fixed(size) if i in places else x.axes[i] for i, size in enumerate(shape))
    return Value(shape, axes, x.scale)


@rule("real", "imag", "_conj", "conj", "conj_physical", "resolve_conj", "resolve_neg")
def part_of_complex(record: Record, node: Any, args: Arguments) -> Value:
    """Real part, imaginary part or conjugate of every entry."""
    x = first_tensor(args)
    return Value(x.shape, x.axes, x.scale)


@rule("view_as_real")
def as_real(record: Record, node: Any, args: Arguments) -> Value:
    """View of complex numbers as real ones: real and imaginary parts are one more dimension, the last one."""
    x = first_tensor(args)
    return Value((*x.shape, 2), (*x.axes, fixed(2)), x.scale)


@rule("view_as_complex")
def as_complex(record: Record, node: Any, args: Arguments) -> Value:
    """View of real numbers as complex ones: the last dimension, of real and imaginary parts, is removed."""
    x = first_tensor(args)
    record.atoms.freeze(x.axes[-1], "real and imaginary parts")
    return Value(x.shape[:-1], x.axes[:-1], x.scale)

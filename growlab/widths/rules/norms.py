"""Rules for normalisations, norms over channels, operations that distinguish channels, pooling and reductions.

A group is isotropic, without a preferred basis, if everything between the layers that produce its channels and the
layers that consume them commutes with every rotation of the channels (Bird, "On De-Individuated Neurons", Eq. 1). A
norm over channels does, but most growth methods would change it, so it is only followed with
`trace(..., follow_norms=True)`.
"""

import math
from collections.abc import Iterator
from typing import Any

from growlab.widths.atoms import Run, Runs, fixed
from growlab.widths.program import as_computed, operation_of, shape_of, shapes_of
from growlab.widths.rules.elementwise import total
from growlab.widths.rules.registry import Arguments, first_tensor, freeze_windows, keep_full_width, rule
from growlab.widths.values import Record, Value, values_in

# Fewest values per group: at half the width or less, a group must still have more than one value.
_FEWEST_VALUES = 4


def _of_each_channel(record: Record, args: Arguments) -> dict[str, str | None]:
    """Unify a normalisation's tensors with the channels of its input; return their names by role, None if missing."""
    names = {}
    for role in ("weight", "bias", "running_mean", "running_var"):
        value = args.get(role)
        names[role] = None if value is None else value.name
        if value is not None:
            record.parameter_axis(value, "out", args["input"].axes[1])
    return names


def _over_positions(record: Record, node: Any, x: Value) -> None:
    """Freeze positions, over which the statistics of a channel are taken."""
    record.freeze_all(x.axes[2:], f"{operation_of(node)} takes its statistics over them")


@rule("_weight_norm")
def weight_norm(record: Record, node: Any, args: Arguments) -> Any:
    """Weight normalisation g v / |v| of parameters used only there; v represents the weight."""
    v, g = args["v"], args["g"]
    only_here = all(operation_of(user) == "_weight_norm" for each in node.args[:2] for user in each.users)
    if not (record.is_weight(v) and record.is_weight(g) and only_here):
        return keep_full_width(record, node, args, "weight_norm divides by a length over them")
    if {v.name, g.name} & record.untrained:
        return keep_full_width(record, node, args, "weight_norm of a weight whose length or direction is frozen")
    dim = args.get("dim", 0)
    if dim >= 0:
        record.atoms.unify(g.axes[dim], v.axes[dim], "lengths of a weight")
    record.weight_norms[str(v.name)] = (str(g.name), dim)
    return v


@rule("batch_norm")
def batch_norm(record: Record, node: Any, args: Arguments) -> Value:
    """Batch normalisation: statistics per channel over the batch, which follow the scale of the input."""
    x = args["input"]
    _over_positions(record, node, x)
    names = _of_each_channel(record, args)
    if names["weight"] is None or names["running_var"] is None:
        # For a rescaled input, a weight can compensate for eps only if the variance is known.
        record.scales.pin(x.scale)
    record.note_norm(node, names, args["eps"], x)
    return record.unit(x.shape, x.axes)


@rule("instance_norm")
def instance_norm(record: Record, node: Any, args: Arguments) -> Value:
    """Instance normalisation: statistics per channel and sample."""
    x = args["input"]
    _over_positions(record, node, x)
    record.note_size(node, x.shape[1], x.axes[1])
    record.note_norm(node, _of_each_channel(record, args), args["eps"], x, per_sample=True)
    record.scales.pin(x.scale)
    return record.unit(x.shape, x.axes)


@rule("layer_norm", "rms_norm")
def layer_norm(record: Record, node: Any, args: Arguments) -> Value:
    """Layer or RMS normalisation: growth reweights statistics over the last dimension; if over several, these stay."""
    x = args["input"]
    names = {"weight": None, "bias": None}
    if len(args["normalized_shape"]) == 1:
        record.note_size(node, x.shape[-1], x.axes[-1])
        for role in names:
            if args.get(role) is not None:
                record.parameter_axis(args[role], "out", x.axes[-1])
                names[role] = args[role].name
        record.note_channel_norm(node, x.axes[-1], names)
    else:
        first = len(x.shape) - len(args["normalized_shape"])
        record.note_other_norm(node)
        affine = [axis for role in names if args.get(role) is not None for axis in args[role].axes]
        reason = f"{operation_of(node)} takes its statistics over several dimensions"
        record.freeze_all((*x.axes[first:], *affine), reason)
    record.scales.pin(x.scale)
    return record.unit(x.shape, x.axes)


@rule("group_norm")
def group_norm(record: Record, node: Any, args: Arguments) -> Value:
    """Group normalisation: the width within each group grows, unless a group could have a single value.

    With one channel per group the channels grow as in instance normalisation.
    """
    x, groups = args["input"], args["num_groups"]
    _over_positions(record, node, x)
    # Not the channels per group, which may equal the number of groups that a module keeps.
    record.note_size(node, x.shape[1], x.axes[1], repeated=False)
    within = x.shape[1] // groups
    if groups > 1 and within > 1:
        if within * math.prod(x.shape[2:]) < _FEWEST_VALUES:
            record.atoms.freeze(x.axes[1], f"group_norm takes its statistics over {within} values each")
        else:
            (group,) = record.atoms.new(within)
            record.atoms.unify(x.axes[1], (Run(group.atom, groups),), f"group_norm of {groups} groups")
    names = _of_each_channel(record, args)
    if within > 1:
        record.note_channel_norm(node, x.axes[1], {role: names[role] for role in ("weight", "bias")})
    else:
        record.note_norm(node, names, args["eps"], x, per_sample=True)
        record.note_other_norm(node)
    record.scales.pin(x.scale)
    return record.unit(x.shape, x.axes)


# Names of the parameter for the intrinsic length, or its logarithm, in the module that takes the norm.
LOG_LENGTH = "log_length"
LENGTHS = (LOG_LENGTH, "length")
# That module's attribute that is True if it appends the gain to its output as one more channel.
GAIN_CHANNEL = "gain_channel"

# Operations that move channels as a whole or combine the same channels of several positions linearly.
_EQUIVARIANT = """
linear linalg_vecdot linalg_vector_norm clone contiguous alias detach to neg _to_copy lift_fresh_copy detach_ type_as
float mean sum flatten view reshape _unsafe_view unflatten squeeze unsqueeze view_as squeeze_ permute transpose swapaxes
transpose_ getitem cat concat concatenate split chunk split_with_sizes tensor_split expand expand_as constant_pad_nd pad
avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d upsample_nearest1d
upsample_nearest2d upsample_bilinear2d upsample_linear1d
"""


@rule("linalg_vecdot", "linalg_vector_norm", "norm")
def norm_over_channels(record: Record, node: Any, args: Arguments) -> Any:
    """Euclidean norm or its square over one dimension: neither a rotation nor a channel of zeros changes it."""
    x = args.get("x", args.get("self"))
    dims = args.get("dim", -1)
    dims = [dims] if isinstance(dims, int) else dims
    order: Any = args.get("ord", args.get("p"))
    euclidean = args["y"] is x if "y" in args else order is None or float(order) == 2
    if not euclidean or not isinstance(x, Value) or not dims or len(dims) > 1 or not record.follow_norms:
        if "y" in args:
            return keep_full_width(record, node, args)
        return reduce_beyond_scale(record, node, {**args, "summed": euclidean})
    dim = dims[0] % len(x.shape)
    record.scales.pin(x.scale)
    record.note_radius(node, x.axes[dim])
    reduced = (fixed(1),) if args.get("keepdim") else ()
    return record.unit(shape_of(node), x.axes[:dim] + reduced + x.axes[dim + 1 :])


def basis_dependent(operation: str, args: Arguments, shape: tuple[int, ...]) -> Iterator[Runs]:
    """Yield the axes whose channels an operation distinguishes; `shape` is that of its first result."""
    values = list(values_in(args))
    if operation in ("conv1d", "conv2d", "conv3d"):
        if args.get("groups", 1) != 1:
            yield from (axis for value in values for axis in value.axes)
    elif operation in ("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_"):
        yield from _broadcast(operation, values, shape)
    elif operation not in _EQUIVARIANT.split():
        yield from (axis for value in values for axis in value.axes)


def _broadcast(operation: str, values: list[Value], shape: tuple[int, ...]) -> Iterator[Runs]:
    """Yield the axes in which a sum or a product is not linear.

    A sum is linear if all operands have the channels, a product if only one operand has them.
    """
    for dim, size in enumerate(shape):
        dims = [(value, dim - len(shape) + len(value.shape)) for value in values]
        wide = [value.axes[at] for value, at in dims if at >= 0 and value.shape[at] == size]
        linear = len(wide) == len(values) > 1 if operation[:3] in ("add", "sub") else len(wide) == 1
        if size > 1 and not linear:
            yield from wide


_WEIGHED = ("mean", "var", "std", "var_mean", "std_mean")
_POOLING = """
max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
adaptive_avg_pool3d upsample_nearest1d upsample_nearest2d upsample_linear1d upsample_bilinear2d upsample_bicubic2d
upsample_nearest3d upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_nearest_exact1d
_upsample_nearest_exact2d _upsample_nearest_exact3d
"""


@rule(*_POOLING.split())
def pool(record: Record, node: Any, args: Arguments) -> Value:
    """Pooling or interpolation of each channel: dimensions of positions keep their width, the others pass."""
    x, shape = first_tensor(args), shape_of(node)
    num_windows = next(int(char) for char in operation_of(node) if char.isdigit())
    freeze_windows(record, x, num_windows)
    return Value(shape, (*x.axes[:-num_windows], *map(fixed, shape[-num_windows:])), x.scale)


@rule(
    *("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
    *("max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices"),
)
def pool_with_indices(record: Record, node: Any, args: Arguments) -> list[Value]:
    """Max pooling of each channel; the indices have no scale."""
    pooled = pool(record, node, args)
    return [pooled, record.unit(pooled.shape, pooled.axes)]


@rule("max_unpool2d", "max_unpool3d")
def unpool(record: Record, node: Any, args: Arguments) -> Value:
    """Inverse of max pooling of each channel, given the indices of its maxima."""
    x, indices, shape = args["self"], args["indices"], shape_of(node)
    num_windows = int(operation_of(node)[-2])
    for value in (x, indices):
        freeze_windows(record, value, num_windows)
    for axes in zip(x.axes[:-num_windows], indices.axes[:-num_windows], strict=True):
        record.atoms.unify(*axes, "maxima of other channels")
    return Value(shape, (*x.axes[:-num_windows], *map(fixed, shape[-num_windows:])), x.scale)


@rule("mean", "sum", "amax", "amin")
def reduce(record: Record, node: Any, args: Arguments) -> Value:
    """Reduction: reduced dimensions keep their width, since a mean over channels would change with their number.

    Channels may grow where growth reweights the statistics: a mean, variance, standard deviation, sum of squares or its
    root over one dimension in a module without submodules, such as a hand-written normalisation. They may also grow in
    `(x * weight).sum(-1)` with a parameter, a hand-written linear layer.
    """
    x, kept, dims = args["self"], (fixed(1),) if args.get("keepdim") else (), args.get("dim")
    dims = [dims] if isinstance(dims, int) else dims or range(len(x.shape))
    reduced = {dim % len(x.shape) for dim in dims}
    axes = [axis for i, old in enumerate(x.axes) for axis in (kept if i in reduced else (old,))]
    summed = x.name is None and (args.get("summed", False) or _of_squares(node))
    dim = next(iter(reduced), 0)
    if (operation_of(node) in _WEIGHED or summed) and len(reduced) == 1 and record.has_no_parts(node):
        record.scales.pin(x.scale)
        names = {"weight": None, "bias": None}
        record.note_channel_norm(node, x.axes[dim], names, dim if dim < len(x.axes) - 1 else -1, summed)
    elif len(reduced) == 1 and (weight := _weight_of(record, node, x, dim)) is not None:
        record.consume(str(weight.name), dim - len(x.shape))
        return record.follow(node, x, weight, axes)
    else:
        record.freeze_all([x.axes[i] for i in sorted(reduced)], f"reduced by {operation_of(node)}")
    return Value(shape_of(node), tuple(axes), x.scale)


def _weight_of(record: Record, node: Any, x: Value, dim: int) -> Value | None:
    """Return the parameter that weights a sum over channels and that nothing else reads, or None."""
    product = node.args[0]
    if operation_of(node) != "sum" or product.op != "call_function" or operation_of(product) != "mul":
        return None
    factors = [record.values.get(factor) for factor in product.all_input_nodes]
    only_here = all(len(factor.users) == 1 for factor in product.all_input_nodes if factor.op == "placeholder")
    weights = [value for value in factors if isinstance(value, Value) and value.name is not None]
    if not only_here or len(factors) != 2 or len(weights) != 1 or len(product.users) != 1:
        return None
    (weight,) = weights
    within = len(x.shape) - dim <= len(weight.shape) and weight.shape[dim - len(x.shape)] == x.shape[dim] > 1
    return weight if within and weight.name not in record.buffers else None


def _of_squares(node: Any) -> bool:
    source = node.args[0]
    if operation_of(node) != "sum" or source.op != "call_function":
        return False
    operation, factors = operation_of(source), source.args
    squared = operation == "square" or (operation == "pow" and factors[1] == 2)
    return squared or (operation == "mul" and factors[0] is factors[1])


@rule("var", "std", "var_mean", "std_mean", "logsumexp", "all", "any", "count_nonzero", "argmax", "argmin")
def reduce_beyond_scale(record: Record, node: Any, args: Arguments) -> Value | list[Value]:
    """Reduction whose result has another scale: reduced dimensions keep their width, and the input keeps its scale."""
    record.scales.pin(args["self"].scale)
    reduced = reduce(record, node, args)
    return as_computed(node, [record.unit(shape, reduced.axes) for shape in shapes_of(node)])


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
    """Fourier transform: transformed dimensions keep their width, the others pass."""
    x, shape = first_tensor(args), shape_of(node)
    dims = args.get("dim")
    if dims is None:
        number = _DIMENSIONS.get(operation_of(node).rpartition("fft")[2], len(shape))
        dims = range(-number, 0)
    chosen = {dim % len(shape) for dim in ([dims] if isinstance(dims, int) else dims)}
    record.freeze_all([x.axes[dim] for dim in chosen], "Fourier transform over these channels")
    axes = tuple(fixed(size) if i in chosen else x.axes[i] for i, size in enumerate(shape))
    return Value(shape, axes, x.scale)


@rule("view_as_real")
def as_real(record: Record, node: Any, args: Arguments) -> Value:
    """View of complex numbers as real ones: real and imaginary parts are a new last dimension."""
    x = first_tensor(args)
    return Value((*x.shape, 2), (*x.axes, fixed(2)), x.scale)


@rule("view_as_complex")
def as_complex(record: Record, node: Any, args: Arguments) -> Value:
    """View of real numbers as complex ones: the last dimension, of real and imaginary parts, is removed."""
    x = first_tensor(args)
    record.atoms.freeze(x.axes[-1], "real and imaginary parts")
    return Value(x.shape[:-1], x.axes[:-1], x.scale)

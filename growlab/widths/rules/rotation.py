"""Find the channels that may be rotated: rules for norms over channels, and operations that distinguish channels.

A group is isotropic if everything on the way from the layers that produce its channels to those that consume them
commutes with every rotation of the channels (Bird, "On De-Individuated Neurons", Eq. 1). Only then does it have no
preferred basis. A norm over channels is such an operation, but growth methods that do not allow for it would change
it: it is followed only with `trace(..., follow_norms=True)`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from growlab.widths.atoms import Runs, fixed
from growlab.widths.rules.pooling import reduce_beyond_scale
from growlab.widths.rules.registry import Arguments, Value, keep_full_width, rule, values_in

if TYPE_CHECKING:
    from growlab.widths.tracer import Tracer

# Names of the parameter for the intrinsic length in the module that takes the norm: its logarithm, or itself.
LOG_LENGTH = "log_length"
LENGTHS = (LOG_LENGTH, "length")
# Name of that module's attribute which is True if it appends the gain to its output as one more channel.
GAIN_CHANNEL = "gain_channel"

# Operations that move channels as a whole or combine the same channels of several positions linearly.
_EQUIVARIANT = frozenset(
    (
        *(
            "linear",
            "linalg_vecdot",
            "linalg_vector_norm",
            "clone",
            "contiguous",
            "alias",
            "detach",
            "to",
            "neg",
        ),
        *("_to_copy", "lift_fresh_copy", "detach_", "type_as", "float", "mean", "sum", "flatten", "view"),
        *("reshape", "_unsafe_view", "unflatten", "squeeze", "unsqueeze", "view_as", "squeeze_", "permute"),
        *("transpose", "swapaxes", "transpose_", "getitem", "cat", "concat", "concatenate", "split", "chunk"),
        *("split_with_sizes", "tensor_split", "expand", "expand_as", "constant_pad_nd", "pad", "avg_pool1d"),
        *("avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
        *("upsample_nearest1d", "upsample_nearest2d", "upsample_bilinear2d", "upsample_linear1d"),
    )
)


@rule("linalg_vecdot", "linalg_vector_norm", "norm")
def norm_over_channels(tracer: "Tracer", node: Any, args: Arguments) -> Any:
    """Euclidean norm or its square over one dimension: neither a rotation nor a channel of zeros changes it."""
    x = args.get("x", args.get("self"))
    dims = args.get("dim", -1)
    dims = [dims] if isinstance(dims, int) else dims
    order: Any = args.get("ord", args.get("p"))
    euclidean = args["y"] is x if "y" in args else order is None or float(order) == 2
    if not euclidean or not isinstance(x, Value) or not dims or len(dims) > 1 or not tracer.follow_norms:
        if "y" in args:
            return keep_full_width(tracer, node, args)
        return reduce_beyond_scale(tracer, node, {**args, "summed": euclidean})
    dim = dims[0] % len(x.shape)
    tracer.scales.pin(x.scale)
    tracer.record_radius(node, x.axes[dim])
    left = (fixed(1),) if args.get("keepdim") else ()
    axes = x.axes[:dim] + left + x.axes[dim + 1 :]
    return Value(tracer.shape(node), axes, tracer.scales.new(unit=True))


def individuated(operation: str, args: Arguments, shape: tuple[int, ...]) -> Iterator[Runs]:
    """Yield the axes whose channels an operation distinguishes.

    Args:
        operation: name of the operation.
        args: its arguments by name.
        shape: shape of its (first) result.
    """
    values = list(values_in(args))
    if operation in ("conv1d", "conv2d", "conv3d"):
        if args.get("groups", 1) != 1:
            yield from (axis for value in values for axis in value.axes)
    elif operation in ("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_"):
        yield from _broadcast(operation, values, shape)
    elif operation not in _EQUIVARIANT:
        yield from (axis for value in values for axis in value.axes)


def _broadcast(operation: str, values: list[Value], shape: tuple[int, ...]) -> Iterator[Runs]:
    """Yield the axes in which a sum or a product is not linear.

    A sum is linear if all operands have the channels, a product if only one has them.
    """
    for dim, size in enumerate(shape):
        places = [(value, dim - len(shape) + len(value.shape)) for value in values]
        wide = [value.axes[at] for value, at in places if at >= 0 and value.shape[at] == size]
        linear = len(wide) == len(values) > 1 if operation[:3] in ("add", "sub") else len(wide) == 1
        if size > 1 and not linear:
            yield from wide

"""Rules for operations that permute dimensions."""

from typing import TYPE_CHECKING, Any

from growlab.widths.rules.opaque import MIXING
from growlab.widths.rules.registry import Arguments, Value, rule

if TYPE_CHECKING:
    from growlab.widths.tracer import Tracer


@rule("permute")
def permute(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Permutation of dimensions."""
    x, last = args["self"], len(args["dims"]) - 1
    order = [dim % len(x.shape) for dim in args["dims"]]
    axes = tuple(x.axes[dim] for dim in order)
    multiplies = all(tracer.operation(user) in MIXING for user in node.users)
    if multiplies and order == [*range(last - 1), last, last - 1] and _turned(x):
        return Value(tracer.shape(node), axes, x.scale, turned=x)
    return Value(tracer.shape(node), axes, x.scale)


@rule("movedim", "moveaxis")
def movedim(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Move of some dimensions to other positions."""
    x = args["self"]
    given = (args["source"], args["destination"])
    dims = [list(one) if isinstance(one, (list, tuple)) else [one] for one in given]
    sources, targets = ([dim % len(x.shape) for dim in one] for one in dims)
    axes = [axis for dim, axis in enumerate(x.axes) if dim not in sources]
    for target, source in sorted(zip(targets, sources, strict=True)):
        axes.insert(target, x.axes[source])
    return Value(tracer.shape(node), tuple(axes), x.scale)


@rule("transpose", "swapaxes", "transpose_")
def transpose(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Exchange of two dimensions."""
    x = args["self"]
    first = args["dim0"] if "dim0" in args else args["axis0"]
    second = args["dim1"] if "dim1" in args else args["axis1"]
    axes = list(x.axes)
    axes[first], axes[second] = axes[second], axes[first]
    last_two = {first % len(axes), second % len(axes)} == {len(axes) - 2, len(axes) - 1}
    turned = _turned(x) if last_two else None
    return Value(tracer.shape(node), tuple(axes), x.scale, turned=turned)


@rule("t", "numpy_T")
def turned(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Reversal of the order of dimensions."""
    x = args["self"]
    return Value(tracer.shape(node), x.axes[::-1], x.scale, turned=_turned(x) if len(x.shape) == 2 else None)


def _turned(x: Value) -> Value | None:
    return x if x.name is not None and len(x.shape) > 1 else None

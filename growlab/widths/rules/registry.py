"""Registry of channel rules, and the values that they are given.

A rule defines what one ATen operation does to axes and scales. It is called with the tracer, the graph node and the
operation's arguments by name, tensors as `Value`s; it returns the output's Value (or a list of them) and records
layers and norms on the way.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from growlab.widths.atoms import Runs, fixed

if TYPE_CHECKING:
    from growlab.widths.tracer import Tracer

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Value:
    """A tensor of the traced program.

    Attributes:
        shape: shape at full width.
        axes: one axis for each dimension.
        scale: its scale class.
        name: parameter or buffer name, or None for activations.
        linear_in: names of the parameters of one layer that it is linear in, if it is a layer's output, scaled,
            rearranged or summed with itself.
        made_by: weights of the affine layers that it is computed from with no other affine layer in between.
        turned: the parameter of which it is the transpose (the last two dimensions exchanged), or None.
        squeezed: the parameter of which it is a reshape, if everything that uses it restores the shape; or None.
        rows_of: the parameter of which it is some rows, if only linear layers read them; or None.
    """

    shape: tuple[int, ...]
    axes: tuple[Runs, ...]
    scale: int
    name: str | None = None
    linear_in: frozenset[str] = frozenset()
    made_by: frozenset[str] = frozenset()
    turned: "Value | None" = None
    squeezed: "Value | None" = None
    rows_of: "Value | None" = None


Rule = Callable[["Tracer", Any, Arguments], Any]
RULES: dict[str, Rule] = {}


# Reason why dimensions stay that windows slide over.
SLID_OVER = "neighbouring channels are pooled or convolved"
# Reason why channels of random numbers stay: twins cancel only if both get the same numbers.
DRAWN = "as many random numbers"


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operations of these names (without the `aten::` prefix and overload)."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


def values_in(argument: Any) -> Iterator[Value]:
    """Yield every Value in an argument, including those in lists and dicts."""
    if isinstance(argument, Value):
        yield argument
    elif isinstance(argument, Mapping):
        for item in argument.values():
            yield from values_in(item)
    elif isinstance(argument, (list, tuple)):
        for item in argument:
            yield from values_in(item)


# Operations that are linear in all of their inputs, and those that are linear in one of them.
_LINEAR = frozenset(
    (
        *("permute", "transpose", "swapaxes", "swapdims", "mT", "mH", "adjoint", "movedim", "moveaxis"),
        *("t", "view", "reshape", "_unsafe_view", "flatten", "unflatten"),
        *(
            "squeeze",
            "unsqueeze",
            "expand",
            "slice",
            "select",
            "split",
            "split_with_sizes",
            "chunk",
            "unbind",
        ),
        *("getitem", "contiguous", "clone", "dropout", "to", "_to_copy", "neg", "alias", "cat", "add", "sub"),
    )
)
_BILINEAR = frozenset(("mul", "div"))


def linear_in(operation: str, args: Arguments) -> frozenset[str]:
    """Names of the parameters that an operation's result is linear in (see `Value`)."""
    operands = [value.linear_in for value in values_in(args)]
    numbers = [arg for arg in args.values() if isinstance(arg, (int, float))]
    if operation in _BILINEAR:
        dividend = operation == "mul" or operands[:1] != [frozenset()]
        operands = [names for names in operands if names]
        return operands[0] if len(operands) == 1 and dividend else frozenset()
    if operation not in _LINEAR or (operation in ("add", "sub") and len(operands) < 2 and numbers):
        return frozenset()
    return operands[0] if operands and all(names == operands[0] for names in operands) else frozenset()


def overwritten(value: Any, written: Any) -> Any:
    """Return the value of a tensor after an in-place write to a part: not linear, and made by the part's layers too."""
    if not isinstance(value, Value) or value.name is not None:
        return value
    made_by = value.made_by.union(*(part.made_by for part in values_in(written)))
    return replace(value, linear_in=frozenset(), made_by=made_by)


def first_tensor(args: Arguments) -> Value:
    """Return the first argument that is a tensor."""
    return next(values_in(args))


def freeze_windows(tracer: "Tracer", x: Value, num_windows: int) -> None:
    """Freeze the last `num_windows` dimensions, over which windows slide."""
    for axis in x.axes[len(x.axes) - num_windows :]:
        tracer.atoms.freeze(axis, SLID_OVER)


def keep_full_width(tracer: "Tracer", node: Any, args: Arguments, reason: str | None = None) -> Any:
    """Rule for operations that growth cannot pass: all operands keep their full width."""
    for value in values_in(args):
        tracer.scales.pin(value.scale)
        for axis in value.axes:
            tracer.atoms.freeze(axis, reason or f"used by {tracer.operation(node)}")
    outputs = [
        Value(shape, tuple(fixed(size) for size in shape), tracer.scales.new(unit=True))
        for shape in tracer.shapes(node)
    ]
    return outputs if tracer.has_several_outputs(node) else (outputs[0] if outputs else None)

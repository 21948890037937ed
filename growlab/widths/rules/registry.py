"""Where channel rules are registered, and what they are given.

A rule says what one ATen operation does to axes and scales. It is called with the tracer, the graph node and the
operation's arguments by name, tensors as `Value`s; it returns the output's Value (or a list of them) and records
layers and norms on the way.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from growlab.widths.atoms import Runs, fixed

if TYPE_CHECKING:
    from growlab.widths.tracer import Tracer

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Value:
    """A tensor of the traced program.

    Attributes:
        shape: at full width.
        axes: one axis a dimension.
        scale: its scale class.
        name: parameter or buffer name, or None for activations.
    """

    shape: tuple[int, ...]
    axes: tuple[Runs, ...]
    scale: int
    name: str | None = None


Rule = Callable[["Tracer", Any, Arguments], Any]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operations of these names (without the `aten::` prefix and overload)."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


def values_in(argument: Any) -> Iterator[Value]:
    """Every Value in an argument, or in the lists and dicts that it holds."""
    if isinstance(argument, Value):
        yield argument
    elif isinstance(argument, Mapping):
        for item in argument.values():
            yield from values_in(item)
    elif isinstance(argument, (list, tuple)):
        for item in argument:
            yield from values_in(item)


def first_tensor(args: Arguments) -> Value:
    """The first argument that is a tensor."""
    return next(values_in(args))


def freeze_windows(tracer: "Tracer", x: Value, num_windows: int) -> None:
    """The last dimensions, over which windows slide, keep their width."""
    for axis in x.axes[len(x.axes) - num_windows :]:
        tracer.atoms.freeze(axis, "neighbouring channels are pooled or convolved")


def keep_full_width(tracer: "Tracer", node: Any, args: Arguments, reason: str | None = None) -> Any:
    """The rule for operations that growth cannot pass: everything that enters keeps its full width."""
    for value in values_in(args):
        tracer.scales.pin(value.scale)
        for axis in value.axes:
            tracer.atoms.freeze(axis, reason or f"used by {tracer.operation(node)}")
    outputs = [
        Value(shape, tuple(fixed(size) for size in shape), tracer.scales.new(unit=True))
        for shape in tracer.shapes(node)
    ]
    return outputs if tracer.has_several_outputs(node) else (outputs[0] if outputs else None)

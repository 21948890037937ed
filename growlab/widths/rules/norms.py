"""Rules for normalisations."""

from typing import TYPE_CHECKING, Any

from growlab.widths.rules.registry import Arguments, Value, rule

if TYPE_CHECKING:
    from growlab.widths.tracer import Tracer


@rule("batch_norm")
def batch_norm(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Statistics per channel over the batch: they follow the scale of the input."""
    x = args["input"]
    names = {}
    for role in ("weight", "bias", "running_mean", "running_var"):
        value = args.get(role)
        names[role] = None if value is None else value.name
        if value is not None:
            tracer.parameter_axis(value, "out", x.axes[1])
    tracer.record_norm(node, names, args["eps"], x)
    return Value(x.shape, x.axes, tracer.scales.new(unit=True))


@rule("instance_norm")
def instance_norm(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Statistics per channel and sample."""
    x = args["input"]
    for role in ("weight", "bias", "running_mean", "running_var"):
        if args.get(role) is not None:
            tracer.parameter_axis(args[role], "out", x.axes[1])
    tracer.scales.pin(x.scale)
    return Value(x.shape, x.axes, tracer.scales.new(unit=True))


@rule("layer_norm", "rms_norm")
def layer_norm(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Statistics over the last dimensions: added channels would change them, so these keep their width."""
    x = args["input"]
    first = len(x.shape) - len(args["normalized_shape"])
    for axis in x.axes[first:]:
        tracer.atoms.freeze(axis, f"{tracer.operation(node)} takes its statistics over these channels")
    for role in ("weight", "bias"):
        if args.get(role) is not None:
            for axis in args[role].axes:
                tracer.atoms.freeze(
                    axis, f"{tracer.operation(node)} takes its statistics over these channels"
                )
    tracer.scales.pin(x.scale)
    return Value(x.shape, x.axes, tracer.scales.new(unit=True))


@rule("group_norm")
def group_norm(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Statistics over groups of channels, which keep their width unless each channel is its own group."""
    x = args["input"]
    if args["num_groups"] != x.shape[1]:
        tracer.atoms.freeze(x.axes[1], "group_norm takes its statistics over these channels")
    tracer.note_size(node, x.shape[1], x.axes[1])
    for role in ("weight", "bias"):
        if args.get(role) is not None:
            tracer.parameter_axis(args[role], "out", x.axes[1])
    tracer.scales.pin(x.scale)
    return Value(x.shape, x.axes, tracer.scales.new(unit=True))

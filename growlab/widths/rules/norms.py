"""Rules for normalisations."""

import math
from typing import TYPE_CHECKING, Any

from growlab.widths.atoms import Run
from growlab.widths.rules.registry import Arguments, Value, rule

if TYPE_CHECKING:
    from growlab.widths.tracer import Tracer

# Fewest values per group: groups start at half their width or less, and one value has no statistics.
_FEWEST_VALUES = 4


def _of_each_channel(tracer: "Tracer", args: Arguments) -> dict[str, str | None]:
    """Unify a normalisation's tensors with the channels of its input; return their names, None for missing ones."""
    names = {}
    for role in ("weight", "bias", "running_mean", "running_var"):
        value = args.get(role)
        names[role] = None if value is None else value.name
        if value is not None:
            tracer.parameter_axis(value, "out", args["input"].axes[1])
    return names


def _over_positions(tracer: "Tracer", node: Any, x: Value) -> None:
    """Freeze positions, over which the statistics of a channel are taken."""
    for axis in x.axes[2:]:
        tracer.atoms.freeze(axis, f"{tracer.operation(node)} takes its statistics over them")


@rule("batch_norm")
def batch_norm(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Batch normalisation: statistics per channel over the batch, which follow the scale of the input."""
    x = args["input"]
    _over_positions(tracer, node, x)
    names = _of_each_channel(tracer, args)
    if names["weight"] is None or names["running_var"] is None:
        # eps changes the result of a rescaled input: a weight can compensate for it only if the variance is known.
        tracer.scales.pin(x.scale)
    tracer.record_norm(node, names, args["eps"], x)
    return Value(x.shape, x.axes, tracer.scales.new(unit=True))


@rule("instance_norm")
def instance_norm(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Instance normalisation: statistics per channel and sample."""
    x = args["input"]
    _over_positions(tracer, node, x)
    tracer.note_size(node, x.shape[1], x.axes[1])
    tracer.record_norm(node, _of_each_channel(tracer, args), args["eps"], x, per_sample=True)
    tracer.scales.pin(x.scale)
    return Value(x.shape, x.axes, tracer.scales.new(unit=True))


@rule("layer_norm", "rms_norm")
def layer_norm(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Layer or RMS normalisation: growth reweights statistics over the last dimension; several keep their width."""
    x = args["input"]
    names = {"weight": None, "bias": None}
    if len(args["normalized_shape"]) == 1:
        tracer.note_size(node, x.shape[-1], x.axes[-1])
        for role in names:
            if args.get(role) is not None:
                tracer.parameter_axis(args[role], "out", x.axes[-1])
                names[role] = args[role].name
        tracer.record_channel_norm(node, x.axes[-1], names)
    else:
        first = len(x.shape) - len(args["normalized_shape"])
        tracer.record_other_norm(node)
        affine = [axis for role in names if args.get(role) is not None for axis in args[role].axes]
        for axis in (*x.axes[first:], *affine):
            tracer.atoms.freeze(
                axis, f"{tracer.operation(node)} takes its statistics over several dimensions"
            )
    tracer.scales.pin(x.scale)
    return Value(x.shape, x.axes, tracer.scales.new(unit=True))


@rule("group_norm")
def group_norm(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Group normalisation: the width within each group grows, unless a group could have a single value.

    With one channel per group the channels grow as in instance normalisation.
    """
    x, groups = args["input"], args["num_groups"]
    _over_positions(tracer, node, x)
    # Each group may have as many channels as there are groups: a module keeps the number of groups.
    tracer.note_size(node, x.shape[1], x.axes[1], repeated=False)
    within = x.shape[1] // groups
    if groups > 1 and within > 1:
        if within * math.prod(x.shape[2:]) < _FEWEST_VALUES:
            tracer.atoms.freeze(x.axes[1], f"group_norm takes its statistics over {within} values each")
        else:
            (one,) = tracer.atoms.new(within)
            tracer.atoms.unify(x.axes[1], (Run(one.atom, groups),), f"group_norm of {groups} groups")
    names = _of_each_channel(tracer, args)
    if within > 1:
        tracer.record_channel_norm(node, x.axes[1], {role: names[role] for role in ("weight", "bias")})
    else:
        tracer.record_norm(node, names, args["eps"], x, per_sample=True)
        tracer.record_other_norm(node)
    tracer.scales.pin(x.scale)
    return Value(x.shape, x.axes, tracer.scales.new(unit=True))

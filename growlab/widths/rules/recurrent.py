"""Rules for recurrent layers: torch runs a whole module, or one step of a cell, as a single operation."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from growlab.widths.atoms import Runs, fixed
from growlab.widths.rules.registry import Arguments, Value, keep_full_width, rule, values_in

if TYPE_CHECKING:
    from growlab.widths.tracer import Tracer

# Number of gates of each kind of layer, whose rows are stacked in its weights.
_GATES = {"lstm": 4, "gru": 3, "rnn": 1}
_MODULES = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_CELLS = ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")

#: All operations of this file.
RECURRENT = (*_MODULES, *_CELLS)


@rule(*_MODULES)
def module(tracer: "Tracer", node: Any, args: Arguments) -> Any:
    """Recurrent module: all layers and directions [gates x H, ...] have the same hidden channels (one `hidden_size`).

    An LSTM that projects its hidden state (`proj_size`) keeps its width: if both had the same width, torch would take
    it for a plain one.
    """
    weights, states = args["params"], list(values_in(args["hx"]))
    if not _are_parameters(tracer, weights) or "batch_sizes" in args:
        return _kept(tracer, node, args)
    x, hidden = args["input"], tracer.atoms.new(states[-1].shape[-1])
    time, batch = (1, 0) if args["batch_first"] else (0, 1)
    tracer.atoms.freeze(x.axes[time], "steps of a recurrent layer")
    projected = states[0].shape[-1] != states[-1].shape[-1]
    state = fixed(states[0].shape[-1]) if projected else hidden
    for value, axis in zip(states, (state, hidden), strict=False):
        _enter(tracer, value, (fixed(value.shape[0]), x.axes[batch], axis))
    directions = 2 if args["bidirectional"] else 1
    number = len(weights) // (args["num_layers"] * directions)
    first = replace(states[0], shape=states[0].shape[1:], axes=states[0].axes[1:])
    read = x
    for layer in range(args["num_layers"]):
        for direction in range(directions):
            start = (layer * directions + direction) * number
            _layer(tracer, node, read, first, weights[start : start + number], hidden, state)
        width = directions * states[0].shape[-1]
        axes = (*x.axes[:-1], tracer.atoms.nest(state, directions, 1))
        read = Value((*x.shape[:-1], width), axes, tracer.scales.new(unit=True))
    if projected:
        told = f"a recurrent layer ({_kind(tracer, node).upper()}) that projects its hidden state keeps its width"
        for axis in (hidden, *(axis for weight in weights[number - 1 :: number] for axis in weight.axes)):
            tracer.atoms.freeze(axis, told)
    last = [
        Value(value.shape, (fixed(value.shape[0]), x.axes[batch], axis), tracer.scales.new(unit=True))
        for value, axis in zip(states, (state, hidden), strict=False)
    ]
    return [read, *last]


@rule(*_CELLS)
def cell(tracer: "Tracer", node: Any, args: Arguments) -> Any:
    """One step of a recurrent cell."""
    weights = [args[name] for name in ("w_ih", "w_hh", "b_ih", "b_hh") if args.get(name) is not None]
    if not _are_parameters(tracer, weights):
        return _kept(tracer, node, args)
    x, states = args["input"], list(values_in(args["hx"]))
    hidden = tracer.atoms.new(states[0].shape[-1])
    for value in states:
        _enter(tracer, value, (x.axes[0], hidden))
    _layer(tracer, node, x, states[0], weights, hidden, hidden)
    new = [Value(each.shape, (x.axes[0], hidden), tracer.scales.new(unit=True)) for each in states]
    return new if tracer.has_several_outputs(node) else new[0]


def _kind(tracer: "Tracer", node: Any) -> str:
    return tracer.operation(node).partition("_")[0]


def _are_parameters(tracer: "Tracer", weights: Sequence[Value]) -> bool:
    return all(value.name is not None and value.name not in tracer.buffers for value in weights)


def _kept(tracer: "Tracer", node: Any, args: Arguments) -> Any:
    told = f"a recurrent layer ({_kind(tracer, node).upper()}) whose weights are computed keeps its width"
    return keep_full_width(tracer, node, args, told)


def _enter(tracer: "Tracer", state: Value, axes: Sequence[Runs]) -> None:
    """Unify an initial hidden state with the layer's channels; its scale enters the gates and must not change."""
    tracer.scales.pin(state.scale)
    for dimension, axis in enumerate(axes):
        if state.name is None:
            tracer.atoms.unify(state.axes[dimension], axis, "its hidden state comes from outside")
        else:
            last = dimension == len(axes) - 1
            if not last:
                tracer.atoms.freeze(state.axes[dimension] + axis, "a parameter is the hidden state of all")
            tracer.parameter_axis(state, "out" if last else "fixed", axis, dimension=dimension)


def _layer(
    tracer: "Tracer",
    node: Any,
    x: Value,
    state: Value,
    weights: Sequence[Value],
    hidden: Runs,
    projected: Runs,
) -> None:
    """Record a layer in one direction: the weights of its input and hidden state, which together make its gates."""
    gates = _GATES[_kind(tracer, node)]
    rows_of_gates = tracer.atoms.nest(hidden, gates, 1)
    biases = list(weights[2:4]) if len(weights) >= 4 else [None, None]
    read = replace(state, axes=(*state.axes[:-1], projected))
    for weight, bias, source in zip(weights, biases, (x, read), strict=False):
        rows, columns = tracer.weight_axes(weight, "out", "in", [])
        why = tracer.atoms.why_fixed(hidden) or "gates of a recurrent layer laid out otherwise"
        tracer.atoms.unify(rows, rows_of_gates, why)
        tracer.atoms.unify(columns, source.axes[-1], "input of a recurrent layer")
        shape, axes = (*source.shape[:-1], weight.shape[0]), (*source.axes[:-1], rows)
        made = tracer.affine(node, weight, bias, False, source, shape, axes, len(shape) - 1, gates=gates)
        tracer.scales.pin(made.scale)

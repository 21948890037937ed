"""Rules for recurrent layers: torch runs a whole module, or one step of a cell, as a single operation."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from growlab.widths.atoms import Runs, fixed
from growlab.widths.program import as_computed, operation_of
from growlab.widths.rules.registry import CELLS, MODULES, Arguments, keep_full_width, rule
from growlab.widths.values import Record, Value, values_in

# Number of gates of each kind of layer, whose rows are stacked in its weights.
_GATES = {"lstm": 4, "gru": 3, "rnn": 1}


@rule(*MODULES)
def module(record: Record, node: Any, args: Arguments) -> Any:
    """Recurrent module: all layers and directions [gates x H, ...] have the same hidden channels (one `hidden_size`).

    An LSTM that projects its hidden state (`proj_size`) keeps its width: if both had the same width, torch would take
    it for a plain one.
    """
    weights, states = args["params"], list(values_in(args["hx"]))
    if not all(map(record.is_weight, weights)) or "batch_sizes" in args:
        return _kept(record, node, args)
    x, hidden = args["input"], record.atoms.new(states[-1].shape[-1])
    time, batch = (1, 0) if args["batch_first"] else (0, 1)
    record.atoms.freeze(x.axes[time], "steps of a recurrent layer")
    projected = states[0].shape[-1] != states[-1].shape[-1]
    state = fixed(states[0].shape[-1]) if projected else hidden
    for value, axis in zip(states, (state, hidden), strict=False):
        _enter(record, value, (fixed(value.shape[0]), x.axes[batch], axis))
    directions = 2 if args["bidirectional"] else 1
    number = len(weights) // (args["num_layers"] * directions)
    first = replace(states[0], shape=states[0].shape[1:], axes=states[0].axes[1:])
    read = x
    for layer in range(args["num_layers"]):
        for direction in range(directions):
            start = (layer * directions + direction) * number
            _layer(record, node, read, first, weights[start : start + number], hidden, state)
        width = directions * states[0].shape[-1]
        axes = (*x.axes[:-1], record.atoms.nest(state, directions, 1))
        read = record.unit((*x.shape[:-1], width), axes)
    if projected:
        reason = f"a recurrent layer ({_kind(record, node).upper()}) that projects its hidden state keeps its width"
        record.freeze_all((hidden, *(axis for weight in weights[number - 1 :: number] for axis in weight.axes)), reason)
    last = [
        record.unit(value.shape, (fixed(value.shape[0]), x.axes[batch], axis))
        for value, axis in zip(states, (state, hidden), strict=False)
    ]
    return [read, *last]


@rule(*CELLS)
def cell(record: Record, node: Any, args: Arguments) -> Any:
    """One step of a recurrent cell."""
    weights = [args[name] for name in ("w_ih", "w_hh", "b_ih", "b_hh") if args.get(name) is not None]
    if not all(map(record.is_weight, weights)):
        return _kept(record, node, args)
    x, states = args["input"], list(values_in(args["hx"]))
    hidden = record.atoms.new(states[0].shape[-1])
    for value in states:
        _enter(record, value, (x.axes[0], hidden))
    _layer(record, node, x, states[0], weights, hidden, hidden)
    new = [record.unit(each.shape, (x.axes[0], hidden)) for each in states]
    return as_computed(node, new)


def _kind(record: Record, node: Any) -> str:
    return operation_of(node).partition("_")[0]


def _kept(record: Record, node: Any, args: Arguments) -> Any:
    reason = f"a recurrent layer ({_kind(record, node).upper()}) whose weights are computed keeps its width"
    return keep_full_width(record, node, args, reason)


def _enter(record: Record, state: Value, axes: Sequence[Runs]) -> None:
    """Unify an initial hidden state with the layer's channels; its scale enters the gates and must not change."""
    record.scales.pin(state.scale)
    for dimension, axis in enumerate(axes):
        if state.name is None:
            record.atoms.unify(state.axes[dimension], axis, "its hidden state comes from outside")
        else:
            last = dimension == len(axes) - 1
            if not last:
                record.atoms.freeze(state.axes[dimension] + axis, "a parameter is the hidden state of all")
            record.parameter_axis(state, "out" if last else "fixed", axis, dimension=dimension)


def _layer(
    record: Record, node: Any, x: Value, state: Value, weights: Sequence[Value], hidden: Runs, projected: Runs
) -> None:
    """Record a layer in one direction: the weights of its input and hidden state, which together make its gates."""
    gates = _GATES[_kind(record, node)]
    rows_of_gates = record.atoms.nest(hidden, gates, 1)
    biases = list(weights[2:4]) if len(weights) >= 4 else [None, None]
    read = replace(state, axes=(*state.axes[:-1], projected))
    for weight, bias, source in zip(weights, biases, (x, read), strict=False):
        rows, columns = record.weight_axes(weight, "out", "in")
        why = record.atoms.why_fixed(hidden) or "gates of a recurrent layer laid out otherwise"
        record.atoms.unify(rows, rows_of_gates, why)
        record.atoms.unify(columns, source.axes[-1], "input of a recurrent layer")
        shape, axes = (*source.shape[:-1], weight.shape[0]), (*source.axes[:-1], rows)
        made = record.affine(node, weight, bias, source, axes, shape=shape, gates=gates)
        record.scales.pin(made.scale)

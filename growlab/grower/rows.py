"""Add rows to tensors outside of width groups: one per token or one per expert."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from growlab.grower.transaction import Seconds, transaction
from growlab.growth.multipliers import carried_multipliers, multiply
from growlab.growth.state import GrowthEvent
from growlab.widths import Axis, Carry, Group, Part, WidthGraph, replace_tensors, tensors_of


def with_rows(graph: WidthGraph, names: Iterable[str], part: Part) -> WidthGraph:
    """Return a width graph in which these tensors have other rows: a fixed number, or the channels of a group."""
    axes = {name: graph.axes[name] for name in names if name in graph.axes}
    rows = {n: Axis((part,), own[0].role if part.group is None else "out") for n, own in axes.items()}
    return replace(graph, axes={**graph.axes, **{n: (rows[n], *own[1:]) for n, own in axes.items()}})


def change_rows(
    grower: Any,
    group: str,
    names: Sequence[str],
    numbers: tuple[int, int],
    new: Callable[[str, Tensor], Tensor],
    adapt: Callable[[Any], None],
    carry: Carry | None = None,
) -> tuple[Mapping[str, tuple[Tensor, Tensor]], dict[str, int], dict[str, int], Carry, WidthGraph]:
    """Change the number of rows of tensors, in place, in a grower's network and its averages.

    Args:
        grower: a grower of a model of transformers.
        group: name of the group as whose channels optimizers see the rows.
        names: names of the tensors.
        numbers: numbers of rows before and after.
        new: returns the new tensor, given its name and the old one.
        adapt: writes the number into a network's modules and configuration.
        carry: rule for gradients; None: those of old rows are kept.

    Returns:
        Arguments of `Followers.carry`.
    """
    graph, state, carry = grower.graph, grower.state, carry or Carry()
    opened = with_rows(graph, names, Part(group))
    opened = replace(opened, groups={**graph.groups, group: Group(group, numbers[1])})
    before, after = ({**state.widths, group: number} for number in numbers)
    state.multipliers = carried_multipliers(opened, state.multipliers, {}, carry, before, after)
    replaced: Mapping[str, tuple[Tensor, Tensor]] = {}
    for network in (*grower.copies().values(), grower.network):
        tensors = tensors_of(network, graph)
        with torch.no_grad():
            made = {name: new(name, tensors[name].detach()) for name in names}
        replaced = replace_tensors(network, graph, made)
        multiply(network, graph, state.multipliers)
        adapt(network)
    grower.set_rows(names, numbers[1])
    return replaced, before, after, carry, opened


@contextmanager
def stage_of_rows(grower: Any, group: str, notes: dict[str, Any]) -> Iterator[list[float]]:
    """Begin a stage that adds rows; an error undoes it. At the end its receipt, with `notes`, is appended to `events`.

    Yield an empty list, to which the caller appends the relative output error on the probe batch and its tolerance.
    """
    seconds, state, parity = Seconds(), grower.state, list[float]()
    num_params = sum(p.numel() for p in grower.network.parameters())
    with transaction(grower, grower.parts):
        state.stage, state.unscheduled = state.stage + 1, state.unscheduled + 1
        yield parity
        error, tolerance = parity
        event = GrowthEvent(
            stage=state.stage,
            method=group,
            widths_before=dict(state.widths),
            widths_after=dict(state.widths),
            num_params_before=num_params,
            num_params=sum(p.numel() for p in grower.network.parameters()),
            parity_error_eval=error,
            parity_error_train=error,
            parity_tolerance_eval=tolerance,
            parity_tolerance_train=tolerance,
            seconds=seconds.total,
            notes=notes,
            **asdict(grower.clock),
        )
        for part in grower.parts:
            event.notes.update(part.after_growth(grower, event))
    torch.compiler.reset()
    grower.events.append(event)

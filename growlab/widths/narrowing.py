"""Test whether a network runs at narrow widths; groups whose width its code fixes keep their full width.

A forward may contain a width as a constant (`x.view(b, 12, 64)`), which in the graph cannot be distinguished from a
size that follows the channels. So every graph is tested: the network is narrowed without memory (device meta) and run;
groups whose narrowing breaks it are left at full width.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, islice
from typing import Any

from torch import nn
from torch.nn.modules.instancenorm import _InstanceNorm

from growlab.widths.groups import WidthGraph, Written
from growlab.widths.layout import Axis, Part
from growlab.widths.predictions import Call
from growlab.widths.trials import Trials, lightened

_MOST_ATTEMPTS = 32


def without(graph: WidthGraph, reasons: Mapping[str, str]) -> WidthGraph:
    """Return the graph without some groups, which keep their full width for the given reasons (group -> reason)."""
    names = graph.groups.keys() - reasons.keys()
    widths = graph.full_widths

    def frozen(axis: Axis) -> Axis:
        parts = tuple(part if part.group in names else Part(None, part.length(widths)) for part in axis.parts)
        return Axis(parts, axis.role if any(part.group for part in parts) else "fixed")

    radii = [replace(r, groups=tuple(g for g in r.groups if g in names)) for r in graph.radii]
    channel_norms = (replace(norm, axis=frozen(norm.axis)) for norm in graph.channel_norms)
    attentions = (replace(attention, axis=frozen(attention.axis)) for attention in graph.attentions)
    return replace(
        graph,
        attentions=tuple(attention for attention in attentions if attention.axis.groups),
        channel_norms=tuple(norm for norm in channel_norms if norm.axis.groups),
        radii=tuple(radius for radius in radii if radius.groups),
        groups={name: group for name, group in graph.groups.items() if name in names},
        axes={name: tuple(frozen(axis) for axis in axes) for name, axes in graph.axes.items()},
        written={place: frozen(axis) for place, axis in graph.written.items() if set(axis.groups) & names},
        fixed={**graph.fixed, **reasons},
        constants={name: tuple(g for g in told if g in names) for name, told in graph.constants.items()},
    )


def without_what_breaks(
    model: nn.Module,
    graph: WidthGraph,
    inputs: tuple[Any, ...],
    calls: Sequence[Call],
    training: bool = False,
    any_rows: bool = False,
) -> WidthGraph:
    """Remove groups whose narrowing makes the network's forward fail or compute something else.

    Args:
        model: network at full width; restored at the end.
        graph: its width graph.
        inputs: positional inputs of the forward.
        calls: operations that tracing has visited.
        training: True if they are those of train mode.
        any_rows: True if the number of output rows may depend on the data, such as boxes in an image.

    Returns:
        The graph without these groups; its `written` has only the attributes that are to follow the widths.
    """
    if not graph.groups:
        return graph
    # An attribute can only follow widths that tensor shapes determine.
    told = graph.widths_of({name: graph.shape(name, graph.full_widths) for name in graph.axes})
    known = {place: axis for place, axis in graph.written.items() if set(axis.groups) <= set(told)}
    graph = replace(graph, written=known)
    with lightened(model, inputs) as (light, kept):
        trials = Trials(model, graph, light, kept, calls, training, any_rows)
        working = _without_what_breaks(model, graph, trials)
    counted = {norm.name for norm in trials.counted}
    norms = (replace(norm, counted=norm.summed and norm.name in counted) for norm in working.channel_norms)
    working = replace(working, channel_norms=tuple(norms))
    modules = dict(model.named_modules())
    told_alone = {
        place: axis
        for place, axis in known.items()
        if isinstance(modules[place.module], _InstanceNorm)
        and modules[place.module].weight is None
        and set(axis.groups) <= set(working.groups)
    }
    # No result depends on it, but torch warns if it is not the number of channels.
    return replace(working, written={**told_alone, **working.written})


def _without_what_breaks(model: nn.Module, graph: WidthGraph, trials: Trials) -> WidthGraph:
    known = graph.written
    if trials.work(graph.groups, {}):
        return replace(graph, written={})
    graph = replace(graph, written={place: known[place] for place in trials.lag_behind(known)})
    classes = [read for places in _by_class(model, graph) if (read := _read(places, trials))]
    graph = replace(graph, written={place: known[place] for places in classes for place in places})
    if not classes:
        return _with_these_alone(graph, _largest_working(list(graph.groups), trials), trials)
    everything = [place for places in classes for place in places]
    found = _attributes_that_work(trials, graph, everything, list(graph.groups), {})
    if found is not None:
        return replace(graph, written=found)
    # First the groups that no attribute counts.
    written = {group for axis in graph.written.values() for group in axis.groups}
    kept = _largest_working([name for name in graph.groups if name not in written], trials)
    attributes = dict(graph.written)
    for places in classes:
        groups = list(dict.fromkeys(g for place in places for g in graph.written[place].groups))
        groups = [group for group in groups if group not in kept]
        others = {place: axis for place, axis in attributes.items() if place not in places}
        found = _attributes_that_work(trials, graph, places, [*kept, *groups], others)
        trials.attributes = attributes = others if found is None else {**others, **found}
        if found is None:
            groups = _largest_working(groups, trials, tuple(kept))
        kept += groups
    return _with_these_alone(replace(graph, written=attributes), kept, trials)


def _with_these_alone(graph: WidthGraph, names: Sequence[str], trials: Trials) -> WidthGraph:
    return without(graph, {name: trials.failures[name] for name in graph.groups if name not in names})


def _attributes_that_work(
    trials: Trials,
    graph: WidthGraph,
    places: Sequence[Written],
    groups: Sequence[str],
    others: Mapping[Written, Axis],
) -> dict[Written, Axis] | None:
    """Find the largest set of attributes that makes these groups narrowable by following them; None if no set does.

    An attribute that equals a width by chance (a stride of 4 in a network of 4 heads) must not follow it.
    """
    names = list(dict.fromkeys(map(_alike, places)))
    attempts = (chosen for size in range(len(names), -1, -1) for chosen in combinations(names, size))
    for chosen in islice(attempts, _MOST_ATTEMPTS):
        following = {place: graph.written[place] for place in places if _alike(place) in chosen}
        if trials.work(groups, {**others, **following}):
            return following
    return None


def _read(places: Sequence[Written], trials: Trials) -> list[Written]:
    """Return those of the places that the forward reads."""
    alike: dict[Written, list[Written]] = {}
    for place in places:
        alike.setdefault(_alike(place), []).append(place)
    return [place for same in alike.values() if trials.reads(same) for place in same]


def _alike(place: Written) -> Written:
    """Replace the numbers in a place's module path, to get one key for the same place in repeated blocks."""
    return replace(place, module=re.sub(r"\d+", "*", place.module))


def _by_class(model: nn.Module, graph: WidthGraph) -> list[list[Written]]:
    """Sort attributes by the class of their module: the same code reads them."""
    modules = dict(model.named_modules())
    classes: dict[type[nn.Module], list[Written]] = {}
    for place in graph.written:
        classes.setdefault(type(modules[place.module]), []).append(place)
    return list(classes.values())


def _largest_working(names: list[str], trials: Trials, working: tuple[str, ...] = ()) -> list[str]:
    """Return as many of the groups as can be narrowed together and with those in `working`."""
    found = _largest(names, trials, trials.run, working)
    # Comparing all operations takes many times as long as running them.
    same = trials.compute_the_same([*working, *found])
    return found if same else _largest(found, trials, trials.work, working)


def _largest(
    names: list[str], trials: Trials, work: Callable[[Sequence[str]], bool], working: tuple[str, ...]
) -> list[str]:
    """Find the names that work together by bisection; `trials.failures` records why the others fail."""
    if not names or work([*working, *names]):
        return names
    if len(names) == 1:
        trials.failures[names[0]] = trials.failure
        return []
    half = len(names) // 2
    first = _largest(names[:half], trials, work, working)
    second = _largest(names[half:], trials, work, (*working, *first))
    return first + second

"""Does a network still run when it is narrowed? What its own code fixes keeps its full width.

A forward may have a width written into it (`x.view(b, 12, 64)`), which no graph tells from a size that follows the
channels. So every graph is tried: the network is narrowed without memory (device meta) and run; groups
whose narrowing breaks it are left at full width.
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
    """The graph without these groups, which keep their full width for the reasons given."""
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
    """Leave out groups whose narrowing the network's forward does not survive, or answers with another function.

    Args:
        model: at full width; left as it is.
        graph: its width graph.
        inputs: positional inputs of the forward.
        calls: operations that tracing has visited.
        training: it has visited those of train mode.
        any_rows: how many rows the network puts out may depend on what it computes, such as boxes in an image.
    """
    if not graph.groups:
        return graph
    # An attribute can follow widths that the shapes of tensors tell.
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
    # Nothing depends on it, but torch warns where it is not what the channels are.
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
    # First the groups that have to do with no attribute.
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
    """Of attributes that the forward reads, most that let these groups be narrow; None if none do.

    One that is as large as a width by chance (a stride of 4 beside 4 heads) must not follow it.
    """
    names = list(dict.fromkeys(map(_alike, places)))
    attempts = (chosen for size in range(len(names), -1, -1) for chosen in combinations(names, size))
    for chosen in islice(attempts, _MOST_ATTEMPTS):
        following = {place: graph.written[place] for place in places if _alike(place) in chosen}
        if trials.work(groups, {**others, **following}):
            return following
    return None


def _read(places: Sequence[Written], trials: Trials) -> list[Written]:
    """Those of the places that the forward takes something from."""
    alike: dict[Written, list[Written]] = {}
    for place in places:
        alike.setdefault(_alike(place), []).append(place)
    return [place for same in alike.values() if trials.reads(same) for place in same]


def _alike(place: Written) -> Written:
    """One for all places that are the same in each of many like blocks."""
    return replace(place, module=re.sub(r"\d+", "*", place.module))


def _by_class(model: nn.Module, graph: WidthGraph) -> list[list[Written]]:
    """Attributes of modules of one class: they are read by the same code."""
    modules = dict(model.named_modules())
    classes: dict[type[nn.Module], list[Written]] = {}
    for place in graph.written:
        classes.setdefault(type(modules[place.module]), []).append(place)
    return list(classes.values())


def _largest_working(names: list[str], trials: Trials, working: tuple[str, ...] = ()) -> list[str]:
    """Groups that can be narrowed together, beside those that are known to."""
    found = _largest(names, trials, trials.run, working)
    # To compare all operations costs many times as much as to run them.
    same = trials.compute_the_same([*working, *found])
    return found if same else _largest(found, trials, trials.work, working)


def _largest(
    names: list[str], trials: Trials, work: Callable[[Sequence[str]], bool], working: tuple[str, ...]
) -> list[str]:
    """Of names, most that work together: halves are tried until what breaks is found, and the trials note why."""
    if not names or work([*working, *names]):
        return names
    if len(names) == 1:
        trials.failures[names[0]] = trials.failure
        return []
    half = len(names) // 2
    first = _largest(names[:half], trials, work, working)
    second = _largest(names[half:], trials, work, (*working, *first))
    return first + second

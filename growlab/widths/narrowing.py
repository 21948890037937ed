"""Does a network still run when it is narrowed? What its own code fixes keeps its full width.

A forward may have a width written into it (`x.view(b, 12, 64)`), which no graph tells from a size that follows the
channels. So every graph is tried: the network is narrowed on a copy without memory (device meta) and run; groups
whose narrowing breaks it are left at full width.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from growlab.widths.groups import WidthGraph, Written
from growlab.widths.layout import Axis, Part
from growlab.widths.meta import Shapes
from growlab.widths.resize import replace_tensors, resized, restore_tensors, tensors_of
from growlab.widths.tracer import UnsupportedOperation

_REASON = "its width is written into the network's own code"


def keep_only(graph: WidthGraph, names: Iterable[str], reason: str = _REASON) -> WidthGraph:
    """The graph with only these groups growing; the others keep their full width for the reason given."""
    names = set(names)
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
        fixed={**graph.fixed, **{name: reason for name in graph.groups if name not in names}},
    )


def without_what_breaks(model: nn.Module, graph: WidthGraph, inputs: tuple[Any, ...]) -> WidthGraph:
    """Leave out groups whose narrowing the network's forward does not survive.

    Args:
        model: at full width; left as it is.
        graph: its width graph.
        inputs: positional inputs of the forward.
    """
    if not graph.groups:
        return graph
    trials = _Trials(model, graph, inputs)
    # An attribute can follow widths that the shapes of tensors tell.
    told = graph.widths_of({name: graph.shape(name, graph.full_widths) for name in graph.axes})
    graph = replace(
        graph, written={p: axis for p, axis in graph.written.items() if set(axis.groups) <= set(told)}
    )
    heads = {place: axis for place, axis in graph.written.items() if _counts_heads(place.attribute)}
    for following in (heads, {}) if heads else ({},):
        if trials.work(graph.groups, following):
            return replace(graph, written=following)
    if not graph.written:
        return keep_only(graph, _largest_working(list(graph.groups), trials))
    if trials.work(graph.groups, graph.written):
        return replace(graph, written=_needed(model, graph, trials))
    # Sizes that modules keep in attributes may be what breaks: first the groups that have to do with none.
    written = {group for axis in graph.written.values() for group in axis.groups}
    kept = _largest_working([name for name in graph.groups if name not in written], trials)
    attributes: dict[Written, Axis] = {}
    for places in _by_class(model, graph):
        groups = list(dict.fromkeys(g for place in places for g in graph.written[place].groups))
        groups = [group for group in groups if group not in kept]
        found = _attributes_that_work(trials, graph, places, [*kept, *groups], attributes)
        if found is None:
            trials.attributes = attributes
            groups = _largest_working(groups, trials, tuple(kept))
        else:
            attributes |= found
        trials.attributes = attributes
        kept += groups
    return keep_only(replace(graph, written=attributes), kept)


def _needed(model: nn.Module, graph: WidthGraph, trials: "_Trials") -> dict[Written, Axis]:
    """Of attributes that together let all groups be narrow, as few as do: see `_attributes_that_work`."""
    kept = dict(graph.written)
    for places in _by_class(model, graph):
        for name in dict.fromkeys((place.attribute, place.index) for place in places):
            if _counts_heads(name[0]):
                continue
            others = {p: a for p, a in kept.items() if p not in places or (p.attribute, p.index) != name}
            if trials.work(graph.groups, others):
                kept = others
    return kept


def _counts_heads(attribute: str) -> bool:
    """Whether a forward without it would not fail but divide the channels among too many heads."""
    return "heads" in attribute or attribute in ("n_head", "nhead")


def _attributes_that_work(
    trials: "_Trials",
    graph: WidthGraph,
    places: Sequence[Written],
    groups: Sequence[str],
    known: Mapping[Written, Axis],
) -> dict[Written, Axis] | None:
    """As few attributes of a class as let these groups be narrow; None if none do.

    An attribute that is as large as a width by chance (a stride of 4 beside 4 heads) must not follow it, even if
    the network would run: what can be left alone is, but for numbers of heads.
    """

    def chosen(names: Sequence[tuple[str, int | None]]) -> dict[Written, Axis]:
        return {p: graph.written[p] for p in places if (p.attribute, p.index) in names}

    names = list(dict.fromkeys((place.attribute, place.index) for place in places))
    heads = [name for name in names if _counts_heads(name[0])]
    fewer = ([name for name in names if name != left] for left in names)
    for attempt in (heads, names, *fewer, *([name] for name in names), []):
        if trials.work(groups, {**known, **chosen(attempt)}):
            for name in (other for other in tuple(attempt) if other not in heads):
                without = [other for other in attempt if other != name]
                if trials.work(groups, {**known, **chosen(without)}):
                    attempt = without
            return chosen(attempt)
    return None


def _by_class(model: nn.Module, graph: WidthGraph) -> list[list[Written]]:
    """Attributes of modules of one class: they are read by the same code."""
    modules = dict(model.named_modules())
    classes: dict[type[nn.Module], list[Written]] = {}
    for place in graph.written:
        classes.setdefault(type(modules[place.module]), []).append(place)
    return list(classes.values())


class _Trials:
    """Runs a light copy of a network at narrow widths.

    Args:
        model: at full width; left as it is.
        graph: its width graph.
        inputs: positional inputs of the forward.
    """

    def __init__(self, model: nn.Module, graph: WidthGraph, inputs: tuple[Any, ...]) -> None:
        self._graph = graph
        self.attributes: Mapping[Written, Axis] = {}
        self._model, self._inputs = light_copy(model, inputs)
        self._full = tensors_of(self._model, graph)
        # Only where train mode does something else than eval mode does it have to be tried as well.
        self._modes: tuple[bool, ...] = (False, True)
        evaluated, trained = (self._run(training) for training in self._modes)
        if evaluated == trained:
            self._modes = (False,)
        self._expected = [shapes for shapes, _ in (evaluated, trained)][: len(self._modes)]
        self._widths = _trial_widths(graph)

    def work(self, names: Iterable[str], attributes: Mapping[Written, Axis] | None = None) -> bool:
        """Whether the network runs and puts out what it should while any of these groups are narrow.

        Args:
            names: groups.
            attributes: sizes kept by modules that follow the widths; by default those that are known to.
        """
        names = set(names)
        graph = replace(self._graph, written=self.attributes if attributes is None else attributes)
        full = self._graph.full_widths
        for number, wanted in enumerate(self._widths):
            widths = {name: wanted[name] if name in names else full[name] for name in full}
            if not self._works(graph, widths):
                # What has just failed is the likeliest to fail again.
                self._widths.insert(0, self._widths.pop(number))
                return False
        return True

    def _works(self, graph: WidthGraph, widths: Mapping[str, int]) -> bool:
        full = graph.full_widths
        tensors = {
            name: self._narrowed(name, tensor, widths)
            for name, tensor in self._full.items()
            if self._graph.changes(name, full, widths)
        }
        replaced = replace_tensors(self._model, graph, tensors)
        try:
            return [self._run(training)[0] for training in self._modes] == self._expected
        except (RuntimeError, ValueError, TypeError, AssertionError, IndexError):
            return False
        finally:
            restore_tensors(self._model, graph, replaced)

    def _narrowed(self, name: str, tensor: Tensor, widths: Mapping[str, int]) -> Tensor:
        if tensor.is_meta:
            return tensor.new_empty(self._graph.shape(name, widths))
        return resized(tensor, self._graph.axes[name], self._graph.full_widths, widths)

    def _run(self, training: bool) -> tuple[list[torch.Size], list[Any]]:
        """Shapes of the outputs, and the functions that were called on the way."""
        self._model.train(training)
        with torch.no_grad(), Shapes() as mode:
            outputs = self._model(*self._inputs)
        return [x.shape for x in _tensors(outputs)], mode.calls


def _trial_widths(graph: WidthGraph) -> list[dict[str, int]]:
    """All groups at half their width, then widths that have nothing to do with one another.

    A schedule may bring any widths, so any two groups must once differ in the part of their width that they have:
    that part is a digit of the group's number, on a scale as fine as even widths allow.
    """
    sizes = {name: group.full_width for name, group in graph.groups.items()}
    trials = [{name: max(1, size // 2) for name, size in sizes.items()}]
    for place in range(max(2, len(sizes).bit_length())):
        trial = {}
        for number, (name, size) in enumerate(sizes.items()):
            parts = next((n for n in (16, 8, 4) if size >= 2 * n), 2)
            width = size * (number // parts**place % parts + 1) // parts
            trial[name] = max(1, width if size < 4 else width // 2 * 2)
        if trial not in trials:
            trials.append(trial)
    return trials


def _largest_working(names: list[str], trials: _Trials, working: tuple[str, ...] = ()) -> list[str]:
    """Groups that can be narrowed together: halves are tried until what breaks is found."""
    if trials.work([*working, *names]):
        return names
    if len(names) == 1:
        return []
    half = len(names) // 2
    first = _largest_working(names[:half], trials, working)
    second = _largest_working(names[half:], trials, (*working, *first))
    return first + second


def light_copy(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[nn.Module, tuple[Any, ...]]:
    """A copy of a network and its inputs on device meta, or with memory where it cannot run without.

    Raises:
        UnsupportedOperation: it does not run on these inputs at all.
    """
    try:
        # Putting the light tensors into deepcopy's memo keeps what is shared shared.
        memo: dict[int, Any] = {id(buffer): buffer.to("meta") for buffer in model.buffers()}
        memo |= {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in model.parameters()}
        light = copy.deepcopy(model, memo)
        light_inputs = tuple(x.to("meta") if isinstance(x, Tensor) else x for x in inputs)
        with torch.no_grad(), Shapes():
            for training in (False, True):
                light.train(training)(*light_inputs)
    except (RuntimeError, NotImplementedError, ValueError, TypeError):
        # Tensors made in the forward, or numbers read from one, need the real device.
        light, light_inputs = copy.deepcopy(model), inputs
        for training in (False, True):
            try:
                with torch.no_grad():
                    light.train(training)(*light_inputs)
            except (RuntimeError, ValueError, TypeError) as error:
                first_line = (str(error).strip().splitlines() or ["no message"])[0]
                raise UnsupportedOperation(
                    f"{type(model).__name__} does not run in {'train' if training else 'eval'} mode on its example "
                    f"inputs ({first_line}); take larger inputs (--input-shape) or ones that fit."
                ) from error
    return light, light_inputs


def _tensors(outputs: Any) -> list[Tensor]:
    if isinstance(outputs, Tensor):
        return [outputs]
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    if isinstance(outputs, (list, tuple)):
        return [tensor for output in outputs for tensor in _tensors(output)]
    return []

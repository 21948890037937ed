"""Run a network at narrow widths; groups whose width its code fixes keep their full width.

A forward may contain a width as a constant (`x.view(b, 12, 64)`), which in the graph cannot be distinguished from a
size that follows the channels. So every graph is tested: the network is narrowed, on the meta device if possible, and
run; groups whose narrowing breaks it keep their full width.
"""

import re
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import combinations, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from growlab.base.errors import first_line
from growlab.widths.groups import Axis, ChannelNorm, HardcodedSize, Part, WidthGraph
from growlab.widths.inputs import call_with, tensors_in
from growlab.widths.meta import FAILURES, Lightened, Shapes, unwarned
from growlab.widths.places import kept_at, write
from growlab.widths.predictions import Call, Predictions, Seen, run_calls
from growlab.widths.program import line_of
from growlab.widths.resize import Places, note_restored, replace_tensors, resized, tensors_of

#: First words of the reason why a group stays: narrowing it makes the forward fail, or compute something else.
FAILS = "the code fails at narrow widths"
OTHERWISE = "the code computes something else at narrow widths"
# Most sets of attributes that are tried.
_MOST_ATTEMPTS = 32


class Trials:
    """Run a network at narrow widths and compare it with what tracing predicts; see `freeze_failing_groups`."""

    def __init__(
        self,
        light: Lightened,
        graph: WidthGraph,
        calls: Sequence[Call],
        training: bool = False,
        any_rows: bool = False,
    ) -> None:
        self._training, self._first = training, int(any_rows)
        self._graph, self._predictions = graph, Predictions(calls, graph.full_widths)
        self.attributes: Mapping[HardcodedSize, Axis] = {}
        self._model, self._inputs, self._kept = light.model, light.inputs, light.kept
        self._full, self._places = tensors_of(self._model, graph), Places(self._model, graph)
        # Train mode is tried too if it differs from eval mode.
        modes = (False,) if light.runs[False] == light.runs[True] else (False, True)
        self._expected = {mode: [shape[self._first :] for shape in light.runs[mode][0]] for mode in modes}
        self._widths = _trial_widths(graph)
        # Narrow widths with as many different ratios as possible.
        halves, last = self._widths[0], self._widths[-1]
        self._distinct = {n: w if w < graph.groups[n].full_width else halves[n] for n, w in last.items()}
        # Widths and attributes that have been tried -> reason why the network does not run, "" if it runs.
        self._tried: dict[Any, str] = {}
        #: Reason of the last failure, and reason why each group could not be narrowed.
        self.failure = ""
        self.failures: dict[str, str] = {}

    def work(self, names: Collection[str], attributes: Mapping[HardcodedSize, Axis] | None = None) -> bool:
        """Return True if the network runs as predicted while these groups are narrow and `attributes` follow."""
        return self.run(names, attributes) and self.compute_the_same(names, attributes)

    def run(self, names: Collection[str], attributes: Mapping[HardcodedSize, Axis] | None = None) -> bool:
        """Return True if the network runs and its outputs have the right shapes: the first half of `work`."""
        graph = self._following(attributes)
        for number, widths in enumerate(self._widths):
            if not self._runs(graph, self._only(names, widths)):
                # Try first next time: the widths that have just failed are the likeliest to fail again.
                self._widths.insert(0, self._widths.pop(number))
                return False
        return True

    def run_once(self, names: Collection[str], attributes: Mapping[HardcodedSize, Axis] | None = None) -> bool:
        """Return True if the network runs at the widths that failed last; cheaper than `run`."""
        return self._runs(self._following(attributes), self._only(names, self._widths[0]))

    def tie(self, names: Sequence[str]) -> None:
        """Give these groups equal widths in every trial."""
        for widths in (*self._widths, self._distinct):
            widths.update(dict.fromkeys(names, widths[names[0]]))

    def _only(self, names: Collection[str], widths: Mapping[str, int]) -> dict[str, int]:
        chosen, full = set(names), self._graph.full_widths
        return {name: widths[name] if name in chosen else full[name] for name in full}

    def compute_the_same(self, names: Collection[str], attributes: Mapping[HardcodedSize, Axis] | None = None) -> bool:
        """Return True if the network runs the operations that tracing predicts: the second half of `work`."""
        if not self._predictions.in_doubt:
            return True
        widths = self._only(names, self._distinct)
        try:
            with self._narrow(self._following(attributes), widths):
                narrow = self._calls()
        except FAILURES as error:
            self.failure = _raised(error)
            # The operations of some networks cannot be recorded at any width.
            return self._full_calls is None
        agree = self._predictions.agree(narrow, widths, lambda: self._full_calls or [])
        if not agree:
            self.failure = f"{OTHERWISE}: {self._predictions.difference}"
        return agree

    @property
    def counted(self) -> set[ChannelNorm]:
        """Norms whose number of channels the forward computes with."""
        return self._predictions.counted

    def _following(self, attributes: Mapping[HardcodedSize, Axis] | None) -> WidthGraph:
        return replace(self._graph, written=self.attributes if attributes is None else attributes)

    def lag_behind(self, places: Iterable[HardcodedSize]) -> list[HardcodedSize]:
        """Return the places whose size `replace_tensors` does not update, as it does attributes of torch's modules."""
        modules = dict(self._model.named_modules())
        with self._narrow(replace(self._graph, written={}), self._distinct):
            sizes = {place: kept_at(modules[place.module], place) for place in places}
        return [p for p, n in sizes.items() if n not in (None, self._graph.written[p].length(self._distinct))]

    def reads(self, places: Sequence[HardcodedSize]) -> bool:
        """Return True if the forward reads any of these places: other sizes there change its calls or make it fail."""
        reference = self._full_details
        modules, full = dict(self._model.named_modules()), self._graph.full_widths
        try:
            with self._undone():
                for place in places:
                    size = self._graph.written[place].length(full)
                    write(modules[place.module], place, size // 2 if size > 1 else size + 1)
                return self._details() != reference
        except FAILURES:
            return True

    @cached_property
    def _full_details(self) -> list[Any]:
        return self._details()

    def _details(self) -> list[Any]:
        with self._undone(), unwarned(), torch.no_grad(), Shapes("details") as mode:
            call_with(self._model.train(self._training), self._inputs)
        return mode.details

    @cached_property
    def _full_calls(self) -> list[Seen] | None:
        """Operations at full width; None if they cannot be recorded."""
        try:
            with self._undone():
                return self._calls()
        except FAILURES:
            return None

    def _calls(self) -> list[Seen]:
        return run_calls(self._model.train(self._training), self._inputs)

    @contextmanager
    def _narrow(self, graph: WidthGraph, widths: Mapping[str, int]) -> Iterator[None]:
        full = graph.full_widths
        tensors = {
            name: self._narrowed(name, tensor, widths)
            for name, tensor in self._full.items()
            if graph.changes(name, full, widths)
        }
        with self._undone():
            replaced = replace_tensors(self._model, graph, tensors, self._places)
            try:
                yield
            finally:
                note_restored(replaced.values())

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Restore the network at the end: its full width, and everything that it has cached at other widths."""
        try:
            yield
        finally:
            self._kept.restore()

    def _runs(self, graph: WidthGraph, widths: Mapping[str, int]) -> bool:
        key = (*widths.items(), *graph.written.items())
        if key not in self._tried:
            self._tried[key] = self._failure_at(graph, widths)
        self.failure = self._tried[key] or self.failure
        return not self._tried[key]

    def _failure_at(self, graph: WidthGraph, widths: Mapping[str, int]) -> str:
        try:
            with self._narrow(graph, widths):
                for training, expected in self._expected.items():
                    if (shapes := self._run(training)) != expected:
                        actual, usual = (", ".join(str([*shape]) for shape in x) for x in (shapes, expected))
                        return f"{OTHERWISE}: the network puts out {actual} instead of {usual}"
                return ""
        except FAILURES as error:
            return _raised(error)

    def _narrowed(self, name: str, tensor: Tensor, widths: Mapping[str, int]) -> Tensor:
        if tensor.is_meta:
            return tensor.new_empty(self._graph.shape(name, widths))
        return resized(tensor, self._graph.axes[name], self._graph.full_widths, widths)

    def _run(self, training: bool) -> list[torch.Size]:
        """Run the network; return the shapes of its outputs."""
        if training:
            self._model.train()
        with unwarned(), torch.no_grad(), Shapes():
            outputs = call_with(self._model, self._inputs)
        return [x.shape[self._first :] for x in tensors_in(outputs)]


def _raised(error: Exception) -> str:
    frames = ((frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__))
    message = first_line(error)
    return f"{FAILS}: {line_of(frames) or 'the forward'} raises {message!r}"


def _trial_widths(graph: WidthGraph) -> list[dict[str, int]]:
    """Return the widths to try: first all groups at half width, then combinations of different ratios.

    A schedule may have any widths, so any two groups must differ at least once in their ratio to full width. That
    ratio is a digit of the group's number, in a base as large as even widths allow.
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


def without(graph: WidthGraph, reasons: Mapping[str, str]) -> WidthGraph:
    """Return the graph without some groups, which keep their full width for the given reasons (group -> reason)."""
    names = graph.groups.keys() - reasons.keys()
    widths = graph.full_widths

    def frozen(axis: Axis) -> Axis:
        parts = tuple(part if part.group in names else Part(None, part.length(widths)) for part in axis.parts)
        return Axis(parts, axis.role if any(part.group for part in parts) else "fixed")

    kept = _changed(graph, frozen, lambda groups: tuple(group for group in groups if group in names))
    return replace(kept, fixed={**graph.fixed, **reasons})


def _merged(graph: WidthGraph, tied: Sequence[Sequence[str]]) -> WidthGraph:
    """Return the graph with a single group for each set of tied ones."""
    sets = [[name for name in names if name in graph.groups] for names in tied]
    ties = {name: names[0] for names in sets for name in names[1:]}

    def axis(old: Axis) -> Axis:
        parts = (replace(part, group=ties.get(part.group or "", part.group)) for part in old.parts)
        return replace(old, parts=tuple(parts))

    merged = _changed(graph, axis, lambda groups: tuple(dict.fromkeys(ties.get(group, group) for group in groups)))
    dependent = {ties.get(name, name): where for name, where in graph.basis_dependent.items()}
    return replace(merged, basis_dependent=dependent)


def _changed(
    graph: WidthGraph, axis: Callable[[Axis], Axis], joined: Callable[[Iterable[str]], tuple[str, ...]]
) -> WidthGraph:
    """Return the graph with other axes and fewer groups, without entries that have no group left."""
    norms = (replace(norm, axis=axis(norm.axis)) for norm in graph.channel_norms)
    attentions = (replace(attention, axis=axis(attention.axis)) for attention in graph.attentions)
    radii = (replace(radius, groups=joined(radius.groups)) for radius in graph.radii)
    written = {place: axis(old) for place, old in graph.written.items()}
    return replace(
        graph,
        groups={name: graph.groups[name] for name in joined(graph.groups)},
        axes={name: tuple(map(axis, axes)) for name, axes in graph.axes.items()},
        radii=tuple(radius for radius in radii if radius.groups),
        written={place: new for place, new in written.items() if new.groups},
        channel_norms=tuple(norm for norm in norms if norm.axis.groups),
        attentions=tuple(attention for attention in attentions if attention.axis.groups),
        constants={name: joined(groups) for name, groups in graph.constants.items()},
    )


def freeze_failing_groups(
    light: Lightened,
    graph: WidthGraph,
    calls: Sequence[Call],
    training: bool = False,
    any_rows: bool = False,
    all_or_none: bool = False,
) -> WidthGraph:
    """Remove groups whose narrowing makes the network's forward fail or compute something else.

    `calls` are those that tracing has visited, in train mode if `training`. With `any_rows` the number of output rows
    may depend on the data, such as boxes in an image; with `all_or_none` all groups go if any fails, which takes much
    less time. The result's `written` has only the attributes that must follow the widths.
    """
    if not graph.groups:
        return graph
    # An attribute can only follow widths that tensor shapes determine.
    determined = graph.widths_of({name: graph.shape(name, graph.full_widths) for name in graph.axes})
    written = {place: axis for place, axis in graph.written.items() if set(axis.groups) <= set(determined)}
    graph = replace(graph, written=written)
    model = light.model
    with light:
        trials = Trials(light, graph, calls, training, any_rows)
        working = _freeze_failing(model, graph, trials, all_or_none)
        if all_or_none and not working.groups:
            return working
        if ties := _tied(graph, working, trials):
            merged = _merged(_freeze_failing(model, graph, trials), ties)
            working = max(merged, working, key=lambda candidate: sum(map(candidate.grows, candidate.axes)))
    counted = {norm.name for norm in trials.counted}
    norms = (replace(norm, counted=norm.summed and norm.name in counted) for norm in working.channel_norms)
    working = replace(working, channel_norms=tuple(norms))
    modules = dict(model.named_modules())
    # `num_features` of instance norms without weights: no result depends on it, but torch warns if it is wrong.
    num_features = {
        place: axis
        for place, axis in written.items()
        if isinstance(modules[place.module], _InstanceNorm)
        and modules[place.module].weight is None
        and set(axis.groups) <= set(working.groups)
    }
    return replace(working, written={**num_features, **working.written})


def _tied(graph: WidthGraph, working: WidthGraph, trials: Trials) -> list[list[str]]:
    """Tie failing groups of equal widths to each other; return them if the network then runs.

    The forward may take the size of one from the other: `captions.view(batch, -1, images.shape[-1])`.
    """
    by_width: dict[tuple[int, int], list[str]] = {}
    for name, group in graph.groups.items():
        if name not in working.groups:
            by_width.setdefault((group.full_width, group.below), []).append(name)
    ties = [names for names in by_width.values() if len(names) > 1]
    for names in ties:
        trials.tie(names)
    failing = [name for names in ties for name in names]
    return ties if failing and trials.run([*working.groups, *failing], graph.written) else []


def _freeze_failing(model: nn.Module, graph: WidthGraph, trials: Trials, all_or_none: bool = False) -> WidthGraph:
    sizes, trials.attributes = graph.written, {}
    if trials.work(list(graph.groups), {}):
        return replace(graph, written={})
    graph = replace(graph, written={place: sizes[place] for place in trials.lag_behind(sizes)})
    classes = [read for places in _by_class(model, graph) if (read := _read(places, trials))]
    graph = replace(graph, written={place: sizes[place] for places in classes for place in places})
    if classes:
        following = _attributes_that_work(trials, graph, [*graph.written], list(graph.groups), {})
        if following is not None:
            return replace(graph, written=following)
    if all_or_none:
        return without(graph, dict.fromkeys(graph.groups, trials.failure))
    # First the groups that no attribute counts.
    written = {group for axis in graph.written.values() for group in axis.groups}
    kept = _largest_working([name for name in graph.groups if name not in written], trials)
    attributes = dict(graph.written)
    for places in classes:
        groups = list(dict.fromkeys(g for place in places for g in graph.written[place].groups))
        groups = [group for group in groups if group not in kept]
        others = {place: axis for place, axis in attributes.items() if place not in places}
        following = _attributes_that_work(trials, graph, places, [*kept, *groups], others)
        trials.attributes = attributes = {**others, **(following or {})}
        if following is None:
            groups = _largest_working(groups, trials, tuple(kept))
        kept += groups
    failures = {name: trials.failures[name] for name in graph.groups if name not in kept}
    return without(replace(graph, written=attributes), failures)


def _attributes_that_work(
    trials: Trials,
    graph: WidthGraph,
    places: Sequence[HardcodedSize],
    groups: Sequence[str],
    others: Mapping[HardcodedSize, Axis],
) -> dict[HardcodedSize, Axis] | None:
    """Find the largest set of attributes that lets these groups be narrowed by following them; None if no set does.

    An attribute that equals a width by chance (a stride of 4 in a network of 4 heads) must not follow it.
    """
    names = list(dict.fromkeys(map(_kind_of, places)))
    attempts = (chosen for size in range(len(names), -1, -1) for chosen in combinations(names, size))
    for chosen in islice(attempts, _MOST_ATTEMPTS):
        following = {place: graph.written[place] for place in places if _kind_of(place) in chosen}
        attributes = {**others, **following}
        # The cheapest test first.
        if all(test(groups, attributes) for test in (trials.run_once, trials.compute_the_same, trials.run)):
            return following
    return None


def _read(places: Sequence[HardcodedSize], trials: Trials) -> list[HardcodedSize]:
    """Return the places that the forward reads."""
    similar: dict[HardcodedSize, list[HardcodedSize]] = {}
    for place in places:
        similar.setdefault(_kind_of(place), []).append(place)
    return [place for same in similar.values() if trials.reads(same) for place in same]


def _kind_of(place: HardcodedSize) -> HardcodedSize:
    """Replace the numbers in a place's module path, for the same key in repeated blocks."""
    return replace(place, module=re.sub(r"\d+", "*", place.module))


def _by_class(model: nn.Module, graph: WidthGraph) -> list[list[HardcodedSize]]:
    """Group attributes by the class of their module, whose code reads them."""
    modules = dict(model.named_modules())
    classes: dict[type[nn.Module], list[HardcodedSize]] = {}
    for place in graph.written:
        classes.setdefault(type(modules[place.module]), []).append(place)
    return list(classes.values())


def _largest_working(names: list[str], trials: Trials, working: tuple[str, ...] = ()) -> list[str]:
    """Return as many of the groups as can be narrowed together and with those in `working`."""
    # Most failing groups fail at any width.
    names = _largest(names, trials, trials.run_once, working)
    if not trials.run([*working, *names]):
        names = _largest(names, trials, trials.run, working)
    # Last, because comparing all operations takes many times as long as running them.
    same = trials.compute_the_same([*working, *names])
    return names if same else _largest(names, trials, trials.work, working)


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

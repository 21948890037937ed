"""Growth events as transactions that are undone after an error; their timing and log."""

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from fractions import Fraction
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from growlab.base.pieces import old_pieces_aside
from growlab.grower.part import Part
from growlab.grower.sharding import known_sharding
from growlab.grower.triggers import GrowingNetwork
from growlab.growth import GrowthEvent
from growlab.widths.resize import note_restored
from growlab.widths.unchanged import (
    STATES,
    TENSOR_HOOKS,
    Content,
    restore_dict,
    restore_filled,
    restore_leaf,
    restore_list,
    states_of_draws,
    watching,
)

_ATOMS = frozenset({str, bytes, bool, int, float, complex, type(None), type, Fraction})
# Receipt entries that are summed over the parts of an event.
_SUMMED = ("auxiliary_flops", "auxiliary_samples")
# Packages whose objects are not changed after they are made.
_FIXED = frozenset({"torch", "builtins", "numpy", "functools", "weakref"})


@contextmanager
def transaction(grower: GrowingNetwork, parts: Sequence[Part]) -> Iterator[None]:
    """Restore a grower and its followers if anything is raised.

    Covers the network and its averages (modules, parameters and buffers by identity and value, gradients, hooks),
    optimizers, parts, trigger and method with their attributes, and random generators. Replaced tensors are kept, those
    of sharded networks outside of the device's memory. Tensors are copied only just before they are written to in
    place.
    """
    networks = [grower.network, *grower.copies().values()]
    # Parts may set attributes of a model's config, whose class is from another library.
    configs = [getattr(module, "config", None) for network in networks for module in network.modules()]
    libraries = _libraries(grower, parts) | {type(config).__module__.partition(".")[0] for config in configs}
    snapshot = _Snapshot([grower, *grower.optimizers, *networks], libraries)
    restore_draws, restore_sharding = states_of_draws(grower.network), known_sharding(networks)
    try:
        with old_pieces_aside(), snapshot.watching():
            yield
    except BaseException:
        grown = [dict(network.named_parameters()) for network in networks]
        snapshot.restore()
        restore_sharding()
        restore_draws()
        for network, new in zip(networks, grown, strict=True):
            old = network.named_parameters()
            note_restored((p, new[name]) for name, p in old if new.get(name, p) is not p)
        raise


@contextmanager
def decision(grower: GrowingNetwork, parts: Sequence[Part]) -> Iterator[None]:
    """Restore trigger, parts and the growth state if anything is raised; cheap enough for every step."""
    roots = [grower.state, grower.trigger, *parts]
    snapshot = _Snapshot(roots, _libraries(grower, parts), whole=False)
    try:
        yield
    except BaseException:
        snapshot.restore()
        raise


@contextmanager
def unchanged_by_errors(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Restore optimizers' parameters, state and hooks if anything is raised; tensors must not be written to."""
    snapshot = _Snapshot(optimizers, {type(each).__module__.partition(".")[0] for each in optimizers})
    try:
        yield
    except BaseException:
        snapshot.restore()
        raise


def _libraries(grower: GrowingNetwork, parts: Sequence[Part]) -> set[str]:
    """Top-level packages of classes whose objects growth may change."""
    things = (grower.trigger, grower.method, *parts)
    return {"growlab", *(type(thing).__module__.partition(".")[0] for thing in things)}


class _Snapshot:
    """Snapshot of a grower and its followers: containers and objects by identity, tensors by their memory.

    Attributes of objects are recorded if their class is from one of the `libraries` (top-level packages). Without
    `whole`, modules, optimizers and tensors are left out.
    """

    def __init__(self, roots: Sequence[Any], libraries: set[str], whole: bool = True) -> None:
        self._libraries, self._whole = libraries, whole
        self._undo: list[tuple[Callable[[Any, Any], None], Any, Any]] = []
        self._contents: list[Content] = []
        waiting, seen = list(roots), set[int]()
        while waiting:
            thing = waiting.pop()
            if id(thing) not in seen:
                seen.add(id(thing))
                inside = self._note(thing)
                if not _ATOMS.issuperset(map(type, inside)):
                    waiting.extend(inside)

    def watching(self) -> AbstractContextManager[Any]:
        return watching(self._contents)

    def restore(self) -> None:
        for undo, thing, state in self._undo:
            undo(thing, state)
        for content in self._contents:
            content.restore()

    def _note(self, thing: Any) -> tuple[Any, ...]:
        if type(thing) in _ATOMS:
            return ()
        if isinstance(thing, Tensor):
            if not self._whole:
                return ()
            self._contents.append(Content(thing))
            if not thing.is_leaf or thing.is_meta:
                return ()
            state = (thing.requires_grad, thing.grad, [getattr(thing, name, None) for name in TENSOR_HOOKS])
            self._undo.append((restore_leaf, thing, state))
            return (thing.grad, *state[2])
        if isinstance(thing, dict):
            self._undo.append((restore_dict, thing, dict(thing)))
            return (*thing.keys(), *thing.values())
        if isinstance(thing, list):
            self._undo.append((restore_list, thing, list(thing)))
            return tuple(thing)
        if isinstance(thing, (set, deque)):
            self._undo.append((restore_filled, thing, tuple(thing)))
            return tuple(thing)
        if isinstance(thing, tuple):
            return thing
        if type(thing) in STATES:
            read, write = STATES[type(thing)]
            self._undo.append((write, thing, read(thing)))
            return ()
        return (thing.__dict__,) if self._is_own(thing) else ()

    def _is_own(self, thing: Any) -> bool:
        """Return True if an event may change an object's attributes."""
        if isinstance(thing, (nn.Module, Optimizer)):
            return self._whole
        module = type(thing).__module__
        own = module.partition(".")[0] in self._libraries - _FIXED and not module.startswith("growlab.widths.")
        return own and isinstance(getattr(thing, "__dict__", None), dict)


class Seconds:
    """Wall time of the phases of an event."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self.parts: dict[str, float] = {}

    @property
    def total(self) -> float:
        """Seconds since the event began."""
        return time.perf_counter() - self._began

    def note(self, name: str) -> None:
        """End a phase, which began at the end of the previous one."""
        self.parts[name] = self.total - sum(self.parts.values())

    def move(self, part: str, to: str, seconds: float) -> None:
        """Move seconds from one phase to another."""
        self.parts[part] -= seconds
        self.parts[to] = self.parts.get(to, 0.0) + seconds


def call_then(then: Callable[[], Any], events: Sequence[GrowthEvent]) -> None:
    """Call a function after events, and add its time to theirs."""
    began = time.perf_counter()
    then()
    seconds = (time.perf_counter() - began) / len(events)
    for event in events:
        event.seconds_by_part["wrapper"] = seconds
        event.seconds += seconds


def merged(*entries: Mapping[str, Any]) -> dict[str, Any]:
    """Merge receipt entries of one event, and sum their costs."""
    result: dict[str, Any] = {}
    for entry in entries:
        sums = {key: result[key] + entry[key] for key in _SUMMED if key in result and key in entry}
        result |= {**entry, **sums}
    return result


class _Console(logging.Handler):
    """Writes growlab's log to stderr if the program has not configured logging."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            print(self.format(record), file=sys.stderr)


_library = logging.getLogger("growlab")
_library.addHandler(_Console())
if _library.level == logging.NOTSET:
    _library.setLevel(logging.INFO)

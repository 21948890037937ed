"""Growth events as transactions: whatever is raised in one, all that it has changed is put back."""

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import cache
from operator import is_
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from growlab.widths.replaced import note_restored

if TYPE_CHECKING:
    from growlab.grower.grower import Grower

_ATOMS = frozenset({str, bytes, bool, int, float, complex, type(None), type, Fraction})
# Objects whose state has ways of its own to be read and written.
_GENERATORS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
    np.random.Generator: (
        lambda generator: generator.bit_generator.state,
        lambda generator, state: setattr(generator.bit_generator, "state", state),
    ),
}
# Objects of these say what they are when they are made, and stay so.
_FIXED = ("growlab.widths", "torch", "builtins", "numpy", "functools", "weakref")


@contextmanager
def transaction(run: "Grower") -> Iterator[None]:
    """Put a grower, and all that follows it, back to where they are now if anything is raised.

    It covers the network and its averages (modules, parameters and buffers by identity and by value, gradients,
    hooks), optimizers, parts, trigger and method with what they keep, and generators of random numbers. Tensors that
    are replaced are put back; only those that are written to in place are copied, just before.
    """
    networks = [run.network, *run.copies().values()]
    snapshot, draws = _Snapshot(run, [run, *run.optimizers, *networks]), _draws(run.network)
    try:
        with snapshot.watching():
            yield
    except BaseException:
        grown = [dict(network.named_parameters()) for network in networks]
        snapshot.restore()
        draws()
        for network, new in zip(networks, grown, strict=True):
            old = network.named_parameters()
            note_restored((p, new[name]) for name, p in old if new.get(name, p) is not p)
        raise


@contextmanager
def decision(run: "Grower") -> Iterator[None]:
    """The same of trigger, parts and the state of growth alone, which costs little at every step."""
    snapshot = _Snapshot(run, [run.state, run.trigger, *run.parts], whole=False)
    try:
        yield
    except BaseException:
        snapshot.restore()
        raise


class _Snapshot:
    """What a grower and all that follows it hold: containers and objects by identity, tensors by their memory.

    Args:
        run: the grower.
        roots: what is remembered, with all that is inside.
        whole: modules, optimizers and tensors too.
    """

    def __init__(self, run: "Grower", roots: Sequence[Any], whole: bool = True) -> None:
        kinds = {type(one) for one in (run.trigger, run.method, *run.parts)}
        self._libraries = {"growlab", *(kind.__module__.partition(".")[0] for kind in kinds)}
        self._whole = whole
        self._undo: list[tuple[Callable[[Any, Any], None], Any, Any]] = []
        self._contents: list[_Content] = []
        waiting, seen = list(roots), set[int]()
        while waiting:
            thing = waiting.pop()
            if id(thing) not in seen:
                seen.add(id(thing))
                inside = self._note(thing)
                if not _ATOMS.issuperset(map(type, inside)):
                    waiting.extend(inside)

    def watching(self) -> TorchDispatchMode:
        """A mode in which tensors are copied before an operation writes to them."""
        return _Writes(self._contents)

    def restore(self) -> None:
        """Put everything back."""
        for undo, thing, state in self._undo:
            undo(thing, state)
        for content in self._contents:
            content.restore()

    def _note(self, thing: Any) -> tuple[Any, ...]:
        """Remember one thing, and return what is inside of it."""
        if type(thing) in _ATOMS:
            return ()
        if isinstance(thing, Tensor):
            if not self._whole:
                return ()
            self._contents.append(_Content(thing))
            if not thing.is_leaf or thing.is_meta:
                return ()
            self._undo.append((_restore_gradient, thing, thing.grad))
            return (thing.grad,)
        if isinstance(thing, dict):
            self._undo.append((_restore_dict, thing, dict(thing)))
            return (*thing.keys(), *thing.values())
        if isinstance(thing, (list, set, deque)):
            self._undo.append((_restore_sequence, thing, tuple(thing)))
            return tuple(thing)
        if isinstance(thing, tuple):
            return thing
        if type(thing) in _GENERATORS:
            read, write = _GENERATORS[type(thing)]
            self._undo.append((write, thing, read(thing)))
            return ()
        return (thing.__dict__,) if self._is_own(thing) else ()

    def _is_own(self, thing: Any) -> bool:
        """Whether an event may change an object's attributes: a module's, an optimizer's, those of growing itself."""
        if isinstance(thing, (nn.Module, Optimizer)):
            return self._whole
        place = type(thing).__module__
        own = place.partition(".")[0] in self._libraries and not place.startswith(_FIXED)
        return own and isinstance(getattr(thing, "__dict__", None), dict)


class _Content:
    """A tensor's numbers, and the memory that they are in."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.alias = tensor, tensor.detach()
        self._copy: Tensor | None = None

    @property
    def memory(self) -> int:
        return _memory(self.alias) or id(self.tensor)

    def keep(self) -> None:
        """Copy them."""
        if self._copy is None:
            self._copy = self.alias.clone()

    def restore(self) -> None:
        """Put them back into the memory where they were."""
        if _memory(self.tensor) != _memory(self.alias) or self.tensor.shape != self.alias.shape:
            self.tensor.data = self.alias
        if self._copy is not None:
            with torch.inference_mode() if self.tensor.is_inference() else torch.no_grad():
                self.tensor.copy_(self._copy)


class _Writes(TorchDispatchMode):
    """Copies tensors before an operation writes to them."""

    supports_higher_order_operators = True

    def __init__(self, contents: Iterable[_Content]) -> None:
        super().__init__()
        self._contents: dict[int, list[_Content]] = {}
        for content in contents:
            self._contents.setdefault(content.memory, []).append(content)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for place in _written_by(func):
            given = kwargs.get(place) if isinstance(place, str) else next(iter(args[place : place + 1]), None)
            for tensor in given if isinstance(given, (list, tuple)) else (given,):
                if isinstance(tensor, Tensor):
                    for content in self._contents.pop(_memory(tensor) or id(tensor), ()):
                        content.keep()
        return func(*args, **kwargs)


@cache
def _written_by(operation: Any) -> tuple[int | str, ...]:
    """Places of the arguments that an operation writes to."""
    schema = getattr(operation, "_schema", None)
    # The schemas of batch normalisation do not say that it writes to its statistics.
    every = schema is not None and "batch_norm" in schema.name
    return tuple(
        argument.name if argument.kwarg_only else place
        for place, argument in enumerate(() if schema is None else schema.arguments)
        if every or (argument.alias_info is not None and argument.alias_info.is_write)
    )


def _memory(tensor: Tensor) -> int:
    """Where a tensor's numbers are; 0: nowhere, or in several places."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _draws(network: nn.Module) -> Callable[[], None]:
    """What puts the global generators back to where they are now."""
    devices = {p.device for p in network.parameters() if p.device.type == "cuda"}
    here, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    there = {device: torch.cuda.get_rng_state(device) for device in devices}

    def put_back() -> None:
        torch.set_rng_state(here)
        random.setstate(python)
        np.random.set_state(numpy)
        for device, state in there.items():
            torch.cuda.set_rng_state(state, device)

    return put_back


def _restore_gradient(tensor: Tensor, gradient: Tensor | None) -> None:
    if tensor.grad is not gradient:
        tensor.grad = gradient


def _restore_dict(content: dict[Any, Any], state: dict[Any, Any]) -> None:
    if len(content) != len(state) or not (
        all(map(is_, content, state)) and all(map(is_, content.values(), state.values()))
    ):
        content.clear()
        content.update(state)


def _restore_sequence(content: Any, state: tuple[Any, ...]) -> None:
    if len(content) != len(state) or not all(map(is_, content, state)):
        content.clear()
        (content.update if isinstance(content, set) else content.extend)(state)

"""Snapshot and restore everything that a network's modules can keep, so that inspecting it leaves it unchanged."""

import random
import sys
from argparse import Namespace
from array import array
from collections import ChainMap, OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dis import get_instructions
from functools import cache, partial
from math import inf
from operator import delitem, getitem, is_, setitem
from queue import Queue
from threading import local
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from growlab.base.pieces import reshard

# Libraries whose plain objects are not searched: a forward stores nothing in them.
_LIBRARIES = frozenset(sys.stdlib_module_names) | {
    *("accelerate", "growlab", "lightning", "lightning_fabric", "numpy", "pytorch_lightning", "torch", "wandb")
}
# Libraries whose global variables are not searched: a forward does not change them.
_WITHOUT_VARIABLES = _LIBRARIES | {"huggingface_hub", "transformers"}
# Classes of these libraries that are searched nevertheless.
_RECORDS = (
    *(ChainMap, Namespace, Queue, SimpleNamespace, UserDict, UserList, local, partial),
    *(WeakKeyDictionary, WeakSet, WeakValueDictionary, torch.quasirandom.SobolEngine),
)
_ATOMS = frozenset({bool, bytes, complex, float, int, str, type, type(None), torch.device, torch.dtype, torch.Size})
_CACHED = type(cache(lambda: None))
# Longer containers are data, not a cache, and are not searched.
_LONGEST = 10_000
#: Private attributes with a tensor's hooks; there are no public ones.
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_ABSENT = object()

#: Tensors that a snapshot copies in advance. With "buffers", `unchanged` copies other tensors right before an operation
#: writes to them.
Copied = Literal["nothing", "buffers", "all but parameters"]

# Up to this many bytes on a CPU, all tensors are copied in advance: a dispatch mode takes several microseconds per
# operation, which is slower.
_SMALL = 2**20


class Snapshot:
    """Snapshot of a network's state, which can be restored any number of times.

    It covers every place where a forward can store something: attributes, submodules, hooks and modes of modules;
    plain objects, containers and functions (closures, `functools.cache`) that are reachable from them; attributes of
    their classes, and global variables that their methods name; tensors with their content, attributes and gradients;
    random generators in any of these places.

    Args:
        network: network whose state is recorded.
        copied: tensors that are copied in advance.
    """

    def __init__(self, network: nn.Module, copied: Copied = "buffers") -> None:
        self._copied, self._buffers = copied, {id(buffer) for buffer in network.buffers()}
        self._undo: list[tuple[Callable[[Any, Any], None], Any, Any]] = []
        # Dictionaries that are empty, as most of a module's are (hooks).
        self._empty: list[dict[Any, Any]] = []
        self._tensors: list[Content] = []
        # Id of each object by the id of its attribute dictionary.
        self._owners: dict[int, int] = {}
        self._network = network
        reshard(network)
        self._seen, self._waiting = set[int](), list[Any]([network])
        while self._waiting:
            obj = self._waiting.pop()
            if type(obj) not in _ATOMS and id(obj) not in self._seen:
                self._seen.add(id(obj))
                self._note(obj, type(obj))

    def restore(self) -> None:
        """Restore everything that has changed."""
        reshard(self._network)
        for undo, obj, state in self._undo:
            undo(obj, state)
        for filled in filter(None, self._empty):
            restore_dict(filled, {})
        for content in self._tensors:
            content.restore()

    def accept(self) -> None:
        """Make the current values of tensors those to restore."""
        for content in self._tensors:
            content.accept()

    def watching(self) -> AbstractContextManager[Any]:
        """Return a context for running the network, see `watching`."""
        return watching(self._tensors)

    def kept(self) -> "list[Kept]":
        """Find tensors in places that were empty: attributes, buffers, and entries of containers and variables.

        With attributes of a module or an object, its other changed attributes are returned too.
        """
        undos = (*self._undo, *((restore_dict, obj, {}) for obj in self._empty))
        places = [Kept(undo, obj, state, self._owners.get(id(obj))) for undo, obj, state in undos]
        changed = [place for place in places if place.changed]
        owners = {place.owner for place in changed if place.shapes()} - {None}
        return [place for place in changed if place.shapes() or place.owner in owners]

    def _note(self, obj: Any, kind: type) -> None:
        if kind is dict or kind is OrderedDict:
            if obj:
                self._add(restore_dict, obj, obj.copy(), obj.values())
            else:
                self._empty.append(obj)
            return
        if isinstance(obj, Tensor):
            self._note_tensor(obj)
        elif isinstance(obj, dict):
            self._add(restore_dict, obj, dict(_kind_of(obj).items(obj)), dict.values(obj))
        elif isinstance(obj, list):
            self._add(restore_list, obj, list(obj), obj)
        elif isinstance(obj, (set, deque)):
            self._add(restore_filled, obj, tuple(obj), obj)
        elif isinstance(obj, (tuple, frozenset)):
            self._follow(obj)
        elif isinstance(obj, MethodType):
            self._follow((obj.__self__, obj.__func__))
        elif isinstance(obj, partial):
            self._follow((obj.func, *obj.args, *obj.keywords.values()))
        elif isinstance(obj, FunctionType):
            self._note_function(obj)
        elif isinstance(obj, CellType):
            self._add_place((_CELL, (obj, "cell_contents")))
        elif isinstance(obj, ContextVar):
            self._add_place((_VARIABLE, (obj,)))
        elif isinstance(obj, _CACHED):
            self._undo.append((_restore_cache, obj, obj.cache_info().misses))
        elif kind in STATES:
            read, write = STATES[kind]
            self._undo.append((write, obj, read(obj)))
        if isinstance(obj, (nn.Module, *_RECORDS)) or _library(kind) not in _LIBRARIES:
            self._note_object(obj, kind)

    def _add(self, undo: Callable[[Any, Any], None], obj: Any, state: Any, inside: Collection[Any]) -> None:
        self._undo.append((undo, obj, state))
        self._follow(inside)

    def _add_place(self, place: "_Place") -> None:
        content = _read(place)
        self._add(_restore_place, place, content, (content,))

    def _follow(self, inside: Collection[Any]) -> None:
        if len(inside) <= _LONGEST and not _ATOMS.issuperset(map(type, inside)):
            self._waiting.extend(inside)

    def _note_tensor(self, tensor: Tensor) -> None:
        if tensor.is_leaf:
            hooks = [getattr(tensor, name, None) for name in TENSOR_HOOKS]
            state = (tensor.requires_grad, tensor.grad, hooks)
            self._add(restore_leaf, tensor, state, (tensor.grad, *hooks))
        if attributes := getattr(tensor, "__dict__", None):
            self._waiting.append(attributes)
        elif attributes is not None:
            self._undo.append((restore_dict, attributes, {}))
        if self._copied == "nothing" or tensor.is_meta or is_lazy(tensor):
            return
        content = Content(tensor)
        in_advance = id(tensor) in self._buffers or self._copied != "buffers"
        if in_advance and not isinstance(tensor, nn.Parameter):
            content.keep()
        self._tensors.append(content)

    def _note_function(self, function: FunctionType) -> None:
        variables = function.__globals__
        if (library := str(variables.get("__name__")).partition(".")[0]) == "growlab":
            # Our own hooks record observations, which must not be restored.
            return
        self._follow((*(function.__closure__ or ()), *(function.__defaults__ or ())))
        self._follow(tuple((function.__kwdefaults__ or {}).values()))
        self._waiting.append(function.__dict__)
        if library in _WITHOUT_VARIABLES:
            return
        names = _names_in(function.__code__)
        for name in names:
            self._note_variable(variables, name, library)
            content = variables.get(name)
            if isinstance(content, ModuleType) and content.__name__.partition(".")[0] not in _WITHOUT_VARIABLES:
                # Variables of another module, which the code reads as its attributes.
                for each in names:
                    self._note_variable(vars(content), each, library)
        for name in _assigned_in(function.__code__):
            if name not in variables:
                self._undo.append((_restore_place, (_ITEM, (variables, name)), _ABSENT))

    def _note_variable(self, variables: dict[str, Any], name: str, library: str) -> None:
        """Note a global variable; of a class, its attributes."""
        if (content := variables.get(name, _ABSENT)) is _ABSENT or isinstance(content, ModuleType):
            return
        if isinstance(content, type):
            # Classes of the network's modules are noted with these.
            if not issubclass(content, nn.Module) and _library(content) not in _WITHOUT_VARIABLES:
                self._note_class(content)
            return
        self._undo.append((_restore_place, (_ITEM, (variables, name)), content))
        if not isinstance(content, FunctionType) or content.__module__.partition(".")[0] == library:
            self._waiting.append(content)

    def _note_object(self, obj: Any, kind: type) -> None:
        attributes = getattr(obj, "__dict__", None)
        if isinstance(attributes, dict):
            self._waiting.append(attributes)
            self._owners[id(attributes)] = id(obj)
        if isinstance(obj, nn.Module):
            self._owners[id(obj._buffers)] = id(obj)
            self._undo.append((_restore_class, obj, kind))
        if isinstance(obj, torch.jit.ScriptModule):
            self._waiting += [*obj.parameters(recurse=False), *obj.buffers(recurse=False)]
        for each in kind.__mro__:
            if _library(each) in _LIBRARIES:
                continue
            for slot in vars(each).values():
                if isinstance(slot, MemberDescriptorType):
                    self._add_place((_SLOT, (slot, obj)))
            self._note_class(each)

    def _note_class(self, kind: type) -> None:
        if id(kind) in self._seen:
            return
        self._seen.add(id(kind))
        attributes = {name: content for name, content in vars(kind).items() if not name.startswith("__")}
        self._undo.append((_restore_attributes, kind, attributes))
        for content in vars(kind).values():
            content = getattr(content, "__func__", getattr(content, "fget", content))
            if not isinstance(content, (type, MemberDescriptorType)):
                self._waiting.append(content)


class Kept:
    """A place where a forward has stored something that was not there before.

    `undo` restores the previous state. `owner` is the id of the object if the place is its attributes; None for a
    container or a variable.
    """

    def __init__(self, undo: Callable[[Any, Any], None], obj: Any, state: Any, owner: int | None) -> None:
        self._undo, self._obj, self._state, self.owner = undo, obj, state, owner
        self._before = _entries_of(undo, obj, state)
        now = self.contents()
        self.changed = [
            key
            for key in {**self._before, **now}
            if now.get(key, _ABSENT) is not (before := self._before.get(key, _ABSENT))
            # A tensor that replaces another one is not a cache.
            and not any(tensor.numel() for tensor in _tensors_in(before))
            and not isinstance(now.get(key), nn.Parameter)
        ]

    def contents(self) -> dict[Any, Any]:
        """Return the current entries of the place by key."""
        return _entries_of(self._undo, self._obj, None)

    def shapes(self) -> list[torch.Size]:
        """Shapes of the tensors in the entries that have changed."""
        now = self.contents()
        return [tensor.shape for key in self.changed for tensor in _tensors_in(now.get(key))]

    def drop_entries_that_differ(self, other: dict[Any, Any]) -> None:
        """Ignore entries without tensors that differ from the contents after another forward, such as counters."""
        now = self.contents()
        self.changed = [
            key for key in self.changed if _tensors_in(now.get(key)) or now.get(key, _ABSENT) is other.get(key, _ABSENT)
        ]

    def forget(self) -> Callable[[], None]:
        """Restore the previous state; return a function that undoes it."""
        now = self.contents()
        if self.owner is None:
            state = now if isinstance(self._obj, dict) else next(iter(now.values()), _ABSENT)
            state = list(now.values()) if isinstance(self._obj, list) else state
            self._undo(self._obj, self._state)
            return lambda: self._undo(self._obj, state)
        _put(self._obj, self._before, self.changed)
        return lambda: _put(self._obj, now, self.changed)


class Content:
    """Values of a tensor, and its memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.alias = tensor, tensor.detach()
        self._copy: Tensor | None = None

    def keep(self) -> None:
        """Copy the values, unless there is a copy already or they are lost."""
        if self._copy is None and not is_overwritten(self.alias):
            self._copy = self.alias.clone()

    def accept(self) -> None:
        """Update the copy to the current values, if there is one."""
        if self._copy is not None:
            self._copy.copy_(self.alias)

    def restore(self) -> None:
        """Restore the values in their original memory."""
        moved = _memory(self.tensor) != _memory(self.alias) or self.tensor.shape != self.alias.shape
        # Not copied if equal: that increments the version, with which a pending backward pass would fail.
        if not moved and (self._copy is None or _equal(self.tensor, self._copy)):
            return
        with torch.inference_mode() if self.tensor.is_inference() else torch.no_grad():
            if moved:
                self.tensor.data = self.alias
            if self._copy is not None and not _equal(self.tensor, self._copy):
                self.tensor.copy_(self._copy)

    @property
    def size(self) -> float:
        """Number of bytes that are not copied yet; infinite if copying may take more than a memcpy."""
        if self._copy is not None:
            return 0
        plain = type(self.alias) is Tensor and self.alias.device.type == "cpu" and self.alias.layout is torch.strided
        return self.alias.nbytes if plain else inf


def _equal(left: Tensor, right: Tensor) -> bool:
    """Return True if tensors are equal; False for layouts that cannot be compared."""
    return left.layout is torch.strided and torch.equal(left, right)


def is_overwritten(tensor: Tensor) -> bool:
    """Return True if a later replay of a CUDA graph has overwritten a tensor, which torch then refuses to read."""
    try:
        tensor.data_ptr()
    except RuntimeError as error:
        # Sparse tensors raise too, but are not lost.
        return "CUDAGraphs" in str(error)
    return False


def watching(contents: Sequence[Content]) -> AbstractContextManager[Any]:
    """Return a context in which tensors are copied before they are written to, or all in advance if they are small."""
    if sum(content.size for content in contents) > _SMALL:
        return _Writes(contents)
    for content in contents:
        content.keep()
    return nullcontext()


class DispatchMode(TorchDispatchMode):
    """Base of dispatch modes for eager operations: nothing is compiled under them."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: with True, a call takes three times as long."""
        return False


class _Writes(DispatchMode):
    """Dispatch mode that copies tensors before an operation writes to them."""

    def __init__(self, contents: Sequence[Content]) -> None:
        super().__init__()
        self._contents: dict[int, list[Content]] = {}
        for content in contents:
            self._contents.setdefault(_memory(content.alias) or id(content.tensor), []).append(content)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for place in _written_by(func):
            written = kwargs.get(place) if isinstance(place, str) else args[place : place + 1]
            # Not by a pytree, which takes longer.
            for tensor in written if isinstance(written, (list, tuple)) else (written,):
                for each in tensor if isinstance(tensor, (list, tuple)) else (tensor,):
                    if isinstance(each, Tensor):
                        for content in self._contents.pop(_memory(each) or id(each), ()):
                            content.keep()
        return func(*args, **kwargs)


@contextmanager
def unchanged(
    network: nn.Module, seed: int | None = None, copied: Copied = "buffers", snapshot: Snapshot | None = None
) -> Iterator[Snapshot]:
    """Context that restores a network, and the generators that it draws from, at its end or after an exception.

    Args:
        network: network to restore, see `Snapshot`.
        seed: seed of all global generators in the block; None: they continue from their state.
        copied: see `Snapshot`; "all but parameters" where dispatch modes are not allowed, as in torch.export.
        snapshot: a snapshot of the network's current state, taken with the same `copied`; None: take one.
    """
    snapshot = snapshot or Snapshot(network, copied)
    with draws_restored(network, seed):
        try:
            if copied != "buffers":
                yield snapshot
                return
            # torch does not compile under a dispatch mode, and raises an error with fullgraph=True.
            with torch.compiler.set_stance("force_eager"), snapshot.watching():
                yield snapshot
        finally:
            snapshot.restore()


@contextmanager
def draws_restored(network: nn.Module, seed: int | None = None) -> Iterator[None]:
    """Context that restores the global generators of torch, CUDA, Python and numpy; seeds them first unless None."""
    put_back = states_of_draws(network)
    try:
        if seed is not None:
            seed_draws(network, seed)
        yield
    finally:
        put_back()


def seed_draws(network: nn.Module, seed: int) -> None:
    """Seed the global generators that a network may draw from, of torch, CUDA, Python and numpy."""
    torch.default_generator.manual_seed(seed)
    for device in _cuda_devices(network):
        torch.cuda.default_generators[device].manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def states_of_draws(network: nn.Module) -> Callable[[], None]:
    """Return a function that restores the current state of the global generators of torch, CUDA, Python and numpy."""
    here, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    there = [(device, torch.cuda.get_rng_state(device)) for device in _cuda_devices(network)]

    def put_back() -> None:
        torch.set_rng_state(here)
        random.setstate(python)
        np.random.set_state(numpy)
        for device, state in there:
            torch.cuda.set_rng_state(state, device)

    return put_back


def _cuda_devices(network: nn.Module) -> list[int]:
    if not torch.cuda.is_initialized():
        return []
    return sorted({p.device.index or 0 for p in network.parameters() if p.device.type == "cuda"})


#: Class -> functions that read and write the state of its objects.
STATES: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.Generator: (
        lambda generator: generator.bit_generator.state,
        lambda generator, state: setattr(generator.bit_generator, "state", state),
    ),
    np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
    np.ndarray: (np.copy, np.copyto),
    bytearray: (bytes, lambda array, content: array.__setitem__(slice(None), content)),
    array: (lambda array: array[:], lambda array, content: array.__setitem__(slice(None), content)),
}


def _library(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def _memory(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


@cache
def _written_by(operation: Any) -> tuple[int | str, ...]:
    """Positions, or names if keyword-only, of the arguments that an operation writes to."""
    schema = getattr(operation, "_schema", None)
    if schema is None:
        return ()
    # Schemas of batch normalisation do not declare that it writes to its running statistics.
    every = "batch_norm" in schema.name
    return tuple(
        argument.name if argument.kwarg_only else place
        for place, argument in enumerate(schema.arguments)
        if every or (argument.alias_info is not None and argument.alias_info.is_write)
    )


@cache
def _names_in(code: CodeType) -> tuple[str, ...]:
    """Global names that a function and the functions inside of it use."""
    inner = [name for const in code.co_consts if isinstance(const, CodeType) for name in _names_in(const)]
    return tuple(dict.fromkeys((*code.co_names, *inner)))


@cache
def _assigned_in(code: CodeType) -> tuple[str, ...]:
    """Global variables that a function and the functions inside of it assign."""
    inner = [name for const in code.co_consts if isinstance(const, CodeType) for name in _assigned_in(const)]
    stored = [each.argval for each in get_instructions(code) if each.opname == "STORE_GLOBAL"]
    return tuple(dict.fromkeys((*stored, *inner)))


def _entries_of(undo: Callable[[Any, Any], None], obj: Any, state: Any) -> dict[Any, Any]:
    """Return the entries of a place by key: those of its saved state, or the current ones if that is None."""
    if undo is restore_dict:
        return dict(_kind_of(obj).items(obj)) if state is None else state
    if undo is restore_list:
        return dict(enumerate(obj if state is None else state))
    if undo is _restore_place and obj[0] is not _VARIABLE:
        return {"": _read(obj) if state is None else state}
    return {}


def _tensors_in(content: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(content) if isinstance(leaf, Tensor)]


def _put(attributes: dict[Any, Any], contents: Mapping[Any, Any], keys: Sequence[Any]) -> None:
    for key in keys:
        if key in contents:
            attributes[key] = contents[key]
        else:
            attributes.pop(key, None)


def _kind_of(content: dict[Any, Any]) -> Any:
    """Return the class whose methods read a dictionary's entries: subclasses may override them."""
    return OrderedDict if isinstance(content, OrderedDict) else dict


def restore_dict(content: dict[Any, Any], state: dict[Any, Any]) -> None:
    """Restore the entries of a dictionary, in the same order."""
    if not len(content) and not state:
        return
    kind = _kind_of(content)
    same = len(content) == len(state) and all(map(is_, kind.keys(content), state))
    if same and all(map(is_, kind.values(content), state.values())):
        return
    kind.clear(content)
    if kind is dict:
        dict.update(content, state)
        return
    for key, value in state.items():
        kind.__setitem__(content, key, value)


def restore_list(content: list[Any], state: list[Any]) -> None:
    """Restore the items of a list."""
    if len(content) != len(state) or not all(map(is_, content, state)):
        list.__setitem__(content, slice(None), state)


def restore_filled(content: Any, state: tuple[Any, ...]) -> None:
    """Restore the items of a set or a deque."""
    if len(content) != len(state) or not all(map(is_, content, state)):
        content.clear()
        (content.update if isinstance(content, set) else content.extend)(state)


# Functions that read, write and delete the content of a place: a closure's cell, a slot, a dictionary's item.
_CELL = (getattr, setattr, delattr)
_SLOT = (MemberDescriptorType.__get__, MemberDescriptorType.__set__, MemberDescriptorType.__delete__)
_ITEM = (getitem, setitem, delitem)
# A context variable cannot be unset again.
_VARIABLE = (ContextVar.get, ContextVar.set, lambda variable: None)
#: Such functions, and their first arguments.
_Place = tuple[tuple[Callable[..., Any], ...], tuple[Any, ...]]


def _read(place: _Place) -> Any:
    try:
        return place[0][0](*place[1])
    except (AttributeError, LookupError, ValueError):
        return _ABSENT


def _restore_place(place: _Place, content: Any) -> None:
    (_, write, delete), where = place
    if _read(place) is content:
        return
    if content is _ABSENT:
        delete(*where)
    else:
        write(*where, content)


def _restore_cache(function: Any, misses: int) -> None:
    if function.cache_info().misses != misses:
        function.cache_clear()


def _restore_class(obj: Any, kind: type) -> None:
    if type(obj) is not kind:
        obj.__class__ = kind


def _restore_attributes(kind: type, state: dict[str, Any]) -> None:
    now = {name: content for name, content in vars(kind).items() if not name.startswith("__")}
    for name in now.keys() - state.keys():
        delattr(kind, name)
    for name, content in state.items():
        if now.get(name, _ABSENT) is not content:
            setattr(kind, name, content)


def restore_leaf(tensor: Tensor, state: tuple[bool, Tensor | None, list[Any]]) -> None:
    """Restore the `requires_grad`, the gradient and the hooks of a leaf tensor."""
    requires_grad, grad, hooks = state
    if tensor.grad is not grad:
        tensor.grad = grad
    for name, saved in zip(TENSOR_HOOKS, hooks, strict=True):
        if getattr(tensor, name, None) is not saved:
            setattr(tensor, name, saved)
    if tensor.requires_grad is not requires_grad:
        tensor.requires_grad_(requires_grad)

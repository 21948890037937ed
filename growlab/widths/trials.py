"""Run a network at narrow widths, without memory (device meta) where possible."""

import copy
import os
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from growlab.widths.groups import ChannelNorm, WidthGraph, Written
from growlab.widths.inputs import call_with, changed
from growlab.widths.layout import Axis
from growlab.widths.meta import Shapes
from growlab.widths.places import kept_at, line_of, write
from growlab.widths.predictions import Call, Predictions, Seen, run_calls
from growlab.widths.program import UnsupportedOperation
from growlab.widths.replaced import note_restored
from growlab.widths.resize import replace_tensors, resized, tensors_of
from growlab.widths.unchanged import Snapshot

#: Exceptions that a network may raise at sizes it was not written for, such as for a layer that it lacks there.
FAILURES = (RuntimeError, ValueError, TypeError, AssertionError, LookupError, ArithmeticError, AttributeError)

#: First words of the reason why a group stays: narrowing it makes the forward fail, or compute something else.
FAILS = "the code fails at narrow widths"
OTHERWISE = "the code computes something else at narrow widths"


class Trials:
    """Run a network at narrow widths and compare it with what tracing predicts.

    Args:
        model: network at full width, while it is `lightened`.
        graph: its width graph.
        inputs: inputs that `lightened` has yielded.
        kept: snapshot that `lightened` has yielded.
        calls: operations that tracing has visited.
        training: True if they are those of train mode.
        any_rows: True if the number of output rows may vary.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: WidthGraph,
        inputs: tuple[Any, ...],
        kept: Snapshot,
        calls: Sequence[Call],
        training: bool = False,
        any_rows: bool = False,
    ) -> None:
        self._training, self._first = training, int(any_rows)
        self._graph, self._predictions = graph, Predictions(calls, graph.full_widths)
        self.attributes: Mapping[Written, Axis] = {}
        self._model, self._inputs, self._kept = model, inputs, kept
        self._full = tensors_of(self._model, graph)
        # Train mode is tried as well only if it does something else than eval mode.
        self._modes: tuple[bool, ...] = (False, True)
        evaluated, trained = (self._run_at_full_width(training) for training in self._modes)
        if evaluated == trained:
            self._modes = (False,)
        self._expected = [shapes for shapes, _ in (evaluated, trained)][: len(self._modes)]
        self._widths = _trial_widths(graph)
        # Narrow widths that differ from each other as much as possible.
        halves, apart = self._widths[0], self._widths[-1]
        self._apart = {n: w if w < graph.groups[n].full_width else halves[n] for n, w in apart.items()}
        self._reference: list[Any] | None = None
        self._full_calls: list[list[Seen]] | None = None
        #: Reason of the last failure; and the reason why each group could not be narrowed.
        self.failure = ""
        self.failures: dict[str, str] = {}

    def work(self, names: Iterable[str], attributes: Mapping[Written, Axis] | None = None) -> bool:
        """Return True if the network runs as tracing predicts while these groups are narrow.

        Args:
            names: groups.
            attributes: attributes of modules that follow the widths; None: `self.attributes`.
        """
        names = list(names)
        return self.run(names, attributes) and self.compute_the_same(names, attributes)

    def run(self, names: Iterable[str], attributes: Mapping[Written, Axis] | None = None) -> bool:
        """Return True if the network runs and its outputs have the right shapes: the first half of `work`."""
        graph, wanted = self._following(attributes), set(names)
        full = self._graph.full_widths
        for number, widths in enumerate(self._widths):
            if not self._runs(graph, {name: widths[name] if name in wanted else full[name] for name in full}):
                # The widths that have just failed are the likeliest to fail again.
                self._widths.insert(0, self._widths.pop(number))
                return False
        return True

    def compute_the_same(
        self, names: Iterable[str], attributes: Mapping[Written, Axis] | None = None
    ) -> bool:
        """Return True if the network runs the operations that tracing predicts: the second half of `work`."""
        if not self._predictions.in_doubt:
            return True
        wanted, full = set(names), self._graph.full_widths
        widths = {name: self._apart[name] if name in wanted else full[name] for name in full}
        try:
            with self._narrow(self._following(attributes), widths):
                narrow = self._calls()
        except FAILURES as error:
            self.failure = _raised(error)
            # Operations of some networks cannot be recorded at any width.
            return self._at_full_width() is None
        agree = self._predictions.agree(narrow, widths, lambda: self._at_full_width() or [])
        if not agree:
            self.failure = f"{OTHERWISE}: {self._predictions.difference}"
        return agree

    @property
    def counted(self) -> set[ChannelNorm]:
        """Norms whose number of channels the forward computes with."""
        return self._predictions.counted

    def _following(self, attributes: Mapping[Written, Axis] | None) -> WidthGraph:
        return replace(self._graph, written=self.attributes if attributes is None else attributes)

    def lag_behind(self, places: Iterable[Written]) -> list[Written]:
        """Return the places whose size `replace_tensors` does not update, as it does attributes of torch's modules."""
        modules = dict(self._model.named_modules())
        with self._narrow(replace(self._graph, written={}), self._apart):
            return [
                place
                for place in places
                if kept_at(modules[place.module], place)
                not in (None, self._graph.written[place].length(self._apart))
            ]

    def reads(self, places: Sequence[Written]) -> bool:
        """Return True if the forward reads any of these places: other sizes there change its calls or make it fail."""
        self._reference = self._reference or self._sizes()
        modules, full = dict(self._model.named_modules()), self._graph.full_widths
        try:
            with self._undone():
                for place in places:
                    size = self._graph.written[place].length(full)
                    write(modules[place.module], place, size // 2 if size > 1 else size + 1)
                return self._sizes() != self._reference
        except FAILURES:
            return True

    def _sizes(self) -> list[Any]:
        with self._undone(), _unwarned(), torch.no_grad(), Shapes(detailed=True) as mode:
            call_with(self._model.train(self._training), self._inputs)
        return mode.details

    def _at_full_width(self) -> list[Seen] | None:
        if self._full_calls is None:
            try:
                with self._undone():
                    self._full_calls = [self._calls()]
            except FAILURES:
                self._full_calls = []
        return next(iter(self._full_calls), None)

    def _calls(self) -> list[Seen]:
        with _unwarned():
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
            replaced = replace_tensors(self._model, graph, tensors)
            try:
                yield
            finally:
                note_restored(replaced.values())

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Restore the network at the end: its full width, and whatever it has cached in forwards at other widths."""
        try:
            yield
        finally:
            self._kept.restore()

    def _runs(self, graph: WidthGraph, widths: Mapping[str, int]) -> bool:
        try:
            with self._narrow(graph, widths):
                for training, expected in zip(self._modes, self._expected, strict=True):
                    if (shapes := self._run(training)[0]) != expected:
                        put_out, usual = (", ".join(str([*shape]) for shape in x) for x in (shapes, expected))
                        self.failure = f"{OTHERWISE}: the network puts out {put_out} instead of {usual}"
                        return False
                return True
        except FAILURES as error:
            self.failure = _raised(error)
            return False

    def _narrowed(self, name: str, tensor: Tensor, widths: Mapping[str, int]) -> Tensor:
        if tensor.is_meta:
            return tensor.new_empty(self._graph.shape(name, widths))
        return resized(tensor, self._graph.axes[name], self._graph.full_widths, widths)

    def _run_at_full_width(self, training: bool) -> tuple[list[torch.Size], list[Any]]:
        with self._undone():
            return self._run(training)

    def _run(self, training: bool) -> tuple[list[torch.Size], list[Any]]:
        """Run the network; return the shapes of its outputs and the functions that were called."""
        self._model.train(training)
        with _unwarned(), torch.no_grad(), Shapes() as mode:
            outputs = call_with(self._model, self._inputs)
        return [x.shape[self._first :] for x in tensors_in(outputs)], mode.calls


def _raised(error: Exception) -> str:
    frames = ((frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__))
    message = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"{FAILS}: {line_of(frames) or 'the forward'} raises {message!r}"


@contextmanager
def _unwarned() -> Iterator[None]:
    """Suppress warnings: most of the widths that are tried are never trained."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _trial_widths(graph: WidthGraph) -> list[dict[str, int]]:
    """Return the widths to try: first all groups at half width, then combinations of different ratios.

    A schedule may bring any widths, so any two groups must differ at least once in their ratio to full width: that
    ratio is a digit of the group's number, on a scale as fine as even widths allow.
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


@contextmanager
def lightened(model: nn.Module, inputs: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Snapshot]]:
    """Move a network to device meta for a while, or give it copies of its tensors if it cannot run there.

    The network itself is changed, not a copy of it: in a copy, modules that the forward reaches through closures or
    global names would still be those of the network.

    Args:
        model: restored at the end, whatever is done to it meanwhile.
        inputs: positional inputs of the forward.

    Yields:
        The inputs on device meta, or the given ones if the network cannot run there; and a snapshot to restore after
        each forward.

    Raises:
        UnsupportedOperation: the network does not run on these inputs at all.
    """
    whole, handles = Snapshot(model, "nothing"), _as_exported(model)
    try:
        # torch's warnings about a network's first runs appear when it is trained.
        with _unwarned():
            light, kept = _lightened(model, inputs, whole)
        yield light, kept
    finally:
        whole.restore()
        for handle in handles:
            handle.remove()


def _lightened(
    model: nn.Module, inputs: tuple[Any, ...], whole: Snapshot
) -> tuple[tuple[Any, ...], Snapshot]:
    try:
        _exchange(model, lambda tensor: tensor.detach().to("meta"))
        light = changed(lambda x: x.to("meta") if isinstance(x, Tensor) else x, inputs)
        with Shapes():
            return light, _tried(model, light)
    except (RuntimeError, NotImplementedError, ValueError, TypeError):
        # Tensors made in the forward, or numbers read from one, need the real device.
        whole.restore()
        _exchange(model, lambda tensor: tensor.detach().clone())
        return inputs, _tried(model, inputs)


def _exchange(model: nn.Module, other: Callable[[Tensor], Tensor]) -> None:
    """Replace all parameters and buffers; shared tensors stay shared."""
    known: dict[int, Tensor] = {}
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            if id(tensor) not in known:
                new = other(tensor)
                if isinstance(tensor, nn.Parameter):
                    new = nn.Parameter(new, tensor.requires_grad)
                vars(new).update(vars(tensor))
                known[id(tensor)] = new
            setattr(module, name, known[id(tensor)])


def _tried(light: nn.Module, inputs: tuple[Any, ...]) -> Snapshot:
    """Run a network in both modes; return a snapshot of its state before."""
    kept = Snapshot(light, "all but parameters")
    for training in (False, True):
        try:
            with torch.no_grad():
                call_with(light.train(training), inputs)
        except (RuntimeError, ValueError, TypeError) as error:
            if (asked := asks_for_numbers(light, error)) is not None:
                raise asked from error
            first_line = (str(error).strip().splitlines() or ["no message"])[0]
            fitting = "take larger inputs (--input-shape) or ones that fit"
            if "dtype" in first_line or "type (" in first_line:
                fitting = "give it tensors of the type that its layers have (x.float() of whole numbers)"
            raise UnsupportedOperation(
                f"{type(light).__name__} does not run in {'train' if training else 'eval'} mode on its example "
                f"inputs ({first_line}); {fitting}."
            ) from error
        finally:
            kept.restore()
    return kept


def asks_for_numbers(model: nn.Module, error: BaseException) -> UnsupportedOperation | None:
    """Return the error of a network that fails on device meta because its code reads values of a tensor, or None."""
    on_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    if not on_meta or not any(text in str(error) for text in ("meta tensor", "register_meta")):
        return None
    line = f" ({line})" if (line := own_line(error)) else ""
    return UnsupportedOperation(
        f"the code of {type(model).__name__} asks for numbers in a tensor{line}, and tensors on device meta have none: "
        "trace it on a device with memory (network.to_empty(device='cpu')), give it inputs for which it does not ask, "
        "or let it not ask where torch.compiler.is_exporting()."
    )


def own_line(error: BaseException) -> str:
    """Return the last source line of a traceback outside of torch and growlab, or ""."""
    others = tuple(os.path.dirname(os.path.dirname(place)) for place in (torch.nn.__file__, __file__))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(others)]
    return (frames[-1].line or "") if frames else ""


def _as_exported(light: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
    """Let a network run as under torch.export, where code that asks for it skips what depends on values."""
    # No public way sets what `torch.compiler.is_compiling()` and `is_exporting()` say.
    flags = ("_is_compiling_flag", "_is_exporting_flag")
    kept: list[tuple[bool, ...]] = []

    def enter(module: nn.Module, inputs: Any) -> None:
        kept.append(tuple(getattr(torch.compiler, flag) for flag in flags))
        for flag in flags:
            setattr(torch.compiler, flag, True)

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        for flag, before in zip(flags, kept.pop(), strict=True):
            setattr(torch.compiler, flag, before)

    return light.register_forward_pre_hook(enter), light.register_forward_hook(leave, always_call=True)


def copied(model: nn.Module, known: Mapping[int, Any] | None = None) -> nn.Module:
    """Copy a network, even if it has cached activations, with the attributes of its tensors.

    Args:
        model: not changed.
        known: replacements in the copy by the id of a tensor of the network.
    """
    twin = copy.deepcopy(model, {**_computed(model), **(known or {})})
    share_attributes(named_tensors(model), twin)
    return twin


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by all of their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def share_attributes(tensors: Mapping[str, Tensor], model: nn.Module) -> None:
    """Copy the attributes of tensors to those of the same names in a network: deepcopy drops a Parameter's."""
    for name, tensor in named_tensors(model).items():
        for attribute, content in vars(tensors[name]).items() if name in tensors else ():
            vars(tensor).setdefault(attribute, content)


def _computed(model: nn.Module) -> dict[int, Any]:
    """Activations and computed weights in modules' attributes, by id: non-leaf tensors, which deepcopy refuses."""
    kept = [value for module in model.modules() for value in vars(module).values()]
    tensors = [leaf for value in kept for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return {id(tensor): tensor for tensor in tensors if not tensor.is_leaf}


def tensors_in(outputs: Any) -> list[Tensor]:
    """List all tensors in a network's output: in containers, dataclasses and other pytree nodes."""
    if isinstance(outputs, Tensor):
        return [outputs]
    if isinstance(outputs, Mapping):
        outputs = list(outputs.values())
    elif is_dataclass(outputs) and not isinstance(outputs, type):
        outputs = [getattr(outputs, each.name) for each in fields(outputs)]
    if not isinstance(outputs, (list, tuple)):
        leaves = tree_leaves(outputs)
        outputs = [] if len(leaves) == 1 and leaves[0] is outputs else leaves
    return [tensor for output in outputs for tensor in tensors_in(output)]

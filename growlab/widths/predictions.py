"""Compare the operations that a narrowed network runs with those that tracing predicts for its widths.

A forward may run at narrow widths and yet compute something else: `x.view(B, T, self.h, -1)` divides fewer channels
among the same number of heads. The output's shape does not show it, shapes of intermediate tensors do.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest
from math import isclose
from typing import Any

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher, no_python_dispatcher
from torch._subclasses.schema_check_mode import SchemaCheckMode

from growlab.widths.groups import Axis, ChannelNorm
from growlab.widths.inputs import call_with, values_of
from growlab.widths.meta import computed_on_meta, corrected_shapes, unwarned

# Operations without arithmetic, which are not compared: torch.export omits some and inserts others, and `contiguous` is
# missing where a tensor is contiguous already, such as that of a single head.
_NO_ARITHMETIC = """
getitem detach detach_ alias contiguous _set_grad_enabled _assert_async _enter_autocast _exit_autocast
wrap_with_autocast wrap_with_set_grad_enabled _assert_tensor_metadata _assert_scalar sym_constrain_range sym_size
"""
# Integers that enter arithmetic; all others are dimensions, sizes and strides, which shapes show.
_OPERANDS = {"self", "other", "exponent", "alpha", "value", "min", "max", "fill_value"}
# Operations whose sizes the code may compute from a width in another way than tracing assumes.
_SIZED = """
view reshape _unsafe_view unflatten expand repeat tile split split_with_sizes chunk tensor_split unfold as_strided
repeat_interleave slice narrow pad constant_pad_nd group_norm roll multi_head_attention_forward
"""
# Argument that no shape shows: the number of parts into which an operation divides channels.
_PARTS = {"group_norm": "num_groups", "channel_shuffle": "groups"}
# Placeholder for that number if every channel is a part, so that it grows with the channels.
_EACH = -1
_ARITHMETIC = ("add", "sub", "rsub", "mul", "div", "pow", "clamp", "scaled_dot_product_attention")
# Powers of the number of channels that Euclidean norms and sums of squares may be multiplied by.
_POWERS = (0.5, -0.5, 1, -1)
# Operation that creates a tensor from numbers in the code.
_CONSTANT = "lift_fresh"
# Of constants with more entries, only the shape is compared: they are tables.
_FEW = 16


@dataclass(frozen=True)
class Call:
    """An operation visited by tracing, with the predicted shapes of its outputs.

    Attributes:
        operation: name without namespace and overload.
        numbers: operands that are numbers.
        shapes: axes of every output tensor.
        norms: Euclidean norms that the same module takes over channels.
        line: `FILE:LINE` of the user's code that runs it.
        from_data: for every output tensor, True for every size that depends on numbers in the data; empty if none does.
    """

    operation: str
    numbers: tuple[float, ...]
    shapes: tuple[tuple[Axis, ...], ...]
    norms: tuple[ChannelNorm, ...] = ()
    line: str = ""
    from_data: Sequence[Sequence[bool]] = ()

    def has_numbers(self, seen: "Seen") -> bool:
        """Return True if the operation was run with the numbers that it has at full width."""
        if self.operation in _PARTS and seen.numbers[:1] == (_EACH,) != self.numbers[:1]:
            # Each part has a single channel at this width.
            return self.numbers == (seen.shapes[0][1], *seen.numbers[1:])
        # Constants have no values on the meta device.
        return self.numbers == seen.numbers or (self.operation == _CONSTANT and not seen.numbers)

    def counts(self, seen: "Seen", widths: Mapping[str, int], full: Mapping[str, int]) -> list[ChannelNorm]:
        """Return the norms whose number of channels explains how the numbers of a run differ from those at full width.

        The ratio of the numbers must be a power (see `_POWERS`) of the ratio of the numbers of channels.
        """
        if len(self.numbers) != len(seen.numbers):
            return []
        return [
            norm
            for norm in self.norms
            if all(
                any(isclose(now, then * ratio**power) for power in _POWERS)
                for ratio in [norm.axis.length(widths) / norm.axis.length(full)]
                for now, then in zip(seen.numbers, self.numbers, strict=True)
            )
        ]

    def sizes(self, widths: Mapping[str, int]) -> tuple[tuple[int, ...], ...]:
        """Shape of every output tensor at the given widths."""
        return tuple(tuple(axis.length(widths) for axis in axes) for axes in self.shapes)


@dataclass(frozen=True)
class Seen:
    """An operation that was run: like `Call`, with sizes in place of axes."""

    operation: str
    numbers: tuple[float, ...]
    shapes: tuple[tuple[int, ...], ...]


def computes(operation: str) -> bool:
    """Return True if operations of this name are compared; False for those without arithmetic."""
    return operation not in _NO_ARITHMETIC.split()


def name_of(operation: str) -> str:
    """Return the same name for an operation that torch.export and torch name differently."""
    return operation.removesuffix("_copy") if operation == f"{_CONSTANT}_copy" else operation


def numbers_of(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], constants: Mapping[Any, Tensor]
) -> tuple[float, ...]:
    """Return the numbers that enter the arithmetic of a call.

    `constants` are tensors that the forward creates from numbers, by the argument (node or tensor) for them.
    """
    schema = getattr(target, "_schema", None)
    if schema is None:
        return ()
    operation = name_of(schema.name.rpartition("::")[2])
    if operation == _CONSTANT:
        return _entries(constants.get(args[0]))
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    arguments = {**dict(zip(defaults, args, strict=False)), **kwargs}
    parts = _PARTS.get(operation)
    operands = _OPERANDS if parts is None else {*_OPERANDS, parts}
    if parts is not None:
        x = args[0] if isinstance(args[0], Tensor) else args[0].meta["val"]
        if arguments[parts] == x.shape[1]:
            arguments[parts] = _EACH
    return tuple(
        value
        for name, value in arguments.items()
        if (type(value) is float or (type(value) is int and name in operands)) and value != defaults[name]
    )


def _entries(constant: Tensor | None) -> tuple[float, ...]:
    if constant is None or constant.is_meta or constant.numel() > _FEW:
        return ()
    return tuple(float(entry) for entry in constant.flatten().tolist())


class _Recorder(SchemaCheckMode):
    """Record the operations of a forward as torch.export sees them, before any of them is decomposed.

    It inherits from one of the few modes that torch allows at that dispatch key, and does not check schemas.
    """

    def __init__(self) -> None:
        super().__init__()
        self._dispatch_key = torch._C.DispatchKey.PreDispatch
        self.seen: list[Seen] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # The Python dispatcher, which keeps operations from being decomposed, would make shapes slower to compute.
        with no_python_dispatcher():
            result = computed_on_meta(func, args, kwargs or {})
        operation = func._schema.name.rpartition("::")[2]
        if computes(operation):
            values = result if isinstance(result, (tuple, list)) else (result,)
            shapes = tuple(tuple(value.shape) for value in values if isinstance(value, Tensor))
            constants = {x: x for x in args[:1] if operation == _CONSTANT}
            self.seen.append(Seen(operation, numbers_of(func, args, kwargs or {}, constants), shapes))
        return result


def run_calls(model: nn.Module, inputs: tuple[Any, ...]) -> list[Seen]:
    """Run a network in its current mode and return its operations in order."""
    with unwarned(), torch.no_grad(), corrected_shapes(), enable_python_dispatcher(), _Recorder() as recorder:
        try:
            call_with(model, inputs)
        except RuntimeError:
            if not any(isinstance(x, Tensor) and x.is_meta for x in values_of(inputs)):
                raise
            # The forward may have created tensors on the CPU, the default device.
            recorder.seen.clear()
            with torch.device("meta"):
                call_with(model, inputs)
    return recorder.seen


class Predictions:
    """Operations that a network should run at any widths, to compare with those that it runs."""

    def __init__(self, calls: Sequence[Call], full_widths: Mapping[str, int]) -> None:
        self._calls, self._full_widths = calls, full_widths
        #: Norms whose number of channels enters the forward's arithmetic, found in the runs that agreed.
        self.counted: set[ChannelNorm] = set()
        #: First difference in the last run that did not agree.
        self.difference = ""

    @property
    def in_doubt(self) -> bool:
        """True if the forward may compute with a width in a way that the shapes of its outputs do not show."""

        def depends(call: Call) -> bool:
            if call.operation in _SIZED.split():
                return any(axis.groups for axes in call.shapes for axis in axes)
            return bool(call.numbers) and call.operation.rstrip("_") in _ARITHMETIC

        return any(map(depends, self._calls))

    def agree(
        self, narrow: Sequence[Seen], widths: Mapping[str, int], at_full_width: Callable[[], Sequence[Seen]]
    ) -> bool:
        """Return True if a run at narrow widths agrees with the predictions.

        `at_full_width` returns the operations at full width, some of which the exported program may lack.
        """
        traced, names = ([call.operation for call in calls] for calls in (self._calls, narrow))
        if traced == names:
            return self._all_agree(zip(self._calls, narrow, strict=True), widths)
        full = at_full_width()
        if names != (usual := [seen.operation for seen in full]):
            now, then = next(pair for pair in zip_longest(names, usual, fillvalue="nothing") if len({*pair}) > 1)
            self.difference = f"{now} runs where {then} does at full width"
            return False
        # An exported program lacks operations without users, so match by name and sizes.
        keys = [(call.operation, call.sizes(self._full_widths)) for call in self._calls]
        matcher = SequenceMatcher(None, keys, [(seen.operation, seen.shapes) for seen in full], autojunk=False)
        pairs = [(b.a + i, b.b + i) for b in matcher.get_matching_blocks() for i in range(b.size)]
        return self._all_agree(((self._calls[a], narrow[b]) for a, b in pairs), widths)

    def _all_agree(self, pairs: Iterable[tuple[Call, Seen]], widths: Mapping[str, int]) -> bool:
        counted: set[ChannelNorm] = set()
        for call, seen in pairs:
            where = f"{call.operation} ({call.line})" if call.line else call.operation
            for expected, shape, from_data in zip_longest(
                call.sizes(widths), seen.shapes, call.from_data, fillvalue=()
            ):
                # Sizes from data may differ: rows per expert of a mixture depend on the weights, and so on the widths.
                if any(then != now and not free for then, now, free in zip_longest(expected, shape, from_data)):
                    self.difference = f"{where} puts out {[*shape]} instead of {[*expected]}"
                    return False
            if not call.has_numbers(seen):
                norms = call.counts(seen, widths, self._full_widths)
                if not norms:
                    now, then = (", ".join(f"{n:g}" for n in each.numbers) or "no number" for each in (seen, call))
                    self.difference = f"{where} takes {now}, and {then} at full width"
                    return False
                counted.update(norms)
        self.counted |= counted
        return True

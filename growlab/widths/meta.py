"""Run a network on the meta device, for the shapes of its tensors alone, and compare its train and eval mode.

torch computes most shapes there in Python, which takes longer than the arithmetic of a small network. So frequent
operations, such as batch norms, sums and products, have faster shape rules here.
"""

import copy
import inspect
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor, _meta_registrations, nn
from torch._decomp import decompositions
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from growlab.base.errors import first_line
from growlab.widths.inputs import call_with, changed, tensors_in
from growlab.widths.places import plain_tensors
from growlab.widths.program import UnsupportedOperation
from growlab.widths.unchanged import Snapshot

_CALL = nn.Module._call_impl.__code__
# It runs its function a second time in the backward pass.
_CHECKPOINT = inspect.unwrap(checkpoint.checkpoint).__code__
#: Exceptions that a network may raise at sizes it was not written for.
FAILURES = (RuntimeError, ValueError, TypeError, AssertionError, LookupError, ArithmeticError, AttributeError)


class Shapes(TorchFunctionMode):
    """Record function calls; on the meta device, compute some output shapes by faster rules.

    Args:
        recorded: "calls": the parameters that calls read, and custom backward passes that the calls run in; "details":
            all arguments, with shapes in place of tensors.
    """

    def __init__(self, recorded: Literal["nothing", "calls", "details"] = "nothing") -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.details: list[Any] = []
        #: Code with a custom backward pass, by the module that it runs in and by the id of a parameter that it reads.
        self.own_backward: dict[Any, str] = {}
        self.recomputed: dict[int, str] = {}
        self._recorded = recorded

    def __enter__(self) -> "Shapes":
        # Compiled modules would be guarded on the state of this mode.
        self._stance = torch.compiler.set_stance("force_eager")
        self._stance.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._stance.__exit__(*raised)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._recorded == "calls":
            read = [id(leaf) for leaf in _leaves(args, kwargs) if isinstance(leaf, nn.Parameter)]
            # Without `num_batches_tracked.add_(1)` of normalisations in train mode.
            if func is not Tensor.add_ or args[0].dim() or args[0].is_floating_point():
                self.calls.append((func, *read))
            module, function = called_apart()
            if function:
                self.own_backward[module] = function
                self.recomputed |= dict.fromkeys(read, function)
        elif self._recorded == "details":
            self.details.append((func, [x.shape if isinstance(x, Tensor) else x for x in _leaves(args, kwargs)]))
        if func is F.batch_norm:
            _note_statistics(*args, **(kwargs or {}))
        return computed_on_meta(func, args, kwargs or {})


def _leaves(args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Iterator[Any]:
    """Yield the arguments of a function of torch; faster than torch's pytrees."""
    for value in (*args, *(kwargs or {}).values()):
        if type(value) in (list, tuple):
            yield from _leaves(value)
        else:
            yield value


def computed_on_meta(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function of torch, or an ATen operation; on the meta device by a faster shape rule if there is one."""
    rule = _RULES.get(func)
    if rule is not None and args and isinstance(args[0], Tensor) and args[0].is_meta:
        result = rule(*args, **kwargs)
        if result is not NotImplemented:
            return result
    return func(*args, **kwargs)


@contextmanager
def corrected_shapes() -> Iterator[None]:
    """Patch shape functions that are wrong or missing in older versions of torch.

    Before torch 2.13 the last states of an LSTM's layers have one more dimension, of size 1, in exported programs and
    elsewhere; torch 2.11 supports `F.grouped_mm` only in bfloat16.
    """
    lstm, grouped = decompositions.one_layer_lstm, _meta_registrations._meta_grouped_mm_common

    def one_layer_lstm(x: Tensor, hidden: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        output, states = lstm(x, hidden, *args, **kwargs)
        return output, tuple(state.view(h.shape) for state, h in zip(states, hidden, strict=True))

    def grouped_mm(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> Any:
        if "scale_a" not in kwargs or kwargs["scale_a"] is not None:
            return grouped(a, b, *args, **kwargs)
        return _meta_registrations._create_grouped_mm_output_tensor(a, b, kwargs["offs"], kwargs["out_dtype"])

    decompositions.one_layer_lstm = one_layer_lstm  # type: ignore[assignment]
    _meta_registrations._meta_grouped_mm_common = grouped_mm  # type: ignore[assignment]
    try:
        yield
    finally:
        decompositions.one_layer_lstm = lstm
        _meta_registrations._meta_grouped_mm_common = grouped


def _note_statistics(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    *_: Any,
    **__: Any,
) -> None:
    """Increment the versions of running statistics that a batch norm will update, as torch's kernels do not."""
    for tensor in (running_mean, running_var) if training else ():
        if tensor is not None:
            torch.autograd.graph.increment_version(tensor)


def _batch_norm(x: Tensor, *args: Any, **named: Any) -> Tensor:
    if named.get("training", args[4:5] == (True,)) and x.numel() == x.shape[1]:
        raise ValueError(f"batch statistics of {list(x.shape)}, a single value per channel")
    for tensor in (*args, *named.values()):
        if isinstance(tensor, Tensor) and len(tensor) != x.shape[1]:
            raise ValueError(f"{len(tensor)} statistics for {x.shape[1]} channels")
    return torch.empty_like(x)


def _autocasts() -> bool:
    return any(map(torch.is_autocast_enabled, ("cpu", "cuda")))


# The rules below return NotImplemented for operands that do not fit, so that torch raises its own error.


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    # torch does not compare dtypes on the meta device, as it does on others.
    if input.dtype != weight.dtype and not _autocasts():
        raise ValueError(f"a weight of {weight.dtype} for {input.dtype}")
    rows = weight.shape[:1]
    fits = weight.dim() == 2 and input.shape[-1:] == weight.shape[1:] and (bias is None or bias.shape == rows)
    return input.new_empty((*input.shape[:-1], *rows)) if fits and not _autocasts() else NotImplemented


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *_: Any,
    **__: Any,
) -> Any:
    shape = tuple(normalized_shape)
    fits = len(shape) > 0 and tuple(input.shape[-len(shape) :]) == shape and input.is_contiguous()
    fits = fits and all(x is None or (tuple(x.shape) == shape and x.dtype == input.dtype) for x in (weight, bias))
    return torch.empty_like(input) if fits and not _autocasts() else NotImplemented


def _same_shape(input: Tensor, *others: Any, **__: Any) -> Any:
    unary = input.is_floating_point() and not any(isinstance(x, (Tensor, complex)) for x in others)
    return torch.empty_like(input) if unary and not _autocasts() else NotImplemented


def _transposed_convolution(input: Tensor, weight: Tensor, *_: Any, **__: Any) -> Any:
    # torch does not compare the numbers of channels on the meta device.
    if input.dim() >= weight.dim() - 1 and input.shape[1 - weight.dim()] != weight.shape[0]:
        raise ValueError(f"a transposed weight of {tuple(weight.shape)} for {tuple(input.shape)}")
    return NotImplemented


def _index_add(input: Tensor, dim: int, index: Tensor, source: Tensor, **_: Any) -> Any:
    # torch does not compare the dimensions other than `dim` on the meta device.
    if input.dim() == source.dim() and any(
        size != other and axis != dim % input.dim()
        for axis, (size, other) in enumerate(zip(input.shape, source.shape, strict=True))
    ):
        raise ValueError(f"{tuple(source.shape)} cannot be added into {tuple(input.shape)}")
    return NotImplemented


def _element_wise(input: Tensor, other: Any, **kwargs: Any) -> Tensor:
    if kwargs or not isinstance(other, (Tensor, int, float)):
        return NotImplemented
    shape = torch.broadcast_shapes(input.shape, other.shape) if isinstance(other, Tensor) else input.shape
    return input.new_empty(shape, dtype=torch.result_type(input, other))


_ATEN = torch.ops.aten
_RULES: dict[Any, Callable[..., Tensor]] = {
    **dict.fromkeys((F.batch_norm, _ATEN.batch_norm.default), _batch_norm),
    **dict.fromkeys((F.linear, _ATEN.linear.default), _linear),
    **dict.fromkeys((F.layer_norm, _ATEN.layer_norm.default), _layer_norm),
    **dict.fromkeys((F.gelu, F.silu, torch.roll, torch.rsqrt, Tensor.neg, Tensor.pow, Tensor.__pow__), _same_shape),
    **dict.fromkeys((_ATEN.gelu.default, _ATEN.silu.default, _ATEN.roll.default, _ATEN.rsqrt.default), _same_shape),
    **dict.fromkeys((_ATEN.neg.default, _ATEN.pow.Tensor_Scalar), _same_shape),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), _transposed_convolution),
    **dict.fromkeys((torch.index_add, Tensor.index_add, Tensor.index_add_), _index_add),
    **dict.fromkeys((torch.Tensor.add, torch.Tensor.mul, torch.Tensor.sub), _element_wise),
    **dict.fromkeys((torch.add, torch.mul, torch.sub), _element_wise),
    **dict.fromkeys((_ATEN.add.Tensor, _ATEN.mul.Tensor, _ATEN.sub.Tensor), _element_wise),
}


@contextmanager
def unwarned() -> Iterator[None]:
    """Suppress warnings, because most widths that are tried are never trained."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Lightened:
    """Context in which a network is on the meta device, or has copies of its tensors if it cannot run there.

    The network itself is changed, not a copy of it: in a copy, modules that the forward reaches through closures or
    global names would still be those of the network.

    Args:
        model: the network; restored at each exit.
        inputs: positional inputs of the forward.
        whole: snapshot that restores the network; None: take one.

    Attributes:
        inputs: inputs on the meta device, or the given ones if the network cannot run there.
        kept: snapshot to restore after each forward, in eval mode.
        modes: differences between the forwards in train mode and in eval mode.
        runs: by mode (True: train), the shapes of the output's tensors, and the calls as `Shapes` records them.

    Raises:
        UnsupportedOperation: the network does not run on these inputs at all.
    """

    inputs: tuple[Any, ...]
    kept: Snapshot
    modes: "Modes"

    def __init__(self, model: nn.Module, inputs: tuple[Any, ...], whole: Snapshot | None = None) -> None:
        self.model, self._whole = model, whole or Snapshot(model, "nothing")
        self.runs: dict[bool, tuple[list[torch.Size], list[Any]]] = {}
        try:
            self._moved = partial(changed, lambda x: x.to("meta") if isinstance(x, Tensor) else x)
            self._run(lambda tensor: tensor.detach().to("meta"), inputs)
        except (RuntimeError, NotImplementedError, ValueError, TypeError):
            # A forward that creates tensors, or reads numbers from one, needs the real device.
            self._moved = partial(changed, lambda x: x)
            self._run(lambda tensor: tensor.detach().clone(), inputs)

    def __enter__(self) -> "Lightened":
        self.kept.restore()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._whole.restore()

    def rows_stay_apart(self, others: tuple[Any, ...]) -> bool:
        """Return True if the forward never merges the batch with another dimension, given other inputs with more rows.

        Then the only sizes that differ are those of the batch itself.
        """
        if self.modes.differ:
            return False
        runs: list[list[Any]] = []
        for inputs in (self.inputs, self._moved(others)):
            try:
                with self, unwarned(), torch.no_grad(), Shapes("details") as mode:
                    output = call_with(self.model.eval(), inputs)
            except FAILURES:
                return False
            mode.details.append((None, [x.shape for x in (*tensors_in([*inputs]), *tensors_in(output))]))
            leaves = (leaf for func, arguments in mode.details for leaf in (func, *arguments))
            runs.append([n for leaf in leaves for n in (leaf if isinstance(leaf, torch.Size) else (leaf,))])
        rows = tuple(len(tensors_in([*inputs])[0]) for inputs in (self.inputs, others))
        pairs = [(a, b) for a, b in zip(*runs, strict=False) if a is not b and (a, b) != rows]
        return len(runs[0]) == len(runs[1]) and all(
            isinstance(a, (int, float, str, slice)) and a == b for a, b in pairs
        )

    def _run(self, convert: Callable[[Tensor], Tensor], inputs: tuple[Any, ...]) -> None:
        """Convert the tensors and run both modes."""
        self.inputs = self._moved(inputs)
        try:
            _as_exported(self.model)
            _exchange(self.model.eval(), convert)
            self.kept = Snapshot(self.model, "all but parameters")
            # torch repeats its warnings about the network when it is trained.
            with unwarned():
                self.modes = self._compared()
        finally:
            self._whole.restore()

    def _compared(self) -> "Modes":
        model, seen, several, updated = self.model, [], False, set[str]()
        own_backward, recomputed = dict[Any, str](), dict[int, str]()
        for training in (False, True):
            model.train(training)
            before = {name: (tensor, tensor._version) for name, tensor in _unlearned(model).items()}
            try:
                with torch.no_grad(), Shapes("calls") as shapes:
                    output = call_with(model, self.inputs)
            except (RuntimeError, ValueError, TypeError) as error:
                raise UnsupportedOperation(_why_not_run(model, training, error)) from error
            after = _unlearned(model)
            updated |= {n for n, (old, at) in before.items() if after.get(n) is not old or old._version != at}
            self.kept.restore()
            several |= not isinstance(output, Tensor)
            sizes = [tensor.shape for tensor in tensors_in(output)]
            self.runs[training] = sizes, shapes.calls
            own_backward, recomputed = own_backward | shapes.own_backward, recomputed | shapes.recomputed
            seen.append((len(sizes), [call for call in shapes.calls if call[1:]]))
        return Modes(
            seen[0] != seen[1],
            several,
            {path: own_backward[module] for path, module in model.named_modules() if module in own_backward},
            {name: recomputed[id(p)] for name, p in model.named_parameters() if id(p) in recomputed},
            frozenset(updated),
        )


def _exchange(model: nn.Module, convert: Callable[[Tensor], Tensor]) -> None:
    """Convert all parameters and buffers; shared tensors stay shared."""
    converted: dict[int, Tensor] = {}
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and id(tensor) not in converted:
                new = convert(tensor)
                if isinstance(tensor, nn.Parameter):
                    new = nn.Parameter(new, tensor.requires_grad)
                vars(new).update(vars(tensor))
                converted[id(tensor)] = new
            if tensor is not None:
                setattr(module, name, converted[id(tensor)])


def _why_not_run(model: nn.Module, training: bool, error: Exception) -> str:
    if reads_values := asks_for_numbers(model, error):
        return reads_values
    line = first_line(error)
    remedy = other_types(model, line) or "take larger inputs (--input-shape) or ones that fit"
    mode = "train" if training else "eval"
    return f"{type(model).__name__} does not run in {mode} mode on its example inputs ({line}); {remedy}."


def other_types(model: nn.Module, line: str) -> str:
    """Suggest a remedy for an error about the dtypes of tensors; "" for other errors."""
    if not any(text in line for text in ("dtype", "type (", "scalar type")):
        return ""
    types = list(dict.fromkeys(str(p.dtype) for p in model.parameters() if p.is_floating_point()))
    if len(types) > 1:
        return f"its layers are in {' and '.join(types)}: cast activations where the type changes"
    return f"give it tensors of the type that its layers take ({types[0]}, or integers as indices)"


def asks_for_numbers(model: nn.Module, error: BaseException) -> str:
    """Explain an error that was raised because code reads values of a tensor on the meta device; "" for others."""
    on_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    if not on_meta or not any(text in str(error) for text in ("meta tensor", "register_meta")):
        return ""
    line = f" ({line})" if (line := own_line(error)) else ""
    return (
        f"the code of {type(model).__name__} reads numbers from a tensor{line}, and tensors on device meta have none: "
        "trace it on a device with memory (network.to_empty(device='cpu')), give it inputs for which it does not read "
        "any, or skip this where torch.compiler.is_exporting()."
    )


def own_line(error: BaseException) -> str:
    """Return the last source line of a traceback outside of torch and growlab, or ""."""
    libraries = tuple(os.path.dirname(os.path.dirname(path)) for path in (torch.nn.__file__, __file__))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(libraries)]
    return (frames[-1].line or "") if frames else ""


def _as_exported(model: nn.Module) -> None:
    """Make a network run as under torch.export, so that code which checks for that skips what depends on values."""
    # There is no public way to set `torch.compiler.is_compiling()` and `is_exporting()`.
    flags = ("_is_compiling_flag", "_is_exporting_flag")
    saved: list[dict[str, bool]] = []

    def enter(module: nn.Module, inputs: Any) -> None:
        saved.append({flag: getattr(torch.compiler, flag) for flag in flags})
        vars(torch.compiler).update(dict.fromkeys(flags, True))

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        vars(torch.compiler).update(saved.pop())

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)


def copied(model: nn.Module) -> nn.Module:
    """Copy a network with the attributes of its tensors, even if it has cached activations."""
    result = copy.deepcopy(model, computed(model))
    share_attributes(named_tensors(model), result)
    return result


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by all of their names."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def share_attributes(tensors: Mapping[str, Tensor], model: nn.Module) -> None:
    """Copy the attributes of tensors to those of the same names in a network; deepcopy drops a Parameter's."""
    for name, tensor in named_tensors(model).items():
        for attribute, content in vars(tensors[name]).items() if name in tensors else ():
            vars(tensor).setdefault(attribute, content)


def computed(model: nn.Module) -> dict[int, Any]:
    """Activations and computed weights in modules' attributes, by id: non-leaf tensors, which deepcopy refuses."""
    leaves = (leaf for m in model.modules() for value in vars(m).values() for leaf in pytree.tree_leaves(value))
    return {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_leaf}


def called_apart(module: nn.Module | None = None) -> tuple[nn.Module | None, str]:
    """Find code with a custom backward pass on the call stack between the caller and the forward of a module.

    The search ends at `module`; None: at the innermost module on the stack. Returns that module, or None if the stack
    has no such call, and a description of the code, or "".
    """
    frame: FrameType | None = sys._getframe(1)
    function = ""
    while frame is not None:
        caller = frame.f_locals.get("self") if frame.f_code is _CALL else None
        if caller is not None and module in (None, caller):
            return caller, function
        function = function or ("torch.utils.checkpoint" if frame.f_code is _CHECKPOINT else _function_of(frame))
        frame = frame.f_back
    return None, function


def _function_of(frame: FrameType) -> str:
    """Return a description of the autograd.Function whose forward runs in this frame, or ""."""
    if frame.f_code.co_name != "forward" or "self" in frame.f_locals:
        return ""
    kinds = [torch.autograd.Function]
    while kinds:
        kind = kinds.pop()
        forward = inspect.unwrap(vars(kind)["forward"]) if "forward" in vars(kind) else None
        forward = getattr(forward, "__func__", forward)
        if kind is not checkpoint.CheckpointFunction and getattr(forward, "__code__", None) is frame.f_code:
            return f"the torch.autograd.Function {kind.__name__}"
        kinds += kind.__subclasses__()
    return ""


@dataclass(frozen=True)
class Modes:
    """Differences between a network's forward in train mode and in eval mode.

    Attributes:
        differ: True if the modes read different parameters or return different numbers of tensors.
        several: True if the output in either mode is not a single tensor.
        own_backward: module path -> code with a custom backward pass that the module's operations run in.
        recomputed: parameter name -> code with a custom backward pass that reads the parameter.
        updated: names of buffers, and of plain tensors of modules, that the forward writes to, such as running
            statistics.
    """

    differ: bool
    several: bool
    own_backward: Mapping[str, str]
    recomputed: Mapping[str, str]
    updated: frozenset[str]


def _unlearned(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_buffers()), **plain_tensors(model)}

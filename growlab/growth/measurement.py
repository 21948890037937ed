"""Auxiliary forward and backward passes over a few training batches, for data-driven growth methods.

Tensors of any widths are put into the network for the passes and removed again. Results are means over batches, and
over ranks if there are several. The cost of every pass is counted. Modes replace activations and norms by surrogates
with the derivatives that methods need.
"""

import contextlib
import copy
import re
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from growlab.base import ranks
from growlab.base.devices import as_given, on_cpu
from growlab.base.errors import UserError
from growlab.growth.constants import as_stored
from growlab.growth.outputs import arithmetic, main_output, network_inputs, without_side_effects
from growlab.growth.weighted_norms import carried_weights, weigh
from growlab.widths import Carry, WidthGraph, replace_tensors, restore_tensors, tensors_in, tensors_of
from growlab.widths.inputs import call_on
from growlab.widths.unchanged import DispatchMode, Snapshot

#: The network's positional inputs, or a mapping of inputs by name, followed by the target.
Batch = tuple[Tensor, ...]
#: Function from a forward pass to tensors by name, whose means over batches and ranks are returned.
Visit = Callable[["Pass"], Mapping[str, Tensor]]

# Key of the loss among the averaged values; no tensor has this name.
_LOSS = "the loss"
_RELU = (F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_)


@dataclass(frozen=True)
class Seen:
    """First input and output of a watched module in one pass, and its number of calls."""

    x: Tensor
    output: Tensor
    calls: int


class Pass(NamedTuple):
    """Parameters by name, the loss, and the `Seen` of each watched module in one forward pass."""

    parameters: Mapping[str, Tensor]
    loss: Tensor
    seen: Mapping[str, Seen]


@dataclass
class Cost:
    """Cost of auxiliary passes: FLOPs of forward and backward, two per multiply-add, and samples per pass.

    `held_bytes` is the peak size of the tensors that a pass saved for backward (one saved by two operations counts
    twice). `peak_memory_bytes` is the peak of memory allocated on the device; None on a CPU.
    """

    flops: int = 0
    samples: int = 0
    held_bytes: int = 0
    peak_memory_bytes: int | None = None
    seconds: float = 0.0


def _checked_batch(batch: Any) -> tuple[Any, ...]:
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        given = f"{len(batch)} entries" if isinstance(batch, tuple | list) else f"a {type(batch).__name__}"
        raise UserError(f"a batch of training data for growth must be a tuple of inputs and a target, not {given}.")
    return tuple(batch)


class Measurement:
    """Runs a network on training batches, with its tensors replaced, for a growth method.

    Args:
        model: the network at its widths before the event; restored after each measurement.
        graph: its width graph.
        batches: training batches of this rank.
        loss: function from the network's output and the targets to the mean loss of a batch.
        average: maps this rank's tensor to the mean over ranks; by default there is one rank.
        share: broadcasts rank 0's tensor, so that all ranks use the same one.
        norm_weights: weights of channels in statistics over channels; see `weighted_norms`.
        near_zero: a positive number that is not rounded to zero in the training's precision, but vanishes when added to
            other values.

    Attributes:
        cost: cost of this rank's passes so far.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: WidthGraph,
        batches: Sequence[Batch],
        loss: Callable[[Tensor, Tensor], Tensor],
        average: Callable[[Tensor], Tensor] = lambda tensor: tensor,
        share: Callable[[Tensor], Tensor] = lambda tensor: tensor,
        norm_weights: Mapping[str, Sequence[float]] | None = None,
        near_zero: float = 2.0**-100,
    ) -> None:
        self.model, self.graph, self.cost = model, graph, Cost()
        self.near_zero = near_zero
        self._norm_weights = dict(norm_weights or {})
        self._batches = [network_inputs(_checked_batch(batch), model) for batch in batches]
        if not self._batches:
            raise UserError("growth needs training data, but there is not a single batch.")
        self._loss, self._average, self.share = loss, average, share
        self._flops: dict[Hashable, int] = {}
        # In a session, the network's snapshot once a run has needed it; None outside of sessions.
        self._snapshots: list[Snapshot] | None = None

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Context in which all runs share one snapshot of the network; nothing else may change the network in it."""
        self._snapshots = []
        try:
            yield
        finally:
            self._snapshots = None

    def split(self) -> "tuple[Measurement, Measurement]":
        """Split the batches: all but the last quarter, and the last quarter (rounded up), which is held out.

        A single batch serves as both. Passes over either add to `cost`.
        """
        held_out = -(-len(self._batches) // 4) if len(self._batches) > 1 else 0
        first, last = copy.copy(self), copy.copy(self)
        first._batches = self._batches[: len(self._batches) - held_out]
        last._batches = self._batches[-held_out:]
        return first, last

    def report(self) -> dict[str, Any]:
        """Cost of the passes so far, for a receipt: FLOPs and samples summed over ranks, largest memory of a rank.

        `auxiliary_flops` are forward FLOPs: a third of the total, since a backward pass costs twice as much.
        """
        cost = self.cost
        costs = ranks.gather((cost.flops, cost.samples, cost.held_bytes, cost.peak_memory_bytes))
        flops, samples, saved_bytes, peaks = zip(*costs, strict=True)
        return {
            "auxiliary_flops": round(sum(flops) / 3),
            "auxiliary_samples": sum(samples),
            "auxiliary_held_bytes": max(saved_bytes),
            "auxiliary_peak_memory_bytes": max((peak for peak in peaks if peak is not None), default=None),
        }

    def run(
        self,
        tensors: Mapping[str, Tensor],
        visit: Visit,
        modes: Sequence[contextlib.AbstractContextManager[Any]] = (),
        watched: Sequence[str] = (),
        gradients: bool = True,
        work: Hashable = None,
        finite: bool = True,
    ) -> dict[str, Tensor]:
        """Run the batches through the network with other tensors, in train mode without dropout.

        Args:
            tensors: replacements of the network's tensors, by name and as the forward applies them (`as_applied`), at
                any consistent widths.
            visit: called after each forward pass with gradients enabled; its results are averaged.
            modes: contexts entered around the passes.
            watched: paths of modules whose inputs and outputs are passed to `visit`.
            gradients: enable gradients.
            work: key of `visit`'s computation: its FLOPs are counted once per key and widths; None: in each pass.
            finite: raise an error if the loss is not finite.

        Raises:
            UserError: the loss is not a single number, or not finite.
        """
        began = time.perf_counter()
        sums: dict[str, Tensor] = {}
        device = next(self.model.parameters()).device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        before, snapshot = self._widths(), self._shared_snapshot()
        norm_modes, replaced = self._replaced(tensors)
        self._weigh(before)
        shapes = tuple((name, tuple(new.shape)) for name, (_, new) in replaced.items())
        try:
            for _, new in replaced.values():
                # Frozen parameters too: methods need their derivatives.
                new.requires_grad_(gradients and isinstance(new, nn.Parameter))
            with contextlib.ExitStack() as stack:
                seen = stack.enter_context(_watching(self.model, watched))
                quiet = stack.enter_context(without_side_effects(self.model, snapshot))
                stack.enter_context(torch.set_grad_enabled(gradients))
                # Entered last: `without_side_effects` reads tensors, which these modes must not see.
                for mode in (*norm_modes, *modes):
                    stack.enter_context(mode)
                for number, (*inputs, target) in enumerate(self._batches):
                    seen.clear()
                    with arithmetic():
                        if number:
                            quiet.snapshot.restore()
                        self.model.train()
                        key = None if work is None else (work, shapes, *map(_shape, tensors_in(inputs)), gradients)
                    with self._counted(key):
                        with as_given():
                            loss = self._loss(main_output(call_on(self.model, inputs)), target)
                        if loss.numel() != 1:
                            raise UserError(
                                "the loss for growth must be a single number, the mean over a batch, not a tensor of "
                                f"shape {list(loss.shape)}."
                            )
                        parameters = dict(self.model.named_parameters(remove_duplicate=False))
                        values = {**visit(Pass(parameters, loss, seen)), _LOSS: loss.detach().double()}
                    with arithmetic():
                        for name, tensor in values.items():
                            sums[name] = sums[name] + tensor.detach() if name in sums else tensor.detach()
                        self.cost.samples += len(target)
        finally:
            restore_tensors(self.model, self.graph, replaced)
            self._weigh(before)
        result = {name: self._average(total / len(self._batches)) for name, total in sums.items()}
        if not bool(result.pop(_LOSS).isfinite()) and finite:
            raise UserError(
                "the training loss measured for growth is NaN or infinite; lower the learning rate, or choose a "
                "growth method that uses no data."
            )
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device)
            self.cost.peak_memory_bytes = max(peak, self.cost.peak_memory_bytes or 0)
        self.cost.seconds += time.perf_counter() - began
        return result

    def _shared_snapshot(self) -> Snapshot | None:
        """Snapshot of the session; None if a run needs its own, since it is restored between its batches."""
        if self._snapshots is None or len(self._batches) > 1:
            return None
        if not self._snapshots:
            self._snapshots.append(Snapshot(self.model))
        return self._snapshots[0]

    def _replaced(
        self, tensors: Mapping[str, Tensor]
    ) -> tuple[list[TorchFunctionMode], dict[str, tuple[Tensor, Tensor]]]:
        """Replace the network's tensors; also return modes in which weight normalisation does not change them."""
        stored, normalised = as_stored(self.graph, tensors), self.graph.weight_norms
        contents = ((name, tensors[name] if name in normalised else stored[name]) for name in tensors)
        replaced = replace_tensors(self.model, self.graph, contents)
        weights = [new for name, (_, new) in replaced.items() if name in normalised]
        return [_plain_weights(weights)] if weights else [], replaced

    @contextlib.contextmanager
    def _counted(self, work: Hashable) -> Iterator[None]:
        """Count the FLOPs and saved memory of a pass; with a known `work` reuse its FLOPs."""
        if work is not None and work in self._flops:
            yield
        else:
            counter, saved = _FlopCounter(), 0

            def pack(tensor: Tensor) -> Tensor:
                nonlocal saved
                saved += tensor.nbytes
                # Detached, as an operation that saves its own output would keep itself alive; autograd reattaches it.
                return tensor if tensor.grad_fn is None else tensor.detach()

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), counter:
                yield
            self._flops[work] = counter.flops
            self.cost.held_bytes = max(self.cost.held_bytes, saved)
        self.cost.flops += self._flops[work]

    def _widths(self) -> dict[str, int]:
        """Return the current width of each group, which `_weigh` needs; empty without norms over channels."""
        if not self.graph.channel_norms:
            return {}
        tensors = tensors_of(self.model, self.graph)
        return self.graph.widths_of({name: tuple(tensor.shape) for name, tensor in tensors.items()})

    def _weigh(self, before: Mapping[str, int]) -> None:
        """Give weight 0, in statistics over channels, to channels beyond the widths `before`."""
        if self.graph.channel_norms:
            now = self._widths()
            weights = carried_weights(self.graph, self._norm_weights, Carry(), before, now)
            weigh(self.model, self.graph, now, weights)

    def loss(self, tensors: Mapping[str, Tensor], finite: bool = True) -> float:
        """Mean loss with these tensors; if `finite` is False it may be infinite or NaN."""
        losses = self.run(tensors, lambda one: {"": one.loss.double()}, gradients=False, work="loss", finite=finite)
        return float(losses[""])

    def gradients(
        self,
        tensors: Mapping[str, Tensor],
        names: Sequence[str],
        modes: Sequence[contextlib.AbstractContextManager[Any]] = (),
    ) -> dict[str, Tensor]:
        """Gradients of the mean loss with respect to parameters, by name, and the mean loss under the key ""."""

        def visit(one: Pass) -> dict[str, Tensor]:
            parameters = [one.parameters[name] for name in names]
            gradients = torch.autograd.grad(one.loss, parameters, materialize_grads=True)
            return {"": one.loss.double(), **dict(zip(names, gradients, strict=True))}

        return self.run(tensors, visit, modes, work=("gradients", *names))

    def products(
        self,
        tensors: Mapping[str, Tensor],
        directions: Mapping[str, Tensor],
        names: Sequence[str],
        modes: Sequence[contextlib.AbstractContextManager[Any]] = (),
    ) -> dict[str, Tensor]:
        """Derivatives of <gradients, directions> with respect to the parameters `names`.

        With the same names in both this is the Hessian of the mean loss times a vector.

        Raises:
            UserError: an operation has no second derivative.
        """
        for name, module in self.model.named_modules():
            if ranks.several() and isinstance(module, nn.SyncBatchNorm):
                raise UserError(
                    f"this growth method takes second derivatives, which SyncBatchNorm ({name}) does not support: "
                    "leave out sync_batchnorm=True, or choose another growth method."
                )

        def visit(one: Pass) -> dict[str, Tensor]:
            inner, outer = ([one.parameters[name] for name in chosen] for chosen in (directions, names))
            first = torch.autograd.grad(one.loss, inner, create_graph=True, materialize_grads=True)
            pairs = zip(first, directions.values(), strict=True)
            total = sum((gradient * direction.to(gradient)).sum() for gradient, direction in pairs)
            if not (isinstance(total, Tensor) and total.requires_grad):
                return {name: torch.zeros_like(parameter) for name, parameter in zip(names, outer, strict=True)}
            second = torch.autograd.grad(total, outer, materialize_grads=True)
            return dict(zip(names, second, strict=True))

        try:
            # Attention's fast kernels have no second derivatives.
            with sdpa_kernel(SDPBackend.MATH):
                work = ("products", *directions, None, *names)
                return self.run(tensors, visit, [twice_differentiable(), *modes], work=work)
        except RuntimeError as error:
            operation = re.search(r"derivative for '?(?:aten::)?(\w+)'? is not implemented", str(error))
            if operation is None:
                raise
            raise UserError(
                f"this growth method takes second derivatives, which torch does not implement for {operation[1]}; "
                "choose another growth method."
            ) from error


@contextlib.contextmanager
def _watching(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Seen]]:
    """Yield a dictionary that forward hooks fill with the `Seen` of each named module."""
    seen: dict[str, Seen] = {}

    def record(name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            calls = seen[name].calls + 1 if name in seen else 1
            seen[name] = Seen(inputs[0].detach(), output, calls)

        return hook

    modules = dict(model.named_modules())
    with contextlib.ExitStack() as stack:
        for name in dict.fromkeys(names):
            stack.enter_context(modules[name].register_forward_hook(record(name)))
        yield seen


def _plain_weights(weights: Sequence[Tensor]) -> TorchFunctionMode:
    """Mode in which weight normalisation returns these tensors unchanged, since they are normalised weights already."""

    def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
        # A view, since a module registers a parameter that is set as its attribute.
        return v.view_as(v) if any(v is weight for weight in weights) else torch._weight_norm(v, g, dim)

    return _Substitutes({torch._weight_norm: weight_norm})


class _FlopCounter(DispatchMode):
    """Counts FLOPs by torch's formulas (`flop_registry`).

    `FlopCounterMode` also tracks modules by hooks, which fail if a parameter is the input of a module (a class token).
    The table of formulas is not documented; a test fails if it is removed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula, shape_formula = _formulas(func)
        if shape_formula is not None:
            self.flops += shape_formula(*map(_shape, args), **kwargs, out_shape=_shape(result))
        elif formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        return result


@cache
def _formulas(func: Any) -> tuple[Any, Any]:
    """FLOP formula of an operation, and the formula of shapes that it wraps, ten times as fast; None if missing."""
    # Not at the top: it imports triton.
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(getattr(func, "_overloadpacket", func))
    return formula, getattr(formula, "__wrapped__", None)


def _shape(thing: Any) -> Any:
    if isinstance(thing, (list, tuple)):
        return type(thing)(map(_shape, thing))
    return thing.shape if isinstance(thing, Tensor) else thing


class _Substitutes(TorchFunctionMode):
    """Calls other functions in place of torch's."""

    def __init__(self, substitutes: Mapping[Any, Callable[..., Tensor]]) -> None:
        super().__init__()
        self._substitutes = substitutes

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._substitutes.get(func, func)(*args, **(kwargs or {}))


def right_derivatives() -> TorchFunctionMode:
    """Mode in which ReLU and similar have the derivative 1 at 0 (torch: 0), for channels at zero (Evci et al. 2022)."""

    def relu(x: Tensor, inplace: bool = False) -> Tensor:
        # NaN stays NaN.
        return torch.where(x < 0, torch.zeros_like(x), x)

    def hardtanh(x: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Tensor:
        y = min_val + relu(x - min_val)
        # The derivative of `clamp` at its bound differs between versions of torch.
        return torch.where(y >= max_val, torch.full_like(y, max_val), y)

    def leaky(x: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
        return torch.where(x < 0, negative_slope * x, x)

    return _Substitutes({**_clipped(hardtanh), **dict.fromkeys(_RELU, relu), F.leaky_relu: leaky})


def _clipped(hardtanh: Callable[..., Tensor]) -> dict[Any, Callable[..., Tensor]]:
    # torch's module ReLU6 calls hardtanh.
    return {F.hardtanh: hardtanh, F.relu6: lambda x, inplace=False: hardtanh(x, 0.0, 6.0)}


def twice_differentiable() -> TorchFunctionMode:
    """Mode in which hard sigmoids are composed of operations that have second derivatives in torch."""

    def hardsigmoid(x: Tensor, inplace: bool = False) -> Tensor:
        return (x + 3.0).clamp(0.0, 6.0) / 6.0

    return _Substitutes({F.hardsigmoid: hardsigmoid})


def smooth(beta: float) -> TorchFunctionMode:
    """Mode that replaces ReLU and similar, which have no second derivative, by softplus (Liu et al. 2019)."""

    def softplus(x: Tensor, inplace: bool = False) -> Tensor:
        return F.softplus(x, beta=beta)

    def hardtanh(x: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Tensor:
        return max_val - softplus(max_val - min_val - softplus(x - min_val))

    def leaky(x: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
        return negative_slope * x + (1.0 - negative_slope) * softplus(x)

    def hardsigmoid(x: Tensor, inplace: bool = False) -> Tensor:
        return hardtanh(x + 3.0, 0.0, 6.0) / 6.0

    def hardswish(x: Tensor, inplace: bool = False) -> Tensor:
        return x * hardsigmoid(x)

    def recurrent(*_: Any, **__: Any) -> Any:
        raise UserError(
            "this growth method takes second derivatives, which the ReLU inside torch's recurrent layers does not "
            "have: set their nonlinearity='tanh', or choose another growth method."
        )

    return _Substitutes(
        {
            **dict.fromkeys((torch.rnn_relu, torch.rnn_relu_cell), recurrent),
            **dict.fromkeys(_RELU, softplus),
            **_clipped(hardtanh),
            F.leaky_relu: leaky,
            F.hardsigmoid: hardsigmoid,
            F.hardswish: hardswish,
        }
    )


class IdentityNorms(TorchFunctionMode):
    """Mode in which batch and instance normalisations are the identity on new channels.

    `new` maps a norm's running mean and weight (None if absent) to a mask of its new channels, [channels]; None leaves
    the norm unchanged.
    """

    _KINDS = frozenset({F.batch_norm, F.instance_norm, F.group_norm})

    def __init__(self, new: Callable[[Tensor | None, Tensor | None], Tensor | None]) -> None:
        super().__init__()
        self._new = new
        self._hook: RemovableHandle | None = None

    def __enter__(self) -> "IdentityNorms":
        # Synchronised batch normalisations do not call `F.batch_norm`.
        self._hook = register_module_forward_hook(self._after)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        assert self._hook is not None
        self._hook.remove()
        super().__exit__(*error)

    def _after(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            return output
        return self._passed(inputs[0], output, module.running_mean, module.weight)

    @on_cpu
    def _passed(self, x: Tensor, result: Tensor, mean: Tensor | None, weight: Tensor | None) -> Tensor:
        new = self._new(mean, weight)
        if new is None:
            return result
        return torch.where(new.to(x.device).view([1, -1, *[1] * (x.dim() - 2)]), x, result)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in self._KINDS:
            return result
        arguments = signature(func).bind(*args, **kwargs).arguments
        return self._passed(arguments["input"], result, arguments.get("running_mean"), arguments.get("weight"))

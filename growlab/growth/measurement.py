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
#: Maps a forward pass to tensors by name, which are averaged.
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


def _of_inputs_and_target(batch: Any) -> tuple[Any, ...]:
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
        share: maps this rank's tensor to rank 0's, so that all ranks use the same.
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
        self._batches = [network_inputs(_of_inputs_and_target(batch), model) for batch in batches]
        if not self._batches:
            raise UserError("growth needs training data, but there is not a single batch.")
        self._loss, self._average, self.share = loss, average, share
        self._flops: dict[Hashable, int] = {}
        # Of the network as it is in a session, once a run has asked for it; None outside of sessions.
        self._snapshots: list[Snapshot] | None = None

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Context for several runs between which nothing else changes the network: they share one snapshot of it."""
        self._snapshots = []
        try:
            yield
        finally:
            self._snapshots = None

    def split(self) -> "tuple[Measurement, Measurement]":
        """Split the batches in two: all but the last quarter, and the last quarter (rounded up) held out.

        A single batch serves as both. Passes over either add to `cost`.
        """
        held_out = -(-len(self._batches) // 4) if len(self._batches) > 1 else 0
        first, last = copy.copy(self), copy.copy(self)
        first._batches = self._batches[: len(self._batches) - held_out]
        last._batches = self._batches[-held_out:]
        return first, last

    def report(self) -> dict[str, Any]:
        """Cost of the passes so far, for a receipt: FLOPs and samples summed over ranks, peak memory of any.

        FLOPs are given as forward passes that cost the same together with their backward passes.
        """
        cost = self.cost
        costs = ranks.gather((cost.flops, cost.samples, cost.held_bytes, cost.peak_memory_bytes))
        flops, samples, held, peaks = zip(*costs, strict=True)
        return {
            "auxiliary_flops": round(sum(flops) / 3),
            "auxiliary_samples": sum(samples),
            "auxiliary_held_bytes": max(held),
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
            tensors: tensors by name, as the network applies them (`as_applied`), that replace its own; of any
                consistent widths.
            visit: called after each forward pass with gradients enabled; its results are averaged.
            modes: contexts entered around the passes.
            watched: paths of modules whose inputs and outputs are passed to `visit`.
            gradients: enable gradients.
            work: name of `visit`'s computation; its FLOPs are counted once per name and widths; None: in each pass.
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
        plain, replaced = self._replaced(tensors)
        self._weigh(before)
        shapes = tuple((name, tuple(new.shape)) for name, (_, new) in replaced.items())
        try:
            for _, new in replaced.values():
                # Frozen layers too: methods need the derivatives by them.
                new.requires_grad_(gradients and isinstance(new, nn.Parameter))
            with contextlib.ExitStack() as stack:
                seen = stack.enter_context(_watching(self.model, watched))
                quiet = stack.enter_context(without_side_effects(self.model, snapshot))
                stack.enter_context(torch.set_grad_enabled(gradients))
                # Behind `without_side_effects`, whose reads of tensors would pass through these modes.
                for mode in (*plain, *modes):
                    stack.enter_context(mode)
                for number, (*inputs, target) in enumerate(self._batches):
                    seen.clear()
                    with arithmetic():
                        if number:
                            quiet.snapshot.restore()
                        self.model.train()
                        done = None if work is None else (work, shapes, *map(_shape, tensors_in(inputs)), gradients)
                    with self._counted(done):
                        with as_given():
                            loss = self._loss(main_output(call_on(self.model, inputs)), target)
                        if loss.numel() != 1:
                            raise UserError(
                                "the loss for growth must be the mean over a batch, a single number, not of the "
                                f"shape {list(loss.shape)}."
                            )
                        parameters = dict(self.model.named_parameters(remove_duplicate=False))
                        found = {**visit(Pass(parameters, loss, seen)), _LOSS: loss.detach().double()}
                    with arithmetic():
                        for name, tensor in found.items():
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
        """Snapshot of the session; None if each run needs its own: several batches, between which its tensors stay."""
        if self._snapshots is None or len(self._batches) > 1:
            return None
        if not self._snapshots:
            self._snapshots.append(Snapshot(self.model))
        return self._snapshots[0]

    def _replaced(
        self, tensors: Mapping[str, Tensor]
    ) -> tuple[list[TorchFunctionMode], dict[str, tuple[Tensor, Tensor]]]:
        """Put tensors in the network; also return the mode in which it has to run if it normalises weights."""
        stored, computed = as_stored(self.graph, tensors), self.graph.weight_norms
        given = ((name, tensors[name] if name in computed else stored[name]) for name in tensors)
        replaced = replace_tensors(self.model, self.graph, given)
        weights = [new for name, (_, new) in replaced.items() if name in computed]
        return [_plain_weights(weights)] if weights else [], replaced

    @contextlib.contextmanager
    def _counted(self, work: Hashable) -> Iterator[None]:
        """Count FLOPs and saved memory of a pass; FLOPs of the same `work` are counted once and reused."""
        if work is not None and work in self._flops:
            yield
        else:
            counter, saved = _FlopCounter(), 0

            def pack(tensor: Tensor) -> Tensor:
                nonlocal saved
                saved += tensor.nbytes
                # Detached: an operation that saves its own output would keep itself alive. Autograd attaches it again.
                return tensor if tensor.grad_fn is None else tensor.detach()

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), counter:
                yield
            self._flops[work] = counter.flops
            self.cost.held_bytes = max(self.cost.held_bytes, saved)
        self.cost.flops += self._flops[work]

    def _widths(self) -> dict[str, int]:
        """Return the current width of each group; empty if no normalisation has statistics over channels."""
        if not self.graph.channel_norms:
            return {}
        tensors = tensors_of(self.model, self.graph)
        return self.graph.widths_of({name: tuple(tensor.shape) for name, tensor in tensors.items()})

    def _weigh(self, before: Mapping[str, int]) -> None:
        """Exclude channels added since these widths from statistics over channels."""
        if self.graph.channel_norms:
            now = self._widths()
            weights = carried_weights(self.graph, self._norm_weights, Carry(), before, now)
            weigh(self.model, self.graph, now, weights)

    def loss(self, tensors: Mapping[str, Tensor], finite: bool = True) -> float:
        """Mean loss with these tensors; if `finite` is False it may be infinite or NaN."""
        found = self.run(tensors, lambda one: {"loss": one.loss.double()}, gradients=False, work="loss", finite=finite)
        return float(found["loss"])

    def gradients(
        self,
        tensors: Mapping[str, Tensor],
        names: Sequence[str],
        modes: Sequence[contextlib.AbstractContextManager[Any]] = (),
    ) -> dict[str, Tensor]:
        """Gradients of the mean loss by these parameters, by name, and the mean loss itself under the key ""."""

        def visit(one: Pass) -> dict[str, Tensor]:
            asked = [one.parameters[name] for name in names]
            found = torch.autograd.grad(one.loss, asked, materialize_grads=True)
            return {"": one.loss.double(), **dict(zip(names, found, strict=True))}

        return self.run(tensors, visit, modes, work=("gradients", *names))

    def products(
        self,
        tensors: Mapping[str, Tensor],
        directions: Mapping[str, Tensor],
        names: Sequence[str],
        modes: Sequence[contextlib.AbstractContextManager[Any]] = (),
    ) -> dict[str, Tensor]:
        """Derivatives, by the parameters `names`, of the inner product of gradients with `directions`.

        With the same names on both sides this is the Hessian of the mean loss times a vector.

        Raises:
            UserError: an operation has no second derivative.
        """
        for name, module in self.model.named_modules():
            if ranks.several() and isinstance(module, nn.SyncBatchNorm):
                raise UserError(
                    f"this growth method takes second derivatives, which torch's SyncBatchNorm ({name}) has not: leave "
                    "out sync_batchnorm=True, or choose another growth method."
                )

        def visit(one: Pass) -> dict[str, Tensor]:
            by, asked = ([one.parameters[name] for name in chosen] for chosen in (directions, names))
            first = torch.autograd.grad(one.loss, by, create_graph=True, materialize_grads=True)
            pairs = zip(first, directions.values(), strict=True)
            total = sum((gradient * direction.to(gradient)).sum() for gradient, direction in pairs)
            if not (isinstance(total, Tensor) and total.requires_grad):
                return {name: torch.zeros_like(parameter) for name, parameter in zip(names, asked, strict=True)}
            second = torch.autograd.grad(total, asked, materialize_grads=True)
            return dict(zip(names, second, strict=True))

        try:
            # Attention's fast kernels have no second derivatives.
            with sdpa_kernel(SDPBackend.MATH):
                work = ("products", *directions, None, *names)
                return self.run(tensors, visit, [twice_differentiable(), *modes], work=work)
        except RuntimeError as error:
            found = re.search(r"derivative for '?(?:aten::)?(\w+)'? is not implemented", str(error))
            if found is None:
                raise
            raise UserError(
                f"this growth method takes second derivatives, which torch has not of {found[1]}; choose another "
                "growth method."
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

    known = dict(model.named_modules())
    with contextlib.ExitStack() as stack:
        for name in dict.fromkeys(names):
            stack.enter_context(known[name].register_forward_hook(record(name)))
        yield seen


def _plain_weights(weights: Sequence[Tensor]) -> TorchFunctionMode:
    """Mode in which weight normalisation returns these tensors unchanged: they already are the normalised weights."""

    def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
        # A view: set as an attribute, the parameter itself would become one of the module's.
        return v.view_as(v) if any(v is weight for weight in weights) else torch._weight_norm(v, g, dim)

    return _InPlaceOf({torch._weight_norm: weight_norm})


class _FlopCounter(DispatchMode):
    """Counts FLOPs by torch's formulas (`flop_registry`).

    `FlopCounterMode` also tracks modules, by hooks that trip over a parameter that is an input of a module (a class
    token); the table of formulas is not documented, and a test fails should it be removed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula, of_shapes = _formulas(func)
        if of_shapes is not None:
            self.flops += of_shapes(*map(_shape, args), **kwargs, out_shape=_shape(result))
        elif formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        return result


@cache
def _formulas(func: Any) -> tuple[Any, Any]:
    """FLOP formula of an operation, or None, and the same of shapes: torch's wrapper is ten times as slow."""
    # It imports triton.
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(getattr(func, "_overloadpacket", func))
    return formula, getattr(formula, "__wrapped__", None)


def _shape(thing: Any) -> Any:
    if isinstance(thing, (list, tuple)):
        return type(thing)(map(_shape, thing))
    return thing.shape if isinstance(thing, Tensor) else thing


class _InPlaceOf(TorchFunctionMode):
    def __init__(self, others: Mapping[Any, Callable[..., Tensor]]) -> None:
        super().__init__()
        self._others = others

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._others.get(func, func)(*args, **(kwargs or {}))


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

    return _InPlaceOf({**_clipped(hardtanh), **dict.fromkeys(_RELU, relu), F.leaky_relu: leaky})


def _clipped(hardtanh: Callable[..., Tensor]) -> dict[Any, Callable[..., Tensor]]:
    # torch's module ReLU6 calls hardtanh.
    return {F.hardtanh: hardtanh, F.relu6: lambda x, inplace=False: hardtanh(x, 0.0, 6.0)}


def twice_differentiable() -> TorchFunctionMode:
    """Mode in which hard sigmoids are composed of operations that have second derivatives in torch."""

    def hardsigmoid(x: Tensor, inplace: bool = False) -> Tensor:
        return (x + 3.0).clamp(0.0, 6.0) / 6.0

    return _InPlaceOf({F.hardsigmoid: hardsigmoid})


def smooth(beta: float) -> TorchFunctionMode:
    """Mode that replaces ReLU, which has no second derivative, and similar by softplus (Liu et al. 2019)."""

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
            "this growth method takes second derivatives, which the ReLU inside of torch's recurrent layers has not: "
            "give them nonlinearity='tanh', or choose another growth method."
        )

    return _InPlaceOf(
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
        given = signature(func).bind(*args, **kwargs).arguments
        return self._passed(given["input"], result, given.get("running_mean"), given.get("weight"))

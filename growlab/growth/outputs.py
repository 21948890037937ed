"""Run a network on a probe batch to compare outputs before and after an event; find and empty its forward's caches."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from itertools import chain
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from growlab.base.errors import UserError
from growlab.widths import Norm, tensors_in
from growlab.widths.inputs import Example, call_with, inputs_of
from growlab.widths.unchanged import Kept, Snapshot, seed_draws, unchanged

_Further = ParamSpec("_Further")
_Result = TypeVar("_Result")
_Shapes = list[list[torch.Size]]
# Cached attributes, and the shapes of the tensors in them; None if the shapes depend on widths.
_caches: "WeakKeyDictionary[nn.Module, tuple[list[Kept], _Shapes | None]]" = WeakKeyDictionary()


@dataclass(frozen=True)
class Outputs:
    """A network's outputs on the probe batch, in eval mode, and in train mode without dropout.

    Attributes:
        train: output in train mode, with other random draws replaced by their mean.
        plain: `train` without the `setting` of `observe`.
        terms: scalars that the network returns after its output in train mode, such as terms of the loss.
        drawn: random numbers were drawn, other than dropout's.
        forgetful: the outputs computed with emptied caches, if there are filled ones.
    """

    eval: Tensor
    train: Tensor
    plain: Tensor
    terms: Sequence[Tensor] = ()
    drawn: bool = False
    forgetful: "Outputs | None" = None


def positional(probe: Any) -> tuple[Any, ...]:
    """Return a probe as a tuple of positional inputs; a single tensor is one input."""
    return (probe,) if isinstance(probe, Tensor) else probe if isinstance(probe, tuple) else tuple(probe)


def observe(
    model: nn.Module,
    probe: Tensor | Sequence[Tensor],
    norms: Sequence[Norm] = (),
    between: Callable[[Mapping[str, tuple[Tensor, Tensor]]], None] | None = None,
    setting: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
    modes_differ: bool = True,
) -> Outputs:
    """Run the probe batch in eval and train mode, and restore all state that this changes.

    Compiled modules run eagerly; dropout, whose masks would differ with the widths, is disabled; reduced-precision
    matrix modes are off, so that the measured error is that of growth and not of the hardware.

    Args:
        model: the network.
        probe: its positional inputs, or a single tensor.
        norms: batch and instance normalisations whose statistics are passed to `between`.
        between: called between train and eval mode with the mean and unbiased variance [channels] of the inputs of
            `norms`, by module name, averaged over the calls of each.
        setting: makes a context in which train mode is run again, for `Outputs.train`.
        modes_differ: False if eval mode is known to compute the same as train mode; it is then not run.
    """
    moments: dict[str, list[tuple[Tensor, Tensor, int]]] = {}
    probe, recorded = positional(probe), False

    def record(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if recorded:
                return
            moments.setdefault(name, []).append(_moments(module, inputs[0].detach()))

        return hook

    with contextlib.ExitStack() as hooks:
        modules = dict(model.named_modules())
        for norm in norms:
            module = modules.get(norm.name)
            if isinstance(module, (_BatchNorm, _InstanceNorm)):
                hooks.enter_context(module.register_forward_pre_hook(record(norm.name)))
            elif module is not None:
                # A module that calls F.batch_norm may call it on something else than its own input.
                called = _BatchNormInputs(moments.setdefault(norm.name, []))
                hooks.enter_context(module.register_forward_pre_hook(called.enter))
                hooks.enter_context(module.register_forward_hook(called.leave, always_call=True))
        quiet = hooks.enter_context(without_side_effects(model))
        returned = call_with(model.train(), probe)
        if quiet.drawn:
            # Hooks append to these lists.
            for calls in moments.values():
                calls.clear()
            quiet.restore()
            quiet.means = True
            returned = call_with(model.train(), probe)
        train, recorded = main_output(returned), True
        plain = train
        quiet.restore()
        if between is not None:
            with arithmetic():
                between({name: _unbiased(calls) for name, calls in moments.items() if calls})
                quiet.snapshot.accept()
        if setting is not None:
            with setting():
                train = main_output(call_with(model.train(), probe))
            quiet.restore()
        quiet.means = False
        evaluated = main_output(call_with(model.eval(), probe)) if modes_differ else train
    terms = [tensor for tensor in tensors_in(returned)[1:] if tensor.numel() == 1]
    return Outputs(evaluated, train, plain, terms, quiet.drawn)


class _BatchNormInputs(TorchFunctionMode):
    """Records the inputs of `F.batch_norm` calls within a module's forward."""

    def __init__(self, moments: list[tuple[Tensor, Tensor, int]]) -> None:
        super().__init__()
        self._moments = moments

    def enter(self, module: nn.Module, inputs: Any) -> None:
        self.__enter__()

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.__exit__(None, None, None)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            x = args[0] if args else kwargs["input"]
            self._moments.append(_moments(None, x.detach()))
        return func(*args, **kwargs)


def _moments(module: nn.Module | None, x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Mean and variance per channel of a normalisation's input, and the number of values per channel.

    Statistics of instance normalisation, which are per sample, are averaged over the samples.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    dims = [d for d in range(x.dim()) if d != 1]
    if isinstance(module, _InstanceNorm):
        x = x[None] if x.dim() == module._get_no_batch_dim() else x
        dims = list(range(2, x.dim()))
    # In two passes: as exact as `Tensor.var` over several dimensions and ten times as fast.
    mean = x.mean(dims, keepdim=True)
    variance, count = (x - mean).square_().mean(dims), x.numel() // mean.numel()
    if isinstance(module, _InstanceNorm):
        mean, variance = mean.mean(0), variance.mean(0)
    return mean.flatten(), variance, count


def _unbiased(calls: Sequence[tuple[Tensor, Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance, averaged over calls, from the moments and value counts of each call."""
    means = torch.stack([mean for mean, _, _ in calls])
    variances = torch.stack([variance * (n / max(1, n - 1)) for _, variance, n in calls])
    return means.mean(0), variances.mean(0)


def evaluate(model: nn.Module, probe: Tensor | Sequence[Tensor]) -> Tensor:
    """Return the output on the probe batch in eval mode, run as in `observe`."""
    with without_side_effects(model):
        return main_output(call_with(model.eval(), positional(probe)))


@contextlib.contextmanager
def without_side_effects(model: nn.Module, snapshot: Snapshot | None = None) -> Iterator["_Quiet"]:
    """Context for passes without gradients and dropout, in full precision; the network is restored after it.

    Args:
        model: the network.
        snapshot: a snapshot of its present state; None takes one.
    """
    devices, dtypes = _devices_and_dtypes(model)
    with (
        torch.no_grad(),
        autocast_off(devices),
        _full_precision(),
        unchanged(model, seed=0, snapshot=snapshot) as snapshot,
        _Quiet(model, snapshot, devices, dtypes == {torch.float64}) as quiet,
    ):
        yield quiet


def arithmetic() -> contextlib.AbstractContextManager[Any]:
    """Disable torch function modes, which make small operations around a pass many times slower.

    Not for backward passes, which may call a part of the network again.
    """
    return torch._C.DisableTorchFunction()


def main_output(output: Any) -> Tensor:
    """Return the first tensor of a network's output; auxiliary heads of train mode come after it."""
    tensors = tensors_in(output)
    if not tensors:
        raise UserError(f"the network's output, a {type(output).__name__}, has no tensor that growth could compare.")
    return tensors[0]


_ROUNDED = frozenset({torch.float32, torch.float16, torch.bfloat16})
_PRODUCTS = frozenset({Tensor.matmul, Tensor.__matmul__, Tensor.bmm, torch.matmul, torch.bmm})


class _Quiet(TorchFunctionMode):
    """Disables dropout, and autocast on `devices`, and detects other random draws, whose shapes may depend on widths.

    `drawn` is True once random numbers were drawn. With `means`, each draw is replaced by its mean.

    With `in_double`, casts of float64 to float32 are ignored, and integers that are cast to float32, such as positions,
    become float64: language models compute normalisations and softmax in float32 whatever the dtype of their weights,
    which would round the outputs of a float64 network.
    """

    _DROPOUT = frozenset(
        {
            *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
            *(torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout),
            *(torch.dropout_, torch.alpha_dropout_, torch.feature_dropout_, torch.feature_alpha_dropout_),
        }
    )
    # In calls of recurrent layers, the dropout probability is the only float argument.
    _RECURRENT = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})
    _ARGUMENTS: ClassVar[Mapping[Any, Any]] = {
        F.multi_head_attention_forward: {"dropout_p": 0.0},
        F.rrelu: {"training": False},
    }
    _CHANGED = _DROPOUT | _RECURRENT | {F.scaled_dot_product_attention, *_ARGUMENTS}

    def __init__(self, model: nn.Module, snapshot: Snapshot, devices: Collection[str], in_double: bool) -> None:
        super().__init__()
        self._model, self.snapshot, self._devices = model, snapshot, devices
        self._call = _in_double if in_double else _call
        self.drawn = self.means = False

    def restore(self) -> None:
        """Restore the network and the random generators, for another pass."""
        with arithmetic():
            self.snapshot.restore()
        seed_draws(self._model, 0)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for device in self._devices:
            if torch.is_autocast_enabled(device):
                return self._without_autocast(device, func, types, args, kwargs)
        in_init = getattr(func, "__module__", "") == "torch.nn.init"
        mean = None if in_init else _MEANS.get(getattr(func, "__name__", ""))
        # First, since reading a tensor's shape is dispatched here too.
        if mean is None and func not in self._CHANGED:
            return self._call(func, args, kwargs)
        if func in self._DROPOUT:
            return args[0] if args else kwargs["input"]
        if func in self._RECURRENT:
            args = [0.0 if isinstance(arg, float) else arg for arg in args]
        if func is F.scaled_dot_product_attention:
            # The dropout probability follows query, key, value and mask.
            args, kwargs = (*args[:4], *[0.0] * len(args[4:5]), *args[5:]), {**kwargs}
            kwargs.pop("dropout_p", None)
        if func in self._ARGUMENTS:
            args, kwargs = (), {**signature(func).bind(*args, **kwargs).arguments, **self._ARGUMENTS[func]}
        if mean is None:
            return self._call(func, args, kwargs)
        self.drawn = True
        numbers = self._call(func, args, kwargs)
        return mean(numbers, *args, **kwargs) if self.means else numbers

    def _without_autocast(
        self, device: str, func: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Disable an autocast that the forward enters itself: its rounding would hide the changes of growth."""
        try:
            with torch.autocast(device, enabled=False):
                return self.__torch_function__(func, types, args, kwargs)
        except RuntimeError:
            # The arguments have several dtypes, which autocast would unify.
            return self._call(func, args, kwargs)


def _call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return func(*args, **kwargs)


def _in_double(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if args and isinstance(args[0], Tensor) and args[0].dtype not in _ROUNDED and not args[0].is_complex():
        if func is Tensor.float:
            return args[0].double()
        args = [torch.float64 if arg is torch.float32 else arg for arg in args]
        kwargs = {n: torch.float64 if arg is torch.float32 else arg for n, arg in kwargs.items()}
    if func in _PRODUCTS and torch.float64 in {x.dtype for x in args}:
        # Such as float32 frequencies times positions: matrix products need equal dtypes.
        args = [x.double() if x.dtype == torch.float32 else x for x in args]
    return func(*args, **kwargs)


def _filled(mean: Callable[..., float]) -> Callable[..., Tensor]:
    """Wrap a mean, as a function of an in-place method's arguments, to fill the drawn tensor with it."""
    return lambda drawn, self, *args, **kwargs: drawn.fill_(mean(*args, **kwargs))


# Replacement of each draw by its mean, by function name; called with the drawn tensor and the arguments.
_MEANS: dict[str, Callable[..., Tensor]] = {
    "rand": lambda drawn, *_, **__: drawn.fill_(0.5),
    "rand_like": lambda drawn, *_, **__: drawn.fill_(0.5),
    "randn": lambda drawn, *_, **__: drawn.zero_(),
    "randn_like": lambda drawn, *_, **__: drawn.zero_(),
    "normal": lambda drawn, mean=0.0, *_, **__: drawn.copy_(torch.as_tensor(mean)),
    "bernoulli": lambda drawn, self, p=None, **_: drawn.copy_(self if p is None else torch.full_like(self, p)),
    "normal_": _filled(lambda mean=0.0, *_, **__: mean),
    "uniform_": _filled(lambda low=0.0, high=1.0, **named: (named.get("from", low) + named.get("to", high)) / 2),
    "exponential_": _filled(lambda rate=1.0, **named: 1.0 / named.get("lambd", rate)),
    "bernoulli_": lambda drawn, self, p=0.5, **_: drawn.copy_(torch.as_tensor(p)),
}


def _devices_and_dtypes(model: nn.Module) -> tuple[set[str], set[torch.dtype]]:
    """Device types of a network with a single dtype, else an empty set; and the dtypes of its parameters."""
    parameters = list(model.parameters())
    dtypes = {p.dtype for p in parameters if p.is_floating_point()}
    devices = {"cpu", *(p.device.type for p in parameters)} - {"meta"} if len(dtypes) == 1 else set()
    return devices, dtypes


def own_precision(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Context without autocast if the network has a single dtype; networks of mixed dtypes may need autocast."""
    return autocast_off(_devices_and_dtypes(model)[0])


@contextlib.contextmanager
def autocast_off(devices: Collection[str]) -> Iterator[None]:
    """Disable autocast on devices of these types."""
    with contextlib.ExitStack() as stack:
        for device in devices:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def in_own_precision(
    function: Callable[Concatenate[nn.Module, _Further], _Result],
) -> Callable[Concatenate[nn.Module, _Further], _Result]:
    """Decorator that runs a function of a network within `own_precision`."""

    @wraps(function)
    def called(model: nn.Module, *args: _Further.args, **named: _Further.kwargs) -> _Result:
        with own_precision(model):
            return function(model, *args, **named)

    return called


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    matmul = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(matmul)


def device_and_precision(network: nn.Module) -> tuple[torch.device | None, torch.dtype | None]:
    """Device, and dtype of the first real parameter, each None if the network has none."""
    first = next(chain(network.parameters(), network.buffers()), None)
    real = next((parameter.dtype for parameter in network.parameters() if parameter.is_floating_point()), None)
    return None if first is None else first.device, real


def placing(network: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a function that moves tensors to a network's device, and real ones to a dtype of its parameters."""
    device, precision = device_and_precision(network)
    dtypes = {parameter.dtype for parameter in network.parameters()}

    def place(value: Tensor) -> Tensor:
        return value.to(device, precision if value.is_floating_point() and value.dtype not in dtypes else None)

    return place


def network_inputs(example: Example, network: nn.Module) -> tuple[Any, ...]:
    """Return inputs on the network's device, with floating-point tensors in one of its dtypes."""
    if not isinstance(network, nn.Module):
        raise UserError(f"a network must be a torch.nn.Module, not a {type(network).__name__}.")
    (device, _), place = device_and_precision(network), placing(network)

    def moved(value: Tensor) -> Tensor:
        if value.is_meta and device is not None and device.type != "meta":
            raise UserError("the example is on the meta device, without values: give a batch of inputs.")
        return place(value)

    return tree_map_only(Tensor, moved, inputs_of(example, network))


def find_caches(network: nn.Module, probe: tuple[Any, ...]) -> list[Any]:
    """Run a network in eval and train mode, return its outputs, and record caches for `forget_caches` to empty.

    A cache is an attribute that was empty before the run and is a tensor after it. It includes other attributes of its
    module that the first run changes and a second one does not, such as the filled length of a table.
    """
    with without_side_effects(network):
        before = Snapshot(network, "nothing")
        outputs = _run(network, probe)
        if kept := before.kept():
            contents = [cache.contents() for cache in kept]
            _run(network, probe)
            for cache, before_second in zip(kept, contents, strict=True):
                cache.drop_entries_that_differ(before_second)
        _caches[network] = kept, [cache.shapes() for cache in kept]
    return outputs


@contextlib.contextmanager
def empty_caches(network: nn.Module) -> Iterator[bool]:
    """Empty the caches that `find_caches` recorded, and fill them again at the end; yields True if any is filled."""
    caches, _ = _caches.get(network, ([], []))
    filled = any(cache.shapes() for cache in caches)
    restore = [cache.forget() for cache in caches] if filled else []
    try:
        yield filled
    finally:
        for undo in restore:
            undo()


def forget_caches(network: nn.Module, probe: tuple[Any, ...], failures: tuple[type[Exception], ...]) -> list[str]:
    """Empty the caches that `find_caches` recorded if a forward at the present widths fills them with other shapes.

    Caches are also emptied if that forward raises one of the `failures`.

    Returns:
        Names of the emptied caches: attributes, or indices in a container.
    """
    caches, shapes = _caches.get(network, ([], []))
    names = [str(key) for cache in caches if cache.shapes() for key in cache.changed]
    restore = [cache.forget() for cache in caches]
    if not caches or shapes is None:
        return names
    try:
        with without_side_effects(network):
            _run(network, probe)
            now = [cache.shapes() for cache in caches]
    except failures:
        # If it fails without caches too, the parity check reports it.
        return names
    if now == shapes:
        for undo in restore:
            undo()
        return []
    _caches[network] = caches, None
    return names


def _run(network: nn.Module, probe: tuple[Any, ...]) -> list[Any]:
    return [call_with(network.train(training), probe) for training in (False, True)]

"""Parity: does the network compute after a growth event what it computed before?"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from growlab.errors import UserError
from growlab.growth.rescale import eps_ratio
from growlab.widths import Norm, tensors_in

# Relative output error above which it cannot be rounding, by the parameters' precision. Ten times and more above
# what is seen (about 1e-6 in float32, rarely 1e-5 where running statistics are far off): a run must not stop
# over rounding, and a mistake in a rule shows as 1e-2 or worse.
ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
# Where one is above that: how many times what rounding every weight anew does it may be (0.3 to 1.5 are seen in
# networks of 18 to 101 layers), and from which multiple of the usual bound on rounding is no excuse.
_TIMES_ROUNDED = 8.0
_AT_MOST = 100.0
# The eps bound is first order in every norm; errors compound over the layers behind it.
_BOUND_SAFETY = 10.0


@dataclass(frozen=True)
class Outputs:
    """A network's outputs on the probe batch.

    Attributes:
        eval: in eval mode.
        train: in train mode, dropout left out; of a network that draws other random numbers there, with the mean of
            each draw in its place.
        variances: batch variance at the input of each batch normalisation in train mode, by module name.
    """

    eval: Tensor
    train: Tensor
    variances: Mapping[str, Tensor]


def positional(probe: Any) -> tuple[Any, ...]:
    """The positional inputs that a probe stands for: a single tensor is a forward's only input."""
    return (probe,) if isinstance(probe, Tensor) else tuple(probe)


def observe(
    model: nn.Module,
    probe: Tensor | Sequence[Tensor],
    norms: Sequence[Norm] = (),
    between: Callable[[Mapping[str, tuple[Tensor, Tensor]]], None] | None = None,
) -> Outputs:
    """Run the probe batch in eval and in train mode and leave no trace of it.

    Statistics, modes and random generators are put back; compiled modules run eagerly; dropout, whose masks
    would differ with the widths, is left out; reduced-precision matrix modes are off, so that the error
    measured is growth's and not the hardware's.

    Args:
        model: the network.
        probe: its positional inputs, or the only one.
        norms: batch normalisations whose input variance is wanted.
        between: called between train and eval mode with the mean and the unbiased variance of what enters `norms`, by
            module name, [channels], means over the calls of each.
    """
    moments: dict[str, list[tuple[Tensor, Tensor, int]]] = {}
    probe = positional(probe)

    def record(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].detach()
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            dims = [d for d in range(x.dim()) if d != 1]
            # In two passes: as exact as `Tensor.var` over several dimensions and ten times as fast.
            mean = x.mean(dims, keepdim=True)
            variance = (x - mean).square_().mean(dims)
            moments.setdefault(name, []).append((mean.flatten(), variance, x.numel() // mean.numel()))

        return hook

    known = dict(model.named_modules())
    # What enters another module, which calls the normalisation, may be another tensor.
    hooks = [
        module.register_forward_pre_hook(record(norm.name))
        for norm in norms
        if isinstance(module := known.get(norm.name), nn.modules.batchnorm._BatchNorm)
    ]
    try:
        with quietly(model) as draws:
            model.train()
            with buffers_kept(model):
                train = main_output(model(*probe))
            if draws.seen:
                draws.means = True
                moments.clear()
                with buffers_kept(model):
                    train = main_output(model(*probe))
        if between is not None:
            between({name: _unbiased(calls) for name, calls in moments.items()})
        evaluated = evaluate(model, probe)
    finally:
        for hook in hooks:
            hook.remove()
    return Outputs(evaluated, train, {name: calls[-1][1] for name, calls in moments.items()})


def _unbiased(calls: Sequence[tuple[Tensor, Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Mean and variance as running averages follow them, from those of each call and its values a channel."""
    means = torch.stack([mean for mean, _, _ in calls])
    variances = torch.stack([variance * (n / max(1, n - 1)) for _, variance, n in calls])
    return means.mean(0), variances.mean(0)


def evaluate(model: nn.Module, probe: Tensor | Sequence[Tensor]) -> Tensor:
    """The output on the probe batch in eval mode, as `observe` runs it."""
    with quietly(model), buffers_kept(model):
        model.eval()
        return main_output(model(*positional(probe)))


@contextlib.contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Put the very same buffers back, with their content: a forward may have filled them, or put others there."""
    kept = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for module, name, buffer, content in kept:
            module._buffers[name] = buffer
            buffer.copy_(content)


@contextlib.contextmanager
def quietly(model: nn.Module) -> Iterator["_WithoutDropout"]:
    """Run a network for its numbers alone: without gradients and dropout, in full precision; modes are put back."""
    modes = {module: module.training for module in model.modules()}
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        double = any(p.dtype == torch.float64 for p in model.parameters())
        in_double = doubles_kept() if double else contextlib.nullcontext()
        with torch.no_grad(), _full_precision(), _seeded(devices), _WithoutDropout() as draws, in_double:
            yield draws
    finally:
        for module, training in modes.items():
            module.training = training


def doubles_kept() -> contextlib.AbstractContextManager[Any]:
    """A context in which tensors in float64 stay so where code asks for float32 as the precise one.

    Normalisations and softmax of language models are computed in float32 whatever the weights' type: what a network in
    float64 puts out would be rounded to that.
    """
    return _DoublesKept()


def main_output(output: Any) -> Tensor:
    """The first tensor of what a network returns: auxiliary heads of train mode come behind it."""
    tensors = tensors_in(output)
    if not tensors:
        raise UserError(
            f"the network returns {type(output).__name__} without a tensor: growth compares its outputs."
        )
    return tensors[0]


def relative_error(before: Tensor, after: Tensor, factor: float = 1.0) -> float:
    """Largest difference between `factor * after` and `before`, relative to the largest finite entry before.

    Zeros, which a head that starts at zero puts out, have no scale: from them the difference itself is taken. Entries
    that are infinite in both (logits of what is ruled out) do not differ.
    """
    if before.is_complex():
        before, after = torch.view_as_real(before), torch.view_as_real(after)
    before, after = before.double(), after.double() * factor
    scale = float(before.abs().where(before.isfinite(), 0.0).max())
    difference = (after - before).abs().where(before != after, 0.0)
    return float(difference.max()) / (scale if scale > 0 else 1.0)


def within(errors: Sequence[float], tolerances: Sequence[float]) -> bool:
    """Whether no error is larger than its tolerance; NaN is."""
    return all(error <= tolerance for error, tolerance in zip(errors, tolerances, strict=True))


def rounding(model: nn.Module, output: Tensor) -> float:
    """Relative output error that the least precise of the parameters and the output explains."""
    dtypes = {output.dtype, *(p.dtype for p in model.parameters())}
    return max(ROUNDING.get(dtype, 0.0) for dtype in dtypes)


def rounding_measured(model: nn.Module, probe: tuple[Any, ...], outputs: Outputs) -> tuple[float, float]:
    """Relative output errors in eval and train mode that rounding explains in this network.

    Measured by what the output changes where each parameter is off by half a unit in its last place, times a standard
    normal number: in deep networks more than in most. Where batch normalisation's running averages lag behind, early in
    training, eval mode may put out no more than rounding; then train mode alone can tell.

    Args:
        model: the network; left as it is.
        probe: its positional inputs.
        outputs: what it puts out as it is.
    """
    usual, kept = rounding(model, outputs.eval), []
    with torch.no_grad():
        for number, parameter in enumerate(p for p in model.parameters() if p.is_floating_point()):
            kept.append((parameter, parameter.detach().clone()))
            source = torch.Generator(parameter.device).manual_seed(number)
            precise = torch.promote_types(parameter.dtype, torch.float32)
            noise = torch.randn(parameter.shape, generator=source, device=parameter.device, dtype=precise)
            noise *= torch.finfo(parameter.dtype).eps / 2
            parameter.copy_((parameter.to(precise) * (1 + noise)).to(parameter.dtype))
        try:
            rounded = observe(model, probe)
        finally:
            for parameter, content in kept:
                parameter.copy_(content)
    pairs = ((outputs.eval, rounded.eval), (outputs.train, rounded.train))
    # NaN, which is no excuse, is not above 0.
    errors = [error if (error := relative_error(*pair)) > 0 else 0.0 for pair in pairs]
    most = _AT_MOST * usual
    if min(errors) * _TIMES_ROUNDED <= most:
        # A mode of which the other tells what rounding hides may be off by more than it puts out.
        most = _TIMES_ROUNDED
    by_eval, by_train = (max(usual, min(_TIMES_ROUNDED * error, most)) for error in errors)
    return by_eval, by_train


def eps_bounds(
    norms: Sequence[Norm],
    scales: Mapping[str, float],
    batch_variances: Mapping[str, Tensor],
    old: Mapping[str, Tensor],
) -> tuple[float, float]:
    """How far eval and train mode may be off when inputs of batch normalisations were rescaled but eps was not.

    A channel with batch variance v rescaled by c comes out multiplied by about 1 - eps (1/c^2 - 1) / (2 v)
    (spec 01, Section 3). Where the weight took that up for the running variance, eval mode is exact and train
    mode is off by what the two variances differ in. Channels are averaged by the signal that they carry,
    layers are added up.

    Args:
        norms: batch normalisations.
        scales: factor on the input of each that was rescaled, by module name.
        batch_variances: variance of its input over the probe batch before the event, by module name.
        old: tensors before the event, by name.

    Returns:
        Bounds for eval and train mode.
    """
    bound_eval = bound_train = 0.0
    for norm in norms:
        if norm.name not in scales:
            continue
        running = None if norm.running_var is None else old[norm.running_var].double()
        batch = batch_variances.get(norm.name, running)
        if batch is None:
            continue
        scale, batch = scales[norm.name], batch.double()
        train = eps_ratio(batch, scale, norm.eps)
        if running is None:
            bound_eval += _average(train, batch, norm.eps)
        elif norm.weight is None:
            bound_eval += _average(eps_ratio(running, scale, norm.eps), running, norm.eps)
        else:
            train = train / eps_ratio(running, scale, norm.eps)
        bound_train += _average(train, batch, norm.eps)
    return _BOUND_SAFETY * bound_eval, _BOUND_SAFETY * bound_train


def _average(ratio: Tensor, variance: Tensor, eps: float) -> float:
    return float(torch.sqrt(((ratio - 1) ** 2 * variance / (variance + eps)).mean()))


class _DoublesKept(TorchFunctionMode):
    """Leaves out casts of float64 to float32."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = [torch.float64 if arg is torch.float32 else arg for arg in args]
            kwargs = {n: torch.float64 if arg is torch.float32 else arg for n, arg in kwargs.items()}
        return func(*args, **kwargs)


class _WithoutDropout(TorchFunctionMode):
    """Leaves out dropout, and takes note of other random numbers: in train mode their shape may grow.

    Attributes:
        seen: random numbers were drawn.
        means: put the mean of each draw in its place.
    """

    _KINDS = frozenset(
        {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
    )
    _CHANGED = _KINDS | {F.scaled_dot_product_attention, F.multi_head_attention_forward, F.rrelu}

    def __init__(self) -> None:
        super().__init__()
        self.seen = self.means = False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        mean = _MEANS.get(getattr(func, "__name__", ""))
        # Reading a tensor's shape comes this way too.
        if mean is None and func not in self._CHANGED:
            return func(*args, **kwargs)
        if func in self._KINDS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            # After query, key, value and mask comes the chance of dropout.
            args, kwargs = (*args[:4], *[0.0] * len(args[4:5]), *args[5:]), {**kwargs}
            kwargs.pop("dropout_p", None)
        if func is F.multi_head_attention_forward:
            kwargs = {**signature(func).bind(*args, **kwargs).arguments, "dropout_p": 0.0}
            args = ()
        if func is F.rrelu:
            kwargs = {**signature(func).bind(*args, **kwargs).arguments, "training": False}
            args = ()
        if mean is None:
            return func(*args, **kwargs)
        self.seen = True
        drawn = func(*args, **kwargs)
        return mean(drawn, *args, **kwargs) if self.means else drawn


def _filled(mean: Callable[..., float]) -> Callable[..., Tensor]:
    """Of a method that fills a tensor and of the mean by its further arguments."""
    return lambda drawn, self, *args, **kwargs: drawn.fill_(mean(*args, **kwargs))


def _probability(self: Tensor, p: Any = None, **_: Any) -> Tensor:
    return self if p is None else torch.full_like(self, p)


# The mean of what each of these draws, from what it has drawn and its arguments, by name.
_MEANS: dict[str, Callable[..., Tensor]] = {
    "rand": lambda drawn, *_, **__: drawn.fill_(0.5),
    "rand_like": lambda drawn, *_, **__: drawn.fill_(0.5),
    "randn": lambda drawn, *_, **__: drawn.zero_(),
    "randn_like": lambda drawn, *_, **__: drawn.zero_(),
    "normal": lambda drawn, mean=0.0, *_, **__: drawn.copy_(torch.as_tensor(mean)),
    "bernoulli": lambda drawn, *args, **kwargs: drawn.copy_(_probability(*args, **kwargs)),
    "normal_": _filled(lambda mean=0.0, *_, **__: mean),
    "uniform_": _filled(
        lambda low=0.0, high=1.0, **named: (named.get("from", low) + named.get("to", high)) / 2
    ),
    "exponential_": _filled(lambda rate=1.0, **named: 1.0 / named.get("lambd", rate)),
    "bernoulli_": lambda drawn, self, p=0.5, **_: drawn.copy_(torch.as_tensor(p)),
}


@contextlib.contextmanager
def _seeded(devices: Sequence[int]) -> Iterator[None]:
    """Same draws each time, on the CPU and these CUDA devices alone; generators are put back."""
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(0)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(0)
        yield


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    matmul = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.compiler.set_stance("force_eager"), torch.backends.cudnn.flags(allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(matmul)


def network_inputs(example: Tensor | tuple[Any, ...], network: nn.Module) -> tuple[Any, ...]:
    """Inputs as the network takes them: on its device, numbers in its precision, indices as they are."""
    parameter = next(network.parameters())

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(parameter.device, parameter.dtype if value.is_floating_point() else None)

    return tuple(map(moved, example if isinstance(example, tuple) else (example,)))

"""Parity: compare a network's outputs before and after a growth event."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from growlab.base.pieces import placed
from growlab.growth.norm_statistics import Setting
from growlab.growth.outputs import Outputs, observe

log = logging.getLogger(__name__)

# Largest relative output error that counts as rounding, by the parameters' dtype. At least ten times the observed ones
# (about 1e-6 in float32, rarely 1e-5 if running statistics are far off): rounding must not stop a run, and a mistake in
# a rule causes 1e-2 or more.
ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
# Beyond it: allowed multiple of the effect of rounding every weight again (0.3 to 1.5 are observed in networks of 18 to
# 101 layers), and the multiple of the bound above that is never rounding.
_TIMES_ROUNDED = 8.0
_AT_MOST = 100.0
# Entries of an output that are compared at a time.
_PIECE = 2**18


@dataclass(frozen=True)
class Parity:
    """Relative output errors in eval and train mode, and their tolerances; None: any error is allowed."""

    errors: Sequence[float]
    tolerances: Sequence[float] | None

    @property
    def kept(self) -> bool:
        """True if no error is larger than its tolerance; NaN counts as larger."""
        if self.tolerances is None:
            return True
        return all(error <= most for error, most in zip(self.errors, self.tolerances, strict=True))


def compare(
    model: nn.Module,
    probe: tuple[Any, ...],
    before: Outputs,
    after: Outputs,
    agree: Callable[[list[float]], list[float]],
    *,
    factor: float = 1.0,
    allowed: float | None = 0.0,
    setting: Setting | None = None,
) -> Parity:
    """Compare a network's outputs before and after a change.

    If an error exceeds `rounding`, the effect of rounding on this network and the difference between two runs of it are
    measured, which takes twice as long as computing both outputs.

    Args:
        model: the network, after the change.
        probe: its positional inputs.
        before: outputs before the change.
        after: outputs now.
        agree: see `growlab.growth.grow`.
        factor: factor by which the outputs are multiplied from now on.
        allowed: relative error beyond rounding that the change may make; None: any.
        setting: see `observe`.
    """
    by_eval = relative_error(before.eval, after.eval, factor)
    # See `modes_differ` of `observe`.
    same = after.train is after.eval
    errors = agree([by_eval, by_eval if same else relative_error(before.train, after.train, factor)])
    if allowed is None:
        return Parity(errors, None)

    def parity(by_eval: float, by_train: float) -> Parity:
        return Parity(errors, agree([by_eval + allowed, by_train + allowed]))

    usual = rounding(model, before.eval)
    usually = parity(usual, usual)
    if usually.kept:
        return usually
    _warn_if_irreproducible(model, probe, after, usual, setting)
    return parity(*rounding_measured(model, probe, after, setting))


def _warn_if_irreproducible(
    model: nn.Module, probe: tuple[Any, ...], outputs: Outputs, usual: float, setting: Setting | None
) -> None:
    """Warn if two runs of a network differ, so that the effect of a change cannot be measured."""
    again = observe(model, probe, setting=setting)
    pairs = ((outputs.eval, again.eval), (outputs.train, again.train))
    if (error := max(relative_error(*pair) for pair in pairs)) > usual:
        log.warning(
            "%s returns different outputs for the same inputs (off by %.1e), apart from draws of torch's, numpy's "
            "and Python's generators: parity cannot be checked",
            type(model).__name__,
            error,
        )


def relative_error(before: Tensor, after: Tensor, factor: float = 1.0) -> float:
    """Largest difference between `factor * after` and `before`, relative to the largest finite entry of `before`.

    If `before` is zero, as behind a head that starts at zero, the difference is absolute. Entries that are infinite in
    both, such as masked logits, do not differ.
    """
    if before.is_complex():
        before, after = (torch.view_as_real(each.resolve_conj()) for each in (before, after))
    zero = torch.zeros((), dtype=torch.float64, device=before.device)
    scale = largest = zero
    # In pieces: a language model's logits in float64 would take many times the memory of the network.
    pieces = (tensor.reshape(-1).split(_PIECE) for tensor in (before, after))
    for old, new in zip(*pieces, strict=True) if before.numel() else ():
        old, new = old.double(), new.to(torch.float64, copy=True).mul_(factor)
        scale = torch.maximum(scale, old.abs().where(old.isfinite(), zero).max())
        differ = old != new
        # Unlike Python's max, keeps NaN.
        largest = torch.maximum(largest, new.sub_(old).abs_().where(differ, zero).max())
    return float(largest) / (float(scale) or 1.0)


def rounding(model: nn.Module, output: Tensor) -> float:
    """Relative output error that rounding explains, by the least precise dtype of the parameters and the output."""
    dtypes = {output.dtype, *(p.dtype for p in model.parameters())}
    return max(ROUNDING.get(dtype.to_real(), 0.0) for dtype in dtypes)


def exact_rounding(model: nn.Module, output: Tensor) -> float:
    """Relative output error that rounding explains where no sum has other terms than before."""
    dtypes = {output.dtype, *(p.dtype for p in model.parameters() if p.is_floating_point())}
    return max(min(1e3 * torch.finfo(dtype).eps, ROUNDING.get(dtype, math.inf)) for dtype in dtypes)


def rounding_measured(
    model: nn.Module, probe: tuple[Any, ...], outputs: Outputs, setting: Setting | None = None
) -> tuple[float, float]:
    """Measure the relative output errors in eval and train mode that rounding explains in this network.

    Each parameter is perturbed by half a unit in its last place times a standard normal number; deep networks amplify
    this. Early in training, while batch normalisation's running averages lag behind, the outputs of eval mode may be
    nothing but rounding; then only train mode is compared.
    """
    usual, originals = rounding(model, outputs.eval), []
    with torch.no_grad():
        try:
            for number, parameter in enumerate(
                p for p in model.parameters() if p.is_floating_point() or p.is_complex()
            ):
                originals.append((parameter, parameter.detach().clone()))
                source = torch.Generator(parameter.device).manual_seed(number)
                precise = torch.promote_types(parameter.dtype, torch.float32)
                noise = torch.randn(parameter.shape, generator=source, device=parameter.device, dtype=precise)
                noise *= torch.finfo(parameter.dtype).eps / 2
                exact = parameter.to(precise)
                parameter.copy_((exact * placed(1 + noise, exact)).to(parameter.dtype))
            rounded = observe(model, probe, setting=setting)
        finally:
            for parameter, original in originals:
                parameter.copy_(original)
    pairs = ((outputs.eval, rounded.eval), (outputs.train, rounded.train))
    # NaN excuses no error: it counts as 0.
    errors = [error if (error := relative_error(*pair)) > 0 else 0.0 for pair in pairs]
    most = _AT_MOST * usual
    by_eval, by_train = (max(usual, _TIMES_ROUNDED * error) for error in errors)
    if min(by_eval, by_train) > most:
        return most, most
    # If rounding changes one mode by as much as its outputs, only the other mode is compared.
    by_eval, by_train = (math.inf if allowed >= 1 else allowed for allowed in (by_eval, by_train))
    return by_eval, by_train

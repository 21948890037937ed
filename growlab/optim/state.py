"""Carry an optimizer through a growth event: same object, same parameter groups, new parameters."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from growlab.optim.lars import LARS
from growlab.optim.own_lists import cannot_exchange, exchange_own
from growlab.settings import one_of
from growlab.widths import Carry, WidthGraph

log = logging.getLogger(__name__)

Inheritance = Literal["auto", "inherit", "reset", "zero_new"]
INHERITANCES = ("auto", "inherit", "reset", "zero_new")

# Cosine between weights and what holds weights, at least; moments of gradients are far below.
_ALIKE = 0.7
# How state scales with the gradient, by the names that torch.optim gives it.
_POWERS = {
    **dict.fromkeys(("momentum_buffer", "exp_avg", "grad_avg", "exp_inf", "prev"), 1),
    **dict.fromkeys(("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"), 2),
    **dict.fromkeys(("acc_delta", "step_size", "ax"), 0),
}


def default_inheritance(optimizer: torch.optim.Optimizer, carry: Carry | None = None) -> Inheritance:
    """The papers' choice at a growth event.

    Yuan et al. (2023) start SGD's momentum anew and let adaptive optimizers keep their state. Where a
    layer's basis was turned, momentum turns with it exactly and the same training goes on (Bird, Appendix D): SGD and
    LARS keep it.

    Args:
        optimizer: any.
        carry: the event's rule.
    """
    turned = carry is not None and bool(carry.bases)
    return "reset" if isinstance(optimizer, (torch.optim.SGD, LARS)) and not turned else "inherit"


def follow(
    optimizer: torch.optim.Optimizer,
    replaced: Mapping[str, tuple[Tensor, Tensor]],
    graph: WidthGraph,
    widths_before: Mapping[str, int],
    widths_after: Mapping[str, int],
    inheritance: Inheritance = "auto",
    carry: Carry | None = None,
) -> None:
    """Let an optimizer track the parameters of a grown network, in place.

    Schedulers, scalers and loggers hold references to the optimizer and its groups, so neither is replaced.

    Args:
        optimizer: any `torch.optim.Optimizer` whose state is shaped like its parameters, or one number each.
        replaced: old and new tensor by name, from the growth event.
        graph: the network's width graph.
        widths_before: width of each group before.
        widths_after: and after.
        inheritance: "reset" forgets all state. "zero_new" carries state to the old entries' places as it is; at new
            entries is what the optimizer begins with, zeros for most. "inherit" carries it by the method's rule: first
            moments as the gradient, second moments as its square; state of unknown meaning as "zero_new". "auto":
            `default_inheritance`, and "reset", with a warning, where state cannot be carried (Adafactor's factors,
            L-BFGS's directions). Copies and averages of weights, such as Lookahead's and schedule-free optimizers',
            stay as far from the weights as they were, none at new entries.
        carry: the method's rule, from the growth event; None for old entries as they are.

    Raises:
        ValueError: state that is neither shaped like its parameter nor a number and is not to be reset, lists of the
            optimizer's own that would not fit, or an unknown `inheritance`. The optimizer is then as before.
    """
    check_inheritance(inheritance)
    places = {id(old): (name, new) for name, (old, new) in replaced.items()}
    if inheritance == "auto":
        inheritance = default_inheritance(optimizer, carry)
        if inheritance == "inherit" and (told := _cannot_follow(optimizer, places)):
            log.warning("%s; the optimizer's state begins anew at this growth event.", told)
            inheritance = "reset"
    rule = carry if inheritance == "inherit" and carry is not None else Carry()
    copies = _copies_of_weights(optimizer)
    check_following(optimizer, places, inheritance)
    settings = {param: group for group in optimizer.param_groups for param in group["params"]}
    states: dict[Tensor, dict[str, Any]] = {}
    # An optimizer around another one shares its groups, which may be the grown network's already.
    for param in () if inheritance == "reset" else tuple(optimizer.state):
        if id(param) not in places:
            if rule.every != 1.0:
                states[param] = _rescaled(optimizer, param, rule.every)
            continue
        name, new = places[id(param)]
        states[new] = {}
        for key, value in optimizer.state[param].items():
            if isinstance(value, Tensor) and value.shape == param.shape:
                power = _power(optimizer, key)
                chosen = rule if power is not None else Carry()
                place = partial(_place, name, graph, widths_before, widths_after)
                moved = place(chosen, value, power or 0)
                if isinstance(optimizer, LARS) and inheritance == "inherit":
                    moved = optimizer.inherited(param, new, value, moved)
                if begins := _begins_with(optimizer, key, settings.get(param, {})):
                    moved = torch.where(place(chosen, torch.ones_like(value)) == 0, begins, moved)
                if key in copies:
                    moved = _moved_along(value, param.detach(), new.detach(), partial(place, Carry()))
                states[new][key] = torch.empty_like(new, dtype=value.dtype).copy_(moved)
            else:
                states[new][key] = value
    if inheritance == "reset":
        optimizer.state.clear()
    for group in optimizer.param_groups:
        for index, param in enumerate(group["params"]):
            if id(param) in places:
                group["params"][index] = places[id(param)][1]
    exchange_own(optimizer, {key: new for key, (_, new) in places.items()})
    for param in [param for param in optimizer.state if id(param) in places]:
        del optimizer.state[param]
    optimizer.state.update(states)
    if isinstance(optimizer, torch.optim.LBFGS):
        # It counts its parameters' elements once.
        optimizer._numel_cache = None


def rescale_state(optimizer: torch.optim.Optimizer, factors: Mapping[Tensor, tuple[Tensor, Tensor]]) -> None:
    """Bring state to parameters that have been multiplied, in place, so that the same training goes on.

    Args:
        optimizer: any.
        factors: for a parameter, what it was multiplied by, and what its gradient is multiplied by from now on.
    """
    copies = _copies_of_weights(optimizer)
    for param, (weight, gradient) in factors.items():
        state = optimizer.state.get(param, {})
        shaped = [key for key, v in state.items() if isinstance(v, Tensor) and v.shape == param.shape]
        for key in shaped:
            value, power = state[key], _power(optimizer, key)
            if key in copies:
                state[key] = value * weight.to(value)
            elif power is not None:
                moved = value * (gradient**power).to(value)
                if isinstance(optimizer, LARS):
                    moved = optimizer.inherited(param / weight, param, value, moved)
                state[key] = moved.to(value)


def _place(
    name: str,
    graph: WidthGraph,
    before: Mapping[str, int],
    after: Mapping[str, int],
    carry: Carry,
    tensor: Tensor,
    power: int = 0,
) -> Tensor:
    return carry.carried(tensor, name, graph, before, after, power)


def check_inheritance(inheritance: str) -> None:
    """Refuse an unknown name.

    Raises:
        ValueError: it is none of `INHERITANCES`.
    """
    one_of(INHERITANCES, optimizer_state=inheritance)


def check_following(
    optimizer: torch.optim.Optimizer, places: Mapping[int, tuple[str, Tensor]], inheritance: Inheritance
) -> None:
    """Refuse state that cannot be carried through an event where parameters are replaced.

    Args:
        optimizer: any.
        places: by the `id` of a parameter that is replaced, its name and the new one.
        inheritance: see `follow`.

    Raises:
        ValueError: it is neither shaped like its parameter nor a number, and is not to be reset; or the optimizer
            holds parameters by their size.
    """
    if told := cannot_exchange(optimizer, places):
        raise ValueError(f"{told}.")
    if inheritance not in ("reset", "auto") and (told := _cannot_follow(optimizer, places)):
        raise ValueError(f"{told}; set optimizer_state='reset' (of Grower.follow: state='reset').")


def _cannot_follow(optimizer: torch.optim.Optimizer, places: Mapping[int, tuple[str, Tensor]]) -> str:
    """Says which state of a parameter that is replaced is neither shaped like it nor a number; "": none is."""
    for param, state in optimizer.state.items():
        # L-BFGS keeps what it knows of all parameters with the first.
        named = (places and isinstance(optimizer, torch.optim.LBFGS)) or id(param) in places
        for key, value in state.items() if named else ():
            alike = isinstance(value, Tensor) and (value.shape == param.shape or value.numel() == 1)
            if not alike and (isinstance(value, Tensor) or _holds_tensors(value)):
                shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                name = places[id(param)][0] if id(param) in places else "the network"
                return (
                    f"{type(optimizer).__name__}'s {key!r} of {name} is {shape}, the parameter {tuple(param.shape)}: "
                    "growlab cannot carry it through growth"
                )
    return ""


def running_gradients(optimizer: torch.optim.Optimizer) -> dict[Tensor, Tensor]:
    """The optimizer's running mean of the gradient of each parameter; parameters without one are left out."""
    found: dict[Tensor, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                shaped = isinstance(value, Tensor) and value.shape == parameter.shape
                if shaped and _power(optimizer, key) == 1:
                    found.setdefault(parameter, value)
    return found


def _rescaled(optimizer: torch.optim.Optimizer, param: Tensor, every: float) -> dict[str, Any]:
    """State of a parameter that was not replaced, while its gradient has changed by a factor."""
    if isinstance(optimizer, LARS) and param.dim() > 1:
        return optimizer.state[param]
    return {
        key: value * every ** (_power(optimizer, key) or 0)
        if isinstance(value, Tensor) and value.shape == param.shape
        else value
        for key, value in optimizer.state[param].items()
    }


def _power(optimizer: torch.optim.Optimizer, key: str) -> int | None:
    """How an optimizer's state of this name scales with the gradient; None if unknown."""
    if isinstance(optimizer, torch.optim.RMSprop) and key == "momentum_buffer":
        # Of gradients that are divided by their root mean square already.
        return 0
    if key in _POWERS:
        return _POWERS[key]
    # Other libraries follow these names: exp_avg_diff, exp_avg_lr_1, exp_grad_norm_sq, ...
    if key.endswith(("_sq", "_var")) or "square" in key or "variance" in key:
        return 2
    return 1 if "momentum" in key or key.startswith(("exp_avg", "grad")) or key.endswith("_grad") else None


def _copies_of_weights(optimizer: torch.optim.Optimizer) -> set[str]:
    """State of other libraries that holds weights, of now or of before: it points where they point."""
    found: dict[str, list[Tensor]] = {}
    for param, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == param.shape and _power(optimizer, key) is None:
                one, other = (
                    (torch.view_as_real(t) if t.is_complex() else t).float() for t in (value, param.detach())
                )
                sums = torch.stack([(one * other).sum(), one.square().sum(), other.square().sum()]).cpu()
                found.setdefault(key, []).append(sums)
    alike = {"ax"} if isinstance(optimizer, torch.optim.ASGD) else set()
    for key, known in found.items():
        product, *squares = torch.stack(known).sum(0).tolist()
        if product > _ALIKE * (squares[0] * squares[1]) ** 0.5 > 0:
            alike.add(key)
    return alike


def _moved_along(kept: Tensor, before: Tensor, after: Tensor, place: Callable[[Tensor], Tensor]) -> Tensor:
    """What is kept of weights, as far from the new ones as it was from the old, where these are scaled to those.

    Args:
        kept: of the old weights' shape.
        before: the old weights.
        after: the new ones; at entries of their own it is these.
        place: puts a tensor's entries at their places among the new ones, 0 elsewhere.
    """
    old, new = place(before.to(kept)), after.to(kept)
    scale = (new * old.conj()).sum() / old.abs().square().sum().clamp(min=torch.finfo(old.dtype).tiny)
    ratio = new / old
    # Where noise was added to a small weight, or there is none, the whole tensor's scale says more.
    return new + place(kept - before.to(kept)) * torch.where(
        (ratio - scale).abs() <= scale.abs(), ratio, scale
    )


def _begins_with(optimizer: torch.optim.Optimizer, key: str, settings: Mapping[str, Any]) -> float:
    """What state of this name holds before the first step, if not 0."""
    if isinstance(optimizer, torch.optim.Rprop) and key == "step_size":
        return float(settings.get("lr", optimizer.defaults["lr"]))
    if isinstance(optimizer, torch.optim.Adagrad) and key == "sum":
        return float(
            settings.get("initial_accumulator_value", optimizer.defaults["initial_accumulator_value"])
        )
    return 0.0


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(isinstance(v, Tensor) or _holds_tensors(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return any(isinstance(v, Tensor) or _holds_tensors(v) for v in value)
    return False

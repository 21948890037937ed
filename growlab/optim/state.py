"""Carry an optimizer through a growth event: same object, same parameter groups, new parameters."""

import logging
from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from growlab.base.settings import one_of
from growlab.optim.avagrad import AvaGrad
from growlab.optim.contents import mapped, misfit, shaped
from growlab.optim.lars import LARS
from growlab.optim.own_lists import cannot_exchange, exchange_own, inside, kept_by_parameter
from growlab.widths import Carry, WidthGraph

log = logging.getLogger(__name__)

Inheritance = Literal["auto", "inherit", "reset", "zero_new"]
INHERITANCES = ("auto", "inherit", "reset", "zero_new")

# Least cosine between weights and state that stores weights; that of moments of gradients is far below.
_ALIKE = 0.7
# Power of the gradient that state scales with, by its name in torch.optim.
_POWERS = {
    **dict.fromkeys(("momentum_buffer", "exp_avg", "grad_avg", "exp_inf", "prev"), 1),
    **dict.fromkeys(("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"), 2),
    **dict.fromkeys(("acc_delta", "step_size", "ax"), 0),
}


def default_inheritance(optimizer: torch.optim.Optimizer, carry: Carry | None = None) -> Inheritance:
    """Return the papers' treatment of optimizer state at a growth event: "reset" or "inherit".

    Yuan et al. (2023) reset SGD's momentum and let adaptive optimizers keep their state. If a layer's basis was
    rotated, momentum rotates with it exactly, which does not change training (Bird, Appendix D): SGD and LARS keep it.

    Args:
        optimizer: any.
        carry: rule of the event, see `follow`.
    """
    turned = carry is not None and bool(carry.bases)
    return "reset" if isinstance(optimizer, (torch.optim.SGD, LARS)) and not turned else "inherit"


def normalises(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer's steps do not depend on the scale of gradients.

    This is so for Adam, Lion, Muon and any other that is not known to step in proportion to the gradient (SGD, AvaGrad)
    or the weights (LARS), or by curvature (L-BFGS).
    """
    others = (torch.optim.SGD, torch.optim.ASGD, AvaGrad, LARS, torch.optim.LBFGS)
    return not isinstance(optimizer, others)


def follow(
    optimizer: torch.optim.Optimizer,
    replaced: Mapping[str, tuple[Tensor, Tensor]],
    graph: WidthGraph,
    widths_before: Mapping[str, int],
    widths_after: Mapping[str, int],
    inheritance: Inheritance = "auto",
    carry: Carry | None = None,
) -> None:
    """Carry an optimizer through a growth event: replace its parameters and map its state, in place.

    Schedulers, scalers and loggers hold references to the optimizer and its groups, so neither is replaced.

    Args:
        optimizer: any `torch.optim.Optimizer` whose state has the shape of its parameters, or is a number each.
        replaced: old and new tensor by name, from the growth event.
        graph: the network's width graph.
        widths_before: width of each group before.
        widths_after: width of each group after.
        inheritance: "reset" deletes all state. "zero_new" keeps state unchanged at old entries; new entries get the
            optimizer's initial state, mostly zeros. "inherit" maps it by the method's rule: first moments like the
            gradient, second moments like its square; state of unknown meaning as "zero_new". "auto":
            `default_inheritance`, or "reset", with a warning, if state cannot be carried (Adafactor's factors, L-BFGS's
            directions). Copies and averages of weights, such as those of Lookahead and schedule-free optimizers, keep
            their distance from the weights, 0 at new entries.
        carry: the method's rule, from the growth event; None keeps state unchanged at old entries.

    Raises:
        ValueError: state that is not reset has neither its parameter's shape nor a single number, other containers of
            the optimizer would not fit, or `inheritance` is unknown. The optimizer is then unchanged.
    """
    check_inheritance(inheritance)
    follow_once(optimizer, replaced, (graph, widths_before, widths_after), inheritance, carry, {})


def follow_once(
    optimizer: Any,
    replaced: Mapping[str, tuple[Tensor, Tensor]],
    widths: tuple[WidthGraph, Mapping[str, int], Mapping[str, int]],
    inheritance: Inheritance,
    carry: Carry | None,
    done: dict[int, tuple[Any, Any]],
) -> None:
    """Carry one of several optimizers that may share groups or state (wrappers), mapping each state once.

    Args:
        optimizer: any object that may have `param_groups` and `state`.
        replaced: see `follow`.
        widths: the network's width graph, widths before and after.
        inheritance: see `follow`.
        carry: see `follow`.
        done: state mapped for previous optimizers, by its id: old and new; updated.
    """
    places = {id(old): (name, new) for name, (old, new) in replaced.items()}
    state = getattr(optimizer, "state", {})
    shares = id(state) in done
    if inheritance == "auto":
        inheritance = default_inheritance(optimizer, carry)
        if inheritance == "inherit" and not shares and (told := _cannot_follow(optimizer, places)):
            log.warning("%s; the optimizer's state begins anew at this growth event.", told)
            inheritance = "reset"
    check_following(optimizer, places, inheritance)
    moving = _Moving(optimizer, places, widths, inheritance, carry)
    # Entries with names as keys belong to the optimizer as a whole, not to a parameter.
    own = [] if shares else [param for param in state if isinstance(param, Tensor)]
    # A wrapper of another optimizer may create its state only in its constructor.
    made_once = any(True for _ in inside(optimizer))
    states: dict[Tensor, Any] = {}
    for param in own if inheritance != "reset" or made_once else ():
        if id(param) in places or moving.rule.every != 1.0:
            old = state[param]
            if id(old) not in done:
                done[id(old)] = old, moving.moved(param, old)
            states[places[id(param)][1] if id(param) in places else param] = done[id(old)][1]
    if inheritance == "reset" and not shares and not made_once:
        begin_anew(optimizer)
    # A wrapper of another optimizer shares its groups, which may be updated already.
    for group in getattr(optimizer, "param_groups", ()):
        for index, param in enumerate(group["params"]):
            if id(param) in places:
                group["params"][index] = places[id(param)][1]
    exchange_own(optimizer, {key: new for key, (_, new) in places.items()}, moving.moved)
    for param in own:
        if id(param) in places:
            state.pop(param, None)
    state.update(states)
    done[id(state)] = state, state
    if isinstance(optimizer, torch.optim.LBFGS):
        # It caches the number of its parameters' elements.
        optimizer._numel_cache = None


def begin_anew(optimizer: Any) -> None:
    """Delete an optimizer's state of parameters, as before its first step."""
    state = getattr(optimizer, "state", {})
    for param in [param for param in state if isinstance(param, Tensor)]:
        del state[param]
    for group in getattr(optimizer, "param_groups", ()):
        # Some count steps here, and create their state in the first.
        if "step" not in getattr(optimizer, "defaults", ()):
            group.pop("step", None)


class _Moving:
    """Maps an optimizer's state of parameters through one growth event; arguments as of `follow_once`."""

    def __init__(
        self,
        optimizer: Any,
        places: Mapping[int, tuple[str, Tensor]],
        widths: tuple[WidthGraph, Mapping[str, int], Mapping[str, int]],
        inheritance: Inheritance,
        carry: Carry | None,
    ) -> None:
        inherits = inheritance == "inherit"
        self.rule = carry if inherits and carry is not None else Carry()
        self._lars = optimizer if inherits and isinstance(optimizer, LARS) else None
        self._optimizer, self._places, self._widths = optimizer, places, widths
        self._copies, self._positive = _meanings(optimizer)
        self._anew = inheritance == "reset"
        groups = getattr(optimizer, "param_groups", ())
        self._settings = {param: group for group in groups for param in group["params"]}

    def moved(self, param: Tensor, value: Any, key: str = "") -> Any:
        """Map a parameter's state to the state of its replacement.

        Args:
            param: the old parameter, or one that is not replaced.
            value: its state, of any type.
            key: name of the state, if it is not a dictionary of named entries.
        """
        if id(param) not in self._places:
            return mapped(value, param.shape, param.shape, partial(self._rescaled, param), key)
        new = self._places[id(param)][1]
        return mapped(value, param.shape, new.shape, partial(self._carried, param), key)

    def _carried(self, param: Tensor, key: str, value: Tensor) -> Tensor:
        name, new = self._places[id(param)]
        power = _power(self._optimizer, key)
        chosen = self.rule if power is not None else Carry()

        def place(carry: Carry, tensor: Tensor, power: int = 0) -> Tensor:
            return carry.carried(tensor, name, *self._widths, power)

        if self._anew:
            return (
                new.detach().to(value.dtype, copy=True)
                if key in self._copies
                else torch.zeros_like(new, dtype=value.dtype)
            )
        moved = place(chosen, value, power or 0)
        if self._lars is not None:
            moved = self._lars.inherited(param, new, value, moved)
        begins = _begins_with(self._optimizer, key, self._settings.get(param, {}))
        if key in self._positive:
            begins = float(value.mean())
        if begins:
            moved = torch.where(place(chosen, torch.ones_like(value)) == 0, begins, moved)
        if key in self._copies:
            moved = _moved_along(value, param.detach(), new.detach(), partial(place, Carry()))
        return torch.empty_like(new, dtype=value.dtype).copy_(moved)

    def _rescaled(self, param: Tensor, key: str, value: Tensor) -> Tensor:
        """Rescale state of a parameter that was not replaced, but whose gradient changed by a factor."""
        if self._lars is not None and param.dim() > 1:
            return value
        power = _power(self._optimizer, key)
        return value * self.rule.every**power if power else value


def rescale_state(optimizer: torch.optim.Optimizer, factors: Mapping[Tensor, tuple[Tensor, Tensor]]) -> None:
    """Rescale the state of parameters that were multiplied by factors, in place, so that training continues unchanged.

    Args:
        optimizer: any.
        factors: by parameter, the factor on it and the factor on its gradient from now on.
    """
    copies, _ = _meanings(optimizer)
    for param, (weight, gradient) in factors.items():
        if param in optimizer.state:
            rescaled = partial(_multiplied, optimizer, copies, param, weight, gradient)
            optimizer.state[param] = mapped(optimizer.state[param], param.shape, param.shape, rescaled)


def _multiplied(
    optimizer: torch.optim.Optimizer,
    copies: Container[str],
    param: Tensor,
    weight: Tensor,
    gradient: Tensor,
    key: str,
    value: Tensor,
) -> Tensor:
    power = _power(optimizer, key)
    if key in copies:
        return value * weight.to(value)
    if power is None:
        return value
    moved = value * (gradient**power).to(value)
    if isinstance(optimizer, LARS):
        moved = optimizer.inherited(param / weight, param, value, moved)
    return moved.to(value)


def check_inheritance(inheritance: str) -> None:
    """Check the name of an inheritance.

    Raises:
        ValueError: it is not in `INHERITANCES`.
    """
    one_of(INHERITANCES, optimizer_state=inheritance)


def check_following(
    optimizer: torch.optim.Optimizer, places: Mapping[int, tuple[str, Tensor]], inheritance: Inheritance
) -> None:
    """Check that an optimizer's state can be carried through an event that replaces parameters.

    Args:
        optimizer: any.
        places: name and replacement of each parameter that is replaced, by its `id`.
        inheritance: see `follow`.

    Raises:
        ValueError: state that is not reset has neither its parameter's shape nor a single number; or the optimizer
            groups parameters by size in a container that growlab cannot carry.
    """
    if told := cannot_exchange(optimizer, places):
        raise ValueError(f"{told}.")
    if inheritance not in ("reset", "auto") and (told := _cannot_follow(optimizer, places)):
        raise ValueError(f"{told}; set optimizer_state='reset' (of Grower.follow: state='reset').")


def _cannot_follow(optimizer: Any, places: Mapping[int, tuple[str, Tensor]]) -> str:
    """Describe the state of a replaced parameter that cannot be brought to another shape, or ""."""
    for param, state in getattr(optimizer, "state", {}).items():
        # L-BFGS keeps the state of all parameters with the first.
        everything = bool(places) and isinstance(optimizer, torch.optim.LBFGS)
        if not isinstance(param, Tensor) or not (everything or id(param) in places):
            continue
        for key, value in state.items() if isinstance(state, dict) else [("", state)]:
            if found := misfit(value, param.shape):
                name = places[id(param)][0] if id(param) in places else "the network"
                return (
                    f"{type(optimizer).__name__}'s {key!r} of {name} is {found}, the parameter {tuple(param.shape)}: "
                    "growlab cannot carry it through growth"
                )
    return ""


def running_gradients(optimizer: torch.optim.Optimizer) -> dict[Tensor, Tensor]:
    """Return the optimizer's running means of gradients, by parameter; parameters without one are left out."""
    found: dict[Tensor, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                shaped = isinstance(value, Tensor) and value.shape == parameter.shape
                if shaped and _power(optimizer, key) == 1:
                    found.setdefault(parameter, value)
    return found


def _power(optimizer: torch.optim.Optimizer, key: str) -> int | None:
    """Return the power of the gradient that state of this name scales with; None if unknown."""
    if isinstance(optimizer, torch.optim.RMSprop) and key == "momentum_buffer":
        # It accumulates gradients that are already divided by their root mean square.
        return 0
    if key in _POWERS:
        return _POWERS[key]
    # Other libraries use similar names: exp_avg_diff, exp_avg_lr_1, exp_grad_norm_sq, ...
    if key.endswith(("_sq", "_var")) or "square" in key or "variance" in key:
        return 2
    return 1 if "momentum" in key or key.startswith(("exp_avg", "grad")) or key.endswith("_grad") else None


def _meanings(optimizer: Any) -> tuple[set[str], set[str]]:
    """Names of state, in other libraries' optimizers, that stores weights, and of state that is positive everywhere.

    State that stores present or past weights is recognised by its cosine with the parameters. Positive state is a scale
    or a rate, such as a preconditioner initialised with ones, for which 0 may be invalid.
    """
    found: dict[str, list[Tensor]] = {}
    state = getattr(optimizer, "state", {})
    known = [(param, held, "") for param, held in state.items() if isinstance(param, Tensor)]
    for param, held, own in (*known, *kept_by_parameter(optimizer)):
        for key, value in shaped(held, param.shape, own):
            if _power(optimizer, key) is None and value.numel() and value.dtype is not torch.bool:
                one, other = (
                    (torch.view_as_real(t) if t.is_complex() else t).float() for t in (value, param.detach())
                )
                sums = [
                    (one * other).sum(),
                    one.square().sum(),
                    other.square().sum(),
                    one.amin().sign().float(),
                ]
                found.setdefault(key, []).append(torch.stack(sums).cpu())
    copies, positive = {"ax"} if isinstance(optimizer, torch.optim.ASGD) else set(), set()
    for key, several in found.items():
        product, *squares, _ = torch.stack(several).sum(0).tolist()
        if product > _ALIKE * (squares[0] * squares[1]) ** 0.5 > 0:
            copies.add(key)
        if all(one[3] > 0 for one in several):
            positive.add(key)
    return copies, positive


def _moved_along(kept: Tensor, before: Tensor, after: Tensor, place: Callable[[Tensor], Tensor]) -> Tensor:
    """Map a stored copy of weights so that it keeps its distance from them, scaled as they are.

    Args:
        kept: the stored copy, of the old weights' shape.
        before: the old weights.
        after: the new weights; the result equals them at new entries.
        place: maps a tensor of the old shape to the new one, with 0 at new entries.
    """
    old, new = place(before.to(kept)), after.to(kept)
    scale = (new * old.conj()).sum() / old.abs().square().sum().clamp(min=torch.finfo(old.dtype).tiny)
    ratio = new / old
    # For zero weights, and small ones with added noise, the scale of the whole tensor is more reliable.
    return new + place(kept - before.to(kept)) * torch.where(
        (ratio - scale).abs() <= scale.abs(), ratio, scale
    )


def _begins_with(optimizer: torch.optim.Optimizer, key: str, settings: Mapping[str, Any]) -> float:
    """Return the initial value of state of this name, before the first step."""
    if isinstance(optimizer, torch.optim.Rprop) and key == "step_size":
        return float(settings.get("lr", optimizer.defaults["lr"]))
    if isinstance(optimizer, torch.optim.Adagrad) and key == "sum":
        return float(
            settings.get("initial_accumulator_value", optimizer.defaults["initial_accumulator_value"])
        )
    return 0.0

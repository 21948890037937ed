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


def normalises(optimizer: torch.optim.Optimizer) -> bool:
    """True if an optimizer's steps are as long for gradients that are all twice as large.

    So it is with Adam, Lion, Muon and any other that is not known to step in proportion to the gradient (SGD, AvaGrad),
    or to the weights (LARS) or by curvature (L-BFGS), with which the gradient's scale agrees.
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
    follow_once(optimizer, replaced, (graph, widths_before, widths_after), inheritance, carry, {})


def follow_once(
    optimizer: Any,
    replaced: Mapping[str, tuple[Tensor, Tensor]],
    widths: tuple[WidthGraph, Mapping[str, int], Mapping[str, int]],
    inheritance: Inheritance,
    carry: Carry | None,
    done: dict[int, tuple[Any, Any]],
) -> None:
    """Let one of several optimizers follow, which may share groups, the whole state or that of a parameter.

    Args:
        optimizer: with `param_groups` and `state`, as far as it has them.
        replaced: see `follow`.
        widths: the network's width graph, widths before and after.
        inheritance: see `follow`.
        carry: see `follow`.
        done: state that an optimizer before it had, by its id: old and new; brought up to date.
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
    # Entries of the optimizer as a whole, under names of their own, are none of a parameter's.
    own = [] if shares else [param for param in state if isinstance(param, Tensor)]
    # One around another optimizer may have made its state when it was made itself, and never again.
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
    # An optimizer around another one shares its groups, which may be the grown network's already.
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
        # It counts its parameters' elements once.
        optimizer._numel_cache = None


def begin_anew(optimizer: Any) -> None:
    """Let an optimizer forget what it keeps of parameters, so that it begins as if none had been stepped."""
    state = getattr(optimizer, "state", {})
    for param in [param for param in state if isinstance(param, Tensor)]:
        del state[param]
    for group in getattr(optimizer, "param_groups", ()):
        # Some count steps here, and make their state in the first.
        if "step" not in getattr(optimizer, "defaults", ()):
            group.pop("step", None)


class _Moving:
    """Brings what an optimizer keeps of its parameters through one growth event; arguments as of `follow_once`."""

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
        """What is kept of a parameter, as it is to be kept of the one in its place.

        Args:
            param: the old one, or one that stays.
            value: of any kind.
            key: its name, where it is not a dictionary of names.
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
        """Of a parameter that was not replaced, while its gradient has changed by a factor."""
        if self._lars is not None and param.dim() > 1:
            return value
        power = _power(self._optimizer, key)
        return value * self.rule.every**power if power else value


def rescale_state(optimizer: torch.optim.Optimizer, factors: Mapping[Tensor, tuple[Tensor, Tensor]]) -> None:
    """Bring state to parameters that have been multiplied, in place, so that the same training goes on.

    Args:
        optimizer: any.
        factors: for a parameter, what it was multiplied by, and what its gradient is multiplied by from now on.
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


def _cannot_follow(optimizer: Any, places: Mapping[int, tuple[str, Tensor]]) -> str:
    """Says which state of a parameter that is replaced could not be brought to another shape; "": all could."""
    for param, state in getattr(optimizer, "state", {}).items():
        # L-BFGS keeps what it knows of all parameters with the first.
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
    """The optimizer's running mean of the gradient of each parameter; parameters without one are left out."""
    found: dict[Tensor, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                shaped = isinstance(value, Tensor) and value.shape == parameter.shape
                if shaped and _power(optimizer, key) == 1:
                    found.setdefault(parameter, value)
    return found


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


def _meanings(optimizer: Any) -> tuple[set[str], set[str]]:
    """Names of state of other libraries that holds weights, and of state that is above 0 everywhere.

    Weights, of now or of before, point where the parameters point. State without zeros or signs is a scale or a rate,
    such as a preconditioner that begins with ones: 0 may be no value for it.
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

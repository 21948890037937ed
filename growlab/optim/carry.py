"""Carry optimizers through a growth event: same object, same parameter groups, new parameters, mapped state.

Parameters are replaced in groups and in other containers of the optimizer, such as `group["matrices"]` of a Muon,
`self.by_size`, or `self.state["all"]`. State of its parameter's shape is mapped, in containers at any depth.
"""

import copy
import logging
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from growlab.base.devices import on_cpu
from growlab.base.pieces import is_piece, laid_out, placed, replicated, set_aside, whole
from growlab.base.settings import one_of
from growlab.optim.avagrad import AvaGrad
from growlab.optim.lars import LARS
from growlab.optim.regional import Regional
from growlab.widths import Carry, WidthGraph

log = logging.getLogger(__name__)

Inheritance = Literal["auto", "inherit", "reset", "zero_new", "reset_new"]
#: Maps the name of an entry and a tensor of the parameter's shape to its replacement.
Change = Callable[[str, Tensor], Tensor]
#: Maps an old parameter, its value in a dictionary and the dictionary's name to the new parameter's value.
Moved = Callable[[Tensor, Any, str], Any]

# Attributes of torch's Optimizer, which are carried separately.
_KNOWN = ("state", "param_groups", "defaults")
# Least cosine of weights and state that counts as stored weights; that of moments of gradients is far below.
_SIMILAR = 0.7
# Power of the gradient that state scales with, by its name in torch.optim.
POWERS = {
    **dict.fromkeys(("momentum_buffer", "exp_avg", "grad_avg", "exp_inf", "prev"), 1),
    **dict.fromkeys(("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"), 2),
    **dict.fromkeys(("acc_delta", "step_size", "ax"), 0),
}


def default_inheritance(optimizer: Optimizer, carry: Carry | None = None) -> Inheritance:
    """Return the papers' treatment of optimizer state at a growth event: "reset" or "inherit".

    Yuan et al. (2023) reset SGD's momentum and let adaptive optimizers keep their state. If an event rotates the basis
    of channels, momentum rotates with it exactly (Bird, Appendix D): SGD and LARS then keep it.

    Args:
        optimizer: any optimizer.
        carry: rule of the event, see `follow`.
    """
    rotated = carry is not None and bool(carry.bases)
    return "reset" if isinstance(optimizer, (torch.optim.SGD, LARS)) and not rotated else "inherit"


def normalises(optimizer: Optimizer) -> bool:
    """Return True if an optimizer's steps do not depend on the scale of gradients.

    True for Adam, Lion, Muon and all others that are not known to step in proportion to the gradient (SGD, AvaGrad) or
    the weights (LARS), or by curvature (L-BFGS).
    """
    others = (torch.optim.SGD, torch.optim.ASGD, AvaGrad, LARS, torch.optim.LBFGS)
    return not isinstance(optimizer, others)


@on_cpu
def follow(
    optimizer: Optimizer,
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
        optimizer: any `torch.optim.Optimizer` whose state is tensors of the parameters' shapes and single numbers.
        replaced: old and new tensor by name, from the growth event.
        graph: the network's width graph.
        widths_before: width of each group before.
        widths_after: width of each group after.
        inheritance: "reset" deletes all state. "zero_new" keeps state unchanged at old entries; new entries get the
            optimizer's initial state, mostly zeros. "inherit" maps state by the method's rule: first moments like the
            gradient, second moments like its square, state of unknown meaning as with "zero_new". "reset_new" does the
            same at old entries, and all new ones, copies included, get the optimizer's initial state. "auto":
            `default_inheritance`, or "reset", with a warning, if state cannot be carried (Adafactor's factors, L-BFGS's
            directions). Copies and averages of weights, such as those of Lookahead and schedule-free optimizers, keep
            their difference from the weights, with 0 at new entries.
        carry: the method's rule, from the growth event; None keeps state unchanged at old entries.

    Raises:
        ValueError: state that is not reset is neither of its parameter's shape nor a single number, another container
            of the optimizer would not fit, or `inheritance` is unknown. The optimizer is then unchanged.
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
    """Carry one of several optimizers that may share groups or state, as wrappers do; map each state once.

    `widths` are the network's width graph and its widths before and after. `done` maps the ids of state that was mapped
    for previous optimizers to its old and new value. See `follow` for the other arguments.
    """
    places = {id(old): (name, new) for name, (old, new) in replaced.items()}
    state = getattr(optimizer, "state", {})
    shares = id(state) in done
    if inheritance == "auto":
        inheritance = default_inheritance(optimizer, carry)
        if inheritance == "inherit" and not shares and (problem := _cannot_follow(optimizer, places)):
            log.warning("%s; the optimizer's state is reset at this growth event.", problem)
            inheritance = "reset"
    check_following(optimizer, places, inheritance)
    mapping = _StateMap(optimizer, places, widths, inheritance, carry)
    # Keys other than parameters belong to the optimizer as a whole.
    params = [] if shares else [param for param in state if isinstance(param, Tensor)]
    # A wrapper of another optimizer may create its state only in its constructor.
    made_once = any(True for _ in inside(optimizer))
    states: dict[Tensor, Any] = {}
    for param in params if inheritance != "reset" or made_once else ():
        if id(param) in places or mapping.rule.every != 1.0:
            old = state[param]
            if id(old) not in done:
                done[id(old)] = old, mapping.mapped(param, old)
            states[places[id(param)][1] if id(param) in places else param] = done[id(old)][1]
    if inheritance == "reset" and not shares and not made_once:
        for param in params:
            for tensor in tensors_within(state.pop(param)):
                set_aside(tensor)
        for group in getattr(optimizer, "param_groups", ()):
            # Some optimizers count steps here, and create their state at the first.
            if "step" not in getattr(optimizer, "defaults", ()):
                group.pop("step", None)
    replace_in_groups(optimizer, {key: new for key, (_, new) in places.items()}, mapping.mapped)
    for param in params:
        if id(param) in places:
            state.pop(param, None)
    state.update(states)
    done[id(state)] = state, state
    if isinstance(optimizer, torch.optim.LBFGS):
        # It caches the number of elements of its parameters.
        optimizer._numel_cache = None


@on_cpu
def reset_replaced(optimizer: Any, replaced: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Replace parameters, given as (old, new) by name, in an optimizer, and reset the state of these alone."""
    places = {id(old): (name, new) for name, (old, new) in replaced.items()}
    mapping = _StateMap(optimizer, places, (WidthGraph({}, {}, (), (), frozenset(), 0), {}, {}), "reset", None)
    state, made_once = getattr(optimizer, "state", {}), any(True for _ in inside(optimizer))
    for old, new in replaced.values():
        kept = state.pop(old, None)
        if made_once and kept is not None:
            state[new] = mapping.mapped(old, kept)
    replace_in_groups(optimizer, {key: new for key, (_, new) in places.items()}, mapping.mapped)
    if isinstance(optimizer, torch.optim.LBFGS) and replaced:
        # Its state is that of all parameters together.
        state.clear()
        optimizer._numel_cache = None


class _StateMap:
    """Maps an optimizer's state of parameters through one growth event; for the arguments see `follow_once`."""

    def __init__(
        self,
        optimizer: Any,
        places: Mapping[int, tuple[str, Tensor]],
        widths: tuple[WidthGraph, Mapping[str, int], Mapping[str, int]],
        inheritance: Inheritance,
        carry: Carry | None,
    ) -> None:
        inherits = inheritance in ("inherit", "reset_new")
        self.rule = carry if inherits and carry is not None else Carry()
        self._lars = optimizer if inherits and isinstance(optimizer, LARS) else None
        self._optimizer, self._places, self._widths = optimizer, places, widths
        self._copies, self._positive = _meanings(optimizer)
        self._resets, self._resets_new = inheritance == "reset", inheritance == "reset_new"
        groups = getattr(optimizer, "param_groups", ())
        self._settings = {param: group for group in groups for param in group["params"]}

    def mapped(self, param: Tensor, value: Any, key: str = "") -> Any:
        """Map the state of a parameter, replaced or not; `key` names state that is no dictionary of named entries."""
        if id(param) not in self._places:
            return _mapped(value, param.shape, param.shape, partial(self._rescaled, param), key)
        new = self._places[id(param)][1]
        return _mapped(value, param.shape, new.shape, partial(self._carried, param), key)

    def _carried(self, param: Tensor, key: str, value: Tensor) -> Tensor:
        new = self._new(param, key, value)
        set_aside(value)
        return new

    def _new(self, param: Tensor, key: str, value: Tensor) -> Tensor:
        name, new = self._places[id(param)]
        value, power = whole(value), _power(self._optimizer, key)
        rule = self.rule if power is not None else Carry()

        def place(carry: Carry, tensor: Tensor, power: int = 0) -> Tensor:
            return carry.carried(tensor, name, *self._widths, power)

        if self._resets:
            if key in self._copies:
                return new.detach().to(value.dtype, copy=True)
            return torch.zeros_like(new, dtype=value.dtype)
        carried = place(rule, value, power or 0)
        if self._lars is not None:
            carried = self._lars.inherited(whole(param.detach()), whole(new.detach()), value, carried)
        initial = _initial(self._optimizer, key, self._settings.get(param, {}))
        if key in self._positive:
            initial = float(value.mean())
        if initial or self._resets_new:
            placement = Carry() if self._resets_new else rule
            carried = torch.where(place(placement, torch.ones_like(value)) == 0, initial, carried)
        if key in self._copies:
            carried = _moved_along(value, whole(param.detach()), whole(new.detach()), partial(place, Carry()))
        fits = carried.dtype == value.dtype and carried.device == new.device and carried.stride() == new.stride()
        if fits and not is_piece(new):
            return carried
        result = torch.empty_like(new, dtype=value.dtype)
        return result.copy_(placed(carried, result))

    def _rescaled(self, param: Tensor, key: str, value: Tensor) -> Tensor:
        """Rescale the state of a parameter that was not replaced, but whose gradient changed by a factor."""
        power = None if self._lars is not None and param.dim() > 1 else _power(self._optimizer, key)
        return value * self.rule.every**power if power else value


@on_cpu
def rescale_state(optimizer: Optimizer, factors: Mapping[Tensor, tuple[Tensor, Tensor]]) -> None:
    """Rescale the state of parameters that were multiplied by factors, in place, so that training continues unchanged.

    Args:
        optimizer: any optimizer.
        factors: for each parameter, the factor on it and the factor on its gradient from now on.
    """
    copies, _ = _meanings(optimizer)

    def rescaled(param: Tensor, key: str, value: Tensor) -> Tensor:
        (weight, gradient), power = factors[param], _power(optimizer, key)
        if key in copies:
            return laid_out(value * replicated(weight, value), value)
        if power is None:
            return value
        moved = laid_out(value * replicated(gradient**power, value), value)
        if isinstance(optimizer, LARS):
            moved = optimizer.inherited(param / weight, param, value, moved)
        return moved.to(value)

    for param in factors:
        if param in optimizer.state:
            kept = optimizer.state[param]
            optimizer.state[param] = _mapped(kept, param.shape, param.shape, partial(rescaled, param))


def check_inheritance(inheritance: str) -> None:
    """Raise a ValueError if there is no such `Inheritance`."""
    one_of(get_args(Inheritance), optimizer_state=inheritance)


def check_following(optimizer: Optimizer, places: Mapping[int, tuple[str, Tensor]], inheritance: Inheritance) -> None:
    """Check that an optimizer's state can be carried through an event that replaces parameters.

    `places` maps a parameter's `id` to its name and replacement.

    Raises:
        ValueError: state that is not reset is neither of its parameter's shape nor a single number; or the optimizer
            groups parameters by size in a container that growlab cannot carry.
    """
    if problem := cannot_replace(optimizer, places):
        raise ValueError(f"{problem}.")
    if inheritance not in ("reset", "auto") and (problem := _cannot_follow(optimizer, places)):
        raise ValueError(f"{problem}; set optimizer_state='reset' (of Grower.follow: state='reset').")


def _cannot_follow(optimizer: Any, places: Mapping[int, tuple[str, Tensor]]) -> str:
    """Describe state of a replaced parameter that cannot be mapped to another shape, or return ""."""
    for param, state in getattr(optimizer, "state", {}).items():
        # L-BFGS keeps the state of all parameters with the first.
        of_all = bool(places) and isinstance(optimizer, torch.optim.LBFGS)
        if not isinstance(param, Tensor) or not (of_all or id(param) in places):
            continue
        for key, value in state.items() if isinstance(state, dict) else [("", state)]:
            if misfit := _misfit(value, param.shape):
                name = places[id(param)][0] if id(param) in places else "the network"
                return (
                    f"{type(optimizer).__name__}'s {key!r} of {name} is {misfit}, the parameter {tuple(param.shape)}: "
                    "growlab cannot carry it through growth"
                )
    return ""


def running_gradients(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    """Return the optimizer's running means of gradients, by parameter; parameters without one are left out."""
    means: dict[Tensor, Tensor] = {}
    for group in getattr(optimizer, "param_groups", ()):
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items() if isinstance(state, dict) else ():
                shaped = isinstance(value, Tensor) and value.shape == parameter.shape
                if shaped and _power(optimizer, key) == 1:
                    means.setdefault(parameter, value)
    return means


# Meaning of state ----------------------------------------------------------------------------------------


def _power(optimizer: Optimizer, key: str) -> int | None:
    """Return the power of the gradient that state of this name scales with; None if unknown."""
    if isinstance(optimizer, torch.optim.RMSprop) and key == "momentum_buffer":
        # It accumulates gradients already divided by their root mean square.
        return 0
    if key in POWERS:
        return POWERS[key]
    # Similar names of other libraries: exp_avg_diff, exp_avg_lr_1, exp_grad_norm_sq, ...
    if key.endswith(("_sq", "_var")) or "square" in key or "variance" in key:
        return 2
    return 1 if "momentum" in key or key.startswith(("exp_avg", "grad")) or key.endswith("_grad") else None


def _meanings(optimizer: Any) -> tuple[set[str], set[str]]:
    """Names of state of unknown meaning that stores weights, and of such state that is positive everywhere.

    Stored present or past weights are recognised by their cosine with the parameters. Positive state is a scale or a
    rate, such as a preconditioner initialised with ones, for which 0 may be invalid.
    """
    sums_by_key: dict[str, list[Tensor]] = {}

    def note(param: Tensor, key: str, value: Tensor) -> Tensor:
        # A step counter has the shape of a scalar parameter, and a cosine of two numbers shows nothing.
        if _power(optimizer, key) is None and param.dim() and value.numel() and value.dtype is not torch.bool:
            one, other = (
                (torch.view_as_real(t) if t.is_complex() else t).float() for t in map(whole, (value, param.detach()))
            )
            sums = (one * other).sum(), one.square().sum(), other.square().sum(), one.amin().sign().float()
            sums_by_key.setdefault(key, []).append(torch.stack(sums).cpu())
        return value

    state = getattr(optimizer, "state", {})
    of_params = [(param, kept, "") for param, kept in state.items() if isinstance(param, Tensor)]
    for param, kept, name in (*of_params, *_kept_by_parameter(optimizer)):
        _mapped(kept, param.shape, param.shape, partial(note, param), name)
    copies, positive = {"ax"} if isinstance(optimizer, torch.optim.ASGD) else set(), set()
    for key, sums in sums_by_key.items():
        product, *squares, _ = torch.stack(sums).sum(0).tolist()
        if product > _SIMILAR * (squares[0] * squares[1]) ** 0.5 > 0:
            copies.add(key)
        if all(of_param[3] > 0 for of_param in sums):
            positive.add(key)
    return copies, positive


def _moved_along(kept: Tensor, before: Tensor, after: Tensor, place: Callable[[Tensor], Tensor]) -> Tensor:
    """Map a stored copy of weights: its difference from the weights is scaled like them, and 0 at new entries."""
    old, new = place(before.to(kept)), after.to(kept)
    scale = (new * old.conj()).sum() / old.abs().square().sum().clamp(min=torch.finfo(old.dtype).tiny)
    ratio = new / old
    # For weights of zero, and small ones with added noise, the scale of the whole tensor is more reliable.
    return new + place(kept - before.to(kept)) * torch.where((ratio - scale).abs() <= scale.abs(), ratio, scale)


def _initial(optimizer: Optimizer, key: str, settings: Mapping[str, Any]) -> float:
    """Return the initial value of state of this name, before the first step."""
    setting = ""
    if isinstance(optimizer, torch.optim.Rprop) and key == "step_size":
        setting = "lr"
    elif isinstance(optimizer, torch.optim.Adagrad) and key == "sum":
        setting = "initial_accumulator_value"
    return float({**optimizer.defaults, **settings}[setting]) if setting else 0.0


# Contents of state ---------------------------------------------------------------------------------------


def _mapped(value: Any, shape: torch.Size, new_shape: torch.Size, change: Change, key: str = "") -> Any:
    """Copy a parameter's state with tensors of the parameter's shape changed, and the shape itself replaced.

    `change` is called with the innermost name of a tensor (`key` for `value` itself) and the tensor.
    """
    if isinstance(value, Tensor):
        return change(key, value) if value.shape == shape else value
    if isinstance(value, torch.Size):
        return new_shape if value == shape else value
    if isinstance(value, dict):
        new = copy.copy(value)
        for name, one in value.items():
            new[name] = _mapped(one, shape, new_shape, change, name if isinstance(name, str) else key)
        return new
    if not isinstance(value, (list, tuple, deque)):
        return value
    items = [_mapped(one, shape, new_shape, change, key) for one in value]
    if isinstance(value, tuple):
        return _rebuilt(value, items)
    sequence: Any = copy.copy(value)
    sequence.clear()
    sequence.extend(items)
    return sequence


def _rebuilt(value: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _misfit(value: Any, shape: torch.Size) -> str:
    """Describe a value by its shape or class if `_mapped` cannot map it to another shape, else return "".

    Single numbers fit any parameter; objects that contain tensors or arrays may depend on their shapes.
    """
    if isinstance(value, Tensor):
        return "" if value.shape == shape or value.numel() <= 1 else str(tuple(value.shape))
    if isinstance(value, (dict, list, tuple, deque)):
        items = (*value.keys(), *value.values()) if isinstance(value, dict) else value
        return next((misfit for item in items if (misfit := _misfit(item, shape))), "")
    arrays = (isinstance(one, Tensor) or hasattr(one, "__array_interface__") for one in _nested(value, True))
    return type(value).__name__ if any(arrays) else ""


def tensors_within(value: Any, objects: bool = True) -> Iterator[Tensor]:
    """Iterate over all tensors in a value and its containers, in order, and with `objects` in attributes of objects."""
    return (one for one in _nested(value, objects) if isinstance(one, Tensor))


def _nested(value: Any, objects: bool, seen: set[int] | None = None) -> Iterator[Any]:
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, (type, str, bytes, int, float)) or id(value) in seen:
        return
    seen.add(id(value))
    yield value
    inner: Any = ()
    if isinstance(value, dict):
        inner = (*value.keys(), *value.values())
    elif isinstance(value, (list, tuple, deque, set, frozenset)):
        inner = value
    elif objects and not hasattr(value, "__array_interface__"):
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        inner = [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]
    for one in inner:
        yield from _nested(one, objects, seen)


# Containers other than the groups' parameters --------------------------------------------------------------


def replace_in_groups(
    optimizer: Any, replaced: Mapping[int, Tensor], moved: Moved = lambda parameter, value, name: value
) -> None:
    """Replace parameters, by their `id`, in an optimizer's groups and its other containers.

    `moved` is applied to the values of dictionaries whose keys are replaced.
    """
    # A wrapper of another optimizer shares its groups, which may be updated already.
    for group in getattr(optimizer, "param_groups", ()):
        group["params"][:] = [replaced.get(id(param), param) for param in group["params"]]
    for owner, name, value in _elsewhere(optimizer):
        if (exchanged := _exchanged(value, replaced, moved, name, set())) is not value:
            owner[name] = exchanged


def inside(holder: Any) -> Iterator[Optimizer]:
    """Iterate over the optimizers in an object's attributes, and in lists and dictionaries there, as in a wrapper."""
    for value in getattr(holder, "__dict__", {}).values():
        values = value.values() if isinstance(value, dict) else value
        for one in values if isinstance(value, (list, tuple, dict)) else (value,):
            if isinstance(one, Optimizer):
                yield one


def keeps_elsewhere(optimizer: Optimizer, wanted: Container[int]) -> str:
    """Name of an optimizer's attribute or group entry that contains parameters with these `id`s; "" if none."""
    for _, name, value in _elsewhere(optimizer):
        if any(id(tensor) in wanted for tensor in tensors_within(value, objects=False)):
            return name
    return ""


def cannot_replace(optimizer: Optimizer, wanted: Container[int]) -> str:
    """Describe a container that would not fit other shapes of the parameters with these `id`s; "" if all would."""
    for parameter, kept, name in _kept_by_parameter(optimizer):
        if id(parameter) in wanted and (misfit := _misfit(kept, parameter.shape)):
            return (
                f"{type(optimizer).__name__} has {misfit} for a parameter {tuple(parameter.shape)} in {name!r}, which "
                "growlab cannot carry through growth"
            )
    groups = [group["params"] for group in getattr(optimizer, "param_groups", ())]
    lists = [*groups, [param for group in groups for param in group]]
    lists = [params for params in lists if any(id(param) in wanted for param in params)]
    own = {id(param) for params in groups for param in params}
    for _, name, value in _elsewhere(optimizer):
        how = ""
        for container in _containers(value):
            if isinstance(container, dict) and _by_size(container, wanted):
                how = "groups parameters by their size in"
            elif any(_resembles(container, params, own) for params in lists):
                how = "keeps tensors like its parameters, outside of its state, in"
        if any(_joins(value, params, own) for params in lists):
            how = "keeps the elements of its parameters in one tensor in"
        if how:
            return f"{type(optimizer).__name__} {how} {name!r}, which growlab cannot carry through growth"
    return ""


def _by_size(container: dict[Any, Any], wanted: Container[int]) -> bool:
    by_size = [
        _is_size(key, tensor)
        for key, kept in container.items()
        for tensor in tensors_within(kept, objects=False)
        if id(tensor) in wanted
    ]
    # A single key that equals a size may be another number by chance.
    return bool(by_size) and all(by_size)


def _resembles(container: Any, params: Sequence[Tensor], own: Container[int]) -> bool:
    """Return True if a container has tensors of the parameters' shapes in their order, such as state by name."""
    if isinstance(container, dict) and any(isinstance(key, Tensor) for key in container):
        return False
    values = container.values() if isinstance(container, dict) else container
    items = [tensors for one in values if (tensors := [*tensors_within(one, objects=False)])]
    if len(items) != len(params) or any(id(tensor) in own for tensors in items for tensor in tensors):
        return False
    pairs = zip(items, params, strict=True)
    return all(any(t.shape == p.shape for t in tensors) and not _misfit(tensors, p.shape) for tensors, p in pairs)


def _joins(value: Any, params: Sequence[Tensor], own: Container[int]) -> bool:
    """Return True if a vector in the value has as many elements as all parameters together."""
    size = sum(param.numel() for param in params)
    vectors = [one for one in tensors_within(value, objects=False) if one.shape == (size,) and id(one) not in own]
    return len(params) > 1 and bool(vectors)


def _elsewhere(optimizer: Optimizer) -> Iterator[tuple[Any, Any, Any]]:
    """Yield (container, name, value) of attributes and of entries of groups and state that torch does not define."""
    if isinstance(optimizer, Regional):
        # Growlab's optimizers are updated by `set_regions`.
        return
    for group in getattr(optimizer, "param_groups", ()):
        yield from ((group, name, value) for name, value in list(group.items()) if name != "params")
    state = getattr(optimizer, "state", {})
    yield from ((state, name, value) for name, value in list(state.items()) if not isinstance(name, Tensor))
    attributes = vars(optimizer)
    yield from ((attributes, name, value) for name, value in list(attributes.items()) if name not in _KNOWN)


def _kept_by_parameter(optimizer: Optimizer) -> Iterator[tuple[Tensor, Any, str]]:
    """Yield (parameter, value, name) of all dictionaries keyed by parameter other than `state`."""
    for _, name, value in _elsewhere(optimizer):
        for container in _containers(value):
            for key, kept in container.items() if isinstance(container, dict) else ():
                if isinstance(key, Tensor):
                    yield key, kept, name


def _containers(value: Any) -> Iterator[Any]:
    return (one for one in _nested(value, False) if isinstance(one, (list, tuple, dict, set)))


def _exchanged(value: Any, replaced: Mapping[int, Tensor], moved: Moved, name: str, seen: set[int]) -> Any:
    if isinstance(value, Tensor):
        return replaced.get(id(value), value)
    if not isinstance(value, (list, tuple, dict, set)) or id(value) in seen:
        return value
    seen.add(id(value))
    items: list[Any]
    if isinstance(value, dict):
        before = [one for pair in value.items() for one in pair]
        pairs = []
        for key, kept in value.items():
            new = _exchanged(kept, replaced, moved, name, seen)
            is_replaced = isinstance(key, Tensor) and id(key) in replaced
            pairs.append((replaced[id(key)], moved(key, new, name)) if is_replaced else (key, new))
        items, after = pairs, [one for pair in pairs for one in pair]
    else:
        before = list(value)
        after = items = [_exchanged(one, replaced, moved, name, seen) for one in value]
    if all(new is old for new, old in zip(after, before, strict=True)):
        return value
    if isinstance(value, tuple):
        return _rebuilt(value, items)
    if isinstance(value, list):
        value[:] = items
    else:
        value.clear()
        value.update(items)
    return value


def _is_size(key: Any, tensor: Tensor) -> bool:
    if isinstance(key, tuple):
        # The size may be part of a key, together with a dtype for example.
        return key == tuple(tensor.shape) or any(isinstance(one, torch.Size) for one in key)
    return isinstance(key, int) and tensor.numel() > 1 and key == tensor.numel()


# State by parameter name ----------------------------------------------------------------------------------


def named_state(optimizer: Optimizer, network: nn.Module) -> dict[str, Any]:
    """Copy an optimizer's state to the CPU, in plain containers, by the names of a network's parameters.

    Args:
        optimizer: any optimizer.
        network: the network that it trains; state of other parameters is left out.

    Returns:
        "class": the optimizer's class; "state": state by parameter name; "entries": state of no parameter. A file of it
        can be read with `torch.load(weights_only=True)`.

    Raises:
        ValueError: state contains an object other than tensors, numbers and plain containers.
    """
    kind = type(optimizer).__name__
    state = {
        name: _plain(dict(optimizer.state[parameter]), f"{kind}'s state of {name}")
        for name, parameter in network.named_parameters()
        if parameter in optimizer.state
    }
    others = {name: value for name, value in optimizer.state.items() if not isinstance(name, Tensor)}
    entries = {name: _plain(value, f"{kind}'s {name!r}") for name, value in others.items()}
    return {"class": _class_of(optimizer), "state": state, "entries": entries}


@on_cpu
def load_named_state(optimizer: Optimizer, network: nn.Module, saved: Mapping[str, Any]) -> None:
    """Load state saved by `named_state` into an optimizer; its settings and groups are unchanged.

    Args:
        optimizer: an optimizer of the same class.
        network: the network that it trains; parameters without saved state start without state.
        saved: result of `named_state`.

    Raises:
        ValueError: it belongs to another class of optimizer, or to parameters of other shapes.
    """
    if saved["class"] != _class_of(optimizer):
        raise ValueError(f"it is of {saved['class']}, not of {_class_of(optimizer)}.")
    names = {parameter: name for name, parameter in network.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[Any, Any] = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    state |= saved.get("entries", {})
    for index, parameter in enumerate(parameters):
        name = names.get(parameter, "")
        if name in saved["state"]:
            state[index] = saved["state"][name]
            for key, value in state[index].items():
                if isinstance(value, Tensor) and value.numel() != 1 and value.shape != parameter.shape:
                    raise ValueError(f"{key} of {name} is {list(value.shape)}, not {list(parameter.shape)}.")
    # `load_state_dict` moves tensors to the parameters' devices and precisions.
    optimizer.load_state_dict({**optimizer.state_dict(), "state": copy.deepcopy(state)})


def _class_of(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _plain(value: Any, what: str) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, Mapping):
        return {key: _plain(one, what) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one, what) for one in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"{what} contains a {type(value).__name__}.")

"""Optimizers that follow a network through growth events and loading."""

import copy
import logging
import re
import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from growlab.base.errors import UserError
from growlab.base.pieces import laid_out, placed, replicated, set_aside, whole
from growlab.optim.carry import (
    Inheritance,
    cannot_replace,
    check_following,
    follow_once,
    keeps_elsewhere,
    normalises,
    replace_in_groups,
    rescale_state,
    running_gradients,
    tensors_within,
)
from growlab.optim.muon import Muon
from growlab.optim.regional import Regional
from growlab.optim.settings import set_params
from growlab.widths import Carry, WidthGraph
from growlab.widths.unchanged import is_overwritten

log = logging.getLogger(__name__)

# Attributes of torch's Optimizer with its hooks; a wrapper may delegate to those of the optimizer inside.
_STEP_HOOKS, _LOAD_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_load_state_dict_pre_hooks"


class Followers:
    """Optimizers of a growing network, kept by weak references.

    The Grower's `on_step` is called around the steps of the network's optimizer: of the last one added if there are
    several.
    """

    def __init__(self, owner: Any) -> None:
        # A strong reference would keep the owner alive with copies of its optimizers.
        self._owner = weakref.ref(owner)
        self._known: list[weakref.ref[Optimizer]] = []
        self._inheritance: dict[int, Inheritance] = {}
        self._announced: set[int] = set()
        self._handles: list[RemovableHandle] = []
        self._past: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        # By the id of an optimizer: state to load once the network has the same number of parameters.
        self._pending: dict[int, dict[str, Any]] = {}

    @property
    def optimizers(self) -> list[Optimizer]:
        """Optimizers that are still in use, in the order in which they were added."""
        return [optimizer for known in self._known if (optimizer := known()) is not None]

    @property
    def _grower(self) -> Any:
        return self._owner()

    def add(self, optimizer: Optimizer, inheritance: Inheritance, announced: bool = False) -> None:
        """Add an optimizer, and replace its parameters from before an event by the network's present ones.

        Parameters of blocks that are not in the network at present are removed. With `announced`, the loop itself calls
        `before_step` once gradients are computed.
        """
        now = dict(self._grower.network.named_parameters())
        past = {key: name for key, (parameter, name) in self._past.items() if parameter() is not None}
        replace_parameters(optimizer, {key: now[name] for key, name in past.items() if name in now})
        remove_parameters(optimizer, {key for key, name in past.items() if name not in now})
        if not any(known is optimizer for known in self.optimizers):
            # A loop that announces all its optimizers may include those of other networks, as in a GAN. A wrapper
            # without groups has an optimizer inside, which is added too.
            if not announced and hasattr(optimizer, "param_groups") and not _has_any(optimizer, now.values()):
                log.warning(
                    "%s contains no parameter of the growing network: is it the optimizer of another network?",
                    type(optimizer).__name__,
                )
            self._known.append(weakref.ref(optimizer))
            # A deleted optimizer may have had the same id.
            self._pending.pop(id(optimizer), None)
            (self._announced.add if announced else self._announced.discard)(id(optimizer))
            self._listen(optimizer)
        self._inheritance[id(optimizer)] = inheritance
        self.update_regions(optimizer)

    def _listen(self, optimizer: Optimizer) -> None:
        """Register hooks on an optimizer, if it supports them: wrappers may not."""
        if _STEP_HOOKS in vars(optimizer):
            if id(optimizer) not in self._announced:
                self._handles.append(optimizer.register_step_pre_hook(partial(self._step, False)))
            modules = (kind.__module__ for kind in type(optimizer).__mro__ if kind is not Optimizer)
            # Only torch's and growlab's classes, and those derived from them.
            if normalises(optimizer) and any(m.startswith(("torch.optim.", "growlab.optim.")) for m in modules):
                self._handles += Compensated(optimizer, self._owner).handles
            self._handles.append(optimizer.register_step_post_hook(partial(self._step, True)))
        if _LOAD_HOOKS in vars(optimizer):
            self._handles.append(optimizer.register_load_state_dict_pre_hook(self._wait_for_network))

    def check(self, before: Mapping[str, int], after: Mapping[str, int]) -> None:
        """Raise a ValueError before a growth event if an optimizer's state cannot be carried."""
        graph = self._grower.graph
        places = {
            id(parameter): (name, parameter)
            for name, parameter in self._grower.network.named_parameters()
            # An event may rescale any parameter.
            if name in graph.axes and dict(before) != dict(after)
        }
        for optimizer in self.optimizers:
            check_following(optimizer, places, self._inheritance[id(optimizer)])

    def carry(
        self,
        replaced: Mapping[str, tuple[Tensor, Tensor]],
        before: Mapping[str, int],
        after: Mapping[str, int],
        carry: Carry,
        graph: WidthGraph | None = None,
    ) -> None:
        """Carry all optimizers, and accumulated gradients, through a growth event; see `growlab.optim.follow`.

        State of other networks' parameters is unchanged. `graph` has the event's groups; None: the Grower's graph.

        Raises:
            ValueError: an optimizer's state cannot be carried.
        """
        network, graph = self._grower.network, graph or self._grower.graph
        _drop_overwritten(old for old, _ in replaced.values())
        _drop_overwritten(network.parameters())
        own = {id(old) for old, _ in replaced.values()} | {id(p) for p in network.parameters()}
        done = dict[int, tuple[Any, Any]]()
        for optimizer in self.optimizers:
            state = getattr(optimizer, "state", {})
            others = {param: entries for param, entries in state.items() if id(param) not in own}
            inheritance = self._inheritance[id(optimizer)]
            follow_once(optimizer, replaced, (graph, before, after), inheritance, carry, done)
            state.update(others)
            self.update_regions(optimizer)
        for name, (old, new) in replaced.items():
            if isinstance(old, nn.Parameter) and old.grad is not None:
                gradient = carry.carried(whole(old.grad).to_dense(), name, graph, before, after)
                sparse = old.grad.is_sparse
                new.grad = (
                    _rows_of(gradient, old.grad) if sparse else torch.empty_like(new).copy_(placed(gradient, new))
                )
                set_aside(old.grad)
        for name, parameter in network.named_parameters():
            if carry.every != 1.0 and name not in replaced and parameter.grad is not None:
                parameter.grad.mul_(carry.every)
        self.forget({name: old for name, (old, _) in replaced.items()})

    # State made in inference mode could not be trained.
    @torch.inference_mode(False)
    def rescale(self, factors: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Rescale state and gradients by factors on a parameter and on its gradient, given by the parameter's name."""
        named = dict(self._grower.network.named_parameters())
        by_parameter: dict[Tensor, tuple[Tensor, Tensor]] = {
            named[name]: factor for name, factor in factors.items() if name in named
        }
        # Wrappers share the state of the optimizer inside.
        for optimizer in {id(o.state): o for o in self.optimizers if hasattr(o, "state")}.values():
            rescale_state(optimizer, by_parameter)
        _drop_overwritten(by_parameter)
        for parameter, (_, gradient) in by_parameter.items():
            if parameter.grad is not None:
                # Sparse gradients do not broadcast.
                scaled = parameter.grad * replicated(gradient, parameter).expand_as(parameter)
                parameter.grad = laid_out(scaled, parameter)

    def exchange(self, past: Mapping[str, Tensor]) -> None:
        """Replace the `past` parameters, by name, after the network was resized to load a checkpoint."""
        now = dict(self._grower.network.named_parameters())
        replaced = {id(old): now[name] for name, old in past.items() if name in now and old is not now[name]}
        for optimizer in self.optimizers:
            changed = past.keys() != now.keys() and _has_any(optimizer, past.values())
            replace_parameters(optimizer, replaced)
            if changed:
                order_parameters(optimizer, past, now)
            pending = self._pending.get(id(optimizer))
            if pending is not None and _sizes(pending) == _sizes(optimizer.state_dict()):
                optimizer.load_state_dict(self._pending.pop(id(optimizer)))
            self.update_regions(optimizer)
        self.forget(past)

    def _wait_for_network(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        """Defer loading state of another number of parameters until the network has that many."""
        self._pending.pop(id(optimizer), None)
        current, owner = optimizer.state_dict(), self._owner()
        saved, own = _sizes(state), _sizes(current)
        if owner is None or not owner.parts or saved == own or len(saved) != len(own):
            return None
        self._pending[id(optimizer)] = state
        return current

    def forget(self, past: Mapping[str, Tensor]) -> None:
        """Record which of these parameters, by name, the network no longer has."""
        now = dict(self._grower.network.named_parameters())
        self._past = {key: known for key, known in self._past.items() if known[0]() is not None}
        gone = {name: old for name, old in past.items() if old is not now.get(name)}
        self._past |= {id(old): (weakref.ref(old), name) for name, old in gone.items()}

    def update_regions(self, optimizer: Optimizer) -> None:
        """Set the regions of a growlab optimizer, and the rate scale of output layers."""
        if not isinstance(optimizer, Regional) or optimizer.rule is None:
            return
        grower = self._grower
        named, scales = dict(grower.network.named_parameters()), dict[Tensor, float]()
        for layer in [
            layer for layer in grower.graph.layers if layer.is_output and optimizer.divide_output_lr_by_fan_in
        ]:
            scale = 1.0 / grower.graph.fan_in(layer, grower.seed_widths)
            scales |= {named[name]: scale for name in (layer.weight, *layer.emitters) if name in named}
        optimizer.set_regions({named[name]: region for name, region in grower.regions().items()}, scales)

    def gradients(self) -> dict[str, Tensor]:
        """Return the optimizers' running means of gradients, by parameter name."""
        names: dict[Tensor, str] = {p: name for name, p in self._grower.network.named_parameters()}
        means = {p: mean for optimizer in self.optimizers for p, mean in running_gradients(optimizer).items()}
        return {names[parameter]: mean for parameter, mean in means.items() if parameter in names}

    def normalised(self) -> frozenset[str]:
        """Names of parameters whose optimizers normalise gradients: all except those known not to."""
        normalised, others = set[int](), set[int]()
        for optimizer in self.optimizers:
            (normalised if normalises(optimizer) else others).update(map(id, _parameters(optimizer)))
        # A wrapper of SGD, such as Lookahead, has the same parameters.
        normalised -= others
        return frozenset(name for name, p in self._grower.network.named_parameters() if id(p) in normalised)

    def before_step(self, optimizer: Optimizer) -> None:
        """Call the parts' and the owner's hooks before a step of an announced optimizer; others call them in `step`."""
        if id(optimizer) in self._announced:
            self._step(False, optimizer)

    def rebind(self, owner: Any, memo: dict[int, Any]) -> None:
        """Attach copies of the optimizers to a copy of the Grower, in the `copy.deepcopy` with this memo."""
        self._owner, followers = weakref.ref(owner), self.optimizers
        inheritance, pending = self._inheritance, self._pending
        self._known, self._handles, self._past, self._inheritance, self._pending = [], [], {}, {}, {}
        for original in followers:
            # Hooks of an optimizer are not copied.
            twin = copy.deepcopy(original, memo)
            self.add(twin, inheritance[id(original)], id(original) in self._announced)
            if id(original) in pending:
                self._pending[id(twin)] = pending[id(original)]

    def release(self) -> None:
        """Remove the hooks of all optimizers, and forget them."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._known, self._pending = [], [], {}

    def check_loaded(self) -> None:
        """Raise a UserError if an optimizer has loaded state of more or fewer parameters than it now has."""
        for optimizer in self.optimizers:
            if (pending := self._pending.get(id(optimizer))) is not None:
                raise UserError(
                    f"{type(optimizer).__name__} was given the state of {sum(_sizes(pending))} parameters, and has "
                    f"{sum(_sizes(optimizer.state_dict()))}: let the network and the Grower load their state too."
                )

    def _step(self, after: bool, optimizer: Optimizer, *_: Any) -> None:
        owner = self._owner()
        if self._pending:
            self.check_loaded()
        if owner is None:
            return
        for part in owner.parts:
            (part.after_update if after else part.before_update)(owner, optimizer)
        if optimizer is self._leading():
            owner.on_step(after)

    def _leading(self) -> Optimizer | None:
        if len(self._known) == 1:
            return self._known[0]()
        # A wrapper without hooks does not report its steps.
        hooked = (o for o in reversed(self.optimizers) if _STEP_HOOKS in vars(o))
        return next((o for o in hooked if _has_any(o, self._grower.network.parameters())), None)


def _drop_overwritten(parameters: Iterable[Tensor]) -> None:
    """Remove gradients that a later replay of a CUDA graph has overwritten."""
    for parameter in parameters:
        if parameter.grad is not None and is_overwritten(parameter.grad):
            parameter.grad = None


def _rows_of(gradient: Tensor, sparse: Tensor) -> Tensor:
    """Convert a dense gradient to a sparse one with the indices of another: an embedding's rows do not change."""
    indices = sparse.coalesce().indices()
    values = gradient[tuple(indices)]
    return torch.sparse_coo_tensor(indices, values, gradient.shape, check_invariants=True, is_coalesced=True)


def _sizes(state: Mapping[str, Any]) -> list[int]:
    """Number of parameters in each group of an optimizer's state_dict."""
    return [len(group["params"]) for group in state["param_groups"]]


def copy_state(optimizer: Optimizer, sources: Mapping[Tensor, Tensor]) -> None:
    """Copy optimizer state to the keys of `sources`, new parameters, from its values, their originals."""
    for parameter, source in sources.items():
        if source in optimizer.state:
            optimizer.state[parameter] = copy.deepcopy(optimizer.state[source])


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]]


def _has_any(optimizer: Optimizer, parameters: Iterable[Tensor]) -> bool:
    wanted = {id(parameter) for parameter in parameters}
    return any(id(parameter) in wanted for parameter in _parameters(optimizer))


def replace_parameters(optimizer: Optimizer, replaced: Mapping[int, Tensor]) -> None:
    """Replace an optimizer's parameters, by their `id`, after their network was resized to load a checkpoint.

    State that fits the new parameter is kept, since the optimizer may have loaded it before the network; other state
    belongs to the old one and is removed. A tensor fits if each of its dimensions has length 1 or that of a dimension
    of the parameter, as in Adafactor's rows and columns.

    Raises:
        UserError: other containers of the optimizer would not fit the new parameters.
    """
    if problem := cannot_replace(optimizer, replaced):
        raise UserError(f"{problem}.")
    replace_in_groups(optimizer, replaced)
    state = getattr(optimizer, "state", {})
    for old in [parameter for parameter in state if id(parameter) in replaced]:
        new, kept = replaced[id(old)], state.pop(old)
        if all(length in (1, *new.shape) for tensor in tensors_within(kept) for length in tensor.shape):
            state[new] = kept


def remove_parameters(optimizer: Optimizer, absent: Container[int]) -> None:
    """Remove the parameters with these `id`s from an optimizer's groups and its state."""
    for group in getattr(optimizer, "param_groups", ()):
        set_params(group, [parameter for parameter in group["params"] if id(parameter) not in absent])
    state = getattr(optimizer, "state", {})
    for parameter in [parameter for parameter in state if id(parameter) in absent]:
        del state[parameter]


def order_parameters(optimizer: Optimizer, past: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> None:
    """Add a network's new parameters to its optimizer, and sort each group in the network's order.

    The order is then that of an optimizer made for the present network. With several groups, a new parameter joins the
    group of parameters whose names differ from its name only in numbers: `layers.3.norm.weight` joins that of
    `layers.0.norm.weight`.

    Raises:
        UserError: names do not determine the group of a new parameter, or the optimizer keeps parameters outside of its
            groups too.
    """
    known = {id(p) for p in (*past.values(), *now.values())}
    if name := keeps_elsewhere(optimizer, known):
        raise UserError(
            f"{type(optimizer).__name__} keeps parameters in {name!r} too: growlab cannot know which of the parameters "
            "that are inserted during training belong there."
        )
    groups = optimizer.param_groups
    group_of = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
    # While the network is loading, an optimizer may have its present parameters already.
    past_groups = {name: group_of.get(id(now.get(name)), group_of.get(id(past[name]))) for name in past}
    if len(groups) == 1 and None not in past_groups.values():
        members = [list(now.values())]
    else:
        members = _by_group(past_groups, now, len(groups), type(optimizer).__name__)
    names = {id(p): name for name, p in now.items()}
    for group, own in zip(groups, members, strict=True):
        set_params(group, [*own, *(p for p in group["params"] if id(p) not in known)], names)
    remove_parameters(optimizer, known - {id(p) for p in now.values()})


def _by_group(
    past_groups: Mapping[str, int | None], now: Mapping[str, Tensor], num_groups: int, optimizer: str
) -> list[list[Tensor]]:
    """Assign parameters to groups, by the groups of previous ones of similar names (None: not in the optimizer)."""
    kinds: dict[str, set[int | None]] = {}
    for name, index in past_groups.items():
        kinds.setdefault(re.sub(r"\d+", "*", name), set()).add(index)
    members: list[list[Tensor]] = [[] for _ in range(num_groups)]
    for name, parameter in now.items():
        choices = {past_groups[name]} if name in past_groups else kinds.get(re.sub(r"\d+", "*", name), set())
        indices = choices - {None} or ({0} if num_groups == 1 else set())
        if len(choices) != 1 and len(indices) == 1:
            # A new name, or one of which some parameters are frozen.
            choices = indices if parameter.requires_grad else {None}
        if len(choices) != 1:
            raise UserError(
                "a parameter that is inserted during training joins the group of parameters of similar names; of "
                f"{optimizer}'s {num_groups} groups {len(choices) or 'none'} have parameters named like {name}: give "
                "it one group, or one for each kind of parameter."
            )
        (index,) = choices
        if index is not None:
            members[index].append(parameter)
    return members


class Compensated:
    """Divide an optimizer's steps on weights by the multipliers that the network applies to them (`Grower.divisors`).

    If the network uses m W, a step d of an optimizer that normalises gradients then moves m W by d, as without a
    multiplier. Decoupled weight decay is proportional to W already and is not divided:

        W <- (1 - decay) W + d / m
    """

    def __init__(self, optimizer: Optimizer, owner: Callable[[], Any]) -> None:
        self._owner = owner
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []
        self.handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._note),
            optimizer.register_step_post_hook(self._divide),
        ]

    @torch.no_grad()
    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        owner = self._owner()
        multipliers = {} if owner is None else owner.divisors()
        self._before = [
            (param, param * (1.0 - _decay(optimizer, group)), replicated(multipliers[param], param))
            for group in optimizer.param_groups
            for param in group["params"]
            if param in multipliers
        ]

    @torch.no_grad()
    def _divide(self, *_: Any) -> None:
        for param, kept, multipliers in self._before:
            # A closure may have computed the gradient within the step.
            if param.grad is not None:
                param.copy_(laid_out(kept + (param - kept) / multipliers, param))
        self._before = []


def _decay(optimizer: Optimizer, group: Mapping[str, Any]) -> float:
    """Return the fraction of a weight that decoupled weight decay removes in a step."""
    by_default = isinstance(optimizer, (torch.optim.Adafactor, torch.optim.Muon, Muon))
    decoupled = group.get("decoupled_weight_decay", by_default)
    return float(group["lr"]) * float(group["weight_decay"]) if decoupled else 0.0

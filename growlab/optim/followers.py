"""Optimizers that follow a network through growth events and loading."""

import copy
import logging
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from growlab.base.errors import UserError
from growlab.optim.compensated import Compensated, is_known
from growlab.optim.exchanging import exchange, order_parameters
from growlab.optim.regional import Regional
from growlab.optim.regions import Regions
from growlab.optim.state import (
    Inheritance,
    check_following,
    follow_once,
    normalises,
    rescale_state,
    running_gradients,
)
from growlab.widths import Carry, WidthGraph

log = logging.getLogger(__name__)

# Attributes of torch's Optimizer with its hooks; a wrapper of another optimizer may delegate to that one's.
_STEP_HOOKS, _LOAD_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_load_state_dict_pre_hooks"


class Owner(Protocol):
    """Protocol of the object that grows the network, a Grower."""

    network: nn.Module
    graph: WidthGraph
    seed_widths: dict[str, int]

    @property
    def parts(self) -> Sequence[Any]:
        """Parts, which may change the number of the network's parameters."""
        ...

    def regions(self) -> dict[str, Regions]:
        """Birth stages of the elements of parameters, as regions by name."""
        ...

    def divisors(self) -> Mapping[Tensor, Tensor]:
        """Divisors of the steps of optimizers that normalise gradients, by parameter; they broadcast."""
        ...

    def on_step(self, after: bool) -> None:
        """Act before (False) and after (True) each step of the network's optimizer."""
        ...


class Followers:
    """Optimizers of a growing network, kept by weak references.

    Args:
        owner: the Grower, kept by a weak reference; its `on_step` is called around the steps of the network's
            optimizer, the last one added if there are several.
    """

    def __init__(self, owner: Owner) -> None:
        # A strong reference would keep the owner alive with copies of its optimizers.
        self._owner = weakref.ref(owner)
        self._known: list[weakref.ref[Optimizer]] = []
        self._inheritance: dict[int, Inheritance] = {}
        self._announced: set[int] = set()
        self._handles: list[RemovableHandle] = []
        self._past: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        # By the id of an optimizer: state to load once the network has the same number of parameters.
        self._awaited: dict[int, dict[str, Any]] = {}

    @property
    def optimizers(self) -> list[Optimizer]:
        """Optimizers that are still in use, in the order in which they were added."""
        return [optimizer for known in self._known if (optimizer := known()) is not None]

    @property
    def _run(self) -> Owner:
        owner = self._owner()
        assert owner is not None
        return owner

    def add(self, optimizer: Optimizer, inheritance: Inheritance, announced: bool = False) -> None:
        """Add an optimizer; parameters that the network had before an event are exchanged for the present ones.

        Args:
            optimizer: any.
            inheritance: treatment of its state at an event, see `follow`.
            announced: the loop calls `before_step` itself, once gradients are computed.
        """
        now = dict(self._run.network.named_parameters())
        exchange(
            optimizer, {key: now[name] for key, (past, name) in self._past.items() if past() is not None}
        )
        if not any(known is optimizer for known in self.optimizers):
            own = {id(parameter) for parameter in now.values()}
            # A loop that announces all its optimizers may include those of other networks, as in a GAN.
            if not announced and not any(id(parameter) in own for parameter in _parameters(optimizer)):
                log.warning(
                    "%s holds no parameter of the network that grows and has nothing to follow: is it the optimizer of "
                    "another network?",
                    type(optimizer).__name__,
                )
            self._known.append(weakref.ref(optimizer))
            if announced:
                self._announced.add(id(optimizer))
            self._listen(optimizer)
        self._inheritance[id(optimizer)] = inheritance
        self.relabel(optimizer)

    def _listen(self, optimizer: Optimizer) -> None:
        """Register hooks on an optimizer, if it supports them: wrappers of other optimizers may not."""
        if _STEP_HOOKS in vars(optimizer):
            if id(optimizer) not in self._announced:
                self._handles.append(optimizer.register_step_pre_hook(partial(self._step, False)))
            if normalises(optimizer) and is_known(optimizer):
                self._handles += Compensated(optimizer, self._divisors).handles
            self._handles.append(optimizer.register_step_post_hook(partial(self._step, True)))
        if _LOAD_HOOKS in vars(optimizer):
            self._handles.append(optimizer.register_load_state_dict_pre_hook(self._await_network))

    def check(self, before: Mapping[str, int], after: Mapping[str, int]) -> None:
        """Check before a growth event that every optimizer can follow it.

        Raises:
            ValueError: an optimizer has state that cannot follow.
        """
        graph = self._run.graph
        places = {
            id(parameter): (name, parameter)
            for name, parameter in self._run.network.named_parameters()
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
    ) -> None:
        """Carry all optimizers, and accumulated gradients, through a growth event.

        State of other networks' parameters is unchanged.

        Raises:
            ValueError: an optimizer has state that cannot follow.
        """
        network, graph = self._run.network, self._run.graph
        own = {id(old) for old, _ in replaced.values()} | {id(p) for p in network.parameters()}
        done = dict[int, tuple[Any, Any]]()
        for optimizer in self.optimizers:
            state = getattr(optimizer, "state", {})
            others = {p: of_it for p, of_it in state.items() if id(p) not in own}
            inheritance = self._inheritance[id(optimizer)]
            follow_once(optimizer, replaced, (graph, before, after), inheritance, carry, done)
            state.update(others)
            self.relabel(optimizer)
        for name, (old, new) in replaced.items():
            if isinstance(old, nn.Parameter) and old.grad is not None:
                gradient = carry.carried(old.grad.to_dense(), name, graph, before, after)
                new.grad = (
                    _rows_of(gradient, old.grad)
                    if old.grad.is_sparse
                    else torch.empty_like(new).copy_(gradient)
                )
        for name, parameter in network.named_parameters():
            if carry.every != 1.0 and name not in replaced and parameter.grad is not None:
                parameter.grad.mul_(carry.every)
        self.forget({name: old for name, (old, _) in replaced.items()})

    # State must be usable in training even if it is called under inference mode.
    @torch.inference_mode(False)
    def rescale(self, factors: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Rescale state and accumulated gradients of parameters that were multiplied by factors.

        Args:
            factors: by name, the factor on a parameter and the factor on its gradient from now on.
        """
        named = dict(self._run.network.named_parameters())
        own: dict[Tensor, tuple[Tensor, Tensor]] = {
            named[name]: factor for name, factor in factors.items() if name in named
        }
        states = {
            id(optimizer.state): optimizer for optimizer in self.optimizers if hasattr(optimizer, "state")
        }
        for optimizer in states.values():
            rescale_state(optimizer, own)
        for parameter, (_, gradient) in own.items():
            if parameter.grad is not None:
                # Sparse gradients do not broadcast.
                parameter.grad = parameter.grad * gradient.expand_as(parameter)

    def exchange(self, past: Mapping[str, Tensor]) -> None:
        """Exchange the parameters of all optimizers after the network was resized to load a checkpoint.

        Args:
            past: the network's previous parameters, by name.
        """
        now = dict(self._run.network.named_parameters())
        for optimizer in self.optimizers:
            own = {id(p) for p in past.values()}
            holds_own = any(id(p) in own for p in _parameters(optimizer))
            exchange(
                optimizer,
                {id(old): now[name] for name, old in past.items() if name in now and old is not now[name]},
            )
            if past.keys() != now.keys() and holds_own:
                order_parameters(optimizer, past, now)
            awaited = self._awaited.get(id(optimizer))
            if awaited is not None and _sizes(awaited) == _sizes(optimizer.state_dict()):
                optimizer.load_state_dict(self._awaited.pop(id(optimizer)))
            self.relabel(optimizer)
        self.forget(past)

    def _await_network(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        """Defer loading a state for a different number of parameters until the network has that many."""
        self._awaited.pop(id(optimizer), None)
        now = optimizer.state_dict()
        saved, own = _sizes(state), _sizes(now)
        owner = self._owner()
        if owner is None or not owner.parts or saved == own or len(saved) != len(own):
            return None
        self._awaited[id(optimizer)] = state
        return now

    def forget(self, past: Mapping[str, Tensor]) -> None:
        """Record which of these parameters, by name, are no longer the network's."""
        now = dict(self._run.network.named_parameters())
        self._past = {key: known for key, known in self._past.items() if known[0]() is not None}
        gone = {name: old for name, old in past.items() if name in now and old is not now[name]}
        self._past |= {id(old): (weakref.ref(old), name) for name, old in gone.items()}

    def relabel(self, optimizer: Optimizer) -> None:
        """Set the regions of a growlab optimizer, and the rate scale of output layers."""
        if not isinstance(optimizer, Regional) or optimizer.rule is None:
            return
        run = self._run
        named, scales = dict(run.network.named_parameters()), dict[Tensor, float]()
        for layer in run.graph.layers if optimizer.output_fan_in else ():
            if layer.is_output:
                fan_in = run.graph.fan_in(layer, run.seed_widths)
                scales |= {
                    named[name]: 1.0 / fan_in for name in (layer.weight, *layer.emitters) if name in named
                }
        optimizer.set_regions({named[name]: region for name, region in run.regions().items()}, scales)

    def gradients(self) -> dict[str, Tensor]:
        """Return the optimizers' running means of gradients, by parameter name."""
        names: dict[Tensor, str] = {p: name for name, p in self._run.network.named_parameters()}
        found = {p: mean for optimizer in self.optimizers for p, mean in running_gradients(optimizer).items()}
        return {names[parameter]: mean for parameter, mean in found.items() if parameter in names}

    def normalised(self) -> frozenset[str]:
        """Names of parameters whose optimizers normalise gradients: all except those known not to."""
        stepped, others = set[int](), set[int]()
        for one in self.optimizers:
            (stepped if normalises(one) else others).update(map(id, _parameters(one)))
        # A wrapper of SGD, such as Lookahead, has the same parameters.
        stepped -= others
        return frozenset(name for name, p in self._run.network.named_parameters() if id(p) in stepped)

    def _divisors(self) -> Mapping[Tensor, Tensor]:
        owner = self._owner()
        return {} if owner is None else owner.divisors()

    def before_step(self, optimizer: Optimizer) -> None:
        """Call the owner's `on_step` before a step of an announced optimizer."""
        self._step(False, optimizer)

    def rebind(self, owner: Owner, memo: dict[int, Any]) -> None:
        """Attach copies of the optimizers to a copy of the owner.

        Args:
            owner: the copy.
            memo: memo of the `copy.deepcopy` that copies both.
        """
        self._owner, followers = weakref.ref(owner), self.optimizers
        about, awaited = self._inheritance, self._awaited
        self._known, self._handles, self._past, self._inheritance, self._awaited = [], [], {}, {}, {}
        for known in followers:
            # Hooks of an optimizer are not copied.
            own = copy.deepcopy(known, memo)
            self.add(own, about[id(known)], id(known) in self._announced)
            if id(known) in awaited:
                self._awaited[id(own)] = awaited[id(known)]

    def release(self) -> None:
        """Remove the hooks of all optimizers, and forget them."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._known, self._awaited = [], [], {}

    def _step(self, after: bool, optimizer: Optimizer, *_: Any) -> None:
        owner = self._owner()
        if (awaited := self._awaited.get(id(optimizer))) is not None:
            raise UserError(
                f"{type(optimizer).__name__} was given the state of {sum(_sizes(awaited))} parameters, and holds "
                f"{sum(_sizes(optimizer.state_dict()))}: let the network and the Grower load their state too."
            )
        if owner is not None and optimizer is self._leading():
            owner.on_step(after)

    def _leading(self) -> Optimizer | None:
        if len(self._known) == 1:
            return self._known[0]()
        # A wrapper without hooks does not report its steps.
        mine = {id(parameter) for parameter in self._run.network.parameters()}
        for optimizer in reversed(self.optimizers):
            if _STEP_HOOKS in vars(optimizer) and any(id(p) in mine for p in _parameters(optimizer)):
                return optimizer
        return None


def _rows_of(gradient: Tensor, sparse: Tensor) -> Tensor:
    """Convert a dense gradient to a sparse one with the indices of another; an embedding keeps its rows."""
    indices = sparse.coalesce().indices()
    values = gradient[tuple(indices)]
    return torch.sparse_coo_tensor(indices, values, gradient.shape, check_invariants=True, is_coalesced=True)


def _sizes(state: Mapping[str, Any]) -> list[int]:
    """Number of parameters in each group of an optimizer's state_dict."""
    return [len(group["params"]) for group in state["param_groups"]]


def copy_state(optimizer: Optimizer, sources: Mapping[Tensor, Tensor]) -> None:
    """Copy optimizer state to parameters that are copies of others.

    Args:
        optimizer: any.
        sources: maps each copy to its original.
    """
    for parameter, source in sources.items():
        if source in optimizer.state:
            optimizer.state[parameter] = copy.deepcopy(optimizer.state[source])


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]]

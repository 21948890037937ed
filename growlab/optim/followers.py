"""Optimizers that follow a network through growth and through loading, and a guard against those that do not."""

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

# Where torch's Optimizer keeps hooks of its own; one around another one may hand on to the hooks of that.
_STEP_HOOKS, _LOAD_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_load_state_dict_pre_hooks"


class Owner(Protocol):
    """Who grows the network."""

    network: nn.Module
    graph: WidthGraph
    seed_widths: dict[str, int]

    @property
    def parts(self) -> Sequence[Any]:
        """What may change how many parameters the network has."""
        ...

    def regions(self) -> dict[str, Regions]:
        """Which elements of which parameters came with which stage, by name."""
        ...

    def divisors(self) -> Mapping[Tensor, Tensor]:
        """Divisors of the steps of optimizers that normalise gradients, by parameter; they broadcast."""
        ...

    def on_step(self, after: bool) -> None:
        """Called before (False) and after (True) each step of the optimizer that holds the network's parameters."""
        ...


class Followers:
    """The optimizers of a growing network, held weakly.

    Args:
        owner: held weakly; told of the steps of the optimizer that holds the network's parameters: of several, of the
            last that was added.
    """

    def __init__(self, owner: Owner) -> None:
        # Else optimizers, which people copy and keep, would hold it.
        self._owner = weakref.ref(owner)
        self._known: list[weakref.ref[Optimizer]] = []
        self._inheritance: dict[int, Inheritance] = {}
        self._announced: set[int] = set()
        self._handles: list[RemovableHandle] = []
        self._past: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        # By the id of an optimizer: what it is to load once the network has as many parameters.
        self._awaited: dict[int, dict[str, Any]] = {}

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those that are still in use, in the order in which they were added."""
        return [optimizer for known in self._known if (optimizer := known()) is not None]

    @property
    def _run(self) -> Owner:
        owner = self._owner()
        assert owner is not None
        return owner

    def add(self, optimizer: Optimizer, inheritance: Inheritance, announced: bool = False) -> None:
        """Let an optimizer follow from now on; it may hold parameters that the network had before.

        Args:
            optimizer: any.
            inheritance: what becomes of its state at an event, see `follow`.
            announced: `before_step` is called when it has gradients.
        """
        now = dict(self._run.network.named_parameters())
        exchange(
            optimizer, {key: now[name] for key, (past, name) in self._past.items() if past() is not None}
        )
        if not any(known is optimizer for known in self.optimizers):
            own = {id(parameter) for parameter in now.values()}
            # A loop that announces all optimizers that it has may have those of other networks, such as a GAN's.
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
        """Register hooks on an optimizer, as far as it has any of its own: those around another one may not."""
        if _STEP_HOOKS in vars(optimizer):
            if id(optimizer) not in self._announced:
                self._handles.append(optimizer.register_step_pre_hook(partial(self._step, False)))
            if normalises(optimizer) and is_known(optimizer):
                self._handles += Compensated(optimizer, self._divisors).handles
            self._handles.append(optimizer.register_step_post_hook(partial(self._step, True)))
        if _LOAD_HOOKS in vars(optimizer):
            self._handles.append(optimizer.register_load_state_dict_pre_hook(self._await_network))

    def check(self, before: Mapping[str, int], after: Mapping[str, int]) -> None:
        """Refuse an event that an optimizer could not follow, before the network grows.

        Raises:
            ValueError: an optimizer has state that cannot follow.
        """
        graph = self._run.graph
        places = {
            id(parameter): (name, parameter)
            for name, parameter in self._run.network.named_parameters()
            # An event may rescale any of them.
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
        """Let all follow through a growth event, with gradients that are being accumulated.

        State of parameters that are not the network's stays as it is.

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

    # Training may go on with it, wherever growth ends.
    @torch.inference_mode(False)
    def rescale(self, factors: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Let all follow parameters that have been multiplied, with gradients that are being accumulated.

        Args:
            factors: by name, what a parameter was multiplied by, and what its gradient is multiplied by from now on.
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
                # Sparse ones are not broadcast.
                parameter.grad = parameter.grad * gradient.expand_as(parameter)

    def exchange(self, past: Mapping[str, Tensor]) -> None:
        """Let all follow where the network has been resized to load something.

        Args:
            past: its parameters before that, by name.
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
        """Put off loading a state of other numbers of parameters until the network has them; it may load later."""
        self._awaited.pop(id(optimizer), None)
        now = optimizer.state_dict()
        saved, own = _sizes(state), _sizes(now)
        owner = self._owner()
        if owner is None or not owner.parts or saved == own or len(saved) != len(own):
            return None
        self._awaited[id(optimizer)] = state
        return now

    def forget(self, past: Mapping[str, Tensor]) -> None:
        """Note which of these parameters, by name, are no longer the network's."""
        now = dict(self._run.network.named_parameters())
        self._past = {key: known for key, known in self._past.items() if known[0]() is not None}
        gone = {name: old for name, old in past.items() if name in now and old is not now[name]}
        self._past |= {id(old): (weakref.ref(old), name) for name, old in gone.items()}

    def relabel(self, optimizer: Optimizer) -> None:
        """Tell an optimizer of growlab which elements came with which stage, and the output layers' scale."""
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
        """Running means of gradients, by parameter name."""
        names: dict[Tensor, str] = {p: name for name, p in self._run.network.named_parameters()}
        found = {p: mean for optimizer in self.optimizers for p, mean in running_gradients(optimizer).items()}
        return {names[parameter]: mean for parameter, mean in found.items() if parameter in names}

    def normalised(self) -> frozenset[str]:
        """Names of parameters whose optimizer normalises gradients, as all but those that are known not to do."""
        stepped, others = set[int](), set[int]()
        for one in self.optimizers:
            (stepped if normalises(one) else others).update(map(id, _parameters(one)))
        # One around SGD, such as Lookahead, has the same parameters.
        stepped -= others
        return frozenset(name for name, p in self._run.network.named_parameters() if id(p) in stepped)

    def _divisors(self) -> Mapping[Tensor, Tensor]:
        owner = self._owner()
        return {} if owner is None else owner.divisors()

    def before_step(self, optimizer: Optimizer) -> None:
        """Tell the owner that an optimizer is about to step."""
        self._step(False, optimizer)

    def rebind(self, owner: Owner, memo: dict[int, Any]) -> None:
        """Follow a copy of the owner, with the copies of the optimizers.

        Args:
            owner: the copy.
            memo: of `copy.deepcopy`, which is copying both.
        """
        self._owner, followers = weakref.ref(owner), self.optimizers
        about, awaited = self._inheritance, self._awaited
        self._known, self._handles, self._past, self._inheritance, self._awaited = [], [], {}, {}, {}
        for known in followers:
            # Its hooks are not copied.
            own = copy.deepcopy(known, memo)
            self.add(own, about[id(known)], id(known) in self._announced)
            if id(known) in awaited:
                self._awaited[id(own)] = awaited[id(known)]

    def release(self) -> None:
        """Take the hooks off all optimizers."""
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
        # One without hooks of its own, around another one, cannot say when it steps.
        mine = {id(parameter) for parameter in self._run.network.parameters()}
        for optimizer in reversed(self.optimizers):
            if _STEP_HOOKS in vars(optimizer) and any(id(p) in mine for p in _parameters(optimizer)):
                return optimizer
        return None


def _rows_of(gradient: Tensor, sparse: Tensor) -> Tensor:
    """A dense gradient as a sparse one, of the rows that another one is of: an embedding table keeps its rows."""
    indices = sparse.coalesce().indices()
    values = gradient[tuple(indices)]
    return torch.sparse_coo_tensor(indices, values, gradient.shape, check_invariants=True, is_coalesced=True)


def _sizes(state: Mapping[str, Any]) -> list[int]:
    """Number of parameters in each group of an optimizer's state_dict."""
    return [len(group["params"]) for group in state["param_groups"]]


def copy_state(optimizer: Optimizer, sources: Mapping[Tensor, Tensor]) -> None:
    """Give parameters that are copies of others a copy of their state.

    Args:
        optimizer: any.
        sources: by copy, what it is a copy of.
    """
    for parameter, source in sources.items():
        if source in optimizer.state:
            optimizer.state[parameter] = copy.deepcopy(optimizer.state[source])


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]]

"""Optimizers that follow a network through growth and through loading, and a guard against those that do not."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from growlab.optim.regional import Regional
from growlab.optim.regions import weight_regions
from growlab.optim.state import Inheritance, follow, running_gradients
from growlab.widths import Carry, WidthGraph

Births = Mapping[str, Sequence[int]]


class Followers:
    """The optimizers of a growing network, held weakly.

    Args:
        network: the network.
        graph: its width graph.
        inheritance: what becomes of state at an event, see `follow`.
        on_step: called before (False) and after (True) each step of the optimizer that holds parameters of the
            network: of several, the last that was added.
    """

    def __init__(
        self,
        network: nn.Module,
        graph: WidthGraph,
        inheritance: Inheritance,
        on_step: Callable[[bool], None],
    ) -> None:
        self._network, self._graph, self._inheritance = network, graph, inheritance
        # Else optimizers, which people copy and keep, would hold the network's owner.
        self._on_step = weakref.WeakMethod(on_step)
        self._known: list[weakref.ref[Optimizer]] = []
        self._handles: list[RemovableHandle] = []
        self._past: dict[int, tuple[weakref.ref[Tensor], str]] = {}

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those that are still in use, in the order in which they were added."""
        return [optimizer for known in self._known if (optimizer := known()) is not None]

    def add(self, optimizer: Optimizer, births: Births) -> None:
        """Let an optimizer follow from now on; it may hold parameters that the network had before."""
        now = dict(self._network.named_parameters())
        exchange(
            optimizer, {key: now[name] for key, (past, name) in self._past.items() if past() is not None}
        )
        if not any(known is optimizer for known in self.optimizers):
            self._known.append(weakref.ref(optimizer))
            self._handles.append(optimizer.register_step_pre_hook(partial(self._step, False)))
            self._handles.append(optimizer.register_step_post_hook(partial(self._step, True)))
        self.relabel(optimizer, births)

    def carry(
        self,
        replaced: Mapping[str, tuple[Tensor, Tensor]],
        before: Mapping[str, int],
        after: Mapping[str, int],
        carry: Carry,
        births: Births,
    ) -> None:
        """Let all follow through a growth event, with gradients that are being accumulated.

        State of parameters that are not the network's stays as it is.

        Raises:
            ValueError: an optimizer has state that cannot follow.
        """
        own = {id(old) for old, _ in replaced.values()} | {id(p) for p in self._network.parameters()}
        for optimizer in self.optimizers:
            others = {p: state for p, state in optimizer.state.items() if id(p) not in own}
            follow(optimizer, replaced, self._graph, before, after, self._inheritance, carry)
            optimizer.state.update(others)
            self.relabel(optimizer, births)
        for name, (old, new) in replaced.items():
            if isinstance(old, nn.Parameter) and old.grad is not None and not old.grad.is_sparse:
                gradient = carry.carried(old.grad, name, self._graph, before, after)
                new.grad = torch.empty_like(new).copy_(gradient)
        self.forget({name: old for name, (old, _) in replaced.items()})

    def exchange(self, past: Mapping[str, Tensor], births: Births) -> None:
        """Let all follow where the network has been resized to load something."""
        now = dict(self._network.named_parameters())
        for optimizer in self.optimizers:
            exchange(optimizer, {id(old): now[name] for name, old in past.items() if old is not now[name]})
            self.relabel(optimizer, births)
        self.forget(past)

    def forget(self, past: Mapping[str, Tensor]) -> None:
        """Note which of these parameters, by name, are no longer the network's."""
        now = dict(self._network.named_parameters())
        self._past = {key: known for key, known in self._past.items() if known[0]() is not None}
        gone = {name: old for name, old in past.items() if name in now and old is not now[name]}
        self._past |= {id(old): (weakref.ref(old), name) for name, old in gone.items()}

    def relabel(self, optimizer: Optimizer, births: Births) -> None:
        """Tell an optimizer of growlab which elements came with which stage."""
        if isinstance(optimizer, Regional) and optimizer.rule is not None:
            regions = weight_regions(self._graph, births)
            named = self._network.named_parameters()
            optimizer.set_regions({p: regions[name] for name, p in named if name in regions})

    def gradients(self) -> dict[str, Tensor]:
        """Running means of gradients, by parameter name."""
        names: dict[Tensor, str] = {p: name for name, p in self._network.named_parameters()}
        found = {p: mean for optimizer in self.optimizers for p, mean in running_gradients(optimizer).items()}
        return {names[parameter]: mean for parameter, mean in found.items() if parameter in names}

    def release(self) -> None:
        """Take the hooks off all optimizers."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._known = [], []

    def _step(self, after: bool, optimizer: Optimizer, *_: Any) -> None:
        on_step = self._on_step()
        if on_step is not None and optimizer is self._leading():
            on_step(after)

    def _leading(self) -> Optimizer | None:
        if len(self._known) == 1:
            return self._known[0]()
        mine = {id(parameter) for parameter in self._network.parameters()}
        for optimizer in reversed(self.optimizers):
            held = (p for group in optimizer.param_groups for p in group["params"])
            if any(id(p) in mine for p in held):
                return optimizer
        return None


def exchange(optimizer: Optimizer, replaced: Mapping[int, Tensor]) -> None:
    """Let an optimizer track other parameters in place of those that it has: a loaded network's, at other widths.

    State that fits the new parameter stays (the optimizer's own state was loaded before the network); other state is
    of the old one and goes.

    Args:
        optimizer: any `torch.optim.Optimizer`; groups stay the same objects.
        replaced: the new parameter by `id` of the old one.
    """
    for group in optimizer.param_groups:
        for index, old in enumerate(group["params"]):
            new = replaced.get(id(old))
            if new is None:
                continue
            group["params"][index] = new
            state = optimizer.state.pop(old, None)
            if state is not None and all(_fits(value, new) for value in state.values()):
                optimizer.state[new] = state


def _fits(value: Any, parameter: Tensor) -> bool:
    return not isinstance(value, Tensor) or value.numel() == 1 or value.shape == parameter.shape

"""The engine: a network that grows in anyone's training."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from growlab import ranks
from growlab.errors import UserError
from growlab.growth import (
    GrowthEvent,
    GrowthMethod,
    GrowthState,
    Measurement,
    Schedule,
    anneal_norms,
    finish,
    grow,
    plant,
    restore,
)
from growlab.growth.attached import attach, detach, state_of
from growlab.growth.multipliers import saved_multipliers
from growlab.growth.weighted_norms import annealed
from growlab.optim import Inheritance
from growlab.optim.followers import Followers
from growlab.parts.part import Part
from growlab.triggers import Clock, Trigger, Widths, as_trigger
from growlab.widths import replace_tensors, resized, tensors_of, trace

Batches = Callable[[int], Sequence[tuple[Tensor, ...]]]


class Grower:
    """Grows a network while a loop trains it, and everything that belongs to it along with it.

    The network is made a seed at once, in place. From then on its output is right at any stage (a forward hook
    applies what growth multiplies it by), its state_dict brings its own widths wherever it is loaded while the grower
    is there, and the optimizers that `follow` keep their groups, schedules and state.

    Several processes (DistributedDataParallel) call `step` alike, and wrap the network anew where it has returned
    events, the old wrapper deleted first.

    Args:
        network: at full width; class, parameter names and modules stay its own.
        example: an input [B, ...] with B >= 2, or the tuple of the forward's positional inputs: the network is traced
            with it, and the outputs before and after each event are compared on it.
        method: what new entries are and how old ones are rescaled.
        trigger: which widths come next, and when: a `growlab.triggers.Trigger`, a schedule, or the epoch and width of
            each stage such as {0: 0.25, 10: 0.5, 20: 1.0}.
        parts: features beside growing; see `growlab.parts`.
        seed: of everything that growth draws.
        optimizer_state: what becomes of optimizer state at an event, see `growlab.optim.follow`.
        anneal_steps: optimizer steps after an event in which normalisations over channels that grew become plain
            ones again, see `growlab.growth.anneal_norms`.

    Attributes:
        graph: the network's width graph.
        state: its stage, widths and whatever else its tensors do not tell.
        clock: what the last `step` was told.
        events: receipts of all growth events, in plain containers.

    Raises:
        UserError: the network cannot be traced, or trigger, method or a part cannot go with it.
    """

    def __init__(
        self,
        network: nn.Module,
        example: Tensor | tuple[Any, ...],
        *,
        method: GrowthMethod,
        trigger: Trigger | Schedule | Mapping[float, Any],
        parts: Sequence[Part] = (),
        seed: int = 0,
        optimizer_state: Inheritance = "auto",
        anneal_steps: int = 100,
    ) -> None:
        self.network: nn.Module = getattr(network, "_orig_mod", network)
        self.method, self.trigger, self.parts = method, as_trigger(trigger), tuple(parts)
        self.seed, self.anneal_steps = seed, anneal_steps
        self.clock, self.events = Clock(), list[dict[str, Any]]()
        self._example = example if isinstance(example, tuple) else (example,)
        self._modules: list[nn.Module] = []
        self._data: tuple[Batches, Callable[..., Tensor]] | None = None
        graph = trace(self.network, self._probe(), follow_norms=method.follows_norms)
        self.graph = method.prepare(self.network, graph, seed)
        for part in self.parts:
            self.graph = part.prepare(self.network, self.graph, seed)
        full = dict(self.network.named_parameters())
        try:
            self.state = plant(self.network, self.graph, method, dict(self.trigger.first(self.graph)), seed)
        except ValueError as error:
            raise UserError(str(error)) from error
        self._followers = Followers(self.network, self.graph, optimizer_state, self.on_step)
        self._followers.forget(full)
        for part in self.parts:
            part.check(self)
        for part in self.parts:
            part.begin(self)
        self.reopen()

    # In a loop ---------------------------------------------------------------------------------------------

    def follow(self, *followers: Optimizer | nn.Module) -> None:
        """Let optimizers track the network through growth, and averages of it grow along; once each.

        Args:
            followers: optimizers of torch, of growlab or others; those that were made before the network became a
                seed are brought to its parameters. Or modules of the network's tensors and widths: averages of it
                such as `torch.optim.swa_utils.AveragedModel`.

        Raises:
            UserError: it is neither, or a module of other tensors.
        """
        for follower in followers:
            if isinstance(follower, Optimizer):
                self._followers.add(follower, self.state.births)
            elif isinstance(follower, nn.Module):
                copy = getattr(follower, "module", follower)
                shapes = [{n: t.shape for n, t in m.state_dict().items()} for m in (copy, self.network)]
                if shapes[0] != shapes[1]:
                    raise UserError(
                        f"{type(follower).__name__} cannot grow along: its tensors are not those of the network as it "
                        "is now; copy the network after the Grower was made."
                    )
                self._modules.append(copy)
                attach(copy, self.graph, self.state, self, self._probe())
            else:
                raise UserError(
                    f"{type(follower).__name__} cannot follow a network: give torch.optim.Optimizers, or modules that "
                    "are averages of the network."
                )

    def look_at(self, batches: Batches, loss: Callable[..., Tensor]) -> None:
        """Give training data to methods that look at some before an event (`GrowthMethod.batches`).

        Args:
            batches: maps a number to so many training batches, this process's part: tuples of inputs and targets.
            loss: mean loss of a batch from the network's output and the targets.
        """
        self._data = batches, loss

    def step(
        self, *, epoch: int | None = None, step: int | None = None, cost: float | None = None
    ) -> list[GrowthEvent]:
        """Grow as far as the trigger says at this moment; call it before the batch that the moment lies before.

        Asked twice at the same moment it does nothing, so that a resumed run may ask again.

        Args:
            epoch: that begins, from 0.
            step: optimizer steps done.
            cost: what has been spent, in the trigger's unit. What is left out stays as it was.

        Returns:
            The events, mostly none.

        Raises:
            UserError: the method or an optimizer cannot, or processes differ.
            ParityError: the network would compute something else than the method promises.
        """
        told: dict[str, Any] = {"epoch": epoch, "step": step, "cost": cost}
        self.clock = replace(self.clock, **{name: value for name, value in told.items() if value is not None})
        events = []
        while (widths := self.trigger.next(self)) is not None:
            events.append(self._grow(widths))
        return events

    def finish(self) -> nn.Module:
        """End growth: the network is an ordinary one that computes the same, and its hooks are gone.

        Returns:
            The network.

        Raises:
            UserError: normalisations are not plain again yet; everything is then as before.
        """
        if self.state.norm_weights:
            left = round((1 - self.state.norm_progress) * self.anneal_steps)
            raise UserError(
                f"growth cannot end yet: normalisations over channels that grew need {left} more optimizer steps to "
                "become plain ones; train on, or lower anneal_steps."
            )
        copies = tuple(self._copies().values())
        finish(self.network, self.graph, self.method, self.state, copies)
        for network in (self.network, *copies):
            detach(network)
        self._followers.release()
        for part in self.parts:
            part.finish(self)
        return self.network

    def withdraw(self) -> None:
        """Leave the network at the widths that it was traced at, without hooks; new channels are zero."""
        full = self.graph.full_widths
        self._adopt(GrowthState(0, full, {group: [0] * width for group, width in full.items()}))
        detach(self.network)
        self._followers.release()

    def reopen(self) -> None:
        """Bring the hooks back that `finish` took away, so that checkpoints of earlier stages load again."""
        for network in (self.network, *self._copies().values()):
            attach(network, self.graph, self.state, self, self._probe())

    # Checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State of growth beside the network's and the optimizers' own, in plain containers and tensors."""
        return {
            "full_widths": self.graph.full_widths,
            "growth": self.state.as_dict(),
            "clock": asdict(self.clock),
            "events": list(self.events),
            "trigger": self.trigger.state_dict(),
            "parts": {part.name: part.state_dict() for part in self.parts},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned, before or after the network and the optimizers load theirs.

        Raises:
            UserError: it is another network's, or of a run with other parts.
        """
        if state["full_widths"] != self.graph.full_widths:
            raise UserError("the state is of another network: its width groups or their full widths differ.")
        names = {part.name for part in self.parts}
        if names != set(state["parts"]):
            saved, own = (", ".join(sorted(each)) or "none" for each in (state["parts"], names))
            raise UserError(f"the state is of a run with other parts: {saved}; this one has {own}.")
        self._adopt(GrowthState.from_dict(state["growth"]))
        self.clock, self.events = Clock(**state["clock"]), list(state["events"])
        self.trigger.load_state_dict(state["trigger"])
        for part in self.parts:
            part.load_state_dict(state["parts"][part.name])

    def arrive(
        self, network: nn.Module, tensors: Mapping[str, Tensor], state: Mapping[str, Any] | None
    ) -> None:
        """Bring the network, or a copy of it, to the widths of tensors that it is about to load.

        Tensors that are not the network's are left to `load_state_dict` to complain about.
        """
        if not self.graph.axes.keys() <= tensors.keys():
            return
        shapes = {name: tuple(tensors[name].shape) for name in self.graph.axes}
        widths = self.graph.widths_of(shapes)
        if any(self.graph.shape(name, widths) != shape for name, shape in shapes.items()):
            return
        known = GrowthState.from_dict(state) if state is not None and state["widths"] == widths else None
        if network is self.network:
            if known is not None or widths != self.state.widths:
                self._adopt(known or replace(self._state_at(widths), multipliers=saved_multipliers(tensors)))
            return
        self._resize(network, widths)
        own = state_of(network)
        if known is not None and own is not None and own is not self.state:
            vars(own).update(vars(known))
            restore(network, self.graph, known)

    # What triggers and parts ask -----------------------------------------------------------------------------

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that follow and are still in use."""
        return self._followers.optimizers

    def gradients(self) -> dict[str, Tensor]:
        """The optimizers' running means of gradients, by parameter name."""
        return self._followers.gradients()

    # Events --------------------------------------------------------------------------------------------------

    def _grow(self, widths: Widths) -> GrowthEvent:
        told: dict[str, Any] = {}
        for part in self.parts:
            told |= part.before_growth(self, widths)
        copies = self._copies()
        for network in (self.network, *copies.values()):
            ranks.broadcast_buffers(network)
        before, leader = GrowthState.from_dict(self.state.as_dict()), tensors_of(self.network, self.graph)
        gradients = self.gradients() if self.method.wants_gradients else {}
        enlarge = partial(
            grow,
            new_widths=dict(widths),
            seed=self.seed,
            probe=self._probe(),
            agree=ranks.agreed,
            gradients=gradients,
        )
        try:
            event = enlarge(self.network, self.graph, self.method, self.state, data=self._measurement())
            widths_before, widths_after = event.widths_before, event.widths_after
            self._followers.carry(event.replaced, widths_before, widths_after, event.carry, self.state.births)
        except ValueError as error:
            raise UserError(str(error)) from error
        for name, copy in copies.items():
            own = GrowthState.from_dict(before.as_dict())
            along = enlarge(copy, self.graph, self.method, own, leader=leader, leading=event)
            told |= {
                f"{name}_parity_error_{mode}": getattr(along, f"parity_error_{mode}")
                for mode in ("eval", "train")
            }
        for part in self.parts:
            told |= part.after_growth(self, event)
        if ranks.several():
            ranks.compare(
                ranks.held(self.network, self.optimizers), f"after growth to stage {self.state.stage}"
            )
        # Else the ninth width exceeds the compiler's recompile limit and it silently stops compiling.
        torch.compiler.reset()
        self.events.append({**asdict(self.clock), **event.receipt(), **told})
        return event

    def _measurement(self) -> Measurement | None:
        if not self.method.batches:
            return None
        if self._data is None:
            raise UserError(f"{self.method.name} looks at training data: give some with Grower.look_at.")
        batches, loss = self._data
        weights = annealed(self.state.norm_weights, self.state.norm_progress)
        return Measurement(
            self.network,
            self.graph,
            batches(self.method.batches),
            loss,
            ranks.averaged,
            ranks.shared,
            weights,
        )

    # Followers -----------------------------------------------------------------------------------------------

    def _copies(self) -> dict[str, nn.Module]:
        """Averages of the network that grow along, by name."""
        found = {f"module{index}": module for index, module in enumerate(self._modules)}
        for part in self.parts:
            found |= part.followers()
        return found

    def on_step(self, after: bool) -> None:
        """Called before and after each step of the optimizer that holds the network's parameters."""
        for part in self.parts:
            (part.after_step if after else part.before_step)(self)
        if after and self.state.norm_weights:
            done = round(self.state.norm_progress * self.anneal_steps) + 1
            progress = min(1.0, done / max(1, self.anneal_steps))
            for copy in self._copies().values():
                anneal_norms(copy, self.graph, GrowthState.from_dict(self.state.as_dict()), progress)
            anneal_norms(self.network, self.graph, self.state, progress)

    # Widths --------------------------------------------------------------------------------------------------

    def _adopt(self, state: GrowthState) -> None:
        """Go on in another state of growth: widths of all that follows, factors, regions."""
        past = dict(self.network.named_parameters())
        for network in (self.network, *self._copies().values()):
            self._resize(network, state.widths)
            restore(network, self.graph, state)
        # The same object: hooks look at it.
        vars(self.state).update(vars(state))
        self._followers.exchange(past, self.state.births)

    def _resize(self, network: nn.Module, widths: Widths) -> None:
        tensors = tensors_of(network, self.graph)
        before = self.graph.widths_of({name: tensor.shape for name, tensor in tensors.items()})
        changed = {
            name: resized(tensor, self.graph.axes[name], before, widths)
            for name, tensor in tensors.items()
            if self.graph.changes(name, before, widths)
        }
        replace_tensors(network, self.graph, changed)

    def _state_at(self, widths: Widths) -> GrowthState:
        """State of a network of which only the widths are known: stage and births as the trigger foresees them."""
        stages = list(self.trigger.forecast(self.graph) or [])
        stage = stages.index(widths) if widths in stages else self.state.stage
        births = {
            group: [
                next((s for s, known in enumerate(stages[:stage]) if known[group] > channel), stage)
                for channel in range(width)
            ]
            for group, width in widths.items()
        }
        return GrowthState(stage, dict(widths), births, asked=self.state.asked)

    def _probe(self) -> tuple[Any, ...]:
        """The example on the network's device, numbers in its precision."""
        parameter = next(self.network.parameters())
        return tuple(
            x.to(parameter.device, parameter.dtype if x.is_floating_point() else None)
            if isinstance(x, Tensor)
            else x
            for x in self._example
        )

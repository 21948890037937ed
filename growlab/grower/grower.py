"""The engine: a network that grows in anyone's training."""

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from growlab.base.errors import UserError, as_user_errors
from growlab.grower.events import grow_as_due
from growlab.grower.following import let_follow, told_apart
from growlab.grower.loading import adopt, arrive, check_state, recognised
from growlab.grower.part import Part
from growlab.grower.plain import plain_state_dict
from growlab.grower.preparing import (
    check_arguments,
    check_told,
    check_whole,
    knows_stages,
    measurement,
    nothing_grows,
    prepared,
    seed_widths,
    still_narrow,
)
from growlab.grower.triggers import Clock, Run, Training, Trigger, as_trigger
from growlab.grower.wrapping import look_at_wrappers, see_through
from growlab.growth import GrowthEvent, GrowthMethod, GrowthState, Measurement, Schedule, anneal_norms, plant
from growlab.growth.attached import attach, detach
from growlab.growth.finish import finish
from growlab.growth.multipliers import row_multipliers
from growlab.growth.outputs import network_inputs
from growlab.optim import Inheritance, Regions, weight_regions
from growlab.optim.followers import Followers
from growlab.widths import Example, WidthGraph
from growlab.widths.trials import named_tensors, share_attributes

log = logging.getLogger(__name__)


class Grower:
    """Grows a network while a loop trains it, and everything that belongs to it along with it.

    The network is made a seed at once, in place. From then on its output is right at any stage (a forward hook
    applies what growth multiplies it by), its state_dict brings its own widths wherever it is loaded while the grower
    is there, and the optimizers that `follow` keep their groups, schedules and state.

    The seed's tensors that grow are drawn anew by the method, whatever the network held before: it is trained from the
    start. `growlab widen` enlarges networks that are trained.

    Several processes (DistributedDataParallel) call `step` alike, and `growlab.grower.renew` the wrapper where it has
    returned events.

    Args:
        network: at full width; class, parameter names and modules stay its own.
        example: an input [B, ...] with B >= 2, the tuple of the forward's positional inputs, or inputs by name: the
            network is traced with it, and the outputs before and after each event are compared on it.
        method: what new entries are and how old ones are rescaled.
        trigger: which widths come next, and when: a `growlab.Trigger`, a schedule, or the epoch and width of each stage
            such as {0: 0.25, 10: 0.5, 20: 1.0}.
        parts: features beside growing; see `growlab.parts`.
        seed: of everything that growth draws.
        anneal_steps: optimizer steps after an event in which normalisations over channels that grew become plain
            ones again, see `growlab.growth.anneal_norms`; or a function of the grower that says how many.
        graph: what `prepared` returned for this network; None: it is traced here.
        trace: the submodule that grows, or its name, where the network cannot be traced as a whole: the others keep
            their widths, see `growlab.trace`. Outputs are compared, and checkpoints are, of the whole network.

    Attributes:
        graph: the network's width graph.
        state: its stage, widths and whatever else its tensors do not tell.
        clock: what the last `step` was told.
        events: receipts of all growth events, in plain containers.
        training: what `look_at` told.
        check_ranks: compare processes after each event, bit for bit.

    Raises:
        UserError: the network cannot be traced or is another grower's, or trigger, method or a part cannot go with it.
    """

    def __init__(
        self,
        network: nn.Module,
        example: Example,
        *,
        method: GrowthMethod,
        trigger: Trigger | Schedule | Mapping[float, Any],
        parts: Sequence[Part] = (),
        seed: int = 0,
        anneal_steps: int | Callable[[Run], int] = 100,
        graph: WidthGraph | None = None,
        trace: str | nn.Module | None = None,
    ) -> None:
        self.network: nn.Module = getattr(network, "_orig_mod", network)
        if not isinstance(method, GrowthMethod):
            raise UserError(f"method={method!r} must be a growth method, such as growlab.VarianceTransfer().")
        check_arguments(seed, anneal_steps, graph)
        self.method, self.trigger, self.parts = method, as_trigger(trigger), told_apart(parts)
        self.seed, self.check_ranks = seed, True
        self.clock, self.events, self.training = Clock(), list[dict[str, Any]](), Training()
        self._anneal_steps, self._example = anneal_steps, example
        self._modules, self._told = list[nn.Module](), set[str]()
        self._regions: dict[str, Regions] | None = None
        if graph is None:
            # A network that keeps its widths need not be one whose widths can be found.
            grows, probe = self.trigger.resizes, self.probe()
            graph = prepared(self.network, probe, method, self.parts, seed, grows=grows, submodule=trace)
            if self.trigger.resizes and (told := nothing_grows(graph, self.trigger, self.parts)):
                log.warning("%s: it is trained as it is", told)
        past, self.full_graph, self.graph = dict(self.network.named_parameters()), graph, graph
        self._full_names = set(self.network.state_dict())
        self.seed_widths = seed_widths(self.trigger, graph, self.parts, method)
        share = self.trigger.share(0, self.seed_widths)
        for part in self.parts:
            part.check(self)
        for part in self.parts:
            self.graph = part.at_share(self.network, self.graph, 1.0 if share is None else share)
        with as_user_errors():
            self.state = plant(self.network, self.graph, method, self.seed_widths, seed)
        self.followers = Followers(self)
        self.followers.forget(past)
        for part in self.parts:
            part.begin(self)
        self.reopen()

    def __repr__(self) -> str:
        widths = ", ".join(f"{group}: {width}" for group, width in self.state.widths.items())
        return f"{type(self).__name__}(stage {self.state.stage}, {self.method.name}, widths {{{widths}}})"

    # In a loop ---------------------------------------------------------------------------------------------

    def follow(
        self, *followers: Optimizer | nn.Module, state: Inheritance = "auto", announced: bool = False
    ) -> None:
        """Let optimizers track the network through growth, and averages of it grow along; once each.

        Args:
            followers: optimizers of torch, of growlab or others; those that were made before the network became a
                seed are brought to its parameters. Or modules of the network's tensors and widths: averages of it
                such as `torch.optim.swa_utils.AveragedModel`.
            state: what becomes of these optimizers' state at an event, see `growlab.optim.follow`.
            announced: the loop calls `before_step` once gradients are there, since it gives optimizers a closure that
                computes them.

        Raises:
            UserError: it is neither, or a module of other tensors; there is no such `state`; or the network has been
                sharded since.
        """
        check_whole(self.network)
        see_through(self.network, self.full_graph)
        self._modules += let_follow(self, followers, state, announced)

    def look_at(
        self,
        batches: Callable[[int], Sequence[tuple[Tensor, ...]]] | None = None,
        loss: Callable[..., Tensor] | None = None,
        **known: Any,
    ) -> None:
        """Tell what methods, triggers and parts may want to know of the training, once and before the first step.

        Args:
            batches: maps a number to so many training batches, this process's part: tuples of inputs and targets.
            loss: mean loss of a batch from the network's output and the targets.
            known: further fields of `growlab.grower.triggers.Training`.

        Raises:
            UserError: trigger or parts do not go with it, or there is no such field.
        """
        self.training = self.training.with_told(batches=batches, loss=loss, **known)
        self.trigger.check(self)
        for part in self.parts:
            part.check(self)

    def before_step(self, optimizer: Optimizer) -> None:
        """Let parts act on gradients, of optimizers that `follow` was told of as announced."""
        self.followers.before_step(optimizer)

    def targets(self, y: Tensor) -> Tensor:
        """Targets of a batch as the network's outputs stand for them at this stage."""
        for part in self.parts:
            y = part.targets(y)
        return y

    def step(
        self,
        *,
        epoch: int | None = None,
        step: int | None = None,
        cost: float | None = None,
        then: Callable[[], Any] | None = None,
    ) -> list[GrowthEvent]:
        """Grow as far as the trigger says at this moment; call it before the batch that the moment lies before.

        Asked twice at the same moment it does nothing, so that a resumed run may ask again; nor does it after `finish`.
        Whatever is raised, the network, the optimizers and all else are then as before, and it may be asked again.

        Args:
            epoch: that begins, from 0.
            step: optimizer steps done.
            cost: what has been spent, in the trigger's unit. What is left out stays as it was.
            then: called behind the events, if there are any, such as `lambda: renew(ddp)`: an error in it undoes them.

        Returns:
            The events, mostly none.

        Raises:
            UserError: the method or an optimizer cannot, processes differ, what the trigger counts was never told, or
                the network has been sharded since.
            ParityError: the network would compute something else than the method promises.
        """
        known = {"epoch": epoch, "step": step, "cost": cost}
        told: dict[str, Any] = {name: value for name, value in known.items() if value is not None}
        before = self.clock, self._told
        self.clock, self._told = replace(self.clock, **told), self._told | told.keys()
        try:
            check_told(self.trigger, self._told)
            if self._open and self.trigger.grows:
                check_whole(self.network)
                see_through(self.network, self.full_graph)
            return grow_as_due(self, then) if self._open else []
        except BaseException:
            self.clock, self._told = before
            raise

    def finish(self, at_any_stage: bool = False) -> nn.Module:
        """End growth: the network is an ordinary one that computes the same, and its hooks are gone.

        Args:
            at_any_stage: do not warn of stages that are still to come.

        Returns:
            The network.

        Raises:
            UserError: normalisations are not plain again yet; everything is then as before.
        """
        if not at_any_stage and (told := still_narrow(self)):
            log.warning("%s", told)
        if self.state.norm_weights:
            left = round((1 - self.state.norm_progress) * self.anneal_steps)
            raise UserError(
                f"growth cannot end yet: normalisations over channels that grew need {left} more optimizer steps to "
                "become plain ones; train on, or lower anneal_steps."
            )
        see_through(self.network, self.full_graph)
        for part in self.parts:
            part.finish(self)
        copies = tuple(self.copies().values())
        self.followers.rescale(finish(self.network, self.graph, self.method, self.state, copies))
        for network in (self.network, *copies):
            detach(network)
            look_at_wrappers(network)
        self.followers.release()
        self._open = False
        return self.network

    def withdraw(self) -> None:
        """Leave the network at the widths that it was traced at, without hooks; new channels are zero."""
        full = self.full_graph.full_widths
        births = {group: [0] * width for group, width in full.items()}
        adopt(self, recognised(self, self._full_names, GrowthState(0, full, births)))
        detach(self.network)
        self.followers.release()
        self._open = False

    def reopen(self) -> None:
        """Bring the hooks back that `finish` took away, so that checkpoints of earlier stages load again."""
        for network in (self.network, *self.copies().values()):
            see_through(network, self.full_graph)
            attach(network, self.graph, self.state, self, self.probe())
        self._open = True

    def __deepcopy__(self, memo: dict[int, Any]) -> "Grower":
        """A grower of a copy of the network, which copies of the optimizers follow where they are copied along."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        vars(twin).update({name: deepcopy(value, memo) for name, value in vars(self).items()})
        for name, network in {"": self.network, **self.copies()}.items():
            share_attributes(named_tensors(network), {"": twin.network, **twin.copies()}[name])
        twin.followers.rebind(twin, memo)
        if twin._open:
            twin.reopen()
        return twin

    def __reduce__(self) -> Any:
        """Refuse."""
        raise TypeError(
            "a Grower cannot be pickled or copied flatly: save its state_dict() beside the network's."
        )

    # Checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State of growth beside the network's and the optimizers' own, in plain containers and tensors."""
        return {
            "full_widths": self.full_graph.full_widths,
            "growth": self.state.as_dict(),
            "clock": asdict(self.clock),
            "events": list(self.events),
            "trigger": self.trigger.state_dict(),
            "parts": {part.name: part.state_dict() for part in self.parts},
        }

    def plain_state_dict(self) -> dict[str, Tensor]:
        """The network's state_dict as `finish` would leave it, while growth goes on: a plain network's of its widths.

        Raises:
            UserError: normalisations are not plain yet, or the method holds weights differently until the end.
        """
        see_through(self.network, self.full_graph)
        return plain_state_dict(self, self.network)[0]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned, before or after the network and the optimizers load theirs.

        Raises:
            UserError: it is another network's, or of a run with other parts or other widths at its stage.
        """
        check_state(self, state)
        adopt(self, GrowthState.from_dict(state["growth"]))
        self._told = {"epoch", "step", "cost"}
        self.clock, self.events = Clock(**state["clock"]), list(state["events"])
        self.trigger.load_state_dict(state["trigger"])
        for part in self.parts:
            part.load_state_dict(state["parts"][part.name])

    def arrive(
        self, network: nn.Module, tensors: Mapping[str, Tensor], state: Mapping[str, Any] | None
    ) -> None:
        """Bring the network, or a copy of it, to the structure and widths of tensors that it is about to load."""
        see_through(network, self.full_graph)
        arrive(self, network, tensors, state)

    @property
    def auxiliary_flops(self) -> int:
        """Forward FLOPs so far of passes beside training's, each with a backward pass or what costs as much."""
        return sum(passes.get("auxiliary_flops", 0) for passes in (*self.events, *self.trigger.looks))

    # What triggers and parts ask -----------------------------------------------------------------------------

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that follow and are still in use."""
        return self.followers.optimizers

    @property
    def anneal_steps(self) -> int:
        """Optimizer steps in which normalisations of this stage become plain ones."""
        return self._anneal_steps(self) if callable(self._anneal_steps) else self._anneal_steps

    def gradients(self) -> dict[str, Tensor]:
        """The optimizers' running means of gradients, by parameter name."""
        return self.followers.gradients()

    def copies(self) -> dict[str, nn.Module]:
        """Averages of the network that grow along, by name."""
        found = {f"module{index}": module for index, module in enumerate(self._modules)}
        for part in self.parts:
            found |= part.followers()
        return found

    def graph_at(self, state: GrowthState) -> WidthGraph:
        """The width graph of the network in a state."""
        graph = self.full_graph
        for part in self.parts:
            graph = part.graph_at(graph, state)
        return graph

    def forget_regions(self) -> None:
        """Find regions anew when they are asked for: widths or births have changed."""
        self._regions = None

    def regions(self) -> dict[str, Regions]:
        """Which elements of which parameters came with which stage, by name, on the network's device."""
        see_through(self.network, self.full_graph)
        parameters = dict(self.network.named_parameters())
        device = next(iter(parameters.values())).device
        if self._regions is None:
            since = {name: stage for part in self.parts for name, stage in part.births(self.state).items()}
            known = weight_regions(self.graph, self.state.births, since)
            self._regions = {name: known[name] for name in parameters if name in known}
        self._regions = {name: region.to(device) for name, region in self._regions.items()}
        return self._regions

    def measurement(self, number: int, asker: str) -> Measurement:
        """So many training batches to measure something on; what is measured is averaged over processes.

        Args:
            number: of batches.
            asker: for the message.

        Raises:
            UserError: `look_at` told of none.
        """
        return measurement(self, number, asker)

    def probe(self) -> tuple[Any, ...]:
        """The example on the network's device, numbers in its precision."""
        return network_inputs(self._example, self.network)

    # Events --------------------------------------------------------------------------------------------------

    @property
    def knows_stages(self) -> bool:
        """Whether it is known before when each stage begins and how wide the network is then."""
        return knows_stages(self.trigger, self.parts)

    # Steps ---------------------------------------------------------------------------------------------------

    def divisors(self) -> dict[Tensor, Tensor]:
        """Divisors of the steps of Adam and the like, by parameter: multipliers of rows, if the method says so."""
        known = row_multipliers(self.network) if self.method.compensates else {}
        return {self.network.get_parameter(name): rows for name, rows in known.items()}

    def on_step(self, after: bool) -> None:
        """Called before and after each step of the optimizer that holds the network's parameters."""
        for part in self.parts:
            (part.after_step if after else part.before_step)(self)
        if after and self.state.norm_weights:
            steps = max(1, self.anneal_steps)
            self.anneal(min(1.0, (round(self.state.norm_progress * steps) + 1) / steps))

    def anneal(self, progress: float) -> None:
        """Bring weighted normalisations of the network and its averages closer to plain ones, which they are at 1."""
        see_through(self.network, self.full_graph)
        for copy in self.copies().values():
            anneal_norms(copy, self.graph, GrowthState.from_dict(self.state.as_dict()), progress)
        anneal_norms(self.network, self.graph, self.state, progress)

    # Widths --------------------------------------------------------------------------------------------------

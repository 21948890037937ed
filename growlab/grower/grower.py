"""The engine: grow a network in any training loop."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, replace
from functools import partial
from numbers import Integral
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from growlab.base import ranks
from growlab.base.devices import methods_on_cpu, on_cpu
from growlab.base.errors import UserError, as_user_errors
from growlab.base.settings import not_none
from growlab.grower.forecast import Forecast
from growlab.grower.loading import LoadingNetwork
from growlab.grower.network import (
    as_method,
    check_arguments,
    copies_in,
    look_at_wrappers,
    not_fresh,
    same_classes,
    see_through,
    trace_for_growth,
)
from growlab.grower.part import BlockPart, Part, WidthPart, checked_parts, widen_parts
from growlab.grower.rows import check_vocabulary, tokens_since, vocabulary
from growlab.grower.sharding import Shard, Sharding, check_follower, check_sharding
from growlab.grower.trained import (
    Layers,
    Newborn,
    adopt,
    anneal_at_once,
    anneal_if_uniform,
    layers_to_come,
    newborn,
    prepared,
    renamed,
    trigger_from,
    unwrapped,
    warn_of_equal_copies,
)
from growlab.grower.transaction import Seconds, call_then, decision, merged, transaction, unchanged_by_errors
from growlab.grower.triggers import Clock, Declined, Never, Training, Trigger, Widths, as_trigger
from growlab.growth import (
    GrowthEvent,
    GrowthMethod,
    GrowthState,
    HyperCloning,
    ParityError,
    Schedule,
    VarianceTransfer,
    anneal_norms,
    grow,
    make_seed,
)
from growlab.growth.event import draw_seed, finish
from growlab.growth.multipliers import row_multipliers
from growlab.growth.outputs import own_precision
from growlab.optim import Inheritance, Regions, weight_regions
from growlab.optim.carry import check_inheritance, inside
from growlab.optim.followers import Followers
from growlab.widths import Carry, Example, WidthGraph, tensors_of
from growlab.widths.meta import computed, named_tensors, share_attributes

log = logging.getLogger(__name__)
_Request = tuple[Widths, WidthPart | None]

# Normalisations are annealed over at most this many optimizer steps, and over a stage's steps divided by this number.
_ANNEAL_STEPS, _ANNEAL_PART = 100, 2


@methods_on_cpu("__init__", "follow", "regions", "anneal", "finish", "restore_full_width", "_grow_as_asked")
class Grower(LoadingNetwork):
    """Grows a network during training, with its optimizers and averages.

    The network becomes a seed at once, in place. Its outputs are correct at any stage (a forward hook applies growth's
    output factor), and its state_dict restores its widths when loaded into a network with a grower. Optimizers given to
    `follow` keep their groups, schedules and state.

    The method draws new weights for all of the seed's tensors that grow: training starts from scratch, with a warning
    if the network has been trained before. `from_trained` grows a small trained network, and `growlab widen` enlarges
    saved ones. The logger "growlab" logs one line per event, at INFO.

    With DistributedDataParallel each process calls `step` and, if that returned events, `growlab.grower.renew` on the
    wrapper.

    Args:
        network: at full width, possibly on device meta; its class, modules and parameter names stay the same.
        example: an input [B, ...] with B >= 2, a tuple of positional inputs, or a dict of inputs: used to trace the
            network, and to compare the outputs before and after each event.
        method: growth method, which initialises new entries and rescales old ones, or its name on the command line,
            such as "ours"; None: `VarianceTransfer()`.
        trigger: decides the next widths and when to grow: a `growlab.Trigger`, a schedule, or a dict of epoch to
            width; None: {0: 0.25, 10: 0.5, 20: 1.0}.
        parts: features that accompany growth; see `growlab.parts`.
        seed: random seed of everything that growth draws.
        anneal_steps: number of optimizer steps after an event over which normalisations of grown channels are annealed
            to plain ones, see `growlab.growth.anneal_norms`; or a function of the grower that returns it; None: half
            the steps of the previous stage, or of the remaining training if known, at most 100.
        graph: width graph from `trace_for_growth` for this network; None: the network is traced here.
        trace: the submodule to grow, or its name, if the network cannot be traced as a whole; the rest keeps its
            widths, see `growlab.trace`. Outputs and checkpoints are still those of the whole network.
        shard: function that shards the network in place: calls of torch's `fully_shard` on its blocks and itself,
            `parallelize_module`, or both. The Grower calls it on the seed and again at each event, which grows one
            tensor at a time; make optimizers afterwards. See the guide page on sharded networks.
        verbose: log events.

    Attributes:
        forecast: stages and widths as known before training.
        check_ranks: compare ranks bit for bit after each event.

    Raises:
        UserError: the network cannot be traced, belongs to another grower, or does not suit trigger, method or a part.
    """

    DEFAULT_TRIGGER: ClassVar[Mapping[float, Any]] = {0: 0.25, 10: 0.5, 20: 1.0}
    """Epoch and width of each stage where no trigger is given."""

    def __init__(
        self,
        network: nn.Module,
        example: Example,
        *,
        method: GrowthMethod | str | None = None,
        trigger: Trigger | Schedule | Mapping[float, Any] | None = None,
        parts: Sequence[Part] = (),
        seed: int = 0,
        anneal_steps: int | Callable[["Grower"], int] | None = None,
        graph: WidthGraph | None = None,
        trace: str | nn.Module | None = None,
        shard: Shard | None = None,
        verbose: bool = True,
    ) -> None:
        self.network: nn.Module = getattr(network, "_orig_mod", network)
        check_arguments(seed, anneal_steps)
        self.method = method = VarianceTransfer() if method is None else as_method(method)
        self.trigger = as_trigger(self.DEFAULT_TRIGGER if trigger is None else trigger)
        self.parts, self.seed, self.check_ranks, self.verbose = checked_parts(parts), seed, True, verbose
        self.clock, self.events, self.training = Clock(), list[GrowthEvent](), Training()
        self.averages, self.notes = dict[str, nn.Module](), dict[str, Any]()
        self._anneal_steps, self._example = anneal_steps, example
        # Optimizer steps of this stage so far, and the steps over which its normalisations are annealed.
        self._annealing, self.trained = (0, _ANNEAL_STEPS), False
        self._modules, self._units, self._checked = list[nn.Module](), set[str](), list[Any]()
        self._answered = (self.clock, -1)  # last time and stage at which a trigger that counts epochs returned None
        self._regions: dict[str, Regions] | None = None
        self.sharding: Sharding | None = None
        check_sharding(shard, method, self.parts)
        traced = graph is None
        if graph is None:
            # A network that keeps its widths need not be traceable.
            resizes, probe = self.trigger.resizes, self.probe()
            graph = trace_for_growth(self.network, probe, method, self.parts, seed, grows=resizes, submodule=trace)
        past, self.full_graph, self.graph = dict(self.network.named_parameters()), graph, graph
        self._full_names, self._vocabulary = set(self.network.state_dict()), vocabulary(self.network)
        self.forecast = Forecast(self.trigger, graph, self.parts)
        if traced and self.trigger.resizes:
            if reason := self.forecast.nothing_grows():
                log.warning("%s: it is trained as it is", reason)
            if reason := self.forecast.ends_narrow():
                log.warning("%s", reason)
        self.forecast.check(method)
        self.seed_widths = self.forecast.seed
        for part in self.parts:
            part.check(self)
        drawn = self.seed_widths != graph.full_widths or method.draws_full_width
        if drawn and (reason := not_fresh(self.network)):
            log.warning(
                "growth starts from scratch and draws new weights, but this network seems to be trained (%s): to keep "
                "the weights of a small trained network, use Grower.from_trained",
                reason,
            )
        fraction = self.forecast.fraction_grown(0, self.seed_widths)
        for part in self.parts:
            self.graph = part.shrink_to(self.network, self.graph, fraction)
        with as_user_errors():
            self.state = make_seed(self.network, self.graph, method, self.seed_widths, seed)
        if shard is not None:
            self.sharding = Sharding(self.network, shard, seed)
        draw_seed(self.network, self.graph, method, self.state, seed, self.rebuilding)
        self.followers = Followers(self)
        self.followers.forget(past)
        for part in self.parts:
            part.begin(self)
        self.reattach_hooks()

    def __repr__(self) -> str:
        widths = ", ".join(f"{group}: {width}" for group, width in self.state.widths.items())
        return f"{type(self).__name__}(stage {self.state.stage}, {self.method.name}, widths {{{widths}}})"

    @classmethod
    @on_cpu
    def from_trained(
        cls,
        small: nn.Module | Mapping[str, Tensor],
        wide: nn.Module,
        example: Example,
        *,
        method: GrowthMethod | str | None = None,
        optimizer: Optimizer | Sequence[Optimizer] = (),
        trigger: Trigger | Mapping[float, Any] | None = None,
        layers: Layers = "interleave",
        parts: Sequence[Part] = (),
        state: Inheritance = "auto",
        seed: int = 0,
        trace: str | nn.Module | None = None,
        **settings: Any,
    ) -> "Grower":
        """Grow a small trained network into a wider or deeper one of the same kind.

        The large network first takes the small one's widths, layers and weights, and the optimizer continues with its
        parameters, groups and state. Growth preserves outputs; inserted layers copy the previous layer, with branches
        that start at zero.

        Args:
            small: the trained network, which is not changed, or its state_dict. Outputs are compared only with a
                network.
            wide: the network at full width and depth; becomes the small one in place and loses its weights.
            example: see `Grower`.
            method: see `Grower`; None: `HyperCloning(noise_std=0.1)`, whose noise separates copies.
            optimizer: the small network's optimizer, or several; the same objects continue.
            trigger: see `Grower`; "small" stands for the small network's widths, as in {0: "small", 500: 1.0}; None:
                all growth at the first call of `step`.
            layers: order of a deeper network's layers: "interleave" puts each copy after its original, "end" puts all
                new layers after the last one; or the new indices of the small network's layers.
            parts: see `Grower`; one that inserts layers replaces `layers`.
            state: see `follow`.
            seed: see `Grower`.
            trace: see `Grower`.
            settings: further arguments of `Grower`.

        Raises:
            UserError: the small network's tensors fit no widths of the large one, or their outputs differ with the same
                weights. `step` raises one if the growth changes outputs without weighted normalisations, such as growth
                of a stream under layer normalisation by a factor of 1.5.
        """
        chosen = HyperCloning(noise_std=0.1) if method is None else as_method(method)
        if isinstance(small, Mapping):
            small = unwrapped(small, wide)
        names, missing = renamed(small if isinstance(small, Mapping) else small.state_dict(), wide, layers)
        if missing and not any(isinstance(part, BlockPart) for part in parts):
            parts = (*parts, layers_to_come(missing, state))
        graph, widths = prepared(small, wide, example, chosen, parts, seed, trace, names, missing)
        if widths != graph.full_widths:
            warn_of_equal_copies(chosen)
        grower = cls(
            wide,
            example,
            method=chosen,
            trigger=trigger_from(trigger, widths, graph, parts),
            parts=parts,
            seed=seed,
            graph=graph,
            trace=trace,
            **settings,
        )
        grower.trained = True
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        with unchanged_by_errors(optimizers):
            adopt(grower, small, names, optimizers, state)
        return grower

    # In a loop ---------------------------------------------------------------------------------------------

    def follow(self, *followers: Optimizer | nn.Module, state: Inheritance = "auto", announced: bool = False) -> None:
        """Attach optimizers, and averages of the network, to follow it through growth; once each.

        Args:
            followers: optimizers of any library; those made before the network became a seed get the seed's parameters.
                Or averages of the network: modules with its tensors, such as `torch.optim.swa_utils.AveragedModel`.
            state: treatment of these optimizers' state at an event, see `growlab.optim.follow`.
            announced: the loop calls `before_step` once gradients are computed, because its optimizers use a closure.

        Raises:
            UserError: a follower is of another kind or has other tensors, `state` is unknown, or the network has been
                sharded in the meantime.
        """
        self._make_ready()
        with as_user_errors():
            check_inheritance(state)
        self._modules += self._attach(followers, state, announced)

    def _attach(
        self, followers: Iterable[Optimizer | nn.Module], state: Inheritance, announced: bool
    ) -> list[nn.Module]:
        """Attach optimizers, and modules that average the network; return the copies of it that are new."""
        modules: list[nn.Module] = []
        for follower in followers:
            check_follower(follower, self.sharding)
            if isinstance(follower, nn.Module):
                for copy in copies_in(follower, self.network):
                    if not any(copy is known for known in (*self.copies().values(), *modules)):
                        self._hook(copy)
                        modules.append(copy)
            elif any(
                kind.__name__ == "ZeroRedundancyOptimizer" or kind.__module__.startswith("deepspeed.")
                for kind in type(follower).__mro__
            ):
                raise UserError(
                    f"{type(follower).__name__} partitions parameters among processes once, by their size, and growth "
                    "would have to do it again: give each process an ordinary optimizer."
                )
            elif (inner := list(inside(follower))) or isinstance(follower, Optimizer):
                # Wrappers of accelerate and Fabric, SAM, Lookahead and the like contain the optimizer that steps, may
                # share its groups and its state, and may have additional state.
                modules += self._attach(inner, state, False)
                self.followers.add(follower, state, announced)
            else:
                raise UserError(
                    f"{type(follower).__name__} cannot follow a network: give torch.optim.Optimizers, or modules that "
                    "are averages of the network."
                )
        return modules

    def provide(
        self,
        batches: Callable[[int], Sequence[tuple[Tensor, ...]]] | None = None,
        loss: Callable[..., Tensor] | None = None,
        **known: Any,
    ) -> None:
        """Provide training data and records to methods, triggers and parts, once before the first step.

        Args:
            batches: function of n that returns n training batches (this process's part): tuples of inputs and targets.
            loss: function of the network's output and the targets that returns the mean loss of a batch.
            known: further fields of `growlab.grower.triggers.Training`.

        Raises:
            UserError: a part does not support the training, or a field is unknown.
        """
        self.training = self.training.updated(**not_none(batches=batches, loss=loss), **known)
        for part in self.parts:
            part.check(self)

    def before_step(self, optimizer: Optimizer) -> None:
        """Call the parts' hooks on gradients; needed for optimizers attached with `announced=True`."""
        self.followers.before_step(optimizer)

    def targets(self, y: Tensor) -> Tensor:
        """Map a batch's targets to the network's outputs at this stage."""
        for part in self.parts:
            y = part.targets(y)
        return y

    def step(
        self,
        epoch: int | None = None,
        *,
        step: int | None = None,
        cost: float | None = None,
        then: Callable[[], Any] | None = None,
    ) -> list[GrowthEvent]:
        """Grow if the trigger asks for it; call this before the next batch.

        A repeated call at the same epoch and step, as in a resumed run, and a call after `finish` do nothing.
        If anything is raised, the network, optimizers and all other state are restored, and `step` may be called again.

        Args:
            epoch: the epoch that starts, from 0.
            step: optimizer steps done.
            cost: cost so far, in the trigger's unit. Omitted arguments keep their last values.
            then: function called after events, such as `lambda: renew(ddp)`; if it raises, the events are undone.

        Returns:
            New events, usually none: the same objects as in `events`.

        Raises:
            UserError: the method or an optimizer does not support the event, ranks differ, the trigger's unit was never
                given, a value is smaller than before, or the network has been sharded in the meantime.
            ParityError: the outputs would change by more than the method allows.
        """
        if step is not None and cost is None and self._is_answered(epoch, step):
            return []
        given: dict[str, Any] = not_none(epoch=epoch, step=step, cost=cost)
        before, unit = (self.clock, self._units), self.trigger.unit
        # After `finish` the loop's clock may start again.
        self.clock = clock = self.clock.moved(**given) if self._open else replace(self.clock, **given)
        self._units = self._units | given.keys()
        try:
            if unit is not None and unit not in self._units:
                raise UserError(
                    f"the trigger counts in {unit!r}, which Grower.step never received: call step({unit}=...), "
                    "or give At(..., unit=...) what your loop counts."
                )
            if not self._open:
                return []
            check_vocabulary(self.network, self._vocabulary)
            never = isinstance(self.trigger, Never)
            idle = self.trigger.knows_stages and not self.parts and (never or same_classes(self._checked))
            if idle and self.trigger.next(self) is None:
                self._answered = (clock, self.state.stage if never or unit == "epoch" else -1)
                return []
            if not never:
                self._checked = self._make_ready()
            events = self._grow_as_asked(then)
        except BaseException:
            self.clock, self._units = before
            raise
        if self.verbose and not (ranks.several() and torch.distributed.get_rank()):
            for event in events:
                log.info("%s", event)
        return events

    def _is_answered(self, epoch: int | None, step: int) -> bool:
        """Advance the clock within an epoch in which the trigger has returned None; return True if it did."""
        now, stage = self._answered
        if self.clock is not now or self.state.stage != stage or epoch != now.epoch or step <= now.step:
            return False
        self.clock = Clock(now.epoch, step, now.cost)
        self._answered = (self.clock, stage)
        return True

    def finish(self, at_any_stage: bool = False) -> nn.Module:
        """End growth: make the network an ordinary one with the same outputs, without hooks.

        Args:
            at_any_stage: do not warn about remaining stages.

        Returns:
            The network.

        Raises:
            UserError: normalisations are not plain yet, or an optimizer's loaded state does not fit yet. Nothing has
                changed then.
        """
        self.followers.check_loaded()
        check_vocabulary(self.network, self._vocabulary)
        if not at_any_stage and (warning := self.forecast.unreached(self.state.scheduled_stage, bool(self._units))):
            log.warning("%s", warning)
        if not anneal_if_uniform(self):
            left = round((1 - self.state.norm_progress) * self.anneal_steps)
            raise UserError(
                f"growth cannot end yet: normalisations over channels that grew need {left} more optimizer steps to "
                "become plain; train on, lower anneal_steps, or call provide(total_steps=...) before training."
            )
        self._make_ready()
        for part in self.parts:
            part.finish(self)
        copies = tuple(self.copies().values())
        self.followers.rescale(finish(self.network, self.graph, self.method, self.state, copies))
        for network in (self.network, *copies):
            self._unhook(network)
            look_at_wrappers(network)
        self.followers.release()
        self._open = False
        return self.network

    def restore_full_width(self) -> None:
        """Restore the network's full widths, with zeros in new channels, and remove hooks."""
        full = self.full_graph.full_widths
        births = {group: [0] * width for group, width in full.items()}
        self._set_state(self._state_from_keys(self._full_names, GrowthState(0, full, births)))
        self._unhook(self.network)
        self.followers.release()
        self._open = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "Grower":
        """Copy the grower with its network; optimizers copied in the same call follow the copy."""
        twin = type(self).__new__(type(self))
        memo.update({id(self): twin, **computed(self.network)})
        vars(twin).update({name: deepcopy(value, memo) for name, value in vars(self).items()})
        for name, network in {"": self.network, **self.copies()}.items():
            share_attributes(named_tensors(network), {"": twin.network, **twin.copies()}[name])
        twin.followers.rebind(twin, memo)
        if twin._open:
            twin.reattach_hooks()
        return twin

    def __reduce__(self) -> Any:
        """Refuse pickling and shallow copies."""
        raise TypeError("a Grower cannot be pickled or copied shallowly: save its state_dict() instead.")

    # For triggers, parts and optimizers ----------------------------------------------------------------------

    @property
    def auxiliary_flops(self) -> int:
        """Forward FLOPs of auxiliary passes so far; each also had a backward pass, or other work of equal cost."""
        receipts = (*(event.notes for event in self.events), *self.trigger.auxiliary_passes)
        return sum(receipt.get("auxiliary_flops", 0) for receipt in receipts)

    @property
    def anneal_steps(self) -> int:
        """Number of optimizer steps over which normalisations of this stage are annealed."""
        if callable(self._anneal_steps):
            return self._anneal_steps(self)
        return self._annealing[1] if self._anneal_steps is None else self._anneal_steps

    def _begin_stage(self) -> None:
        """Choose the number of steps over which normalisations of the new stage are annealed."""
        (steps_before, chosen), training, clock = self._annealing, self.training, self.clock
        if steps_before:
            chosen = min(_ANNEAL_STEPS, steps_before // _ANNEAL_PART)
        if training.total_steps is not None:
            done = clock.step if "step" in self._units else sum(training.steps[: clock.epoch])
            if (left := training.total_steps - done) > 0:
                chosen = min(chosen, left // _ANNEAL_PART)
        self._annealing, self._checked = (0, chosen), []  # parts may have replaced modules

    def regions(self) -> dict[str, Regions]:
        """Birth stages of each parameter's elements, by name, on the network's device."""
        see_through(self.network, self.full_graph)
        parameters = dict(self.network.named_parameters())
        device = next(iter(parameters.values())).device
        if self._regions is None:
            regions = weight_regions(self.graph, self.state.births, {**self.births(), **tokens_since(self)})
            self._regions = {name: regions[name] for name in parameters if name in regions}
        self._regions = {name: region.to(device) for name, region in self._regions.items()}
        return self._regions

    def newborn(self, since: int = 1) -> Newborn:
        """Return parameters and entries added at a stage or later, such as rows of new tokens, to freeze the others.

        Args:
            since: stage, from 1; the seed and the weights that `from_trained` loads have stage 0.
        """
        return newborn(self, since)

    def divisors(self) -> dict[Tensor, Tensor]:
        """Divisors of steps of optimizers such as Adam, by parameter: row multipliers if the method `compensates`."""
        multipliers = row_multipliers(self.network) if self.method.compensates else {}
        return {self.network.get_parameter(name): rows for name, rows in multipliers.items()}

    def on_step(self, after: bool) -> None:
        """Act before and after each step of the optimizer that has the network's parameters."""
        check_vocabulary(self.network, self._vocabulary)
        for part in self.parts:
            (part.after_step if after else part.before_step)(self)
        if after:
            self._annealing = (self._annealing[0] + 1, self._annealing[1])
        if after and self.state.norm_weights:
            steps = max(1, self.anneal_steps)
            self.anneal(min(1.0, (round(self.state.norm_progress * steps) + 1) / steps))

    def anneal(self, progress: float) -> None:
        """Anneal weighted normalisations of the network and its averages; at progress 1 they are plain."""
        see_through(self.network, self.full_graph)
        for copy in self.copies().values():
            anneal_norms(copy, self.graph, GrowthState.from_dict(self.state.as_dict()), progress)
        anneal_norms(self.network, self.graph, self.state, progress)

    # Events --------------------------------------------------------------------------------------------------

    def _next_request(self) -> _Request | None:
        """Return the widths to grow to now and the part that requests them (None: the trigger), or None."""
        # Parts first: the trigger's event may reset the optimizer's state, which they may read.
        for part in self.parts:
            if isinstance(part, WidthPart) and (widths := part.decide(self)) is not None:
                return widths, part
        asked = self.trigger.next(self)
        return None if asked is None else (asked, None)

    def _grow_as_asked(self, then: Callable[[], Any] | None) -> list[GrowthEvent]:
        """Perform all requested events, then call `then` if there were any; an error or `Declined` undoes them."""
        events: list[GrowthEvent] = []
        with decision(self, self.parts):
            request = self._next_request()
            if request is None:
                return events
            try:
                with transaction(self, self.parts):
                    while request is not None:
                        events.append(self._grow_once(*request))
                        request = self._next_request()
                    if then is not None:
                        call_then(then, events)
            except Declined as declined:
                self.trigger.declined(self, declined)
                return []
        return events

    # Parameters made in inference mode could not be trained.
    @torch.inference_mode(False)
    def _grow_once(self, requested: Widths, requester: WidthPart | None) -> GrowthEvent:
        """Grow the network and its followers to widths that a part (for its own groups) or the trigger requests."""
        seconds, before, num_params = Seconds(), dict(self.state.widths), _num_params(self.network)
        method = self.method if requester is None else requester.method
        assert method is not None
        widths, method_widths = self._widths_of_event(requested, requester)
        with as_user_errors():
            self.followers.check(before, widths)
        gradients = self.gradients() if method.wants_gradients else {}
        copies = self.copies()
        for network in (self.network, *copies.values()):
            ranks.broadcast_buffers(network)
        parts = self.parts if requester is None else (requester,)
        notes = merged(*(part.before_growth(self, widths) for part in parts))
        data = self.measurement(method.batches, method.name) if method.batches else None
        seconds.note("data")
        enlarge = partial(
            grow,
            new_widths=method_widths,
            seed=self.seed,
            probe=self.probe(),
            gradients=gradients,
            agree=ranks.agreed,
            average=ranks.averaged,
            normalised=self.followers.normalised(),
            rebuilding=self.rebuilding,
        )
        past, averaged = GrowthState.from_dict(self.state.as_dict()), tensors_of(self.network, self.graph)
        with as_user_errors():
            event = enlarge(self.network, self.graph, method, self.state, data=data)
            self.state.unscheduled += requester is not None
            replaced, carry = widen_parts(self, self.parts, self.network, self.state, widths, event)
            seconds.note("grow")
            self._regions = None
            with own_precision(self.network):
                self.followers.carry(replaced, before, widths, carry)
            seconds.note("optimizer")
        for name, copy in copies.items():
            state = GrowthState.from_dict(past.as_dict())
            average: dict[str, Any] = {"averaged": averaged, "averaged_event": event}
            grow_copy = partial(enlarge, copy, self.graph, method, state, **average)
            notes |= self._grow_average(name, copy, state, widths, grow_copy)
        event = replace(event, widths_after=dict(widths), replaced=replaced, carry=carry)
        notes = merged(notes, *(part.after_growth(self, event) for part in self.parts))
        seconds.note("followers")
        if self.check_ranks and ranks.several():
            ranks.compare(self.state_to_compare(), f"after growth to stage {self.state.stage}")
        seconds.note("rank_check")
        # Otherwise the ninth width would exceed the compiler's recompile limit, and it would silently stop compiling.
        torch.compiler.reset()
        seconds.move("grow", "data", 0.0 if data is None else data.cost.seconds)
        seconds.move("grow", "parity", event.parity_sec)
        notes = merged(notes, {} if data is None else data.report())
        if requester is not None:
            notes["asked_by"] = requester.name
        else:
            notes, self.notes = notes | self.notes, {}
        # Without tensors, which would stay in memory as long as the events do.
        event = replace(
            event,
            **asdict(self.clock),
            num_params_before=num_params,
            num_params=_num_params(self.network),
            seconds=seconds.total,
            seconds_by_part=seconds.parts,
            notes=notes,
            replaced={},
            carry=Carry(),
            observed={},
        )
        self.events.append(event)
        self._begin_stage()
        if self.state.norm_weights and self.trained:
            anneal_at_once(self, method)
        elif self.state.norm_weights and self.anneal_steps < 1:
            self.anneal(1.0)
        return event

    def _widths_of_event(self, requested: Widths, requester: Part | None) -> tuple[Widths, Widths]:
        """Width of each group after an event; and the same for the method, which leaves groups of parts unchanged."""
        now = dict(self.state.widths)
        if requester is not None:
            return {**now, **requested}, {**now, **requested}
        for group, width in requested.items():
            if group not in now or not isinstance(width, Integral) or width < 1:
                what = f"{width!r} channels" if group in now else "a width"
                raise UserError(
                    f"{type(self.trigger).__name__} asks for {what} of {group!r}: give whole numbers from 1 on for "
                    f"groups of this network ({', '.join(now)})."
                )
        requested = {group: int(width) for group, width in requested.items()}
        widths = self.forecast.complete(requested, now, self.state.scheduled_stage + 1)
        return widths, {**widths, **{g: now[g] for part in self.parts for g in part.groups if g in now}}

    def _grow_average(
        self, name: str, copy: nn.Module, state: GrowthState, widths: Widths, grow_copy: Callable[[], GrowthEvent]
    ) -> dict[str, float]:
        """Grow an average of the network by the same event; return entries of the receipt."""
        try:
            event = grow_copy()
        except ParityError as error:
            raise ParityError(f"{name}, an average of the network: {error}") from error
        widen_parts(self, self.parts, copy, state, widths, event)
        return {
            f"{name}_parity_error_eval": event.parity_error_eval,
            f"{name}_parity_error_train": event.parity_error_train,
        }


def _num_params(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())

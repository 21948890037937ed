"""Interface of triggers, and the view of a growing network for triggers and parts."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from math import isfinite
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from growlab.base import ranks
from growlab.base.devices import on_cpu
from growlab.base.errors import UserError, as_user_errors
from growlab.base.settings import Described, finite
from growlab.growth import GrowthEvent, GrowthMethod, GrowthState, Measurement
from growlab.growth.outputs import network_inputs
from growlab.growth.weighted_norms import annealed
from growlab.optim import Regions
from growlab.optim.carry import inside
from growlab.optim.followers import Followers
from growlab.widths import Example, WidthGraph

Widths = Mapping[str, int]
"""Width of each group."""
_CALLED = {"batches", "loss", "step_loss", "weight", "records", "flops", "epoch_batches", "seed_draws"}


@dataclass(frozen=True)
class Clock:
    """Progress of a training.

    Attributes:
        epoch: the current epoch, from 0.
        step: optimizer steps done.
        cost: cost so far, in any unit (FLOPs, images, a fraction of the budget).

    Raises:
        UserError: a value is not a finite number.
    """

    epoch: int = 0
    step: int = 0
    cost: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            # First, since each batch of a training makes a clock.
            if type(value) is int or (type(value) is float and isfinite(value)):
                continue
            # A checkpoint with numbers of numpy or torch could not be loaded by `torch.load(weights_only=True)`.
            if hasattr(value, "item"):
                object.__setattr__(self, name, value.item())
            with as_user_errors():
                finite(**{name: getattr(self, name)})

    def moved(self, **given: Any) -> "Clock":
        """Return a clock with some values replaced by later ones.

        Raises:
            UserError: a value is not a finite number, or smaller than before.
        """
        later = replace(self, **given)
        for name in given:
            old, new = getattr(self, name), getattr(later, name)
            if new < old:
                raise UserError(
                    f"{name} {new} is before {name} {old} of an earlier call of Grower.step: growth goes forwards; "
                    "load a checkpoint's state to go back."
                )
        return later


@dataclass(frozen=True)
class Training:
    """Data, cost and records that a training loop provides for triggers, parts and methods.

    Attributes:
        batches: function of n that returns n training batches (this process's part): tuples of inputs and a target, or
            of a dict of inputs and a target.
        loss: function of the network's output and the target that returns the mean loss of a batch.
        step_loss: function of a batch that returns its training loss as the loop's own step computes it, for triggers
            that train steps; used instead of `loss`, and batches may then have any form.
        weight: function of output and target that returns the batch's weight in means over batches; None: its number of
            samples.
        near_zero: smallest number that training's precision distinguishes from zero.
        steps: optimizer steps of each epoch.
        total_steps: optimizer steps of the whole training; None: unknown.
        samples: training samples of each epoch.
        records: function that returns the records of each epoch so far, by column of metrics.csv.
        reference_flops: forward FLOPs of the fixed-size run, which count as 100 %.
        flops: function of widths and the fraction of growth that returns forward FLOPs per sample.
        epoch_batches: function of an epoch, and of a seed of order and augmentation, that returns all training batches
            of the epoch (this process's part).
        seed_draws: function of an epoch and a batch's index that seeds the network's own draws (dropout).
    """

    batches: Callable[[int], Sequence[tuple[Tensor, ...]]] | None = None
    loss: Callable[..., Tensor] | None = None
    step_loss: Callable[[Any], Tensor] | None = None
    weight: Callable[..., Tensor] | None = None
    near_zero: float = 2.0**-100
    steps: Sequence[int] = ()
    total_steps: int | None = None
    samples: Sequence[int] = ()
    records: Callable[[], Sequence[Mapping[str, Any]]] = list
    reference_flops: float = 0.0
    flops: Callable[[Mapping[str, int], float], int] | None = None
    epoch_batches: Callable[[int, int], Iterable[tuple[Tensor, ...]]] | None = None
    seed_draws: Callable[[int, int], None] | None = None

    def updated(self, **given: Any) -> "Training":
        """Return a copy with some fields replaced.

        Raises:
            UserError: a field is unknown, or a function cannot be called.
        """
        known = [field.name for field in fields(self)]
        if unknown := [name for name in given if name not in known]:
            raise UserError(f"provide knows no {unknown[0]!r}; it takes {', '.join(known)}.")
        for name in _CALLED & given.keys():
            if given[name] is not None and not callable(given[name]):
                raise UserError(f"{name} of provide must be a function, not a {type(given[name]).__name__}.")
        return replace(self, **given)


class Declined(Exception):
    """Raised by a trigger after an event that it requested, to undo all events of the same step."""

    def __init__(self, receipt: Mapping[str, Any]) -> None:
        self.receipt = receipt


class Trigger(Described, ABC):
    """Decides the next widths and when to grow.

    Decisions must depend only on the grower and the trigger's `state_dict`: all processes ask, and a resumed run asks
    again.

    Attributes:
        unit: clock unit that it reads ("epoch", "step" or "cost"), which the loop has to provide; None: none, or
            several.
        knows_stages: True if the start of each stage is known before training.
        resizes: False if the network keeps its full widths throughout.
        plans_cost: True if it compares costs of future widths, so parts may not decide widths.
        auxiliary_passes: measurements on data for its decisions, with their results and cost.
        left_to_parts: groups whose widths parts decide; set before `next` is called.
        wants_steps: True if it trains steps of its own, for which front ends provide batches and `step_loss`.
    """

    unit: str | None = None
    knows_stages: bool = False
    resizes: bool = True
    plans_cost: bool = False
    auxiliary_passes: Sequence[Mapping[str, Any]] = ()
    left_to_parts: frozenset[str] = frozenset()
    wants_steps: bool = False

    def forecast(self, graph: WidthGraph) -> list[Widths] | None:
        """Return the width of each group at every stage; None if unknown before training.

        Raises:
            UserError: the network has no such widths.
        """
        return None

    def steps(self, graph: WidthGraph) -> list[Widths]:
        """Widths that growth goes through, starting with the seed's, as far as known."""
        return self.forecast(graph) or []

    def first(self, graph: WidthGraph) -> Widths:
        """Width of each group in the seed."""
        return {**graph.full_widths, **next(iter(self.steps(graph)), {})}

    @abstractmethod
    def next(self, grower: "GrowingNetwork") -> Widths | None:
        """Return the widths to grow to now; None to keep the current ones.

        Called at every step or epoch, and again after each event. Entries put into `grower.notes` become part of the
        event's receipt.
        """

    def declined(self, grower: "GrowingNetwork", declined: Declined) -> None:
        """Act after events were undone because `next` raised `Declined`."""

    def fraction_grown(self, stage: int, widths: Widths) -> float | None:
        """Return the fraction of all growth done once a stage has these widths; None if unknown."""
        return None

    def stage_end(self, grower: "GrowingNetwork") -> int | None:
        """Epoch (exclusive) at which the current stage ends, at the latest; None if unknown."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state in plain containers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""


class GrowingNetwork(ABC):
    """View of a growing network for triggers and parts; `growlab.Grower` implements it.

    Attributes:
        network: the network at its present widths.
        graph: its width graph.
        full_graph: its width graph at full width.
        method: growth method.
        trigger: growth trigger.
        state: stage, widths and other state besides tensors.
        clock: progress of the training.
        seed: random seed of everything that growth draws.
        events: all growth events so far.
        training: data, cost and records of the training.
        seed_widths: width of each group in the seed.
        followers: the optimizers that follow.
        averages: averages of the network kept by parts, by name: modules with its tensors, which follow every event.
        notes: entries for the receipt of the trigger's next event.
        parts: features that accompany growth.
    """

    network: nn.Module
    graph: WidthGraph
    full_graph: WidthGraph
    method: GrowthMethod
    trigger: Trigger
    state: GrowthState
    clock: Clock
    seed: int
    events: list[GrowthEvent]
    training: Training
    seed_widths: dict[str, int]
    followers: Followers
    averages: dict[str, nn.Module]
    notes: dict[str, Any]
    parts: tuple[Any, ...]
    _example: Example
    _modules: list[nn.Module]
    _annealing: tuple[int, int]

    @property
    def optimizers(self) -> list[Optimizer]:
        """Attached optimizers that are still in use."""
        return self.followers.optimizers

    def gradients(self) -> dict[str, Tensor]:
        """Running means of gradients that the optimizers keep, by parameter name."""
        return self.followers.gradients()

    def copies(self) -> dict[str, nn.Module]:
        """Averages of the network that grow along, by name."""
        return {**{f"module{index}": module for index, module in enumerate(self._modules)}, **self.averages}

    def stepping(self) -> list[Optimizer]:
        """Optimizers that step the parameters: those inside of wrappers, not the wrappers."""
        return [optimizer for optimizer in self.optimizers if not any(True for _ in inside(optimizer))]

    def _saved_optimizers(self) -> list[Optimizer]:
        # A wrapper without a state_dict has no state besides that of the optimizer inside.
        return [optimizer for optimizer in self.optimizers if hasattr(optimizer, "state_dict")]

    def checkpoint(self) -> dict[str, Any]:
        """Copy everything that training changes between two growth events: network, optimizers, averages and parts."""
        networks = [self.network, *self.copies().values()]
        return deepcopy(
            {
                "networks": [dict(network.state_dict()) for network in networks],
                "optimizers": [optimizer.state_dict() for optimizer in self._saved_optimizers()],
                "parts": [part.state_dict() for part in self.parts],
                "annealing": self._annealing,
            }
        )

    @on_cpu
    def put_back(self, saved: Mapping[str, Any]) -> None:
        """Restore the result of `checkpoint` at the same stage."""
        saved = deepcopy(dict(saved))
        networks = [self.network, *self.copies().values()]
        for network, tensors in zip(networks, saved["networks"], strict=True):
            network.load_state_dict(tensors)
        for optimizer, state in zip(self._saved_optimizers(), saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        for part, state in zip(self.parts, saved["parts"], strict=True):
            part.load_state_dict(state)
        self._annealing = saved["annealing"]

    @abstractmethod
    def graph_at(self, state: GrowthState) -> WidthGraph:
        """Width graph of the network in a state."""

    @abstractmethod
    def regions(self) -> dict[str, Regions]:
        """Regions of each parameter, by name, on the network's device: its elements by the stage that added them."""

    def rebuilding(self) -> AbstractContextManager[None]:
        """Make a context in which the network's parameters can be replaced, also if it is sharded."""
        return nullcontext()

    def state_to_compare(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, value) of all state that must be identical on every rank."""
        yield "the growth state", self.state.as_dict()
        yield from ranks.network_state(self.network, self.optimizers)
        for name, copy in self.copies().items():
            yield from ((f"{key} of {name}", tensor) for key, tensor in copy.state_dict().items())

    def probe(self) -> tuple[Any, ...]:
        """Example inputs for checking events, on the network's device and in its precision."""
        return network_inputs(self._example, self.network)

    def measurement(self, number: int, asker: str) -> Measurement:
        """Return a measurement on training batches; results are averaged over processes.

        Args:
            number: number of batches.
            asker: name in the error message.

        Raises:
            UserError: the loop has provided no training data.
        """
        training = self.training
        if training.batches is None or training.loss is None:
            raise UserError(
                f"{asker} needs training data: give some with Grower.provide, or choose another method or trigger."
            )
        weights = annealed(self.state.norm_weights, self.state.norm_progress)
        batches, means = training.batches(number), (ranks.averaged, ranks.shared)
        return Measurement(self.network, self.graph, batches, training.loss, *means, weights, training.near_zero)

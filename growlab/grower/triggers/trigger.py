"""The interface of triggers, and what they see of a run."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from growlab.base.errors import UserError, as_user_errors
from growlab.base.settings import finite
from growlab.growth import GrowthMethod, GrowthState, Measurement
from growlab.widths import WidthGraph

Widths = Mapping[str, int]
"""Width of each group."""
_CALLED = {"batches", "loss", "weight", "records", "flops", "epoch_batches", "seed_draws"}


@dataclass(frozen=True)
class Clock:
    """How far a training has come.

    Attributes:
        epoch: the current epoch, from 0.
        step: optimizer steps done.
        cost: what has been spent, in the unit of whoever counts (FLOPs, images, a part of the budget).

    Raises:
        UserError: one is no finite number.
    """

    epoch: int = 0
    step: int = 0
    cost: float = 0.0

    def __post_init__(self) -> None:
        # numpy's and torch's would be in checkpoints, which `torch.load(weights_only=True)` does not take then.
        for name, value in vars(self).items():
            if hasattr(value, "item"):
                object.__setattr__(self, name, value.item())
        with as_user_errors():
            finite(**vars(self))


@dataclass(frozen=True)
class Training:
    """What a training loop tells triggers, parts and methods beside the network.

    Attributes:
        batches: maps a number to so many training batches, this process's part: tuples of inputs and a target,
            or of one mapping of inputs by name and a target.
        loss: mean loss of a batch from the network's output and the target.
        weight: weight of a batch in means over batches, from output and target; None: its samples.
        near_zero: a number beside zero that training does not take for zero, in its precision.
        steps: optimizer steps of each epoch.
        samples: training samples of each epoch.
        records: what was recorded of each epoch so far, by column of metrics.csv.
        reference_flops: forward FLOPs of the fixed-size run, which percentages of cost are of.
        flops: maps widths and the share of growth that is done to forward FLOPs per sample.
        epoch_batches: maps an epoch and a number that order and augmentation are drawn by to all of the epoch's
            training batches, this process's part.
        seed_draws: makes what the network draws (dropout) a function of an epoch and a batch's number.
    """

    batches: Callable[[int], Sequence[tuple[Tensor, ...]]] | None = None
    loss: Callable[..., Tensor] | None = None
    weight: Callable[..., Tensor] | None = None
    near_zero: float = 2.0**-100
    steps: Sequence[int] = ()
    samples: Sequence[int] = ()
    records: Callable[[], Sequence[Mapping[str, Any]]] = list
    reference_flops: float = 0.0
    flops: Callable[[Mapping[str, int], float], int] | None = None
    epoch_batches: Callable[[int, int], Iterable[tuple[Tensor, ...]]] | None = None
    seed_draws: Callable[[int, int], None] | None = None

    def with_told(self, **told: Any) -> "Training":
        """The same with some of it told anew.

        Raises:
            UserError: there is no such field, or what is to be called cannot be.
        """
        known = [field.name for field in fields(self)]
        if unknown := [name for name in told if name not in known]:
            raise UserError(f"look_at knows no {unknown[0]!r}; it takes {', '.join(known)}.")
        for name in _CALLED & told.keys():
            if told[name] is not None and not callable(told[name]):
                raise UserError(
                    f"{name} of look_at must be a function, not a {type(told[name]).__name__}; see "
                    "growlab.grower.triggers.Training."
                )
        return replace(self, **told)


class Run(Protocol):
    """A growing network in training, as triggers and parts see it; `growlab.Grower` is one."""

    network: nn.Module
    graph: WidthGraph
    method: GrowthMethod
    trigger: "Trigger"
    state: GrowthState
    clock: Clock
    seed: int
    events: list[dict[str, Any]]
    training: Training
    seed_widths: dict[str, int]

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that follow and are still in use."""
        ...

    def copies(self) -> dict[str, nn.Module]:
        """Averages of the network that grow along, by name."""
        ...

    def graph_at(self, state: GrowthState) -> WidthGraph:
        """The width graph of the network in a state."""
        ...

    def probe(self) -> tuple[Any, ...]:
        """Inputs that events are checked on, where the network is and in its precision."""
        ...

    def measurement(self, number: int, asker: str) -> Measurement:
        """So many training batches to measure something on.

        Raises:
            UserError: the training loop gives none.
        """
        ...

    def gradients(self) -> dict[str, Tensor]:
        """The optimizers' running means of gradients, by parameter name."""
        ...


class Trigger(ABC):
    """Says which widths come next, and when.

    What it says must be a function of the run and of its own `state_dict`: ranks ask alike, and a resumed run asks
    again.
    """

    #: Global batch size of each stage, where the trigger says it.
    batch_sizes: tuple[int, ...] | None = None
    #: Whether the network grows at all.
    grows: bool = True
    #: Whether the network leaves the widths that it is made with.
    resizes: bool = True
    #: What it needs a loop to tell: "epoch", "step" or "cost"; None: nothing, or it looks at several.
    counts: str | None = None
    #: Whether it is known beforehand when each stage begins.
    knows_stages: bool = False
    #: Whether it decides by what widths to come will cost.
    plans_cost: bool = False
    #: Whether the norm of the optimizers' running gradients belongs into the records.
    wants_gradients: bool = False
    #: Passes of its own over data, with their results and their cost.
    looks: Sequence[Mapping[str, Any]] = ()

    def leave_to_parts(self, groups: Collection[str]) -> None:  # noqa: B027 - most have no use for it
        """Groups whose widths parts decide while the network trains; told before anything is asked."""

    def forecast(self, graph: WidthGraph) -> list[Widths] | None:
        """Width of each group at every stage; None where it is not known before.

        Raises:
            UserError: the network has no such widths.
        """
        return None

    def steps(self, graph: WidthGraph) -> list[Widths]:
        """Widths that each group goes through whatever comes, of the groups that are led; none where not known."""
        return self.forecast(graph) or []

    def first(self, graph: WidthGraph) -> Widths:
        """Width of each group in the seed."""
        forecast = self.forecast(graph)
        return graph.full_widths if forecast is None else forecast[0]

    @abstractmethod
    def next(self, run: Run) -> Widths | None:
        """Widths to grow to now; None to go on with those that are there.

        It is asked at every boundary that the training loop announces, and again after each event.
        """

    def share(self, stage: int, widths: Widths) -> float | None:
        """Part of all growth that is done once a stage with these widths has begun; None where it is not known."""
        return None

    def check(self, run: Run) -> None:  # noqa: B027 - most go with every run
        """Called when the run knows its training, before the first step.

        Raises:
            UserError: it does not go with the run, and why.
        """

    def check_records(self, columns: Collection[str]) -> None:  # noqa: B027 - most look at none
        """Called before the first step with what each epoch's record will have.

        Raises:
            UserError: it looks at something else.
        """

    def stage_end(self, run: Run) -> int | None:
        """Epoch behind the last one of the present stage, at the latest; None where it is not known before."""
        return None

    def told(self) -> Mapping[str, Any]:
        """Entries for the receipt of the event that it has just asked for."""
        return {}

    def stage_at(self, clock: Clock) -> int | None:
        """Stage that a moment belongs to; None where it is not known before."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What it remembers, in plain containers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most remember nothing
        """Take up what `state_dict` returned."""

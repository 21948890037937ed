"""The interface of triggers, and what they see of a run."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from growlab.growth import GrowthMethod, GrowthState
from growlab.widths import WidthGraph

#: Width of each group.
Widths = Mapping[str, int]


@dataclass(frozen=True)
class Clock:
    """How far a training has come.

    Attributes:
        epoch: the current epoch, from 0.
        step: optimizer steps done.
        cost: what has been spent, in the unit of whoever counts (FLOPs, images, a part of the budget).
    """

    epoch: int = 0
    step: int = 0
    cost: float = 0.0


class Run(Protocol):
    """A growing network in training, as triggers and parts see it; `growlab.Grower` is one."""

    network: nn.Module
    graph: WidthGraph
    method: GrowthMethod
    state: GrowthState
    clock: Clock
    seed: int
    events: list[dict[str, Any]]

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

    def forecast(self, graph: WidthGraph) -> list[Widths] | None:
        """Width of each group at every stage; None where it is not known before.

        Raises:
            UserError: the network has no such widths.
        """
        return None

    def first(self, graph: WidthGraph) -> Widths:
        """Width of each group in the seed."""
        forecast = self.forecast(graph)
        return graph.full_widths if forecast is None else forecast[0]

    @abstractmethod
    def next(self, run: Run) -> Widths | None:
        """Widths to grow to now; None to go on with those that are there.

        It is asked at every boundary that the training loop announces, and again after each event.
        """

    def stage_at(self, clock: Clock) -> int | None:
        """Stage that a moment belongs to; None where it is not known before."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What it remembers, in plain containers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most remember nothing
        """Take up what `state_dict` returned."""

"""The trigger of methods that decide widths by themselves."""

from collections.abc import Mapping
from typing import Any

from growlab.base.errors import UserError, as_user_errors
from growlab.base.ranks import gather
from growlab.grower.triggers.at import At
from growlab.grower.triggers.trigger import Run, Trigger, Widths
from growlab.growth import WidthDecision
from growlab.growth.schedule import Number
from growlab.widths import WidthGraph, tensors_of


class Decided(Trigger):
    """Ask the run's method for widths at each of its own boundaries; see `growlab.growth.WidthDecision`.

    Args:
        width: of the seed, a fraction of full width or the width of each group.
    """

    def __init__(self, width: Number | Mapping[str, int] = 1) -> None:
        self._first = At({0: width})

    def first(self, graph: WidthGraph) -> Widths:
        """Width of each group in the seed."""
        return self._first.first(graph)

    def next(self, run: Run) -> Widths | None:
        """The method's widths, asked once at each boundary.

        Raises:
            UserError: the run's method decides nothing, or cannot decide.
        """
        if not isinstance(run.method, WidthDecision):
            raise UserError(f"{run.method.name} does not decide widths by itself; give another trigger.")
        boundary = run.method.boundary(run.clock.epoch, run.clock.step)
        if boundary is None or boundary <= run.state.asked:
            return None
        run.state.asked = boundary
        tensors = tensors_of(run.network, run.graph)
        with as_user_errors():
            widths: dict[str, Any] = run.method.decide(run.graph, tensors, run.state.widths, run.gradients())
        # Ranks compute alike; should one not, it follows rank 0, and the comparison of ranks tells.
        widths = gather(widths)[0]
        return None if widths == run.state.widths else widths

"""The trigger of methods that decide widths by themselves."""

from collections.abc import Mapping
from typing import Any

from growlab.base.errors import UserError, as_user_errors
from growlab.base.ranks import gather
from growlab.grower.triggers.at import At
from growlab.grower.triggers.trigger import GrowingNetwork, Trigger, Widths
from growlab.growth import WidthDecision
from growlab.growth.schedule import Number
from growlab.widths import WidthGraph, tensors_of


class ByMethod(Trigger):
    """Ask the grower's method for widths at each of its own boundaries; see `growlab.growth.WidthDecision`.

    Args:
        width: of the seed, a fraction of full width or the width of each group.
    """

    def __init__(self, width: Number | Mapping[str, int] = 1) -> None:
        self._first = At({0: width})

    def first(self, graph: WidthGraph) -> Widths:
        """Width of each group in the seed."""
        return self._first.first(graph)

    def next(self, grower: GrowingNetwork) -> Widths | None:
        """Widths of the method, asked once at each boundary.

        Raises:
            UserError: the method decides nothing, or cannot decide.
        """
        if not isinstance(grower.method, WidthDecision):
            raise UserError(f"{grower.method.name} does not decide widths by itself; give another trigger.")
        boundary = grower.method.boundary(grower.clock.epoch, grower.clock.step)
        if boundary is None or boundary <= grower.state.asked:
            return None
        grower.state.asked = boundary
        tensors = tensors_of(grower.network, grower.graph)
        with as_user_errors():
            widths: dict[str, Any] = grower.method.decide(
                grower.graph, tensors, grower.state.widths, grower.gradients()
            )
        # Ranks compute alike; should one not, it follows rank 0, and the comparison of ranks notices.
        widths = gather(widths)[0]
        return None if widths == grower.state.widths else widths

"""The part that lets isotropic layers decide their own widths in a network that otherwise grows by a schedule."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import nn

from growlab.base.errors import UserError, as_user_errors
from growlab.base.ranks import gather
from growlab.grower.part import WidthPart
from growlab.grower.triggers import GrowingNetwork, Never, OnDemand, Trigger, Widths
from growlab.growth.method import WidthDecision
from growlab.parts.isotropic.method import Isotropic, adaptable
from growlab.parts.isotropic.spectrum import consumers, producers
from growlab.widths import WidthGraph, tensors_of


class IsotropicLayers(WidthPart):
    """Adds and removes neurons of isotropic layers by events of their own; other groups are left to the run's method.

    Isotropic layers begin at the width that the network is made with. At each of its boundaries an event by
    `Isotropic` goes before the trigger's, with a receipt of its own (`asked_by`). What such an event preserves is said
    there; the trigger's events preserve what the run's method does.

    Args:
        mode: see `Isotropic`.
        settings: other arguments of it.

    Raises:
        ValueError: a value cannot be used.
    """

    SETTINGS = (Isotropic,)

    name = "isotropic"
    follows_norms = True
    method: Isotropic

    def __init__(self, mode: Literal["scaffold", "scheduled"] = "scaffold", **settings: Any) -> None:
        self.method = Isotropic(mode, **settings)
        self._start: dict[str, int] = {}
        self._prepared: WidthGraph | None = None
        # The last boundary at which the layers were asked.
        self._asked = -1

    def applies(self, trigger: Trigger) -> bool:
        """Return False where nothing grows: isotropic layers then keep their widths too."""
        return not isinstance(trigger, Never)

    def prepare(
        self, network: nn.Module, graph: WidthGraph, seed: int, example: tuple[Any, ...]
    ) -> WidthGraph:
        """Take over all groups whose norm is taken, of which those with a basis keep their width.

        Raises:
            UserError: the network has no isotropic layer.
        """
        with as_user_errors():
            adaptable(graph)
        # A method that knows nothing of norms must not widen what one is taken of.
        self.groups = tuple(dict.fromkeys(group for radius in graph.radii for group in radius.groups))
        self._prepared = graph
        self._start = {group: graph.groups[group].full_width for group in self.groups}
        return graph

    def check(self, grower: GrowingNetwork) -> None:
        """Refuse what decides these widths too, or has to know them before.

        Raises:
            UserError: the run's method decides widths by itself, its trigger decides by what they will cost, or a layer
                comes in later as the identity between two of these layers, whose widths may differ by then.
        """
        if isinstance(grower.method, WidthDecision):
            raise UserError(
                f"{grower.method.name} decides the widths of isotropic layers already: leave IsotropicLayers out, or "
                "take another growth method for the other layers."
            )
        if isinstance(grower.trigger, OnDemand) and grower.trigger.demand.plans_cost:
            raise UserError(
                "a budget is kept by what widths to come will cost, which nobody can tell of isotropic layers: their "
                "singular values decide on the way. Take a schedule of stages, or leave IsotropicLayers "
                "out."
            )

        assert self._prepared is not None
        for group in self.groups:
            behind = [
                one.weight for one in consumers(self._prepared, group) if one.weight in grower.graph.axes
            ]
            if behind and not producers(grower.graph, group):
                raise UserError(
                    f"{group} comes in later as the identity, for which the layers on both sides must be equally wide; "
                    "isotropic layers decide their own widths: leave IsotropicLayers out, or let no layer come in."
                )

    def stage_widths(self, num_stages: int) -> Mapping[str, Sequence[int]]:
        """The widths at the beginning: what is planned with before the layers have decided."""
        return {group: [width] * num_stages for group, width in self._start.items()}

    def decide(self, grower: GrowingNetwork) -> Widths | None:
        """The layers' widths, asked once at each boundary.

        Raises:
            UserError: what scores need is missing.
        """
        boundary = self.method.boundary(grower.clock.epoch, grower.clock.step)
        if boundary is None or boundary <= self._asked:
            return None
        self._asked = boundary
        now = grower.state.widths
        with as_user_errors():
            wanted = self.method.decide(
                grower.graph, tensors_of(grower.network, grower.graph), now, grower.gradients()
            )
        # Ranks compute alike; should one not, it follows rank 0, and the comparison of ranks notices.
        own: dict[str, int] = gather({group: wanted[group] for group in self.groups})[0]
        return None if all(now[group] == width for group, width in own.items()) else own

    def state_dict(self) -> dict[str, Any]:
        """The boundary at which the layers were asked last."""
        return {"asked": self._asked}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._asked = int(state["asked"])

"""Forecast a run's widths at every stage, as far as they are known before training."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from growlab.base.errors import UserError
from growlab.grower.part import Part, WidthPart
from growlab.grower.triggers import Never, Trigger, Widths
from growlab.growth import GrowthMethod, GrowthState
from growlab.widths import WidthGraph

_ENTRIES_OF_STATE = ("full_widths", "growth", "clock", "events", "trigger", "parts")


class Forecast:
    """Stages of a run as known before training.

    Args:
        trigger: the run's trigger.
        graph: width graph of the prepared network at full width.
        parts: the run's parts, which may add width groups.

    Attributes:
        stages: width of each group at every stage; None if training decides them.
        seed: width of each group in the seed.
        known: True if the start of each stage is known too.
        decided: groups whose widths parts decide during training.

    Raises:
        UserError: the widths do not suit the network.
    """

    def __init__(self, trigger: Trigger, graph: WidthGraph, parts: Sequence[Part]) -> None:
        self._trigger, self._graph, self._parts = trigger, graph, tuple(parts)
        self.decided = {group for part in parts if part.method is not None for group in part.groups}
        self._own = {group for part in parts for group in part.groups}
        trigger.left_to_parts = frozenset(self.decided)
        self.known = trigger.knows_stages and all(part.method is None for part in parts)
        stages = trigger.forecast(graph)
        number, widening = 1 if stages is None else len(stages), (p for p in parts if isinstance(p, WidthPart))
        own = {group: each for part in widening for group, each in part.stage_widths(number).items()}
        self.stages: list[dict[str, int]] | None = None
        if stages is not None:
            self.stages = [
                {**widths, **{g: each[stage] for g, each in own.items()}} for stage, widths in enumerate(stages)
            ]
        self.seed = {**trigger.first(graph), **{group: each[0] for group, each in own.items()}}

    def check(self, method: GrowthMethod) -> None:
        """Refuse stages that the method cannot grow through.

        Raises:
            UserError: a stage is narrower than the previous one, or the method cannot grow a group to these widths.
        """
        for stage, (before, after) in enumerate(pairwise(self.stages or ()), start=1):
            narrower = next((group for group, width in before.items() if after[group] < width), None)
            if narrower is not None and not method.shrinks:
                raise UserError(
                    f"stage {stage} of the trigger is narrower than the one before it ({before[narrower]} to "
                    f"{after[narrower]} channels of {narrower!r}), and {method.name} only widens."
                )
        if not any(part.grows for part in self._parts):
            # Inserted blocks change the groups, and parts widen their own groups themselves.
            steps = self._trigger.steps(self._graph)
            method.check(self._graph, [{g: step[g] for g in step if g not in self._own} for step in steps])

    def fraction_grown(self, stage: int, widths: Widths) -> float:
        """Return the fraction of all growth done once a stage has these widths; 1 if unknown."""
        fraction = self._trigger.fraction_grown(stage, widths)
        return 1.0 if fraction is None else fraction

    def complete(self, asked: Widths, now: Widths, stage: int) -> dict[str, int]:
        """Complete the trigger's widths to those of all groups.

        Args:
            asked: requested by the trigger; other groups keep their width.
            now: width of each group now.
            stage: the new stage as triggers count it.
        """
        scheduled = {} if self.stages is None else {g: self.stages[stage][g] for g in self._own}
        return {**now, **asked, **scheduled, **{group: now[group] for group in self.decided}}

    def nothing_grows(self) -> str:
        """Return a warning if nothing can grow, else ""; also "" if nothing should."""
        if self._graph.groups or isinstance(self._trigger, Never) or any(part.grows for part in self._parts):
            return ""
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(self._graph.fixed.items())[:3])
        return f"nothing in this network can grow{f' ({reasons})' if reasons else ''}"

    def ends_narrow(self) -> str:
        """Return a warning if the last stage is narrower than the given network, else ""."""
        last, full = (self.stages or [{}])[-1], self._graph.full_widths
        narrow = [group for group in last if last[group] < full[group] and group not in self._own]
        if not narrow or isinstance(self._trigger, Never):
            return ""
        return (
            f"the trigger's last stage has {last[narrow[0]]} of {full[narrow[0]]} channels of {narrow[0]!r}: the "
            "network will end narrower than it was given"
        )

    def unreached(self, stage: int, stepped: bool) -> str:
        """Return a warning if stages after this one are scheduled, else ""; `stepped` if the loop has called `step`."""
        if self.stages is None or stage >= len(self.stages) - 1:
            return ""
        why = "" if stepped else ", and the loop never called Grower.step"
        return (
            f"training has ended in stage {stage} of {len(self.stages) - 1}{why}: the network is narrower than in the "
            "trigger's last stage"
        )

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a `Grower.state_dict` of another run.

        Raises:
            UserError: it is not the state of a grower, or of another network, other parts or other widths.
        """
        kinds = {name: list if name == "events" else Mapping for name in _ENTRIES_OF_STATE}
        if not isinstance(state, Mapping) or not all(isinstance(state.get(name), kind) for name, kind in kinds.items()):
            raise UserError("this is not the state of a Grower: give the result of Grower.state_dict().")
        if state["full_widths"] != self._graph.full_widths:
            raise UserError("the state is of another network: its width groups or their full widths differ.")
        names = {part.name for part in self._parts}
        if names != set(state["parts"]):
            saved, own = (", ".join(sorted(each)) or "none" for each in (state["parts"], names))
            raise UserError(f"the state is of a run with other parts: {saved}; this one has {own}.")
        growth = GrowthState.from_dict(state["growth"])
        if self.stages is None or len(self.stages) == 1:
            # With a single stage, as for the evaluation of checkpoints, no later one depends on the widths.
            return
        stage = growth.scheduled_stage
        here = self.stages[min(stage, len(self.stages) - 1)]
        for group, width in growth.widths.items():
            if group not in self.decided and here.get(group, width) != width:
                raise UserError(
                    f"the state is of stage {stage} with {width} channels of {group!r}, where this trigger has "
                    f"{here[group]}: give the trigger that the run began with; only later stages may differ."
                )

    def stage_of(self, widths: Mapping[str, int], default: int) -> tuple[int, dict[str, list[int]]]:
        """Return the stage with these widths, and the birth stage of each group's channels.

        Args:
            widths: of all groups.
            default: returned if no stage has these widths.
        """
        stages = self.stages or []
        stage = stages.index(dict(widths)) if dict(widths) in stages else default
        births = {
            group: [
                next((s for s, known in enumerate(stages[:stage]) if known[group] > channel), stage)
                for channel in range(width)
            ]
            for group, width in widths.items()
        }
        return stage, births

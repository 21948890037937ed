"""Triggers without a demand: widths at given times, by a schedule, fixed, or decided by the growth method."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from numbers import Real
from typing import Any

from growlab.base.errors import UserError, as_user_errors
from growlab.base.ranks import gather
from growlab.grower.triggers.trigger import Clock, GrowingNetwork, Trigger, Widths
from growlab.growth import Schedule, WidthDecision
from growlab.growth.schedule import Number, exact
from growlab.widths import WidthGraph, tensors_of

UNITS = ("epoch", "step", "cost")


class At(Trigger):
    """Grow to given widths at given times.

    Args:
        widths: maps each stage's start to its width: a fraction of full width, or the width of each group (others
            keep theirs). The first start is 0. With blocks to insert, {"width": 0.5, "depth": 0.25} separates the
            fraction of full width from that of the inserted blocks; what is left out stays as it is.
        unit: unit of the starts: "epoch", "step" (optimizer steps) or "cost" (given to `Grower.step`).
        batch_sizes: global batch size of each stage, for front ends that can change it.

    Raises:
        UserError: the stages are invalid.

    Examples:
        >>> trigger = At({0: 0.25, 1000: 0.5, 3000: 1.0}, unit="step")
        >>> [trigger.stage_at(Clock(step=step)) for step in (0, 999, 1000, 5000)]
        [0, 0, 1, 2]
    """

    knows_stages = True

    def __init__(
        self, widths: Mapping[float, Any], unit: str = "epoch", batch_sizes: Sequence[int] | None = None
    ) -> None:
        if unit not in UNITS:
            raise UserError(f"unit={unit!r} of a trigger must be {', '.join(UNITS)}.")
        if not isinstance(widths, Mapping):
            raise UserError(
                "a trigger is a growlab.Trigger, a schedule, or a dict of start to width such as {0: 0.25, 10: 1.0}, "
                f"not {widths!r}."
            )
        if wrong := [start for start in widths if not _is_number(start)]:
            raise UserError(f"the start {wrong[0]!r} of a trigger's stage must be a finite number.")
        self.starts = tuple(sorted(widths))
        if self.starts[:1] != (0,):
            raise UserError("a trigger's first stage must begin at 0, such as {0: 0.25, 10: 1.0}.")
        given, self._depths = [widths[start] for start in self.starts], self._depths_of(widths)
        self._widths = tuple(w.get("width", {}) if _is_apart(w) else w for w in given)
        for width in self._widths:
            if not isinstance(width, Mapping) and not (_is_number(width) and 0 < width <= 1):
                raise UserError(f"a width of {width!r} must be a fraction of full width, above 0 and at most 1.")
        self._clock, self.unit = unit, unit if len(self.starts) > 1 else None
        self.resizes = any(isinstance(width, Mapping) or width != 1 for width in self._widths)
        self.batch_sizes = None if batch_sizes is None else self._checked(batch_sizes)

    def _depths_of(self, widths: Mapping[float, Any]) -> list[float] | None:
        """Fraction of the blocks at each stage; None if no stage gives width and depth separately."""
        given = [widths[start] for start in self.starts]
        if not any(_is_apart(width) for width in given):
            return None
        depths = list[float]()
        for width in given:
            before = depths[-1] if depths else 0.0
            depth = width.get("depth", before) if _is_apart(width) else width if _is_number(width) else before
            if not (_is_number(depth) and before <= depth <= 1):
                raise UserError(f"a depth of {depth!r} must be a fraction of the blocks, from {before:g} to 1.")
            depths.append(float(depth))
        return depths

    def _checked(self, batch_sizes: Sequence[int]) -> tuple[int, ...]:
        sizes = tuple(batch_sizes) if isinstance(batch_sizes, Iterable) else ()
        if len(sizes) != len(self.starts) or not all(_is_whole(size) and size > 0 for size in sizes):
            raise UserError(
                f"batch_sizes={batch_sizes!r} of a trigger must be whole numbers above 0, one for each of its "
                f"{len(self.starts)} stages."
            )
        return tuple(map(int, sizes))

    def forecast(self, graph: WidthGraph) -> list[Widths]:
        """Width of each group at every stage.

        Raises:
            UserError: a group is unknown, or its width is invalid.
        """
        stages: list[Widths] = []
        for width in self._widths:
            before = stages[-1] if stages else graph.full_widths
            if isinstance(width, Mapping):
                stages.append({**before, **_widths_of_groups(width, graph)})
            else:
                fraction = exact(width)
                widths = Schedule((1,), (fraction,), (1,)).widths(graph)[0]
                # The parts of a stream are rounded separately, and could shrink by a channel.
                earlier = [exact(other) for other in self._widths[: len(stages)] if not isinstance(other, Mapping)]
                grows = bool(earlier) and fraction >= max(earlier)
                stages.append({g: max(w, before[g]) if grows else w for g, w in widths.items()})
        return stages

    def stage_at(self, clock: Clock) -> int:
        """Return the stage at a time."""
        return max(bisect_right(self.starts, getattr(clock, self._clock)) - 1, 0)

    def fraction_grown(self, stage: int, widths: Widths) -> float:
        """Return the fraction of all growth done: the depth if stages give it, else stages count as equal steps."""
        if self._depths is not None:
            return self._depths[stage]
        last = len(self.starts) - 1
        return stage / last if last else 1.0

    def stage_end(self, grower: GrowingNetwork) -> int | None:
        """Epoch (exclusive) at which the current stage ends."""
        if self._clock != "epoch":
            return None
        epochs, stage = range(len(grower.training.steps)), grower.state.scheduled_stage
        return max((epoch + 1 for epoch in epochs if self.stage_at(Clock(epoch=epoch)) == stage), default=None)

    def next(self, grower: GrowingNetwork) -> Widths | None:
        """Return the widths of the next stage once it is due."""
        stage = grower.state.scheduled_stage
        return self.forecast(grower.graph)[stage + 1] if stage < self.stage_at(grower.clock) else None


def _widths_of_groups(widths: Mapping[str, Any], graph: WidthGraph) -> dict[str, int]:
    for name, width in widths.items():
        if name not in graph.groups:
            raise UserError(f"the network has no width group {name!r}, only {', '.join(graph.groups) or 'none'}.")
        full = graph.groups[name].full_width
        if not _is_whole(width) or not 1 <= width <= full:
            raise UserError(
                f"the width {width!r} of group {name!r} must be a whole number from 1 to its full width {full}."
            )
    return {name: int(width) for name, width in widths.items()}


def _is_apart(width: Any) -> bool:
    return isinstance(width, Mapping) and bool(width) and set(width) <= {"width", "depth"}


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and isfinite(value)


def _is_whole(value: Any) -> bool:
    return _is_number(value) and value == int(value)


class Scheduled(At):
    """Grow by a schedule, at the beginning of epochs; see `growlab.growth.make_schedule`.

    Args:
        schedule: stages, widths and batch sizes.
    """

    def __init__(self, schedule: Schedule) -> None:
        if not isinstance(schedule, Schedule):
            raise UserError(f"Scheduled needs a schedule, as growlab.make_schedule returns, not {schedule!r}.")
        stages: dict[float, Any] = dict(zip(schedule.starts, schedule.width_fractions, strict=True))
        super().__init__(stages, batch_sizes=schedule.batch_sizes)
        self.schedule = schedule

    def forecast(self, graph: WidthGraph) -> list[Widths]:
        """Width of each group at every stage."""
        return list(self.schedule.widths(graph))


class Never(Trigger):
    """Train at a fixed width.

    Args:
        width: of every group relative to full width; may be above 1. At 1 the network keeps the weights that its
            constructor drew.
        depth: fraction of the insertable blocks that are present.

    Raises:
        UserError: a value is not positive, or the depth is above 1.
    """

    knows_stages = True

    def __init__(self, width: Number = 1, depth: float = 1.0) -> None:
        if not (_is_number(width) and width > 0):
            raise UserError(f"a width of {width} relative to full width must be above 0.")
        if not (_is_number(depth) and 0 <= depth <= 1):
            raise UserError(f"depth must be a fraction of the blocks, from 0 to 1, not {depth}.")
        self._width, self.depth = width, depth
        self.resizes = width != 1

    def forecast(self, graph: WidthGraph) -> list[Widths]:
        """The width of each group."""
        return [{name: max(1, round(g.full_width * self._width)) for name, g in graph.groups.items()}]

    def fraction_grown(self, stage: int, widths: Widths) -> float:
        """Return the fraction of insertable blocks that are present."""
        return self.depth

    def stage_end(self, grower: GrowingNetwork) -> int:
        """Number of the run's epochs."""
        return len(grower.training.steps)

    def next(self, grower: GrowingNetwork) -> Widths | None:
        """Return None: widths stay fixed."""
        return None


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
        """Return the method's widths; it is asked once at each boundary.

        Raises:
            UserError: the method does not decide widths, or fails to.
        """
        method, state = grower.method, grower.state
        if not isinstance(method, WidthDecision):
            raise UserError(f"{method.name} does not decide widths by itself; give another trigger.")
        boundary = method.boundary(grower.clock.epoch, grower.clock.step)
        if boundary is None or boundary <= state.asked:
            return None
        state.asked = boundary
        tensors = tensors_of(grower.network, grower.graph)
        with as_user_errors():
            widths = method.decide(grower.graph, tensors, state.widths, grower.gradients())
        # All ranks compute the same; if one does not, it follows rank 0, and the comparison of ranks reports it.
        widths = gather(widths)[0]
        return None if widths == state.widths else widths


def as_trigger(trigger: Trigger | Schedule | Mapping[float, Any]) -> Trigger:
    """Make a trigger from a schedule, or from a dict of epoch to width such as {0: 0.25, 10: 1.0}."""
    if isinstance(trigger, Trigger):
        return trigger
    return Scheduled(trigger) if isinstance(trigger, Schedule) else At(trigger)

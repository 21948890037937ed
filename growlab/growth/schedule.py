"""Growth schedules: epochs, widths and batch sizes of each stage (Yuan et al. 2023, Section 3.2)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import pairwise
from math import floor
from typing import Literal

from growlab.base.settings import at_least, finite, not_none, one_of, whole
from growlab.widths import WidthGraph

Number = int | float | Fraction
# Largest number of epochs: runs store at least one number per epoch.
MOST_EPOCHS = 1_000_000


@dataclass(frozen=True)
class Schedule:
    """Stages of a run: epochs, widths and batch sizes.

    Attributes:
        epochs: epochs of each stage.
        width_fractions: width of each stage relative to full width; the last is 1.
        batch_sizes: global batch size of each stage.
    """

    epochs: tuple[int, ...]
    width_fractions: tuple[Fraction, ...]
    batch_sizes: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """Number of stages, one more than growth events."""
        return len(self.epochs)

    @property
    def total_epochs(self) -> int:
        """Epochs of the whole run."""
        return sum(self.epochs)

    @property
    def starts(self) -> tuple[int, ...]:
        """First epoch of each stage."""
        return tuple(sum(self.epochs[:stage]) for stage in range(self.num_stages))

    def stage_at(self, epoch: int) -> int:
        """Stage of an epoch; epochs beyond the end belong to the last stage."""
        return max(stage for stage, start in enumerate(self.starts) if start <= max(epoch, 0))

    def batch_size_at(self, epoch: int) -> int:
        """Global batch size of an epoch."""
        return self.batch_sizes[self.stage_at(epoch)]

    def widths(self, graph: WidthGraph) -> list[dict[str, int]]:
        """Width of every group at every stage; never decreasing from stage to stage.

        A group that pads a narrower stream (an option-A shortcut) gets the difference of the two streams' widths, so
        that the rule applies to whole streams.
        """
        stages: list[dict[str, int]] = []
        for fraction in self.width_fractions:
            widths = {}
            for name, group in graph.groups.items():
                width = stream_width(group.below + group.full_width, fraction)
                width -= stream_width(group.below, fraction) if group.below else 0
                before = stages[-1][name] if stages else 1
                # Streams are rounded separately, so their difference may be outside of [1, full width].
                widths[name] = max(before, min(width, group.full_width))
            stages.append(widths)
        return stages


def stream_width(full_width: int, fraction: Fraction) -> int:
    """`full_width * fraction` rounded to the nearest even number, at least 2 and at most `full_width`."""
    if fraction == 1:
        return full_width
    even = 2 * floor(full_width * fraction / 2 + Fraction(1, 2))
    return min(full_width, max(2, even))


def stage_epochs(total_epochs: int, num_stages: int, initial_epochs: Number, growth_rate: Number) -> list[int]:
    """Epochs of each stage: `floor(T_0 (1 + p_t)^t)`, at least 1, and the rest in the last (Eq. 7, restated).

    T_0 may be fractional; with p_t = 0 all stages but the last are equally long.

    Raises:
        ValueError: the stages before the last take all epochs or more, T_0 is negative, or p_t is not above -1.
    """
    finite(initial_epochs=initial_epochs, epoch_growth_rate=growth_rate)
    if total_epochs < num_stages:
        raise ValueError(
            f"{total_epochs} epochs are fewer than num_stages={num_stages}, which take at least one each; "
            "raise total_epochs or lower num_stages."
        )
    first, factor = exact(initial_epochs), 1 + exact(growth_rate)
    if first < 0 or factor <= 0:
        raise ValueError(
            f"a first stage of {initial_epochs} epochs that grows by {growth_rate} is not a valid number of epochs; "
            f"set initial_epochs or initial_fraction from 0 and epoch_growth_rate above -1."
        )
    epochs = [max(1, floor(first * factor**stage)) for stage in range(num_stages - 1)]
    rest = total_epochs - sum(epochs)
    if rest < 1:
        raise ValueError(
            # As a ratio, since a run with a budget makes its schedule before it knows its number of epochs.
            f"the first {num_stages - 1} stages take {sum(epochs) / total_epochs:.3g} times the run's epochs and leave "
            "none for the last; lower initial_epochs, epoch_growth_rate or num_stages."
        )
    return [*epochs, rest]


def width_fractions(num_stages: int, initial_width: Number, growth_rate: Number | None) -> list[Fraction]:
    """Relative width of each stage: `C_0 (1 + p_c)^t`, at most 1, and 1 for the last (Eq. 6 in closed form).

    C_0 is relative to the final width; p_c = None takes the rate that reaches full width in equal steps.

    Raises:
        ValueError: the initial width is not in (0, 1], or the rate is negative.
    """
    finite(initial_width=initial_width)
    first = exact(initial_width)
    if not 0 < first <= 1:
        raise ValueError(f"initial_width must be a fraction of full width, above 0 and at most 1, not {initial_width}.")
    at_least(0, **not_none(width_growth_rate=growth_rate))
    equal_steps = exact(float(1 / first) ** (1 / max(1, num_stages - 1)))
    factor = equal_steps if growth_rate is None else 1 + exact(growth_rate)
    return [min(Fraction(1), first * factor**stage) for stage in range(num_stages - 1)] + [Fraction(1)]


def stage_batch_sizes(
    num_stages: int,
    batch_size: int,
    growth_rate: Number,
    max_batch_size: int | None = None,
    multiple: int = 1,
    given: Literal["last", "first"] = "last",
) -> list[int]:
    """Global batch size of each stage: `B_{t-1} = B_t + round(p_b B_t)` (Eq. 8), from that of the last stage.

    From that of the first stage, the others follow by the inverse, `B_t = round(B_{t-1} / (1 + p_b))`. Sizes other than
    the given one are rounded to the nearest multiple of the number of processes, within the limit.

    Raises:
        ValueError: the limit is below the given batch size, or the rate is negative.
    """
    if max_batch_size is not None and max_batch_size < batch_size:
        raise ValueError(f"max_batch_size={max_batch_size} is below the {given} stage's batch size {batch_size}.")
    at_least(0, batch_growth_rate=growth_rate)
    rate = exact(growth_rate)
    sizes = [batch_size]
    if given == "first":
        for _ in range(num_stages - 1):
            sizes.append(floor(sizes[-1] / (1 + rate) + Fraction(1, 2)))
        return [batch_size, *(max(multiple, _nearest(size, multiple)) for size in sizes[1:])]
    for _ in range(num_stages - 1):
        size = sizes[0] + floor(rate * sizes[0] + Fraction(1, 2))
        sizes.insert(0, size if max_batch_size is None else min(size, max_batch_size))
    limit = sizes[0] + multiple if max_batch_size is None else max_batch_size // multiple * multiple
    rounded = (_nearest(size, multiple) for size in sizes[:-1])
    return [*(max(batch_size, min(size, limit)) for size in rounded), batch_size]


def _nearest(size: int, multiple: int) -> int:
    return multiple * floor(Fraction(size, multiple) + Fraction(1, 2))


def make_schedule(
    total_epochs: int,
    batch_size: int,
    num_stages: int = 9,
    initial_epochs: Number | None = None,
    initial_fraction: Number = 0.05,
    epoch_growth_rate: Number = 0.2,
    initial_width: Number = 0.25,
    width_growth_rate: Number | None = 0.2,
    batch_growth_rate: Number = 0.0,
    max_batch_size: int | None = None,
    max_batch_size_per_device: int | None = None,
    batch_size_stage: Literal["last", "first"] = "last",
    epochs: Sequence[int] | None = None,
    widths: Sequence[Number] | None = None,
    batch_sizes: Sequence[int] | None = None,
    num_processes: int = 1,
) -> Schedule:
    """Build a schedule from rates, or from explicit lists where given.

    Args:
        total_epochs: epochs of the whole run; ignored where `epochs` is given.
        batch_size: batch size of the last stage, or of the first.
        num_stages: N; overridden by the length of given lists.
        initial_epochs: T_0; None takes `initial_fraction` of all epochs.
        initial_fraction: T_0 / T_total where `initial_epochs` is None.
        epoch_growth_rate: p_t.
        initial_width: C_0 / C_final.
        width_growth_rate: p_c, or None for equal steps to full width.
        batch_growth_rate: p_b.
        max_batch_size: upper limit of the batch size.
        max_batch_size_per_device: upper limit of each process's part of the batch.
        batch_size_stage: stage that `batch_size` belongs to, "last" or "first".
        epochs: epochs of each stage.
        widths: relative width of each stage; the last must be 1.
        batch_sizes: batch size of each stage.
        num_processes: number of processes; every batch size must be divisible by it.

    Raises:
        ValueError: the schedule is impossible; the message says which setting to change.
    """
    num_stages = _num_stages(num_stages, epochs=epochs, widths=widths, batch_sizes=batch_sizes)
    whole(1, batch_size=batch_size, num_processes=num_processes)
    limits = not_none(max_batch_size=max_batch_size, max_batch_size_per_device=max_batch_size_per_device)
    whole(1, **limits)
    one_of(("last", "first"), batch_size_stage=batch_size_stage)
    if epochs is None:
        whole(1, total_epochs=total_epochs)
        finite(initial_fraction=initial_fraction)
        first = exact(initial_fraction) * total_epochs if initial_epochs is None else initial_epochs
        epochs = stage_epochs(total_epochs, num_stages, first, epoch_growth_rate)
    if widths is None:
        fractions = width_fractions(num_stages, initial_width, width_growth_rate)
    else:
        fractions = [exact(width) for width in widths]
    if batch_sizes is None:
        total = max_batch_size_per_device and max_batch_size_per_device * num_processes
        if total is not None and batch_size > total:
            raise ValueError(
                f"max_batch_size_per_device={max_batch_size_per_device} leaves no room for the "
                f"{batch_size_stage} stage's batch of {batch_size} on {num_processes} devices; use more devices, or "
                "accumulate_grad_batches with a smaller batch_size."
            )
        limit = min((size for size in (max_batch_size, total) if size is not None), default=None)
        batch_sizes = stage_batch_sizes(
            num_stages, batch_size, batch_growth_rate, limit, num_processes, batch_size_stage
        )
    schedule = Schedule(tuple(epochs), tuple(fractions), tuple(batch_sizes))
    _check(schedule, num_processes)
    return schedule


def _num_stages(default: int, **lists: Sequence[Number] | None) -> int:
    given = not_none(**lists)
    for name, values in given.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ValueError(f"{name} must be a list with a number for each stage, not {values!r}.")
        check: Callable[..., None] = finite if name == "widths" else partial(whole, 1)
        for value in values:
            check(**{name: value})
    lengths = {name: len(values) for name, values in given.items()}
    if len(set(lengths.values())) > 1:
        named = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise ValueError(f"explicit lists must have one entry per stage, but {named}.")
    number = next(iter(lengths.values()), default)
    whole(1, num_stages=number)
    return number


def _check(schedule: Schedule, num_processes: int) -> None:
    fractions = schedule.width_fractions
    if min(*schedule.epochs, *schedule.batch_sizes) < 1:
        raise ValueError("every stage needs at least one epoch and a batch size of at least 1.")
    if schedule.total_epochs > MOST_EPOCHS:
        raise ValueError(
            f"a run of {schedule.total_epochs:,} epochs is longer than {MOST_EPOCHS:,}: lower total_epochs."
        )
    uneven = sorted({size for size in schedule.batch_sizes if size % num_processes})
    if uneven:
        raise ValueError(
            f"a batch of {uneven[0]} does not divide among {num_processes} processes; choose a batch_size "
            f"and batch_sizes that {num_processes} divides, or another number of devices."
        )
    if any(not 0 < fraction <= 1 for fraction in fractions) or fractions[-1] != 1:
        raise ValueError("widths must be above 0 and at most 1, and end with 1.")
    if any(after < before for before, after in pairwise(fractions)):
        raise ValueError("widths must not decrease from stage to stage.")


def exact(number: Number) -> Fraction:
    """Return a number as the exact fraction of its decimal form: 0.2 is one fifth, not the nearest binary fraction."""
    return Fraction(str(number))

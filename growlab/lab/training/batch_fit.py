"""`schedule.batch_size=auto`: each stage's batch size from what fits into memory, in the shape of Eq. 8.

Lightning's own `BatchSizeFinder` knows one network; here there is one a stage, and the sizes depend on each other.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from growlab.base.errors import UserError
from growlab.growth.schedule import stage_batch_sizes
from growlab.lab.training.trial_steps import SMALLEST

# Sizes tried between a power of two and the next: what a few bytes more or less decide should be decided alike again.
_PER_OCTAVE = 8


def fit_batch_sizes(
    num_stages: int,
    settings: Mapping[str, Any],
    num_train: int,
    num_processes: int,
    fits: Callable[[int, int], bool],
    agree: Callable[[int], int],
) -> list[dict[str, int]]:
    """Find the batch size of every stage.

    The last stage (or the first, `batch_size_of`) takes the largest batch that fits. The others follow it by Eq. 8,
    but where that does not fit take the largest that does.

    Args:
        num_stages: N.
        settings: `batch_growth_rate`, `max_batch_size`, `max_batch_size_per_device`, `batch_size_of` and
            `batch_sizes` of the schedule.
        num_train: images: no batch is larger.
        num_processes: what a batch is divided among.
        fits: whether a training step at a stage with so many images on this process's device fits.
        agree: maps what fits on this process's device to what fits on all; called N times by each process.

    Returns:
        A dict a stage: `stage`, `eq8` (the global size by Eq. 8) and `batch_size` (the one to train with).

    Raises:
        UserError: not even the smallest batch fits, or sizes are given as well.
    """
    if settings["batch_sizes"] is not None:
        raise UserError("schedule.batch_size=auto finds the sizes; leave schedule.batch_sizes out.")
    limits = [num_train, settings["max_batch_size"]]
    most = min(limit for limit in limits if limit is not None) // num_processes
    most = min(most, settings["max_batch_size_per_device"] or most)
    if most < SMALLEST:
        raise UserError(
            f"schedule.batch_size=auto needs room for {SMALLEST} images on each of {num_processes} devices, but "
            f"schedule.max_batch_size, max_batch_size_per_device and the {num_train} training images leave {most}."
        )

    def largest(stage: int, at_most: int) -> int:
        sizes = _sizes(at_most)
        found = len(sizes)
        if not fits(stage, at_most):
            found = bisect_left(sizes, True, hi=found - 1, key=lambda size: not fits(stage, size))
        size = agree(sizes[found - 1] if found else 0)
        if size == 0:
            raise UserError(
                f"not even {SMALLEST} images on each device fit into memory in stage {stage} of 0 to {num_stages - 1}; "
                "raise schedule.max_memory_gib_per_device, or choose a smaller network or smaller images."
            )
        return size

    given = num_stages - 1 if settings["batch_size_of"] == "last" else 0
    base = largest(given, most)
    wanted = stage_batch_sizes(
        num_stages,
        base * num_processes,
        settings["batch_growth_rate"],
        most * num_processes,
        num_processes,
        settings["batch_size_of"],
    )
    sizes = [
        base if stage == given else largest(stage, wanted[stage] // num_processes)
        for stage in range(num_stages)
    ]
    return [
        {"stage": stage, "eq8": wanted[stage], "batch_size": size * num_processes}
        for stage, size in enumerate(sizes)
    ]


def _sizes(at_most: int) -> Sequence[int]:
    """What may be found: ascending, about 12 percent apart, `at_most` the last."""
    sizes, size = [], SMALLEST
    while size < at_most:
        sizes.append(size)
        size += max(1, (1 << (size.bit_length() - 1)) // _PER_OCTAVE)
    return [*sizes, at_most]

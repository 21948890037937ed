"""Passes over training batches beside training's own: for methods and demands that look at data."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from growlab.errors import UserError
from growlab.growth import Measurement
from growlab.growth.weighted_norms import annealed
from growlab.ranks import averaged, gather, shared
from growlab.training.task import Task

# Numbers near zero that training in half precision (twice its smallest), and in any other, does not take for zero.
_HALF, _USUAL = 2.0**-23, 2.0**-100

#: The first training batches of the current epoch, so many, this rank's part.
Batches = Callable[[int], Sequence[tuple[Tensor, ...]]]


def measurement(task: Task, batches: Batches | None, wanted: int, asker: str) -> Measurement:
    """Training batches for somebody who looks at some; what is measured is averaged over ranks.

    Raises:
        UserError: the run's data module has none to give.
    """
    if batches is None:
        raise UserError(
            f"{asker} decides by training data, of which this run's data module gives none (`training_batches`); "
            "choose another."
        )
    state = task.growth_state
    weights = annealed(state.norm_weights, state.norm_progress)
    near_zero = _HALF if task.trainer.precision in ("16-mixed", "16-true") else _USUAL
    return Measurement(
        task.network, task.graph, batches(wanted), task.loss, averaged, shared, weights, near_zero
    )


def auxiliary_flops(task: Task) -> int:
    """What all passes beside training's took so far."""
    return sum(passes.get("auxiliary_flops", 0) for passes in (*task.events, *task.looks))


def auxiliary(data: Measurement | None, looked_back: dict[str, int] | None = None) -> dict[str, Any]:
    """What passes beside training's took, for a receipt: work of all ranks, memory of the rank that took most.

    FLOPs are those of forward passes that cost as much with a backward pass each.
    """
    looked_back = looked_back or {}
    if data is None:
        return looked_back
    costs = gather((data.cost.flops, data.cost.samples, data.cost.held_bytes, data.cost.peak_memory_bytes))
    flops, samples, held, peaks = zip(*costs, strict=True)
    return {
        "auxiliary_flops": looked_back.get("auxiliary_flops", 0) + round(sum(flops) / 3),
        "auxiliary_samples": looked_back.get("auxiliary_samples", 0) + sum(samples),
        "auxiliary_held_bytes": max(held),
        "auxiliary_peak_memory_bytes": max((peak for peak in peaks if peak is not None), default=None),
    }

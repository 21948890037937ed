"""Training within a budget: as many epochs as cost no more than so many epochs of the fixed full network."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, count
from typing import Any

from growlab.base.errors import UserError
from growlab.grower.triggers import Demand
from growlab.growth import GrowthMethod, Schedule, WidthDecision
from growlab.growth.schedule import MOST_EPOCHS
from growlab.lab.data import RunData

# Of sums of decimal fractions.
_ROUNDING = 1 + 1e-9


def check_budget(settings: Mapping[str, Any], method: GrowthMethod, demand: Demand | None) -> None:
    """Refuse a budget beside settings that say otherwise how long a run is.

    Args:
        settings: of the schedule, with `budget`.
        method: of the run.
        demand: of the run.

    Raises:
        UserError: they do not go together.
    """
    budget = settings["budget"]
    if budget is None:
        return
    if not 0 < budget <= MOST_EPOCHS:
        raise UserError(
            f"schedule.budget={budget} must be a number of epochs of the fixed-size network above 0 and at most "
            f"{MOST_EPOCHS:,}."
        )
    if settings["epochs"] is not None:
        raise UserError(
            "schedule.budget finds how many epochs the stages have, and schedule.epochs says it: leave one of them out."
        )
    if settings["equal_flops"]:
        raise UserError(
            "schedule.budget and schedule.equal_flops both say what the fixed-size run costs: leave one of them out."
        )
    if demand is not None or isinstance(method, WidthDecision):
        raise UserError(
            "schedule.budget needs to know before the run how wide the network is at which epoch, and this run decides "
            "that while it trains: take schedule=budget, which grows on demand within a part of the cost, or "
            "schedule=exponential with another growth method."
        )


def epochs_within(
    budget: float,
    make: Callable[[int], Schedule],
    flops: Sequence[int],
    full_flops: int,
    data: RunData,
    samples: Callable[[int, int], int],
) -> int:
    """The most epochs whose training costs no more than a budget.

    The schedule that has them costs less than the budget by at most one epoch of its widest stage.

    Args:
        budget: in passes of the fixed full network over the training data.
        make: maps a number of epochs to the schedule of so many.
        flops: forward FLOPs per sample of each stage.
        full_flops: the same of the full network.
        data: set up.
        samples: maps an epoch and its batch size to the samples that are trained on.

    Raises:
        UserError: the budget is below the cost of the shortest schedule, or data arrives with the stages.
    """
    if data.incremental is not None:
        raise UserError(
            "schedule.budget goes with data that is all there from the start: set schedule.total_epochs."
        )
    parts = data.epoch_parts
    known: dict[int, list[int]] = {}

    def until(epoch: int, size: int) -> int:
        if size not in known:
            known[size] = [0, *accumulate(samples(part, size) for part in range(parts))]
        passes, part = divmod(epoch, parts)
        return passes * known[size][-1] + known[size][part]

    def cost(schedule: Schedule) -> int:
        stages = zip(schedule.starts, schedule.epochs, schedule.batch_sizes, flops, strict=True)
        return sum(
            f * (until(start + length, size) - until(start, size)) for start, length, size, f in stages
        )

    allowed = _ROUNDING * budget * full_flops * until(parts, data.batch_size)
    found, least = 0, 0.0
    for epochs in count(len(flops)):
        try:
            spent = cost(make(epochs))
        except ValueError:
            # Too few epochs for stages of a given length.
            if epochs * min(flops) * until(parts, data.batch_size) > parts * allowed:
                break
            continue
        least = least or spent / (full_flops * until(parts, data.batch_size))
        if spent > allowed:
            break
        found = epochs
    if not found:
        needed = f", which costs {least:.3g} epochs of the fixed-size network" if least else ""
        stages = f"{len(flops)} stage{'s' * (len(flops) > 1)}"
        raise UserError(
            f"schedule.budget={budget:g} is below the shortest run of {stages}{needed}: raise it, lower "
            "schedule.num_stages, or divide epochs with data.epoch_parts."
        )
    return found

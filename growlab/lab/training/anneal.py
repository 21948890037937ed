"""How long normalisations over channels that grew take to become plain ones in a run."""

from math import floor

from growlab.base.errors import UserError
from growlab.grower import Grower
from growlab.lab.training.plan import Plan


def anneal_steps(grower: Grower, part: float, plan: Plan) -> int:
    """Optimizer steps after the last growth event in which statistics over channels go back to plain ones.

    At least the last step of the training is one of the plain network.

    Args:
        grower: after its last event.
        part: of a stage's optimizer steps; of an epoch's, where it is not known before when the network grows.
        plan: of the run.
    """
    if not grower.events:
        return 0
    epoch, begin = grower.events[-1]["epoch"], grower.events[-1]["step"]
    steps = plan.steps[epoch]
    if grower.trigger.knows_stages:
        steps = sum(plan.steps[epoch : grower.trigger.stage_end(grower)])
    return min(floor(part * steps), sum(plan.steps) - begin - 1)


def check_part(part: float) -> None:
    """Refuse a part of a stage that leaves it no plain step at its end.

    Raises:
        UserError: it is not from 0 to below 1.
    """
    if not 0 <= part < 1:
        raise UserError(f"norm_anneal={part} must be a part of a stage: at least 0 and below 1.")

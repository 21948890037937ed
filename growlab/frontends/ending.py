"""The end of training, as front ends leave it."""

import logging

from growlab.errors import UserError
from growlab.grower import Grower, forecast

log = logging.getLogger(__name__)


def end(grower: Grower) -> None:
    """Leave an ordinary network behind, and say so if it is not one or not at the end of its growth."""
    stages = forecast(grower.trigger, grower.full_graph, grower.parts)
    if stages is not None and grower.state.scheduled_stage < len(stages) - 1:
        log.warning(
            "training has ended in stage %d of %d: the network is narrower than its last stage's, which its trigger "
            "would have grown it to later",
            grower.state.scheduled_stage,
            len(stages) - 1,
        )
    finish(grower)


def finish(grower: Grower) -> None:
    """Leave an ordinary network behind, or say why it is not one."""
    try:
        grower.finish()
    except UserError as error:
        # Training is done, and its checkpoints are there: go on with more epochs.
        log.warning("%s", error)

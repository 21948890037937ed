"""The end of training, as front ends leave it."""

import logging

from growlab.base.errors import UserError
from growlab.grower import Grower

log = logging.getLogger(__name__)


def finish(grower: Grower, at_any_stage: bool = False) -> None:
    """Leave an ordinary network behind, or say why it is not one.

    Args:
        grower: of the network.
        at_any_stage: see `Grower.finish`.
    """
    try:
        grower.finish(at_any_stage)
    except UserError as error:
        # Training is done, and its checkpoints are there: go on with more epochs.
        log.warning("%s", error)

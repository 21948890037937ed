"""Checks and warnings of the front ends before training begins."""

import logging

from growlab.base.errors import UserError
from growlab.grower.triggers import At, Trigger

log = logging.getLogger(__name__)


def check_unit(trigger: Trigger, loop: str) -> None:
    """Refuse a trigger whose moments a library's training loop never tells.

    Args:
        trigger: of the growth.
        loop: the library's name for its loop, for the message.

    Raises:
        UserError: it counts costs.
    """
    if trigger.unit == "cost":
        raise UserError(
            f"{loop} tells of epochs and steps alone, so a trigger with unit='cost' would never grow; give it "
            "unit='step', or announce costs to a growlab.Grower in your own loop."
        )


def tell_unreached(trigger: Trigger, epochs: float, steps: float) -> None:
    """Warn of stages that begin behind the end of a training: the network ends narrower than its trigger says.

    Args:
        trigger: of the growth.
        epochs: that the training has at most; `inf`: not known.
        steps: likewise, optimizer steps.
    """
    if not isinstance(trigger, At) or trigger.unit is None:
        return
    end = epochs if trigger.unit == "epoch" else steps
    late = [start for start in trigger.starts if start >= end]
    if late:
        log.warning(
            "growth is due at %s %g, and training ends after %g: the network will not come to its last stage's width",
            trigger.unit,
            late[0],
            end,
        )


def distinct(names: tuple[str | None, ...]) -> tuple[str | None, ...]:
    """Names of submodules that grow, each once.

    Raises:
        UserError: there is none, one stands there twice, or one of several is no name.
    """
    if not names or len(set(names)) < len(names) or (len(names) > 1 and None in names):
        raise UserError(
            f"network={names!r} must be different names: of the submodule that grows, and of the copies of it."
        )
    return names

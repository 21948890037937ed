"""What front ends refuse before a training begins."""

from growlab.errors import UserError
from growlab.triggers import Trigger


def check_unit(trigger: Trigger, loop: str) -> None:
    """Refuse a trigger whose moments a library's training loop never tells.

    Args:
        trigger: of the growth.
        loop: the library's name for its loop, for the message.

    Raises:
        UserError: it counts costs.
    """
    if trigger.counts == "cost":
        raise UserError(
            f"{loop} tells of epochs and steps alone, so a trigger with unit='cost' would never grow; give it "
            "unit='step', or announce costs to a growlab.Grower in your own loop."
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

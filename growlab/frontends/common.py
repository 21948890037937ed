"""Shared by the front ends: checks of settings as they are given, warnings, metrics, and the end of training."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from math import isfinite
from typing import Any

from growlab.base.described import Described
from growlab.base.errors import UserError, as_user_errors
from growlab.grower import Grower
from growlab.grower.network import as_method, check_arguments
from growlab.grower.part import Part, checked_parts
from growlab.grower.triggers import At, Trigger, as_trigger
from growlab.growth import GrowthEvent, GrowthMethod, Schedule, VarianceTransfer
from growlab.optim import Inheritance
from growlab.optim.carry import check_inheritance

log = logging.getLogger(__name__)


class GrowthCallback(Described):
    """Base of the callbacks that drive a `growlab.Grower` in another library's training loop."""

    grower: Grower | None = None

    def _set(
        self,
        loop: str,
        method: GrowthMethod | str | None,
        trigger: Trigger | Schedule | Mapping[float, Any] | None,
        parts: Sequence[Part],
        seed: int,
        optimizer_state: Inheritance,
        anneal_steps: int | None,
        verbose: bool,
    ) -> None:
        """Keep the arguments of a Grower that is made once there is a network.

        Args:
            loop: the library's name for its loop, for messages.
            method: as the others see `growlab.Grower`.
            trigger: likewise.
            parts: likewise.
            seed: likewise.
            optimizer_state: see `growlab.optim.follow`.
            anneal_steps: likewise.
            verbose: likewise.

        Raises:
            UserError: one of them is not what it must be, or the trigger counts costs.
        """
        check_arguments(seed, anneal_steps)
        with as_user_errors():
            check_inheritance(optimizer_state)
        self._trigger = as_trigger(Grower.DEFAULT_TRIGGER if trigger is None else trigger)
        if self._trigger.unit == "cost":
            raise UserError(
                f"{loop} tells of epochs and steps alone, so a trigger with unit='cost' would never grow; give it "
                "unit='step', or announce costs to a growlab.Grower in your own loop."
            )
        self._optimizer_state = optimizer_state
        self._make = partial(
            Grower,
            method=VarianceTransfer() if method is None else as_method(method),
            parts=checked_parts(parts),
            seed=seed,
            anneal_steps=anneal_steps,
            verbose=verbose,
        )

    @property
    def events(self) -> list[GrowthEvent]:
        """All growth events so far."""
        return [] if self.grower is None else self.grower.events

    def _announce(self, grower: Grower, epochs: float, steps: float) -> None:
        """Let a grower know how long training is, and warn of stages behind its end.

        Args:
            grower: of the network.
            epochs: that the training has at most; `inf`: not known.
            steps: likewise, optimizer steps.
        """
        trigger = grower.trigger
        sizes = trigger.batch_sizes if isinstance(trigger, At) else None
        # Other batches make other numbers of steps.
        if isfinite(steps) and len(set(sizes or ())) <= 1:
            grower.provide(total_steps=int(steps))
        if not isinstance(trigger, At) or trigger.unit is None:
            return
        end = epochs if trigger.unit == "epoch" else steps
        if late := [start for start in trigger.starts if start >= end]:
            log.warning(
                "growth is due at %s %g, and training ends after %g: the network will not come to its last stage's "
                "width",
                trigger.unit,
                late[0],
                end,
            )

    def _finish(self, grower: Grower, at_any_stage: bool = False) -> None:
        """Leave an ordinary network behind, or say why it is not one."""
        try:
            grower.finish(at_any_stage)
        except UserError as error:
            # Training is done, and its checkpoints are there: go on with more epochs.
            log.warning("%s", error)


def metrics(grower: Grower) -> dict[str, float]:
    """Stage, number of parameters and width of each group, for a loop's logs."""
    num_params = sum(p.numel() for p in grower.network.parameters())
    widths = {f"width/{group}": float(width) for group, width in grower.state.widths.items()}
    return {"growth/stage": float(grower.state.stage), "growth/num_params": float(num_params), **widths}

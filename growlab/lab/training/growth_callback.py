"""The callback that grows the network of a `Task`, and hands receipts on."""

import time
from collections.abc import Callable
from typing import Any

from lightning import Trainer

from growlab.base.errors import UserError
from growlab.frontends.lightning import GrowthSteps
from growlab.grower import Grower
from growlab.growth import GrowthEvent, ParityError
from growlab.optim import Inheritance


class GrowthCallback(GrowthSteps):
    """Grows the network between batches; an event that breaks its promise ends the run.

    Args:
        grower: of the task's network.
        optimizer_state: see `GrowthSteps`.
        batch_size_at: global batch size of an epoch, for receipts.
        on_event: called with the receipt of each event.
    """

    def __init__(
        self,
        grower: Grower,
        optimizer_state: Inheritance = "auto",
        batch_size_at: Callable[[int], int] | None = None,
        on_event: Callable[[Trainer, dict[str, Any]], None] | None = None,
    ) -> None:
        super().__init__(grower, optimizer_state)
        self._batch_size_at, self._on_event = batch_size_at, on_event

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Catch up if the run was resumed from a stage's last step."""
        self._step(trainer)

    def _step(self, trainer: Trainer) -> list[GrowthEvent]:
        assert self.grower is not None
        known, began = len(self.grower.events), time.perf_counter()
        try:
            events = super()._step(trainer)
        except ParityError as error:
            raise UserError(f"{error} Lower optimizer.lr or choose another growth method.") from error
        seconds = time.perf_counter() - began
        receipts = self.grower.events[known:]
        # Nearly all that the events' own times leave.
        wrapper = (seconds - sum(receipt["seconds"] for receipt in receipts)) / max(1, len(receipts))
        for receipt in receipts:
            if self._batch_size_at is not None:
                receipt["batch_size"] = self._batch_size_at(trainer.current_epoch)
            receipt["seconds_by_part"]["wrapper"] = wrapper
            receipt["seconds"] += wrapper
            if self._on_event is not None:
                self._on_event(trainer, receipt)
        return events

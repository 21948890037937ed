"""Do all ranks hold the same network and the same optimizer state, bit for bit?"""

import time

from lightning import Callback, Trainer

from growlab.base.ranks import broadcast_buffers, compare
from growlab.lab.training.task import Task


class RankCheck(Callback):
    """Stops a run whose ranks have drifted apart.

    Ranks are compared when training begins, after every growth event (by the grower), at the end of the
    epoch after it and at the end of training. They exchange one number each; only if those differ, one a tensor.

    Args:
        enabled: compare. Statistics of normalisation are brought together at the end of each epoch in any case.
    """

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled

    def on_train_start(self, trainer: Trainer, pl_module: Task) -> None:
        """Compare what ranks begin with."""
        self.check(trainer, pl_module, "at the start")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Task) -> None:
        """Bring statistics together; after the first epoch of a stage and the last of all, compare."""
        if trainer.world_size == 1:
            return
        for network in (pl_module.network, *pl_module.grower.copies().values()):
            broadcast_buffers(network)
        epoch, schedule = trainer.current_epoch, pl_module.schedule
        if epoch in schedule.starts or epoch == schedule.total_epochs - 1:
            self.check(trainer, pl_module, f"at the end of epoch {epoch}")

    def check(self, trainer: Trainer, task: Task, when: str) -> float:
        """Compare ranks.

        Returns:
            Seconds that it took; 0 on a single device.

        Raises:
            UserError: they differ; it names the tensors.
        """
        if not self._enabled or trainer.world_size == 1:
            return 0.0
        began = time.perf_counter()
        when = f"{when} (stage {task.growth_state.stage})"
        compare(task.grower.state_to_compare(), when, ", or set check_ranks=false to go on")
        return time.perf_counter() - began

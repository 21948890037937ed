"""All that leans on how Lightning and torch run one process per device: the environment and the strategy.

The arguments that `DDPStrategy` keeps for torch's wrapper (`_ddp_kwargs`) are not a documented interface of Lightning;
`tests/training/test_distributed.py` says so if a version changes them.
"""

import os

from lightning import Trainer
from lightning.pytorch.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from growlab.base.errors import UserError
from growlab.frontends.lightning import starts_by_copies

# Options of torch's wrapper without which ranks drift apart at a growth event.
_NEEDED = {"broadcast_buffers": "statistics of normalisation", "init_sync": "weights"}


class OneProcess(LightningEnvironment):
    """A single process that growlab does not take apart.

    Lightning's own environment would start other processes itself, by running the whole command line again, and leaves
    variables behind that mislead the next job of a sweep.
    """

    @property
    def creates_processes_externally(self) -> bool:
        """Always: `growlab.lab.training.launcher` does it."""
        return True


def cluster_environment(started_by_growlab: bool) -> list[ClusterEnvironment]:
    """The trainer plugin that says which rank this process is; empty if Lightning finds out by itself.

    Args:
        started_by_growlab: whether this process is alone, or one of several that growlab has started.
    """
    if started_by_growlab:
        return [TorchElasticEnvironment() if TorchElasticEnvironment.detect() else OneProcess()]
    if "SLURM_PROCID" in os.environ and "GROUP_RANK" not in os.environ:
        # Lightning would save and requeue by itself at a signal.
        return [SLURMEnvironment(auto_requeue=False)]
    return []


def check_strategy(trainer: Trainer) -> None:
    """Refuse ways of spreading a run over devices that growth cannot follow.

    Raises:
        UserError: parameters are sharded, or ranks would not be kept alike.
    """
    strategy = trainer.strategy
    if isinstance(strategy, SingleDeviceStrategy):
        return
    # Not isinstance: DeepSpeed's strategy is a DDPStrategy too.
    if type(strategy) is not DDPStrategy:
        raise UserError(
            f"growlab cannot train with {type(strategy).__name__}: growing needs every parameter whole on each "
            "device; use trainer=ddp."
        )
    if starts_by_copies(strategy):
        raise UserError(
            "growlab starts the processes of DDP itself; use trainer=ddp, not a strategy of its own."
        )
    for option, what in _NEEDED.items():
        if not strategy._ddp_kwargs.get(option, True):
            raise UserError(
                f"trainer.strategy.{option}=false would let {what} differ between ranks; leave it out."
            )

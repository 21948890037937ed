"""The objects of a run, as `growlab.lab.training.build` makes them and `growlab.lab.training.run` uses them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.pytorch.loggers import Logger
from torch.optim import Optimizer

from growlab.grower import Grower
from growlab.lab.data import RunData
from growlab.lab.training.identity import Identity
from growlab.lab.training.learning_rate import LearningRate
from growlab.lab.training.objective import Objective
from growlab.lab.training.plan import Plan, StageCost
from growlab.lab.training.saving import SavePolicy


@dataclass(frozen=True)
class Options:
    """Settings of the runner; see `conf/config.yaml` for those of the same name.

    Attributes:
        save: when checkpoints are saved between ends of epochs.
        max_time: `trainer.max_time` is set, after which training stops.
        synchronised: `trainer.sync_batchnorm` is set: batch normalisation spans all ranks.
        num_processes: that the run is divided among.
    """

    save: SavePolicy
    optimizer_state: str
    log_rates_every_n_steps: int
    log_layers_every_n_steps: int | None
    statistics_images: int
    check_ranks: bool
    compile: bool
    max_time: bool
    synchronised: bool
    num_processes: int


@dataclass(frozen=True)
class Experiment:
    """A run, ready to train.

    Attributes:
        data: set up.
        grower: has the network, which is a seed, its growth method, trigger and parts.
        plan: stages, cost, batches and steps.
        cost: of the network at any widths.
        batch_fit: batch sizes that were found to fit; None where the schedule says them.
        objective: loss and metrics.
        optimizer: makes the optimizer from parameters.
        learning_rate: the schedule of its rate.
        trainer: makes Lightning's Trainer from the run's folder, callbacks, loggers and plugins.
        loggers: makes the loggers, which end with the context.
        checkpoint: to resume from; None: begin.
        identity: settings that distinguish the run from others.
        options: of the runner.
    """

    data: RunData
    grower: Grower
    plan: Plan
    cost: StageCost
    batch_fit: list[dict[str, int]] | None
    objective: Objective
    optimizer: Callable[[Any], Optimizer]
    learning_rate: LearningRate
    trainer: Callable[..., Trainer]
    loggers: Callable[[], AbstractContextManager[list[Logger]]]
    checkpoint: Path | None
    identity: Identity
    options: Options

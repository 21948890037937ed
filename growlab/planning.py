"""What a run will do, as its configuration says; batch sizes that fit are found here."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import hydra
import lightning
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from growlab.data import ImageData
from growlab.errors import UserError
from growlab.growth import Demand, Depth, GrowthMethod
from growlab.processes import is_first, started_elsewhere, world_size
from growlab.ranks import gather
from growlab.trainer_options import for_lightning
from growlab.training.batch_fit import fit_batch_sizes
from growlab.training.distributed import check_strategy, cluster_environment
from growlab.training.plan import Plan, make_plan
from growlab.training.trial_steps import TrialRun, TrialSteps
from growlab.widths import WidthGraph


def plan_run(
    cfg: DictConfig,
    network: nn.Module,
    graph: WidthGraph,
    method: GrowthMethod,
    data: ImageData,
    known: list[dict[str, int]] | None,
    demand: Demand | None = None,
    depth: Depth | None = None,
) -> tuple[Plan, list[dict[str, int]] | None]:
    """Work out a run, see `make_plan`.

    Args:
        cfg: the run's configuration.
        network: at full width.
        graph: its width graph.
        method: the growth method.
        data: set up.
        known: batch sizes that were found before the run was interrupted.
        demand: see `make_plan`.
        depth: likewise.

    Returns:
        The plan, and the batch sizes that were found to fit (`fit_batch_sizes`); None where the schedule says them.

    Raises:
        UserError: the settings do not allow it.
    """
    settings = OmegaConf.to_container(cfg.schedule, resolve=True)
    for name in ("learning_rate", "demand", "batch_size", "max_memory_gib_per_device"):
        del settings[name]
    sizes = None if cfg.schedule.batch_size is None else _FoundSizes(cfg, network, graph, data, known, depth)
    batches = (cfg.trainer.limit_train_batches, cfg.trainer.accumulate_grad_batches, world_size(cfg.trainer))
    try:
        plan = make_plan(settings, network, graph, method, data, *batches, demand, depth, sizes)
    except ValueError as error:
        raise UserError(str(error)) from error
    return plan, None if sizes is None else sizes.found


class _FoundSizes:
    """The batch sizes of a run's stages, found by trial before it trains or taken from its checkpoint.

    Args:
        cfg: the run's configuration.
        network: at full width.
        graph: its width graph.
        data: set up.
        known: what was found before the run was interrupted, so that it goes on with the same sizes.
        depth: the blocks that come in with the stages.

    Attributes:
        found: what `fit_batch_sizes` returns; None until asked.
    """

    def __init__(
        self,
        cfg: DictConfig,
        network: nn.Module,
        graph: WidthGraph,
        data: ImageData,
        known: list[dict[str, int]] | None,
        depth: Depth | None,
    ) -> None:
        self._cfg, self._network, self._graph, self._data = cfg, network, graph, data
        self._depth, self.found = depth, known

    def __call__(self, stages: Sequence[Mapping[str, int]]) -> list[int]:
        """Global batch size of each stage.

        Args:
            stages: width of each group at each stage.

        Raises:
            UserError: nothing fits, or the settings do not go together.
        """
        if self.found is None:
            self.found = self._find(stages)
            if is_first():
                sizes = " ".join(str(one["batch_size"]) for one in self.found)
                print(f"batch sizes that fit, stage by stage: {sizes}", file=sys.stderr)
        return [one["batch_size"] for one in self.found]

    def _find(self, stages: Sequence[Mapping[str, int]]) -> list[dict[str, int]]:
        cfg, data = self._cfg, self._data
        if not isinstance(data, ImageData):
            raise UserError(
                "schedule.batch_size=auto tries batches of images, which this data has none of: leave it out."
            )
        # Only for its device, its precision and its connection to other processes, which the run's own will take over.
        own: dict[str, Any] = {"logger": False, "callbacks": [], "enable_checkpointing": False}
        own["plugins"] = cluster_environment(not started_elsewhere())
        trainer: lightning.Trainer = hydra.utils.instantiate(
            for_lightning(cfg.trainer), **own, _convert_="all"
        )
        check_strategy(trainer)
        trainer.strategy.setup_environment()
        depth = self._depth

        def narrow(copied: nn.Module, stage: int) -> WidthGraph:
            return self._graph if depth is None else depth.as_at(copied, stage, len(stages))

        run = TrialRun(
            self._network,
            self._graph,
            optimizer_maker(cfg),
            trainer.precision_plugin,
            trainer.strategy.root_device,
            data.image_shape,
            data.channels_last,
            num_copies=(trainer.world_size > 1) + (cfg.ema.decay is not None),
            held_bytes=data.held_bytes(),
            narrow=narrow,
            max_memory_gib=cfg.schedule.max_memory_gib_per_device,
        )
        with TrialSteps(run, stages) as steps:
            return fit_batch_sizes(
                len(stages), cfg.schedule, data.num_train, trainer.world_size, steps.fits, _least
            )


def _least(size: int) -> int:
    """The smallest of all processes' numbers."""
    return min(gather(size))


def optimizer_maker(cfg: DictConfig) -> Callable[[Any], torch.optim.Optimizer]:
    """What makes the configured optimizer of parameters.

    What it makes raises:
        UserError: the optimizer does not take its settings.
    """
    make = hydra.utils.instantiate(cfg.optimizer)

    def told(parameters: Any) -> torch.optim.Optimizer:
        try:
            return make(parameters)
        except (TypeError, ValueError) as error:
            given = {key: value for key, value in cfg.optimizer.items() if not key.startswith("_")}
            settings = ", ".join(f"{key}={value}" for key, value in given.items())
            raise UserError(
                f"optimizer cannot be made with {settings}: {str(error).rstrip('.')} (HYDRA_FULL_ERROR=1 shows where)."
            ) from error

    return told


def learning_rate(cfg: DictConfig) -> Any:
    """The schedule of the rate; with sizes that are found, the optimizer's rate is for the data's batch size."""
    settings = cfg.schedule.learning_rate
    known = cfg.schedule.batch_size is None or settings.batch_size is not None
    return hydra.utils.instantiate(settings, **({} if known else {"batch_size": cfg.data.batch_size}))

"""A run as its configuration says: what grows when, at what cost, and the batch sizes that fit."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import hydra
import lightning
import torch
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from growlab.base.errors import UserError, as_user_errors
from growlab.base.ranks import gather
from growlab.base.settings import left_out
from growlab.grower import Grower, no_widths, trace_for_growth
from growlab.grower.triggers import Never, Trigger
from growlab.growth import GrowthMethod
from growlab.lab.data import ImageData, RunData
from growlab.lab.training.anneal import anneal_steps
from growlab.lab.training.argument_types import check_types
from growlab.lab.training.batch_fit import fit_batch_sizes
from growlab.lab.training.budget import check_budget
from growlab.lab.training.distributed import check_strategy, cluster_environment
from growlab.lab.training.factories import make_network
from growlab.lab.training.learning_rate import LearningRate
from growlab.lab.training.plan import (
    Loop,
    Plan,
    StageCost,
    check_growth,
    choose_trigger,
    epochs_of_budget,
    make_plan,
)
from growlab.lab.training.processes import announce, is_first, started_elsewhere, world_size
from growlab.lab.training.trainer_options import for_lightning
from growlab.lab.training.trial_steps import TrialRun, TrialSteps
from growlab.parts import Part
from growlab.widths import WidthGraph

_MANY_EPOCHS = 10**6
# Of `conf/schedule` what is not about stages.
_OTHERS = ("learning_rate", "demand", "batch_size", "max_memory_gib_per_device")
# What numpy's generators take.
_MAX_SEED = 2**32 - 1
_MOST_THREADS = 1024
# Options of optimizers for other loops than Lightning's.
_NOT_IN_RUNS = {"differentiable": "loops that differentiate through steps", "capturable": "CUDA graphs"}


@dataclass(frozen=True)
class Planned:
    """A run, worked out.

    Attributes:
        grower: of the network, which is planted.
        plan: stages, cost, batches and steps.
        cost: of the network at any widths.
        batch_fit: batch sizes that were found to fit; None where the schedule says them.
    """

    grower: Grower
    plan: Plan
    cost: StageCost
    batch_fit: list[dict[str, int]] | None


def plan_run(cfg: DictConfig, data: RunData, known_sizes: list[dict[str, int]] | None) -> Planned:
    """Make the network, find its widths, work out the run and plant the seed.

    Args:
        cfg: the run's configuration.
        data: set up.
        known_sizes: batch sizes that were found before the run was interrupted.

    Raises:
        UserError: the settings do not allow it.
    """
    network = make_network(cfg.model, data)
    method: GrowthMethod = hydra.utils.instantiate(cfg.growth)
    settings = OmegaConf.to_container(cfg.schedule, resolve=True)
    settings = {name: value for name, value in settings.items() if name not in _OTHERS}
    loop = Loop(cfg.trainer.limit_train_batches, cfg.trainer.accumulate_grad_batches, world_size(cfg.trainer))
    fits = cfg.schedule.batch_size is not None
    if fits:
        # The smallest that is possible, until the widths are known that sizes are found at.
        settings |= {"batch_growth_rate": 0.0, "max_batch_size": None, "max_batch_size_per_device": None}
    with as_user_errors():
        demand = hydra.utils.instantiate(cfg.schedule.demand)
        base = loop.num_processes if fits else data.batch_size
        check_budget(settings, method, demand)
        if settings["budget"] is not None:
            # Enough for any stages, until their cost is known.
            settings["total_epochs"] = _MANY_EPOCHS
        trigger = choose_trigger(settings, method, demand, base, loop)
        parts = make_parts(cfg.parts, data, trigger)
        example = data.probe_batch(2)
        graph = _graph(cfg, network, example, method, trigger, parts)
        check_growth(graph, trigger, parts)
        cost = StageCost(network, graph, parts, example)
        if settings["budget"] is not None:
            settings["total_epochs"] = epochs_of_budget(settings, trigger, graph, cost, data, loop, parts)
            trigger = choose_trigger(settings, method, demand, base, loop)
        sizes = _FoundSizes(cfg, network, graph, trigger, parts, data, known_sizes) if fits else None
        plan = make_plan(settings, trigger, graph, cost, data, loop, parts, sizes)
    _check_pretrained(cfg, plan, graph)
    grower = Grower(
        network,
        data.probe_batch(probe_size(cfg.probe_size, data)),
        method=method,
        trigger=trigger,
        parts=parts,
        seed=cfg.seed,
        anneal_steps=partial(anneal_steps, part=cfg.norm_anneal, plan=plan),
        graph=graph,
    )
    grower.check_ranks = cfg.check_ranks
    return Planned(grower, plan, cost, None if sizes is None else sizes.found)


def _graph(
    cfg: DictConfig,
    network: nn.Module,
    example: Any,
    method: GrowthMethod,
    trigger: Trigger,
    parts: Sequence[Part],
) -> WidthGraph:
    """The network's width graph; one of no groups where it keeps its size and need not be traced."""
    if any(map(is_parametrized, network.modules())):
        if trigger.resizes:
            raise UserError(
                "a network whose weights are computed from others does not grow as it is: take the plain network as "
                "model with growth=hyperfan, or train this one with growth=none."
            )
        return no_widths()
    if trigger.resizes:
        announce("tracing the network: which channels grow together")
    return trace_for_growth(network, example, method, parts, cfg.seed, list(cfg.opaque), trigger.resizes)


def probe_size(given: int | None, data: RunData) -> int:
    """Training samples that parity is checked on; where none are given as many as the data say, or 32.

    Raises:
        UserError: there are not as many as were asked for.
    """
    if given is not None and given > data.num_train:
        raise UserError(
            f"probe_size={given} is more than the {data.num_train} training samples that there are; set "
            f"probe_size={data.num_train} or less."
        )
    return max(2, min(data.probe_size, data.num_train)) if given is None else given


def check_settings(cfg: DictConfig) -> None:
    """Refuse values of other types than their parameters, numbers out of their range, and a device that is not here.

    Raises:
        UserError: naming the first.
    """
    settings = OmegaConf.to_container(cfg, resolve=True)
    parts = settings.pop("parts") or {}
    check_types({name: value for name, value in settings.items() if name not in parts})
    for name, part in parts.items():
        if not left_out(part):
            check_types(part, name)
    _check_ranges(cfg)


def _check_ranges(cfg: DictConfig) -> None:
    if not 0 <= cfg.seed <= _MAX_SEED:
        raise UserError(f"seed={cfg.seed} must lie between 0 and {_MAX_SEED}.")
    if cfg.num_threads is not None and not 1 <= cfg.num_threads <= _MOST_THREADS:
        raise UserError(
            f"num_threads={cfg.num_threads} must be at least 1 and at most {_MOST_THREADS}, or null for all cores."
        )
    if cfg.probe_size is not None and cfg.probe_size < 2:
        raise UserError(
            f"probe_size={cfg.probe_size} must be at least 2: batch normalisation needs two images."
        )
    accelerator = cfg.trainer.accelerator
    if accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        if accelerator == "gpu" and torch.backends.mps.is_available():
            return
        raise UserError(
            f"trainer.accelerator={accelerator}, but torch {torch.__version__} sees no GPU here; use trainer=cpu, "
            "or install a driver that fits this torch."
        )


def make_parts(settings: DictConfig, data: RunData, trigger: Trigger) -> list[Part]:
    """The parts of `conf/parts` and of the user's own that are not left out, and those that the data need.

    Raises:
        UserError: an entry is no part, or a depth is given to a network without blocks that come in.
    """
    given = [_make_part(str(name), part) for name, part in settings.items() if not left_out(part)]
    of_data = data.parts()
    if isinstance(trigger, Never) and trigger.depth < 1 and not any(part.grows for part in given):
        raise UserError(
            f"growth.depth_multiple={trigger.depth:g} is a part of the blocks that come in as a network "
            "grows, and there are none: choose them, as method=smaller does."
        )
    return [part for part in (*given, *of_data) if part.applies(trigger)]


def _make_part(name: str, settings: Any) -> Part:
    """The part that the configuration has under a name.

    Raises:
        UserError: it is none.
    """
    if not isinstance(settings, Mapping) or "_target_" not in settings:
        raise UserError(
            f"parts.{name} is no part: give it a _target_, a growlab.parts.Part, and its arguments."
        )
    part = hydra.utils.instantiate(settings)
    if not isinstance(part, Part):
        raise UserError(f"parts.{name} makes a {type(part).__name__}, not a growlab.parts.Part.")
    part.name = part.name or name
    return part


class _FoundSizes:
    """The batch sizes of a run's stages, found by trial before it trains or taken from its checkpoint.

    Args:
        cfg: the run's configuration.
        network: at full width.
        graph: its width graph.
        trigger: of the run.
        parts: features beside growing.
        data: set up.
        known: what was found before the run was interrupted, so that it goes on with the same sizes.

    Attributes:
        found: what `fit_batch_sizes` returns; None until asked.
    """

    def __init__(
        self,
        cfg: DictConfig,
        network: nn.Module,
        graph: WidthGraph,
        trigger: Trigger,
        parts: Sequence[Part],
        data: RunData,
        known: list[dict[str, int]] | None,
    ) -> None:
        self._cfg, self._network, self._graph, self._data = cfg, network, graph, data
        self._trigger, self._parts, self.found = trigger, parts, known

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

        def narrow(copied: nn.Module, stage: int) -> WidthGraph:
            graph, grown = self._graph, self._trigger.fraction_grown(stage, stages[stage])
            for part in self._parts:
                graph = part.shrink_to(copied, graph, 1.0 if grown is None else grown)
            return graph

        run = TrialRun(
            self._network,
            self._graph,
            optimizer_maker(cfg),
            trainer.precision_plugin,
            trainer.strategy.root_device,
            data.image_shape,
            data.channels_last,
            num_copies=(trainer.world_size > 1) + sum(part.num_copies for part in self._parts),
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
    """A function that makes the configured optimizer of parameters, with its rates of regions.

    It raises:
        UserError: the optimizer does not take its settings, or not the rates of regions.
    """
    none = (
        "optimizer makes no function of parameters: choose one with optimizer=NAME, or give it a _target_ and "
        "_partial_=true."
    )
    try:
        make = hydra.utils.instantiate(cfg.optimizer)
    except (TypeError, InstantiationException) as error:
        if isinstance(cfg.optimizer, DictConfig) and cfg.optimizer.get("_partial_") is not True:
            raise UserError(none) from error
        raise
    if not callable(make):
        raise UserError(none)
    adaptation = hydra.utils.instantiate(cfg.lr_adapt)

    def told(parameters: Any) -> torch.optim.Optimizer:
        try:
            optimizer = make(parameters)
        except (TypeError, ValueError) as error:
            given = {key: value for key, value in cfg.optimizer.items() if not key.startswith("_")}
            settings = ", ".join(f"{key}={value}" for key, value in given.items())
            raise UserError(
                f"optimizer cannot be made with {settings}: {str(error).rstrip('.')} (HYDRA_FULL_ERROR=1 shows where)."
            ) from error
        for name, use in _NOT_IN_RUNS.items():
            if optimizer.defaults.get(name):
                raise UserError(f"optimizer.{name}=true is for {use}, which runs are not: leave it out.")
        adaptation.apply(optimizer)
        return optimizer

    return told


def learning_rate(cfg: DictConfig, knows_stages: bool) -> Any:
    """The schedule of the rate; with sizes that are found, the optimizer's rate is for the data's batch size.

    Raises:
        UserError: it needs to know before the run when the network grows, and nothing tells.
    """
    settings = cfg.schedule.learning_rate
    known = cfg.schedule.batch_size is None or settings.batch_size is not None
    rate = hydra.utils.instantiate(settings, **({} if known else {"batch_size": cfg.data.batch_size}))
    if isinstance(rate, LearningRate) and rate.needs_stages and not knows_stages:
        raise UserError(
            f"schedule.learning_rate.{rate.needs_stages} needs to know before the run how wide the network is at which "
            "epoch, and this run decides that while it trains: leave it out, or take schedule=exponential."
        )
    return rate


def _check_pretrained(cfg: DictConfig, plan: Plan, graph: WidthGraph) -> None:
    for key in ("pretrained", "weights"):
        if cfg.model.get(key) and str(cfg.growth.get("initialisation", "constructor")) != "constructor":
            raise UserError(
                f"model.{key}={cfg.model.get(key)} are weights to go on from, but "
                f"growth.initialisation={cfg.growth.initialisation} draws others: leave one of them out."
            )
        if cfg.model.get(key) and plan.widths[0] != graph.full_widths:
            raise UserError(
                f"model.{key}={cfg.model.get(key)} are weights of the full-width network, but this run starts "
                "narrower or wider and would draw its own; set growth=none lr_adapt=none to train on from them."
            )

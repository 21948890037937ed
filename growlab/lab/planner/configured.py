"""A plan's problem as the configuration of a run says it."""

from collections.abc import Sequence
from functools import partial
from math import inf
from typing import Any

import hydra
import lightning
import torch
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from torch import Tensor, nn
from torch.optim import Optimizer

from growlab.base.errors import UserError, as_user_errors
from growlab.base.settings import finite
from growlab.grower.triggers import At
from growlab.growth import FixedSize, GrowthMethod, PairGrowth, WidthDecision
from growlab.lab.planner.problem import Batch, Candidate, Problem, Settings
from growlab.lab.training.build import (
    check_settings,
    make_data,
    make_network,
    make_objective,
    make_parts,
    optimizer_maker,
    probe_size,
)
from growlab.lab.training.trainer_options import check_trainer_options, for_lightning
from growlab.parts import Part

_PRECISIONS = ("32", "32-true", "bf16-mixed")
# Of what is held out: the most that is read, and what it is evaluated in.
_MOST_BYTES, _EVALUATED = 2**29, 500
_CANDIDATE = ("width", "depth", "settings")


def settings_of(cfg: DictConfig) -> Settings:
    """How to go about the plan.

    Raises:
        UserError: they cannot be.
    """
    given = OmegaConf.to_container(cfg.plan, resolve=True)
    return Settings(**{name: value for name, value in given.items() if name not in ("candidates", "use")})


def check(cfg: DictConfig) -> None:
    """Refuse a run that cannot be probed.

    Raises:
        UserError: why.
    """
    check_trainer_options(cfg.trainer)
    if cfg.schedule.budget is None:
        raise UserError(
            "a plan needs a budget: schedule.budget=N, in epochs of the full network (parts of one are fine)."
        )
    if not 0 < cfg.schedule.budget < inf:
        raise UserError(f"schedule.budget={cfg.schedule.budget} must be a number above 0.")
    check_settings(cfg)
    if cfg.start_from is not None:
        raise UserError(
            f"start_from={cfg.start_from} is of runs: a plan probes networks from their beginning."
        )
    if cfg.study is not None:
        raise UserError("a study is no training of one network, so there is nothing to plan.")
    if cfg.data.get("incremental") is not None or cfg.data.get("class_schedule"):
        raise UserError(
            "data that change while the network trains cannot be probed: plan with data that are all there."
        )
    if cfg.trainer.limit_train_batches not in (None, 1.0):
        raise UserError("trainer.limit_train_batches changes what an epoch costs: set schedule.budget alone.")
    if str(cfg.trainer.precision) not in _PRECISIONS:
        raise UserError(
            f"trainer.precision={cfg.trainer.precision} cannot be probed; plan in {' or '.join(_PRECISIONS[1:])}."
        )
    if "lr" not in cfg.optimizer:
        raise UserError("the optimizer has no lr, whose multiples a plan tries: choose another.")
    for key in ("pretrained", "weights"):
        if cfg.model.get(key):
            raise UserError(
                f"model.{key}={cfg.model.get(key)} starts from weights of the full network: nothing to grow."
            )


def problem_of(cfg: DictConfig) -> tuple[Problem, Any]:
    """The problem, and the data that it is of, set up with a part of the training set held out.

    Raises:
        UserError: the configuration cannot be probed.
    """
    check(cfg)
    method = _method(cfg)
    held, data = _data(cfg)
    # As configured, so that what cannot be made is told as a run tells it, and before anything is probed.
    _optimizer(cfg, make_network(cfg.model, data), None)
    objective = make_objective(cfg.objective, data)
    # Only for its device and its precision.
    trainer: lightning.Trainer = hydra.utils.instantiate(
        for_lightning(OmegaConf.merge(cfg.trainer, {"devices": 1})),
        logger=False,
        callbacks=[],
        enable_checkpointing=False,
        _convert_="all",
    )
    parts = data.epoch_parts
    samples = sum(sum(data.samples_in_batches(part, data.batch_size)) for part in range(parts))
    samples += held
    problem = Problem(
        make_network=partial(make_network, cfg.model, data),
        make_optimizer=partial(_optimizer, cfg),
        batches=lambda epoch: data.training_loader(epoch, epoch),
        loss=lambda output, target: objective(output, target)[0],
        held_out=_held_out(data),
        example=data.probe_batch(probe_size(cfg.probe_size, data)),
        budget_samples=cfg.schedule.budget * samples,
        make_method=method,
        candidates=candidates_of(cfg, data),
        seed=cfg.seed,
        device=trainer.strategy.root_device,
        precision=trainer.precision_plugin.forward_context,
        clip=cfg.trainer.get("gradient_clip_val"),
        accumulate=cfg.trainer.accumulate_grad_batches,
    )
    return problem, data


def _method(cfg: DictConfig) -> Any:
    made: GrowthMethod = hydra.utils.instantiate(cfg.growth)
    if isinstance(made, WidthDecision):
        raise UserError(
            f"{made.name} decides widths while it trains, so no probe tells what it will cost: plan with another "
            "growth, such as growth=pairs."
        )
    if isinstance(made, FixedSize):
        return partial(PairGrowth, gain=cfg.gain)
    return partial(hydra.utils.instantiate, cfg.growth)


def _optimizer(cfg: DictConfig, network: nn.Module, multiple: float | None) -> Optimizer:
    scaled = cfg.copy()
    if multiple is not None:
        scaled.optimizer.lr = multiple * cfg.optimizer.lr
    return optimizer_maker(scaled)(network.parameters())


# Data ------------------------------------------------------------------------------------------------------


def _data(cfg: DictConfig) -> tuple[int, Any]:
    """How many samples are held out that the run itself would train on, and the data."""
    settings = cfg.data.copy()
    own = settings.get("validation", "split") == "split"
    if not own:
        settings.validation = "split"
    data = make_data(settings, cfg.seed)
    data.setup()
    if data.watched != "val":
        raise UserError("a plan never looks at the test set, and these data hold out nothing else.")
    return 0 if own else data.num_val, data


def _held_out(data: Any) -> Sequence[Batch]:
    """Held-out batches, in an order of no meaning: those of images in folders come class by class.

    Raises:
        UserError: there are none.
    """
    found: list[Batch] = []
    size = 0
    for batch in data.val_dataloader():
        found.append(tuple(batch))
        size += sum(x.nbytes for x in found[-1] if isinstance(x, Tensor))
        if size > _MOST_BYTES:
            break
    if not found:
        raise UserError(
            "a plan needs held-out data: give the data a validation set, or hold out a part of it."
        )
    shapes = {tuple(x.shape[1:] if isinstance(x, Tensor) else () for x in batch) for batch in found}
    if len(shapes) > 1 or not all(isinstance(x, Tensor) for x in found[0]):
        return found
    whole = [torch.cat(column) for column in zip(*found, strict=True)]
    order = torch.randperm(len(whole[-1]), generator=torch.Generator().manual_seed(0))
    return [tuple(x[part] for x in whole) for part in order.split(_EVALUATED)]


# Candidates ------------------------------------------------------------------------------------------------


def candidates_of(cfg: DictConfig, data: Any) -> list[Candidate]:
    """The candidates of `plan.candidates` that are asked for.

    Raises:
        UserError: there is no such candidate, or it is none.
    """
    given = cfg.plan.candidates
    if not isinstance(given, DictConfig | None):
        raise UserError(f"plan.candidates={given} must be candidates by name.")
    known = {str(name): one for name, one in (given or {}).items() if one is not None}
    if not isinstance(cfg.plan.use, ListConfig | None):
        raise UserError(
            f"plan.use={cfg.plan.use} must be a list of candidates, such as [{', '.join(known)}]."
        )
    names = list(known) if cfg.plan.use is None else [str(name) for name in cfg.plan.use]
    for name in names:
        if name not in known:
            raise UserError(
                f"plan.use: there is no candidate '{name}'; there are {', '.join(known) or 'none'}."
            )
        if not isinstance(known[name], DictConfig):
            raise UserError(
                f"plan.candidates.{name}={known[name]} is no candidate: that has {', '.join(_CANDIDATE)}."
            )
        wrong = [key for key in known[name] if key not in _CANDIDATE]
        if wrong:
            raise UserError(
                f"plan.candidates.{name} has no '{wrong[0]}'; a candidate has {', '.join(_CANDIDATE)}."
            )
    if not names:
        raise UserError("plan.candidates leaves none to probe beside the full network.")
    return [_candidate(cfg, data, name, known[name]) for name in names]


def _candidate(cfg: DictConfig, data: Any, name: str, given: DictConfig) -> Candidate:
    width, depth = given.get("width", 1.0), given.get("depth", 1.0)
    with as_user_errors():
        finite(**{f"plan.candidates.{name}.width": width, f"plan.candidates.{name}.depth": depth})
    settings = given.get("settings")
    if not isinstance(settings, DictConfig | None):
        raise UserError(f"plan.candidates.{name}.settings={settings} must be settings of the run by name.")
    settings = OmegaConf.to_container(settings or OmegaConf.create({}))
    changed = cfg.copy()
    with open_dict(changed):
        changed.merge_with(settings)

    def parts() -> Sequence[Part]:
        return make_parts(changed.parts, data, At({0: width, 1: 1.0}, unit="step"))

    return Candidate(name, float(width), parts, settings, float(depth), alone=width < 1 or depth < 1)

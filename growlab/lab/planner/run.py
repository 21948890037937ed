"""Run one plan: from configuration to files."""

import contextlib
import copy
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, inf
from pathlib import Path
from typing import Any

import hydra
import lightning
import torch
import yaml
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from pydantic import ValidationError
from torch import Tensor, nn
from torch.optim import Optimizer

from growlab.base.errors import UserError
from growlab.base.files import CHECKPOINT_FOLDER, write_json, write_text
from growlab.grower.triggers import At
from growlab.growth import FixedSize, GrowthMethod, PairGrowth, WidthDecision
from growlab.lab.planner.probes import FULL, Batch, Candidate, Problem, Settings
from growlab.lab.planner.report import content, draw, paragraph, table
from growlab.lab.planner.search import Planned, plan
from growlab.lab.training.build import (
    check_settings,
    for_lightning,
    make_data,
    make_network,
    make_objective,
    make_parts,
    optimizer_maker,
    probe_size,
)
from growlab.lab.training.checkpoints import OPTIMIZER, save
from growlab.lab.training.checks import check_trainer_options
from growlab.lab.training.configuration import PRIMARY
from growlab.lab.training.library_messages import plain_errors, quiet_libraries
from growlab.lab.training.processes import program
from growlab.lab.training.run_folder import lock_folder
from growlab.parts import Part

_PRECISIONS = ("32", "32-true", "bf16-mixed")
# The most bytes that are read of held-out data, and the samples that they are evaluated in.
_MOST_BYTES, _EVALUATED = 2**29, 500
_CANDIDATE = ("width", "depth", "settings")
# Epochs that the shortest run has at least, so that stages end where they are meant to.
_LEAST_EPOCHS = 10
# Groups that an experiment file does not choose, and settings that it does not have.
_NOT_CHOSEN = ("experiment", "method", "plan", "parts")
_NOT_KEPT = ("name", "plan", "ckpt_path", "study")
# The least cost of a small stage that starts from a probe, in parts of the budget.
_LEAST_STAGE = 0.01
# What a probe has done already.
_NOT_WARMED = {"schedule.learning_rate.warmup_epochs": 0, "schedule.learning_rate.warmup_fraction": 0.0}
# Length of a run and time of growth: the plan sets them.
_OF_THE_PLAN = ("epochs", "widths", "batch_sizes", "initial_epochs", "demand", "width_growth_rate")


def run(cfg: DictConfig) -> None:
    """Make the configured plan and write it into the run's folder.

    Args:
        cfg: the composed configuration of `conf/config.yaml`, with `plan`.

    Raises:
        UserError: the configuration cannot be probed.
    """
    if HydraConfig.get().mode != RunMode.RUN:
        raise UserError("a plan is of one budget: leave -m out, and plan others one after the other.")
    folder = Path(HydraConfig.get().runtime.output_dir)
    with plain_errors(), quiet_libraries(), contextlib.ExitStack() as ending:
        ending.enter_context(lock_folder(folder))
        # A plan's configuration would take the place of the run's.
        if any((folder / name).exists() for name in (CHECKPOINT_FOLDER, "metrics.csv", "results.json")):
            raise UserError(
                f"{folder} contains a run: name another folder for the plan with hydra.run.dir=FOLDER."
            )
        settings = settings_of(cfg)
        if cfg.num_threads:
            torch.set_num_threads(cfg.num_threads)
        problem, data = problem_of(cfg)
        ending.callback(data.teardown, "test")
        # Before minutes of probing, if nothing can be written there.
        write_text(folder / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True))
        planned = plan(problem, settings, lambda line: print(line, file=sys.stderr, flush=True))
        print(f"\n{paragraph(planned)}\n", flush=True)
        command = write_experiments(folder, cfg, data, planned, {one.name: one for one in problem.candidates})
        write_json(folder / "plan.json", {**content(planned), "command": command})
        write_text(folder / "plan.md", table(planned))
        draw(folder)
        here = command.replace("python -m growlab", program(), 1)
        print(f"plan: {folder}\nrun it with:\n  {here}")


def settings_of(cfg: DictConfig) -> Settings:
    """Read the settings of the plan.

    Raises:
        UserError: a value is invalid.
    """
    given = OmegaConf.to_container(cfg.plan, resolve=True)
    try:
        return Settings(**{name: value for name, value in given.items() if name not in ("candidates", "use")})
    except ValidationError as error:
        raise _refused("plan", given, error) from error


def _refused(where: str, given: Mapping[Any, Any], error: ValidationError) -> UserError:
    first = error.errors()[0]
    name = first["loc"][0]
    return UserError(f"{where}.{name}={given[name]}: {first['msg']}.")


def check(cfg: DictConfig) -> None:
    """Refuse a run that cannot be probed.

    Raises:
        UserError: naming the reason.
    """
    check_trainer_options(cfg.trainer)
    budget, precision, from_start = (
        cfg.schedule.budget,
        cfg.trainer.precision,
        "probes networks from their beginning.",
    )
    if budget is None:
        raise UserError(
            "a plan needs a budget: schedule.budget=N, in epochs of the full network (parts of one are fine)."
        )
    if not 0 < budget < inf:
        raise UserError(f"schedule.budget={budget} must be a number above 0.")
    check_settings(cfg)
    pretrained = [f"model.{key}={cfg.model[key]}" for key in ("pretrained", "weights") if cfg.model.get(key)]
    for wrong, reason in (
        (cfg.start_from is not None, f"start_from={cfg.start_from} is of runs: a plan {from_start}"),
        (cfg.study is not None, "a study is no training of one network, so there is nothing to plan."),
        (
            cfg.data.get("incremental") is not None or cfg.data.get("class_schedule"),
            "data that change while the network trains cannot be probed: plan with data that are all there.",
        ),
        (
            cfg.trainer.limit_train_batches not in (None, 1.0),
            "trainer.limit_train_batches changes what an epoch costs: set schedule.budget alone.",
        ),
        (
            str(precision) not in _PRECISIONS,
            f"trainer.precision={precision} cannot be probed; plan in {' or '.join(_PRECISIONS[1:])}.",
        ),
        ("lr" not in cfg.optimizer, "the optimizer has no lr, whose multiples a plan tries: choose another."),
        (pretrained, f"{', '.join(pretrained)} starts from weights of the full network: nothing to grow."),
    ):
        if wrong:
            raise UserError(reason)


def problem_of(cfg: DictConfig) -> tuple[Problem, Any]:
    """Make the problem and its data, with a part of the training set held out.

    Raises:
        UserError: the configuration cannot be probed.
    """
    check(cfg)
    method = _method(cfg)
    num_held_out, data = _data(cfg)
    # As configured, so that an error is that of a run, and comes before anything is probed.
    _optimizer(cfg, make_network(cfg.model, data), None)
    objective = make_objective(cfg.objective, data)
    # Only for its device and its precision.
    trainer: lightning.Trainer = hydra.utils.instantiate(
        for_lightning(OmegaConf.merge(cfg.trainer, {"devices": 1})),
        **{"logger": False, "callbacks": [], "enable_checkpointing": False, "_convert_": "all"},
    )
    samples = num_held_out + sum(
        sum(data.samples_in_batches(part, data.batch_size)) for part in range(data.epoch_parts)
    )
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
            f"{made.name} decides widths while it trains, so no probe can predict its cost: plan with another "
            f"growth, such as growth=pairs."
        )
    if isinstance(made, FixedSize):
        return partial(PairGrowth, gain=cfg.gain)
    return partial(hydra.utils.instantiate, cfg.growth)


def _optimizer(cfg: DictConfig, network: nn.Module, multiple: float | None) -> Optimizer:
    scaled = cfg.copy()
    if multiple is not None:
        scaled.optimizer.lr = multiple * cfg.optimizer.lr
    return optimizer_maker(scaled)(network.parameters())


# Data and candidates ---------------------------------------------------------------------------------------


def _data(cfg: DictConfig) -> tuple[int, Any]:
    """Set up the data with a held-out split; also return how many training samples that removed."""
    settings = cfg.data.copy()
    own = settings.get("validation", "split") == "split"
    if not own:
        settings.validation = "split"
    data = make_data(settings, cfg.seed)
    data.setup()
    if data.watched != "val":
        raise UserError("a plan never uses the test set, and these data have no other held-out samples.")
    return 0 if own else data.num_val, data


def _held_out(data: Any) -> Sequence[Batch]:
    """Return held-out batches, shuffled, since images in folders are sorted by class.

    Raises:
        UserError: there are no held-out samples.
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


def candidates_of(cfg: DictConfig, data: Any) -> list[Candidate]:
    """Make the requested candidates of `plan.candidates`.

    Raises:
        UserError: there is no such candidate, or it is not valid.
    """
    given, names = (OmegaConf.to_container(cfg.plan)[key] for key in ("candidates", "use"))
    if not isinstance(given, dict | None):
        raise UserError(f"plan.candidates={given} must be candidates by name.")
    known = {str(name): one for name, one in (given or {}).items() if one is not None}
    if not isinstance(names, list | None):
        raise UserError(f"plan.use={names} must be a list of candidates, such as [{', '.join(known)}].")
    names = list(known) if names is None else [str(name) for name in names]
    for name in names:
        if name not in known:
            raise UserError(
                f"plan.use: there is no candidate '{name}'; there are {', '.join(known) or 'none'}."
            )
    if not names:
        raise UserError("plan.candidates leaves none to probe besides the full network.")
    return [_candidate(cfg, data, name, known[name]) for name in names]


def _candidate(cfg: DictConfig, data: Any, name: str, given: Any) -> Candidate:
    if not isinstance(given, dict) or set(given) - set(_CANDIDATE):
        raise UserError(f"plan.candidates.{name}={given} is no candidate: that has {', '.join(_CANDIDATE)}.")
    known = {key: value for key, value in given.items() if value is not None}
    try:
        made = Candidate(name, **known)
    except ValidationError as error:
        raise _refused(f"plan.candidates.{name}", known, error) from error
    changed = cfg.copy()
    with open_dict(changed):
        changed.merge_with(made.settings)

    def parts() -> Sequence[Part]:
        return make_parts(changed.parts, data, At({0: made.width, 1: 1.0}, unit="step"))

    return replace(made, parts=parts, alone=made.width < 1 or made.depth < 1)


# Experiments -----------------------------------------------------------------------------------------------


def write_experiments(
    folder: Path, cfg: DictConfig, data: Any, planned: Planned, candidates: Mapping[str, Candidate]
) -> str:
    """Write `experiment/{planned,full,smaller,grown}.yaml`, ready to run, and their starting weights.

    Args:
        folder: the plan's, and `--config-dir` of the runs.
        cfg: the configuration that was planned for.
        data: set up.
        planned: the result.
        candidates: by name.

    Returns:
        The command that trains what the verdict recommends.
    """
    verdict = planned.verdict
    fixed: dict[str, Any] = {"/growth": "none", "/lr_adapt": "none"}
    runs, of = {FULL: fixed}, {FULL: FULL}
    if verdict.kind == "smaller" or verdict.smaller:
        # The candidate of the verdict, or the likeliest one.
        name = verdict.candidate if verdict.kind == "smaller" else verdict.smaller[0].candidate
        assert name is not None
        small, of["smaller"] = candidates[name], name
        multiples = {"growth.width_multiple": small.width, "growth.depth_multiple": small.depth}
        runs["smaller"] = {**fixed, **multiples, **_flat(small.settings)}
    if verdict.growing:
        best = verdict.growing[0]
        start, of["grown"] = candidates[best.candidate], best.candidate
        before = max(best.guess - _begun(planned, best.candidate), _LEAST_STAGE)
        small_epochs = before / planned.flops[best.candidate]
        runs["grown"] = {
            **({"/growth": "pairs", "/lr_adapt": "none"} if _choices()["growth"] == "none" else {}),
            "schedule.num_stages": 2,
            "schedule.initial_width": start.width,
            # Part of the epochs that is trained small.
            "schedule.initial_fraction": _rounded(small_epochs / (small_epochs + 1.0 - best.guess)),
            **_flat(start.settings),
        }
    chosen = {"grow": "grown", "smaller": "smaller", "full": FULL}[verdict.kind]
    command = f"python -m growlab --config-dir {shlex.quote(str(folder))} experiment="
    texts = {}
    for run, settings in runs.items():
        common = _common(cfg, data, planned, of[run])
        if planned.settings.start:
            path = folder.resolve() / "start" / f"{of[run]}.pt"
            path.parent.mkdir(exist_ok=True)
            weights, optimizer = planned.starts[of[run]]
            save(path, {"state_dict": weights, OPTIMIZER: optimizer})
            common |= {"start_from": str(path), **_NOT_WARMED}
        texts[run] = _text(cfg, {**common, **settings}, f"{command}{run}")
    texts["planned"] = texts[chosen].replace(f"{command}{chosen}", f"{command}planned")
    for run, text in texts.items():
        write_text(folder / "experiment" / f"{run}.yaml", text)
    return f"{command}planned"


def _begun(planned: Planned, name: str) -> float:
    """Fraction of the budget that a run starting from the candidate's probe has already spent."""
    return planned.measured[name].cost[-1] if planned.settings.start else 0.0


def _common(cfg: DictConfig, data: Any, planned: Planned, name: str) -> dict[str, Any]:
    """Settings of a candidate's run: equal cost, a learning rate clocked by cost, and short epochs."""
    # With `charge` all probing is off the budget already, this candidate's too.
    budget = cfg.schedule.budget * min(planned.budget, 1.0 - _begun(planned, name))
    rate = cfg.schedule.learning_rate
    settings: dict[str, Any] = {
        "schedule.budget": _rounded(budget),
        "schedule.equal_flops": False,
        **{f"schedule.{key}": None for key in _OF_THE_PLAN},
        "optimizer.lr": _rounded(cfg.optimizer.lr * planned.rates[name]),
    }
    if rate.clock != "cost":
        warmup = {"warmup_epochs": 0, "warmup_steps": None}
        warmup["warmup_fraction"] = _rounded(min(0.4, rate.warmup_epochs / budget))
        decay = {"shape": "wsd", "clock": "cost", "decay_fraction": 0.5, "restarts": "none"}
        settings |= {f"schedule.learning_rate.{key}": value for key, value in (decay | warmup).items()}
    if "epoch_parts" in cfg.data:
        batches = -(-data.num_train // data.batch_size)
        settings["data.epoch_parts"] = min(batches, max(cfg.data.epoch_parts, ceil(_LEAST_EPOCHS / budget)))
    return settings


def _choices() -> dict[str, Any]:
    """Config groups that an experiment file chooses."""
    choices = HydraConfig.get().runtime.choices.items()
    kept = {key: choice for key, choice in choices if choice is not None and key not in _NOT_CHOSEN}
    return {key: choice for key, choice in kept.items() if "/" not in key and "@" not in key}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in settings.items():
        nested = isinstance(value, Mapping)
        found |= _flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return found


def _text(cfg: DictConfig, settings: Mapping[str, Any], command: str) -> str:
    """The experiment file: config groups, and every value that differs from theirs."""
    replaced = {key[1:]: value for key, value in settings.items() if key.startswith("/")}
    choices = {group: str(replaced.get(group, choice)) for group, choice in _choices().items()}
    base = compose(PRIMARY, ["~experiment", *(f"{group}={choice}" for group, choice in choices.items())])
    target, known = (OmegaConf.to_container(c, resolve=False, enum_to_str=True) for c in (cfg, base))
    for group, choice in replaced.items():
        if HydraConfig.get().runtime.choices[group] != choice:
            target[group] = copy.deepcopy(known[group])
    for key, value in settings.items():
        if not key.startswith("/"):
            *parents, last = key.split(".")
            branch = target
            for parent in parents:
                branch = branch.setdefault(parent, {})
            branch[last] = value
    values = {key: value for key, value in _different(target, known).items() if key not in _NOT_KEPT}
    defaults = {"defaults": [{f"override /{group}": choice} for group, choice in choices.items()]}
    return (
        "# @package _global_\n"
        "# Written by growlab.lab.planner for this network, data and budget.\n"
        f"# Command:  {command}\n"
        + "\n".join(yaml.safe_dump(part, sort_keys=False) for part in (defaults, values))
    )


def _different(target: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of nested containers that another lacks or has with another value."""
    found: dict[str, Any] = {}
    for key, value in target.items():
        if key in known and isinstance(value, Mapping) and isinstance(known[key], Mapping):
            if inner := _different(value, known[key]):
                found[key] = inner
        elif key not in known or known[key] != value:
            found[key] = value
    return found


def _rounded(number: float) -> float:
    """Round to four digits."""
    return float(f"{float(number):.4g}")

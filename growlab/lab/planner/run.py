"""Run one plan: from configuration to odds and experiment files."""

import contextlib
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count, islice
from math import ceil, inf, isfinite
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any, Literal

import hydra
import lightning
import pydantic
import torch
import yaml
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from pydantic import Field
from torch import Tensor, nn

from growlab.base.command_parser import shell_lines
from growlab.base.errors import UserError
from growlab.base.files import CHECKPOINT_FOLDER, write_json, write_text
from growlab.grower import Grower
from growlab.grower.cost import forward_flops
from growlab.grower.triggers import Never
from growlab.growth import PairGrowth, WidthDecision
from growlab.growth.outputs import network_inputs
from growlab.lab.analysis.identity import leaves
from growlab.lab.planner.cases import read
from growlab.lab.training import build
from growlab.lab.training.checkpoints import OPTIMIZER, save
from growlab.lab.training.checks import check_trainer_options
from growlab.lab.training.configuration import PRIMARY
from growlab.lab.training.plan import tokens_of
from growlab.lab.training.processes import lock_folder, program
from growlab.lab.training.run import quiet_libraries
from growlab.optim import named_state
from growlab.plan import advise
from growlab.widths.inputs import changed

_PRECISIONS = ("32", "32-true", "bf16-mixed")
# Minimum number of epochs of the shortest run, so that its stages end close to where they should.
_LEAST_EPOCHS = 10
# Groups and settings that an experiment file leaves out.
_NOT_CHOSEN = ("experiment", "method", "plan", "parts")
_NOT_KEPT = ("name", "plan", "ckpt_path", "experiment_function")
# Minimum cost of a small stage that starts from a probe, as a fraction of the budget.
_LEAST_STAGE = 0.01
# For runs that start from a probe, which has warmed up already.
_NO_WARMUP = {"schedule.learning_rate.warmup_epochs": 0, "schedule.learning_rate.warmup_fraction": 0.0}
# Settings for a run's length and the time of growth, which the plan replaces.
_OF_THE_PLAN = (
    *("epochs", "widths", "batch_sizes", "initial_epochs", "grow_when", "width_growth_rate"),
    *("steps", "total_steps", "total_tokens", "eval_every_n_steps"),
)
# Minimum number of steps at each rate, since fewer do not show which is better; and the relative improvement of the
# loss for which another rate replaces the first one.
_LEAST_STEPS, _MARGIN = 8, 0.01
# Experiment file of each choice.
_EXPERIMENT = {"grow": "grown", "smaller": "smaller", "full": "full"}

# Raises pydantic.ValidationError, a ValueError, for values of the wrong type or out of range.
_checked = pydantic.dataclasses.dataclass(
    frozen=True, config=pydantic.ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")
)


@_checked
class Start:
    """A network that is smaller than the full one.

    Attributes:
        width: width of every group relative to the full network's.
        depth: fraction of the blocks that growth would insert.
        settings: overrides of the configuration.
    """

    width: Annotated[float, Field(gt=0, le=1)] = 1.0
    depth: Annotated[float, Field(ge=0, le=1)] = 1.0
    settings: Mapping[str, Any] = field(default_factory=dict)


@_checked
class Settings:
    """Settings of a plan; see `conf/plan/default.yaml`."""

    size: Literal["any", "full"]
    probe: Annotated[float, Field(ge=0, le=0.03)]
    rates: Annotated[Sequence[Annotated[float, Field(gt=0)]], Field(min_length=1)]
    switch: Annotated[float, Field(gt=0, lt=1)]
    cases: Sequence[str]
    smaller: Start
    start: Start


@dataclass(frozen=True)
class Arm:
    """A network to train, or to start growing from: its settings, parameters and FLOPs per sample."""

    start: Start
    params: int
    flops: int


@dataclass(frozen=True)
class Probe:
    """Training at one multiple of `optimizer.lr`.

    Attributes:
        loss: mean training loss over the second half of the steps, each before the batch's update.
        optimizer: state from `growlab.optim.named_state`; None if it cannot be saved by parameter names.
    """

    rate: float
    loss: float
    steps: int
    seconds_per_step: float
    weights: dict[str, Tensor]
    optimizer: dict[str, Any] | None


def run(cfg: DictConfig) -> None:
    """Print the odds, and write them and the experiment files into the run's folder."""
    if HydraConfig.get().mode != RunMode.RUN:
        raise UserError("a plan is of one budget: leave -m out, and plan others one after the other.")
    folder = Path(HydraConfig.get().runtime.output_dir)
    with quiet_libraries(), contextlib.ExitStack() as ending:
        ending.enter_context(lock_folder(folder))
        # The plan's configuration would overwrite the run's.
        if any((folder / name).exists() for name in (CHECKPOINT_FOLDER, "metrics.csv", "results.json")):
            raise UserError(f"{folder} contains a run: name another folder for the plan with hydra.run.dir=FOLDER.")
        settings = settings_of(cfg)
        check(cfg)
        if cfg.num_threads:
            torch.set_num_threads(cfg.num_threads)
        data = build.make_data(cfg.data, cfg.seed)
        ending.callback(data.teardown, "test")
        data.setup()
        size = data.batch_size
        in_pass = sum(sum(data.samples_in_batches(part, size)) for part in range(data.epochs_per_pass))
        with open_dict(cfg):
            cfg.schedule.budget = budget_of(cfg, data, in_pass)
        write_text(folder / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True))
        arms, samples = arms_of(cfg, data, settings), cfg.schedule.budget * in_pass
        tokens = tokens_of(data)
        advice = advise(
            arms["full"].params,
            samples * (tokens or 1),
            smaller=arms["smaller"].params,
            size=settings.size,
            kind="language" if tokens else "classes",
            cases=read(settings.cases),
        )
        print(advice, flush=True)
        chosen, probe, spent = _EXPERIMENT[advice.choice], None, 0.0
        if settings.probe:
            probe, spent = _probe(cfg, data, settings, arms, chosen, samples)
            seconds = (1 - spent) / spent * probe.steps * len(settings.rates) * probe.seconds_per_step
            kept = f"{100 * spent:.1f} % spent, kept; {seconds:.0f} s to go here."
            print(f"Best at {probe.rate:g} x optimizer.lr: {kept}", file=sys.stderr, flush=True)
        command = write_experiments(folder, cfg, data, settings, arms, chosen, probe, spent)
        plan = {"advice": asdict(advice), "settings": build.plain(cfg.plan), "spent": spent, "command": command}
        plan |= {"arms": {name: asdict(arm) for name, arm in arms.items()}, "rate": probe.rate if probe else 1.0}
        write_json(folder / "plan.json", plan)
        words = shlex.split(command.replace("python -m growlab", program(), 1))
        print(shell_lines(words, first="Run it with:"))


def settings_of(cfg: DictConfig) -> Settings:
    """Parse and check the settings of the plan."""
    try:
        # As JSON, so that objects become dataclasses.
        return pydantic.TypeAdapter(Settings).validate_json(json.dumps(build.plain(cfg.plan)))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise UserError(f"plan.{name}={first['input']}: {first['msg']}.") from error


def check(cfg: DictConfig) -> None:
    """Reject runs that cannot be planned."""
    check_trainer_options(cfg.trainer)
    build.check_settings(cfg)
    made = hydra.utils.instantiate(cfg.growth)
    pretrained = [f"model.{key}={cfg.model[key]}" for key in ("pretrained", "weights") if cfg.model.get(key)]
    limited = cfg.trainer.limit_train_batches not in (None, 1.0)
    refusals = {
        "a plan is of networks from their beginning: leave start_from out.": cfg.start_from is not None,
        "a study is no training of one network: nothing to plan.": cfg.experiment_function is not None,
        "data that change while the network trains cannot be planned for: take data that are all there.": (
            cfg.data.get("incremental") is not None or cfg.data.get("class_schedule")
        ),
        "trainer.limit_train_batches changes what an epoch costs: set schedule.budget alone.": limited,
        f"trainer.precision={cfg.trainer.precision} cannot be probed; plan in {' or '.join(_PRECISIONS[1:])}.": (
            cfg.plan.probe and str(cfg.trainer.precision) not in _PRECISIONS
        ),
        "the optimizer has no lr, whose multiples a plan tries: choose another, or leave plan.probe=0.": (
            cfg.plan.probe and "lr" not in cfg.optimizer
        ),
        f"{', '.join(pretrained)} starts from weights of the full network: nothing to grow.": pretrained,
        "this growth decides widths while it trains, so nobody knows what it will cost: take growth=pairs.": (
            isinstance(made, WidthDecision)
        ),
    }
    if reason := next((sentence for sentence, wrong in refusals.items() if wrong), None):
        raise UserError(reason)


def budget_of(cfg: DictConfig, data: Any, samples: int) -> float:
    """The budget in passes of the full network over the training data: `schedule.budget`, else the run's length."""
    schedule = cfg.schedule
    if schedule.budget:
        return float(schedule.budget)
    if tokens := schedule.get("total_tokens"):
        return tokens / (samples * (tokens_of(data) or 1))
    if steps := schedule.get("total_steps") or sum(schedule.get("steps") or ()):
        return steps * data.batch_size * cfg.trainer.accumulate_grad_batches / samples
    epochs = sum(schedule.epochs) if schedule.epochs else schedule.total_epochs
    return float(epochs / data.epochs_per_pass)


def arms_of(cfg: DictConfig, data: Any, settings: Settings) -> dict[str, Arm]:
    """The full network, the smaller one and the one that growing starts from."""
    full = _arm(cfg, data, Start())
    arms = {"full": full, "smaller": _arm(cfg, data, settings.smaller)}
    try:
        grown = _arm(cfg, data, settings.start)
    except UserError:
        # There are no blocks to insert, so it grows in width.
        grown = arms["smaller"]
    return {**arms, "grown": grown if grown.flops < 0.95 * full.flops else arms["smaller"]}


def _arm(cfg: DictConfig, data: Any, start: Start) -> Arm:
    grower = _grower(cfg, data, start)
    params = sum(parameter.numel() for parameter in grower.network.parameters())
    inputs = network_inputs(data.probe_batch(2), grower.network)
    sample = changed(lambda x: x[:1] if isinstance(x, Tensor) else x, inputs)
    for part in grower.parts:
        sample = part.inputs_at(sample, start.depth)
    return Arm(start, params, forward_flops(grower.network, sample))


def _grower(cfg: DictConfig, data: Any, start: Start) -> Grower:
    changed_settings = cfg.copy()
    with open_dict(changed_settings):
        changed_settings.merge_with(start.settings)
    trigger = Never(start.width, start.depth)
    grower = Grower(
        build.make_network(cfg.model, data),
        data.probe_batch(build.probe_size(cfg.probe_size, data)),
        method=PairGrowth(gain=cfg.gain),
        trigger=trigger,
        parts=build.make_parts(changed_settings.parts, data, trigger),
        seed=cfg.seed,
        verbose=False,
    )
    grower.check_ranks = False
    return grower


def _probe(
    cfg: DictConfig, data: Any, settings: Settings, arms: Mapping[str, Arm], chosen: str, samples: float
) -> tuple[Probe, float]:
    """Train the chosen network at each rate; return the best (if close, the first) and the fraction of budget spent."""
    arm, rates = arms[chosen], settings.rates
    step = arm.flops * data.batch_size * cfg.trainer.accumulate_grad_batches / (arms["full"].flops * samples)
    each = int(settings.probe / step) // len(rates)
    if each < _LEAST_STEPS:
        raise UserError(
            f"plan.probe allows {each} steps at each of {len(rates)} rates, and {_LEAST_STEPS} are needed: raise it or "
            "schedule.budget, try fewer plan.rates, or leave plan.probe=0."
        )
    best: Probe | None = None
    for rate in rates:
        probe = _trained(cfg, data, arm.start, rate, each)
        print(f"  {rate:g} x optimizer.lr: training loss {probe.loss:.3f} after {probe.steps} steps", file=sys.stderr)
        if best is None or probe.loss < (1 - _MARGIN) * best.loss:
            best = probe
    assert best is not None
    if best.loss == inf:
        listed = ", ".join(f"{rate:g}" for rate in rates)
        raise UserError(f"training breaks down at every rate ({listed} x optimizer.lr): lower that, or plan.rates.")
    return best, step * each * len(rates)


def _trained(cfg: DictConfig, data: Any, start: Start, rate: float, steps: int) -> Probe:
    """Train a network from scratch for a number of steps."""
    objective = build.make_objective(cfg.objective, data)
    # Provides the device and the precision.
    trainer: lightning.Trainer = hydra.utils.instantiate(
        build.for_lightning(cfg.trainer),
        devices=1,
        **{"logger": False, "callbacks": [], "enable_checkpointing": False, "_convert_": "all"},
    )
    device, accumulate = trainer.strategy.root_device, cfg.trainer.accumulate_grad_batches
    scaled = cfg.copy()
    scaled.optimizer.lr = rate * cfg.optimizer.lr
    torch.manual_seed(cfg.seed)
    network = _grower(cfg, data, start).network.to(device).train()
    optimizer, losses, seconds = build.optimizer_maker(scaled)(network.parameters()), list[float](), list[float]()
    batches = (batch for epoch in count() for batch in data.training_loader(epoch, epoch))
    for _ in range(steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        total = 0.0
        for batch in islice(batches, accumulate):
            *inputs, target = (x.to(device) if isinstance(x, Tensor) else x for x in batch)
            with trainer.precision_plugin.forward_context():
                batch_loss = objective(network(*inputs), target)[0] / accumulate
            batch_loss.backward()
            total += float(batch_loss.detach())
        if clip := cfg.trainer.get("gradient_clip_val"):
            nn.utils.clip_grad_norm_(network.parameters(), clip)
        optimizer.step()
        losses.append(total)
        seconds.append(time.perf_counter() - began)
        if not isfinite(total):
            break
    loss = mean(losses[len(losses) // 2 :])
    try:
        state: dict[str, Any] | None = named_state(optimizer, network)
    except ValueError:
        # `start_from` then uses a new optimizer.
        state = None
    weights = {name: tensor.detach().cpu().clone() for name, tensor in network.state_dict().items()}
    return Probe(rate, loss if isfinite(loss) else inf, len(losses), median(seconds), weights, state)


def write_experiments(
    folder: Path,
    cfg: DictConfig,
    data: Any,
    settings: Settings,
    arms: Mapping[str, Arm],
    chosen: str,
    probe: Probe | None,
    spent: float,
) -> str:
    """Write `experiment/{planned,full,smaller,grown}.yaml`, which train at equal cost.

    The chosen one starts from the probe, with its rate and without the cost spent. Returns the command that trains it.
    """
    fixed: dict[str, Any] = {"/growth": "none", "/lr_adapt": "none"}
    small, seed = arms["smaller"].start, arms["grown"]
    multiples = {"growth.width_multiple": small.width, "growth.depth_multiple": small.depth}
    small_cost = max(settings.switch - (spent if chosen == "grown" else 0.0), _LEAST_STAGE)
    small_epochs = small_cost * arms["full"].flops / seed.flops
    runs: dict[str, dict[str, Any]] = {
        "full": fixed,
        "smaller": {**fixed, **multiples, **dict(leaves(small.settings))},
        "grown": {
            **({"/growth": "pairs", "/lr_adapt": "none"} if _choices()["growth"] == "none" else {}),
            "schedule.num_stages": 2,
            "schedule.initial_width": seed.start.width,
            # Fraction of the epochs before growth.
            "schedule.initial_fraction": _rounded(small_epochs / (small_epochs + 1.0 - settings.switch)),
            **dict(leaves(seed.start.settings)),
        },
    }
    short = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    command = f"python -m growlab --config-dir {shlex.quote(str(short))} experiment="
    texts = {}
    for name, run_settings in runs.items():
        common = _common(cfg, data, spent if name == chosen else 0.0)
        if probe is not None and name == chosen:
            path = folder.resolve() / "start" / f"{name}.pt"
            path.parent.mkdir(exist_ok=True)
            save(path, {"state_dict": probe.weights, OPTIMIZER: probe.optimizer})
            common |= {"optimizer.lr": _rounded(cfg.optimizer.lr * probe.rate), "start_from": str(path)}
            common |= _NO_WARMUP
        texts[name] = _text(cfg, {**common, **run_settings}, f"{command}{name}")
    texts["planned"] = texts[chosen].replace(f"{command}{chosen}", f"{command}planned")
    for name, text in texts.items():
        write_text(folder / "experiment" / f"{name}.yaml", text)
    return f"{command}planned"


def _common(cfg: DictConfig, data: Any, spent: float) -> dict[str, Any]:
    """Settings of all runs: equal cost, a learning rate that follows cost, and enough epochs."""
    budget = cfg.schedule.budget * (1.0 - spent)
    rate = cfg.schedule.learning_rate
    settings: dict[str, Any] = {
        "schedule.budget": _rounded(budget),
        "schedule.equal_flops": False,
        **{f"schedule.{key}": None for key in _OF_THE_PLAN if key in cfg.schedule},
    }
    if rate.progress_unit != "cost":
        warmup: dict[str, Any] = {"warmup_epochs": 0, "warmup_steps": None}
        warmup["warmup_fraction"] = _rounded(min(0.4, rate.warmup_epochs / budget))
        decay = {"shape": "wsd", "progress_unit": "cost", "decay_fraction": 0.5, "restarts": "none"}
        settings |= {f"schedule.learning_rate.{key}": value for key, value in (decay | warmup).items()}
    if "epochs_per_pass" in cfg.data:
        batches = -(-data.num_train // data.batch_size)
        parts = max(cfg.data.epochs_per_pass, ceil(_LEAST_EPOCHS / budget))
        settings["data.epochs_per_pass"] = min(batches, parts)
    return settings


def _choices() -> dict[str, Any]:
    """Config groups that an experiment file chooses."""
    choices = HydraConfig.get().runtime.choices.items()
    kept = {key: choice for key, choice in choices if choice is not None and key not in _NOT_CHOSEN}
    return {key: choice for key, choice in kept.items() if "/" not in key and "@" not in key}


def _text(cfg: DictConfig, settings: Mapping[str, Any], command: str) -> str:
    """The experiment file: config groups, and every value that differs from them."""
    replaced = {key[1:]: value for key, value in settings.items() if key.startswith("/")}
    choices = {group: str(replaced.get(group, choice)) for group, choice in _choices().items()}
    base = compose(PRIMARY, ["~experiment", *(f"{group}={choice}" for group, choice in choices.items())])
    target = cfg.copy()
    for group, choice in replaced.items():
        if HydraConfig.get().runtime.choices[group] != choice:
            target[group] = base[group]
    for key, value in settings.items():
        if not key.startswith("/"):
            OmegaConf.update(target, key, value, force_add=True)
    plain: list[Any] = [OmegaConf.to_container(config, enum_to_str=True) for config in (target, base)]
    values = {key: value for key, value in _different(*plain).items() if key not in _NOT_KEPT}
    defaults = {"defaults": [{f"override /{group}": choice} for group, choice in choices.items()]}
    return (
        "# @package _global_\n"
        "# Written by growlab.lab.planner for this network, data and budget.\n"
        f"# Command:  {command}\n" + "\n".join(yaml.safe_dump(part, sort_keys=False) for part in (defaults, values))
    )


def _different(target: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of nested mappings that are missing from `base`, or have another value there."""
    changed: dict[str, Any] = {}
    for key, value in target.items():
        if key in base and isinstance(value, Mapping) and isinstance(base[key], Mapping):
            if inner := _different(value, base[key]):
                changed[key] = inner
        elif key not in base or base[key] != value:
            changed[key] = value
    return changed


def _rounded(number: float) -> float:
    """Round to four significant digits."""
    return float(f"{float(number):.4g}")

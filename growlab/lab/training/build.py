"""Build objects from the configuration, which is read only here, in `growlab.lab.cli` and in `growlab.lab.planner`."""

import contextlib
import secrets
import shlex
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import get_object, instantiate
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging, Timer, WeightAveraging
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer

from growlab.base.errors import Stopped, UserError, as_user_errors
from growlab.base.files import remove_unfinished, write_json, write_text
from growlab.base.ranks import gather
from growlab.base.settings import left_out, not_none, parameters
from growlab.grower import Grower, no_widths, trace_for_growth
from growlab.grower.triggers import Never, Trigger
from growlab.growth import FixedSize, GrowthMethod
from growlab.lab.analysis.identity import Identity, resume_settings, row_settings, settings_in
from growlab.lab.data import CustomData, ImageData, RunData
from growlab.lab.training import processes
from growlab.lab.training.batch_fit import TrialRun, TrialSteps, fit_batch_sizes
from growlab.lab.training.checkpoints import last_checkpoint, read_header, start_from, usable_checkpoint
from growlab.lab.training.checks import check_effects, check_trainer_options, check_types
from growlab.lab.training.configuration import LAST, search_options
from growlab.lab.training.distributed import SynchroniseBatchNorm, check_strategy, cluster_environment
from growlab.lab.training.learning_rate import LearningRate
from growlab.lab.training.loggers import close_loggers, run_name
from growlab.lab.training.objectives import CustomObjective, Objective
from growlab.lab.training.plan import Loop, Plan, Planning, StageCost, anneal_steps
from growlab.lab.training.run import Experiment, provenance, quiet_libraries, run
from growlab.optim import running_gradients
from growlab.parts import Part
from growlab.widths import WidthGraph

# torch's default: a job of a sweep without `num_threads` must not inherit the previous job's number.
_NUM_THREADS = torch.get_num_threads()
# Settings of `conf/schedule` that `Planning` does not take.
_NOT_PLANNED = ("learning_rate", "grow_when", "batch_size", "max_memory_gib_per_device")
# Groups in which integers become floats where the annotation has floats, so that config.yaml and tables agree.
_WITH_FLOATS = ("", "growth", "lr_adapt", "schedule", "schedule.learning_rate", "checkpoint")


def train(cfg: DictConfig) -> None:
    """Train one network as configured, or run the configured study; results go into the run's folder."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        with quiet_libraries(), contextlib.ExitStack() as ending:
            if processes.is_first():
                ending.enter_context(processes.lock_folder(folder))
            _check(cfg)
            if cfg.experiment_function is not None:
                _run_study(cfg, folder)
                return
            run(build(cfg, folder), folder)
            if processes.is_first() and HydraConfig.get().mode == RunMode.RUN:
                print(f"compare runs: {processes.program()} table runs")
    except Stopped as stop:
        raise Stopped(stop.signal, f"{stop.sentence}; resume with: {_resume_command(folder)}") from None


def plain(cfg: DictConfig) -> dict[str, Any]:
    """Convert a configuration to plain containers, with its interpolations resolved."""
    content: Any = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    return content


def build(cfg: DictConfig, folder: Path) -> Experiment:
    """Build an experiment: data, network, widths, plan and seed."""
    checkpoint, header = _resume(cfg, folder)
    with contextlib.ExitStack() as failing:
        # Reject invalid settings before reading data, which may take minutes.
        for group in (cfg.checkpoint, cfg.schedule.learning_rate):
            instantiate(group)
        _check_optimizer(cfg, instantiate(cfg.growth), instantiate(cfg.schedule.grow_when))
        data = make_data(cfg.data, cfg.seed)
        # Lightning tears data down only after a successful run.
        failing.callback(data.teardown, "test")
        processes.announce("reading data")
        data.setup()
        if processes.is_first() and (line := data.describe()):
            print(line, file=sys.stderr)
        torch.set_num_threads(cfg.num_threads or _NUM_THREADS)
        lightning.seed_everything(cfg.seed, verbose=False)
        grower, plan, cost, batch_fit = _plan(cfg, data, header.get("batch_fit"))
        data.batch_size_at_epoch = plan.schedule.batch_size_at
        optimizer = optimizer_maker(cfg)
        if cfg.start_from is not None and checkpoint is None:
            optimizer = start_from(grower, cfg.start_from, optimizer)
        old_settings = None if checkpoint is None else settings_in(folder)
        identity = _identity(cfg, header.get("run_id") or secrets.token_hex(4), old_settings)
        rate = _learning_rate(cfg, grower.forecast.known, plan.total_steps is not None)
        experiment = Experiment(
            *(data, grower, plan, cost, batch_fit, make_objective(cfg.objective, data), optimizer, rate),
            trainer=partial(_trainer, cfg, plan, data),
            loggers=partial(_loggers, cfg, identity.run_id),
            checkpoint=checkpoint,
            identity=identity,
            save=instantiate(cfg.checkpoint),
            optimizer_state=cfg.optimizer_state,
            log_every_n_steps=cfg.log_every_n_steps,
            log_rates_every_n_steps=cfg.log_rates_every_n_steps,
            log_layers_every_n_steps=cfg.log_layers_every_n_steps,
            batch_norm_samples=cfg.batch_norm_samples,
            check_ranks=cfg.check_ranks,
            compile=cfg.compile,
            synchronised=bool(cfg.trainer.get("sync_batchnorm")),
            num_processes=processes.world_size(cfg.trainer),
        )
        failing.pop_all()
    return experiment


def _check(cfg: DictConfig) -> None:
    """Reject settings that would fail only later."""
    if cfg.plan is not None:
        raise UserError("a run has no plan: leave plan=... out, or ask `growlab plan`.")
    check_trainer_options(cfg.trainer)
    check_settings(cfg)
    job, settings = HydraConfig.get(), plain(cfg)
    check_effects(settings, job.overrides.task, is_sweep=job.mode == RunMode.MULTIRUN)


def check_settings(cfg: DictConfig) -> None:
    """Reject values of the wrong type or out of range; convert integers to floats where a class takes floats."""
    settings = plain(cfg)
    parts = settings.pop("parts") or {}
    floats = check_types({name: value for name, value in settings.items() if name not in parts})
    for name, part in parts.items():
        if not left_out(part):
            floats |= check_types(part, name)
    for name, value in floats.items():
        if name.rpartition(".")[0] in (*_WITH_FLOATS, *parts) and OmegaConf.select(cfg, name) is not None:
            OmegaConf.update(cfg, name, value)


def _identity(cfg: DictConfig, run_id: str, old_settings: dict[str, Any] | None) -> Identity:
    config = plain(cfg)
    job = HydraConfig.get()
    choices, overrides = job.runtime.choices, list(job.overrides.task)
    row = {
        "experiment": str(cfg.name),
        **{key: choices[key] for key in ("model", "data", "growth", "lr_adapt", "optimizer")},
        "seed": cfg.seed,
        "precision": str(cfg.trainer.precision),
        "schedule": config["schedule"],
        "settings": row_settings(config, *(choices[key] for key in ("data", "optimizer", "growth"))),
        "overrides": overrides,
        # The same for a run that was resumed.
        "command": _command(override for override in overrides if override != LAST),
    }
    return Identity(run_id, resume_settings(config), OmegaConf.to_yaml(cfg, resolve=True), row, old_settings)


def _command(overrides: Iterable[str]) -> str:
    return shlex.join(["python", "-m", "growlab", *search_options(), *overrides])


def _resume(cfg: DictConfig, folder: Path) -> tuple[Path | None, dict[str, Any]]:
    """Find the checkpoint to resume from, and read its header."""
    if processes.is_first():
        for directory in (folder, last_checkpoint(folder).parent):
            remove_unfinished(directory)
    checkpoint = None if cfg.ckpt_path is None else Path(cfg.ckpt_path)
    if cfg.ckpt_path == "last":
        checkpoint, warning = usable_checkpoint(folder)
        if warning and processes.is_first():
            print(warning, file=sys.stderr)
    return checkpoint, read_header(checkpoint) if checkpoint else {}


def _resume_command(folder: Path) -> str:
    replaced = ("ckpt_path", "hydra.run.dir")
    overrides = [o for o in HydraConfig.get().overrides.task if processes.name_of(o) not in replaced]
    overrides = [*search_options(), *overrides, LAST, processes.in_folder(folder)]
    return f"{processes.program()} {shlex.join(overrides)}"


def _run_study(cfg: DictConfig, folder: Path) -> None:
    """Call `cfg.experiment_function` with the run's folder and seed; write its configuration and provenance."""
    if not isinstance(function := cfg.experiment_function, DictConfig) or "_target_" not in function:
        raise UserError(f"experiment_function={function} needs a _target_ and its arguments, or null.")
    if cfg.num_threads is not None:
        torch.set_num_threads(cfg.num_threads)
    torch.manual_seed(cfg.seed)
    write_text(folder / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True))
    command = _command(HydraConfig.get().overrides.task)
    write_json(folder / "provenance.json", {"command": command, **provenance(torch.device("cpu"))})
    instantiate(function, run_dir=folder, seed=cfg.seed, _convert_="all")


def make_data(settings: DictConfig, seed: int) -> RunData:
    """Make the data module; anything but a growlab data module becomes the source of a `CustomData`."""
    data = instantiate(settings)
    return data if isinstance(data, RunData) else CustomData(data, seed=seed)


def make_network(model: DictConfig, data: RunData) -> nn.Module:
    """Make the network at full width, with the arguments that can be inferred from the data."""
    arguments = data.network_arguments
    inferred = {name: data.offer(name) for name in _parameters(model._target_) if name not in (*model, *arguments)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")
        network = instantiate(model, **arguments, **not_none(**inferred))
    if not isinstance(network, nn.Module):
        raise UserError(f"model._target_={model._target_} makes a {type(network).__name__}, not a network.")
    if empty := [name for name, p in network.named_parameters() if not is_lazy(p) and not p.numel()]:
        zeros = ", ".join(f"model.{key!s}=0" for key, value in model.items() if value == 0 and value is not False)
        raise UserError(f"the network's {empty[0]} is without entries, with {zeros}: sizes must be at least 1.")
    return network


def make_objective(objective: DictConfig, data: RunData) -> Objective:
    """Make the objective and bind it to the data."""
    if "label_smoothing" in objective and "label_smoothing" not in _parameters(objective._target_):
        # Left over from the default file if only `_target_` was overridden.
        objective = OmegaConf.masked_copy(objective, [str(key) for key in objective if key != "label_smoothing"])
    loss = instantiate(objective)
    if isinstance(loss, nn.Module) and not isinstance(loss, Objective):
        loss = CustomObjective(loss)
    if not isinstance(loss, Objective):
        raise UserError(
            f"objective._target_={objective._target_} is no growlab.lab.training.Objective and no "
            "loss of torch.nn; for any other loss use objective=custom."
        )
    loss.bind(data)
    return loss


def _parameters(target: str) -> Collection[str]:
    """Names of a callable's parameters; none if it cannot be imported or inspected."""
    try:
        return parameters(get_object(target))
    except Exception:  # Raised again when it is called.
        return ()


def optimizer_maker(cfg: DictConfig) -> Callable[[Any], Optimizer]:
    """Return a function that makes the configured optimizer from parameters, with learning rates per region."""
    make, adaptation = instantiate(cfg.optimizer), instantiate(cfg.lr_adapt)
    if not callable(make):
        raise UserError("optimizer makes no function of parameters: give it a _target_ and _partial_=true.")

    def make_optimizer(parameters: Any) -> Optimizer:
        with as_user_errors():
            optimizer = make(parameters)
        adaptation.apply(optimizer)
        return optimizer

    return make_optimizer


def _check_optimizer(cfg: DictConfig, method: GrowthMethod, demand: Any) -> None:
    """Make and try the optimizer, which must keep running means of gradients if the method or the demand uses them."""
    parameter = nn.Parameter(torch.zeros(2, 2))
    optimizer = optimizer_maker(cfg)([parameter])
    using = [each for each in (method, demand) if getattr(each, "wants_gradients", False)]
    if not using or isinstance(method, FixedSize):
        return
    parameter.grad = torch.ones(2, 2)
    optimizer.step(lambda: 0.0)
    if not running_gradients(optimizer):
        raise UserError(
            f"{type(using[0]).__name__} uses running gradients, which this optimizer does not keep: set its momentum, "
            "or choose another optimizer."
        )


def _learning_rate(cfg: DictConfig, knows_stages: bool, in_steps: bool) -> Any:
    """Make the learning rate schedule; if batch sizes are searched, the base rate is for the data's batch size."""
    settings = cfg.schedule.learning_rate
    searched = cfg.schedule.batch_size is not None and settings.batch_size is None
    rate = instantiate(settings, **({"batch_size": cfg.data.batch_size} if searched else {}))
    rate = rate.by_steps(knows_stages) if in_steps and isinstance(rate, LearningRate) else rate
    if isinstance(rate, LearningRate) and rate.needs_stages and not knows_stages:
        raise UserError(
            f"schedule.learning_rate.{rate.needs_stages} needs the widths of all epochs before the run, but this run "
            "decides them while it trains: leave it out, or take schedule=exponential."
        )
    return rate


def _plan(
    cfg: DictConfig, data: RunData, known_sizes: list[dict[str, int]] | None
) -> tuple[Grower, Plan, StageCost, list[dict[str, int]] | None]:
    """Make the grower, the plan, the network's cost, and the searched batch sizes (or None)."""
    network = make_network(cfg.model, data)
    method: GrowthMethod = instantiate(cfg.growth)
    settings = {name: value for name, value in plain(cfg.schedule).items() if name not in _NOT_PLANNED}
    loop = Loop(cfg.trainer.limit_train_batches, cfg.trainer.accumulate_grad_batches, processes.world_size(cfg.trainer))
    fits, sizes = cfg.schedule.batch_size is not None, known_sizes
    if fits:
        # The smallest possible sizes, until the stages' widths are known and sizes can be searched.
        settings |= {"batch_growth_rate": 0.0, "max_batch_size": None, "max_batch_size_per_device": None}

    def fit(stages: Sequence[Mapping[str, int]]) -> list[int]:
        nonlocal sizes
        if sizes is None:
            sizes = _fitting_sizes(cfg, network, graph, trigger, parts, data, stages)
        return [stage["batch_size"] for stage in sizes]

    with as_user_errors():
        demand = instantiate(cfg.schedule.grow_when)
        planning = Planning(settings, method, demand, data, loop, fit if fits else None)
        trigger = planning.trigger()
        parts = make_parts(cfg.parts, data, trigger)
        example = data.probe_batch(2)
        graph = _graph(cfg, network, example, method, trigger, parts)
        cost = StageCost(network, graph, parts, example)
        trigger, plan = planning.plan(trigger, graph, cost, parts)
    _check_pretrained(cfg, plan, graph)
    grower = Grower(
        network,
        data.probe_batch(probe_size(cfg.probe_size, data)),
        method=method,
        trigger=trigger,
        parts=parts,
        seed=cfg.seed,
        anneal_steps=partial(anneal_steps, part=cfg.norm_anneal_fraction, plan=plan),
        verbose=False,
        graph=graph,
    )
    grower.check_ranks = cfg.check_ranks
    return grower, plan, cost, sizes if fits else None


def _graph(
    cfg: DictConfig, network: nn.Module, example: Any, method: GrowthMethod, trigger: Trigger, parts: Sequence[Part]
) -> WidthGraph:
    """Trace the network's width graph; a parametrized network of fixed size gets one without groups."""
    if any(map(is_parametrized, network.modules())):
        if trigger.resizes:
            raise UserError(
                "a network with parametrized weights cannot grow: take the plain network as model with "
                "growth=hyperfan, or train this one with growth=none."
            )
        return no_widths()
    if trigger.resizes:
        processes.announce("tracing the network: which channels grow together")
    return trace_for_growth(network, example, method, parts, cfg.seed, list(cfg.keep_full), trigger.resizes)


def probe_size(configured: int | None, data: RunData) -> int:
    """Number of training samples to check parity on; by default the data's `probe_size`."""
    return max(2, min(configured or data.probe_size, data.num_train))


def make_parts(settings: DictConfig, data: RunData, trigger: Trigger) -> list[Part]:
    """Make the configured parts that are not null, and those that the data need."""
    configured = []
    for name, part in settings.items():
        if not left_out(part):
            configured.append(made := _made(f"parts.{name!s}", part, Part, "part"))
            made.name = made.name or str(name)
    if isinstance(trigger, Never) and trigger.depth < 1 and not any(part.grows for part in configured):
        raise UserError(
            f"growth.depth_multiple={trigger.depth:g} is a fraction of the blocks that growth inserts, but no part "
            "inserts blocks: choose one, as method=smaller does."
        )
    return [part for part in (*configured, *data.parts()) if part.applies(trigger)]


def _made(name: str, settings: Any, kind: type, what: str, /, **arguments: Any) -> Any:
    """Instantiate a setting with a `_target_`; raise a UserError unless the result is of class `kind`."""
    has_target = isinstance(settings, Mapping | DictConfig) and "_target_" in settings
    made = instantiate(settings, **arguments) if has_target else settings
    if isinstance(made, kind):
        return made
    if has_target:
        raise UserError(f"{name} makes a {type(made).__name__}, not a {kind.__module__}.{kind.__name__}.")
    raise UserError(f"{name}={settings} is not a {what}: give it a _target_ and its arguments.")


def _check_pretrained(cfg: DictConfig, plan: Plan, graph: WidthGraph) -> None:
    for setting in (f"model.{key}={cfg.model[key]}" for key in ("pretrained", "weights") if cfg.model.get(key)):
        if str(cfg.growth.get("initialisation", "constructor")) != "constructor":
            raise UserError(
                f"{setting} are weights to continue from, but growth.initialisation={cfg.growth.initialisation} draws "
                "others: leave one of them out."
            )
        if plan.widths[0] != graph.full_widths:
            raise UserError(
                f"{setting} are weights of the full-width network, but this run starts narrower or wider and would "
                "draw its own; set growth=none lr_adapt=none to train on from them."
            )


def _fitting_sizes(
    cfg: DictConfig,
    network: nn.Module,
    graph: WidthGraph,
    trigger: Trigger,
    parts: Sequence[Part],
    data: RunData,
    stages: Sequence[Mapping[str, int]],
) -> list[dict[str, int]]:
    """Find the batch size of each stage by trial."""
    if not isinstance(data, ImageData):
        raise UserError("schedule.batch_size=auto is for image data only: leave it out.")
    # Provides the device, the precision and the process group, which the run's trainer will reuse.
    bare: dict[str, Any] = {"logger": False, "callbacks": [], "enable_checkpointing": False}
    bare["plugins"] = cluster_environment(not processes.started_elsewhere())
    trainer: lightning.Trainer = instantiate(for_lightning(cfg.trainer), **bare, _convert_="all")
    check_strategy(trainer)
    trainer.strategy.setup_environment()

    def narrow(copied: nn.Module, stage: int) -> WidthGraph:
        narrowed, grown = graph, trigger.fraction_grown(stage, stages[stage])
        for part in parts:
            narrowed = part.shrink_to(copied, narrowed, 1.0 if grown is None else grown)
        return narrowed

    trial = TrialRun(
        network,
        graph,
        optimizer_maker(cfg),
        trainer.precision_plugin,
        trainer.strategy.root_device,
        data.image_shape,
        data.channels_last,
        num_copies=(trainer.world_size > 1) + sum(part.num_copies for part in parts),
        held_bytes=data.held_bytes(),
        narrow=narrow,
        max_memory_gib=cfg.schedule.max_memory_gib_per_device,
    )
    with TrialSteps(trial, stages) as steps:
        sizes = fit_batch_sizes(
            *(len(stages), cfg.schedule, data.num_train, trainer.world_size, steps.fits), lambda size: min(gather(size))
        )
    if processes.is_first():
        listed = " ".join(str(stage["batch_size"]) for stage in sizes)
        print(f"batch sizes that fit, stage by stage: {listed}", file=sys.stderr)
    return sizes


def for_lightning(trainer: DictConfig) -> DictConfig:
    """Copy the configuration's `trainer` without `max_restarts`, which is growlab's own."""
    copied = trainer.copy()
    with open_dict(copied):
        copied.pop("max_restarts", None)
    return copied


def _trainer(
    cfg: DictConfig,
    plan: Plan,
    data: RunData,
    folder: Path,
    loggers: list[Logger],
    callbacks: list[lightning.Callback],
    plugins: list[Any],
) -> lightning.Trainer:
    plugins = [*plugins, *cluster_environment(not processes.started_elsewhere())]
    if cfg.trainer.get("sync_batchnorm"):
        on_cpu = cfg.trainer.accelerator == "cpu" or not torch.cuda.is_available()
        plugins.append(SynchroniseBatchNorm(on_cpu))
    trainer = instantiate(
        for_lightning(cfg.trainer),
        max_epochs=plan.schedule.total_epochs,
        limit_val_batches=1.0 if data.num_val else 0,
        logger=loggers or False,
        callbacks=[*user_callbacks(cfg), *callbacks],
        plugins=plugins,
        default_root_dir=str(folder),
        **dict.fromkeys(("enable_progress_bar", "enable_model_summary", "use_distributed_sampler"), False),
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        reload_dataloaders_every_n_epochs=1,
        _convert_="all",
    )
    check_strategy(trainer)
    return trainer


def user_callbacks(cfg: DictConfig) -> list[lightning.Callback]:
    """Make the callbacks of the group `callbacks`, and those of the list `trainer.callbacks`."""
    named = {f"callbacks.{name}": settings for name, settings in (cfg.get("callbacks") or {}).items()}
    listed = cfg.trainer.get("callbacks") or []
    if not isinstance(listed, ListConfig | list):
        raise UserError(f"trainer.callbacks={listed} must be a list; callbacks.NAME._target_=MODULE.CLASS adds one.")
    named |= {f"trainer.callbacks[{index}]": settings for index, settings in enumerate(listed)}
    return [_user_callback(name, settings) for name, settings in named.items() if settings is not None]


def _user_callback(name: str, settings: Any) -> lightning.Callback:
    callback = _made(name, settings, lightning.Callback, "Lightning callback", _convert_="all")
    kind = type(callback).__name__
    # Reject callbacks that would silently distort the results; any others are up to the user.
    if str(monitor := getattr(callback, "monitor", None)).startswith("test_"):
        raise UserError(
            f"{kind} would decide by {monitor}, and nothing may be selected on the test set: monitor val_loss with "
            "data.validation=split, or train_loss."
        )
    if isinstance(callback, StochasticWeightAveraging | WeightAveraging | GradientAccumulationScheduler):
        raise UserError(
            f"{kind} does not follow a growing network: ema.decay=0.999 averages its weights, "
            "trainer.accumulate_grad_batches or schedule.batch_sizes set what makes a step."
        )
    if isinstance(callback, Timer) and callback.time_remaining() is not None:
        raise UserError(
            "Timer would end the run within an epoch, and a resumed run would skip the rest: leave its duration out, "
            "and end the run with a signal, as `timeout 3h growlab ...` does."
        )
    return callback


@contextlib.contextmanager
def _loggers(cfg: DictConfig, run_id: str) -> Iterator[list[Logger]]:
    """Make the configured loggers, which log the configuration and are always closed."""
    loggers: list[Logger] = []
    succeeded = False
    try:
        for name, settings in cfg.logger.items():
            # A resumed run continues under the same id and name.
            identity = {"id": run_id, "name": run_name(HydraConfig.get().overrides.task, cfg.name)}
            arguments = settings if isinstance(settings, DictConfig) else {}
            unset = {key: value for key, value in identity.items() if arguments.get(key, "") is None}
            loggers.append(_made(f"logger.{name}", settings, Logger, "logger", **unset))
        for logger in loggers:
            logger.log_hyperparams(plain(cfg))
        yield loggers
        succeeded = True
    finally:
        close_loggers(loggers, succeeded)

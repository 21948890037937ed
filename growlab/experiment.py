"""One run, read top to bottom: data, network, widths, seed, task, training, test, result."""

import contextlib
import secrets
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
import lightning
import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf
from torch import nn

from growlab.analysis.figures import write_run_figures
from growlab.analysis.run_table import print_results
from growlab.argument_types import check_types
from growlab.callbacks import completed, user_callbacks
from growlab.data import ImageData
from growlab.errors import Stopped, UserError
from growlab.files import remove_unfinished, write_json, write_text
from growlab.growth import (
    CLASSES,
    Demand,
    GrowthMethod,
    finish,
    plant,
    sort_classes,
)
from growlab.outcome import results_row
from growlab.pairing import make_data, make_network, make_objective
from growlab.planning import learning_rate, optimizer_maker, plan_run
from growlab.processes import is_first, started_elsewhere, world_size
from growlab.studies.running import run_study
from growlab.trainer_options import check_trainer_options, for_lightning
from growlab.training import GrowthCallback, GrowthProgress, RunRecorder, Task
from growlab.training.checkpoints import (
    AtomicCheckpointIO,
    last_checkpoint,
    read_header,
    save,
    usable_checkpoint,
)
from growlab.training.climbing import Climber
from growlab.training.deepening import choose_depth
from growlab.training.distributed import check_strategy, cluster_environment
from growlab.training.fresh_statistics import FreshStatistics
from growlab.training.layer_statistics import LayerStatistics, held_out
from growlab.training.library_messages import plain_errors, quiet_libraries
from growlab.training.loggers import WandbRecords, close_loggers, run_name
from growlab.training.looking import auxiliary_flops
from growlab.training.norm_annealing import NormAnnealing
from growlab.training.objective import network_inputs
from growlab.training.orthogonal import OldGradient
from growlab.training.plan import Plan, carried_out, find_widths, grow_head
from growlab.training.rank_check import RankCheck
from growlab.training.saving import SaveCheckpoints
from growlab.training.sync_batchnorm import SynchroniseBatchNorm
from growlab.widths import WidthGraph

# What a resumed run may do differently: none of it changes what is computed.
_FREE_ON_RESUME = (
    *("name", "ckpt_path", "checkpoint", "logger", "compile", "num_threads", "log_rates_every_n_steps"),
    *("check_ranks", "trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.strategy"),
    "trainer.max_restarts",
    # The task compares what of it matters.
    "trainer.sync_batchnorm",
    *("data.root", "data.download", "data.eval_batch_size"),
    *("data.in_memory", "data.num_workers", "schedule.max_memory_gib_per_device"),
)
_MAX_SEED = 2**32 - 1
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
# What torch starts with: a sweep's job without `num_threads` must not inherit the job's before it.
_NUM_THREADS = torch.get_num_threads()


def run(cfg: DictConfig) -> None:
    """Train one network as configured and leave everything about it in the run's folder.

    Args:
        cfg: the composed configuration of `conf/config.yaml`.

    Raises:
        UserError: the configuration, the data, the machine or the training itself does not allow the run.
    """
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    try:
        with plain_errors(), quiet_libraries(), contextlib.ExitStack() as ending:
            if cfg.study is None:
                _run(cfg, run_dir, ending)
            else:
                _check(cfg)
                run_study(cfg, run_dir)
    except Stopped as stop:
        raise Stopped(stop.signal, f"{stop.sentence}; resume with: {_resume_command(run_dir)}") from None


def _resume_command(run_dir: Path) -> str:
    replaced = ("ckpt_path=", "hydra.run.dir=")
    overrides = [o for o in HydraConfig.get().overrides.task if not o.startswith(replaced)]
    return shlex.join(["growlab", *overrides, "ckpt_path=last", f"hydra.run.dir={run_dir}"])


def _run(cfg: DictConfig, run_dir: Path, ending: contextlib.ExitStack) -> None:
    _check(cfg)
    if is_first():
        for folder in (run_dir, last_checkpoint(run_dir).parent):
            remove_unfinished(folder)
    checkpoint = _checkpoint_to_resume(cfg, run_dir)
    header = read_header(checkpoint) if checkpoint else {}
    run_id = header.get("run_id") or secrets.token_hex(4)
    data: ImageData = make_data(cfg.data, cfg.seed)
    # Lightning does so only for a run that succeeds.
    ending.callback(data.teardown, "test")
    data.setup()
    torch.set_num_threads(cfg.num_threads or _NUM_THREADS)
    lightning.seed_everything(cfg.seed, verbose=False)
    network = make_network(cfg.model, data)
    method: GrowthMethod = hydra.utils.instantiate(cfg.growth)
    graph = find_widths(network, data.probe_batch(2), method, list(cfg.opaque))
    demand: Demand | None = hydra.utils.instantiate(cfg.schedule.demand)
    graph = grow_head(method.prepare(network, graph, cfg.seed), method, data, demand is not None)
    depth = choose_depth(cfg.depth.blocks, str(cfg.depth.start), network, graph, method, data, demand)
    known = header.get("batch_fit")
    plan, batch_fit = plan_run(cfg, network, graph, method, data, known, demand, depth)
    _check_pretrained(cfg, plan, graph)
    if depth is not None:
        graph = depth.as_at(network, 0, plan.schedule.num_stages)
    state = plant(network, graph, method, plan.widths[0], cfg.seed)

    data.batch_size_at_epoch = plan.schedule.batch_size_at
    objective = make_objective(cfg.objective, data)
    task = Task(
        network,
        graph,
        method,
        plan.schedule,
        state,
        optimizer_maker(cfg),
        plan.steps,
        hydra.utils.instantiate(cfg.lr_adapt),
        learning_rate(cfg),
        cfg.seed,
        deciding_settings(cfg),
        run_id,
        cfg.ema.decay,
        objective,
    )
    task.depth = depth
    if any(isinstance(module, _BATCH_NORMS) for module in network.modules()):
        task.statistics_ranks = 1 if cfg.trainer.get("sync_batchnorm") else world_size(cfg.trainer)
    if CLASSES in graph.groups and data.incremental is not None:
        task.class_order = data.incremental.order(data.num_classes)
    task.batch_fit, task.watched = batch_fit, getattr(data, "watched", "val")
    recorder = RunRecorder(run_dir, plan.samples, cfg.log_rates_every_n_steps)
    progress = GrowthProgress(plan.batches, plan.samples, plan.flops_in_epoch)

    def on_event(trainer: lightning.Trainer, receipt: dict[str, Any]) -> None:
        recorder.on_growth(trainer, receipt)
        records.on_growth(trainer, task)
        progress.on_growth(trainer, receipt)

    rank_check = RankCheck(cfg.check_ranks)
    every = cfg.log_layers_every_n_steps
    layers = [] if every is None else [LayerStatistics(run_dir, *held_out(data), every)]
    old = None if cfg.osgd.anneal is None else OldGradient(network, str(cfg.osgd.anneal), plan.steps)
    climber, batches = None, getattr(data, "training_batches", None)
    if demand is not None and plan.ladder is not None:
        climber = Climber(demand, plan, data.probe_batch(1), lambda: recorder.rows, batches)
        task.on_demand, recorder.with_gradient_norm = True, demand.wants_gradients
    _check_data(cfg, data, task)
    growth = GrowthCallback(
        *(data.probe_batch(cfg.probe_size), str(cfg.optimizer_state), on_event, rank_check, old, climber),
        batches,
    )
    with _loggers(cfg, run_id) as loggers:
        policy, writer = hydra.utils.instantiate(cfg.checkpoint), AtomicCheckpointIO()
        saving = SaveCheckpoints(last_checkpoint(run_dir), writer, policy, resumed=checkpoint)
        records = WandbRecords(loggers)
        fresh = FreshStatistics(cfg.statistics_images, batches)
        annealing, looks_back = NormAnnealing(cfg.norm_anneal), [] if old is None else [old]
        callbacks = [
            *(growth, annealing, progress, recorder, records, rank_check, *looks_back, *layers, fresh, saving)
        ]
        trainer = _trainer(cfg, run_dir, loggers, callbacks, [writer], plan, data)
        if trainer.is_global_zero:
            write_text(run_dir / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True))
        if cfg.compile:
            # Not torch.compile(network), which would put a prefix before the names of all weights.
            network.compile()
        trainer.fit(task, datamodule=data, ckpt_path=checkpoint, weights_only=True)
        plan = completed(plan, recorder.rows, task, cfg)
        if task.decides_widths:
            sample = network_inputs(data.probe_batch(1), network)
            stages = [row["stage"] for row in recorder.rows]
            plan = carried_out(plan, stages, task.stage_widths, network, graph, sample)
        plan = replace(plan, auxiliary_flops=auxiliary_flops(task))
        if trainer.is_global_zero:
            recorder.write(task)
        fresh.finish(task)
        # Before the test, so that the accuracy is that of the very weights in model.pt.
        if task.class_order is not None:
            for weights in _weights(task).values():
                sort_classes(weights, task.graph, task.class_order)
        task.class_order = None
        averages = () if task.average is None else (task.average.module,)
        finish(network, task.graph, method, task.growth_state, averages)
        trainer.test(task, datamodule=data, verbose=False)
        results = results_row(cfg, plan, task, recorder, trainer.world_size, trainer.num_nodes)
        recorder.on_result(trainer, results)
        if trainer.is_global_zero:
            for name, weights in _weights(task).items():
                tensors = {key: tensor.detach().cpu() for key, tensor in weights.state_dict().items()}
                save(run_dir / name, tensors)
            for name, content in objective.exports(network).items():
                (write_text if isinstance(content, str) else save)(run_dir / name, content)
            write_json(run_dir / "results.json", results)
            write_run_figures(run_dir)
        records.publish(trainer, run_dir)
    if trainer.is_global_zero:
        print_results(results, run_dir)


def _weights(task: Task) -> dict[str, nn.Module]:
    """What comes out of a run, by the name of its file."""
    average = {} if task.average is None else {"model_ema.pt": task.average.module}
    return {"model.pt": task.network, **average}


def _trainer(
    cfg: DictConfig,
    run_dir: Path,
    loggers: list[Logger],
    callbacks: list[lightning.Callback],
    plugins: list[Any],
    plan: Plan,
    data: ImageData,
) -> lightning.Trainer:
    plugins = [*plugins, *cluster_environment(not started_elsewhere())]
    if cfg.trainer.get("sync_batchnorm"):
        on_cpu = cfg.trainer.accelerator == "cpu" or not torch.cuda.is_available()
        plugins.append(SynchroniseBatchNorm(on_cpu))
    trainer = hydra.utils.instantiate(
        for_lightning(cfg.trainer),
        max_epochs=plan.schedule.total_epochs,
        limit_val_batches=1.0 if data.num_val else 0,
        logger=loggers or False,
        callbacks=[*user_callbacks(cfg), *callbacks],
        plugins=plugins,
        default_root_dir=str(run_dir),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        reload_dataloaders_every_n_epochs=1,
        use_distributed_sampler=False,
        _convert_="all",
    )
    check_strategy(trainer)
    return trainer


@contextlib.contextmanager
def _loggers(cfg: DictConfig, run_id: str) -> Iterator[list[Logger]]:
    """The configured loggers, told the configuration, and ended whatever happens."""
    loggers: list[Logger] = []
    succeeded = False
    try:
        for name, settings in cfg.logger.items():
            if not isinstance(settings, DictConfig):
                raise UserError(
                    f"logger.{name}={settings} is no logger: give it a _target_ and its arguments."
                )
            # The same identity after an interruption, where a logger has one.
            known = {"id": run_id, "name": run_name(HydraConfig.get().overrides.task, cfg.name)}
            own = {key: value for key, value in known.items() if key in settings and settings[key] is None}
            logger = hydra.utils.instantiate(settings, **own)
            if not isinstance(logger, Logger):
                raise UserError(
                    f"logger.{name} makes a {type(logger).__name__}, not one of Lightning's loggers."
                )
            loggers.append(logger)
        for logger in loggers:
            logger.log_hyperparams(OmegaConf.to_container(cfg, resolve=True, enum_to_str=True))
        yield loggers
        succeeded = True
    finally:
        close_loggers(loggers, succeeded)


def _checkpoint_to_resume(cfg: DictConfig, run_dir: Path) -> Path | None:
    if cfg.ckpt_path is None:
        return None
    if cfg.ckpt_path != "last":
        return Path(cfg.ckpt_path)
    path, told = usable_checkpoint(run_dir)
    if told and is_first():
        print(told, file=sys.stderr)
    return path


def deciding_settings(cfg: DictConfig) -> dict[str, Any]:
    """What decides the numbers that come out of a run, in plain containers."""
    settings = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    for name in _FREE_ON_RESUME:
        *parents, key = name.split(".")
        branch = settings
        for parent in parents:
            branch = branch.get(parent, {})
        branch.pop(key, None)
    return settings


def _check(cfg: DictConfig) -> None:
    """Refuse what would only fail later."""
    check_trainer_options(cfg.trainer)
    check_types(OmegaConf.to_container(cfg, resolve=True))
    if not 0 <= cfg.seed <= _MAX_SEED:
        raise UserError(f"seed={cfg.seed} must lie between 0 and {_MAX_SEED}.")
    if cfg.num_threads is not None and cfg.num_threads < 1:
        raise UserError(f"num_threads={cfg.num_threads} must be at least 1, or null for all cores.")
    if cfg.probe_size < 2:
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


def _check_data(cfg: DictConfig, data: ImageData, task: Task) -> None:
    if cfg.probe_size > data.num_train:
        raise UserError(
            f"probe_size={cfg.probe_size} is more than the {data.num_train} training samples that there are; set "
            f"probe_size={data.num_train} or less."
        )
    if cfg.log_layers_every_n_steps is not None and task.class_order is not None:
        raise UserError("log_layers_every_n_steps needs all classes from the start; set it to null.")
    if cfg.osgd.anneal is not None and not hasattr(data, "training_images"):
        raise UserError("osgd.anneal works with image data; set it to null.")
    if task.method.batches and (task.class_order is not None or not hasattr(data, "training_batches")):
        name = task.method.name
        raise UserError(
            f"{name} looks at images of all classes; choose other data, or another growth method."
        )
    if cfg.osgd.anneal == "stage" and task.decides_widths:
        raise UserError("osgd.anneal=stage needs stages whose ends are known before; set osgd.anneal=run.")


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

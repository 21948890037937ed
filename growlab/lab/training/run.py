"""One run, read top to bottom: data, network, widths, seed, task, training, test, result."""

import contextlib
import secrets
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import hydra
import lightning
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf
from torch import nn

from growlab.base.errors import Stopped, UserError
from growlab.base.files import remove_unfinished, write_json, write_text
from growlab.lab.analysis.identity import resume_settings
from growlab.lab.analysis.report import write_run_report
from growlab.lab.analysis.run_table import print_results
from growlab.lab.data import RunData
from growlab.lab.training import GrowthCallback, GrowthProgress, RunRecorder, Task
from growlab.lab.training.anneal import check_part
from growlab.lab.training.checkpoints import (
    AtomicCheckpointIO,
    differences,
    last_checkpoint,
    read_header,
    save,
    usable_checkpoint,
)
from growlab.lab.training.configuration import search_options
from growlab.lab.training.context import tell_training
from growlab.lab.training.distributed import check_strategy, cluster_environment
from growlab.lab.training.factories import make_data, make_objective
from growlab.lab.training.fresh_statistics import FreshStatistics
from growlab.lab.training.ineffective_settings import check_overruled, unused
from growlab.lab.training.layer_statistics import layer_statistics
from growlab.lab.training.library_messages import plain_errors, quiet_libraries
from growlab.lab.training.loggers import WandbRecords, close_loggers, run_name
from growlab.lab.training.memory import keep_freed
from growlab.lab.training.next_commands import next_commands
from growlab.lab.training.plan import Plan, carried_out
from growlab.lab.training.processes import (
    announce,
    in_folder,
    is_first,
    name_of,
    program,
    started_elsewhere,
    world_size,
)
from growlab.lab.training.rank_check import RankCheck
from growlab.lab.training.results_row import results_row
from growlab.lab.training.run_folder import check_places, forget_results, held_alone
from growlab.lab.training.run_plan import Planned, check_settings, learning_rate, optimizer_maker, plan_run
from growlab.lab.training.saving import SaveCheckpoints
from growlab.lab.training.setting_names import named_as_settings
from growlab.lab.training.study import run_study
from growlab.lab.training.sync_batchnorm import SynchroniseBatchNorm
from growlab.lab.training.trainer_options import check_trainer_options, for_lightning
from growlab.lab.training.user_callbacks import completed, user_callbacks
from growlab.lab.training.warm_start import continuing, start_from

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
        with named_as_settings(cfg), plain_errors(), quiet_libraries(), contextlib.ExitStack() as ending:
            if is_first():
                ending.enter_context(held_alone(run_dir))
            if cfg.study is None:
                _run(cfg, run_dir, ending)
            else:
                _check(cfg)
                run_study(cfg, run_dir)
    except Stopped as stop:
        raise Stopped(stop.signal, f"{stop.sentence}; resume with: {_resume_command(run_dir)}") from None


def _resume_command(run_dir: Path) -> str:
    replaced = ("ckpt_path", "hydra.run.dir")
    overrides = [o for o in HydraConfig.get().overrides.task if name_of(o) not in replaced]
    return f"{program()} {shlex.join([*search_options(), *overrides, 'ckpt_path=last', in_folder(run_dir)])}"


def _run(cfg: DictConfig, run_dir: Path, ending: contextlib.ExitStack) -> None:
    _check(cfg)
    checkpoint, header = _resume(cfg, run_dir)
    data = _data(cfg, ending)
    torch.set_num_threads(cfg.num_threads or _NUM_THREADS)
    keep_freed()
    lightning.seed_everything(cfg.seed, verbose=False)
    planned = plan_run(cfg, data, header.get("batch_fit"))
    grower, plan = planned.grower, planned.plan
    data.batch_size_at_epoch = plan.schedule.batch_size_at
    run_id = header.get("run_id") or secrets.token_hex(4)
    task = _task(cfg, data, planned, run_id, begins=checkpoint is None)
    recorder = RunRecorder(run_dir, plan.samples, cfg.log_rates_every_n_steps)
    fresh = FreshStatistics(cfg.statistics_images, data.training_batches)
    with _loggers(cfg, run_id) as loggers:
        writer, records = AtomicCheckpointIO(), WandbRecords(loggers)
        progress = GrowthProgress(plan.batches, plan.samples, plan.flops_in_epoch)

        def on_event(trainer: lightning.Trainer, receipt: dict[str, Any]) -> None:
            recorder.on_growth(trainer, receipt)
            records.on_growth(trainer, task)
            progress.on_growth(trainer, receipt)

        saving = SaveCheckpoints(
            last_checkpoint(run_dir), writer, hydra.utils.instantiate(cfg.checkpoint), resumed=checkpoint
        )
        growth = GrowthCallback(grower, str(cfg.optimizer_state), plan.schedule.batch_size_at, on_event)
        layers = layer_statistics(cfg.log_layers_every_n_steps, data, grower, run_dir)
        rank_check = RankCheck(cfg.check_ranks)
        begin = LambdaCallback(on_fit_start=partial(_begin, cfg, run_dir, checkpoint))
        callbacks = [begin, growth, progress, recorder, records, rank_check, *layers, fresh, saving]
        trainer = _trainer(cfg, run_dir, loggers, callbacks, [writer], plan, data)
        tell_training(grower, task, data, planned, recorder, trainer)
        if cfg.compile:
            # Not torch.compile(network), which would put a prefix before the names of all weights.
            task.network.compile()
            grower.reattach_hooks()
        trainer.fit(task, datamodule=data, ckpt_path=checkpoint, weights_only=True)
        plan = _carried_out(completed(plan, recorder.rows, task, cfg), planned, task, recorder)
        if trainer.is_global_zero:
            recorder.write(task)
        # Before the test, so that the accuracy is that of the very weights in model.pt.
        fresh.finish(task)
        weights = {"model.pt": task.network}
        weights |= {f"model_{name}.pt": copy for name, copy in grower.copies().items()}
        grower.finish()
        trainer.test(task, datamodule=data, verbose=False)
        results = results_row(cfg, plan, task, recorder, trainer.world_size, trainer.num_nodes)
        recorder.on_result(trainer, results)
        if trainer.is_global_zero:
            _save(run_dir, weights, task, results, data)
        records.publish(trainer, run_dir)
    if trainer.is_global_zero:
        print_results(results, run_dir)
        if HydraConfig.get().mode == RunMode.RUN:
            print(next_commands(cfg))


def _begin(
    cfg: DictConfig, run_dir: Path, checkpoint: Path | None, trainer: lightning.Trainer, _: Any
) -> None:
    """Take the folder for this run, which nothing has refused."""
    if trainer.is_global_zero:
        if checkpoint is None or other_settings(cfg, run_dir):
            forget_results(run_dir)
        write_text(run_dir / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True))


def _data(cfg: DictConfig, ending: contextlib.ExitStack) -> RunData:
    """The data, set up; those that have something to tell about themselves do."""
    data = make_data(cfg.data, cfg.seed)
    # Lightning does so only for a run that succeeds.
    ending.callback(data.teardown, "test")
    announce("reading data")
    data.setup()
    if is_first() and (line := data.describe()):
        print(line, file=sys.stderr)
    return data


def _carried_out(plan: Plan, planned: Planned, task: Task, recorder: RunRecorder) -> Plan:
    """The plan as it turned out: stages that were decided on the way, and passes beside training's."""
    grower = planned.grower
    if not grower.forecast.known:
        stages = [row["stage"] for row in recorder.rows]
        counts = accumulate((event.get("asked_by") is None for event in grower.events), initial=0)
        plan = carried_out(plan, grower.trigger, stages, task.stage_widths, planned.cost, list(counts))
    return replace(plan, auxiliary_flops=grower.auxiliary_flops)


def _save(
    run_dir: Path, weights: dict[str, nn.Module], task: Task, results: dict[str, Any], data: RunData
) -> None:
    for name, network in weights.items():
        save(run_dir / name, {key: t.detach().cpu() for key, t in network.state_dict().items()})
        if hasattr(network, "save_pretrained"):
            # `pretrained` of model.pt, `pretrained_ema` of model_ema.pt.
            _save_pretrained(run_dir / Path(name).stem.replace("model", "pretrained", 1), network, data)
    for name, content in task.objective.exports(task.network).items():
        (write_text if isinstance(content, str) else save)(run_dir / name, content)
    write_json(run_dir / "results.json", results)
    write_run_report(run_dir)


def _save_pretrained(folder: Path, network: Any, data: RunData) -> None:
    """The network in its own library's format, with the tokenizer if there is one."""
    try:
        network.save_pretrained(folder)
    except UserError as error:
        # Everything else of the run is there.
        print(f"{folder.name}/ is not written: {error}", file=sys.stderr)
        return
    data.copy_tokenizer(folder)


def _task(cfg: DictConfig, data: RunData, planned: Planned, run_id: str, begins: bool) -> Task:
    plan, maker = planned.plan, optimizer_maker(cfg)
    if cfg.start_from is not None and begins:
        maker = continuing(maker, start_from(planned.grower, cfg.start_from))
    objective = make_objective(cfg.objective, data)
    settings = (learning_rate(cfg, planned.grower.forecast.known), objective, deciding_settings(cfg), run_id)
    task = Task(planned.grower, plan.schedule, plan.steps, maker, *settings)
    task.batch_fit, task.watched = planned.batch_fit, data.watched
    task.flops_in_epoch = plan.flops_in_epoch if planned.grower.forecast.known else None
    if any(isinstance(module, _BATCH_NORMS) for module in task.network.modules()):
        task.statistics_ranks = 1 if cfg.trainer.get("sync_batchnorm") else world_size(cfg.trainer)
    return task


def _resume(cfg: DictConfig, run_dir: Path) -> tuple[Path | None, dict[str, Any]]:
    """The checkpoint to go on from, and what it says beside its tensors."""
    if is_first():
        check_places(run_dir)
        for folder in (run_dir, last_checkpoint(run_dir).parent):
            remove_unfinished(folder)
    checkpoint = _checkpoint_to_resume(cfg, run_dir)
    return checkpoint, read_header(checkpoint) if checkpoint else {}


def _trainer(
    cfg: DictConfig,
    run_dir: Path,
    loggers: list[Logger],
    callbacks: list[lightning.Callback],
    plugins: list[Any],
    plan: Plan,
    data: RunData,
) -> lightning.Trainer:
    plugins = [*plugins, *cluster_environment(not started_elsewhere())]
    if cfg.trainer.get("sync_batchnorm"):
        on_cpu = cfg.trainer.accelerator == "cpu" or not torch.cuda.is_available()
        plugins.append(SynchroniseBatchNorm(on_cpu))
    validates = data.num_val > 0 and data.watched == "val"
    trainer = hydra.utils.instantiate(
        for_lightning(cfg.trainer),
        max_epochs=plan.schedule.total_epochs,
        limit_val_batches=1.0 if data.num_val else 0,
        logger=loggers or False,
        callbacks=[*user_callbacks(cfg, validates), *callbacks],
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


def other_settings(cfg: DictConfig, run_dir: Path) -> list[str]:
    """What decides a run's numbers and is otherwise in the run that the folder holds; none where it holds no run."""
    written = run_dir / "config.yaml"
    if not written.exists():
        return []
    return differences(deciding_settings(OmegaConf.load(written)), deciding_settings(cfg))


def deciding_settings(cfg: DictConfig) -> dict[str, Any]:
    """Settings that decide the numbers of a run, in plain containers."""
    return resume_settings(OmegaConf.to_container(cfg, resolve=True, enum_to_str=True))


def _check(cfg: DictConfig) -> None:
    """Refuse what would only fail later."""
    if cfg.plan is not None:
        raise UserError(
            "a run has no plan: leave plan=... out, or ask `growlab plan` with the other settings."
        )
    check_trainer_options(cfg.trainer)
    check_settings(cfg)
    hydra = HydraConfig.get()
    check_overruled(cfg, hydra.overrides.task, is_sweep=hydra.mode == RunMode.MULTIRUN)
    if is_first():
        for override in unused(cfg, hydra.overrides.task):
            print(f"warning: nothing uses {override}, which the + adds to the configuration", file=sys.stderr)
    check_part(cfg.norm_anneal)

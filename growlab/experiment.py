"""One run, read top to bottom: data, network, widths, seed, task, training, test, result."""

import contextlib
import logging
import platform
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import hydra
import lightning
import torch
from hydra.core.hydra_config import HydraConfig
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from torch import nn

from growlab.analysis.flops import forward_flops, stage_flops, train_cost_percent
from growlab.analysis.run_table import print_results
from growlab.data import ImageData
from growlab.errors import UserError
from growlab.files import write_atomically, write_json, write_text
from growlab.growth import FixedSize, GrowthMethod, Schedule, fold_output_factor, make_schedule, plant
from growlab.training import GrowthCallback, GrowthProgress, RunRecorder, Task
from growlab.training.checkpoints import AtomicCheckpointIO, check_readable, every_epoch, last_checkpoint
from growlab.widths import UnsupportedOperation, WidthGraph, trace

# A forward and a backward pass cost about three forward passes.
_TRAINING_FACTOR = 3


@dataclass(frozen=True)
class Plan:
    """What a run will do, computed before it trains.

    Attributes:
        schedule: its stages.
        widths: width of each group at each stage.
        flops: forward FLOPs per sample of each stage.
        full_flops: the same of the full-width network.
        reference_epochs: epochs of the fixed-size run that cost is relative to.
    """

    schedule: Schedule
    widths: list[dict[str, int]]
    flops: list[int]
    full_flops: int
    reference_epochs: int

    @property
    def train_cost_percent(self) -> float:
        """Cost relative to the fixed-size run, in percent."""
        return train_cost_percent(self.schedule.epochs, self.flops, self.full_flops, self.reference_epochs)


def run(cfg: DictConfig) -> dict[str, Any]:
    """Train one network as configured and leave everything about it in the run's folder.

    Args:
        cfg: the composed configuration of `conf/config.yaml`.

    Returns:
        The content of `results.json`.

    Raises:
        UserError: the configuration, the data, the machine or the training itself does not allow the run.
    """
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    with _plain_errors():
        return _run(cfg, run_dir)


def _run(cfg: DictConfig, run_dir: Path) -> dict[str, Any]:
    checkpoint = _checkpoint_to_resume(cfg, run_dir)
    _check_accelerator(cfg)
    data: ImageData = hydra.utils.instantiate(cfg.data)
    data.setup()
    lightning.seed_everything(cfg.seed, verbose=False)
    network = hydra.utils.instantiate(
        cfg.model, image_shape=list(data.image_shape), num_classes=data.num_classes
    )
    method: GrowthMethod = hydra.utils.instantiate(cfg.growth)
    graph = _trace(network, data, method)
    try:
        plan = make_plan(cfg, network, graph, method, data)
    except ValueError as error:
        raise UserError(str(error)) from error
    state = plant(network, graph, method, plan.widths[0], cfg.seed)

    data.batch_size_at_epoch = plan.schedule.batch_size_at
    steps_in_epoch = [data.num_steps(epoch) for epoch in range(plan.schedule.total_epochs)]
    task = Task(
        network,
        graph,
        method,
        plan.schedule,
        state,
        hydra.utils.instantiate(cfg.optimizer),
        _optimizer_steps(steps_in_epoch, cfg.trainer),
        hydra.utils.instantiate(cfg.lr_adapt),
        hydra.utils.instantiate(cfg.schedule.learning_rate),
        cfg.seed,
    )
    recorder = RunRecorder(run_dir, data.num_train, cfg.log_rates_every_n_steps)
    flops_in_epoch = [
        plan.flops[plan.schedule.stage_at(epoch)] * data.num_train
        for epoch in range(plan.schedule.total_epochs)
    ]
    progress = GrowthProgress(steps_in_epoch, flops_in_epoch, data.num_train)

    def on_event(trainer: lightning.Trainer, receipt: dict[str, Any]) -> None:
        recorder.on_growth(trainer, receipt)
        progress.on_growth(trainer, receipt)

    growth = GrowthCallback(data.probe_batch(cfg.probe_size), cfg.optimizer_state, on_event)
    write_text(run_dir / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True))
    trainer = _trainer(cfg, run_dir, [growth, progress, recorder, every_epoch(run_dir)], plan, data)
    if cfg.compile:
        network.compile()
    trainer.fit(task, datamodule=data, ckpt_path=checkpoint, weights_only=True)
    tested = trainer.test(task, datamodule=data, verbose=False) and task.metrics("test")
    recorder.write(task)
    results = _results(cfg, plan, task, recorder, data, tested)
    fold_output_factor(network, graph, task.growth_state.output_factor)
    weights = {name: tensor.detach().cpu() for name, tensor in network.state_dict().items()}
    write_atomically(run_dir / "model.pt", lambda file: torch.save(weights, file))
    write_json(run_dir / "results.json", results)
    _finish_loggers(trainer)
    _write_figures(run_dir)
    if trainer.is_global_zero:
        print_results(results, run_dir)
    return results


def make_plan(
    cfg: DictConfig, network: nn.Module, graph: WidthGraph, method: GrowthMethod, data: ImageData
) -> Plan:
    """Work out stages, widths and cost of a run before it trains.

    Args:
        cfg: the composed configuration.
        network: at full width; left as it is.
        graph: its width graph.
        method: the growth method; a `FixedSize` one has a single stage.
        data: set up.

    Raises:
        ValueError: the schedule is impossible.
    """
    settings = OmegaConf.to_container(cfg.schedule, resolve=True)
    settings.pop("learning_rate")
    equal_flops = settings.pop("equal_flops")
    sample = data.probe_batch(1).to(next(network.parameters()).dtype)
    full_flops = forward_flops(network, sample)

    def flops_of(widths: list[dict[str, int]]) -> list[int]:
        return stage_flops(network, graph, graph.full_widths, widths, sample)

    if not isinstance(method, FixedSize):
        if equal_flops:
            raise UserError("schedule.equal_flops is for the fixed-size run; set growth=none with it.")
        schedule = make_schedule(batch_size=data.batch_size, **settings)
        widths = schedule.widths(graph)
        return Plan(schedule, widths, flops_of(widths), full_flops, schedule.total_epochs)
    epochs = settings["total_epochs"] if settings["epochs"] is None else sum(settings["epochs"])
    reference_epochs = epochs
    if equal_flops:
        grown = make_schedule(batch_size=data.batch_size, **settings)
        spent = train_cost_percent(grown.epochs, flops_of(grown.widths(graph)), full_flops, epochs)
        epochs = max(1, round(epochs * spent / 100.0))
    schedule = make_schedule(epochs, data.batch_size, num_stages=1)
    widths = [
        {
            name: max(1, round(group.full_width * method.width_multiple))
            for name, group in graph.groups.items()
        }
    ]
    return Plan(schedule, widths, flops_of(widths), full_flops, reference_epochs)


def _trace(network: nn.Module, data: ImageData, method: GrowthMethod) -> WidthGraph:
    try:
        return trace(network, data.probe_batch(2))
    except UnsupportedOperation:
        if isinstance(method, FixedSize) and method.width_multiple == 1.0:
            return WidthGraph({}, {}, (), (), frozenset(), 0)
        raise


def _trainer(
    cfg: DictConfig, run_dir: Path, callbacks: list[lightning.Callback], plan: Plan, data: ImageData
) -> lightning.Trainer:
    loggers = [hydra.utils.instantiate(logger) for logger in cfg.logger.values()]
    for logger in loggers:
        logger.log_hyperparams(OmegaConf.to_container(cfg, resolve=True))
    # Lightning's greetings and tips, and its own use of what torch deprecates, are not this run's news.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"lightning\.pytorch\.utilities\._pytree")
    return hydra.utils.instantiate(
        cfg.trainer,
        max_epochs=plan.schedule.total_epochs,
        limit_val_batches=1.0 if data.num_val else 0,
        logger=loggers or False,
        callbacks=callbacks,
        plugins=[AtomicCheckpointIO()],
        default_root_dir=str(run_dir),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        reload_dataloaders_every_n_epochs=1,
        use_distributed_sampler=False,
        _convert_="all",
    )


def _checkpoint_to_resume(cfg: DictConfig, run_dir: Path) -> Path | None:
    if cfg.ckpt_path is None:
        return None
    path = last_checkpoint(run_dir) if cfg.ckpt_path == "last" else Path(cfg.ckpt_path)
    if cfg.ckpt_path == "last" and not path.exists():
        print(f"no checkpoint in {run_dir} yet: starting from the beginning", file=sys.stderr)
        return None
    check_readable(path)
    return path


def _check_accelerator(cfg: DictConfig) -> None:
    if cfg.trainer.accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        if cfg.trainer.accelerator == "gpu" and torch.backends.mps.is_available():
            return
        raise UserError(
            f"trainer.accelerator={cfg.trainer.accelerator}, but torch {torch.__version__} sees no GPU here; use "
            "trainer=cpu, or install a driver that fits this torch."
        )


def _optimizer_steps(batches_in_epoch: list[int], trainer: DictConfig) -> list[int]:
    limit, accumulate = trainer.limit_train_batches, trainer.accumulate_grad_batches
    steps = []
    for batches in batches_in_epoch:
        if limit is not None:
            batches = min(batches, limit) if isinstance(limit, int) else max(1, int(batches * limit))
        steps.append(-(-batches // accumulate))
    return steps


def _results(
    cfg: DictConfig,
    plan: Plan,
    task: Task,
    recorder: RunRecorder,
    data: ImageData,
    tested: dict[str, float],
) -> dict[str, Any]:
    choices, overrides = HydraConfig.get().runtime.choices, list(HydraConfig.get().overrides.task)
    schedule = plan.schedule
    params = {event["stage"]: event["num_params"] for event in task.events}
    events_sec = {event["stage"]: event["seconds"] for event in task.events}
    stages = []
    for stage in range(schedule.num_stages):
        rows = [row for row in recorder.rows if row["stage"] == stage]
        training_sec = sum(data.num_train / row["samples_per_sec"] for row in rows)
        stages.append(
            {
                "stage": stage,
                "epochs": schedule.epochs[stage],
                "batch_size": schedule.batch_sizes[stage],
                "widths": plan.widths[stage],
                "num_params": params.get(stage, rows[-1]["num_params"]),
                "flops_per_sample": plan.flops[stage],
                "seconds": sum(row["seconds"] for row in rows) + events_sec.get(stage, 0.0),
                "samples_per_sec": data.num_train * len(rows) / training_sec,
                "peak_memory_bytes": recorder.peak_memory_bytes.get(stage),
            }
        )
    errors = [
        error
        for event in task.events
        for error in (event["parity_error_eval"], event["parity_error_train"])
        if error is not None
    ]
    last = recorder.rows[-1]
    return {
        "experiment": cfg.name,
        **{key: choices[key] for key in ("model", "data", "growth", "lr_adapt", "optimizer")},
        "seed": cfg.seed,
        "epochs": schedule.total_epochs,
        "reference_epochs": plan.reference_epochs,
        "precision": str(cfg.trainer.precision),
        "test_accuracy": tested["test_accuracy"],
        "test_loss": tested["test_loss"],
        "train_accuracy": last["train_accuracy"],
        "train_loss": last["train_loss"],
        "train_cost_percent": plan.train_cost_percent,
        "train_flops": _TRAINING_FACTOR
        * data.num_train
        * sum(epochs * flops for epochs, flops in zip(schedule.epochs, plan.flops, strict=True)),
        "seconds": sum(stage["seconds"] for stage in stages),
        "parity_max_error": max(errors, default=None),
        "stages": stages,
        "schedule": OmegaConf.to_container(cfg.schedule, resolve=True),
        "overrides": overrides,
        "command": shlex.join(["python", "-m", "growlab", *overrides]),
        "git_commit": _git_commit(),
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("torch", "lightning")},
            "growlab": _growlab_version(),
        },
        "machine": {"device": _device_name(task.device), "threads": torch.get_num_threads()},
    }


def _growlab_version() -> str | None:
    try:
        return metadata.version("growlab")
    except metadata.PackageNotFoundError:
        return None


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git_commit() -> str | None:
    def git(*arguments: str) -> str:
        folder = Path(__file__).resolve().parent
        return subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", "../conf")
        return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _finish_loggers(trainer: lightning.Trainer) -> None:
    for logger in trainer.loggers:
        logger.finalize("success")
        # An unfinished W&B run would be taken up by the next run of the process.
        finish = getattr(logger.experiment, "finish", None)
        if finish is not None:
            finish()


def _write_figures(run_dir: Path) -> None:
    from growlab.analysis.figures import write_run_figures

    write_run_figures(run_dir)


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Turn what libraries say of impossible settings into sentences."""
    try:
        yield
    except (MisconfigurationException, UnsupportedOperation) as error:
        raise UserError(" ".join(str(error).split())) from error
    except hydra.errors.InstantiationException as error:
        if isinstance(error.__cause__, (ValueError, TypeError)):
            raise UserError(" ".join(str(error.__cause__).split())) from error
        raise

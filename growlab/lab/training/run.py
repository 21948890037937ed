"""Train an experiment: module, callbacks, training, test, results."""

import contextlib
import logging
import platform
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import Logger
from torch.optim import Optimizer

import growlab
from growlab.base.errors import UserError
from growlab.base.files import write_json, write_text
from growlab.frontends.lightning import Growth
from growlab.grower import Grower
from growlab.grower.triggers import OnDemand
from growlab.growth import GrowthEvent
from growlab.lab.analysis.identity import Identity
from growlab.lab.analysis.report import print_results, write_run_report
from growlab.lab.data import RunData
from growlab.lab.training.checkpoints import AtomicCheckpointIO, SaveCheckpoints, SavePolicy, last_checkpoint, save
from growlab.lab.training.distributed import BATCH_NORMS, RankCheck
from growlab.lab.training.fresh_statistics import FreshStatistics
from growlab.lab.training.learning_rate import LearningRate
from growlab.lab.training.loggers import WandbRecords
from growlab.lab.training.objectives import Objective
from growlab.lab.training.plan import Plan, StageCost, carried_out, odds
from growlab.lab.training.processes import forget_results, is_first
from growlab.lab.training.progress import GrowthProgress
from growlab.lab.training.recorder import RunRecorder, layer_statistics, memory_measure, metric_columns
from growlab.lab.training.task import Task
from growlab.optim import Inheritance

# Smallest values treated as nonzero: in half precision twice its smallest subnormal, and in any other precision.
_HALF, _USUAL = 2.0**-23, 2.0**-100


@dataclass(frozen=True)
class Experiment:
    """A run that is ready to train, built by `growlab.lab.training.build`.

    Attributes:
        grower: grower of the seed network, with its growth method, trigger and parts.
        batch_fit: batch sizes that were found to fit; None if the schedule sets them.
        trainer: makes Lightning's Trainer from the run's folder, callbacks, loggers and plugins.
        loggers: context manager that opens and closes the loggers.
        identity: settings that distinguish the run from others.
        save: when checkpoints are saved within epochs; the attributes below are named as in `conf/config.yaml`.
        synchronised: `trainer.sync_batchnorm` is set: batch normalisation spans all ranks.
        num_processes: number of processes of the run.
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
    save: SavePolicy
    optimizer_state: Inheritance
    log_every_n_steps: int | None
    log_rates_every_n_steps: int
    log_layers_every_n_steps: int | None
    batch_norm_samples: int
    check_ranks: bool
    compile: bool
    synchronised: bool
    num_processes: int


def run(experiment: Experiment, folder: Path) -> None:
    """Train, test, and write all results into the run's folder."""
    data, grower, plan = experiment.data, experiment.grower, experiment.plan
    with contextlib.ExitStack() as ending:
        ending.callback(data.teardown, "test")
        if is_first() and experiment.checkpoint is None:
            print(odds(plan, experiment.cost, data), file=sys.stderr)
        task = _task(experiment)
        every = (experiment.log_rates_every_n_steps, experiment.log_every_n_steps)
        recorder = RunRecorder(folder, plan.samples, *every, data.tokens_per_sample)
        fresh = FreshStatistics(experiment.batch_norm_samples, data.training_batches)
        loggers = ending.enter_context(experiment.loggers())
        writer, records = AtomicCheckpointIO(), WandbRecords(loggers)
        progress = GrowthProgress(plan.batches, plan.samples, plan.flops_in_epoch, plan.total_steps)

        def on_event(trainer: Trainer, event: GrowthEvent) -> None:
            event.notes["batch_size"] = plan.schedule.batch_size_at(trainer.current_epoch)
            recorder.on_growth(trainer, event)
            records.on_growth(trainer, task)
            progress.on_growth(trainer, event)

        saving = SaveCheckpoints(last_checkpoint(folder), writer, experiment.save, resumed=experiment.checkpoint)
        growth = Growth(grower=grower, optimizer_state=experiment.optimizer_state, on_event=on_event)
        layers = layer_statistics(experiment.log_layers_every_n_steps, data, grower, folder)
        begin = LambdaCallback(on_fit_start=partial(_begin, experiment, folder))
        callbacks = [begin, growth, progress, recorder, records, RankCheck(experiment.check_ranks)]
        trainer = experiment.trainer(folder, loggers, [*callbacks, *layers, fresh, saving], [writer])
        _provide(experiment, task, recorder, trainer)
        if experiment.compile:
            # In place: torch.compile(network) would prefix the names of all weights.
            task.network.compile()
            grower.reattach_hooks()
        trainer.fit(task, datamodule=data, ckpt_path=experiment.checkpoint, weights_only=True)
        plan = _actual_plan(experiment, task, recorder)
        if trainer.is_global_zero:
            recorder.write(task)
        # Before the test, which must measure the weights in model.pt.
        fresh.finish(task)
        weights = {"model.pt": task.network}
        weights |= {f"model_{name}.pt": copy for name, copy in grower.copies().items()}
        grower.finish()
        trainer.test(task, datamodule=data, verbose=False)
        results = _results(experiment, plan, task, recorder, trainer)
        recorder.on_result(trainer, results)
        if trainer.is_global_zero:
            _save(folder, weights, task, results, data)
        records.publish(trainer, folder)
    if trainer.is_global_zero:
        print_results(results, folder)


def _task(experiment: Experiment) -> Task:
    grower, plan = experiment.grower, experiment.plan
    settings = (experiment.objective, experiment.identity.settings, experiment.identity.run_id)
    rate = experiment.learning_rate
    task = Task(grower, plan.schedule, plan.steps, experiment.optimizer, rate, *settings)
    task.batch_fit, task.watched = experiment.batch_fit, experiment.data.watched
    task.flops_in_epoch = plan.flops_in_epoch if grower.forecast.known else None
    if any(isinstance(module, BATCH_NORMS) for module in task.network.modules()):
        task.statistics_ranks = 1 if experiment.synchronised else experiment.num_processes
    return task


def _begin(experiment: Experiment, folder: Path, trainer: Trainer, _: Any) -> None:
    """Claim the folder for this run, now that all settings are valid."""
    if trainer.is_global_zero:
        if experiment.checkpoint is None or experiment.identity.replaces:
            forget_results(folder)
        write_text(folder / "config.yaml", experiment.identity.yaml)


def _provide(experiment: Experiment, task: Task, recorder: RunRecorder, trainer: Trainer) -> None:
    """Give the grower the data, cost and records that methods, triggers and parts may ask for."""
    data, grower, plan = experiment.data, experiment.grower, experiment.plan
    batches = data.training_batches
    incremental = any(part.groups for part in grower.parts)

    def batches_before_event(number: int) -> list[tuple]:
        # From the stage that ends, since the network has outputs for its classes only.
        return batches(number, max(0, trainer.current_epoch - 1))

    if isinstance(grower.trigger, OnDemand):
        empty = () if data.num_val else f"{task.watched}_"
        columns = metric_columns(task.objective, watched=task.watched)
        grower.trigger.check_records([name for name in columns if not name.startswith(empty)])
    grower.provide(
        batches_before_event if incremental else batches,
        task.loss,
        weight=lambda output, target: task.objective(output, grower.targets(target))[1][-1],
        near_zero=_HALF if trainer.precision in ("16-mixed", "16-true") else _USUAL,
        steps=plan.steps,
        samples=plan.samples,
        records=lambda: recorder.rows,
        reference_flops=plan.reference_flops,
        flops=experiment.cost,
        epoch_batches=data.training_loader,
        seed_draws=task.seed_step,
    )


def _completed(experiment: Experiment, task: Task, done: int) -> Plan:
    """Shorten the plan to the trained epochs, if a callback ended the run after the last growth event."""
    plan, trigger, state = experiment.plan, task.grower.trigger, task.grower.state
    total = plan.schedule.total_epochs
    if done >= total:
        return plan
    stopped = f"training was stopped after {done} of {total} epochs"
    # None from methods that decide widths themselves.
    grown = trigger.fraction_grown(state.scheduled_stage, state.widths) in (None, 1.0)
    stage = plan.schedule.stage_at(done - 1) if done else -1
    if not grown or stage < plan.schedule.num_stages - 1:
        raise UserError(
            f"{stopped}, before the network was fully grown, so there is no result: let the callback that stops it "
            "wait longer."
        )
    epochs = (*plan.schedule.epochs[:-1], done - sum(plan.schedule.epochs[:-1]))
    parts = {name: getattr(plan, name)[:done] for name in ("batches", "steps", "samples")}
    return replace(plan, schedule=replace(plan.schedule, epochs=epochs), **parts)


def _actual_plan(experiment: Experiment, task: Task, recorder: RunRecorder) -> Plan:
    """The plan with the epochs trained, the stages decided during training, and the auxiliary passes."""
    grower, plan = experiment.grower, _completed(experiment, task, len(recorder.rows))
    if not grower.forecast.known:
        stages = [row["stage"] for row in recorder.rows]
        counts = accumulate(("asked_by" not in event.notes for event in grower.events), initial=0)
        plan = carried_out(plan, grower.trigger, stages, task.stage_widths, experiment.cost, list(counts))
    return replace(plan, auxiliary_flops=grower.auxiliary_flops)


def _save(run_dir: Path, weights: dict[str, Any], task: Task, results: dict[str, Any], data: RunData) -> None:
    for name, network in weights.items():
        save(run_dir / name, {key: t.detach().cpu() for key, t in network.state_dict().items()})
        if hasattr(network, "save_pretrained"):
            # In its library's format, with the tokenizer: `pretrained` for model.pt, `pretrained_ema` for model_ema.pt.
            folder = run_dir / Path(name).stem.replace("model", "pretrained", 1)
            try:
                network.save_pretrained(folder)
                data.copy_tokenizer(folder)
            except UserError as error:
                # The run's other files are still written.
                print(f"{folder.name}/ is not written: {error}", file=sys.stderr)
    for name, content in task.objective.exports(task.network).items():
        (write_text if isinstance(content, str) else save)(run_dir / name, content)
    write_json(run_dir / "results.json", results)
    write_run_report(run_dir)


def _length(plan: Plan, data: RunData) -> dict[str, Any]:
    """The run's epochs; for a run in steps, passes over the data to three digits, steps and tokens."""
    if plan.total_steps is None:
        return {"epochs": plan.schedule.total_epochs}
    samples = sum(plan.samples)
    tokens = {"tokens": samples * data.tokens_per_sample} if data.tokens_per_sample else {}
    return {"epochs": float(f"{samples / data.num_train:.3g}"), "steps": sum(plan.steps), **tokens}


def _results(experiment: Experiment, plan: Plan, task: Task, recorder: RunRecorder, trainer: Trainer) -> dict[str, Any]:
    """The content of `results.json`, which tables read."""
    grower, objective = task.grower, task.objective
    stages = recorder.stages(plan, grower.events)
    errors = [error for event in grower.events for error in (event.parity_error_eval, event.parity_error_train)]
    name, higher = objective.compared_by
    last = recorder.rows[-1]
    names = {"train": objective.metric_names, "val": (*objective.metric_names, *objective.evaluated_names)}
    return {
        **experiment.identity.row,
        **_length(plan, experiment.data),
        "reference_epochs": plan.reference_epochs,
        "world_size": trainer.world_size,
        "num_nodes": trainer.num_nodes,
        "batch_size": plan.schedule.batch_sizes[-1],
        "batch_fit": task.batch_fit,
        "metric": {"name": name, "higher_is_better": higher},
        **task.metrics("test"),
        **{key: value for copy in grower.copies() for key, value in task.metrics(f"test_{copy}").items()},
        **{f"{split}_{metric}": last.get(f"{split}_{metric}") for split in names for metric in names[split]},
        "train_cost_percent": plan.train_cost_percent,
        "train_flops": plan.train_flops,
        "seconds": sum(stage["seconds"] for stage in stages),
        "parity_max_error": max((error for error in errors if error is not None), default=None),
        "memory_measure": memory_measure(trainer.strategy.root_device),
        "stages": stages,
        **provenance(trainer.strategy.root_device),
    }


def provenance(device: torch.device) -> dict[str, Any]:
    """The commit, versions and machine that produced a result."""
    return {
        "git_commit": git_commit(),
        "versions": versions(),
        "machine": {"device": _device_name(device), "threads": torch.get_num_threads()},
    }


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that affect results; None for a package that is not installed."""
    installed: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("torch", "lightning", "growlab"):
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed[name] = None
    return installed


def git_commit() -> str | None:
    """Commit of the checkout that growlab runs from, with `-dirty` appended after changes; None outside a checkout."""
    package = Path(growlab.__file__).resolve().parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=package, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        # An installed copy may be inside an unrelated repository.
        git("ls-files", "--error-unmatch", "__init__.py")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", "../conf")
        return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence greetings and tips of libraries, and their deprecation warnings.

    growlab's own warnings are printed without their line of code.
    """
    names = ("lightning.pytorch", "lightning.fabric", "matplotlib.font_manager")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    original, warnings.formatwarning = warnings.formatwarning, _formatted
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\.pytorch\.utilities\._pytree")
            # A hint about speed, since strides of kernels with one channel are ambiguous.
            warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
            # The logged numbers are already reduced over ranks.
            warnings.filterwarnings("ignore", message=r"It is recommended to use .self\.log")
            # Issued by `test`, although it gets the model, if a user's callback is a `Checkpoint`.
            warnings.filterwarnings("ignore", message=r".*was called without a model\. The")
            yield
    finally:
        warnings.formatwarning = original
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _formatted(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    if Path(filename).is_relative_to(Path(growlab.__file__).resolve().parent):
        return f"warning: {message}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"

"""Train an experiment: module, callbacks, training, test, results."""

import contextlib
import sys
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn

from growlab.base.errors import UserError
from growlab.base.files import write_json, write_text
from growlab.frontends.lightning import Growth
from growlab.grower.triggers import OnDemand
from growlab.growth import GrowthEvent
from growlab.lab.analysis.report import print_results, write_run_report
from growlab.lab.data import RunData
from growlab.lab.training.checkpoints import AtomicCheckpointIO, last_checkpoint, save
from growlab.lab.training.distributed import RankCheck
from growlab.lab.training.experiment import Experiment
from growlab.lab.training.fresh_statistics import FreshStatistics
from growlab.lab.training.layer_statistics import layer_statistics
from growlab.lab.training.loggers import WandbRecords
from growlab.lab.training.plan import Plan, carried_out
from growlab.lab.training.progress import GrowthProgress
from growlab.lab.training.recorder import RunRecorder, metric_columns
from growlab.lab.training.results_row import results_row
from growlab.lab.training.run_folder import forget_results
from growlab.lab.training.saving import SaveCheckpoints
from growlab.lab.training.task import Task
from growlab.lab.training.user_callbacks import completed

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
# Numbers near zero that training in half precision (twice its smallest), and in any other, does not take for zero.
_HALF, _USUAL = 2.0**-23, 2.0**-100


def run(experiment: Experiment, folder: Path) -> None:
    """Train, test, and leave everything about the run in its folder.

    Args:
        experiment: as `build` made it; its data are torn down at the end.
        folder: of the run.

    Raises:
        UserError: the data, the machine or the training itself does not allow the run.
    """
    data, grower, plan, options = experiment.data, experiment.grower, experiment.plan, experiment.options
    with contextlib.ExitStack() as ending:
        ending.callback(data.teardown, "test")
        task = _task(experiment)
        recorder = RunRecorder(folder, plan.samples, options.log_rates_every_n_steps)
        fresh = FreshStatistics(options.statistics_images, data.training_batches)
        loggers = ending.enter_context(experiment.loggers())
        writer, records = AtomicCheckpointIO(), WandbRecords(loggers)
        progress = GrowthProgress(plan.batches, plan.samples, plan.flops_in_epoch)

        def on_event(trainer: Trainer, event: GrowthEvent) -> None:
            event.notes["batch_size"] = plan.schedule.batch_size_at(trainer.current_epoch)
            recorder.on_growth(trainer, event)
            records.on_growth(trainer, task)
            progress.on_growth(trainer, event)

        saving = SaveCheckpoints(last_checkpoint(folder), writer, options.save, resumed=experiment.checkpoint)
        growth = Growth(grower=grower, optimizer_state=options.optimizer_state, on_event=on_event)
        layers = layer_statistics(options.log_layers_every_n_steps, data, grower, folder)
        begin = LambdaCallback(on_fit_start=partial(_begin, experiment, folder))
        callbacks = [begin, growth, progress, recorder, records, RankCheck(options.check_ranks)]
        trainer = experiment.trainer(folder, loggers, [*callbacks, *layers, fresh, saving], [writer])
        _provide(experiment, task, recorder, trainer)
        if options.compile:
            # Not torch.compile(network), which would put a prefix before the names of all weights.
            task.network.compile()
            grower.reattach_hooks()
        trainer.fit(task, datamodule=data, ckpt_path=experiment.checkpoint, weights_only=True)
        plan = _carried_out(
            completed(plan, recorder.rows, task, options.max_time), experiment, task, recorder
        )
        if trainer.is_global_zero:
            recorder.write(task)
        # Before the test, so that the accuracy is that of the very weights in model.pt.
        fresh.finish(task)
        weights = {"model.pt": task.network}
        weights |= {f"model_{name}.pt": copy for name, copy in grower.copies().items()}
        grower.finish()
        trainer.test(task, datamodule=data, verbose=False)
        results = results_row(experiment.identity, plan, task, recorder, trainer)
        recorder.on_result(trainer, results)
        if trainer.is_global_zero:
            _save(folder, weights, task, results, data)
        records.publish(trainer, folder)
    if trainer.is_global_zero:
        print_results(results, folder)


def _task(experiment: Experiment) -> Task:
    grower, plan, options = experiment.grower, experiment.plan, experiment.options
    settings = (experiment.objective, experiment.identity.settings, experiment.identity.run_id)
    rate = experiment.learning_rate
    task = Task(grower, plan.schedule, plan.steps, experiment.optimizer, rate, *settings)
    task.batch_fit, task.watched = experiment.batch_fit, experiment.data.watched
    task.flops_in_epoch = plan.flops_in_epoch if grower.forecast.known else None
    if any(isinstance(module, _BATCH_NORMS) for module in task.network.modules()):
        task.statistics_ranks = 1 if options.synchronised else options.num_processes
    return task


def _begin(experiment: Experiment, folder: Path, trainer: Trainer, _: Any) -> None:
    """Take the folder for this run, which nothing has refused."""
    if trainer.is_global_zero:
        if experiment.checkpoint is None or experiment.identity.replaces:
            forget_results(folder)
        write_text(folder / "config.yaml", experiment.identity.yaml)


def near_zero(precision: str) -> float:
    """Return a number that training in one of Lightning's precisions distinguishes from zero, and from nothing else."""
    return _HALF if precision in ("16-mixed", "16-true") else _USUAL


def _provide(experiment: Experiment, task: Task, recorder: RunRecorder, trainer: Trainer) -> None:
    """Give the grower the training's data, cost and records, for methods, triggers and parts that ask for them.

    Raises:
        UserError: trigger, method or parts do not go with the data.
    """
    data, grower, plan = experiment.data, experiment.grower, experiment.plan
    batches = data.training_batches
    arriving = any(part.groups for part in grower.parts)

    def known_batches(number: int) -> list[tuple]:
        # Of the stage that ends, whose classes the network has outputs for.
        return batches(number, max(0, trainer.current_epoch - 1))

    unfilled = () if data.num_val else f"{task.watched}_"
    columns = metric_columns(task.objective, watched=task.watched)
    if isinstance(grower.trigger, OnDemand):
        grower.trigger.check_records([name for name in columns if not name.startswith(unfilled)])
    grower.provide(
        known_batches if arriving else batches,
        task.loss,
        weight=lambda output, target: task.objective(output, grower.targets(target))[1][-1],
        near_zero=near_zero(trainer.precision),
        steps=plan.steps,
        samples=plan.samples,
        records=lambda: recorder.rows,
        reference_flops=plan.reference_flops,
        flops=experiment.cost,
        epoch_batches=data.training_loader,
        seed_draws=task.seed_step,
    )


def _carried_out(plan: Plan, experiment: Experiment, task: Task, recorder: RunRecorder) -> Plan:
    """Add to the plan what was decided during training: stages, and passes besides training's."""
    grower = experiment.grower
    if not grower.forecast.known:
        stages = [row["stage"] for row in recorder.rows]
        counts = accumulate(("asked_by" not in event.notes for event in grower.events), initial=0)
        plan = carried_out(plan, grower.trigger, stages, task.stage_widths, experiment.cost, list(counts))
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

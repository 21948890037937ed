"""Records of a run: metrics.csv, steps.csv, rates.csv, growth.json and layers.csv."""

import json
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningDataModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from growlab.base.errors import UserError, WriteError
from growlab.base.files import write_text
from growlab.grower import Grower
from growlab.grower.triggers import OnDemand
from growlab.growth import GrowthEvent
from growlab.growth.outputs import device_and_precision
from growlab.lab.data import ImageData
from growlab.lab.training.objectives import Objective
from growlab.lab.training.plan import Plan
from growlab.lab.training.task import Task
from growlab.optim import Regional, running_gradients

# Columns before and after an epoch's metrics.
_FIRST_COLUMNS = ("epoch", "step", "stage", "batch_size", "lr", "num_params")
_LAST_COLUMNS = ("samples_per_sec", "seconds")
RATE_COLUMNS = ("step", "epoch", "stage", "parameter", "region", "rate_factor", "weight_norm", "grad_norm")
LAYER_COLUMNS = ("step", "layer", "quantity", "mean", "std", "low", "high", "counts")
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Test images to measure on (Chang et al. 2020, Appendix B.1), and bins of a histogram.
_IMAGES, _BINS = 300, 60
# Range of a histogram around the mean, in standard deviations.
_REACH = 4.0


class RunRecorder(Callback):
    """Records metrics.csv, steps.csv, rates.csv and growth.json, and logs the same values to the loggers.

    The records are part of the checkpoint, so that the files of a resumed run have no gap. The first rank writes the
    files at the end of each epoch.

    Args:
        run_dir: the run's folder.
        samples: training samples of each epoch.
        log_rates_every_n_steps: steps between rows of rates.csv: rate factors and norms of weights and gradients per
            region. Factors are 1 if the optimizer does not adapt rates.
        log_every_n_steps: steps between rows of steps.csv: the learning rate, training metrics since the previous row
            of the epoch, the gradient norm before clipping, and the throughput; None: never.
        tokens_per_sample: measures throughput in tokens instead of samples.
    """

    def __init__(
        self,
        run_dir: Path,
        samples: Sequence[int],
        log_rates_every_n_steps: int = 100,
        log_every_n_steps: int | None = None,
        tokens_per_sample: int | None = None,
    ) -> None:
        self._every, self._tokens = log_every_n_steps, tokens_per_sample
        self.step_rows: list[dict[str, Any]] = []
        # The epoch's sums at the last row of steps.csv, samples and time since then, and the step's gradient norm.
        self._sums: list[float] | None = None
        self._seen, self._since, self._grad_norm = 0, 0.0, torch.tensor(torch.nan)
        self.run_dir, self.samples = run_dir, samples
        self.log_rates_every_n_steps = log_rates_every_n_steps
        self.rows: list[dict[str, Any]] = []
        self.peak_memory_bytes: dict[int, int] = {}
        self._rates: list[str] = []
        self._written: dict[str, int] = {}
        self._lr = self._began = self._validation_sec = 0.0
        self._validation_began: float | None = None
        self._device, self._peak = torch.device("cpu"), 0

    def state_dict(self) -> dict[str, Any]:
        """Return everything recorded so far, in plain containers; times are of the current epoch."""
        self._note_memory()
        return {
            "rows": self.rows,
            "step_rows": self.step_rows,
            "sums": self._sums,
            "seen": self._seen,
            "rates": "\n".join(self._rates),
            "peak_memory_bytes": self.peak_memory_bytes,
            "peak": self._peak,
            "lr": self._lr,
            "seconds": time.perf_counter() - self._began,
            "validation_seconds": self._validation_sec + self._validating_sec(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the records of the checkpoint."""
        self.rows, self._rates = list(state_dict["rows"]), state_dict["rates"].splitlines()
        self.peak_memory_bytes, self._peak = dict(state_dict["peak_memory_bytes"]), state_dict["peak"]
        self._lr, self._validation_sec = state_dict["lr"], state_dict["validation_seconds"]
        self._began = time.perf_counter() - state_dict["seconds"]
        self.step_rows = list(state_dict.get("step_rows", ()))
        self._sums, self._seen = state_dict.get("sums"), state_dict.get("seen", 0)

    def on_train_start(self, trainer: Trainer, pl_module: Task) -> None:
        """Start measuring memory, and log the seed's widths."""
        self._device, self._since = pl_module.device, time.perf_counter()
        _reset_peak(self._device)
        if trainer.global_step == 0 and pl_module.grower.graph.groups:
            _log(trainer, _widths(pl_module.grower.state.widths), 0)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Task) -> None:
        """Start the epoch's clock."""
        self._began, self._validation_sec, self._peak = time.perf_counter(), 0.0, 0
        self._sums, self._seen, self._since = None, 0, self._began
        _reset_peak(self._device)

    def on_validation_start(self, trainer: Trainer, pl_module: Task) -> None:
        """Stop the training clock and the measurement of training memory."""
        self._note_memory()
        self._validation_began = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: Task) -> None:
        """Restart the training clock."""
        self._validation_sec += self._validating_sec()
        self._validation_began = None
        _reset_peak(self._device)

    def _note_memory(self) -> None:
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
        else:
            # macOS counts bytes, others KiB.
            unit = 1 if sys.platform == "darwin" else 1024
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        self._peak = max(self._peak, peak)

    def _validating_sec(self) -> float:
        return 0.0 if self._validation_began is None else time.perf_counter() - self._validation_began

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Task, optimizer: Optimizer) -> None:
        """Note the step's learning rate; every n steps record rate factors and norms of regions."""
        self._lr = optimizer.param_groups[0]["lr"]
        if self._every is not None and (trainer.global_step + 1) % self._every == 0:
            grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self._grad_norm = torch.nn.utils.get_total_norm(grads)
        if trainer.global_step % self.log_rates_every_n_steps:
            return
        where = (trainer.global_step, trainer.current_epoch, pl_module.grower.state.stage)
        adapted = isinstance(optimizer, Regional) and optimizer.rule is not None
        logged = {}
        parameters = dict(pl_module.network.named_parameters())
        for name, regions in pl_module.grower.regions().items():
            parameter = parameters[name]
            if not regions.has_rates(parameter) or not parameter.requires_grad:
                continue
            norms, grad = regions.norms(parameter), parameter.grad
            factors = optimizer.factors(parameter) if isinstance(optimizer, Regional) else None
            columns = (
                torch.ones_like(norms) if factors is None else factors,
                norms,
                torch.full_like(norms, torch.nan) if grad is None else regions.norms(grad),
            )
            stages = regions.stages.tolist()
            for region, *cells in zip(stages, *(column.tolist() for column in columns), strict=True):
                self._rates.append(",".join(map(str, (*where, name, region, *(f"{cell:.6g}" for cell in cells)))))
                logged[f"rate_factor/{name}/stage_{region}"] = cells[0]
        if adapted:
            _log(trainer, logged, trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Add a row to steps.csv every n steps."""
        if self._every is None:
            return
        self._seen += len(batch[-1]) * trainer.world_size
        stepped = (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch
        if not stepped or trainer.global_step % self._every:
            return
        sums, before = pl_module.total("train"), self._sums
        since = sums if before is None else [now - then for now, then in zip(sums, before, strict=True)]
        now, seen = time.perf_counter(), self._seen * (self._tokens or 1)
        row = {
            "lr": self._lr,
            **pl_module.objective.metrics(since),
            "grad_norm": float(self._grad_norm),
            f"{'tokens' if self._tokens else 'samples'}_per_sec": seen / (now - self._since),
        }
        step, epoch, stage = trainer.global_step, trainer.current_epoch, pl_module.grower.state.stage
        self.step_rows.append({"step": step, "epoch": epoch, "stage": stage, **row})
        self._sums, self._seen, self._since = sums, 0, now
        _log(trainer, {f"step/{name}": value for name, value in row.items()}, step)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Task) -> None:
        """Add the epoch's row and write the files, before the checkpoint is saved."""
        pl_module.check_loss()
        pl_module.check_weights()
        watched = pl_module.watched
        splits = ("train", watched, *(f"{watched}_{name}" for name in pl_module.grower.copies()))
        metrics = {key: value for split in splits for key, value in pl_module.metrics(split).items()}
        seconds = time.perf_counter() - self._began
        stage, epoch = pl_module.grower.state.stage, trainer.current_epoch
        row = {
            "epoch": epoch,
            "step": trainer.global_step,
            "stage": stage,
            "batch_size": pl_module.schedule.batch_size_at(epoch),
            "lr": self._lr,
            "num_params": sum(p.numel() for p in pl_module.network.parameters()),
            **metrics,
            "samples_per_sec": self.samples[epoch] / (seconds - self._validation_sec),
            "seconds": seconds,
        }
        trigger = pl_module.grower.trigger
        if isinstance(trigger, OnDemand) and trigger.demand.wants_gradients:
            means = [mean for o in trainer.optimizers for mean in running_gradients(o).values()]
            row["gradient_norm"] = float(sum(mean.double().square().sum() for mean in means)) ** 0.5
        self.rows.append(row)
        self._note_memory()
        self.peak_memory_bytes[stage] = max(self._peak, self.peak_memory_bytes.get(stage, 0))
        # For other callbacks only: `log_dict` would round the loggers' numbers to float32.
        pl_module.log_dict(metrics, logger=False)
        _log(trainer, {key: value for key, value in row.items() if key != "step"}, trainer.global_step)
        if trainer.is_global_zero:
            try:
                self.write(pl_module)
            except WriteError as error:
                # The rows are kept and written again at the end of the next epoch.
                print(f"warning: {error}", file=sys.stderr)

    def on_growth(self, trainer: Trainer, event: GrowthEvent) -> None:
        """Log a growth event; growth.json is written at the end of the epoch."""
        numbers = {key: value for key, value in event.as_dict().items() if isinstance(value, (int, float))}
        events = {f"growth/{key}": value for key, value in numbers.items() if key not in ("epoch", "step")}
        _log(trainer, {**events, **_widths(event.widths_after)}, event.step)

    def on_result(self, trainer: Trainer, results: Mapping[str, Any]) -> None:
        """Log every single number of `results.json`."""
        numbers = {key: value for key, value in results.items() if isinstance(value, (int, float))}
        _log(trainer, {f"result/{key}": value for key, value in numbers.items()}, trainer.global_step)

    def stages(self, plan: Plan, events: Sequence[GrowthEvent]) -> list[dict[str, Any]]:
        """Describe each stage and its cost, for `results.json`.

        Args:
            plan: the run's actual plan.
            events: its growth events.
        """
        schedule, event_sec = plan.schedule, {event.stage: event.seconds for event in events}
        stages = []
        for stage, number in enumerate(plan.stage_numbers or range(schedule.num_stages)):
            rows = [row for row in self.rows if row["stage"] == number]
            samples = [plan.samples[row["epoch"]] for row in rows]
            rates = [row["samples_per_sec"] for row in rows]
            training_sec = sum(count / rate for count, rate in zip(samples, rates, strict=True))
            stages.append(
                {
                    "stage": number,
                    "epochs": schedule.epochs[stage],
                    **({} if plan.total_steps is None else {"steps": sum(plan.steps[r["epoch"]] for r in rows)}),
                    "batch_size": schedule.batch_sizes[stage],
                    "widths": plan.widths[stage],
                    "num_params": rows[-1]["num_params"],
                    "flops_per_sample": plan.flops[stage],
                    "seconds": sum(row["seconds"] for row in rows) + event_sec.get(number, 0.0),
                    "samples_per_sec": sum(samples) / training_sec,
                    "peak_memory_bytes": self.peak_memory_bytes.get(number),
                }
            )
        return stages

    def write(self, task: Task) -> None:
        """Write all files of the run so far."""
        columns = metric_columns(task.objective, list(task.grower.copies()), task.watched)
        lines = [",".join(columns)]
        lines += [",".join(_cell(row.get(column)) for column in columns) for row in self.rows]
        self._write("metrics.csv", lines)
        if self.step_rows:
            rows = (",".join(map(_cell, row.values())) for row in self.step_rows)
            self._write("steps.csv", [",".join(self.step_rows[0]), *rows])
        if self._rates:
            self._write("rates.csv", [",".join(RATE_COLUMNS), *self._rates])
        widths = task.stage_widths
        groups = {
            name: {"full_width": group.full_width, "widths": [stage[name] for stage in widths]}
            for name, group in task.grower.graph.groups.items()
        }
        trigger = task.grower.trigger
        passes = list(trigger.auxiliary_passes) if isinstance(trigger, OnDemand) else []
        growth = {"events": [event.as_dict() for event in task.grower.events], "looks": passes, "groups": groups}
        self._write("growth.json", [json.dumps(growth, indent=2)])

    def _write(self, name: str, lines: Sequence[str]) -> None:
        """Write a file of the run if it has changed, since each write waits for the disk."""
        text = "\n".join(lines) + "\n"
        if self._written.get(name) != (digest := hash(text)):
            write_text(self.run_dir / name, text)
            self._written[name] = digest


def metric_columns(objective: Objective, averages: Sequence[str] = (), watched: str = "val") -> list[str]:
    """Columns of metrics.csv; those of averaged networks come last."""
    names = list(objective.metric_names)
    metrics = [f"train_{name}" for name in names]
    metrics += [f"{watched}_{name}" for name in (*names, *objective.evaluated_names)]
    averaged = [f"{watched}_{average}_{name}" for average in averages for name in names]
    return [*_FIRST_COLUMNS, *metrics, *_LAST_COLUMNS, *averaged]


def memory_measure(device: torch.device) -> str:
    """Describe `peak_memory_bytes` on a device."""
    if device.type == "cuda":
        return "bytes of tensors on the GPU"
    return "peak bytes of the process in RAM so far (getrusage)"


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _widths(widths: Mapping[str, int]) -> dict[str, float]:
    """Widths of groups by their names in loggers."""
    return {f"width/{group}": width for group, width in widths.items()}


def _log(trainer: Trainer, values: dict[str, float], step: int) -> None:
    for logger in trainer.loggers:
        logger.log_metrics(values, step=step)


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.8g}" if isinstance(value, float) else str(value)


def layer_statistics(
    every: int | None, data: LightningDataModule, grower: Grower, run_dir: Path
) -> list["LayerStatistics"]:
    """Make the callback of `log_layers_every_n_steps` on the first test images, in a list; empty if it is null."""
    if every is None:
        return []
    if not isinstance(data, ImageData) or any(part.groups for part in grower.parts):
        raise UserError(
            "log_layers_every_n_steps needs all classes from the start, and images that are classified; set it to null."
        )
    batches: list[tuple[Tensor, ...]] = []
    for batch in data.test_dataloader():
        batches.append(batch)
        if sum(len(y) for _, y in batches) >= _IMAGES:
            break
    images, labels = (torch.cat(column)[:_IMAGES] for column in zip(*batches, strict=True))
    return [LayerStatistics(run_dir, images, labels, every)]


class LayerStatistics(Callback):
    """Records layers.csv: mean, standard deviation and histogram of each layer's values, over training steps.

    A histogram spans `low` to `high`: four standard deviations around the mean, or the extreme values if closer.

    Quantities are `activation`, a layer's output; `gradient`, the gradient with respect to it; `weight`, even if it
    is parametrized; and `weight_gradient`. There are also rows of `loss` and `accuracy` on the same images.
    """

    def __init__(self, run_dir: Path, images: Tensor, labels: Tensor, every_n_steps: int) -> None:
        self.run_dir, self.every_n_steps = run_dir, every_n_steps
        self._images, self._labels = images, labels
        self._rows: list[str] = []
        self._last_step = -1

    def state_dict(self) -> dict[str, Any]:
        """Return everything recorded so far, in plain containers."""
        return {"rows": "\n".join(self._rows), "last_step": self._last_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the records of the checkpoint."""
        self._rows, self._last_step = state_dict["rows"].splitlines(), state_dict["last_step"]

    def on_train_batch_start(self, trainer: Trainer, pl_module: Task, batch: Any, batch_idx: int) -> None:
        """Measure before the step, if it is due."""
        step = trainer.global_step
        if step % self.every_n_steps == 0 and step != self._last_step and trainer.is_global_zero:
            self._measure(pl_module, step)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Task) -> None:
        """Write the file, after a final measurement in the run's last epoch."""
        if not trainer.is_global_zero:
            return
        if trainer.current_epoch + 1 == trainer.max_epochs and trainer.global_step != self._last_step:
            self._measure(pl_module, trainer.global_step)
        write_text(self.run_dir / "layers.csv", "\n".join([",".join(LAYER_COLUMNS), *self._rows]) + "\n")

    def _measure(self, task: Task, step: int) -> None:
        self._last_step = step
        layers = {name: module for name, module in task.network.named_modules() if isinstance(module, _LAYERS)}
        outputs: dict[str, Tensor] = {}

        def keep(name: str) -> Any:
            return lambda module, inputs, output: outputs.__setitem__(name, output)

        hooks = [module.register_forward_hook(keep(name)) for name, module in layers.items()]
        modes = {module: module.training for module in task.network.modules()}
        device, precision = device_and_precision(task.network)
        x, y = self._images.to(device, precision), self._labels.to(device)
        task.network.eval()
        try:
            # Cached, so that the gradient is with respect to the very tensor that the layer used.
            with torch.enable_grad(), torch.random.fork_rng(devices=[]), parametrize.cached():
                logits = task(x)
                loss = F.cross_entropy(logits, y)
                weights = {name: layers[name].weight for name in outputs}
                tensors = [tensor for tensor in (*outputs.values(), *weights.values()) if tensor.requires_grad]
                gradients = torch.autograd.grad(loss, tensors, allow_unused=True)
                grads = dict(zip(map(id, tensors), gradients, strict=True))
        finally:
            for hook in hooks:
                hook.remove()
            for module, training in modes.items():
                module.training = training
        accuracy = (logits.argmax(1) == y).float().mean()
        for quantity, value in (("loss", loss), ("accuracy", accuracy)):
            self._rows.append(f"{step},network,{quantity},{float(value.detach()):.6g},,,,")
        for name, output in outputs.items():
            for tensor, kinds in ((output, ("activation", "gradient")), (weights[name], ("weight", "weight_gradient"))):
                for kind, values in zip(kinds, (tensor.detach(), grads.get(id(tensor))), strict=True):
                    if values is not None:
                        self._add(step, name, kind, values)

    def _add(self, step: int, name: str, quantity: str, tensor: Tensor) -> None:
        values = tensor.float().flatten()
        # Values outside the range are not counted, so that the bins resolve the middle despite heavy tails.
        mean, reach = float(values.mean()), _REACH * float(values.std())
        low, high = max(float(values.min()), mean - reach), min(float(values.max()), mean + reach)
        # Without a histogram if training diverges, which is reported elsewhere.
        counts = torch.histc(values.cpu(), _BINS, low, high).long().tolist() if -inf < low < high < inf else []
        numbers = ",".join(f"{number:.6g}" for number in (mean, float(values.std()), low, high))
        self._rows.append(f"{step},{name},{quantity},{numbers},{'|'.join(map(str, counts))}")

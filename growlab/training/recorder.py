"""Writes what happens in a run into its folder while it happens."""

import time
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, Trainer

from growlab.files import write_json, write_text
from growlab.optim import RegionalSGD
from growlab.training.task import Task

METRIC_COLUMNS = (
    *("epoch", "step", "stage", "batch_size", "lr", "num_params", "train_loss", "train_accuracy"),
    *("val_loss", "val_accuracy", "samples_per_sec", "seconds"),
)
RATE_COLUMNS = ("step", "epoch", "stage", "parameter", "region", "rate_factor", "weight_norm")


class RunRecorder(Callback):
    """Keeps metrics.csv, rates.csv and growth.json, and hands the same to the loggers.

    What it has recorded is part of the checkpoint, so a resumed run's files continue as if it had never
    stopped. Files are written by the first rank alone, at the end of each epoch.

    Args:
        run_dir: the run's folder.
        num_samples: training samples in an epoch.
        log_rates_every_n_steps: how often rate factors and norms of regions are recorded.
    """

    def __init__(self, run_dir: Path, num_samples: int, log_rates_every_n_steps: int = 100) -> None:
        self.run_dir, self.num_samples = run_dir, num_samples
        self.log_rates_every_n_steps = log_rates_every_n_steps
        self.rows: list[dict[str, Any]] = []
        self.peak_memory_bytes: dict[int, int] = {}
        self._rates: list[str] = []
        self._began = 0.0
        self._validation_sec = 0.0
        self._validation_began = 0.0

    # State ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What has been recorded so far, in plain containers."""
        return {
            "rows": self.rows,
            "rates": "\n".join(self._rates),
            "peak_memory_bytes": self.peak_memory_bytes,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what had been recorded at the checkpoint."""
        self.rows = list(state_dict["rows"])
        self._rates = state_dict["rates"].splitlines()
        self.peak_memory_bytes = dict(state_dict["peak_memory_bytes"])

    # Hooks ---------------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Task) -> None:
        """Start the epoch's clock."""
        self._began, self._validation_sec = time.perf_counter(), 0.0
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)

    def on_validation_start(self, trainer: Trainer, pl_module: Task) -> None:
        """Stop the training clock."""
        self._validation_began = time.perf_counter()
        pl_module._sums.pop("val", None)

    def on_validation_end(self, trainer: Trainer, pl_module: Task) -> None:
        """Start the training clock again."""
        self._validation_sec += time.perf_counter() - self._validation_began

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Task, optimizer: Any) -> None:
        """Record rate factors and norms of regions every n steps."""
        if trainer.global_step % self.log_rates_every_n_steps or not isinstance(optimizer, RegionalSGD):
            return
        names = {parameter: name for name, parameter in pl_module.network.named_parameters()}
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            factors, regions = optimizer.factors(parameter), optimizer.region_norms(parameter)
            if factors is None or regions is None:
                continue
            stages, norms = regions
            for region, factor, norm in zip(stages.tolist(), factors.tolist(), norms.tolist(), strict=True):
                cells = (trainer.global_step, trainer.current_epoch, pl_module.growth_state.stage)
                self._rates.append(
                    ",".join(map(str, (*cells, names[parameter], region, f"{factor:.6g}", f"{norm:.6g}")))
                )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Task) -> None:
        """Add the epoch's row and write the files, before the checkpoint is saved."""
        pl_module.check_loss()
        metrics = {**pl_module.metrics("train"), **pl_module.metrics("val")}
        seconds = time.perf_counter() - self._began
        stage = pl_module.growth_state.stage
        row = {
            "epoch": trainer.current_epoch,
            "step": trainer.global_step,
            "stage": stage,
            "batch_size": pl_module.schedule.batch_sizes[stage],
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "num_params": sum(p.numel() for p in pl_module.network.parameters()),
            **metrics,
            "samples_per_sec": self.num_samples / (seconds - self._validation_sec),
            "seconds": seconds,
        }
        self.rows.append(row)
        if pl_module.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(pl_module.device)
            self.peak_memory_bytes[stage] = max(peak, self.peak_memory_bytes.get(stage, 0))
        pl_module.log_dict({k: float(v) for k, v in row.items() if k not in ("epoch", "step")})
        if trainer.is_global_zero:
            self.write(pl_module)

    def on_growth(self, trainer: Trainer, receipt: dict[str, Any]) -> None:
        """Hand a growth event to the loggers; the file follows with the epoch's end."""
        values = {
            f"growth/{key}": float(value)
            for key, value in receipt.items()
            if isinstance(value, (int, float)) and key not in ("epoch", "step")
        }
        for logger in trainer.loggers:
            logger.log_metrics(values, step=receipt["step"])

    # Files ---------------------------------------------------------------------------------------------

    def write(self, task: Task) -> None:
        """Write all files of the run so far."""
        lines = [",".join(METRIC_COLUMNS)]
        lines += [",".join(_cell(row.get(column)) for column in METRIC_COLUMNS) for row in self.rows]
        write_text(self.run_dir / "metrics.csv", "\n".join(lines) + "\n")
        if self._rates:
            write_text(self.run_dir / "rates.csv", "\n".join([",".join(RATE_COLUMNS), *self._rates]) + "\n")
        widths = task.schedule.widths(task.graph)
        groups = {
            name: {"full_width": group.full_width, "widths": [stage[name] for stage in widths]}
            for name, group in task.graph.groups.items()
        }
        write_json(self.run_dir / "growth.json", {"events": task.events, "groups": groups})


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.8g}" if isinstance(value, float) else str(value)

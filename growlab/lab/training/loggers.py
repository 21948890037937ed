"""Log a run's tables, images and checkpoints."""

from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from lightning import Callback, Trainer
from lightning.pytorch import loggers as lightning_loggers
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from torch import nn

from growlab.lab.analysis.identity import FREE
from growlab.lab.training.task import Task

EVENT_COLUMNS = (
    *("stage", "epoch", "step", "batch_size", "num_params_before", "num_params", "parity_error_eval"),
    *("parity_error_train", "noise_error_eval", "seconds"),
)
SPECTRUM_COLUMNS = ("stage", "epoch", "parameter", "rank", "singular_value")
# W&B's tables of runs show these curves' best value instead of the last one.
_SUMMARIES = {"val_accuracy": "max", "train_accuracy": "max", "val_loss": "min", "train_loss": "min"}
_RANKS = 9
# Prefixes of overrides that do not change the training, and so are left out of a run's name.
_NOT_IN_NAMES = (*(f"{name}{end}" for name in (*FREE, "data.root") for end in ".="), "hydra")


class WandbLogger(lightning_loggers.WandbLogger):
    """Lightning's logger for Weights & Biases, where the last folder of a resumed offline run has the whole history.

    W&B writes offline runs in large blocks, so a killed process loses rows. A resumed run therefore logs the rows up to
    its checkpoint again. Without W&B's `resume`, `wandb sync` then replaces the rows of earlier folders.

    Args:
        offline: write the run to a folder, for `wandb sync`.
        settings: other arguments of Lightning's `WandbLogger`.
    """

    def __init__(self, offline: bool = False, **settings: Any) -> None:
        super().__init__(offline=offline, **{"resume": None if offline else "allow", **settings})
        self.history: list[tuple[dict[str, Any], int | None]] = []

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers or media; an offline run's numbers are kept, so that a resumed run can log them again."""
        super().log_metrics(metrics, step)
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, Real)}
        if self._offline and numbers:
            self.history.append((numbers, step))


class WandbRecords(Callback):
    """Logs growth events and spectra (as tables), figures and the checkpoint to Weights & Biases.

    TensorBoard gets the figures. Spectra are nine singular values of every weight at the end of each stage, at ranks
    from 0 (the largest) to 1 (the smallest).
    """

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._boards = [logger for logger in loggers if isinstance(logger, TensorBoardLogger)]
        self._loggers = [logger for logger in loggers if isinstance(logger, WandbLogger)]
        self._spectra: list[list[Any]] = []
        self._history: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the table and the histories so far; flush TensorBoard's points, which are not part of it."""
        for board in self._boards:
            board.save()
        return {"spectra": self._spectra, "history": [logger.history for logger in self._loggers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the table and the histories of the checkpoint."""
        self._spectra, self._history = list(state_dict["spectra"]), state_dict.get("history", [])

    def on_fit_start(self, trainer: Trainer, pl_module: Task) -> None:
        """Define the summary value of each curve."""
        if trainer.is_global_zero:
            for logger in self._loggers:
                for name, summary in _SUMMARIES.items():
                    # With Lightning's definition of `*`, which a definition by name replaces.
                    logger.experiment.define_metric(
                        name, step_metric="trainer/global_step", step_sync=True, summary=summary
                    )

    def on_train_start(self, trainer: Trainer, pl_module: Task) -> None:
        """Log offline histories again; let TensorBoard drop points after the checkpoint, which will be repeated."""
        if not trainer.is_global_zero or not trainer.global_step:
            return
        for board in self._boards:
            # The writer's next file begins with the step from which it replaces earlier points.
            board.experiment.close()
            board.experiment.purge_step = trainer.global_step + 1
        # Loggers may be added when a run is resumed.
        for logger, history in zip(self._loggers, self._history, strict=False):
            for metrics, step in history:
                logger.log_metrics(metrics, step)
        if any(self._history):
            self.on_growth(trainer, pl_module)
            self._log_spectra(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Task) -> None:
        """Add the stage's spectra after its last epoch."""
        schedule, epoch = pl_module.schedule, trainer.current_epoch
        is_last = epoch + 1 >= schedule.total_epochs
        stage = pl_module.grower.state.stage
        if not self._loggers or not trainer.is_global_zero:
            return
        if is_last or schedule.stage_at(epoch + 1) != stage:
            self._spectra += [[stage, epoch, *row] for row in spectra(pl_module.network)]
            self._log_spectra(trainer)

    def _log_spectra(self, trainer: Trainer) -> None:
        for logger in self._loggers:
            logger.log_table("spectra", columns=list(SPECTRUM_COLUMNS), data=self._spectra, step=trainer.global_step)

    def on_growth(self, trainer: Trainer, task: Task) -> None:
        """Update the table of growth events."""
        events = [event.as_dict() for event in task.grower.events]
        rows = [[event.get(column) for column in EVENT_COLUMNS] for event in events]
        for logger in self._loggers:
            logger.log_table("growth_events", columns=list(EVENT_COLUMNS), data=rows, step=trainer.global_step)

    def publish(self, trainer: Trainer, run_dir: Path) -> None:
        """Log the run's figures and, if a W&B run is online, its checkpoint and weights."""
        if not trainer.is_global_zero:
            return
        figures = sorted((run_dir / "figures").glob("*.png"))
        for logger in self._loggers:
            for path in figures:
                logger.log_image(f"figures/{path.stem}", [str(path)], step=trainer.global_step)
            if not logger.experiment.offline:
                _upload(logger, run_dir)
        for board in self._boards:
            for path in figures:
                pixels = np.asarray(PIL.Image.open(path).convert("RGB"))
                board.experiment.add_image(f"figures/{path.stem}", pixels, trainer.global_step, dataformats="HWC")


def run_name(overrides: Sequence[str], otherwise: str) -> str:
    """Name of a run: its overrides (choices and the seed first), within W&B's limit of 128 characters.

    Examples:
        >>> run_name(["optimizer.lr=0.1", "seed=1", "logger=wandb", "growth=pairs"], "digits")
        'growth=pairs seed=1 optimizer.lr=0.1'
        >>> run_name([], "digits")
        'digits'
    """
    named = [o.lstrip("+") for o in overrides if not o.lstrip("+~").startswith(_NOT_IN_NAMES)]
    choices = sorted((o for o in named if "." not in o.partition("=")[0]), key=lambda o: o.startswith("seed"))
    values = [o for o in named if "." in o.partition("=")[0]]
    return " ".join([*choices, *values])[:128] or otherwise


def spectra(network: nn.Module) -> list[list[Any]]:
    """Rows [name, rank, singular value] of every weight with two or more dimensions, nine per weight, descending.

    A weight is flattened to the matrix [out, in * kernel].

    Examples:
        >>> layer = nn.Linear(3, 2, bias=False)
        >>> _ = layer.weight.data.copy_(torch.tensor([[3.0, 0, 0], [0, 1.0, 0]]))
        >>> [(round(rank, 3), round(value, 3)) for _, rank, value in spectra(layer)][:2]
        [(0.0, 3.0), (0.125, 2.75)]
    """
    rows: list[list[Any]] = []
    for name, parameter in network.named_parameters():
        if parameter.dim() < 2:
            continue
        matrix, ranks = parameter.detach().flatten(1), torch.linspace(0, 1, _RANKS)
        values = torch.linalg.svdvals(matrix if matrix.is_complex() else matrix.float()).float()
        quantiles = torch.quantile(values.cpu(), 1 - ranks)
        rows += [[name, rank, value] for rank, value in zip(ranks.tolist(), quantiles.tolist(), strict=True)]
    return rows


def close_loggers(loggers: Sequence[Logger], succeeded: bool) -> None:
    """Close the loggers.

    Lightning leaves a W&B run open, and the next run of the process would write into it.
    """
    for logger in loggers:
        if succeeded:
            logger.finalize("success")
        if isinstance(logger, WandbLogger) and logger._experiment is not None:
            logger._experiment.finish(exit_code=0 if succeeded else 1)


def _upload(logger: WandbLogger, run_dir: Path) -> None:
    import wandb

    artifact = wandb.Artifact(f"run-{logger.experiment.id}", type="model")
    for name in ("checkpoints/last.ckpt", "model.pt", "config.yaml", "results.json"):
        if (run_dir / name).exists():
            artifact.add_file(str(run_dir / name), name=name)
    logger.experiment.log_artifact(artifact)

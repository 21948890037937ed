"""Show a run's progress; stages and epochs count from 0 as in its files, so "epoch 9/9" is the last of ten."""

import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from lightning import Callback, Trainer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from growlab.growth import GrowthEvent
from growlab.lab.training.task import Task
from growlab.widths import WidthGraph
from growlab.widths.groups import layer_name

# Reading the loss waits for the device.
_REFRESH_SEC = 0.5
# Time of an epoch that does not depend on width, relative to the arithmetic of the widest stage's epoch: measured on
# ResNet-20, where a sixteenth of the FLOPs takes a third of the time.
_FIXED_EFFORT = 0.4


class GrowthProgress(Callback):
    """Prints a line per epoch and growth event, and on a terminal a progress bar over the whole run.

    Args:
        batches: batches of each epoch.
        samples: training samples of each epoch.
        flops: forward FLOPs of each epoch, from which the remaining time is estimated: late stages are slower.
        steps: optimizer steps of the run if its length is in steps.
    """

    def __init__(
        self, batches: Sequence[int], samples: Sequence[int], flops: Sequence[int], steps: int | None = None
    ) -> None:
        self._steps = steps
        self._batches, self._samples = batches, samples
        self._effort = [_FIXED_EFFORT + forward / max(flops) for forward in flops]
        self._console = Console(file=sys.stderr)
        self._bar: Progress | None = None
        self._shown = self._began = self._epoch_began = self._resumed_at = 0.0
        # Fraction of the current epoch that was done before this process began.
        self._began_at = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: Task) -> None:
        """Open the bar."""
        if not trainer.is_global_zero:
            return
        if pl_module.grower.graph.groups and trainer.global_step == 0:
            stages = pl_module.grower.trigger.forecast(pl_module.grower.graph)
            grows = stages is None or any(widths != stages[0] for widths in stages)
            print(first_line(pl_module.grower.graph, grows), file=sys.stderr, flush=True)
        self._began = self._epoch_began = time.perf_counter()
        epoch, self._began_at = trainer.current_epoch, 0.0
        if trainer.fit_loop.restarted_mid_epoch:
            self._began_at = (trainer.fit_loop.batch_idx + 1) / self._batches[epoch]
        self._resumed_at = self._done(epoch, self._began_at)
        if self._console.is_terminal:
            names = ("description", "fields[loss]", "fields[left]")
            description, loss, left = (TextColumn(f"{{task.{name}}}") for name in names)
            self._bar = Progress(
                *(description, BarColumn(bar_width=None), loss, TimeElapsedColumn(), left),
                console=self._console,
                transient=True,
            )
            self._bar.start()
            task = self._bar.add_task("", total=sum(self._effort), loss="", left="")
            self._bar.update(task, completed=self._resumed_at)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Task) -> None:
        """Start the epoch's clock."""
        self._epoch_began, self._began_at = time.perf_counter(), 0.0

    def on_train_batch_end(self, trainer: Trainer, pl_module: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Move the bar, at most twice a second."""
        now = time.perf_counter()
        if self._bar is None or now - self._shown < _REFRESH_SEC:
            return
        self._shown, epoch = now, trainer.current_epoch
        done = self._done(epoch, (batch_idx + 1) / self._batches[epoch])
        # Only what fits next to a bar in 80 columns; the rest is in the lines above it.
        self._bar.update(
            self._bar.task_ids[0],
            completed=done,
            description=self._moment(trainer, pl_module),
            loss=_figures({k: v for k, v in pl_module.running_metrics().items() if k == "loss"}),
            left=self._left(done, now),
        )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Task) -> None:
        """Print the epoch's line."""
        # A collective operation, so on every rank.
        figures = _figures({**pl_module.metrics("train"), **pl_module.metrics(pl_module.watched)})
        if not trainer.is_global_zero:
            return
        now, epoch = time.perf_counter(), trainer.current_epoch
        if self._bar is not None:
            self._print(f"{self._when(trainer, pl_module)}  {figures}")
            return
        rate = (1 - self._began_at) * self._samples[epoch] / (now - self._epoch_began)
        widths = f"widths {_span(pl_module.grower.state.widths)}"
        left = self._left(self._done(epoch, 1.0), now)
        self._print("  ".join((self._moment(trainer, pl_module), widths, figures, f"{rate:,.0f}/s", left)))

    def on_growth(self, trainer: Trainer, event: GrowthEvent) -> None:
        """Print a line for a growth event."""
        if not trainer.is_global_zero:
            return
        before, after, notes = event.widths_before, event.widths_after, event.notes
        verb = "grew" if event.num_params >= event.num_params_before else "shrank"
        blocks = f"{len(notes['inserted'])} blocks came in, " if "inserted" in notes else ""
        size = f"inputs of size {notes['input_size']}, " if "input_size" in notes else ""
        line = (
            f"{verb} to stage {event.stage}: {blocks}{size}widths {_span(before)} -> {_span(after)}, parameters "
            f"{event.num_params_before:,} -> {event.num_params:,}, batch {notes['batch_size']}, "
            f"output error {event.parity_error_eval:.1e}, {event.seconds:.2f} s"
        )
        self._print(line)

    def on_train_end(self, *_: Any) -> None:
        """Close the bar, so that an exception is readable."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    on_exception = on_train_end  # type: ignore[assignment]

    def _print(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def _moment(self, trainer: Trainer, task: Task) -> str:
        # The number of stages is unknown if widths are decided during training.
        last = f"/{task.schedule.num_stages - 1}" if task.grower.forecast.known else ""
        return f"stage {task.grower.state.stage}{last}  {self._when(trainer, task)}"

    def _when(self, trainer: Trainer, task: Task) -> str:
        if self._steps is not None:
            return f"step {trainer.global_step:>{len(str(self._steps))}}/{self._steps}"
        last = str(task.schedule.total_epochs - 1)
        return f"epoch {trainer.current_epoch:>{len(last)}}/{last}"

    def _done(self, epoch: int, part: float) -> float:
        """Effort up to a fraction of an epoch."""
        return sum(self._effort[:epoch]) + part * sum(self._effort[epoch : epoch + 1])

    def _left(self, done: float, now: float) -> str:
        new = done - self._resumed_at
        seconds = round((now - self._began) * (sum(self._effort) - done) / new if new > 0 else 0.0)
        return f"left {timedelta(seconds=seconds)}"


def _figures(metrics: Mapping[str, float]) -> str:
    return "  ".join(
        f"{name.replace('accuracy', 'acc')} {value:.1%}" if "accuracy" in name else f"{name} {value:.3f}"
        for name, value in metrics.items()
    )


def first_line(graph: WidthGraph, grows: bool = True) -> str:
    """The first line of a run: how many width groups grow, and which layers count as output layers."""
    fixed = " (something behind it fixes its scale)"
    layers = [name + fixed * (not free) for name, free in graph.last_layers.items()]
    layers += [
        f"{layer_name(weight)} (an embedding's table too: neither rescaled nor given an output layer's rate)"
        for weight in graph.tied_outputs
    ]
    outputs = f"output layers: {', '.join(layers)}" if layers else "no output layer was found"
    groups = f"{len(graph.groups)} width group{'' if len(graph.groups) == 1 else 's'}"
    return f"growing {groups}; {outputs}" if grows else f"{groups}; {outputs}"


def _span(widths: dict[str, int]) -> str:
    if not widths:
        return "fixed"
    low, high = min(widths.values()), max(widths.values())
    return str(low) if low == high else f"{low}-{high}"

"""Callback that writes CPU seconds of batches and epochs to a file."""

import time
from pathlib import Path
from typing import Any

from lightning import Callback, Trainer

from growlab.base.files import write_json


class Clock(Callback):
    """Write {"batches": [...], "epochs": [...]}, in CPU seconds of the training thread.

    Args:
        file: the JSON file.
    """

    def __init__(self, file: str) -> None:
        self._file, self._batches, self._epochs = Path(file), list[float](), list[float]()
        self._before: tuple[int, float] = (-1, 0.0)
        self._began = 0.0

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        """Record the previous epoch, including its records and checkpoint."""
        now, self._before = time.thread_time(), (-1, 0.0)
        self._epochs += [now - self._began] if trainer.current_epoch else []
        self._began = now

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, index: int) -> None:
        """Record the previous batch."""
        now = time.thread_time()
        self._batches += [now - self._before[1]] if self._before[0] == index - 1 >= 0 else []
        self._before = (index, now)

    def on_train_end(self, *_: Any) -> None:
        """Write the file."""
        write_json(self._file, {"batches": self._batches, "epochs": self._epochs})

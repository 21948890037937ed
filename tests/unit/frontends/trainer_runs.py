"""Runs of Hugging Face's Trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")


class InOrder(transformers.Trainer):
    """Batches in the data's order: accelerate before 1.15 shuffles the rest of a resumed epoch as the first one."""

    def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trained(
    folder: Path,
    model: Any,
    data: list[Any],
    *callbacks: Any,
    resume: Path | None = None,
    make: type[Any] = InOrder,
    **settings: Any,
) -> Any:
    """Train the model quietly on the CPU, from a checkpoint if one is given, and return the Trainer."""
    quiet = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "use_cpu": True}
    arguments = transformers.TrainingArguments(str(folder), **{**quiet, **settings})
    trainer = make(model, arguments, train_dataset=data, eval_dataset=data, callbacks=list(callbacks))
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer

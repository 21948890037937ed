"""Training with PyTorch Lightning: the module, objectives, records and checkpoints."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from growlab.lab.training.checkpoints import SavePolicy
    from growlab.lab.training.learning_rate import LearningRate, RateAdaptation
    from growlab.lab.training.loggers import WandbLogger
    from growlab.lab.training.objectives import (
        CharacterPrediction,
        Classification,
        CustomObjective,
        MultiLabel,
        Objective,
        Regression,
        Segmentation,
        SubwordPrediction,
        TokenPrediction,
    )
    from growlab.lab.training.progress import GrowthProgress
    from growlab.lab.training.recorder import RunRecorder
    from growlab.lab.training.task import Task

__all__ = [
    "CharacterPrediction",
    "Classification",
    "CustomObjective",
    "GrowthProgress",
    "LearningRate",
    "MultiLabel",
    "Objective",
    "RateAdaptation",
    "Regression",
    "RunRecorder",
    "SavePolicy",
    "Segmentation",
    "SubwordPrediction",
    "Task",
    "TokenPrediction",
    "WandbLogger",
]


def __getattr__(name: str) -> Any:
    # Imported when used: composing a configuration, help and error messages need not wait for torch and Lightning.
    homes = ("objectives", "progress", "learning_rate", "recorder", "checkpoints", "task", "loggers")
    for home in homes if name in __all__ else ():
        if hasattr(module := importlib.import_module(f"{__name__}.{home}"), name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

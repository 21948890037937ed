"""Training with PyTorch Lightning: the module, objectives, records and checkpoints."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from growlab.lab.training.checkpoints import SavePolicy
    from growlab.lab.training.learning_rate import LearningRate, RateAdaptation
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

# Imported when used: composing a configuration, help and error messages need not wait for torch and Lightning.
_HOMES = {
    "CharacterPrediction": "objectives",
    "Classification": "objectives",
    "CustomObjective": "objectives",
    "GrowthProgress": "progress",
    "LearningRate": "learning_rate",
    "MultiLabel": "objectives",
    "Objective": "objectives",
    "RateAdaptation": "learning_rate",
    "Regression": "objectives",
    "RunRecorder": "recorder",
    "SavePolicy": "checkpoints",
    "Segmentation": "objectives",
    "SubwordPrediction": "objectives",
    "Task": "task",
    "TokenPrediction": "objectives",
}

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
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)

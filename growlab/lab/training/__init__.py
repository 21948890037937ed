"""Training with PyTorch Lightning: the module, objectives, records and checkpoints."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from growlab.lab.training.custom_objective import CustomObjective
    from growlab.lab.training.learning_rate import LearningRate, RateAdaptation
    from growlab.lab.training.objective import (
        CharacterPrediction,
        Classification,
        Objective,
        SubwordPrediction,
        SumObjective,
        TokenPrediction,
    )
    from growlab.lab.training.progress import GrowthProgress
    from growlab.lab.training.ready_objectives import MultiLabel, Regression, Segmentation
    from growlab.lab.training.recorder import RunRecorder
    from growlab.lab.training.saving import SavePolicy
    from growlab.lab.training.task import Task

# Imported when used: composing a configuration, help and error messages need not wait for torch and Lightning.
_HOMES = {
    "CharacterPrediction": "objective",
    "Classification": "objective",
    "CustomObjective": "custom_objective",
    "GrowthProgress": "progress",
    "LearningRate": "learning_rate",
    "MultiLabel": "ready_objectives",
    "Objective": "objective",
    "RateAdaptation": "learning_rate",
    "Regression": "ready_objectives",
    "RunRecorder": "recorder",
    "SavePolicy": "saving",
    "Segmentation": "ready_objectives",
    "SubwordPrediction": "objective",
    "SumObjective": "objective",
    "Task": "task",
    "TokenPrediction": "objective",
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
    "SumObjective",
    "Task",
    "TokenPrediction",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)

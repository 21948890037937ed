"""Training with PyTorch Lightning: the module, objectives, records and checkpoints."""

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

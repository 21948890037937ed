"""Training with PyTorch Lightning: the task, the growth callback, records and checkpoints."""

from growlab.training.characters import CharacterPrediction
from growlab.training.custom_objective import CustomObjective
from growlab.training.growth_callback import GrowthCallback
from growlab.training.learning_rate import LearningRate
from growlab.training.objective import Classification, Objective, SumObjective, TokenPrediction
from growlab.training.progress import GrowthProgress
from growlab.training.rate_adaptation import RateAdaptation
from growlab.training.ready_objectives import MultiLabel, Regression, Segmentation
from growlab.training.recorder import RunRecorder
from growlab.training.saving import SavePolicy
from growlab.training.subwords import SubwordPrediction
from growlab.training.task import Task

__all__ = [
    "CharacterPrediction",
    "Classification",
    "CustomObjective",
    "GrowthCallback",
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

"""Training with PyTorch Lightning: the task, the growth callback, records and checkpoints."""

from growlab.lab.training.characters import CharacterPrediction
from growlab.lab.training.custom_objective import CustomObjective
from growlab.lab.training.growth_callback import GrowthCallback
from growlab.lab.training.learning_rate import LearningRate
from growlab.lab.training.objective import Classification, Objective, SumObjective, TokenPrediction
from growlab.lab.training.progress import GrowthProgress
from growlab.lab.training.rate_adaptation import RateAdaptation
from growlab.lab.training.ready_objectives import MultiLabel, Regression, Segmentation
from growlab.lab.training.recorder import RunRecorder
from growlab.lab.training.saving import SavePolicy
from growlab.lab.training.subwords import SubwordPrediction
from growlab.lab.training.task import Task

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

"""Optimizers that know the age of every part of a weight."""

from growlab.optim.rates import MaxOne, NormRatio, RateRule
from growlab.optim.regions import Regions, weight_regions
from growlab.optim.sgd import RegionalSGD
from growlab.optim.state import follow

__all__ = ["MaxOne", "NormRatio", "RateRule", "RegionalSGD", "Regions", "follow", "weight_regions"]

"""Optimizers with learning rates per region of a weight, by the stage at which it was added.

Each is a drop-in `torch.optim.Optimizer`. In a custom training loop, `set_regions` with `weight_regions` sets the birth
stages of weights' elements, and `follow` carries the optimizer through a growth event.
"""

from growlab.optim.adam import Adam, AdamW
from growlab.optim.avagrad import AvaGrad
from growlab.optim.carry import (
    Inheritance,
    default_inheritance,
    follow,
    load_named_state,
    named_state,
    rescale_state,
    running_gradients,
)
from growlab.optim.lars import LARS
from growlab.optim.muon import Muon
from growlab.optim.rates import BaseRate, MaxOne, NormRatio, RateRule
from growlab.optim.regional import Regional
from growlab.optim.regions import Regions, weight_regions
from growlab.optim.settings import exempt_from_decay, without_decay
from growlab.optim.sgd import SGD

__all__ = [
    "LARS",
    "SGD",
    "Adam",
    "AdamW",
    "AvaGrad",
    "BaseRate",
    "Inheritance",
    "MaxOne",
    "Muon",
    "NormRatio",
    "RateRule",
    "Regional",
    "Regions",
    "default_inheritance",
    "exempt_from_decay",
    "follow",
    "load_named_state",
    "named_state",
    "rescale_state",
    "running_gradients",
    "weight_regions",
    "without_decay",
]

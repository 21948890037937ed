"""Triggers that know every stage beforehand: what they take, and what they refuse."""

from fractions import Fraction
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from growlab import Grower
from growlab.base.errors import UserError
from growlab.grower.triggers import At, Clock, Never
from growlab.growth import Net2Net


def grower(trigger: Any) -> Grower:
    network = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    return Grower(network, torch.randn(8, 4), method=Net2Net(), trigger=trigger)


@pytest.mark.parametrize(
    ("trigger", "sentence"),
    [
        ({0: {"0": 8}, 1: {"0": 20}}, "the width 20 of group '0' must be a whole number from 1 to its full width 16"),
        ({0: {"0": 2.5}, 1: 1.0}, "the width 2.5 of group '0' must be a whole number"),
        ({0: {"0": "8"}}, "the width '8' of group '0' must be a whole number"),
        ({0: {"0": 8, 3: 4}}, "no width group 3, only 0"),
        ({0: True, 1: 1}, "a width of True is no fraction"),
        ({0: 2.0}, "a width of 2.0 is no fraction"),
        ({0: nan}, "a width of nan is no fraction"),
        ({0: "0.5"}, "a width of '0.5' is no fraction"),
        ({0: 0.5, "1": 1.0}, "moment '1' must be a finite number"),
        ({0: 0.5, inf: 1.0}, "moment inf must be a finite number"),
        ({False: 0.5, 1: 1.0}, "moment False must be a finite number"),
        ({-1: 0.5, 1: 1.0}, "must begin at 0"),
    ],
)
def test_widths_and_moments_that_cannot_be_are_refused_before_training(trigger: dict[Any, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        grower(trigger)


@pytest.mark.parametrize("sizes", [[8, 0], [8, 4.5], [8, True], [8, None], [8], 8])
def test_batch_sizes_are_whole_numbers_above_0(sizes: Any) -> None:
    with pytest.raises(UserError, match="must be whole numbers above 0, one for each of its 2 stages"):
        At({0: 0.5, 1: 1.0}, batch_sizes=sizes)


@pytest.mark.parametrize("wrong", [{"width": "0.5"}, {"width": 0}, {"depth": "1"}, {"depth": 1.5}], ids=str)
def test_one_width_and_depth_for_ever_are_numbers(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"must be above 0|must be a part of the blocks"):
        Never(**wrong)


@pytest.mark.parametrize("number", [np.int64, np.int32, np.float32, np.float64, Fraction, int, float])
def test_numbers_of_any_type_are_taken(number: Any) -> None:
    trigger = At(
        {number(0): {"0": number(4)}, number(2): Fraction(1, 2), number(3): number(1)},
        batch_sizes=[number(8), number(8), number(16)],
    )
    made = grower(trigger)
    assert [trigger.stage_at(Clock(epoch=epoch)) for epoch in range(4)] == [0, 0, 1, 2]
    assert trigger.batch_sizes == (8, 8, 16) and type(made.seed_widths["0"]) is int
    assert [stage["0"] for stage in trigger.forecast(made.graph)] == [4, 8, 16]

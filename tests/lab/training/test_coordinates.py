"""Coordinate check (Yang et al. 2021, as in microsoft/mup): the size of activations over the width."""

from math import log2

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from growlab.base.errors import UserError
from growlab.grower import Grower
from growlab.grower.triggers import Never
from growlab.growth import FixedSize
from growlab.lab.networks import MLP
from growlab.lab.training import RateAdaptation
from growlab.optim import SGD, BaseRate

WIDTHS, STEPS, SEEDS, RATE = (64, 256), 4, 2, 0.002
MUP_RATES = RateAdaptation(BaseRate(), divide_output_lr_by_fan_in=True)


def sizes_of_changes(initialisation: str, rates: RateAdaptation, width: int, seed: int) -> list[float]:
    """Mean absolute change, by a few steps, of each hidden layer's activations and of the logits."""
    torch.manual_seed(seed)
    network = MLP(20, [width, width, width], 10).double()
    torch.nn.init.zeros_(network.classifier.bias)
    x, y = torch.randn(32, 20, dtype=torch.float64), torch.arange(32) % 10
    grower = Grower(network, x, method=FixedSize(initialisation=initialisation), trigger=Never(), seed=seed)
    optimizer = SGD(network.parameters(), RATE)
    rates.apply(optimizer)
    grower.follow(optimizer)

    def activations() -> list[torch.Tensor]:
        outputs = [x]
        for layer in network.hidden:
            outputs.append(layer(outputs[-1]))
        return [*(output.detach() for output in outputs[2::2]), network.classifier(outputs[-1]).detach()]

    before = activations()
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(network(x), y).backward()
        optimizer.step()
    return [float((b - a).abs().mean()) for a, b in zip(before, activations(), strict=True)]


def slopes(initialisation: str, rates: RateAdaptation) -> np.ndarray:
    """Exponents of the changes over the width: 0 if constant, 1 if proportional."""
    logs = [
        np.mean([np.log2(sizes_of_changes(initialisation, rates, width, seed)) for seed in range(SEEDS)], 0)
        for width in WIDTHS
    ]
    return np.polyfit([log2(width) for width in WIDTHS], np.stack(logs), 1)[0]


def test_with_mup_changes_of_activations_do_not_depend_on_the_width() -> None:
    """Except in the first layer, whose rate Table 1 does not scale: its changes shrink as 1 / width."""
    first, *hidden, logits = slopes("mup", MUP_RATES)
    assert np.abs(hidden).max() < 0.15 and abs(logits) < 0.15
    assert first == pytest.approx(-1, abs=0.2)


@pytest.mark.parametrize(
    ("initialisation", "rates"), [("standard", RateAdaptation()), ("standard", MUP_RATES), ("mup", RateAdaptation())]
)
def test_with_only_a_half_of_mup_changes_of_logits_grow_with_the_width(
    initialisation: str, rates: RateAdaptation
) -> None:
    assert slopes(initialisation, rates)[-1] > 0.4


def test_rates_of_output_layers_need_a_rule() -> None:
    with pytest.raises(UserError, match="choose lr_adapt=mup"):
        RateAdaptation(None, divide_output_lr_by_fan_in=True)

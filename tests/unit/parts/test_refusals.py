"""Invalid settings of parts, their methods and networks are rejected by the constructor, in one sentence."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from growlab.base.errors import UserError
from growlab.parts import Averages, Freeze, Resolution, Warmup
from growlab.parts.hypernets import Hyperfan
from growlab.parts.isotropic import (
    Blend,
    GainWeights,
    IntrinsicLength,
    Isotropic,
    IsotropicActivation,
    IsotropicLayers,
    IsotropicMLP,
    NestedNetwork,
    deepen,
    isotropic_cnn,
    isotropic_mlp,
    nested,
)

DECAY, SIZES = "^decay must lie between 0 and 1", "^sizes must be"
TARGET = "target_width goes with mode='scheduled'"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Warmup(0), "steps must be at least 1, not 0"),
        (lambda: Warmup(3, who="old"), "who must be newborn or all, not 'old'"),
        (lambda: Freeze(0), "steps must be at least 1, not 0"),
        (lambda: Freeze(1.5), r"steps must be an integer, not 1\.5"),
        *((lambda decay=decay: Averages(decay), DECAY) for decay in (0.0, 1.0, None, "x")),
        *(
            (lambda sizes=sizes: Resolution(sizes), SIZES)
            for sizes in ([], [16, 8], [0, 4], [1.5], "16", True, [0.5, 8])
        ),
        (lambda: GainWeights("all", 0.1), "mode must be constant or decayed, not 'all'"),
        (lambda: GainWeights("decayed", -1), "decay must be at least 0, not -1"),
        (lambda: Isotropic(mode="demand"), "reserve or scheduled"),
        (lambda: Isotropic(mode="scheduled"), TARGET),
        (lambda: IsotropicLayers("scheduled"), TARGET),
        (lambda: Isotropic(target_width=4), TARGET),
        (lambda: Isotropic(threshold=-1), "threshold must be at least 0"),
        (lambda: Isotropic(columns="ones"), "columns must be orthogonal"),
        (lambda: Isotropic(bias=1.0), "bias must lie between"),
        (lambda: Isotropic(max_width=3, min_width=4), "max_width=3 is below"),
        (lambda: IsotropicActivation("relu"), "kind must be tanh, softsign, soft_relu or leaky"),
        (lambda: IntrinsicLength(-1.0, "constant"), "a signed one may be negative"),
        (lambda: IntrinsicLength(math.nan, "signed"), "length must be a finite number"),
        (lambda: isotropic_mlp((1, 2, 2), 2, length_kind="free"), "trained, constant or signed, not 'free'"),
        (lambda: isotropic_cnn((1, 4, 4), 2, weights="zero"), "default or orthogonal, not 'zero'"),
        (lambda: isotropic_mlp((1, 2, 2), 2, activation="tan"), "elementwise_tanh"),
        (lambda: IsotropicMLP(4, [3], 2, "elementwise_tanh", gain_channel=True), "has no gain"),
        (lambda: Blend(IsotropicActivation(gain_channel=True)), "without a gain channel"),
        (lambda: NestedNetwork(4, [3], 2, products="all"), "first or last"),
        (lambda: nested(isotropic_mlp((1, 2, 2), 2, gain_channel=True)), "have a nested form"),
        (lambda: nested(isotropic_mlp((1, 2, 2), 2, chi_norm=True)), "have a nested form"),
        (lambda: deepen(nn.Sequential(nn.Tanh(), nn.Linear(4, 4)), -1), "no linear layer at or before position"),
        (lambda: deepen(IsotropicMLP(6, [5, 4], 3).hidden, 4), "no linear layer at or before position"),
        (lambda: deepen(IsotropicMLP(6, [5, 4], 3).hidden, 9), "no linear layer at or before position"),
        (lambda: Hyperfan(new_weights="fan_in"), "new_weights must be hyperfan_in or hyperfan_out"),
        (lambda: Hyperfan(sharing="size"), "sharing must be layer or chunk"),
    ],
)
def test_parts_reject_invalid_arguments(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((UserError, ValueError), match=message):
        make()

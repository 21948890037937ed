"""A size of 0 in a network's settings, told as what it is."""

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from growlab.base.errors import UserError
from growlab.lab.training.build import make_network
from growlab.widths import UnsupportedOperation, trace


class Images:
    def __init__(self) -> None:
        self.network_arguments = {"image_shape": (1, 32, 32), "num_classes": 10}


@pytest.mark.parametrize("target", ["resnet20", "mlp5", "convnet4"])
def test_a_network_without_channels_is_named_by_its_setting(target: str) -> None:
    model = OmegaConf.load(f"conf/model/{target}.yaml")
    model.width = 0
    with pytest.raises(UserError, match=r"without entries, with model\.width=0.*at least 1") as raised:
        make_network(model, Images())
    assert "data" not in str(raised.value)


def test_a_trace_names_the_layer_without_channels() -> None:
    with pytest.warns(UserWarning, match="zero-element"):
        network = nn.Sequential(nn.Conv2d(4, 0, 3), nn.Conv2d(0, 2, 3))
    with pytest.raises(UnsupportedOperation, match=r"0\.weight .* \[0, 4, 3, 3\], without entries"):
        trace(network, torch.ones(2, 4, 9, 9))

"""Sizes of the networks as in the papers, shapes, initialisation, invalid arguments."""

from math import sqrt

import pytest
import torch
from torch import nn

from growlab.lab.networks import MLP, CifarResNet, allconv, convnet, convnet4, mlp5, mlp8, resnet20, wrn28_1


def num_params(network) -> int:
    return sum(p.numel() for p in network.parameters())


def test_resnet20_is_that_of_he_et_al():
    """0.27 M parameters, 20 layers (He et al. 2016, Table 6)."""
    network = resnet20((3, 32, 32), 10)
    convolutions = [m for m in network.modules() if isinstance(m, torch.nn.Conv2d)]
    assert len(convolutions) + 1 == 20
    weights = 9 * (3 * 16 + 6 * 16 * 16 + 16 * 32 + 5 * 32 * 32 + 32 * 64 + 5 * 64 * 64)
    norms = 2 * (7 * 16 + 6 * 32 + 6 * 64)
    assert num_params(network) == weights + norms + 64 * 10 + 10 == 269_722
    assert num_params(resnet20((3, 32, 32), 10, shortcut="B")) == 269_722 + 16 * 32 + 32 * 64 + 2 * (32 + 64)


def test_the_padded_shortcut_keeps_old_channels_and_adds_zeros():
    network = CifarResNet(1, 4, channels=(4, 6))
    block = network.layers[1][0]
    with torch.no_grad():
        block.bn2.weight.zero_()
    x = torch.rand(2, 4, 8, 8)
    y = block.eval()(x)
    assert y.shape == (2, 6, 4, 4)
    assert torch.equal(y[:, :4], x[:, :, ::2, ::2])
    assert y[:, 4:].count_nonzero() == 0


def test_convnet4_and_mlp8_have_the_papers_sizes():
    network = convnet4((3, 32, 32), 10)
    assert [m.out_channels for m in network.modules() if isinstance(m, torch.nn.Conv2d)] == [64, 128, 256, 512]
    # 32 pooled by 4, 2, 2, 2 leaves one position.
    assert network.classifier.in_features == 512
    network = mlp8((3, 32, 32), 10)
    assert num_params(network) == 3072 * 500 + 7 * 500 * 500 + 500 * 10 + 8 * 500 + 10
    network = mlp5((1, 28, 28), 10)
    assert num_params(network) == 784 * 500 + 4 * 500 * 500 + 500 * 10 + 5 * 500 + 10


def test_allconv_is_that_of_springenberg_et_al():
    """All-CNN-C: 1.37 M parameters; 8x8 positions after two strides, 6x6 after the unpadded convolution."""
    network = allconv((3, 32, 32), 10)
    weights = 9 * (3 * 96 + 2 * 96 * 96 + 96 * 192 + 3 * 192 * 192) + 192 * 192 + 192 * 10
    assert num_params(network) == weights + 3 * 96 + 5 * 192 + 10
    assert network.features(torch.zeros(1, 3, 32, 32)).shape == (1, 10, 6, 6)
    assert network(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


def test_initial_weights_have_the_gain_of_their_activation():
    torch.manual_seed(0)
    for network, weight, gain in (
        (MLP(300, [400], 5), "hidden.0.weight", 2),
        (MLP(300, [400], 5, activation="tanh"), "hidden.0.weight", 1),
        (convnet((30, 8, 8), 5, [300], [2]), "features.0.weight", 2),
        (CifarResNet(1, 5, channels=(64, 64)), "layers.0.0.conv1.weight", 2),
    ):
        tensor = network.get_parameter(weight).detach()
        fan_in = tensor[0].numel()
        assert float(tensor.std()) == pytest.approx(sqrt(gain / fan_in), rel=0.02)


def test_invalid_arguments_are_refused():
    with pytest.raises(ValueError, match="shortcut must be A or B"):
        CifarResNet(1, 2, shortcut="C")
    with pytest.raises(ValueError, match="shorter"):
        convnet((3, 8, 8), 2, [4, 4], [2])
    with pytest.raises(ValueError, match="image of 8x8 is too small for pooling"):
        convnet4((3, 8, 8), 2)


def test_a_wide_resnet_without_batch_norm_keeps_its_scale_after_growth() -> None:
    """Growth draws weights of variance 2 / fan_in, with which the sum over twelve blocks could grow 64-fold."""
    torch.manual_seed(0)
    network = wrn28_1((3, 32, 32), 10, batch_norm=False)
    x = torch.randn(8, 3, 32, 32)
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    with torch.no_grad():
        inner = network.conv1(x)
        assert 0.3 < float(network.blocks(inner).std() / inner.std()) < 3.0

"""Full-width networks: plain `nn.Module`s without code for growth."""

from growlab.lab.networks.image_networks import (
    MLP,
    CifarResNet,
    ConvNet,
    WideResNet,
    allconv,
    convnet,
    convnet4,
    mlp5,
    mlp8,
    mobilenetv1,
    resnet14,
    resnet18,
    resnet20,
    vgg11,
    vgg19,
    wrn28_1,
)
from growlab.lab.networks.transformer import CausalTransformer, EncoderDecoder

__all__ = [
    "MLP",
    "CausalTransformer",
    "CifarResNet",
    "ConvNet",
    "EncoderDecoder",
    "WideResNet",
    "allconv",
    "convnet",
    "convnet4",
    "mlp5",
    "mlp8",
    "mobilenetv1",
    "resnet14",
    "resnet18",
    "resnet20",
    "vgg11",
    "vgg19",
    "wrn28_1",
]

"""Plain full-width networks: `nn.Module`s that know nothing of growth."""

from growlab.networks.convnet import ConvNet, convnet4
from growlab.networks.mlp import MLP, mlp8
from growlab.networks.resnet import CifarResNet, resnet20

__all__ = ["MLP", "CifarResNet", "ConvNet", "convnet4", "mlp8", "resnet20"]

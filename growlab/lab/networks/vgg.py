"""VGG networks for small images (Simonyan and Zisserman 2015), as the growing literature trains them on CIFAR."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

# Widths of the convolutions relative to the first one's; 0 pools by 2. Configurations A and E of the paper.
_VGG11 = (1, 0, 2, 0, 4, 4, 0, 8, 8, 0, 8, 8, 0)
_VGG19 = (1, 1, 0, 2, 2, 0, 4, 4, 4, 4, 0, 8, 8, 8, 8, 0, 8, 8, 8, 8, 0)


class VGG(nn.Module):
    """3x3 convolutions with ReLU, pooled five times, then one linear classifier.

    Args:
        plan: width of each convolution relative to `width`; 0 pools by 2.
        in_channels: channels of the images.
        num_classes: number of logits.
        width: channels of the first convolution.
        batch_norm: put batch normalisation behind each convolution.

    Convolutions are drawn from N(0, 2 / fan_in). What is left of the image is averaged, so any size from 32 up
    goes in.
    """

    def __init__(
        self,
        plan: Sequence[int],
        in_channels: int,
        num_classes: int,
        width: int = 64,
        batch_norm: bool = True,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = in_channels
        for multiple in plan:
            if multiple == 0:
                layers.append(nn.MaxPool2d(2))
                continue
            convolution = nn.Conv2d(channels, multiple * width, 3, padding=1, bias=not batch_norm)
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            channels = multiple * width
            layers.append(convolution)
            if batch_norm:
                layers.append(nn.BatchNorm2d(channels))
            else:
                nn.init.zeros_(convolution.bias)
            layers.append(nn.ReLU())
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, C, H, W] to logits [B, num_classes]."""
        return self.classifier(torch.mean(self.features(x), (2, 3)))


def vgg11(image_shape: Sequence[int], num_classes: int, width: int = 64, batch_norm: bool = True) -> VGG:
    """VGG-11 for CIFAR: 8 convolutions, 9.2 M parameters (Yuan et al. 2023, Table 2)."""
    return VGG(_VGG11, image_shape[0], num_classes, width, batch_norm)


def vgg19(image_shape: Sequence[int], num_classes: int, width: int = 64, batch_norm: bool = True) -> VGG:
    """VGG-19 for CIFAR: 16 convolutions, 20 M parameters (Yuan et al. 2023, Table 3)."""
    return VGG(_VGG19, image_shape[0], num_classes, width, batch_norm)

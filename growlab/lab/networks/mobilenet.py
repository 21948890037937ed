"""MobileNetV1 (Howard et al. 2017): depthwise-separable convolutions."""

from collections.abc import Sequence

from torch import Tensor, nn

# Width of each block relative to the stem's, and its stride (Table 1 of the paper).
_BLOCKS = (
    *((2, 1), (4, 2), (4, 1), (8, 2), (8, 1), (16, 2)),
    *((16, 1), (16, 1), (16, 1), (16, 1), (16, 1), (32, 2), (32, 1)),
)


class MobileNetV1(nn.Module):
    """A convolution, thirteen depthwise-separable blocks, average pooling and a linear classifier.

    Args:
        in_channels: channels of the images.
        num_classes: number of logits.
        width: channels of the first convolution.
        stem_stride: stride of the first convolution: 2 for ImageNet, 1 for CIFAR.

    Convolutions are drawn from N(0, 2 / fan_in).
    """

    def __init__(self, in_channels: int, num_classes: int, width: int = 32, stem_stride: int = 2) -> None:
        super().__init__()
        layers = _unit(in_channels, width, 3, stem_stride, 1)
        channels = width
        for multiple, stride in _BLOCKS:
            layers += _unit(channels, channels, 3, stride, channels)
            layers += _unit(channels, multiple * width, 1, 1, 1)
            channels = multiple * width
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, C, H, W] to logits [B, num_classes]."""
        return self.classifier(self.features(x).mean((2, 3)))


def mobilenetv1(image_shape: Sequence[int], num_classes: int, width: int = 32) -> MobileNetV1:
    """MobileNetV1 with a stem of stride 1 for images up to 64 pixels (CIFAR) and 2 above (ImageNet)."""
    return MobileNetV1(image_shape[0], num_classes, width, stem_stride=1 if image_shape[1] <= 64 else 2)


def _unit(in_channels: int, out_channels: int, kernel_size: int, stride: int, groups: int) -> list[nn.Module]:
    convolution = nn.Conv2d(
        in_channels, out_channels, kernel_size, stride, kernel_size // 2, groups=groups, bias=False
    )
    nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
    return [convolution, nn.BatchNorm2d(out_channels), nn.ReLU()]

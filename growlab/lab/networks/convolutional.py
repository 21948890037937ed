"""Plain convolutional networks for images: All-CNN, VGG, MobileNetV1 and stacks of convolutions.

Convolutions are drawn from N(0, 2 / fan_in), their biases are zero.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def conv(
    in_channels: int,
    out_channels: int,
    kernel_size: int,
    stride: int = 1,
    padding: int | None = None,
    groups: int = 1,
    bias: bool = False,
) -> nn.Conv2d:
    """A convolution drawn from N(0, 2 / fan_in), with zero biases; it keeps the image's size if `padding` is None."""
    padding = kernel_size // 2 if padding is None else padding
    made = nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding, groups=groups, bias=bias)
    nn.init.kaiming_normal_(made.weight, nonlinearity="relu")
    if made.bias is not None:
        nn.init.zeros_(made.bias)
    return made


# Width relative to the first, kernel size, stride, padding (Springenberg et al. 2014, Table 1, Section 3.2).
_ALLCONV = (
    *((1, 3, 1, 1), (1, 3, 1, 1), (1, 3, 2, 1)),
    *((2, 3, 1, 1), (2, 3, 1, 1), (2, 3, 2, 1)),
    *((2, 3, 1, 0), (2, 1, 1, 0)),
)


class AllConv(nn.Module):
    """All Convolutional Net: nine convolutions with ReLU, two of stride 2, then the average of each class's map.

    Args:
        in_channels: channels of the images.
        num_classes: number of logits.
        width: channels of the first convolution.

    The dropout of the original is left out, as in Chang et al. 2020.
    """

    def __init__(self, in_channels: int, num_classes: int, width: int = 96) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = in_channels
        for multiple, kernel_size, stride, padding in (*_ALLCONV, (None, 1, 1, 0)):
            out_channels = num_classes if multiple is None else multiple * width
            layers += [conv(channels, out_channels, kernel_size, stride, padding, bias=True), nn.ReLU()]
            channels = out_channels
        self.features = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, C, H, W], at least 9 pixels wide, to logits [B, num_classes]."""
        return self.features(x).mean((2, 3))


def allconv(image_shape: Sequence[int], num_classes: int, width: int = 96) -> AllConv:
    """All-CNN-C: 96 and 192 channels."""
    return AllConv(image_shape[0], num_classes, width)


class ConvNet(nn.Module):
    """Blocks of 3x3 convolution, batch normalisation, ReLU and max-pooling, then a linear classifier.

    Args:
        image_shape: [channels, height, width] of one image.
        num_classes: number of logits.
        channels: width of each convolution.
        pools: pooling factor after each convolution (1 for none).

    The features left after the last pooling are flattened.

    Raises:
        ValueError: `channels` and `pools` differ in length, or pooling leaves nothing of the image.
    """

    def __init__(
        self, image_shape: Sequence[int], num_classes: int, channels: Sequence[int], pools: Sequence[int]
    ) -> None:
        super().__init__()
        if len(channels) != len(pools):
            raise ValueError(f"channels and pools must have one entry a block, not {len(channels)} and {len(pools)}")
        width_in, height, width = image_shape
        layers: list[nn.Module] = []
        for width_out, pool in zip(channels, pools, strict=True):
            layers += [conv(width_in, width_out, 3), nn.BatchNorm2d(width_out), nn.ReLU()]
            if pool > 1:
                layers.append(nn.MaxPool2d(pool))
            height, width, width_in = height // pool, width // pool, width_out
        if height < 1 or width < 1:
            raise ValueError(f"pooling by {list(pools)} leaves nothing of a {image_shape[1]}x{image_shape[2]} image")
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(width_in * height * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, C, H, W] to logits [B, num_classes]."""
        return self.classifier(torch.flatten(self.features(x), 1))


def convnet4(
    image_shape: Sequence[int], num_classes: int, width: int = 64, pools: Sequence[int] = (4, 2, 2, 2)
) -> ConvNet:
    """The 4-convolution network of Yuan et al. 2023, Figure 3: 64, 128, 256, 512 channels, pooled by 4, 2, 2, 2."""
    return ConvNet(image_shape, num_classes, [width, 2 * width, 4 * width, 8 * width], pools)


# Width of each block of MobileNetV1 relative to the stem's, and its stride (Howard et al. 2017, Table 1).
_MOBILENET = (
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

    """

    def __init__(self, in_channels: int, num_classes: int, width: int = 32, stem_stride: int = 2) -> None:
        super().__init__()
        layers = _unit(in_channels, width, 3, stem_stride, 1)
        channels = width
        for multiple, stride in _MOBILENET:
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
    convolution = conv(in_channels, out_channels, kernel_size, stride, groups=groups)
    return [convolution, nn.BatchNorm2d(out_channels), nn.ReLU()]


# Widths of VGG's convolutions relative to the first one's; 0 pools by 2 (Simonyan and Zisserman 2015, A and E).
_VGG11 = (1, 0, 2, 0, 4, 4, 0, 8, 8, 0, 8, 8, 0)
_VGG19 = (1, 1, 0, 2, 2, 0, 4, 4, 4, 4, 0, 8, 8, 8, 8, 0, 8, 8, 8, 8, 0)


class VGG(nn.Module):
    """VGG for small images: 3x3 convolutions with ReLU, pooled five times, then one linear classifier.

    Args:
        plan: width of each convolution relative to `width`; 0 pools by 2.
        in_channels: channels of the images.
        num_classes: number of logits.
        width: channels of the first convolution.
        batch_norm: put batch normalisation behind each convolution.

    The final feature map is averaged, so any image size from 32 up works.
    """

    def __init__(
        self, plan: Sequence[int], in_channels: int, num_classes: int, width: int = 64, batch_norm: bool = True
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = in_channels
        for multiple in plan:
            if multiple == 0:
                layers.append(nn.MaxPool2d(2))
                continue
            layers.append(conv(channels, multiple * width, 3, bias=not batch_norm))
            channels = multiple * width
            layers += [nn.BatchNorm2d(channels), nn.ReLU()] if batch_norm else [nn.ReLU()]
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

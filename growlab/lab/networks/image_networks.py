"""Networks for images: perceptrons, stacks of convolutions, All-CNN, VGG, MobileNetV1 and residual networks.

Residual networks follow He et al. 2016 (Deep Residual Learning, Section 4.2) and Zagoruyko and Komodakis 2016.

Weights of convolutions are drawn from N(0, 2 / fan_in); biases are zero.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def conv(
    in_channels: int,
    out_channels: int,
    kernel_size: int,
    stride: int = 1,
    padding: int | None = None,
    groups: int = 1,
    bias: bool = False,
) -> nn.Conv2d:
    """Return a convolution with weights from N(0, 2 / fan_in) and zero biases; default padding: kernel_size // 2."""
    padding = kernel_size // 2 if padding is None else padding
    layer = nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding, groups=groups, bias=bias)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


class ConvNet(nn.Module):
    """A sequence of layers, global average pooling (or flattening), and a classifier.

    Args:
        layers: layers of `features`, from images [B, C, H, W] to maps [B, K, H', W'].
        classifier: from [B, K] to logits [B, num_classes]; None: the pooled maps are the logits.
        flat: flatten the maps to [B, K * H' * W'] instead of pooling.
    """

    def __init__(self, layers: Sequence[nn.Module], classifier: nn.Module | None = None, flat: bool = False) -> None:
        super().__init__()
        self.flat = flat
        self.features = nn.Sequential(*layers)
        self.classifier = classifier or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, C, H, W] to logits [B, num_classes]."""
        x = self.features(x)
        return self.classifier(x.flatten(1) if self.flat else x.mean((2, 3)))


# Relative width, stride and padding of the 3x3 convolutions (Springenberg et al. 2014, Table 1, Section 3.2).
_ALLCONV = ((1, 1, 1), (1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 1, 1), (2, 2, 1), (2, 1, 0))


def allconv(image_shape: Sequence[int], num_classes: int, width: int = 96) -> ConvNet:
    """All-CNN-C (Springenberg et al. 2014): nine convolutions of 96 and 192 channels and global average pooling.

    Images must be at least 9 pixels wide. The original's dropout is left out, as in Chang et al. 2020.
    """
    layers: list[nn.Module] = []
    channels = image_shape[0]
    plan = [(multiple * width, 3, stride, padding) for multiple, stride, padding in _ALLCONV]
    for out_channels, kernel_size, stride, padding in (*plan, (2 * width, 1, 1, 0), (num_classes, 1, 1, 0)):
        layers += [conv(channels, out_channels, kernel_size, stride, padding, bias=True), nn.ReLU()]
        channels = out_channels
    return ConvNet(layers)


def convnet(image_shape: Sequence[int], num_classes: int, channels: Sequence[int], pools: Sequence[int]) -> ConvNet:
    """Blocks of 3x3 convolution, batch normalisation, ReLU and max-pooling, flattened for a linear classifier.

    Args:
        image_shape: [channels, height, width] of one image.
        num_classes: number of logits.
        channels: width of each convolution.
        pools: pooling factor after each convolution; 1: no pooling.

    Raises:
        ValueError: `channels` and `pools` differ in length, or the image is too small for the pooling.
    """
    width_in, height, width = image_shape
    layers: list[nn.Module] = []
    for width_out, pool in zip(channels, pools, strict=True):
        layers += [*_unit(width_in, width_out, 3), *([nn.MaxPool2d(pool)] if pool > 1 else ())]
        height, width, width_in = height // pool, width // pool, width_out
    if height < 1 or width < 1:
        raise ValueError(f"an image of {image_shape[1]}x{image_shape[2]} is too small for pooling by {list(pools)}")
    return ConvNet(layers, nn.Linear(width_in * height * width, num_classes), flat=True)


def convnet4(
    image_shape: Sequence[int], num_classes: int, width: int = 64, pools: Sequence[int] = (4, 2, 2, 2)
) -> ConvNet:
    """The 4-convolution network of Yuan et al. 2023, Figure 3: 64, 128, 256, 512 channels, pooled by 4, 2, 2, 2."""
    return convnet(image_shape, num_classes, [width, 2 * width, 4 * width, 8 * width], pools)


# Width relative to the stem, and stride, of MobileNetV1's blocks (Howard et al. 2017, Table 1).
_MOBILENET = (
    *((2, 1), (4, 2), (4, 1), (8, 2), (8, 1), (16, 2)),
    *((16, 1), (16, 1), (16, 1), (16, 1), (16, 1), (32, 2), (32, 1)),
)


def mobilenetv1(image_shape: Sequence[int], num_classes: int, width: int = 32) -> ConvNet:
    """MobileNetV1: a convolution and thirteen depthwise-separable blocks.

    The stem's stride is 1 for images up to 64 pixels (CIFAR) and 2 above (ImageNet).
    """
    layers = _unit(image_shape[0], width, 3, stride=1 if image_shape[1] <= 64 else 2)
    channels = width
    for multiple, stride in _MOBILENET:
        layers += _unit(channels, channels, 3, stride, groups=channels) + _unit(channels, multiple * width, 1)
        channels = multiple * width
    return ConvNet(layers, nn.Linear(channels, num_classes))


def _unit(in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    convolution = conv(in_channels, out_channels, kernel_size, stride, groups=groups)
    return [convolution, nn.BatchNorm2d(out_channels), nn.ReLU()]


# Relative widths of VGG's convolutions; 0 pools by 2 (Simonyan and Zisserman 2015, A and E).
_VGG11 = (1, 0, 2, 0, 4, 4, 0, 8, 8, 0, 8, 8, 0)
_VGG19 = (1, 1, 0, 2, 2, 0, 4, 4, 4, 4, 0, 8, 8, 8, 8, 0, 8, 8, 8, 8, 0)


def vgg11(
    image_shape: Sequence[int],
    num_classes: int,
    width: int = 64,
    batch_norm: bool = True,
    plan: Sequence[int] = _VGG11,
) -> ConvNet:
    """VGG-11 for CIFAR: 8 convolutions, 9.2 M parameters (Yuan et al. 2023, Table 2).

    Args:
        image_shape: [channels, height, width], at least 32 pixels.
        num_classes: number of logits.
        width: channels of the first convolution.
        batch_norm: add batch normalisation after each convolution.
        plan: width of each convolution relative to `width`; 0 pools by 2.
    """
    layers: list[nn.Module] = []
    channels = image_shape[0]
    for multiple in plan:
        if multiple == 0:
            layers.append(nn.MaxPool2d(2))
            continue
        layers.append(conv(channels, multiple * width, 3, bias=not batch_norm))
        channels = multiple * width
        layers += [nn.BatchNorm2d(channels), nn.ReLU()] if batch_norm else [nn.ReLU()]
    return ConvNet(layers, nn.Linear(channels, num_classes))


def vgg19(image_shape: Sequence[int], num_classes: int, width: int = 64, batch_norm: bool = True) -> ConvNet:
    """VGG-19 for CIFAR: 16 convolutions, 20 M parameters (Yuan et al. 2023, Table 3)."""
    return vgg11(image_shape, num_classes, width, batch_norm, _VGG19)


class MLP(nn.Module):
    """Flattened inputs, hidden linear layers, and a linear classifier.

    Weights of hidden layers are drawn from N(0, gain / fan_in) with gain 2 for ReLU and 1 for tanh, and their biases
    are zero. The classifier has torch's default initialisation.

    Args:
        in_features: number of values in a flattened sample.
        hidden_features: width of each hidden layer.
        num_classes: number of logits.
        batch_norm: put batch normalisation between each hidden layer and its activation.
        activation: "relu" or "tanh".
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: Sequence[int],
        num_classes: int,
        batch_norm: bool = False,
        activation: Literal["relu", "tanh"] = "relu",
    ) -> None:
        super().__init__()
        kind: type[nn.Module] = {"relu": nn.ReLU, "tanh": nn.Tanh}[activation]
        layers: list[nn.Module] = []
        width_in = in_features
        for width in hidden_features:
            linear = nn.Linear(width_in, width)
            nn.init.kaiming_normal_(linear.weight, nonlinearity="relu" if activation == "relu" else "linear")
            nn.init.zeros_(linear.bias)
            layers += [linear, *([nn.BatchNorm1d(width)] if batch_norm else ()), kind()]
            width_in = width
        self.hidden = nn.Sequential(*layers)
        self.classifier = nn.Linear(width_in, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map samples [B, ...] to logits [B, num_classes]."""
        return self.classifier(self.hidden(x.flatten(1)))


def mlp8(image_shape: Sequence[int], num_classes: int, width: int = 500, batch_norm: bool = False) -> MLP:
    """The 8-hidden-layer MLP of Yuan et al. 2023, Appendix F: 500 units per layer, flattened images [C, H, W]."""
    return MLP(math.prod(image_shape), [width] * 8, num_classes, batch_norm=batch_norm)


def mlp5(
    image_shape: Sequence[int], num_classes: int, width: int = 500, activation: Literal["relu", "tanh"] = "tanh"
) -> MLP:
    """The 5-hidden-layer MLP of Chang et al. 2020, Section 5.1: 500 units per layer, flattened images [C, H, W]."""
    return MLP(math.prod(image_shape), [width] * 5, num_classes, activation=activation)


class PaddedShortcut(nn.Module):
    """Parameter-free shortcut (He et al. 2016, option A): subsample in space and append zero channels.

    The number of channels is an argument of each call, so that the block is valid at any width.
    """

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor, num_channels: int) -> Tensor:
        """Map [B, C, H, W] to [B, num_channels, H / stride, W / stride]."""
        x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, 0, num_channels - x.shape[1]))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch normalisation around a shortcut."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, shortcut: str) -> None:
        super().__init__()
        self.conv1 = conv(in_channels, out_channels, 3, stride)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = conv(out_channels, out_channels, 3, 1)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module | None = None
        if stride != 1 or in_channels != out_channels:
            if shortcut == "A":
                self.shortcut = PaddedShortcut(stride)
            else:
                self.shortcut = nn.Sequential(conv(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, in_channels, H, W] to [B, out_channels, H / stride, W / stride]."""
        residual = torch.relu(self.bn1(self.conv1(x)))
        residual = self.bn2(self.conv2(residual))
        if isinstance(self.shortcut, PaddedShortcut):
            x = self.shortcut(x, residual.shape[1])
        elif self.shortcut is not None:
            x = self.shortcut(x)
        return torch.relu(x + residual)


class CifarResNet(nn.Module):
    """ResNet of depth 6n + 2 for small images: layers of n basic blocks that halve the resolution from layer to layer.

    Args:
        num_blocks: n, blocks in each layer.
        num_classes: number of logits.
        in_channels: channels of the images.
        channels: width of each layer.
        shortcut: "A" (zero-padded identity, He et al.'s choice for CIFAR) or "B" (1x1 convolution).
        stem_stride: stride of the first convolution.

    Raises:
        ValueError: the shortcut is neither A nor B.
    """

    def __init__(
        self,
        num_blocks: int,
        num_classes: int,
        in_channels: int = 3,
        channels: Sequence[int] = (16, 32, 64),
        shortcut: str = "A",
        stem_stride: int = 1,
    ) -> None:
        super().__init__()
        if shortcut not in ("A", "B"):
            raise ValueError(f"shortcut must be A or B, not {shortcut!r}")
        self.conv1 = conv(in_channels, channels[0], 3, stem_stride)
        self.bn1 = nn.BatchNorm2d(channels[0])
        layers = []
        width_in = channels[0]
        for index, width in enumerate(channels):
            blocks = []
            for block in range(num_blocks):
                stride = 2 if index > 0 and block == 0 else 1
                blocks.append(BasicBlock(width_in, width, stride, shortcut))
                width_in = width
            layers.append(nn.Sequential(*blocks))
        self.layers = nn.Sequential(*layers)
        self.classifier = nn.Linear(width_in, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, in_channels, H, W] to logits [B, num_classes]."""
        x = torch.relu(self.bn1(self.conv1(x)))
        x = self.layers(x)
        return self.classifier(x.mean((2, 3)))


def resnet20(image_shape: Sequence[int], num_classes: int, width: int = 16, shortcut: str = "A") -> CifarResNet:
    """ResNet-20 of He et al. 2016: 16, 32, 64 channels, 0.27 M parameters; `width` is the first layer's."""
    return CifarResNet(3, num_classes, image_shape[0], (width, 2 * width, 4 * width), shortcut)


def resnet14(
    image_shape: Sequence[int], num_classes: int, width: int = 16, shortcut: str = "A", stem_stride: int = 2
) -> CifarResNet:
    """ResNet-14: 16, 32, 64 channels, two blocks each; a stem of stride 2 makes it a quarter as expensive."""
    return CifarResNet(2, num_classes, image_shape[0], (width, 2 * width, 4 * width), shortcut, stem_stride)


def resnet18(image_shape: Sequence[int], num_classes: int, width: int = 64, shortcut: str = "B") -> CifarResNet:
    """ResNet-18 with the CIFAR stem (3x3, stride 1): 64 to 512 channels, 11 M parameters."""
    return CifarResNet(2, num_classes, image_shape[0], [width * 2**layer for layer in range(4)], shortcut)


class PreActivationBlock(nn.Module):
    """Normalisation, activation and convolution, twice, around a shortcut: a 1x1 convolution if the shape changes."""

    def __init__(
        self, in_channels: int, out_channels: int, stride: int, batch_norm: bool, residual_scale: float = 1.0
    ) -> None:
        super().__init__()
        self.residual_scale = residual_scale
        self.norm1 = _norm(in_channels, batch_norm)
        self.conv1 = conv(in_channels, out_channels, 3, stride, bias=not batch_norm)
        self.norm2 = _norm(out_channels, batch_norm)
        self.conv2 = conv(out_channels, out_channels, 3, bias=not batch_norm)
        self.shortcut: nn.Module | None = None
        if stride != 1 or in_channels != out_channels:
            self.shortcut = conv(in_channels, out_channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, in_channels, H, W] to [B, out_channels, H / stride, W / stride]."""
        active = torch.relu(self.norm1(x))
        residual = self.conv2(torch.relu(self.norm2(self.conv1(active))))
        if self.residual_scale != 1.0:
            residual = residual * self.residual_scale
        return residual + (x if self.shortcut is None else self.shortcut(active))


class WideResNet(nn.Module):
    """WRN of depth 6n + 4: a convolution, three layers of n pre-activation blocks, a linear classifier.

    Args:
        num_blocks: n, blocks in each layer.
        width_factor: k; the layers have 16k, 32k, 64k channels.
        in_channels: channels of the images.
        num_classes: number of logits.
        batch_norm: normalise before each activation. Without it, convolutions have biases, and residual branches are
            divided by the square root of the number of blocks, so that their sum keeps the scale of its input.
    """

    def __init__(
        self, num_blocks: int, width_factor: int, in_channels: int, num_classes: int, batch_norm: bool = True
    ) -> None:
        super().__init__()
        self.conv1 = conv(in_channels, 16, 3, bias=not batch_norm)
        blocks: list[nn.Module] = []
        channels, scale = 16, 1.0 if batch_norm else (3 * num_blocks) ** -0.5
        for layer in range(3):
            for block in range(num_blocks):
                width, stride = 16 * width_factor * 2**layer, 2 if layer and not block else 1
                blocks.append(PreActivationBlock(channels, width, stride, batch_norm, scale))
                channels = width
        self.blocks = nn.Sequential(*blocks)
        self.norm = _norm(channels, batch_norm)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, C, H, W] to logits [B, num_classes]."""
        x = torch.relu(self.norm(self.blocks(self.conv1(x))))
        return self.classifier(x.mean((2, 3)))


def wrn28_1(image_shape: Sequence[int], num_classes: int, batch_norm: bool = True) -> WideResNet:
    """WRN-28-1: 0.37 M parameters, with or without batch normalisation (Yuan et al. 2023, Table 13)."""
    return WideResNet(4, 1, image_shape[0], num_classes, batch_norm)


def _norm(channels: int, batch_norm: bool) -> nn.Module:
    return nn.BatchNorm2d(channels) if batch_norm else nn.Identity()

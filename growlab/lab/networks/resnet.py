"""Residual networks for CIFAR: He et al. 2016 (Deep Residual Learning, Section 4.2), Zagoruyko and Komodakis 2016."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab.lab.networks.feedforward import conv


class PaddedShortcut(nn.Module):
    """Option A: subsample in space and append zero channels; no parameters.

    The number of channels to append is an argument of each call, so that the block stays right at any width.
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
    """ResNet of depth 6n + 2 for small images: layers of n basic blocks, halved in space between them.

    Args:
        num_blocks: n, blocks in each layer.
        num_classes: number of logits.
        in_channels: channels of the images.
        channels: width of each layer.
        shortcut: "A" (zero-padded identity, He et al.'s choice for CIFAR) or "B" (1x1 convolution).
        stem_stride: of the first convolution.

    Convolutions are drawn from N(0, 2 / fan_in).

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
    """Normalise, activate and convolve, twice, around a shortcut, a 1x1 convolution where the shape changes."""

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
        batch_norm: normalise before each activation; without it convolutions have biases, and what blocks add is
            divided by the square root of their number, which keeps the sum at the scale of its input whatever weights
            are drawn.
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

"""Wide residual networks with pre-activation blocks (Zagoruyko and Komodakis 2016)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from growlab.lab.networks.convolutional import conv


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

"""Plain stacks of convolutions."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class ConvNet(nn.Module):
    """Blocks of 3x3 convolution, batch normalisation, ReLU and max-pooling, then a linear classifier.

    Args:
        image_shape: [channels, height, width] of one image.
        num_classes: number of logits.
        channels: width of each convolution.
        pools: pooling factor after each convolution (1 for none).

    The features left after the last pooling are flattened. Convolutions are drawn from N(0, 2 / fan_in).

    Raises:
        ValueError: `channels` and `pools` differ in length, or pooling leaves nothing of the image.
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        num_classes: int,
        channels: Sequence[int],
        pools: Sequence[int],
    ) -> None:
        super().__init__()
        if len(channels) != len(pools):
            raise ValueError(
                f"channels and pools must have one entry a block, not {len(channels)} and {len(pools)}"
            )
        width_in, height, width = image_shape
        layers: list[nn.Module] = []
        for width_out, pool in zip(channels, pools, strict=True):
            convolution = nn.Conv2d(width_in, width_out, 3, padding=1, bias=False)
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            layers += [convolution, nn.BatchNorm2d(width_out), nn.ReLU()]
            if pool > 1:
                layers.append(nn.MaxPool2d(pool))
            height, width, width_in = height // pool, width // pool, width_out
        if height < 1 or width < 1:
            raise ValueError(
                f"pooling by {list(pools)} leaves nothing of a {image_shape[1]}x{image_shape[2]} image"
            )
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

"""The All Convolutional Net (Springenberg et al. 2014)."""

from collections.abc import Sequence

from torch import Tensor, nn

# Width relative to the first, kernel size, stride, padding (All-CNN-C, Table 1 and its striding in Section 3.2).
_LAYERS = (
    *((1, 3, 1, 1), (1, 3, 1, 1), (1, 3, 2, 1)),
    *((2, 3, 1, 1), (2, 3, 1, 1), (2, 3, 2, 1)),
    *((2, 3, 1, 0), (2, 1, 1, 0)),
)


class AllConv(nn.Module):
    """Nine convolutions with ReLU, two of them of stride 2, then the average of each class's map.

    Args:
        in_channels: channels of the images.
        num_classes: number of logits.
        width: channels of the first convolution.

    Convolutions are drawn from N(0, 2 / fan_in), biases are zero. The dropout of the original is left out, as in
    Chang et al. 2020.
    """

    def __init__(self, in_channels: int, num_classes: int, width: int = 96) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = in_channels
        for multiple, kernel_size, stride, padding in (*_LAYERS, (None, 1, 1, 0)):
            out_channels = num_classes if multiple is None else multiple * width
            convolution = nn.Conv2d(channels, out_channels, kernel_size, stride, padding)
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            nn.init.zeros_(convolution.bias)
            layers += [convolution, nn.ReLU()]
            channels = out_channels
        self.features = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, C, H, W], at least 9 pixels wide, to logits [B, num_classes]."""
        return self.features(x).mean((2, 3))


def allconv(image_shape: Sequence[int], num_classes: int, width: int = 96) -> AllConv:
    """All-CNN-C: 96 and 192 channels."""
    return AllConv(image_shape[0], num_classes, width)

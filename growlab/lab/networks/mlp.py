"""Multi-layer perceptrons on flattened images."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn


class MLP(nn.Module):
    """Flatten, then hidden linear layers with ReLU, then a linear classifier.

    Args:
        in_features: number of values in one flattened sample.
        hidden_features: width of each hidden layer.
        num_classes: number of logits.
        batch_norm: put batch normalisation between each hidden layer and its activation.
        activation: name of the activation, "relu" or "tanh".

    Weights are drawn from N(0, gain / fan_in) with gain 2 for ReLU and 1 for tanh, the classifier's as
    torch draws them; biases start at zero.
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
        activations = {"relu": nn.ReLU, "tanh": nn.Tanh}
        layers: list[nn.Module] = []
        width_in = in_features
        for width in hidden_features:
            linear = nn.Linear(width_in, width)
            nn.init.kaiming_normal_(linear.weight, nonlinearity="relu" if activation == "relu" else "linear")
            nn.init.zeros_(linear.bias)
            layers.append(linear)
            if batch_norm:
                layers.append(nn.BatchNorm1d(width))
            layers.append(activations[activation]())
            width_in = width
        self.hidden = nn.Sequential(*layers)
        self.classifier = nn.Linear(width_in, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map samples [B, ...] to logits [B, num_classes]."""
        return self.classifier(self.hidden(torch.flatten(x, 1)))


def mlp8(image_shape: Sequence[int], num_classes: int, width: int = 500, batch_norm: bool = False) -> MLP:
    """The 8-hidden-layer MLP of Yuan et al. 2023, Appendix F: 500 units a layer, flattened images [C, H, W]."""
    channels, height, image_width = image_shape
    return MLP(channels * height * image_width, [width] * 8, num_classes, batch_norm=batch_norm)


def mlp5(
    image_shape: Sequence[int], num_classes: int, width: int = 500, activation: Literal["relu", "tanh"] = "tanh"
) -> MLP:
    """The 5-hidden-layer MLP of Chang et al. 2020, Section 5.1: 500 units a layer, flattened images [C, H, W]."""
    channels, height, image_width = image_shape
    return MLP(channels * height * image_width, [width] * 5, num_classes, activation=activation)

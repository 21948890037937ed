"""A network with isotropic layers between others."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from growlab.parts.isotropic import ChiNorm, IsotropicActivation


class Mixed(nn.Module):
    """Isotropic layers between layers with ReLU, the first of which may be normalised."""

    def __init__(
        self, in_features: int, num_classes: int, width: int = 8, norm: str = "none", neurons: int = 6
    ) -> None:
        super().__init__()
        norms = {"none": nn.Identity, "batch": nn.BatchNorm1d, "layer": nn.LayerNorm}
        made = norms[norm]
        self.first = nn.Sequential(
            *(nn.Linear(in_features, width), made(width), nn.ReLU()), *(nn.Linear(width, width), made(width), nn.ReLU())
        )
        self.hidden = nn.Sequential(
            *(nn.Linear(width, neurons), ChiNorm(neurons), IsotropicActivation(length=0.1)),
            *(nn.Linear(neurons, neurons), IsotropicActivation(length=0.1)),
        )
        self.last = nn.Sequential(nn.Linear(neurons, width), nn.ReLU(), nn.Linear(width, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.hidden(self.first(torch.flatten(x, 1))))


def mixed(image_shape: Sequence[int], num_classes: int, width: int = 8, norm: str = "none", neurons: int = 6) -> Mixed:
    """Build a `Mixed` network; the arguments are those of `model._target_`."""
    return Mixed(torch.Size(image_shape).numel(), num_classes, width, norm, neurons)

"""Networks with weights emitted by a hypernetwork, for `conf/model`."""

from collections.abc import Callable, Sequence
from math import log
from typing import Any

import torch
from torch import Tensor, nn

from growlab.base.errors import UserError
from growlab.parts.hypernets.parametrise import Hypernet, initialise, parametrise


class MonteCarlo(nn.Module):
    """Average a noisy network's class probabilities over several passes in eval mode; outputs their logarithm.

    Args:
        network: a network whose passes differ, since its embeddings are noisy.
        samples: number of passes.
    """

    def __init__(self, network: nn.Module, samples: int) -> None:
        super().__init__()
        self.network, self.samples = network, samples

    def forward(self, x: Tensor) -> Tensor:
        """Map a batch to logits, or in eval mode to log-probabilities, [B, num_classes]."""
        if self.training:
            return self.network(x)
        passes = [torch.log_softmax(self.network(x), 1) for _ in range(self.samples)]
        return torch.logsumexp(torch.stack(passes), 0) - log(self.samples)


def hypernetwork(
    image_shape: Sequence[int],
    num_classes: int,
    network: Callable[..., nn.Module],
    monte_carlo_samples: int = 1,
    **hypernet: Any,
) -> nn.Module:
    """Build a network whose weights a hypernetwork emits, seeded from torch's global generator.

    Args:
        image_shape: [C, H, W].
        num_classes: number of logits.
        network: builds the main network from `image_shape` and `num_classes`.
        monte_carlo_samples: number of passes averaged in eval mode, for noisy embeddings.
        hypernet: fields of `Hypernet`; with `sharing="none"` the network stays a plain one, drawn by the
            initialisation.

    Raises:
        UserError: a setting is invalid.
    """
    if monte_carlo_samples < 1:
        raise UserError(f"monte_carlo_samples must be at least 1, not {monte_carlo_samples}.")
    made = network(image_shape=image_shape, num_classes=num_classes)
    seed = int(torch.randint(2**31, ()))
    if hypernet.get("sharing") == "none":
        return initialise(made, Hypernet(**{**hypernet, "sharing": "layer"}), seed)
    parametrise(made, Hypernet(**hypernet), seed)
    return made if monte_carlo_samples == 1 else MonteCarlo(made, monte_carlo_samples)

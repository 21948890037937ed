"""Language modelling over characters: token prediction, told in bits."""

import math
from collections.abc import Sequence

from growlab.lab.training.objective import TokenPrediction


class CharacterPrediction(TokenPrediction):
    """Cross-entropy of the next character, and what it comes to in bits: the mean negative log2 likelihood.

    Examples:
        >>> import torch
        >>> loss, sums = CharacterPrediction()(torch.zeros(1, 3, 8), torch.tensor([[0, 2, 1]]))
        >>> round(CharacterPrediction().metrics(sums.tolist())["bits_per_character"], 3)  # one of eight
        3.0
    """

    metric_names: Sequence[str] = (*TokenPrediction.metric_names, "bits_per_character")
    compared_by = ("bits_per_character", False)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Mean loss, accuracy, perplexity and bits per character."""
        _, _, likelihood, count = sums
        return {**super().metrics(sums), "bits_per_character": likelihood / count / math.log(2)}

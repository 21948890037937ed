"""Language modelling over tokens of any tokenizer, told in bits for each byte of the text."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from growlab.base.errors import UserError
from growlab.lab.training.objective import TokenPrediction


class SubwordPrediction(TokenPrediction):
    """Cross-entropy of the next token, and what it comes to in bits for each byte of the text.

    Losses per token cannot be compared between tokenizers, bits per byte can: the negative log2 likelihood of the text
    over its length in UTF-8.

    Examples:
        >>> import types
        >>> objective = SubwordPrediction()
        >>> objective.bind(types.SimpleNamespace(goes_with="", bytes_of_tokens=torch.tensor([0.0, 1.0, 2.0, 3.0])))
        >>> loss, sums = objective(torch.zeros(1, 3, 4), torch.tensor([[3, 1, 2]]))
        >>> round(objective.metrics(sums.tolist())["bits_per_byte"], 3)  # three tokens of two bits each, six bytes
        1.0
    """

    metric_names: Sequence[str] = (*TokenPrediction.metric_names, "bits_per_byte")
    compared_by = ("bits_per_byte", False)

    def bind(self, data: Any) -> None:
        """Learn how many bytes each token stands for.

        Raises:
            UserError: the data do not know.
        """
        super().bind(data)
        found: Tensor | None = data.bytes_of_tokens
        if found is None:
            advice = f": {self.goes_with}" if self.goes_with else ""
            raise UserError(
                f"objective=tokens needs data that know the bytes of their tokens, as data=tokens{advice}."
            )
        self._bytes_of_tokens = found

    def __call__(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss of logits [B, T, V] and tokens [B, T]; sums of loss, hits, likelihood, bytes and tokens.

        Raises:
            UserError: they have other shapes.
        """
        loss, sums = super().__call__(logits, target)
        if self._bytes_of_tokens.device != target.device:
            self._bytes_of_tokens = self._bytes_of_tokens.to(target.device)
        size = self._bytes_of_tokens[target[target != self.padding]].sum()
        return loss, torch.cat([sums[:-1], size[None], sums[-1:]])

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Mean loss, accuracy and perplexity over tokens, and bits per byte."""
        loss, correct, likelihood, size, count = sums
        bits = likelihood / math.log(2) / size if size else math.nan
        return {**super().metrics((loss, correct, likelihood, count)), "bits_per_byte": bits}

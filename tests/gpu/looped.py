"""Decoder that applies its blocks repeatedly with the same weights, for tests/gpu/rows.py."""

from typing import Any

from torch import Tensor

from growlab.lab.networks import CausalTransformer


class Looped(CausalTransformer):
    """`CausalTransformer` that applies the sequence of blocks `repeats` times."""

    def __init__(self, *args: Any, repeats: int = 4, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.repeats = repeats

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits of the next token at each position: [B, T, V]."""
        x_BTC = self.project_in(self.dropout(self.embedding(tokens_BT)))
        for _ in range(self.repeats):
            for block in self.blocks:
                x_BTC = block(x_BTC)
        return self.head(self.project_out(self.norm(x_BTC)))

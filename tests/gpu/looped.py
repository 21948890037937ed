"""A decoder that runs its blocks several times over with the same weights: tests/gpu/rows.py."""

from typing import Any

from torch import Tensor

from growlab.lab.networks import CausalTransformer


class Looped(CausalTransformer):
    """A `CausalTransformer` whose blocks are run `repeats` times, one after the other."""

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

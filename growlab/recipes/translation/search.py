"""Beam search over a growing network, by fairseq's own generator."""

from typing import Any

import torch
from torch import Tensor

from growlab.recipes.translation.library import fairseq_module
from growlab.recipes.translation.network import FairseqTransformer


def make_generator(
    network: FairseqTransformer, dictionary: Any, output_factor: float, **settings: Any
) -> Any:
    """Fairseq's `SequenceGenerator` over a network at any widths.

    What a prefix comes to is computed anew for each longer one: the caches of fairseq's layers take a head's width
    for the layers' width over the number of heads, which may differ while a network grows.

    Args:
        network: in eval mode.
        dictionary: of the target.
        output_factor: of the logits.
        settings: of the generator: `beam_size`, `len_penalty`, `max_len_a`, `max_len_b`.
    """
    models = fairseq_module("fairseq.models")

    class Encoder(models.FairseqEncoder):
        def forward(self, src_tokens: Tensor, src_lengths: Tensor | None = None) -> dict[str, list[Tensor]]:
            memory_BSC, real_B11S = network.encode(src_tokens)
            return {"memory": [memory_BSC], "real": [real_B11S]}

        def reorder_encoder_out(
            self, encoder_out: dict[str, list[Tensor]], new_order: Tensor
        ) -> dict[str, list[Tensor]]:
            return {name: [tensor.index_select(0, new_order)] for name, (tensor,) in encoder_out.items()}

    class Decoder(models.FairseqDecoder):
        def forward(
            self, prev_output_tokens: Tensor, encoder_out: dict[str, list[Tensor]]
        ) -> tuple[Tensor, dict]:
            (memory_BSC,), (real_B11S,) = encoder_out["memory"], encoder_out["real"]
            features_BTE = network.decode(prev_output_tokens, memory_BSC, real_B11S)
            # Only the last position is asked for, and no attention weights.
            return network.output(features_BTE[:, -1:]) * output_factor, {"attn": [None]}

        def max_positions(self) -> int:
            # Positions are computed, as many as are wanted.
            return 1 << 20

    model = models.FairseqEncoderDecoderModel(Encoder(dictionary), Decoder(dictionary))
    generator = fairseq_module("fairseq.sequence_generator").SequenceGenerator
    return generator([model.eval()], dictionary, **settings)


@torch.no_grad()
def translations(generator: Any, source_BS: Tensor, padding: int, end: int) -> list[Tensor]:
    """The best hypothesis for each sentence, as numbers."""
    lengths_B = (source_BS.ne(padding) & source_BS.ne(end)).sum(1)
    sample = {"net_input": {"src_tokens": source_BS, "src_lengths": lengths_B}}
    return [hypotheses[0]["tokens"].cpu() for hypotheses in generator.generate([], sample)]

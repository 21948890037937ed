"""Translation with fairseq: its Transformer as a growing network, beam search, BLEU and checkpoints."""

from growlab.recipes.translation.network import FairseqTransformer
from growlab.recipes.translation.objective import Translation

__all__ = ["FairseqTransformer", "Translation"]

"""Translation with fairseq: its Transformer as a network that grows, beam search and BLEU, its checkpoints."""

from growlab.recipes.translation.network import FairseqTransformer
from growlab.recipes.translation.objective import Translation

__all__ = ["FairseqTransformer", "Translation"]

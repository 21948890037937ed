"""Growth in depth: blocks of a network that come in while it trains, each without changing what it computes."""

from growlab.parts.depth.blocks import Blocks
from growlab.parts.depth.deepening import Depth

__all__ = ["Blocks", "Depth"]

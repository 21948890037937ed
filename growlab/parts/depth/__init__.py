"""Growth in depth: blocks of a network that come in while it trains, each without changing what it computes."""

from growlab.parts.depth.blocks import Depth
from growlab.parts.depth.deepening import Deepening

__all__ = ["Deepening", "Depth"]

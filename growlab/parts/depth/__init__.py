"""Growth in depth: insert blocks while a network trains, without changing its function."""

from growlab.parts.depth.blocks import Blocks, Depth

__all__ = ["Blocks", "Depth"]

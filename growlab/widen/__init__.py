"""Widen and deepen trained networks of transformers, torchvision or timm without changing their outputs."""

from growlab.widen.folder import widen_folder
from growlab.widen.sizes import PARTS
from growlab.widen.vision import load_widened, widen_weights

__all__ = ["PARTS", "load_widened", "widen_folder", "widen_weights"]

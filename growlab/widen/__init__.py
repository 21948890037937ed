"""Widen and deepen trained networks of transformers, torchvision or timm without changing their outputs."""

from growlab.widen.distributed import WidenedReader, widen_distributed
from growlab.widen.enlarge import enlarge
from growlab.widen.folder import widen_folder
from growlab.widen.sizes import PARTS
from growlab.widen.upcycle import more_experts, upcycle, upcycle_folder
from growlab.widen.vision import load_widened, widen_weights

__all__ = [
    "PARTS",
    "WidenedReader",
    "enlarge",
    "load_widened",
    "more_experts",
    "upcycle",
    "upcycle_folder",
    "widen_distributed",
    "widen_folder",
    "widen_weights",
]

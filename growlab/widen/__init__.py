"""Widen and deepen trained networks of transformers, torchvision or timm without changing their outputs."""

from typing import TYPE_CHECKING, Any

from growlab.widen.enlarge import enlarge
from growlab.widen.folder import widen_folder
from growlab.widen.sizes import PARTS
from growlab.widen.upcycle import more_experts, upcycle, upcycle_folder
from growlab.widen.vision import load_widened, widen_weights

if TYPE_CHECKING:
    from growlab.widen.distributed import WidenedReader, widen_distributed

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


def __getattr__(name: str) -> Any:
    if name not in ("WidenedReader", "widen_distributed"):
        raise AttributeError(f"module 'growlab.widen' has no attribute {name!r}")
    # Importing torch.distributed.checkpoint takes a second.
    from growlab.widen import distributed

    return getattr(distributed, name)

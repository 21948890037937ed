"""Take a saved model of transformers past its declared size: wider and deeper, computing what it computed."""

from growlab.widen.folder import widen_folder
from growlab.widen.sizes import PARTS

__all__ = ["PARTS", "widen_folder"]

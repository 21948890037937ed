"""Image data: found by what lies in a folder, held as one tensor, augmented a batch at a time; and text."""

from growlab.data.incremental import Incremental
from growlab.data.module import ImageData
from growlab.data.text import TextData

__all__ = ["ImageData", "Incremental", "TextData"]

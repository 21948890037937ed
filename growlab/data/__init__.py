"""Image data: found by what lies in a folder, held as one tensor, augmented a batch at a time; text; one's own."""

from growlab.data.custom import CustomData, Split
from growlab.data.folder import FolderData
from growlab.data.incremental import Incremental
from growlab.data.module import ImageData
from growlab.data.samples import Columns
from growlab.data.text import TextData

__all__ = ["Columns", "CustomData", "FolderData", "ImageData", "Incremental", "Split", "TextData"]

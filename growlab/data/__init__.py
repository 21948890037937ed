"""Image data, found by what lies in a folder; text by characters or tokens; one's own data."""

from growlab.data.custom import CustomData, Split
from growlab.data.folder import FolderData
from growlab.data.incremental import Incremental
from growlab.data.module import ImageData
from growlab.data.samples import Columns
from growlab.data.text import TextData
from growlab.data.tokens import TokenData

__all__ = [
    "Columns",
    "CustomData",
    "FolderData",
    "ImageData",
    "Incremental",
    "Split",
    "TextData",
    "TokenData",
]

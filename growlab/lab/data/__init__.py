"""Image data, found by what lies in a folder; text by characters or tokens; one's own data."""

from growlab.lab.data.arrival import Incremental
from growlab.lab.data.custom import CustomData, Split
from growlab.lab.data.module import ImageData
from growlab.lab.data.run_data import RunData
from growlab.lab.data.samples import Columns
from growlab.lab.data.text import TextData
from growlab.lab.data.tokens import TokenData

__all__ = [
    "Columns",
    "CustomData",
    "ImageData",
    "Incremental",
    "RunData",
    "Split",
    "TextData",
    "TokenData",
]

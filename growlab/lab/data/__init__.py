"""Data modules: images from a folder, text as characters or tokens, and a user's own data."""

from growlab.lab.data.arrival import Incremental
from growlab.lab.data.image_data import ImageData
from growlab.lab.data.run_data import RunData
from growlab.lab.data.text import TextData
from growlab.lab.data.tokens import TokenData
from growlab.lab.data.user_data import Columns, CustomData, Split

__all__ = ["Columns", "CustomData", "ImageData", "Incremental", "RunData", "Split", "TextData", "TokenData"]

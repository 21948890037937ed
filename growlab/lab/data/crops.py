"""Bring images of any size to a fixed one: fitted for evaluation, cropped at random for training."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf, log

import numpy as np
import PIL.Image

from growlab.base.errors import UserError
from growlab.lab.data.arguments import check_numbers
from growlab.lab.data.order import CROP, draws

View = Callable[[PIL.Image.Image], PIL.Image.Image]

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
# So often torchvision draws a crop before it takes the middle of the image.
_ATTEMPTS = 10
# Area, aspect ratio, top and left of each attempt.
_NUMBERS = 4


@dataclass(frozen=True)
class Fit:
    """Scale the shorter side and crop the centre, as torchvision's `Resize` and `CenterCrop` do.

    Attributes:
        size: pixels of the square that comes out; None leaves images as they are.
        resize: pixels of the shorter side before the crop; None = `size`.
        interpolation: one of `INTERPOLATIONS`.

    Raises:
        UserError: a value is impossible; the message names the setting of `data`.
    """

    size: int | None = None
    resize: int | None = None
    interpolation: str = "bicubic"

    def __post_init__(self) -> None:
        check_numbers(1, image_size=self.size, resize_size=self.resize)
        if self.interpolation not in INTERPOLATIONS:
            raise UserError(
                f"data.interpolation={self.interpolation} is unknown; choose one of {', '.join(INTERPOLATIONS)}."
            )
        if self.resize is not None and (self.size is None or self.resize < self.size):
            raise UserError(
                f"data.resize_size={self.resize} must be at least data.image_size, which is {self.size}: it is the "
                "shorter side from whose centre that many pixels are taken."
            )

    def __call__(self, image: PIL.Image.Image) -> PIL.Image.Image:
        """Return the fitted image."""
        if self.size is None:
            return image
        # A slow import, that images of one size need not wait for.
        from torchvision.transforms import InterpolationMode
        from torchvision.transforms.v2 import functional as tvf

        scaled = tvf.resize(image, [self.resize or self.size], InterpolationMode(self.interpolation))
        return tvf.center_crop(scaled, [self.size, self.size])


@dataclass(frozen=True)
class RandomCrop:
    """Crops of random area and aspect ratio, scaled to one size: torchvision's `RandomResizedCrop`.

    The crop of Szegedy et al. 2015 that networks are trained with on ImageNet; the draws are a function of
    (seed, epoch, index of the image) and the image's size alone.

    Attributes:
        scale: least and largest area of a crop relative to the image's.
        ratio: least and largest width over height; its logarithm is uniform.
        interpolation: one of `INTERPOLATIONS`.
    """

    scale: tuple[float, ...] = (0.08, 1.0)
    ratio: tuple[float, ...] = (3 / 4, 4 / 3)
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        for key, values, most in (("crop_scale", self.scale, 1.0), ("crop_ratio", self.ratio, inf)):
            if len(values) != 2 or not 0 < values[0] <= values[1] <= most:
                raise UserError(
                    f"data.{key}={list(values)} must be the least and the largest value, above 0"
                    f"{' and at most 1' if most == 1 else ''}."
                )

    def views(self, indices_B: np.ndarray, seed: int, epoch: int, size: tuple[int, int]) -> list[View]:
        """Return a function for each of these images that crops it and scales the crop to `size` (height, width)."""
        numbers = _ATTEMPTS * _NUMBERS
        counters = indices_B[:, None] * numbers + np.arange(numbers)
        # The upper 53 bits: as many as a float64 holds.
        uniform = (draws(counters.reshape(-1), CROP, seed, epoch) >> np.uint64(11)) * 2.0**-53
        return [
            partial(self._cut, numbers_T4=numbers_T4, size=size)
            for numbers_T4 in uniform.reshape(-1, _ATTEMPTS, _NUMBERS)
        ]

    def box(self, height: int, width: int, numbers_T4: np.ndarray) -> tuple[int, int, int, int]:
        """Return top, left, height and width of a crop.

        Args:
            height: of the image in pixels.
            width: likewise.
            numbers_T4: uniform on [0, 1): area, aspect ratio, top and left of each attempt; the first
                attempt that fits into the image counts, else its middle is taken.
        """
        areas_T = height * width * (self.scale[0] + (self.scale[1] - self.scale[0]) * numbers_T4[:, 0])
        low, high = log(self.ratio[0]), log(self.ratio[1])
        aspects_T = np.exp(low + (high - low) * numbers_T4[:, 1])
        widths_T, heights_T = np.rint(np.sqrt(areas_T * aspects_T)), np.rint(np.sqrt(areas_T / aspects_T))
        fits_T = (widths_T >= 1) & (heights_T >= 1) & (widths_T <= width) & (heights_T <= height)
        if fits_T.any():
            first = int(fits_T.argmax())
            h, w = int(heights_T[first]), int(widths_T[first])
            top, left = numbers_T4[first, 2] * (height - h + 1), numbers_T4[first, 3] * (width - w + 1)
            return int(top), int(left), h, w
        h = min(height, max(1, round(width / self.ratio[0])))
        w = min(width, max(1, round(height * self.ratio[1])))
        return (height - h) // 2, (width - w) // 2, h, w

    def _cut(self, image: PIL.Image.Image, numbers_T4: np.ndarray, size: tuple[int, int]) -> PIL.Image.Image:
        # A slow import, that runs without random crops need not wait for.
        from torchvision.transforms import InterpolationMode
        from torchvision.transforms.v2 import functional as tvf

        box = self.box(image.height, image.width, numbers_T4)
        return tvf.resized_crop(image, *box, list(size), InterpolationMode(self.interpolation))

"""Means and deviations of images, and the normalisation by them.

Shape suffixes: N images, H rows, W columns, C channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from growlab.base.errors import UserError
from growlab.lab.data.augment import Normalisation
from growlab.lab.data.images import ImageArray, Images
from growlab.lab.data.split import first_balanced

# Images of a streamed set from which mean and standard deviation are estimated.
_SAMPLE = 4096


def sample_of(images: Images) -> Tensor:
    """All images that are in memory, or some of each class of a set that is streamed: uint8 [N, H, W, C]."""
    if isinstance(images, ImageArray):
        return images.images_NHWC
    return images.read(first_balanced(images.labels, _SAMPLE))


@dataclass(frozen=True)
class Standardisation:
    """The numbers that images are normalised by.

    Attributes:
        mean: of each channel on the scale 0..1; None = computed from the training images.
        std: likewise.
        standardise: "channel", or "feature": every pixel of every channel by its own mean and deviation over the
            training images, in the place of `mean` and `std`.

    Raises:
        UserError: there is no such way.
    """

    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    standardise: str = "channel"

    def __post_init__(self) -> None:
        if self.standardise not in ("channel", "feature"):
            raise UserError(f"data.standardise must be channel or feature, not {self.standardise}.")

    def of(self, train: Images, channels: int) -> tuple[list[float], list[float], Normalisation]:
        """Mean, deviation and the normalisation of a training set whose images have so many channels.

        Raises:
            UserError: the numbers do not fit the images, or single pixels' statistics of a set that is streamed.
        """
        mean, std = ([float(v) for v in values or ()] for values in (self.mean, self.std))
        if self.mean is None or self.std is None:
            own_mean, own_std = channel_statistics(sample_of(train))
            mean, std = own_mean if self.mean is None else mean, own_std if self.std is None else std
        for key, values in (("mean", mean), ("std", std)):
            if len(values) != channels:
                raise UserError(
                    f"data.{key} has {len(values)} numbers, but the images have {channels} channels."
                )
        if self.std is not None and min(std) <= 0:
            raise UserError(f"data.std={std} must be above 0: images are divided by it.")
        if self.standardise == "channel":
            return mean, std, Normalisation(mean, std)
        if not isinstance(train, ImageArray):
            raise UserError("data.standardise=feature works with images in memory; set data.in_memory=true.")
        return mean, std, Normalisation(*feature_statistics(train.images_NHWC))


def channel_statistics(images_NHWC: Tensor) -> tuple[list[float], list[float]]:
    """Return mean and population standard deviation of each channel on the scale 0..1, of uint8 images."""
    N, H, W, C = images_NHWC.shape
    total_C = torch.zeros(C, dtype=torch.float64)
    squares_C = torch.zeros(C, dtype=torch.float64)
    # 256 * 255^2 < 2^24: the sums over 256 images are whole numbers that float32 holds exactly.
    for images in images_NHWC.split(256):
        x = images.reshape(len(images), -1).float()
        total_C += x.sum(0).double().view(H * W, C).sum(0).cpu()
        squares_C += x.square_().sum(0).double().view(H * W, C).sum(0).cpu()
    mean_C = total_C / (N * H * W)
    std_C = (squares_C / (N * H * W) - mean_C**2).clamp(min=0).sqrt()
    return (mean_C / 255).tolist(), (std_C / 255).tolist()


def feature_statistics(images_NHWC: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and population standard deviation of each pixel and channel, float64 [H, W, C] on the scale 0..1."""
    shape = images_NHWC.shape[1:]
    total, squares = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for images in images_NHWC.split(1024):
        x = images.double()
        total += x.sum(0).cpu()
        squares += x.square_().sum(0).cpu()
    mean = total / len(images_NHWC)
    std = (squares / len(images_NHWC) - mean**2).clamp(min=0).sqrt()
    return (mean / 255).numpy(), (std / 255).numpy()

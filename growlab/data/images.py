"""The two forms of a labelled set of images: decoded in one array, or encoded and read on demand."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from growlab.errors import UserError


@dataclass(frozen=True)
class Frame:
    """What every image of a set is brought to: `height` x `width` pixels of `channels` (1 grey, 3 colour)."""

    height: int
    width: int
    channels: int


@dataclass(frozen=True, eq=False)
class ImageArray:
    """Decoded images.

    Attributes:
        images_NHWC: uint8.
        labels_N: int64, classes counted from 0.
        classes: a name for each class.
    """

    images_NHWC: Tensor
    labels_N: Tensor
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels_N)

    @property
    def labels(self) -> np.ndarray:
        """Labels [N] as numpy."""
        return self.labels_N.cpu().numpy()

    @property
    def frame(self) -> Frame:
        """Size and channels of the images."""
        return Frame(*self.images_NHWC.shape[1:])

    def select(self, positions: np.ndarray) -> "ImageArray":
        """Return the images at these positions, in that order."""
        if len(positions) == len(self) and np.array_equal(positions, np.arange(len(self))):
            return self
        index = torch.from_numpy(positions).to(self.labels_N.device)
        return replace(
            self,
            images_NHWC=self.images_NHWC.index_select(0, index),
            labels_N=self.labels_N.index_select(0, index),
        )

    def read(self, positions: np.ndarray) -> Tensor:
        """Return the images at these positions, uint8 [B, H, W, C]."""
        return self.images_NHWC.index_select(0, torch.from_numpy(positions).to(self.images_NHWC.device))

    def to(self, device: torch.device | str) -> "ImageArray":
        """Return the set on another device (itself if it is there already)."""
        return replace(self, images_NHWC=self.images_NHWC.to(device), labels_N=self.labels_N.to(device))


class Payloads(Protocol):
    """Encoded images, found by position."""

    def __len__(self) -> int: ...

    def read(self, position: int) -> bytes:
        """Return the file's bytes."""

    def describe(self, position: int) -> str:
        """Say where the image comes from, for an error message."""

    def fingerprint(self) -> str:
        """Return a text that changes when the images do."""


@dataclass(frozen=True, eq=False)
class EncodedImages:
    """Images as JPEG, PNG and the like, decoded when read.

    Attributes:
        payloads: the encoded images of the whole set.
        labels: int64 [N], of the selected images.
        classes: a name for each class.
        positions: int64 [N], where the selected images lie in `payloads`.
        image_size: pixels of the square to which images are brought (shorter side scaled, centre cropped);
            None = as they are.
        frame_of: images whose frame this set shares (a test set is read as its training set); None = its own.
    """

    payloads: Payloads
    labels: np.ndarray
    classes: tuple[str, ...]
    positions: np.ndarray
    image_size: int | None = None
    frame_of: "EncodedImages | None" = None

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def frame(self) -> Frame:
        """Size of the first image (or `image_size`); three channels if any of a few images is coloured."""
        if self.frame_of is not None:
            return self.frame_of.frame
        spread = np.unique(np.linspace(0, len(self.payloads) - 1, 16).astype(int))
        seen = [self._open(int(position)) for position in spread]
        width, height = (self.image_size, self.image_size) if self.image_size else seen[0].size
        grey = all(image.mode in ("1", "L", "LA") for image in seen)
        return Frame(height, width, 1 if grey else 3)

    def select(self, positions: np.ndarray) -> "EncodedImages":
        """Return the images at these positions, in that order."""
        return replace(self, labels=self.labels[positions], positions=self.positions[positions])

    def everything(self) -> "EncodedImages":
        """Return the set of all payloads, without labels: what a cache of decoded images holds."""
        all_positions = np.arange(len(self.payloads))
        return replace(self, labels=np.zeros_like(all_positions), positions=all_positions)

    def read(self, positions: np.ndarray) -> Tensor:
        """Decode the images at these positions into uint8 [B, H, W, C].

        Raises:
            UserError: a file cannot be read or is no image, or images differ in size.
        """
        frame = self.frame
        images_BHWC = np.empty((len(positions), frame.height, frame.width, frame.channels), dtype=np.uint8)
        for image_HWC, position in zip(images_BHWC, self.positions[positions], strict=True):
            image_HWC[:] = self._decode(int(position), frame)
        return torch.from_numpy(images_BHWC)

    def _open(self, position: int) -> PIL.Image.Image:
        try:
            image = PIL.Image.open(io.BytesIO(self.payloads.read(position)))
            image.load()
        except UserError:
            raise
        except Exception as error:  # decoders of damaged files raise almost anything
            # The message of UnidentifiedImageError is an address in memory.
            unknown = isinstance(error, PIL.UnidentifiedImageError)
            reason = "no known image format" if unknown else str(error) or type(error).__name__
            where = self.payloads.describe(position)
            raise UserError(f"cannot read the image {where} ({reason}); repair it or take it out.") from error
        return image

    def _decode(self, position: int, frame: Frame) -> np.ndarray:
        image = self._open(position)
        if image.mode.startswith(("I", "F")):
            raise UserError(
                f"the image {self.payloads.describe(position)} has more than 8 bits a channel; "
                "convert it to 8 bits."
            )
        image = image.convert("L" if frame.channels == 1 else "RGB")
        if self.image_size:
            image = _fit(image, self.image_size)
        if image.size != (frame.width, frame.height):
            raise UserError(
                f"images differ in size: {self.payloads.describe(position)} has {image.width}x{image.height} "
                f"pixels, the first one {frame.width}x{frame.height}; bring all to one size with "
                "data.image_size=N."
            )
        return np.asarray(image).reshape(frame.height, frame.width, frame.channels)


def _fit(image: PIL.Image.Image, size: int) -> PIL.Image.Image:
    scale = size / min(image.size)
    if scale != 1:
        image = image.resize((max(size, round(image.width * scale)), max(size, round(image.height * scale))))
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((left, top, left + size, top + size))


def class_names(labels: Sequence[np.ndarray], names: Sequence[str] | None, where: str) -> tuple[str, ...]:
    """Return the names of the classes, or their numbers where none are given.

    Raises:
        UserError: a label is not among the classes.
    """
    low = min(int(part.min()) for part in labels)
    high = max(int(part.max()) for part in labels)
    names = tuple(names) if names else tuple(str(label) for label in range(high + 1))
    if low < 0 or high >= len(names):
        raise UserError(
            f"the labels in {where} run from {low} to {high}, outside its {len(names)} classes "
            f"0..{len(names) - 1}; leave out or relabel those images."
        )
    return names

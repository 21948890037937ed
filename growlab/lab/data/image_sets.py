"""The two forms of a labelled set of images: decoded in one array, or encoded and read on demand."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from growlab.base.errors import UserError
from growlab.lab.data.crops import Fit, View

# As many classes are let pass although most have no image: labels may be of a part of a larger set.
_MOST_CLASSES = 100_000


@dataclass(frozen=True)
class Frame:
    """The form of every image of a set: `height` x `width` pixels of `channels` (1 grey, 3 colour)."""

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

    def fitted(self, fit: Fit) -> "ImageArray":
        """Return the images brought to one size; themselves if the fit leaves images as they are."""
        if fit.size is None:
            return self
        pictures = (PIL.Image.fromarray(image.squeeze(-1)) for image in self.images_NHWC.cpu().numpy())
        size = (len(self), fit.size, fit.size, self.frame.channels)
        seen = np.empty(size, dtype=np.uint8)
        for number, picture in enumerate(pictures):
            seen[number] = np.asarray(fit(picture)).reshape(size[1:])
        return replace(self, images_NHWC=torch.from_numpy(seen).to(self.images_NHWC.device))

    def read(
        self,
        positions: np.ndarray,
        views: Sequence[View] | None = None,
        contents: Sequence[bytes] | None = None,
    ) -> Tensor:
        """Return the images at these positions, uint8 [B, H, W, C]; see `EncodedImages.read`."""
        images = self.images_NHWC.index_select(0, torch.from_numpy(positions).to(self.images_NHWC.device))
        if views is None:
            return images
        pictures = [PIL.Image.fromarray(image.squeeze(-1)) for image in images.cpu().numpy()]
        seen = [np.asarray(view(picture)) for view, picture in zip(views, pictures, strict=True)]
        return torch.from_numpy(np.stack(seen).reshape(len(seen), *astuple(self.frame))).to(images.device)

    def to(self, device: torch.device | str) -> "ImageArray":
        """Return the set on another device (itself if it is there already)."""
        return replace(self, images_NHWC=self.images_NHWC.to(device), labels_N=self.labels_N.to(device))


class Payloads(Protocol):
    """Encoded images, found by position.

    Attributes:
        blocks: row groups to read images by, with `starts`, the position of each one's first image, and `read(block)`,
            its images; None where each can be read alone as quickly.
    """

    blocks: Any

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
        fit: how images are brought to one size.
        frame_of: images whose frame this set shares (a test set is read as its training set); None = its own.
    """

    payloads: Payloads
    labels: np.ndarray
    classes: tuple[str, ...]
    positions: np.ndarray
    fit: Fit
    frame_of: "EncodedImages | None" = None

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def frame(self) -> Frame:
        """Size of the first image (or of `fit`); three channels if any of a few images is coloured."""
        if self.frame_of is not None:
            return self.frame_of.frame
        seen = self._seen()
        width, height = (self.fit.size, self.fit.size) if self.fit.size else seen[0].size
        grey = all(image.mode in ("1", "L", "LA") or _is_deep(image) for image in seen)
        return Frame(height, width, 1 if grey else 3)

    @cached_property
    def levels(self) -> tuple[float, float] | None:
        """Values that become 0 and 255 of images with more than 8 bits a channel; None without such images.

        Of whole numbers 0 and what as many bits hold as a few images use (4095 of a microscope's 12); of real numbers
        0 and 1 or 0 and 255 where these enclose them; else the least and the largest of a few images.
        """
        if self.frame_of is not None:
            return self.frame_of.levels
        seen = [np.asarray(image) for image in self._seen() if _is_deep(image)]
        values = [pixels[np.isfinite(pixels)] for pixels in seen]
        values = [finite for finite in values if finite.size]
        if not seen or not values:
            return (0.0, 65535.0) if seen else None
        low, high = float(min(map(np.min, values))), float(max(map(np.max, values)))
        if all(np.issubdtype(pixels.dtype, np.integer) for pixels in seen) and low >= 0:
            return 0.0, float(2 ** max(8, int(high).bit_length()) - 1)
        return next(
            (ends for ends in ((0.0, 1.0), (0.0, 255.0)) if ends[0] <= low and high <= ends[1]), (low, high)
        )

    def _seen(self) -> list[PIL.Image.Image]:
        """A few images, from all over the set."""
        spread = np.unique(np.linspace(0, len(self.payloads) - 1, 16).astype(int))
        return [self._open(int(position)) for position in spread]

    def select(self, positions: np.ndarray) -> "EncodedImages":
        """Return the images at these positions, in that order."""
        return replace(self, labels=self.labels[positions], positions=self.positions[positions])

    def everything(self) -> "EncodedImages":
        """Return the set of all payloads, without labels, for the cache of decoded images."""
        all_positions = np.arange(len(self.payloads))
        return replace(self, labels=np.zeros_like(all_positions), positions=all_positions)

    @property
    def blocks_N(self) -> np.ndarray | None:
        """Block that each selected image lies in, where they are read in blocks."""
        if self.payloads.blocks is None:
            return None
        return np.searchsorted(self.payloads.blocks.starts, self.positions, side="right") - 1

    def contents(self, batches: Sequence[np.ndarray]) -> Iterator[list[bytes]]:
        """Yield the encoded images of each batch, reading each block once, kept from first to last use.

        For images in blocks only.

        Raises:
            UserError: a file cannot be read.
        """
        blocks, blocks_N = self.payloads.blocks, self.blocks_N
        assert blocks is not None and blocks_N is not None
        last_use = {block: step for step, batch in enumerate(batches) for block in blocks_N[batch].tolist()}
        kept: dict[int, Sequence[bytes]] = {}
        for step, batch in enumerate(batches):
            blocks_B = blocks_N[batch].tolist()
            for block in blocks_B:
                if block not in kept:
                    kept[block] = blocks.read(block)
            rows_B = (self.positions[batch] - blocks.starts[blocks_B]).tolist()
            yield [kept[block][row] for block, row in zip(blocks_B, rows_B, strict=True)]
            for block in set(blocks_B):
                if last_use[block] == step:
                    del kept[block]

    def read(
        self,
        positions: np.ndarray,
        views: Sequence[View] | None = None,
        contents: Sequence[bytes] | None = None,
    ) -> Tensor:
        """Decode the images at these positions into uint8 [B, H, W, C].

        Args:
            positions: int64 [B].
            views: functions that bring each image to the frame's size; None = `fit`.
            contents: the encoded images, if they have been read already.

        Raises:
            UserError: a file cannot be read or is no image, or images differ in size.
        """
        frame = self.frame
        images_BHWC = np.empty((len(positions), frame.height, frame.width, frame.channels), dtype=np.uint8)
        for number, position in enumerate(self.positions[positions].tolist()):
            view = views[number] if views is not None else self.fit
            content = contents[number] if contents is not None else None
            images_BHWC[number] = self._decode(position, frame, view, content)
        return torch.from_numpy(images_BHWC)

    def is_readable(self, position: int) -> bool:
        """Return True if the image at this position of all payloads can be decoded."""
        try:
            self._plain(position, self._open(position), 3, (0.0, 1.0))
        except UserError:
            return False
        return True

    def _open(self, position: int, content: bytes | None = None) -> PIL.Image.Image:
        try:
            image = PIL.Image.open(io.BytesIO(self.payloads.read(position) if content is None else content))
            image.load()
        except UserError:
            raise
        except Exception as error:  # decoders of damaged files raise almost anything
            # The message of UnidentifiedImageError is an address in memory.
            unknown = isinstance(error, PIL.UnidentifiedImageError)
            reason = "no known image format" if unknown else str(error) or type(error).__name__
            where = self.payloads.describe(position)
            raise UserError(
                f"cannot read the image {where} ({reason}); repair it, take it out, or leave such images "
                "out with data=folder data.on_error=skip."
            ) from error
        return image

    def _decode(self, position: int, frame: Frame, view: View, content: bytes | None = None) -> np.ndarray:
        image = self._open(position, content)
        image = view(self._plain(position, image, frame.channels, self.levels if _is_deep(image) else None))
        if image.size != (frame.width, frame.height):
            raise UserError(
                f"images differ in size: {self.payloads.describe(position)} has {image.width}x{image.height} "
                f"pixels, the first one {frame.width}x{frame.height}; bring all to one size with "
                "data.image_size=N."
            )
        return np.asarray(image).reshape(frame.height, frame.width, frame.channels)

    def _plain(
        self, position: int, image: PIL.Image.Image, channels: int, levels: tuple[float, float] | None
    ) -> PIL.Image.Image:
        """An image of 8 bits, grey or in three colours."""
        try:
            if _is_deep(image):
                # The few images that decide the levels had 8 bits: assume the full range of 16 bits.
                low, high = levels or (0.0, 1.0 if image.mode == "F" else 65535.0)
                pixels = np.nan_to_num(np.asarray(image, dtype=np.float64), nan=low, posinf=high, neginf=low)
                scaled = np.clip((pixels - low) * (255 / max(high - low, 1e-30)), 0, 255)
                image = PIL.Image.fromarray(np.rint(scaled).astype(np.uint8))
            if image.mode == "P" and "transparency" in image.info:
                # Straight to RGB, Pillow warns of some of them.
                image = image.convert("RGBA")
            return image.convert("L" if channels == 1 else "RGB")
        except ValueError as error:
            raise UserError(
                f"cannot read the image {self.payloads.describe(position)} (its colours, {image.mode}, are not known); "
                "convert it to RGB, or leave such images out with data=folder data.on_error=skip."
            ) from error


def _is_deep(image: PIL.Image.Image) -> bool:
    """True for an image of more than 8 bits a channel: integers of 16 or 32 bits, or real numbers."""
    return image.mode.startswith(("I", "F"))


def class_names(labels: Sequence[np.ndarray], names: Sequence[str] | None, where: str) -> tuple[str, ...]:
    """Return the names of the classes, or their numbers where none are given.

    Raises:
        UserError: a label is not among the classes.
    """
    low = min(int(part.min()) for part in labels)
    high = max(int(part.max()) for part in labels)
    if not names and high >= max(_MOST_CLASSES, sum(map(len, labels))):
        raise UserError(
            f"the labels in {where} run up to {high}, which would be {high + 1} classes, more than there are images; "
            "number the classes from 0."
        )
    names = tuple(names) if names else tuple(str(label) for label in range(high + 1))
    if low < 0 or high >= len(names):
        raise UserError(
            f"the labels in {where} run from {low} to {high}, outside its {len(names)} classes "
            f"0..{len(names) - 1}; leave out or relabel those images."
        )
    return names


Images = ImageArray | EncodedImages


def channel_statistics(images_NHWC: Tensor) -> tuple[list[float], list[float]]:
    """Return mean and population standard deviation of each channel on the scale 0..1, of uint8 images."""
    N, H, W, C = images_NHWC.shape
    total_C = torch.zeros(C, dtype=torch.float64)
    squares_C = torch.zeros(C, dtype=torch.float64)
    # 256 * 255^2 < 2^24: the sums over 256 images are whole numbers that float32 represents exactly.
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

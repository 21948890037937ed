"""Labelled images, decoded in one array or decoded on demand; crops, random shifts and normalisation.

Shape suffixes: N, B images, H rows, W columns, C channels.
"""

import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal, NamedTuple

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from growlab.base.errors import UserError
from growlab.base.settings import not_none, whole
from growlab.lab.data.cache import cached_array, is_cached
from growlab.lab.data.order import AUGMENT, CROP, draws

View = Callable[[PIL.Image.Image], PIL.Image.Image]

Interpolation = Literal["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"]
# With fewer images, decoding is as fast as reading a cache.
_WORTH_CACHING = 2000


@dataclass(frozen=True)
class Fit:
    """Scale the shorter side to `resize` pixels and crop the centre, like torchvision's `Resize` and `CenterCrop`."""

    size: int | None = None
    resize: int | None = None
    interpolation: Interpolation = "bicubic"

    def __post_init__(self) -> None:
        whole(1, **not_none(image_size=self.size, resize_size=self.resize))
        if self.resize is not None and (self.size is None or self.resize < self.size):
            raise UserError(
                f"data.resize_size={self.resize} must be at least data.image_size, which is {self.size}: the image is "
                "cropped from one with that shorter side."
            )

    def __call__(self, image: PIL.Image.Image) -> PIL.Image.Image:
        """Return the fitted image."""
        if self.size is None:
            return image
        from torchvision.transforms import InterpolationMode
        from torchvision.transforms.v2 import functional as tvf

        scaled = tvf.resize(image, [self.resize or self.size], InterpolationMode(self.interpolation))
        return tvf.center_crop(scaled, [self.size, self.size])


@dataclass(frozen=True)
class RandomCrop:
    """torchvision's `RandomResizedCrop`, seeded by (seed, epoch, index of the image).

    The usual training crop on ImageNet (Szegedy et al. 2015).
    """

    scale: tuple[float, ...] = (0.08, 1.0)
    ratio: tuple[float, ...] = (3 / 4, 4 / 3)
    interpolation: Interpolation = "bilinear"

    def views(self, indices_B: np.ndarray, seed: int, epoch: int, size: tuple[int, int]) -> list[View]:
        """Return one function per image that crops it and scales the crop to `size` (height, width)."""
        from torchvision.transforms import InterpolationMode, v2

        crop = v2.RandomResizedCrop(size, self.scale, self.ratio, InterpolationMode(self.interpolation))
        return [partial(_seeded, crop, drawn) for drawn in draws(indices_B, CROP, seed, epoch).tolist()]


def _seeded(transform: View, seed: int, image: PIL.Image.Image) -> PIL.Image.Image:
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed >> 1)
        return transform(image)


@dataclass(frozen=True)
class Augmentation:
    """Random shifts of up to `shift` pixels with zero padding, and mirroring with probability 1/2.

    Equals torchvision's `RandomCrop(size, padding=shift)` followed by `RandomHorizontalFlip()` on the raw image, as in
    He et al. 2016 on CIFAR. The draws are a function of (seed, epoch, index of the image) alone.
    """

    shift: int = 0
    mirror: bool = False

    def __post_init__(self) -> None:
        whole(0, shift=self.shift)

    def draw(self, indices_B: np.ndarray, seed: int, epoch: int) -> Tensor:
        """Draw the crops of these images.

        Returns:
            int64 [3, B]: top and left of the crop in the padded image (0 to 2 * shift), and 1 where mirrored.
        """
        bits_B = draws(indices_B, AUGMENT, seed, epoch)
        positions = np.uint64(2 * self.shift + 1)
        word = np.uint64(0xFFFFF)
        # Twenty bits each, scaled instead of taken modulo, so that positions are equally likely.
        top_B = ((bits_B >> np.uint64(1)) & word) * positions >> np.uint64(20)
        left_B = ((bits_B >> np.uint64(21)) & word) * positions >> np.uint64(20)
        mirrored_B = (bits_B & np.uint64(1)) * np.uint64(self.mirror)
        return torch.from_numpy(np.stack([top_B, left_B, mirrored_B]).astype(np.int64))

    def apply(self, images_BHWC: Tensor, draw_3B: Tensor) -> Tensor:
        """Return the shifted and mirrored images, with the same shape, dtype and device."""
        if not self.shift and not self.mirror:
            return images_BHWC
        B, H, W, C = images_BHWC.shape
        top_B, left_B, mirrored_B = draw_3B
        s = self.shift
        padded = images_BHWC.new_zeros(B, H + 2 * s, W + 2 * s, C)
        padded[:, s : s + H, s : s + W] = images_BHWC
        device = images_BHWC.device
        rows_BH = top_B[:, None] + torch.arange(H, device=device)
        columns_W = torch.arange(W, device=device)
        columns_BW = left_B[:, None] + torch.where(mirrored_B[:, None] == 1, W - 1 - columns_W, columns_W)
        rows_BH = rows_BH + (H + 2 * s) * torch.arange(B, device=device)[:, None]
        # A single gather of whole pixels both shifts and mirrors.
        pixels_BHW = rows_BH[:, :, None] * (W + 2 * s) + columns_BW[:, None, :]
        return padded.view(-1, C).index_select(0, pixels_BHW.view(-1)).view(B, H, W, C)


class Normalisation:
    """(image / 255 - mean) / std for each channel, from uint8 [B, H, W, C] to float32 [B, C, H, W].

    Args:
        mean: per channel [C], or per pixel and channel [H, W, C], on the scale 0..1.
        std: likewise; 0 (a constant channel or pixel) is replaced by 1.
    """

    def __init__(self, mean: Sequence[float] | np.ndarray, std: Sequence[float] | np.ndarray) -> None:
        deviation = np.array(std)
        scale = 1 / (255 * np.where(deviation == 0, 1.0, deviation))
        offset = -255 * np.array(mean) * scale
        self._scale = torch.tensor(scale, dtype=torch.float32)
        self._offset = torch.tensor(offset, dtype=torch.float32)
        self._rows: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def apply(self, images_BHWC: Tensor, channels_last: bool = True) -> Tensor:
        """Return the normalised images; `channels_last` is their memory layout."""
        B, H, W, C = images_BHWC.shape
        key = (W, images_BHWC.device)
        if key not in self._rows:
            # Repeat along a row for a long inner loop: ten times as fast as broadcasting three numbers.
            both = (self._scale, self._offset)
            rows = [t.repeat(W) if t.dim() == 1 else t.reshape(len(t), W * C) for t in both]
            self._rows[key] = (rows[0].to(images_BHWC.device), rows[1].to(images_BHWC.device))
        scale, offset = self._rows[key]
        x_BHWC = images_BHWC.reshape(B, H, W * C).float().mul_(scale).add_(offset).view(B, H, W, C)
        x_BCHW = x_BHWC.permute(0, 3, 1, 2)
        return x_BCHW if channels_last else x_BCHW.contiguous()


class Frame(NamedTuple):
    """Size of every image of a set: `height` x `width` pixels of `channels` (1 grey, 3 colour)."""

    height: int
    width: int
    channels: int


@dataclass(frozen=True, eq=False)
class ImageArray:
    """Decoded images, uint8 [N, H, W, C], their labels, int64 [N], and the class names."""

    images_NHWC: Tensor
    labels_N: Tensor
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels_N)

    @property
    def labels(self) -> np.ndarray:
        """Labels [N] as a numpy array."""
        return self.labels_N.cpu().numpy()

    @property
    def frame(self) -> Frame:
        """Size and channels of the images."""
        return Frame(*self.images_NHWC.shape[1:])

    def select(self, positions: np.ndarray) -> "ImageArray":
        """Return the images at these positions, in that order."""
        if np.array_equal(positions, np.arange(len(self))):
            return self
        index = torch.from_numpy(positions).to(self.labels_N.device)
        return replace(self, images_NHWC=self.images_NHWC[index], labels_N=self.labels_N[index])

    def read(self, positions: np.ndarray, views: Sequence[View] | None = None) -> Tensor:
        """Return the images at these positions, uint8 [B, H, W, C]; see `EncodedImages.read`."""
        images = self.images_NHWC.index_select(0, torch.from_numpy(positions).to(self.images_NHWC.device))
        if views is None:
            return images
        pictures = (PIL.Image.fromarray(image.squeeze(-1)) for image in images.cpu().numpy())
        viewed = np.stack([np.asarray(view(picture)) for view, picture in zip(views, pictures, strict=True)])
        return torch.from_numpy(viewed.reshape(*viewed.shape[:3], -1)).to(images.device)

    def to(self, device: torch.device | str) -> "ImageArray":
        """Return the set on a device."""
        return replace(self, images_NHWC=self.images_NHWC.to(device), labels_N=self.labels_N.to(device))


class Source(ABC):
    """Encoded images by position."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, position: int) -> bytes:
        """Return the file's bytes."""

    @abstractmethod
    def describe(self, position: int) -> str:
        """Name the file for error messages."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a string that changes when the images do."""


@dataclass(frozen=True, eq=False)
class EncodedImages:
    """Images in JPEG, PNG or similar, decoded when read.

    Attributes:
        source: the encoded images of the whole set.
        positions: indices of the selected images in `source`, int64 [N].
        frame_of: set whose frame and levels this one uses (a test set is read like its training set); None = its own.
    """

    source: Source
    labels: np.ndarray
    classes: tuple[str, ...]
    positions: np.ndarray
    fit: Fit
    frame_of: "EncodedImages | None" = None

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def frame(self) -> Frame:
        """Size of the first image (or of `fit`); three channels if any of a few sampled images has colours."""
        if self.frame_of is not None:
            return self.frame_of.frame
        images = self._sampled()
        width, height = (self.fit.size, self.fit.size) if self.fit.size else images[0].size
        grey = all(image.mode in ("1", "L", "LA") or _is_deep(image) for image in images)
        return Frame(height, width, 1 if grey else 3)

    @cached_property
    def levels(self) -> tuple[float, float] | None:
        """Values mapped to 0 and 255 in images of more than 8 bits a channel; None without such images.

        Decided by a few sampled images. For integers: 0 and the largest number of as many bits as these use, such as
        4095 for a 12-bit microscope. For floats: 0 and 1, or 0 and 255, if these enclose the values; else their minimum
        and maximum.
        """
        if self.frame_of is not None:
            return self.frame_of.levels
        images = [np.asarray(image) for image in self._sampled() if _is_deep(image)]
        values = [finite for pixels in images if (finite := pixels[np.isfinite(pixels)]).size]
        if not values:
            return (0.0, 65535.0) if images else None
        low, high = float(min(map(np.min, values))), float(max(map(np.max, values)))
        if all(np.issubdtype(pixels.dtype, np.integer) for pixels in images) and low >= 0:
            return 0.0, float(2 ** max(8, int(high).bit_length()) - 1)
        return next(((0.0, end) for end in (1.0, 255.0) if low >= 0 and high <= end), (low, high))

    def _sampled(self) -> list[PIL.Image.Image]:
        """Up to 16 images, evenly spaced over the set."""
        return [self._open(place) for place in np.unique(np.linspace(0, len(self.source) - 1, 16, dtype=int)).tolist()]

    def select(self, positions: np.ndarray) -> "EncodedImages":
        """Return the images at these positions, in that order."""
        return replace(self, labels=self.labels[positions], positions=self.positions[positions])

    def read(self, positions: np.ndarray, views: Sequence[View] | None = None) -> Tensor:
        """Decode images into uint8 [B, H, W, C]; each image's view, or else `fit`, brings it to the frame's size."""
        frame = self.frame
        images_BHWC = np.empty((len(positions), *frame), dtype=np.uint8)
        for number, position in enumerate(self.positions[positions].tolist()):
            image = self._open(position)
            levels = self.levels if _is_deep(image) else None
            view = self.fit if views is None else views[number]
            image = view(self._plain(position, image, frame.channels, levels))
            if image.size != (frame.width, frame.height):
                raise UserError(
                    f"images differ in size: {self.source.describe(position)} has {image.width}x{image.height} "
                    f"pixels, the first one {frame.width}x{frame.height}; resize all with data.image_size=N."
                )
            images_BHWC[number] = np.asarray(image).reshape(frame)
        return torch.from_numpy(images_BHWC)

    def damaged(self) -> list[int]:
        """Return the positions of images that cannot be decoded; the list is cached."""

        def is_damaged(position: int) -> bool:
            try:
                self._plain(position, self._open(position), 3, (0.0, 1.0))
            except UserError:
                return True
            return False

        def found() -> np.ndarray:
            # Threads suffice: PIL releases the GIL while it decodes.
            with ThreadPoolExecutor(max_workers=8) as pool:
                return np.flatnonzero(list(pool.map(is_damaged, range(len(self.source)))))

        return cached_array(f"damaged\n{self.source.fingerprint()}", found).tolist()

    def decoded(self) -> ImageArray:
        """Return the decoded images, from the cache if possible.

        The whole set is decoded once and cached, unless it is small or only a small part of it is selected.
        """
        total, labels_N = len(self.source), torch.from_numpy(self.labels)
        if total >= _WORTH_CACHING:
            everything = np.arange(total)
            whole = replace(self, labels=np.zeros_like(everything), positions=everything)
            levels = "" if self.levels is None else f" {self.levels}"
            key = f"{self.source.fingerprint()}\n{self.fit} {self.frame}{levels}"
            if len(self) >= total // 4 or is_cached(key):
                array = cached_array(key, lambda: whole._read_all().numpy())
                cached = ImageArray(torch.from_numpy(array), torch.from_numpy(everything), self.classes)
                return replace(cached.select(self.positions), labels_N=labels_N)
        return ImageArray(self._read_all(), labels_N, self.classes)

    def _read_all(self) -> Tensor:
        chunks = np.array_split(np.arange(len(self)), max(1, len(self) // 512))
        # Read the first chunk before the threads start: it opens the shared files.
        parts = [self.read(chunks[0])]
        with ThreadPoolExecutor(max_workers=8) as pool:
            return torch.cat([*parts, *pool.map(self.read, chunks[1:])])

    def _open(self, position: int) -> PIL.Image.Image:
        try:
            image = PIL.Image.open(io.BytesIO(self.source.read(position)))
            image.load()
        except UserError:
            raise
        except Exception as error:  # decoders raise almost anything on damaged files
            # UnidentifiedImageError's message has only an address in memory.
            unknown = isinstance(error, PIL.UnidentifiedImageError)
            raise self._unreadable(position, "no known image format" if unknown else str(error)) from error
        return image

    def _plain(
        self, position: int, image: PIL.Image.Image, channels: int, levels: tuple[float, float] | None
    ) -> PIL.Image.Image:
        """Convert an image to 8 bits, grey or RGB."""
        try:
            if _is_deep(image):
                # No sampled image had more than 8 bits: assume the full range.
                low, high = levels or (0.0, 1.0 if image.mode == "F" else 65535.0)
                pixels = np.nan_to_num(np.asarray(image, dtype=np.float64), nan=low, posinf=high, neginf=low)
                scaled = np.clip((pixels - low) * (255 / max(high - low, 1e-30)), 0, 255)
                image = PIL.Image.fromarray(np.rint(scaled).astype(np.uint8))
            if image.mode == "P" and "transparency" in image.info:
                # Pillow warns if some of these are converted directly to RGB.
                image = image.convert("RGBA")
            return image.convert("L" if channels == 1 else "RGB")
        except ValueError as error:
            raise self._unreadable(position, f"unknown colour mode {image.mode}") from error

    def _unreadable(self, position: int, reason: str) -> UserError:
        return UserError(
            f"cannot read the image {self.source.describe(position)} ({reason}); repair or remove it, or skip such "
            "images with data=folder data.on_error=skip."
        )


Images = ImageArray | EncodedImages


def _is_deep(image: PIL.Image.Image) -> bool:
    """True for more than 8 bits a channel: integers of 16 or 32 bits, or floats."""
    return image.mode.startswith(("I", "F"))


def image_statistics(images_NHWC: Tensor, of_each: str = "channel") -> tuple[np.ndarray, np.ndarray]:
    """Mean and population standard deviation on the scale 0..1 of each channel, [C], or each "feature", [H, W, C]."""
    total, squares = torch.zeros(2, *images_NHWC.shape[1:], dtype=torch.float64)
    # 256 * 255^2 < 2^24: sums over 256 images are integers that float32 represents exactly.
    for images in images_NHWC.split(256):
        x = images.float()
        total += x.sum(0).double().cpu()
        squares += x.square_().sum(0).double().cpu()
    count = len(images_NHWC)
    if of_each == "channel":
        count *= total[..., 0].numel()
        total, squares = total.sum((0, 1)), squares.sum((0, 1))
    mean = total / count
    std = (squares / count - mean**2).clamp(min=0).sqrt()
    return (mean / 255).numpy(), (std / 255).numpy()

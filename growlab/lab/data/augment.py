"""Shift, mirror and normalise a batch of images at once.

Shape suffixes: B images, H rows, W columns, C channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from growlab.base.settings import whole
from growlab.lab.data.order import AUGMENT, draws


@dataclass(frozen=True)
class Augmentation:
    """Random shifts of up to `shift` pixels with zero padding, and mirroring with chance 1/2.

    The same as torchvision's `RandomCrop(size, padding=shift)` followed by `RandomHorizontalFlip()` on the raw image,
    as He et al. 2016 train on CIFAR; the draws are a function of (seed, epoch, index of the image) alone.
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
        # Twenty bits each; scaled, not a remainder, so that positions are equally likely.
        top_B = ((bits_B >> np.uint64(1)) & word) * positions >> np.uint64(20)
        left_B = ((bits_B >> np.uint64(21)) & word) * positions >> np.uint64(20)
        mirrored_B = (bits_B & np.uint64(1)) * np.uint64(self.mirror)
        return torch.from_numpy(np.stack([top_B, left_B, mirrored_B]).astype(np.int64))

    def apply(self, images_BHWC: Tensor, draw_3B: Tensor) -> Tensor:
        """Return the shifted and mirrored images, same shape, type and device."""
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
        # One gather of whole pixels does shift and mirror together.
        pixels_BHW = rows_BH[:, :, None] * (W + 2 * s) + columns_BW[:, None, :]
        return padded.view(-1, C).index_select(0, pixels_BHW.view(-1)).view(B, H, W, C)


class Normalisation:
    """(image / 255 - mean) / std for each channel, from uint8 [B, H, W, C] to float32 [B, C, H, W].

    Args:
        mean: one number a channel, or one a pixel and channel [H, W, C], on the scale 0..1.
        std: likewise; 0 (a constant channel or pixel) counts as 1.
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
            # Repeated along a row to make the inner loop long: ten times as fast as three numbers.
            both = (self._scale, self._offset)
            rows = [t.repeat(W) if t.dim() == 1 else t.reshape(len(t), W * C) for t in both]
            self._rows[key] = (rows[0].to(images_BHWC.device), rows[1].to(images_BHWC.device))
        scale, offset = self._rows[key]
        x_BHWC = images_BHWC.reshape(B, H, W * C).float().mul_(scale).add_(offset).view(B, H, W, C)
        x_BCHW = x_BHWC.permute(0, 3, 1, 2)
        return x_BCHW if channels_last else x_BCHW.contiguous()

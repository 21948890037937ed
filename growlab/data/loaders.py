"""What the trainer iterates over: finished batches of one epoch, on one rank."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from growlab.data.augment import Augmentation, Normalisation
from growlab.data.images import EncodedImages, ImageArray
from growlab.data.order import ORDER, evaluation_batches, permutation, training_batches


@dataclass
class EpochPlan:
    """Which images make the batches of an epoch on this rank, and how each is shifted and mirrored.

    Attributes:
        num_images: images in the set.
        batch_size: global batch size.
        seed: order and augmentation are functions of seed and epoch.
        epoch: counted from 0.
        augmentation: None = evaluation: in order, every image once over all ranks.
        rank: this process.
        world_size: number of processes.
    """

    num_images: int
    batch_size: int
    seed: int
    epoch: int = 0
    augmentation: Augmentation | None = None
    rank: int = 0
    world_size: int = 1

    def __len__(self) -> int:
        if self.augmentation is None:
            return len(self.batches())
        return -(-self.num_images // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Go to another epoch."""
        self.epoch = epoch

    def batches(self) -> list[np.ndarray]:
        """Return the positions of the images of each batch."""
        if self.augmentation is None:
            return evaluation_batches(self.num_images, self.batch_size, self.rank, self.world_size)
        order = permutation(self.num_images, ORDER, self.seed, self.epoch)
        return training_batches(order, self.batch_size, self.rank, self.world_size)

    def draw(self, positions: np.ndarray) -> Tensor | None:
        """Return the shifts and flips of these images in this epoch (see `Augmentation.draw`)."""
        return self.augmentation.draw(positions, self.seed, self.epoch) if self.augmentation else None


@dataclass
class _Loader:
    """What both loaders hold, and what Lightning looks for on a loader."""

    images: EncodedImages | ImageArray
    plan: EpochPlan
    normalisation: Normalisation
    channels_last: bool = True

    # Lightning asks every loader that has a `sampler` for this one too.
    batch_sampler: ClassVar[None] = None

    @property
    def sampler(self) -> EpochPlan:
        """The plan: Lightning calls its `set_epoch` at the start of each epoch, so a kept loader moves on."""
        return self.plan

    def __len__(self) -> int:
        return len(self.plan)


@dataclass
class MemoryLoader(_Loader):
    """Batches gathered from one uint8 tensor, augmented and normalised where it lies.

    Yields (x float32 [B, C, H, W], y int64 [B]).
    """

    images: ImageArray

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        plan, device = self.plan, self.images.labels_N.device
        batches = plan.batches()
        # One transfer an epoch instead of one a batch.
        positions = np.concatenate(batches)
        draw = plan.draw(positions)
        draw = draw.to(device) if draw is not None else None
        index = torch.from_numpy(positions).to(device)
        start = 0
        for batch in batches:
            part = slice(start, start + len(batch))
            start = part.stop
            images_BHWC = self.images.images_NHWC.index_select(0, index[part])
            if plan.augmentation is not None:
                images_BHWC = plan.augmentation.apply(images_BHWC, draw[:, part])
            x_BCHW = self.normalisation.apply(images_BHWC, self.channels_last)
            yield x_BCHW, self.images.labels_N.index_select(0, index[part])


@dataclass
class StreamLoader(_Loader):
    """The same batches for images that do not fit into memory: read and decoded by worker processes.

    Yields (x float32 [B, C, H, W], y int64 [B]) on the CPU.
    """

    num_workers: int = 0
    pin_memory: bool = False

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        # A plain DataLoader under a class of our own: Lightning would put its own sampler into a DataLoader.
        loader = DataLoader(
            _Batches(self.images, self.plan, self.normalisation, self.channels_last),
            sampler=_Positions(self.plan.batches()),
            batch_size=None,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            # Without a generator of its own, making the iterator would draw from the global one.
            generator=torch.Generator().manual_seed(self.plan.seed),
        )
        yield from loader


@dataclass
class _Positions:
    batches: Sequence[np.ndarray]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self.batches)


@dataclass
class _Batches(Dataset):
    """A data set whose item is a whole batch, so that augmentation is vectorised in the workers too."""

    images: EncodedImages | ImageArray
    plan: EpochPlan
    normalisation: Normalisation
    channels_last: bool
    labels_N: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.labels_N = torch.from_numpy(self.images.labels)

    def __getitem__(self, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        images_BHWC = self.images.read(positions)
        draw = self.plan.draw(positions)
        if self.plan.augmentation is not None:
            images_BHWC = self.plan.augmentation.apply(images_BHWC, draw)
        return self.normalisation.apply(images_BHWC, self.channels_last), self.labels_N[positions]

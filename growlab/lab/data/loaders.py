"""Loaders: the finished batches of one epoch, on one rank."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from growlab.base.errors import UserError
from growlab.lab.data.augment import Augmentation, Normalisation
from growlab.lab.data.image_sets import ImageArray
from growlab.lab.data.order import ORDER, evaluation_batches, permutation, rolling_order, training_batches
from growlab.lab.data.readers import Readers


def part_of_pass(num_batches: int, epoch: int, parts: int) -> slice:
    """The batches that an epoch has of a pass over the images that is divided into as many epochs as `parts`."""
    part = epoch % parts
    return slice(part * num_batches // parts, (part + 1) * num_batches // parts)


def sizes_in_part(num_samples: int, batch_size: int, epoch: int, parts: int, what: str) -> list[int]:
    """Samples in each training batch of an epoch.

    Args:
        num_samples: in a pass over the data.
        batch_size: global batch size.
        epoch: counted from 0.
        parts: epochs that a pass is divided into.
        what: is passed over, for the message.

    Raises:
        UserError: the pass has fewer batches than parts.
    """
    whole, rest = divmod(num_samples, batch_size)
    batches = [batch_size] * whole + [rest] * bool(rest)
    if len(batches) < parts:
        raise UserError(
            f"data.epoch_parts={parts} leaves epochs without a batch: a pass over the training {what} has "
            f"{len(batches)} batches of {batch_size}."
        )
    return batches[part_of_pass(len(batches), epoch, parts)]


@dataclass
class EpochPlan:
    """The images in each batch of an epoch on this rank, and how each is shifted and mirrored.

    Attributes:
        num_images: images in the set.
        batch_size: global batch size.
        seed: order and augmentation are functions of seed and epoch.
        epoch: counted from 0.
        augmentation: None = evaluation: in order, every image once over all ranks.
        rank: this process.
        world_size: number of processes.
        blocks_N: block that each image lies in, where images are read in blocks.
        window: images that are shuffled together if they are read in blocks; see `rolling_order`.
        parts: epochs that a pass over the images is divided into.
    """

    num_images: int
    batch_size: int
    seed: int
    epoch: int = 0
    augmentation: Augmentation | None = None
    rank: int = 0
    world_size: int = 1
    blocks_N: np.ndarray | None = None
    window: int = 1
    parts: int = 1

    def __len__(self) -> int:
        if self.augmentation is None:
            return len(self.batches())
        own = part_of_pass(-(-self.num_images // self.batch_size), self.epoch, self.parts)
        return own.stop - own.start

    def set_epoch(self, epoch: int) -> None:
        """Go to another epoch."""
        self.epoch = epoch

    def batches(self) -> list[np.ndarray]:
        """Return the positions of the images of each batch."""
        if self.augmentation is None:
            return evaluation_batches(self.num_images, self.batch_size, self.rank, self.world_size)
        number = self.epoch // self.parts
        if self.blocks_N is None:
            order = permutation(self.num_images, ORDER, self.seed, number)
        else:
            order = rolling_order(self.blocks_N, self.window, ORDER, self.seed, number)
        batches = training_batches(order, self.batch_size, self.rank, self.world_size)
        return batches[part_of_pass(len(batches), self.epoch, self.parts)]

    def draw(self, positions: np.ndarray) -> Tensor | None:
        """Return the shifts and flips of these images in this epoch (see `Augmentation.draw`)."""
        return self.augmentation.draw(positions, self.seed, self.epoch) if self.augmentation else None


@dataclass
class ResumableLoader:
    """Base of all loaders, with the attributes that Lightning asks a loader for.

    A loader is resumable: Lightning puts what `state_dict` returns into checkpoints and gives it back before
    the first batch. Batches are functions of seed, epoch and number, so the number is all there is to keep, and
    it is the same on any number of ranks.
    """

    plan: EpochPlan
    _given: int = field(default=0, init=False)
    _skip: int = field(default=0, init=False)

    # Lightning asks every loader that has a `sampler` for this one too.
    batch_sampler: ClassVar[None] = None

    @property
    def sampler(self) -> EpochPlan:
        """The plan: Lightning calls its `set_epoch` at the start of each epoch, so a kept loader moves on."""
        return self.plan

    def __len__(self) -> int:
        return len(self.plan)

    def state_dict(self) -> dict[str, Any]:
        """Return where in the epoch the loader is: the number of batches that it has given."""
        return {"epoch": self.plan.epoch, "batches": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next pass, and that one alone, behind the batches that were given before the checkpoint.

        Raises:
            ValueError: the state is of another epoch.
        """
        if state["epoch"] != self.plan.epoch:
            raise ValueError(f"a loader of epoch {self.plan.epoch} cannot go on in epoch {state['epoch']}.")
        self._skip = self._given = state["batches"]

    def _left(self) -> list[np.ndarray]:
        """The batches of the pass that begins."""
        self._given, self._skip = self._skip, 0
        return self.plan.batches()[self._given :]


@dataclass
class _ImageLoader(ResumableLoader):
    normalisation: Normalisation
    channels_last: bool


@dataclass
class MemoryLoader(_ImageLoader):
    """Batches gathered from one uint8 tensor, augmented and normalised where it lies.

    Yields (x float32 [B, C, H, W], y int64 [B]).
    """

    images: ImageArray

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        plan, device = self.plan, self.images.labels_N.device
        batches = self._left()
        if not batches:
            return
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
            self._given += 1
            yield x_BCHW, self.images.labels_N.index_select(0, index[part])


@dataclass
class StreamLoader(_ImageLoader):
    """The same batches for images that do not fit into memory: read and decoded by worker processes.

    Yields (x float32 [B, C, H, W], y int64 [B]) on `device`.
    """

    readers: Readers
    device: torch.device

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches = self._left()
        augmented = self.plan.augmentation is not None
        for images_BHWC, y_B in self.readers.read(batches, self.plan.epoch if augmented else None):
            # Bytes travel, a quarter of what numbers would take, and are normalised where they arrive.
            images_BHWC = images_BHWC.to(self.device, non_blocking=True)
            x_BCHW = self.normalisation.apply(images_BHWC, self.channels_last)
            self._given += 1
            yield x_BCHW, y_B.to(self.device, non_blocking=True)

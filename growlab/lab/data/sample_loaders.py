"""Batches of a user's own samples: which make the batches of an epoch, and reading them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from growlab.lab.data.loaders import EpochPlan, ResumableLoader
from growlab.lab.data.order import ORDER, evaluation_batches, permutation, training_batches
from growlab.lab.data.readers import Readers
from growlab.lab.data.samples import Part
from growlab.lab.data.user_sources import epoch_order


@dataclass
class SamplePlan(EpochPlan):
    """Which samples make the batches of an epoch; `part.sampler`, if there is one, draws them."""

    part: Part | None = None

    def __len__(self) -> int:
        training = self.augmentation is not None
        return len(sizes(self.part, self.batch_size) if training else self.batches())

    def batches(self) -> list[np.ndarray]:
        """Return the places of the samples of each batch."""
        if self.augmentation is None:
            return evaluation_batches(self.num_images, self.batch_size, self.rank, self.world_size)
        if self.part.sampler is None:
            order = permutation(self.num_images, ORDER, self.seed, self.epoch)
        else:
            order = epoch_order(self.part, self.seed, self.epoch)
        return training_batches(order, self.batch_size, self.rank, self.world_size)[: len(self)]


@dataclass
class SampleLoader(ResumableLoader):
    """Batches (inputs..., target) of a user's data.

    Attributes:
        readers: reads what is collated of the samples.
        finish: makes (inputs..., target) of that, by the number of the batch in its epoch.
    """

    readers: Readers
    finish: Callable[[Any, int], tuple[Tensor, ...]]

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        batches = self._left()
        training = self.plan.augmentation is not None
        for batch in self.readers.read(batches, self.plan.epoch if training else None):
            finished = self.finish(batch, self._given)
            self._given += 1
            yield finished


def sizes(part: Part, batch_size: int) -> list[int]:
    """The number of samples in each training batch."""
    number = len(part) if part.sampler is None else len(part.sampler)
    whole, rest = divmod(number, batch_size)
    return [batch_size] * whole + [rest] * bool(rest and not (part.drop_last and whole))

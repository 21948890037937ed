"""What each epoch has of the images: all of them, the classes of a task, what has arrived, or a part of a pass."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from growlab.base.errors import UserError
from growlab.lab.data.arguments import check_numbers
from growlab.lab.data.class_schedule import ClassSchedule, positions_of
from growlab.lab.data.incremental import Incremental
from growlab.lab.data.loaders import part_of_pass


@dataclass
class Arrival:
    """Which images there are in which epoch.

    Attributes:
        class_schedule: classes by epoch, for tasks that change while a network trains: `{0: [0, 1], 10: [0, 1, 2]}`
            trains and validates on two classes at first and on three from epoch 10 on, with as many images an
            epoch (those of fewer classes are repeated); the test takes the last ones. None = all classes.
        incremental: what part of the classes or images each stage of the run has; see `Incremental`. None = all.
        epoch_parts: divide each pass over the training images into so many epochs of nearly equal length, so that
            schedules, budgets and validation are finer than a pass.

    Raises:
        UserError: a value is impossible, or two of them do not go together.
    """

    class_schedule: Mapping[int, Sequence[int]] | None = None
    incremental: Incremental | None = None
    epoch_parts: int = 1

    def __post_init__(self) -> None:
        check_numbers(1, epoch_parts=self.epoch_parts)
        self._classes = ClassSchedule(self.class_schedule)
        # First epoch of each stage, epochs that these are of, and the run's own.
        self._stages: tuple[Sequence[int], int, int] = ((0,), 1, 1)
        if self.incremental is not None and self.epoch_parts > 1:
            raise UserError(
                "data.epoch_parts goes with data that is all there from the start: leave it at 1."
            )
        if self.incremental is not None and self._classes.tasks:
            raise UserError(
                "data.class_schedule and data.incremental both say what an epoch is about; set one."
            )

    def check(self, num_classes: int) -> None:
        """Refuse classes that the data does not have.

        Raises:
            UserError: naming them.
        """
        self._classes.check(num_classes)

    def follow_stages(self, starts: Sequence[int], of: int, epochs: int) -> None:
        """Let incremental data arrive with stages that start so in a run `of` epochs, stretched to `epochs`."""
        self._stages = (tuple(starts), of, epochs)

    def chosen(
        self, part: str, labels_N: np.ndarray, num_classes: int, epoch: int, batch_size: int
    ) -> tuple[Any, Callable[[], np.ndarray]] | None:
        """What the images of an epoch are chosen by, and how to find their positions; None for all images.

        Args:
            part: "train", "val" or "test".
            labels_N: of all images of that part.
            num_classes: of the data.
            epoch: counted from 0.
            batch_size: of the training batches.
        """
        classes = self._classes.at(epoch)
        if classes is not None:
            length = len(labels_N) if part == "train" else None
            return classes, partial(positions_of, labels_N, classes, length)
        if self.incremental is None:
            return None
        starts, of, epochs = self._stages
        stage = max(s for s, start in enumerate(starts) if start <= epoch * of // epochs)
        key = (stage, len(starts), batch_size)
        return key, partial(self.incremental.positions, part, labels_N, num_classes, *key)

    def batch_sizes(self, num_images: int, batch_size: int, epoch: int) -> list[int]:
        """Images in each training batch of an epoch whose pass is over so many.

        Raises:
            UserError: the pass has fewer batches than parts.
        """
        whole, rest = divmod(num_images, batch_size)
        batches = [batch_size] * whole + [rest] * bool(rest)
        if len(batches) < self.epoch_parts:
            raise UserError(
                f"data.epoch_parts={self.epoch_parts} leaves epochs without a batch: a pass over the training images "
                f"has {len(batches)} batches of {batch_size}."
            )
        return batches[part_of_pass(len(batches), epoch, self.epoch_parts)]

"""Subsets of images: class-balanced, stratified splits, and those of each epoch if data arrive during training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np

from growlab.base.errors import UserError
from growlab.base.settings import whole
from growlab.lab.data.order import APPEARANCE, SPLIT, draws, permutation


def first_balanced(labels_N: np.ndarray, count: int) -> np.ndarray:
    """Return the sorted positions of the first `count` images, class-balanced as far as possible."""
    if count >= len(labels_N):
        return np.arange(len(labels_N))
    return np.sort(np.lexsort((np.arange(len(labels_N)), _rank_in_class(labels_N)))[:count])


def stratified_split(labels_N: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split positions in two, stratified by class; the second part has `round(fraction * N)`."""
    _, class_of_N, counts_K = np.unique(labels_N, return_inverse=True, return_counts=True)
    # Largest remainders: integer parts in proportion to the counts that sum to the total.
    total = round(fraction * len(labels_N))
    exact_K = total * counts_K / counts_K.sum()
    quota_K = np.floor(exact_K).astype(np.int64)
    quota_K[np.argsort(quota_K - exact_K, kind="stable")[: total - quota_K.sum()]] += 1
    shuffled = permutation(len(labels_N), SPLIT, seed)
    rank_N = np.empty(len(labels_N), dtype=np.int64)
    rank_N[shuffled] = _rank_in_class(class_of_N[shuffled])
    second_N = rank_N < quota_K[class_of_N]
    return np.flatnonzero(~second_N), np.flatnonzero(second_N)


def _rank_in_class(labels_N: np.ndarray) -> np.ndarray:
    """Return, for each image, the number of earlier images of its class."""
    by_class = np.argsort(labels_N, kind="stable")
    sorted_labels = labels_N[by_class]
    rank_N = np.empty(len(labels_N), dtype=np.int64)
    rank_N[by_class] = np.arange(len(labels_N)) - np.searchsorted(sorted_labels, sorted_labels, side="left")
    return rank_N


@dataclass(frozen=True)
class Incremental:
    """Nested subsets of the training images, one per stage: D_0 in D_1 in ... D_{N-1} (Yuan et al. 2023, App. H).

    The fraction rises evenly from `start` to 1 in the last stage. With nine stages of CIFAR-100 and a start of 0.2, the
    first has 20 classes and each later one 10 more, or 20 %, 30 %, ..., 100 % of the images.

    Attributes:
        mode: "classes": classes appear one after the other, in a random order, and validation is on those so far;
            "images": images of all classes appear.
        start: fraction of the first stage.
        replacement: with "images", draw them with replacement, as in the paper: the last stage then has as many draws
            as there are images, and about 63 % of the images among them. False: each image appears once.
        seed: of the order, independent of the seed of the run.

    Raises:
        ValueError: a value is impossible.

    Examples:
        >>> Incremental("classes", 0.2).shares(5)
        [Fraction(1, 5), Fraction(2, 5), Fraction(3, 5), Fraction(4, 5), Fraction(1, 1)]
    """

    mode: Literal["classes", "images"] = "classes"
    start: float = 0.2
    replacement: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.start <= 1:
            raise ValueError(f"start must be above 0 and at most 1, not {self.start}.")

    def shares(self, num_stages: int) -> list[Fraction]:
        """Return the fraction of each stage, rising evenly to 1."""
        first = Fraction(str(self.start))
        if num_stages == 1:
            return [Fraction(1)]
        return [first + (1 - first) * stage / (num_stages - 1) for stage in range(num_stages)]

    def order(self, num_classes: int) -> list[int]:
        """Return the classes in their order of appearance."""
        return permutation(num_classes, APPEARANCE, self.seed).tolist()

    def num_classes(self, num_classes: int, num_stages: int) -> list[int]:
        """Return the number of classes in each stage, out of `num_classes`; at least one."""
        if self.mode != "classes":
            return [num_classes] * num_stages
        return [max(1, round(share * num_classes)) for share in self.shares(num_stages)]

    def positions(
        self, part: str, labels_N: np.ndarray, num_classes: int, stage: int, num_stages: int, batch_size: int = 1
    ) -> np.ndarray:
        """Return the positions of a stage's images, which include those of the stage before.

        A last training batch of less than an eighth of `batch_size` is left to the next stage, because batch
        normalisation has no statistics over a single image.

        Args:
            part: "train"; or "val" or "test", which have all images of the classes so far.
            labels_N: of all images of the part.
            num_classes: of the data.
            stage: counted from 0.
            num_stages: of the run.
            batch_size: of the training batches.
        """
        if part == "train" and self.mode == "images":
            count = max(1, round(self.shares(num_stages)[stage] * len(labels_N)))
            if self.replacement:
                drawn = draws(np.arange(count), APPEARANCE, self.seed) % np.uint64(len(labels_N))
                positions = drawn.astype(np.int64)
            else:
                positions = permutation(len(labels_N), APPEARANCE, self.seed)[:count]
        else:
            classes = self.order(num_classes)[: self.num_classes(num_classes, num_stages)[stage]]
            positions = np.flatnonzero(np.isin(labels_N, classes))
        rest = len(positions) % batch_size
        drop_rest = part == "train" and rest < len(positions) and 8 * rest < batch_size
        return positions[: len(positions) - rest] if drop_rest else positions


class Arrival:
    """Selects the images of each epoch."""

    def __init__(
        self,
        class_schedule: Mapping[int, Sequence[int]] | None = None,
        incremental: Incremental | None = None,
        epochs_per_pass: int = 1,
    ) -> None:
        whole(1, epochs_per_pass=epochs_per_pass)
        schedule = class_schedule or {}
        self._tasks = {int(epoch): tuple(sorted(set(classes))) for epoch, classes in schedule.items()}
        if self._tasks and (min(self._tasks) != 0 or not all(self._tasks.values())):
            raise UserError(
                "data.class_schedule must give classes from epoch 0 on, such as {0:[0,1],10:[0,1,2,3]}, not "
                f"{dict(schedule)}."
            )
        if incremental is not None and (self._tasks or epochs_per_pass > 1):
            other = "data.class_schedule" if self._tasks else "data.epochs_per_pass"
            raise UserError(
                f"{other} needs all data from the start and cannot be combined with data.incremental; set one of them."
            )
        self.incremental = incremental
        # First epoch of each stage, the number of epochs these refer to, and the run's number of epochs.
        self._stages: tuple[Sequence[int], int, int] = ((0,), 1, 1)

    def check(self, num_classes: int) -> None:
        """Raise UserError if the schedule has classes that the data lacks."""
        scheduled = {label for classes in self._tasks.values() for label in classes}
        if unknown := sorted(scheduled - set(range(num_classes))):
            raise UserError(f"data.class_schedule names the classes {unknown}; this data has 0 to {num_classes - 1}.")

    def follow_stages(self, starts: Sequence[int], of: int, epochs: int) -> None:
        """Set the stages at which incremental data arrive; see `RunData`."""
        self._stages = (tuple(starts), of, epochs)

    def key(self, epoch: int, batch_size: int) -> tuple[int, ...] | None:
        """Return a key of the epoch's subset, with training batches of this size; None for all images."""
        if self.incremental is None:
            begun = [start for start in self._tasks if start <= epoch]
            return self._tasks[max(begun)] if begun else None
        starts, of, epochs = self._stages
        stage = max(s for s, start in enumerate(starts) if start <= epoch * of // epochs)
        return (stage, len(starts), batch_size)

    def positions(self, part: str, labels_N: np.ndarray, num_classes: int, key: tuple[int, ...]) -> np.ndarray:
        """Return the positions of the images of subset `key` in a part of the data with labels `labels_N`."""
        if self.incremental is not None:
            return self.incremental.positions(part, labels_N, num_classes, *key)
        return positions_of(labels_N, key, len(labels_N) if part == "train" else None)


def positions_of(labels_N: np.ndarray, classes: Sequence[int], length: int | None = None) -> np.ndarray:
    """Return the positions of the images of some classes in order, repeated or cut to `length`."""
    positions = np.flatnonzero(np.isin(labels_N, classes))
    if not len(positions):
        raise UserError(f"data.class_schedule: there is no image of the classes {list(classes)}.")
    return positions if length is None else np.resize(positions, length)

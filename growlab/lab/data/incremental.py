"""Data that arrives while a network grows: a part of the classes or of the images in each stage."""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from growlab.base.errors import UserError
from growlab.lab.data.order import APPEARANCE, draws, permutation

MODES = ("classes", "images")


@dataclass(frozen=True)
class Incremental:
    """What part of the training images a stage has: D_0 in D_1 in ... D_{N-1} (Yuan et al. 2023, App. H).

    The parts begin with `start` and rise evenly to everything in the last stage: with nine stages of CIFAR-100 and
    a start of 0.2, 20 classes and 10 more in each stage, or 20 %, 30 %, ..., 100 % of the images.

    Attributes:
        mode: "classes": classes appear one after the other, in a random order, and validation is on those that have;
            "images": images of all classes appear.
        start: the part of the first stage.
        replacement: with "images", draw them with replacement, as the paper says: the last stage then has as many
            draws as there are images, and about 63 % of the images among them. False: each image appears once.
        seed: of the order, whatever the seed of the run.

    Raises:
        UserError: a value is impossible.

    Examples:
        >>> Incremental("classes", 0.2).shares(5)
        [Fraction(1, 5), Fraction(2, 5), Fraction(3, 5), Fraction(4, 5), Fraction(1, 1)]
    """

    mode: str = "classes"
    start: float = 0.2
    replacement: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(f"data.incremental.mode must be {' or '.join(MODES)}, not {self.mode}.")
        if not 0 < self.start <= 1:
            raise UserError(f"data.incremental.start={self.start} must lie above 0 and at most at 1.")

    def shares(self, num_stages: int) -> list[Fraction]:
        """The part of each stage, rising evenly to 1."""
        first = Fraction(str(self.start))
        if num_stages == 1:
            return [Fraction(1)]
        return [first + (1 - first) * stage / (num_stages - 1) for stage in range(num_stages)]

    def order(self, num_classes: int) -> list[int]:
        """The classes in the order in which they appear."""
        return permutation(num_classes, APPEARANCE, self.seed).tolist()

    def num_classes(self, num_classes: int, num_stages: int) -> list[int]:
        """How many of so many classes each stage has, at least one."""
        if self.mode != "classes":
            return [num_classes] * num_stages
        return [max(1, round(share * num_classes)) for share in self.shares(num_stages)]

    def classes(self, num_classes: int, stage: int, num_stages: int) -> list[int]:
        """The classes of a stage."""
        return sorted(self.order(num_classes)[: self.num_classes(num_classes, num_stages)[stage]])

    def positions(
        self,
        part: str,
        labels_N: np.ndarray,
        num_classes: int,
        stage: int,
        num_stages: int,
        batch_size: int = 1,
    ) -> np.ndarray:
        """Positions of a stage's images; those of the stage before are among them.

        Training images that would make a last batch of less than an eighth of the others wait for the next stage: over
        a single image batch normalisation has no statistics.

        Args:
            part: "train"; or "val" or "test", which have all images of the classes that there are.
            labels_N: of all images of the part.
            num_classes: of the data.
            stage: counted from 0.
            num_stages: of the run.
            batch_size: of the training batches.
        """
        if part != "train":
            return np.flatnonzero(np.isin(labels_N, self.classes(num_classes, stage, num_stages)))
        found = self._training(labels_N, num_classes, stage, num_stages)
        rest = len(found) % batch_size
        return found[: len(found) - rest] if rest < len(found) and 8 * rest < batch_size else found

    def _training(self, labels_N: np.ndarray, num_classes: int, stage: int, num_stages: int) -> np.ndarray:
        if self.mode == "classes":
            return np.flatnonzero(np.isin(labels_N, self.classes(num_classes, stage, num_stages)))
        count = max(1, round(self.shares(num_stages)[stage] * len(labels_N)))
        if self.replacement:
            drawn = draws(np.arange(count), APPEARANCE, self.seed) % np.uint64(len(labels_N))
            return drawn.astype(np.int64)
        return permutation(len(labels_N), APPEARANCE, self.seed)[:count]

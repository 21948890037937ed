"""Choosing part of a labelled set: class-balanced beginnings and stratified splits."""

from dataclasses import dataclass

import numpy as np

from growlab.base.errors import UserError
from growlab.lab.data.arguments import check_numbers
from growlab.lab.data.order import SPLIT, permutation

VALIDATIONS = ("none", "split", "test")


@dataclass(frozen=True)
class Sets:
    """Which images are trained on, validated on and tested on.

    Attributes:
        validation: "none"; "split": the data's own validation set where it has one beside the test set, else part of
            the training set; "test": the test set, watched under this name and not selected on, so that all training
            images are trained on.
        validation_fraction: the part of the training set that "split" takes.
        split_seed: decides which images "split" takes, whatever the seed of the run.
        limit_train: use only so many training images, the first ones of each class.
        limit_test: likewise of the test set.

    Raises:
        UserError: a value is impossible.
    """

    validation: str = "none"
    validation_fraction: float = 0.1
    split_seed: int = 0
    limit_train: int | None = None
    limit_test: int | None = None

    def __post_init__(self) -> None:
        check_numbers(1, limit_train=self.limit_train, limit_test=self.limit_test)
        if self.validation not in VALIDATIONS:
            raise UserError(
                f"data.validation={self.validation} is unknown; choose one of {', '.join(VALIDATIONS)}."
            )
        if not 0 < self.validation_fraction < 1:
            raise UserError(f"data.validation_fraction={self.validation_fraction} must lie between 0 and 1.")

    def first(self, labels_N: np.ndarray, part: str) -> np.ndarray:
        """Positions of the images of "train" or "test" that are used at all."""
        limit = self.limit_train if part == "train" else self.limit_test
        return first_balanced(labels_N, limit or len(labels_N))

    def split(self, labels_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions of the training images that are trained on, and of those that are held out.

        Raises:
            UserError: one of them would be none.
        """
        kept_N, held_out_N = stratified_split(labels_N, self.validation_fraction, self.split_seed)
        if not len(kept_N) or not len(held_out_N):
            raise UserError(
                f"data.validation_fraction={self.validation_fraction} of {len(labels_N)} training images leaves "
                "nothing to train or to validate on; choose another fraction."
            )
        return kept_N, held_out_N


def first_balanced(labels_N: np.ndarray, count: int) -> np.ndarray:
    """Return the sorted positions of the first `count` images, as many of each class as can be."""
    if count >= len(labels_N):
        return np.arange(len(labels_N))
    return np.sort(np.lexsort((np.arange(len(labels_N)), _rank_in_class(labels_N)))[:count])


def stratified_split(labels_N: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split positions in two, every class in the same proportion up to rounding.

    Args:
        labels_N: class of each image.
        fraction: share of the second part, between 0 and 1.
        seed: the split is a function of labels, fraction and seed alone.

    Returns:
        Sorted positions of the first part and of the second, which holds `round(fraction * N)` images:
        disjoint, together everything.
    """
    _, class_of_N, counts_K = np.unique(labels_N, return_inverse=True, return_counts=True)
    wanted_K = _shares(round(fraction * len(labels_N)), counts_K)
    shuffled = permutation(len(labels_N), SPLIT, seed)
    rank_N = np.empty(len(labels_N), dtype=np.int64)
    rank_N[shuffled] = _rank_in_class(class_of_N[shuffled])
    held_out_N = rank_N < wanted_K[class_of_N]
    return np.flatnonzero(~held_out_N), np.flatnonzero(held_out_N)


def _rank_in_class(labels_N: np.ndarray) -> np.ndarray:
    # How many images of the same class come before each.
    by_class = np.argsort(labels_N, kind="stable")
    sorted_labels = labels_N[by_class]
    starts = np.searchsorted(sorted_labels, sorted_labels, side="left")
    rank_N = np.empty(len(labels_N), dtype=np.int64)
    rank_N[by_class] = np.arange(len(labels_N)) - starts
    return rank_N


def _shares(total: int, counts_K: np.ndarray) -> np.ndarray:
    # Largest remainders: integer parts in proportion to the counts that sum to the total.
    exact_K = total * counts_K / counts_K.sum()
    parts_K = np.floor(exact_K).astype(np.int64)
    parts_K[np.argsort(parts_K - exact_K, kind="stable")[: total - parts_K.sum()]] += 1
    return parts_K

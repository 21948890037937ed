"""Choosing part of a labelled set: class-balanced beginnings and stratified splits."""

import numpy as np

from growlab.lab.data.order import SPLIT, permutation


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

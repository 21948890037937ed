"""Stateless randomness: the images of each batch as a function of seed and epoch alone.

Every draw is the output of a counter-based generator (splitmix64, Steele et al. 2014) with integers such as (purpose,
seed, epoch) as key and the index of the image as counter. Nothing is drawn from a global generator, so resumed runs,
other devices and other numbers of workers give the same numbers.
"""

import numpy as np

# First integer of every key, so that different uses of one seed draw independent numbers.
ORDER, AUGMENT, SPLIT, CROP, BLOCKS, APPEARANCE, OFFSET, SAMPLE, COLLATE = range(1, 10)

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_WORD = (1 << 64) - 1


def draws(indices_N: np.ndarray, *key: int) -> np.ndarray:
    """Return one uniform uint64 per index, a function of (key, index) alone."""
    state_1 = np.zeros(1, dtype=np.uint64)
    for part in key:
        state_1 = _mix(state_1 + _GAMMA + np.uint64(part & _WORD))
    return _mix(state_1 + _GAMMA * (indices_N.astype(np.uint64) + np.uint64(1)))


def permutation(length: int, *key: int) -> np.ndarray:
    """Return a permutation of `range(length)` (int64) that is a function of the key alone."""
    return np.argsort(draws(np.arange(length), *key), kind="stable")


def training_batches(order_N: np.ndarray, batch_size: int, rank: int = 0, world_size: int = 1) -> list[np.ndarray]:
    """Cut an order into global batches and return this rank's slice of each.

    Rank r takes the r-th contiguous slice of every global batch. If a smaller last batch does not divide evenly, it is
    padded from the start of the order, as in `DistributedSampler`, because gradients are averaged over ranks with equal
    weight.
    """
    batches = []
    for start in range(0, len(order_N), batch_size):
        batch = order_N[start : start + batch_size]
        missing = -len(batch) % world_size
        if missing:
            batch = np.concatenate([batch, np.resize(order_N, missing)])
        share = len(batch) // world_size
        batches.append(batch[rank * share : (rank + 1) * share])
    return batches


def evaluation_batches(length: int, batch_size: int, rank: int = 0, world_size: int = 1) -> list[np.ndarray]:
    """Cut `range(length)` into nearly equal global batches and return this rank's slice of each.

    No image is repeated, so accuracies over several ranks are exact, unless the set is smaller than the number of
    ranks. No slice is empty: batches exceed `batch_size` if that is less than the number of ranks.
    """
    positions = np.arange(length) if length >= world_size else np.resize(np.arange(length), world_size)
    num_batches = min(-(-len(positions) // batch_size), len(positions) // world_size)
    return [np.array_split(batch, world_size)[rank] for batch in np.array_split(positions, num_batches)]


def _mix(bits: np.ndarray) -> np.ndarray:
    # The finaliser of splitmix64 relies on uint64 overflow, which numpy arrays wrap silently.
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))

"""Batches of sentences of about the same length, by a budget of tokens: a function of seed and epoch alone."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from growlab.lab.data.order import BLOCKS, ORDER, permutation


def budget_batches(
    order_N: np.ndarray, lengths_N: np.ndarray, tokens: int | None, sentences: int | None
) -> list[np.ndarray]:
    """Cut an order into batches, each as large as its budgets allow.

    As fairseq's `--max-tokens`: the longest sentence of a batch times its number of sentences is at most `tokens`.
    A single sentence that is longer makes a batch of its own.

    Args:
        order_N: indices of sentences.
        lengths_N: tokens of each sentence, padding left out; of a pair, of its longer side.
        tokens: budget; None: none.
        sentences: likewise.

    Examples:
        >>> [batch.tolist() for batch in budget_batches(np.arange(5), np.array([2, 2, 3, 5, 9]), 6, None)]
        [[0, 1], [2], [3], [4]]
    """
    batches, start, longest = [], 0, 0
    for place, length in enumerate(lengths_N[order_N].tolist()):
        longer = max(longest, length)
        count = place - start + 1
        full = (tokens is not None and longer * count > tokens) or (
            sentences is not None and count > sentences
        )
        if full and count > 1:
            batches.append(order_N[start:place])
            start, longer = place, length
        longest = longer
    return [*batches, order_N[start:]] if len(order_N) else []


@dataclass
class TokenPlan:
    """The sentences in each batch of an epoch on this rank.

    Sentences are sorted by length, those of the same length in random order; batches come in random order.

    Attributes:
        lengths_N: tokens of each sentence.
        budget: of a global batch, in tokens or sentences.
        seed: the order is a function of seed and epoch.
        epoch: counted from 0.
        in_tokens: what the budget counts.
        training: False: in order of length, every sentence once over all ranks.
        rank: this process.
        world_size: number of processes.
    """

    lengths_N: np.ndarray
    budget: int
    seed: int
    epoch: int = 0
    in_tokens: bool = True
    training: bool = True
    rank: int = 0
    world_size: int = 1
    _global: tuple[int, list[np.ndarray]] | None = field(default=None, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.global_batches())

    def set_epoch(self, epoch: int) -> None:
        """Go to another epoch."""
        self.epoch = epoch

    def global_batches(self) -> list[np.ndarray]:
        """The batches of all ranks together."""
        epoch = self.epoch if self.training else -1
        if self._global is None or self._global[0] != epoch:
            self._global = (epoch, self._made())
        return self._global[1]

    def batches(self) -> list[np.ndarray]:
        """This rank's share of each; the same number of batches on all ranks, and no share is empty.

        A batch of fewer sentences than ranks repeats some, in training alone: evaluation has no such batch unless
        the whole set is as small.
        """
        return [self._share(batch) for batch in self.global_batches()]

    def _made(self) -> list[np.ndarray]:
        number = len(self.lengths_N)
        order_N = permutation(number, ORDER, self.seed, self.epoch) if self.training else np.arange(number)
        order_N = order_N[np.argsort(self.lengths_N[order_N], kind="stable")]
        tokens, sentences = (self.budget, None) if self.in_tokens else (None, self.budget)
        batches = budget_batches(order_N, self.lengths_N, tokens, sentences)
        if self.training:
            return [batches[i] for i in permutation(len(batches), BLOCKS, self.seed, self.epoch)]
        return _merged(batches, self.world_size)

    def _share(self, batch: np.ndarray) -> np.ndarray:
        if len(batch) < self.world_size:
            batch = np.resize(batch, self.world_size)
        return np.array_split(batch, self.world_size)[self.rank]


def _merged(batches: Sequence[np.ndarray], least: int) -> list[np.ndarray]:
    """The batches, those of too few sentences together with their neighbours."""
    merged: list[np.ndarray] = []
    for batch in batches:
        if merged and (len(merged[-1]) < least or len(batch) < least):
            merged[-1] = np.concatenate([merged[-1], batch])
        else:
            merged.append(batch)
    return merged

"""Lightning data module for sentence pairs, batched by a budget of tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from growlab.base.errors import UserError
from growlab.base.settings import not_none, whole
from growlab.lab.data.image_files import default_root
from growlab.lab.data.loaders import ResumableLoader
from growlab.lab.data.order import BLOCKS, ORDER, permutation
from growlab.lab.data.run_data import RunData
from growlab.recipes.translation.sentence_pairs import Preparation, Side, Subwords, open_pairs


def budget_batches(
    order_N: np.ndarray, lengths_N: np.ndarray, tokens: int | None, sentences: int | None
) -> list[np.ndarray]:
    """Cut an order into batches as large as their budgets allow.

    As with fairseq's `--max-tokens`, the length of a batch's longest sentence times its number of sentences is at most
    `tokens`. A longer sentence is a batch by itself.

    Examples:
        >>> [batch.tolist() for batch in budget_batches(np.arange(5), np.array([2, 2, 3, 5, 9]), 6, None)]
        [[0, 1], [2], [3], [4]]
    """
    batches, start, longest = [], 0, 0
    for place, length in enumerate(lengths_N[order_N].tolist()):
        longer = max(longest, length)
        count = place - start + 1
        full = longer * count > (tokens or inf) or count > (sentences or inf)
        if full and count > 1:
            batches.append(order_N[start:place])
            start, longer = place, length
        longest = longer
    return [*batches, order_N[start:]] if len(order_N) else []


@dataclass
class TokenPlan:
    """Sentences in each batch of an epoch on this rank.

    Sentences are sorted by length, with random order among equal lengths; the order of batches is random.

    Attributes:
        budget: of a batch over all ranks, in tokens or, without `in_tokens`, in sentences.
        training: False: in order of length, every sentence once over all ranks.
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
        """Switch to another epoch."""
        self.epoch = epoch

    def global_batches(self) -> list[np.ndarray]:
        """Return the batches over all ranks."""
        epoch = self.epoch if self.training else -1
        if self._global is None or self._global[0] != epoch:
            self._global = (epoch, self._made())
        return self._global[1]

    def batches(self) -> list[np.ndarray]:
        """Return this rank's share of each batch; all ranks have as many batches, and no share is empty.

        In training, a batch with fewer sentences than ranks repeats some. Evaluation repeats none unless the whole set
        is that small.
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
    """Merge batches of less than `least` sentences with their neighbours."""
    merged: list[np.ndarray] = []
    for batch in batches:
        if merged and (len(merged[-1]) < least or len(batch) < least):
            merged[-1] = np.concatenate([merged[-1], batch])
        else:
            merged.append(batch)
    return merged


@dataclass
class PairLoader(ResumableLoader):
    """Batches of sentence pairs, padded on the right.

    Yields (source [B, S], target shifted right, after an end of sentence [B, T], target [B, T]), all int64.
    """

    plan: TokenPlan
    sides: tuple[Side, Side]
    padding: int
    end: int

    def _made(self, batches: list[np.ndarray]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for batch in batches:
            yield collated(self.sides, batch, self.padding, self.end)


def collated(sides: tuple[Side, Side], batch: np.ndarray, padding: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
    """Collate the sentence pairs at these positions into a batch (see `PairLoader`)."""
    sentences = ([torch.from_numpy(side[index].astype(np.int64)) for index in batch] for side in sides)
    source, target = (pad_sequence(side, batch_first=True, padding_value=padding) for side in sentences)
    previous = torch.full_like(target, padding)
    previous[:, 1:] = target[:, :-1]
    # Nothing follows the last token of a sentence, which is its end.
    previous[previous == end] = padding
    previous[:, 0] = end
    return source, previous, target


class TranslationData(RunData):
    """Sentence pairs for translation, batched by a budget of tokens or sentences.

    Order and batches are functions of (seed, epoch) alone, so they are the same in a resumed run and on another number
    of ranks. After `setup()`, `pairs`, `num_train`, `num_val`, `num_test` and `padding` are known.

    Args:
        name: of the data.
        root: folder of raw text or of fairseq-preprocess's output; None = `$GROWLAB_DATA/<name>`, else
            `~/.cache/growlab/<name>`.
        batch_tokens: budget of a training batch over all ranks, in tokens: sentences times the length of the longest
            one, as with fairseq's `--max-tokens`; None: see `batch_sentences`.
        batch_sentences: budget in sentences, if `batch_tokens` is None.
        eval_batch_tokens: likewise for validation, test and beam search.
        seed: of the order.
        source: source language, two letters.
        target: target language.
        subwords: split words by "none", "sentencepiece" or "subword_nmt".
        subword_size: number of pieces (sentencepiece) or merges (subword_nmt) for both languages together.
        lowercase: convert all text to lower case first.
        joined_dictionary: share a dictionary between both languages.
        least_count: rarer words become unknown.
        max_length: leave pairs with a longer side (in tokens) out of training.
        limit_train: use only the first so many training pairs.
        limit_test: likewise for validation and test.
        validation: "split" (or True): validate on the validation set, if there is one; "none" (or False).
    """

    only_in_epochs = "data of sentence pairs"
    goes_with = "sentence pairs go with model=fairseq_transformer objective=translation"

    def __init__(
        self,
        name: str,
        root: str | None = None,
        batch_tokens: int | None = 4096,
        batch_sentences: int | None = None,
        eval_batch_tokens: int = 8192,
        seed: int = 0,
        *,
        source: str = "de",
        target: str = "en",
        subwords: Subwords = "sentencepiece",
        subword_size: int = 8000,
        lowercase: bool = False,
        joined_dictionary: bool = True,
        least_count: int = 0,
        max_length: int = 175,
        limit_train: int | None = None,
        limit_test: int | None = None,
        validation: bool | Literal["split", "none"] = "split",
    ) -> None:
        super().__init__(batch_tokens or batch_sentences or 0, seed)
        if (batch_tokens is None) == (batch_sentences is None):
            raise UserError("give one of data.batch_tokens and data.batch_sentences, and null for the other.")
        budgets = {"batch_tokens": batch_tokens, "batch_sentences": batch_sentences}
        whole(1, eval_batch_tokens=eval_batch_tokens, max_length=max_length, **not_none(**budgets))
        whole(1, **not_none(limit_train=limit_train, limit_test=limit_test))
        self.name, self.root = name, root
        word_options = (subwords, subword_size, lowercase, joined_dictionary, least_count)
        self.preparation = Preparation(source, target, *word_options)
        self.max_length, self.limit_train, self.limit_test = max_length, limit_train, limit_test
        self.validates = validation in (True, "split")
        # `batch_size` is the budget of a training batch, in either unit.
        self.in_tokens, self.eval_batch_tokens = batch_tokens is not None, eval_batch_tokens
        self._sides: dict[str, tuple[Side, Side]] = {}

    def _read(self) -> None:
        root = default_root(self.name) if self.root is None else Path(self.root).expanduser()
        pairs = open_pairs(root, self.name, self.preparation)
        splits = ["train", "test", *(["valid"] if self.validates and pairs.has("valid") else [])]
        sides = {split: pairs.read(split) for split in splits}
        lengths_N = _longer(sides["train"])
        kept_N = np.flatnonzero(lengths_N <= self.max_length)[: self.limit_train]
        if not len(kept_N):
            raise UserError(f"data.max_length={self.max_length} leaves no sentence pair to train on.")
        limited = np.arange(self.limit_test or 0)
        for split, side in sides.items():
            if len(side[0].lengths) != len(side[1].lengths):
                raise UserError(f"{pairs.folder}: the two sides of {split} have different numbers of sentences.")
            chosen = kept_N if split == "train" else limited[: len(side[0].lengths)]
            if len(chosen):
                sides[split] = (_chosen(side[0], chosen), _chosen(side[1], chosen))
        self.pairs, self._sides = pairs, sides
        self.num_train, self.num_val, self.num_test = (
            len(sides[split][0].lengths) if split in sides else 0 for split in ("train", "valid", "test")
        )

    @property
    def padding(self) -> int:
        """Id of the padding token, the same in both languages."""
        return self.pairs.target_dictionary.pad()

    @property
    def end(self) -> int:
        """Id of the end-of-sentence token, the same in both languages."""
        return self.pairs.target_dictionary.eos()

    @property
    def network_arguments(self) -> dict[str, Any]:
        """Vocabulary sizes of both languages, `same_tokens` (one dictionary for both), and the padding id."""
        return {
            "num_source_tokens": len(self.pairs.source_dictionary),
            "num_target_tokens": len(self.pairs.target_dictionary),
            "same_tokens": self.pairs.source_dictionary is self.pairs.target_dictionary,
            "padding": self.padding,
        }

    def training_loader(self, epoch: int, draw: int) -> PairLoader:
        """Return the training pairs with the batch budget of `epoch` and the order of epoch `draw`."""
        return self._loader("train", self._plan(draw, self.global_batch_size(epoch), *self._place()))

    def evaluation(self, split: str) -> PairLoader:
        """Return this rank's share of "val" or "test", in order of length."""
        split = "valid" if split == "val" else split
        lengths_N = _longer(self._sides[split])
        rank, world_size = self._place()
        plan = TokenPlan(lengths_N, self.eval_batch_tokens, self.seed, 0, True, False, rank, world_size)
        return self._loader(split, plan)

    def references(self, split: str) -> list[str]:
        """Return the target sentences of "val" or "test" as text."""
        split = "valid" if split == "val" else split
        side, known = self._sides[split][1], self.pairs.references(split)
        if known is not None:
            return known[: len(side.lengths)]
        return [self.text(side[index]) for index in range(len(side.lengths))]

    def sources(self, split: str) -> list[str]:
        """Return the source sentences of "val" or "test" as text, in the order of `references`."""
        side = self._sides["valid" if split == "val" else split][0]
        dictionary = self.pairs.source_dictionary
        return [self._text(dictionary, side[index]) for index in range(len(side.lengths))]

    def text(self, tokens: np.ndarray | Tensor) -> str:
        """Decode a target sentence from its token ids, without padding and end."""
        return self._text(self.pairs.target_dictionary, tokens)

    def _text(self, dictionary: Any, tokens: np.ndarray | Tensor) -> str:
        tokens = torch.as_tensor(tokens)
        return self.pairs.subwords.decode(dictionary.string(tokens[tokens != self.padding]))

    def samples_in_batches(self, epoch: int, batch_size: int) -> list[int]:
        """Return the number of sentence pairs in each training batch of an epoch with this budget."""
        return [len(batch) for batch in self._plan(epoch, batch_size).global_batches()]

    def probe_batch(self, n: int) -> tuple[Tensor, Tensor]:
        """Return the inputs of the n training pairs nearest to the mean lengths of both sides."""
        lengths_2N = np.stack([side.lengths for side in self._sides["train"]])
        distance_N = np.abs(lengths_2N - lengths_2N.mean(1, keepdims=True)).sum(0)
        positions = np.resize(np.argsort(distance_N, kind="stable")[:n], n)
        return collated(self._sides["train"], positions, self.padding, self.end)[:2]

    @cached_property
    def _train_lengths_N(self) -> np.ndarray:
        return _longer(self._sides["train"])

    def _plan(self, epoch: int, budget: int, rank: int = 0, world_size: int = 1) -> TokenPlan:
        return TokenPlan(self._train_lengths_N, budget, self.seed, epoch, self.in_tokens, True, rank, world_size)

    def _loader(self, split: str, plan: TokenPlan) -> PairLoader:
        return PairLoader(plan, self._sides[split], self.padding, self.end)


def _longer(sides: tuple[Side, Side]) -> np.ndarray:
    return np.maximum(sides[0].lengths, sides[1].lengths)


def _chosen(side: Side, positions: np.ndarray) -> Side:
    sentences = [side[index] for index in positions]
    return Side(np.concatenate(sentences), np.concatenate([[0], np.cumsum([len(s) for s in sentences])]))

"""Windows of token sequences, in an order that depends on seed and epoch alone; text by characters."""

import hashlib
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from torch import Tensor

from growlab.base.errors import UserError
from growlab.base.settings import not_none, whole
from growlab.lab.data.loaders import EpochPlan, ResumableLoader
from growlab.lab.data.order import OFFSET, draws
from growlab.lab.data.run_data import RunData

#: Target where there is no token to predict; cross-entropy's default `ignore_index`.
NO_TOKEN = -100
_PROBE_TOKENS = 512


@dataclass
class WindowLoader(ResumableLoader):
    """Windows of a sequence of tokens.

    Yields (tokens int64 [B, T], next tokens int64 [B, T]), with `NO_TOKEN` in targets past the end of the sequence.
    """

    tokens_N: np.ndarray
    context: int
    device: torch.device

    def _made(self, batches: list[np.ndarray]) -> Iterator[tuple[Tensor, Tensor]]:
        offset, before = 0, None
        for batch in batches:
            # Windows start at another offset in each pass; otherwise the same tokens would never have a context.
            if self.plan.training and (number := self.plan.pass_of(self._given)) != before:
                draw, before = draws(np.zeros(1), OFFSET, self.plan.seed, number)[0], number
                offset = int(draw % np.uint64(self.context))
            windows_BT = windows_at(self.tokens_N, batch * self.context + offset, self.context + 1)
            tokens_BT = torch.from_numpy(windows_BT).to(self.device)
            yield tokens_BT[:, :-1].clamp(min=0), tokens_BT[:, 1:]


def check_fractions(validation: float, test: float) -> None:
    """Raise UserError if held-out fractions are zero or leave nothing to train on."""
    if not (validation > 0 and test > 0 and validation + test < 1):
        raise UserError(
            f"data.validation_fraction={validation} and data.test_fraction={test} must be above 0 and leave something "
            "to train on."
        )


def windows_at(tokens_N: np.ndarray, starts_B: np.ndarray, length: int) -> np.ndarray:
    """Return the windows that start at `starts_B`, int64 [B, length], padded with `NO_TOKEN` at the end."""
    places_BT = starts_B[:, None] + np.arange(length)
    windows_BT = np.asarray(tokens_N[np.minimum(places_BT, len(tokens_N) - 1)]).astype(np.int64)
    windows_BT[places_BT >= len(tokens_N)] = NO_TOKEN
    return windows_BT


class WindowData(RunData):
    """Token sequences to train, validate and test on; subclasses read them in `_sequences`.

    Attributes:
        whole_windows: drop an incomplete last window of validation and test.
    """

    whole_windows = True
    #: Unit of sequences, for messages.
    unit = "tokens"

    def __init__(
        self, context: int, batch_size: int, eval_batch_size: int, epochs_per_pass: int = 1, seed: int = 0
    ) -> None:
        super().__init__(batch_size, seed)
        whole(1, context=context, batch_size=batch_size, epochs_per_pass=epochs_per_pass)
        whole(1, eval_batch_size=eval_batch_size)
        self.context, self.eval_batch_size, self.epochs_per_pass = context, eval_batch_size, epochs_per_pass
        self.tokens_per_sample = context
        self._tokens: dict[str, np.ndarray] = {}

    @property
    def probe_size(self) -> int:
        """Number of windows that growth is checked on: few if they are long, as their logits take much memory."""
        return max(2, _PROBE_TOKENS // self.context)

    @abstractmethod
    def _sequences(self) -> dict[str, np.ndarray]:
        """Read the tokens of "train", "val" and "test", integers [N]."""

    @property
    @abstractmethod
    def vocabulary_size(self) -> int:
        """Upper bound (exclusive) of token ids; known after `setup()`."""

    def _read(self) -> None:
        tokens = self._sequences()
        # Leave room for the offset, which is at most a window.
        self._windows = {"train": (len(tokens["train"]) - self.context) // self.context}
        for part in ("val", "test"):
            whole_windows, rest = divmod(len(tokens[part]) - 1, self.context)
            self._windows[part] = whole_windows + bool(rest and not self.whole_windows)
        if min(self._windows.values()) < 1:
            raise UserError(
                f"a text of {sum(map(len, tokens.values()))} {self.unit} is too short for a window of data.context="
                f"{self.context} in each of its parts; use a longer text or a smaller context."
            )
        self._tokens = tokens
        self.num_train, self.num_val, self.num_test = self._windows.values()

    @cached_property
    def digest(self) -> str:
        """Hash of all tokens."""
        digest = hashlib.blake2b(digest_size=16)
        for part, tokens in sorted(self._tokens.items()):
            digest.update(f"{part} {len(tokens)} {tokens.dtype}".encode())
            digest.update(np.ascontiguousarray(tokens).data)
        return digest.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """Return the digest of the text."""
        return {"digest": self.digest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise UserError if the checkpoint was trained on another text."""
        if state_dict.get("digest", self.digest) != self.digest:
            raise UserError(
                "the text is not the one that the checkpoint was trained on: its files, its split or its tokenizer "
                "have changed; restore them, or start another run."
            )

    @property
    def network_arguments(self) -> dict[str, Any]:
        """`vocabulary_size` and `context`."""
        return {"vocabulary_size": self.vocabulary_size, "context": self.context}

    def training_loader(self, epoch: int, draw: int) -> WindowLoader:
        """Return the training windows with the batch size of `epoch` and the order of epoch `draw`."""
        return self._loader("train", self._training_plan(self.num_train, epoch, draw))

    def probe_batch(self, n: int) -> Tensor:
        """Return n fixed training windows, int64 [n, T] on the CPU, repeated if there are fewer."""
        starts = np.arange(n) % self.num_train * self.context
        return torch.from_numpy(windows_at(self._tokens["train"], starts, self.context))

    def evaluation(self, part: str) -> WindowLoader:
        """Return the batches of "val" or "test", in order."""
        return self._loader(part, self._evaluation_plan(self._windows[part], self.eval_batch_size))

    def _loader(self, part: str, plan: EpochPlan) -> WindowLoader:
        return WindowLoader(plan, self._tokens[part], self.context, self._device)


class TextData(WindowData):
    """One text for causal language modelling over characters, cut into train, validation and test, in this order.

    A sample is a window of `context` characters, with the next character of each as target. An epoch has every window
    of the training part once.

    Args:
        path: text file in UTF-8; None: the language reference that comes with Python (`pydoc_data.topics`, about
            460,000 characters, different in each version of Python).
        context: characters in a window.
        batch_size: windows in a training batch over all ranks.
        eval_batch_size: windows in a validation or test batch.
        validation_fraction: fraction of the text to validate on each epoch.
        test_fraction: fraction of the text to test on.
        limit_characters: use only this many characters from the beginning; None: all.
        seed: of the order.
    """

    goes_with = "text goes with model=gpt objective=characters"
    unit = "characters"

    def __init__(
        self,
        path: str | None = None,
        context: int = 128,
        batch_size: int = 32,
        eval_batch_size: int = 128,
        validation_fraction: float = 0.05,
        test_fraction: float = 0.05,
        limit_characters: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(context, batch_size, eval_batch_size, seed=seed)
        whole(1, **not_none(limit_characters=limit_characters))
        check_fractions(validation_fraction, test_fraction)
        self.path, self.limit_characters = path, limit_characters
        self._fractions = {"val": validation_fraction, "test": test_fraction}
        #: Characters of the text, sorted; a token is an index of this list. Known after `setup()`.
        self.vocabulary: list[str] = []

    @property
    def vocabulary_size(self) -> int:
        """Number of different characters; known after `setup()`."""
        return len(self.vocabulary)

    def _sequences(self) -> dict[str, np.ndarray]:
        text = self._text()[: self.limit_characters]
        self.vocabulary = sorted(set(text))
        numbers = {character: number for number, character in enumerate(self.vocabulary)}
        tokens_N = np.array([numbers[character] for character in text], dtype=np.uint32)
        val, test = (int(len(text) * fraction) for fraction in self._fractions.values())
        train = len(text) - val - test
        parts = np.split(tokens_N, [train, train + val])
        return dict(zip(("train", "val", "test"), parts, strict=True))

    def _text(self) -> str:
        if self.path is None:
            return "\n\n".join(topics[name] for name in sorted(topics))
        return Path(self.path).expanduser().read_text(encoding="utf-8")

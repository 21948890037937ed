"""Text files as packed windows of tokens."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from growlab.base.errors import UserError
from growlab.base.settings import sorted_into
from growlab.lab.data.documents import TextReading
from growlab.lab.data.token_store import PARTS, HeldOut, Tokenization, TokenStore, open_store
from growlab.lab.data.windows import WindowData


class TokenData(WindowData):
    """Text files for causal language modelling over tokens of a byte-level tokenizer.

    Documents are packed: they follow each other with an end of text between, and a window of `context` tokens may
    begin in one and end in another. A training epoch has every window once (or a part of them, with `epoch_parts`), in
    an order of (seed, epoch) alone. Every token of validation and test is predicted once.

    Token ids lie in the cache folder, under a key of the files' content and of the settings.

    Args:
        path: a file, a folder (with all below it), a pattern such as `docs/**/*.txt`, Parquet files, or a folder that
            `save_to_disk` of Hugging Face's `datasets` wrote.
        context: tokens that a window predicts from.
        batch_size: windows in a training batch over all devices.
        eval_batch_size: windows in another batch.
        epoch_parts: divide each pass over the training windows into so many epochs of nearly equal length, so that
            schedules, budgets and validation are finer than a pass.
        seed: of the order.
        settings: fields of the classes in `SETTINGS`.

    Raises:
        UserError: an argument cannot be used; from `setup()` also, the text or its tokenizer cannot be read.
        TypeError: there is no such setting.
    """

    SETTINGS = (TextReading, HeldOut, Tokenization)

    goes_with = "tokens go with objective=tokens and model=transformers or model=gpt"
    whole_windows = False

    def __init__(
        self,
        path: str | None,
        context: int = 256,
        batch_size: int = 32,
        eval_batch_size: int = 64,
        epoch_parts: int = 1,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        super().__init__(context, batch_size, eval_batch_size, epoch_parts, seed)
        self.path = path
        self._reading, self._held_out, self._how = sorted_into(self.SETTINGS, settings, type(self).__name__)
        self._store: TokenStore | None = None

    @property
    def store(self) -> TokenStore:
        """Prepared text and its tokenizer."""
        if self.path is None:
            raise UserError(
                "data.path is not set: give data=tokens a text file, a folder or a pattern of files."
            )
        if self._store is None:
            self._store = open_store(self.path, self._reading, self._held_out, self._how)
        return self._store

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens; known after `setup()`."""
        return len(self.store.tokenizer)

    @property
    def bytes_of_tokens(self) -> Tensor:
        """Bytes of text that each token stands for, float32 [vocabulary]."""
        return torch.from_numpy(self.store.bytes_of_tokens())

    def offer(self, name: str) -> Any:
        """What a network may take beside the vocabulary and the context: `end_of_text`, the id of that token."""
        return self.store.tokenizer.end if name == "end_of_text" else None

    def describe(self) -> str:
        """One line about what is trained on and what is held out."""
        store = self.store
        sizes = ", ".join(
            f"{name} {part.bytes:,} bytes in {part.tokens:,} tokens of {part.documents:,} documents"
            for name, part in store.parts.items()
        )
        left = {"files without text": store.skipped, "empty or repeated documents": store.dropped}
        told = " and ".join(f"{number:,} {what}" for what, number in left.items() if number)
        more = f"; left out: {told}" if told else ""
        return (
            f"{self.path}: split by {store.split}: {sizes}; {self.vocabulary_size:,} tokens are known{more}"
        )

    def copy_tokenizer(self, folder: Any) -> None:
        """Put the tokenizer's files into a folder, for `from_pretrained`."""
        self.store.copy_tokenizer(folder)

    def _sequences(self) -> dict[str, np.ndarray]:
        return {part: self.store.tokens(part) for part in PARTS}

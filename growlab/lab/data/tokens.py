"""Text files as packed windows of tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from growlab.base.errors import UserError
from growlab.lab.data.documents import TextReading
from growlab.lab.data.text import WindowData
from growlab.lab.data.token_store import PARTS, HeldOut, Tokenization, TokenStore, open_store


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
        suffixes: of the files that are taken from a folder, each also gzipped (`.txt.gz`); Parquet files always are.
        column: of text in Parquet files and data sets of Hugging Face.
        strip_html: read the text of HTML files, in place of their source.
        validation_fraction: part of the text, in bytes, that is watched each epoch.
        test_fraction: part of it that the result is of.
        split_seed: decides which documents these are, whatever the seed of the run.
        validation_path: files to watch in place of a part.
        test_path: likewise, of the result.
        vocab_size: of the byte-level tokenizer that is trained on the training part.
        tokenizer: a `tokenizer.json`, or its folder, to take in its place.
        end_of_text: of that one, the token behind each document; None: as it says itself.

    Raises:
        UserError: an argument cannot be used; from `setup()` also, the text or its tokenizer cannot be read.
    """

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
        *,
        suffixes: Sequence[str] = (".txt", ".md", ".rst", ".html"),
        column: str = "text",
        strip_html: bool = True,
        validation_fraction: float = 0.05,
        test_fraction: float = 0.05,
        split_seed: int = 0,
        validation_path: str | None = None,
        test_path: str | None = None,
        vocab_size: int = 4096,
        tokenizer: str | None = None,
        end_of_text: str | None = None,
    ) -> None:
        super().__init__(context, batch_size, eval_batch_size, epoch_parts, seed)
        self.path = path
        self._reading = TextReading(suffixes, column, strip_html)
        self._held_out = HeldOut(validation_fraction, test_fraction, split_seed, validation_path, test_path)
        self._how = Tokenization(vocab_size, tokenizer, end_of_text)
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
        """Return the id of the token `end_of_text`; None for any other name."""
        return self.store.tokenizer.end if name == "end_of_text" else None

    def describe(self) -> str:
        """Return one line with the sizes of the parts, and how many documents are left out."""
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

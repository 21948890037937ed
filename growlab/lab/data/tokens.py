"""Text files as packed windows of tokens, memory-mapped from the cache folder under a key of their content."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from growlab.base.errors import UserError
from growlab.base.files import write_json
from growlab.lab.data.cache import cache_dir, locked
from growlab.lab.data.documents import (
    Documents,
    TextTokenizer,
    load_tokenizer,
    saved_datasets,
    tokenizer_file,
    train_tokenizer,
)
from growlab.lab.data.order import SPLIT, permutation
from growlab.lab.data.run_data import PART_NAMES
from growlab.lab.data.text import WindowData, check_fractions

PARTS = ("train", "val", "test")
# Description of a prepared folder, written last.
_MADE = "growlab.json"
# Part of the cache key; increment it when prepared folders change.
_VERSION = 1
# Texts are encoded in batches of about this size; longer ones are cut at the end of a line.
_BATCH_BYTES = 1 << 20
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt")


class TokenData(WindowData):
    """Text files for causal language modelling over tokens of a byte-level tokenizer.

    Documents are packed: they are concatenated with an end-of-text token after each, and a window of `context` tokens
    may span several. A training epoch has every window once (or a share of them, with `epochs_per_pass`), in an order
    by (seed, epoch) alone. Every token of validation and test is predicted once.

    Token ids are in the cache folder, under a key of the files' content and of the settings.

    Args:
        path: a file, a folder (searched recursively), a pattern such as `docs/**/*.txt`, Parquet files, or a folder
            that `save_to_disk` of Hugging Face's `datasets` wrote.
        context: tokens in a window.
        batch_size: windows in a training batch over all ranks.
        eval_batch_size: windows in a validation or test batch.
        epochs_per_pass: divide each pass over the training windows into this many epochs of nearly equal length, for
            schedules, budgets and validation finer than a pass.
        seed: of the order.
        suffixes: of the files to read in a folder, each also gzipped (`.txt.gz`); Parquet files are always read.
        column: text column of Parquet files and Hugging Face data sets.
        strip_html: read the visible text of HTML files instead of their source.
        validation_fraction: fraction of the text, in bytes, to validate on each epoch.
        test_fraction: fraction of it to test on.
        split_seed: of the split, independent of the seed of the run.
        validation_path: files to validate on instead of a fraction of the text.
        test_path: files to test on instead of a fraction of the text.
        vocab_size: of the byte-level tokenizer that is trained on the training part.
        tokenizer: a `tokenizer.json`, or its folder, to use instead.
        end_of_text: token of `tokenizer` to put after each document; None: the one in its settings.
    """

    goes_with = "tokens go with objective=tokens and model=transformers or model=gpt"
    whole_windows = False

    def __init__(
        self,
        path: str | None,
        context: int = 256,
        batch_size: int = 32,
        eval_batch_size: int = 64,
        epochs_per_pass: int = 1,
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
        vocab_size: Annotated[int, Field(gt=256)] = 4096,
        tokenizer: str | None = None,
        end_of_text: str | None = None,
    ) -> None:
        super().__init__(context, batch_size, eval_batch_size, epochs_per_pass, seed)
        check_fractions(validation_fraction, test_fraction)
        self.path, self._paths = path, {"val": validation_path, "test": test_path}
        self._reading: dict[str, Any] = {"suffixes": suffixes, "column": column, "strip_html": strip_html}
        self._fractions, self.split_seed = {"test": test_fraction, "val": validation_fraction}, split_seed
        self.vocab_size, self.tokenizer, self.end_of_text = vocab_size, tokenizer, end_of_text
        self._store: TokenStore | None = None

    @property
    def store(self) -> "TokenStore":
        """Prepared text and its tokenizer, from the cache if possible; safe to call from several processes."""
        if self._store is None:
            sources = self._sources()
            folder = cache_dir() / "tokens" / hashlib.sha256(self._key(sources).encode()).hexdigest()[:24]
            with locked(folder):
                if not _is_complete(folder):
                    self._prepare(folder, sources)
            self._store = TokenStore(folder)
        return self._store

    def _sources(self) -> dict[str, Documents]:
        """Return the documents of each part, except parts that are split off the training text."""
        if self.path is None:
            raise UserError("data.path is not set: give a text file, a folder or a pattern of files.")
        saved = saved_datasets(self.path)
        splits = saved if isinstance(saved, dict) else ()
        sources = {"train": Documents(self.path, **self._reading, split="train" if splits else None)}
        for part, path in self._paths.items():
            split = next((name for name in PART_NAMES[part] if name in splits), None)
            if path is not None or split is not None:
                sources[part] = Documents(path or self.path, **self._reading, split=None if path else split)
        return sources

    def _key(self, sources: dict[str, Documents]) -> str:
        """Return a string that changes when the tokens would."""
        if self.tokenizer is None:
            # Another release of the library may train another tokenizer.
            made_by = version("tokenizers") if find_spec("tokenizers") else ""
        else:
            made_by = hashlib.sha256(tokenizer_file(self.tokenizer).read_bytes()).hexdigest()
        settings = {
            "split": (*reversed(self._fractions.values()), self.split_seed),
            "vocab_size": self.vocab_size if self.tokenizer is None else None,
            "end": self.end_of_text,
        }
        content = {name: documents.digest() for name, documents in sources.items()}
        return json.dumps([_VERSION, content, settings, made_by], sort_keys=True)

    def _prepare(self, folder: Path, sources: dict[str, Documents]) -> None:
        """Create the folder of tokens atomically."""
        plan = _Plan(sources, self._fractions, self.split_seed)
        if self.tokenizer is None:
            texts = (text for part, text in plan.texts() if part == "train")
            tokenizer = train_tokenizer(texts, self.vocab_size)
        else:
            tokenizer = load_tokenizer(self.tokenizer, self.end_of_text)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as name:
            made = Path(name) / "made"
            made.mkdir()
            _write(made, plan, tokenizer)
            if self.tokenizer is not None and (own := Path(self.tokenizer).expanduser()).is_dir():
                _copy_tokenizer(own, made)
            else:
                tokenizer.save(made)
            # A folder that exists here is incomplete.
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)

    @property
    def vocabulary_size(self) -> int:
        """Number of different tokens; known after `setup()`."""
        return len(self.store.tokenizer)

    @property
    def bytes_of_tokens(self) -> Tensor:
        """Bytes of text per token id, float32 [vocabulary].

        Exact for byte-level tokenizers. If tokens do not stand for bytes, such as after a normaliser, every entry is
        the mean over the validation and test parts.
        """
        store = self.store
        lengths = store.tokenizer.byte_lengths() if store.byte_level else None
        if lengths is not None:
            return torch.from_numpy(lengths.astype(np.float32))
        held_out = [store.parts[name] for name in PARTS[1:]]
        mean = sum(part["bytes"] for part in held_out) / sum(part["tokens"] - 1 for part in held_out)
        return torch.full((len(store.tokenizer),), mean)

    def offer(self, name: str) -> Any:
        """Return the id of the token `end_of_text`; None for any other name."""
        return self.store.tokenizer.end if name == "end_of_text" else None

    def describe(self) -> str:
        """Return one line with the sizes of the parts and the number of skipped documents."""
        store = self.store
        sizes = ", ".join(
            f"{name} {part['bytes']:,} bytes in {part['tokens']:,} tokens of {part['documents']:,} documents"
            for name, part in store.parts.items()
        )
        left_out = {"files without text": store.skipped, "empty or repeated documents": store.dropped}
        counted = " and ".join(f"{number:,} {kind}" for kind, number in left_out.items() if number)
        more = f"; left out: {counted}" if counted else ""
        return f"{self.path}: split by {store.split}: {sizes}; a vocabulary of {self.vocabulary_size:,} tokens{more}"

    def copy_tokenizer(self, folder: Path) -> None:
        """Copy the tokenizer's files to a folder, for `from_pretrained`."""
        _copy_tokenizer(self.store.folder, folder)

    def _sequences(self) -> dict[str, np.ndarray]:
        return {part: self.store.tokens(part) for part in PARTS}


class TokenStore:
    """Text prepared as files of tokens.

    Attributes:
        parts: for each of `PARTS` the numbers of "documents", their "bytes" of UTF-8 and their "tokens", including an
            end of text at the start and after each document.
        split: "documents" or "position": unit in which parts were split off the text.
        dropped: number of empty or repeated documents, which were left out.
        skipped: number of files without text in UTF-8.
        byte_level: each token stands for fixed bytes, and these add up to the text.
    """

    def __init__(self, folder: Path) -> None:
        made = json.loads((folder / _MADE).read_text())
        self.folder, self.tokenizer = folder, load_tokenizer(str(folder), made["end_of_text"])
        self.parts: dict[str, dict[str, int]] = made["parts"]
        self.split, self.byte_level = made["split"], made["byte_level"]
        self.dropped, self.skipped = made["dropped"], made["skipped"]

    def tokens(self, part: str) -> np.ndarray:
        """Return the token ids of a part, uint16 or uint32 [N], memory-mapped."""
        return np.memmap(self.folder / f"{part}.bin", dtype=_dtype(len(self.tokenizer)), mode="r")


def _dtype(size: int) -> type[np.unsignedinteger[Any]]:
    return np.uint16 if size <= 1 << 16 else np.uint32


def _is_complete(folder: Path) -> bool:
    """True if a folder was written completely and its files still have their sizes."""
    try:
        sizes = {part: (folder / f"{part}.bin").stat().st_size for part in PARTS}
        return json.loads((folder / _MADE).read_text())["file_bytes"] == sizes
    except (OSError, ValueError, KeyError):
        return False


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for pattern in _TOKENIZER_FILES:
        for file in source.glob(pattern):
            shutil.copy2(file, folder / file.name)


class _Plan:
    """Assignment of documents to parts; reads all documents once to find their sizes and duplicates.

    Attributes:
        part_of: for each source, the part of each of its documents as an index of `PARTS`; -1: left out.
        cuts: if each training document is split by position, the fractions where parts end; None: split by document.
    """

    def __init__(self, sources: dict[str, Documents], fractions: dict[str, float], seed: int) -> None:
        self.sources = {name: sources[name] for name in PARTS if name in sources}
        self.part_of: dict[str, np.ndarray] = {}
        self.cuts: tuple[float, ...] | None = None
        self.dropped = 0
        seen: set[bytes] = set()
        sizes_N = np.zeros(0, dtype=np.int64)
        # The training documents last, so that duplicates of validation and test documents are not trained on.
        for name in reversed(self.sources):
            lengths = []
            for text in sources[name]:
                content = text.encode()
                digest = hashlib.blake2b(content, digest_size=16).digest()
                lengths.append(0 if digest in seen else len(content))
                seen.add(digest)
            sizes_N = np.array(lengths, dtype=np.int64)
            self.dropped += int((sizes_N == 0).sum())
            self.part_of[name] = np.where(sizes_N > 0, PARTS.index(name), -1)
            if not sizes_N.any():
                raise UserError(f"data.path: {sources[name].path} has no text for {name}.")
        fractions = {part: fraction for part, fraction in fractions.items() if part not in sources}
        if fractions and not _by_document(self.part_of["train"], sizes_N, fractions, seed):
            rest = 1 - sum(fractions.values())
            # Of each document, train comes first, then val, then test.
            self.cuts = (rest, rest + fractions["val"]) if len(fractions) == 2 else (rest,)
            self.part_of["train"] = np.where(sizes_N > 0, 0, -1)

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yield (part, text) of every document, in a fixed order."""
        for name, documents in self.sources.items():
            for place, text in zip(self.part_of[name].tolist(), documents, strict=True):
                if place < 0:
                    continue
                if name == "train" and self.cuts is not None:
                    ends = [_line_end(text, round(cut * len(text)), len(text) // 200) for cut in self.cuts]
                    pieces = zip([0, *ends], [*ends, len(text)], strict=True)
                    parts = [part for part in PARTS if part == "train" or part not in self.sources]
                    yield from ((part, text[a:b]) for part, (a, b) in zip(parts, pieces, strict=True) if b > a)
                else:
                    yield PARTS[place], text


def _by_document(part_N: np.ndarray, sizes_N: np.ndarray, fractions: dict[str, float], seed: int) -> bool:
    """Move random documents to parts until these are full, in place; return False if one stays half empty."""
    total = sizes_N.sum()
    room = {part: int(fraction * total) for part, fraction in fractions.items()}
    order = permutation(len(sizes_N), SPLIT, seed)
    for place in order[sizes_N[order] > 0].tolist():
        part = next((part for part, left in room.items() if sizes_N[place] <= left), None)
        if part is not None:
            part_N[place] = PARTS.index(part)
            room[part] -= int(sizes_N[place])
    return all(left < 0.5 * fractions[part] * total for part, left in room.items())


def _line_end(text: str, place: int, within: int = 1000) -> int:
    """Return the next start of a line within so many characters of `place`, else `place` itself."""
    newline = text.find("\n", place, place + within)
    return place if newline < 0 else newline + 1


def _write(folder: Path, plan: _Plan, tokenizer: TextTokenizer) -> None:
    dtype, lengths = _dtype(len(tokenizer)), tokenizer.byte_lengths()
    exact = True
    counts = {part: {"documents": 0, "bytes": 0, "tokens": 1} for part in PARTS}
    with ExitStack() as stack:
        files: dict[str, BinaryIO] = {part: stack.enter_context((folder / f"{part}.bin").open("wb")) for part in PARTS}
        for file in files.values():
            # So that the first token of a part has something to be predicted from.
            np.array([tokenizer.end], dtype=dtype).tofile(file)
        for batch in _batches(plan.texts()):
            encoded = tokenizer.encode([text for _, text, _ in batch])
            for (part, text, last), ids in zip(batch, encoded, strict=True):
                ids, size = ids if last else ids[:-1], len(text.encode())
                ids.astype(dtype).tofile(files[part])
                exact = exact and lengths is not None and int(lengths[ids].sum()) == size
                counts[part]["documents"] += last
                counts[part]["bytes"] += size
                counts[part]["tokens"] += len(ids)
    made = {
        "parts": counts,
        "split": "position" if plan.cuts is not None else "documents",
        "dropped": plan.dropped,
        "skipped": sum(len(documents.skipped) for documents in plan.sources.values()),
        "byte_level": exact,
        "end_of_text": tokenizer.end_text,
        "file_bytes": {part: counts[part]["tokens"] * np.dtype(dtype).itemsize for part in PARTS},
    }
    write_json(folder / _MADE, made)


def _batches(texts: Iterator[tuple[str, str]]) -> Iterator[list[tuple[str, str, bool]]]:
    """Yield batches of (part, text, True if the document ends with it)."""
    batch: list[tuple[str, str, bool]] = []
    size = 0
    for part, text in texts:
        start = 0
        while start < len(text):
            end = len(text) if len(text) - start <= _BATCH_BYTES else _line_end(text, start + _BATCH_BYTES)
            batch.append((part, text[start:end], end == len(text)))
            size, start = size + end - start, end
            if size >= _BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch

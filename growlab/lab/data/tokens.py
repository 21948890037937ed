"""Text files as packed windows of tokens: memory-mapped files in the cache folder, under a key of their content."""

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
# Of a prepared folder: its description, written last.
_MADE = "growlab.json"
# Another way of preparing makes other folders.
_VERSION = 1
# Texts are encoded together up to so many bytes, and longer ones in pieces that end with a line.
_BATCH_BYTES = 1 << 20
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt")


class TokenData(WindowData):
    """Text files for causal language modelling over tokens of a byte-level tokenizer.

    Documents are packed: they follow each other with an end of text between, and a window of `context` tokens may begin
    in one and end in another. A training epoch has every window once (or a part of them, with `epochs_per_pass`), in an
    order of (seed, epoch) alone. Every token of validation and test is predicted once.

    Token ids are in the cache folder, under a key of the files' content and of the settings.

    Args:
        path: a file, a folder (with all below it), a pattern such as `docs/**/*.txt`, Parquet files, or a folder that
            `save_to_disk` of Hugging Face's `datasets` wrote.
        context: tokens that a window predicts from.
        batch_size: windows in a training batch over all devices.
        eval_batch_size: windows in another batch.
        epochs_per_pass: divide each pass over the training windows into so many epochs of nearly equal length, so that
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
        end_of_text: of that one, the token after each document; None: as its own settings say.
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
        """Prepared text and its tokenizer, from the cache or made for it; several processes may ask at once."""
        if self._store is None:
            sources = self._sources()
            folder = cache_dir() / "tokens" / hashlib.sha256(self._key(sources).encode()).hexdigest()[:24]
            with locked(folder):
                if not _is_complete(folder):
                    self._prepare(folder, sources)
            self._store = TokenStore(folder)
        return self._store

    def _sources(self) -> dict[str, Documents]:
        """Documents of each part; parts to be taken from the training text are left out."""
        if self.path is None:
            raise UserError("data.path is not set: give a text file, a folder or a pattern of files.")
        saved = saved_datasets(self.path)
        splits = saved if isinstance(saved, dict) else ()
        sources = {"train": Documents(self.path, **self._reading, split="train" if splits else None)}
        for part, own in self._paths.items():
            known = next((name for name in PART_NAMES[part] if name in splits), None)
            if own is not None or known is not None:
                sources[part] = Documents(own or self.path, **self._reading, split=None if own else known)
        return sources

    def _key(self, sources: dict[str, Documents]) -> str:
        """Text that changes when the tokens would."""
        if self.tokenizer is None:
            # The release decides what a tokenizer learns.
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
        """Make the folder of tokens, complete or not at all."""
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
            # Only a folder that is not complete can be there.
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens; known after `setup()`."""
        return len(self.store.tokenizer)

    @property
    def bytes_of_tokens(self) -> Tensor:
        """Bytes of text that each token stands for, float32 [vocabulary].

        Exact for byte-level tokenizers. Where tokens do not stand for bytes, such as after a normaliser, it is the
        mean over the parts that are not trained on, for every token.
        """
        store = self.store
        lengths = store.tokenizer.byte_lengths() if store.byte_level else None
        if lengths is not None:
            return torch.from_numpy(lengths.astype(np.float32))
        kept = [store.parts[name] for name in PARTS[1:]]
        mean = sum(part["bytes"] for part in kept) / sum(part["tokens"] - 1 for part in kept)
        return torch.full((len(store.tokenizer),), mean)

    def offer(self, name: str) -> Any:
        """Return the id of the token `end_of_text`; None for any other name."""
        return self.store.tokenizer.end if name == "end_of_text" else None

    def describe(self) -> str:
        """Return one line with the sizes of the parts, and how many documents are left out."""
        store = self.store
        sizes = ", ".join(
            f"{name} {part['bytes']:,} bytes in {part['tokens']:,} tokens of {part['documents']:,} documents"
            for name, part in store.parts.items()
        )
        left = {"files without text": store.skipped, "empty or repeated documents": store.dropped}
        counted = " and ".join(f"{number:,} {kind}" for kind, number in left.items() if number)
        more = f"; left out: {counted}" if counted else ""
        return f"{self.path}: split by {store.split}: {sizes}; {self.vocabulary_size:,} tokens are known{more}"

    def copy_tokenizer(self, folder: Path) -> None:
        """Put the tokenizer's files into a folder, for `from_pretrained`."""
        _copy_tokenizer(self.store.folder, folder)

    def _sequences(self) -> dict[str, np.ndarray]:
        return {part: self.store.tokens(part) for part in PARTS}


class TokenStore:
    """Prepared text.

    Attributes:
        parts: for each of `PARTS` the numbers of "documents", their "bytes" of UTF-8 and "tokens": an end of text in
            front, and one after each document.
        split: "documents" or "position": how the parts were taken from the text.
        dropped: documents that were left out because they are empty or the same as another.
        skipped: files without text in UTF-8.
        byte_level: each token stands for certain bytes, which together are those of the text.
    """

    def __init__(self, folder: Path) -> None:
        made = json.loads((folder / _MADE).read_text())
        self.folder, self.tokenizer = folder, load_tokenizer(str(folder), made["end_of_text"])
        self.parts: dict[str, dict[str, int]] = made["parts"]
        self.split, self.byte_level = made["split"], made["byte_level"]
        self.dropped, self.skipped = made["dropped"], made["skipped"]

    def tokens(self, part: str) -> np.ndarray:
        """Token ids of a part, uint16 or uint32 [N], memory-mapped."""
        return np.memmap(self.folder / f"{part}.bin", dtype=_dtype(len(self.tokenizer)), mode="r")


def _dtype(size: int) -> type[np.unsignedinteger[Any]]:
    return np.uint16 if size <= 1 << 16 else np.uint32


def _is_complete(folder: Path) -> bool:
    """True if a folder was written to its end and nothing of it was lost since."""
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
    """The part that each document goes to; reads all documents once, for their sizes and which are the same.

    Attributes:
        part_of: for each source the part of each of its documents: a place in `PARTS`; -1: left out.
        cuts: where the training text is cut by position, the parts' ends, as parts of each document; else None.
    """

    def __init__(self, sources: dict[str, Documents], fractions: dict[str, float], seed: int) -> None:
        self.sources = {name: sources[name] for name in PARTS if name in sources}
        self.part_of: dict[str, np.ndarray] = {}
        self.cuts: tuple[float, ...] | None = None
        self.dropped = 0
        seen: set[bytes] = set()
        sizes_N = np.zeros(0, dtype=np.int64)
        # The training documents last: those that are held out too are not trained on.
        for name in reversed(self.sources):
            lengths = []
            for text in sources[name]:
                content = text.encode()
                number = hashlib.blake2b(content, digest_size=16).digest()
                lengths.append(0 if number in seen else len(content))
                seen.add(number)
            sizes_N = np.array(lengths, dtype=np.int64)
            self.dropped += int((sizes_N == 0).sum())
            self.part_of[name] = np.where(sizes_N > 0, PARTS.index(name), -1)
            if not sizes_N.any():
                raise UserError(f"data.path: {sources[name].path} has no text for {name}.")
        wanted = {part: fraction for part, fraction in fractions.items() if part not in sources}
        if wanted and not _by_document(self.part_of["train"], sizes_N, wanted, seed):
            rest = 1 - sum(wanted.values())
            # Training text comes first; of two other parts, the one that is watched.
            self.cuts = (rest, rest + wanted["val"]) if len(wanted) == 2 else (rest,)
            self.part_of["train"] = np.where(sizes_N > 0, 0, -1)

    def texts(self) -> Iterator[tuple[str, str]]:
        """(part, text) of every document, those of one part always in the same order."""
        for name, documents in self.sources.items():
            for place, text in zip(self.part_of[name].tolist(), documents, strict=True):
                if place < 0:
                    continue
                if name == "train" and self.cuts is not None:
                    ends = [_line_end(text, round(cut * len(text)), len(text) // 200) for cut in self.cuts]
                    pieces = zip([0, *ends], [*ends, len(text)], strict=True)
                    own = [part for part in PARTS if part == "train" or part not in self.sources]
                    yield from ((p, text[a:b]) for p, (a, b) in zip(own, pieces, strict=True) if b > a)
                else:
                    yield PARTS[place], text


def _by_document(part_N: np.ndarray, sizes_N: np.ndarray, wanted: dict[str, float], seed: int) -> bool:
    """Give documents in random order to parts that have room; False where a part stays empty."""
    total = sizes_N.sum()
    room = {part: int(fraction * total) for part, fraction in wanted.items()}
    order = permutation(len(sizes_N), SPLIT, seed)
    for place in order[sizes_N[order] > 0].tolist():
        part = next((part for part, left in room.items() if sizes_N[place] <= left), None)
        if part is not None:
            part_N[place] = PARTS.index(part)
            room[part] -= int(sizes_N[place])
    # A part with much room left was meant to be larger than its documents allow.
    return all(left < 0.5 * wanted[part] * total for part, left in room.items())


def _line_end(text: str, place: int, within: int = 1000) -> int:
    """The next place after a line's end, if one follows within so many characters; else the place itself."""
    found = text.find("\n", place, place + within)
    return place if found < 0 else found + 1


def _write(folder: Path, plan: _Plan, tokenizer: TextTokenizer) -> None:
    dtype, lengths = _dtype(len(tokenizer)), tokenizer.byte_lengths()
    exact = True
    counts = {part: {"documents": 0, "bytes": 0, "tokens": 1} for part in PARTS}
    with ExitStack() as stack:
        files: dict[str, BinaryIO] = {part: stack.enter_context((folder / f"{part}.bin").open("wb")) for part in PARTS}
        for file in files.values():
            # So that the first token of a part is predicted from something, and counts.
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
    """(part, text, whether the document ends with it), as many together as make a batch."""
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

"""Documents as token ids in memory-mapped files, kept in the cache folder under a key of their content."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from growlab.base.errors import UserError, WriteError
from growlab.base.files import write_json
from growlab.lab.data.cache import cache_dir, locked
from growlab.lab.data.documents import Documents, TextReading, saved_splits
from growlab.lab.data.order import SPLIT, permutation
from growlab.lab.data.tokenizer import TextTokenizer, load_tokenizer, tokenizer_file, train_tokenizer

PARTS = ("train", "val", "test")
# Of a prepared folder: what is in it; the sign that it is whole.
_MADE = "growlab.json"
# Another way of preparing makes other folders.
_VERSION = 1
# Texts are encoded together up to so many bytes, and longer ones in pieces that end with a line.
_BATCH_BYTES = 1 << 20
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt")
_NAMES = {"val": ("validation", "val", "valid", "dev"), "test": ("test",)}


@dataclass(frozen=True)
class HeldOut:
    """Documents that are not trained on; see `TokenData`.

    Raises:
        UserError: nothing would be left to train on.
    """

    validation_fraction: float = 0.05
    test_fraction: float = 0.05
    split_seed: int = 0
    validation_path: str | None = None
    test_path: str | None = None

    def __post_init__(self) -> None:
        validation, test = self.validation_fraction, self.test_fraction
        if not (validation > 0 and test > 0 and validation + test < 1):
            raise UserError(
                f"data.validation_fraction={validation} and data.test_fraction={test} must be above 0 and leave "
                "something to train on."
            )


@dataclass(frozen=True)
class Tokenization:
    """The tokenizer of a text; see `TokenData`."""

    vocab_size: int = 4096
    tokenizer: str | None = None
    end_of_text: str | None = None


@dataclass(frozen=True)
class Part:
    """Sizes of the training, validation or test part.

    Attributes:
        documents: number of documents.
        bytes: of their text in UTF-8.
        tokens: number of tokens: an end of text in front, and one behind each document.
    """

    documents: int = 0
    bytes: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class TokenStore:
    """Prepared text.

    Attributes:
        folder: of the files.
        tokenizer: that made them.
        parts: by name, see `PARTS`.
        split: "documents" or "position": how the parts were taken from the text.
        dropped: documents that were left out because they are empty or the same as another.
        skipped: files that hold no text in UTF-8.
        byte_level: each token stands for certain bytes, which together are those of the text.
    """

    folder: Path
    tokenizer: TextTokenizer
    parts: dict[str, Part]
    split: str
    dropped: int
    skipped: int
    byte_level: bool

    def tokens(self, part: str) -> np.ndarray:
        """Token ids of a part, uint16 or uint32 [N], memory-mapped."""
        return np.memmap(self.folder / f"{part}.bin", dtype=_dtype(len(self.tokenizer)), mode="r")

    def bytes_of_tokens(self) -> np.ndarray:
        """Bytes of text that each token stands for, float32 [vocabulary].

        Exact for byte-level tokenizers. Where tokens do not stand for bytes, such as behind a normaliser, it is the
        mean over the held-out parts, for every token.
        """
        lengths = self.tokenizer.byte_lengths() if self.byte_level else None
        if lengths is not None:
            return lengths.astype(np.float32)
        held_out = [self.parts[name] for name in PARTS[1:]]
        mean = sum(part.bytes for part in held_out) / sum(part.tokens - 1 for part in held_out)
        return np.full(len(self.tokenizer), mean, dtype=np.float32)

    def copy_tokenizer(self, folder: Path) -> None:
        """Put the tokenizer's files into a folder, for `from_pretrained`."""
        for pattern in _TOKENIZER_FILES:
            for file in self.folder.glob(pattern):
                shutil.copy2(file, folder / file.name)


def open_store(path: str, reading: TextReading, held_out: HeldOut, how: Tokenization) -> TokenStore:
    """The token ids of text, from the cache or made for it; several processes may ask at once.

    Args:
        path: of the text, see `Documents`.
        reading: how files are read.
        held_out: what of it is not trained on.
        how: its tokenizer.

    Raises:
        UserError: the text or the tokenizer cannot be read, or the cache cannot be written.
    """
    sources = _sources(path, reading, held_out)
    given = None if how.tokenizer is None else tokenizer_file(how.tokenizer)
    own = hashlib.sha256(given.read_bytes()).hexdigest() if given is not None else version_of_library()
    split = (held_out.validation_fraction, held_out.test_fraction, held_out.split_seed)
    settings = {
        "split": split,
        "vocab_size": how.vocab_size if given is None else None,
        "end": how.end_of_text,
    }
    content = {name: documents.digest() for name, documents in sources.items()}
    key = json.dumps([_VERSION, content, settings, own], sort_keys=True)
    folder = cache_dir() / "tokens" / hashlib.sha256(key.encode()).hexdigest()[:24]
    with locked(folder):
        if not _whole(folder):
            _prepare(folder, sources, held_out, how)
    return _opened(folder)


def version_of_library() -> str:
    """The release of `tokenizers`, which decides what a tokenizer learns; empty where it is not installed."""
    try:
        return version("tokenizers")
    except ImportError:
        return ""


def _sources(path: str, reading: TextReading, held_out: HeldOut) -> dict[str, Documents]:
    """Documents of each part; parts to be taken from the training text are left out."""
    splits = saved_splits(path)
    sources = {"train": Documents(path, reading, "train" if splits else None)}
    given = {"val": held_out.validation_path, "test": held_out.test_path}
    for part, own in given.items():
        known = next((name for name in _NAMES[part] if name in splits), None)
        if own is not None:
            sources[part] = Documents(own, reading)
        elif known is not None:
            sources[part] = Documents(path, reading, known)
    return sources


def _dtype(size: int) -> type[np.unsignedinteger[Any]]:
    return np.uint16 if size <= 1 << 16 else np.uint32


def _whole(folder: Path) -> bool:
    """True if a folder was written to its end and nothing of it was lost since."""
    try:
        made = json.loads((folder / _MADE).read_text())
        sizes = {part: (folder / f"{part}.bin").stat().st_size for part in PARTS}
        return all(made["file_bytes"][part] == size for part, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def _opened(folder: Path) -> TokenStore:
    made = json.loads((folder / _MADE).read_text())
    names = {field.name for field in fields(TokenStore)} - {"folder", "tokenizer", "parts"}
    parts = {name: Part(**part) for name, part in made["parts"].items()}
    tokenizer = load_tokenizer(str(folder), made["end_of_text"])
    return TokenStore(folder, tokenizer, parts, **{name: made[name] for name in names})


def _prepare(folder: Path, sources: dict[str, Documents], held_out: HeldOut, how: Tokenization) -> None:
    """Make the folder, whole or not at all."""
    plan = _plan(sources, held_out)
    tokenizer = load_tokenizer(how.tokenizer, how.end_of_text) if how.tokenizer is not None else None
    if tokenizer is None:
        texts = (text for part, text in plan.texts() if part == "train")
        tokenizer = train_tokenizer(texts, how.vocab_size)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            _write(made, plan, tokenizer)
            if how.tokenizer is not None and Path(how.tokenizer).expanduser().is_dir():
                for pattern in _TOKENIZER_FILES:
                    for file in Path(how.tokenizer).expanduser().glob(pattern):
                        shutil.copy2(file, made / file.name)
            else:
                tokenizer.save(made)
            # What lies there is no whole folder, else it would have been taken.
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise WriteError(
            f"tokens cannot be written to {folder.parent}: {error.strerror or error}; free some space, or set "
            "XDG_CACHE_HOME to a folder that can be written."
        ) from error


@dataclass(frozen=True)
class _Plan:
    """The part that each document goes to.

    Attributes:
        sources: of documents.
        part_of: for each source the part of each of its documents: a place in `PARTS`; -1: left out.
        cuts: where the training text is cut by position, the parts' ends, as parts of each document; else None.
        dropped: documents that are empty or the same as another.
    """

    sources: dict[str, Documents]
    part_of: dict[str, np.ndarray]
    cuts: tuple[float, ...] | None
    dropped: int

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


def _plan(sources: dict[str, Documents], held_out: HeldOut) -> _Plan:
    """Read all documents once: their sizes, and which are the same."""
    seen: set[bytes] = set()
    part_of, dropped, sizes = {}, 0, np.zeros(0)
    # The training documents last: those that are held out too are not trained on.
    for name in sorted(sources, key=("test", "val", "train").index):
        lengths = []
        for text in sources[name]:
            content = text.encode()
            number = hashlib.blake2b(content, digest_size=16).digest()
            fresh = bool(content) and number not in seen
            seen.add(number)
            lengths.append(len(content) if fresh else 0)
        sizes = np.array(lengths, dtype=np.int64)
        dropped += int((sizes == 0).sum())
        part_of[name] = np.where(sizes > 0, PARTS.index(name), -1)
        if not sizes.any():
            raise UserError(f"data.path: {sources[name].path} holds no text for {name}.")
    fractions = {"test": held_out.test_fraction, "val": held_out.validation_fraction}
    wanted = {part: fraction for part, fraction in fractions.items() if part not in sources}
    cuts: tuple[float, ...] | None = None
    if wanted and not _by_document(part_of["train"], sizes, wanted, held_out.split_seed):
        rest = 1 - sum(wanted.values())
        # Training text comes first; of two other parts, what is watched.
        cuts = (rest, rest + wanted["val"]) if len(wanted) == 2 else (rest,)
        part_of["train"] = np.where(sizes > 0, 0, -1)
    return _Plan({name: sources[name] for name in PARTS if name in sources}, part_of, cuts, dropped)


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
    """The next place behind a line's end, if one follows within so many characters; else the place itself."""
    found = text.find("\n", place, place + within)
    return place if found < 0 else found + 1


def _write(folder: Path, plan: _Plan, tokenizer: TextTokenizer) -> None:
    dtype, lengths = _dtype(len(tokenizer)), tokenizer.byte_lengths()
    exact = lengths is not None
    counts = {part: {"documents": 0, "bytes": 0, "tokens": 1} for part in PARTS}
    with ExitStack() as stack:
        files: dict[str, BinaryIO] = {
            part: stack.enter_context((folder / f"{part}.bin").open("wb")) for part in PARTS
        }
        for file in files.values():
            # So that the first token of a part is predicted from something, and counts.
            np.array([tokenizer.end], dtype=dtype).tofile(file)
        for batch in _batches(plan.texts()):
            encoded = tokenizer.encode([text for _, text, _ in batch])
            for (part, text, last), ids in zip(batch, encoded, strict=True):
                ids, size = ids if last else ids[:-1], len(text.encode())
                ids.astype(dtype).tofile(files[part])
                exact = exact and int(lengths[ids].sum()) == size
                counts[part]["documents"] += last
                counts[part]["bytes"] += size
                counts[part]["tokens"] += len(ids)
    made = {
        "parts": {name: asdict(Part(**counted)) for name, counted in counts.items()},
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

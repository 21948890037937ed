"""Documents from text files (plain, gzipped, HTML, Parquet, Hugging Face's `datasets`), and their tokenizers."""

import glob
import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from growlab.base.errors import UserError, first_line, how_to_install
from growlab.lab.data.cache import refuse

#: Token after each document, for tokenizers trained here.
END_OF_TEXT = "<|endoftext|>"
# Names tried for it in other tokenizers, in order.
_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "[SEP]")
_TOKENIZER = "tokenizer.json"
# Files next to tokenizer.json that may have "eos_token".
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
# Files that `datasets.save_to_disk` writes for a DatasetDict and for a single Dataset.
_SAVED = ("dataset_dict.json", "state.json")
_HTML = (".html", ".htm")
# Elements whose content is not displayed, and elements that start a new line.
_HIDDEN = {"script", "style", "template"}
_BLOCKS = re.compile("p|div|br|[uod]l|li|d[td]|tr|table|pre|section|article|blockquote|h[1-6]")
_CHUNK = 1024  # rows read at once


@dataclass
class Documents:
    """Documents in files, in the order of their paths; each iteration reads the files again.

    Args:
        path: a file, a folder (searched recursively), a pattern with `*`, or a folder that `datasets` saved.
        split: the split to read of a saved DatasetDict.

    Attributes:
        skipped: files of a folder without text in UTF-8; known after an iteration.
    """

    path: str
    suffixes: Sequence[str] = (".txt", ".md", ".rst", ".html")
    column: str = "text"
    strip_html: bool = True
    split: str | None = None

    def __post_init__(self) -> None:
        self.files = self._files()
        self.skipped: list[Path] = []

    def __iter__(self) -> Iterator[str]:
        self.skipped = []
        if (rows := saved_datasets(self.path)) is not None:
            rows = self._of_split(rows)
            self._check_column(rows.column_names, self.path)
            rows = rows.select_columns([self.column])
            for start in range(0, len(rows), _CHUNK):
                yield from self._strings(rows[start : start + _CHUNK][self.column], self.path)
            return
        for path in self.files:
            if path.suffix == ".parquet":
                yield from self._parquet(path)
            elif (text := self._text(path)) is not None:
                yield text

    def digest(self) -> str:
        """Return a hash of the files' content and of the settings for reading them."""
        digest = hashlib.sha256(repr((self.column, self.strip_html, self.split)).encode())
        for path in self.files:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256")
            digest.update(f"{path.suffixes[-2:]}\t{content.hexdigest()}\n".encode())
        return digest.hexdigest()

    def _files(self) -> list[Path]:
        place = Path(self.path).expanduser()
        if (rows := saved_datasets(place)) is not None:
            self._of_split(rows)
            return sorted(file for file in place.rglob("*") if file.is_file())
        if place.is_file():
            return [place]
        if place.is_dir():
            endings = tuple(suffix + packed for suffix in self.suffixes for packed in ("", ".gz"))
            found = (
                Path(parent, name)
                for parent, _, names in os.walk(place, onerror=refuse)
                for name in names
                if name.endswith((*endings, ".parquet"))
            )
            missing = f"no file with the suffix {', '.join(self.suffixes)} or .parquet; set data.suffixes"
        elif glob.has_magic(str(place)):
            found = (Path(name) for name in glob.iglob(str(place), recursive=True))
            missing = "no matching file"
        else:
            raise UserError(
                f"data.path={self.path} does not exist: give a file, a folder or a pattern such as 'docs/**/*.txt'."
            )
        files = sorted(file for file in found if file.is_file())
        if not files:
            raise UserError(f"data.path={self.path} has {missing}.")
        return files

    def _text(self, path: Path) -> str | None:
        try:
            content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            text = content.decode("utf-8")
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            if len(self.files) == 1 or isinstance(error, PermissionError):
                raise UserError(f"data.path: {path} cannot be read: {error}.") from error
            self.skipped.append(path)
            return None
        html = path.name.removesuffix(".gz").endswith(_HTML)
        return text_of_html(text) if html and self.strip_html else text

    def _parquet(self, path: Path) -> Iterator[str]:
        try:
            with pq.ParquetFile(path) as file:
                self._check_column(file.schema_arrow.names, str(path))
                for batch in file.iter_batches(_CHUNK, columns=[self.column]):
                    yield from self._strings(batch.column(0).to_pylist(), str(path))
        except (OSError, pa.ArrowException) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"data.path: cannot read {path} as Parquet ({reason}).") from error

    def _of_split(self, rows: Any) -> Any:
        name = self.split or "train"
        if isinstance(rows, dict) and name not in rows:
            raise UserError(f"{self.path} has the splits {', '.join(rows)} and no {name}.")
        return rows[name] if isinstance(rows, dict) else rows

    def _check_column(self, names: Sequence[str], where: str) -> None:
        if self.column not in names:
            raise UserError(
                f"{where} has no column {self.column}: its columns are {', '.join(names)}; choose one with data.column."
            )

    def _strings(self, values: Sequence[Any], where: str) -> Iterator[str]:
        for value in values:
            if not isinstance(value, str | None):
                raise UserError(
                    f"the column {self.column} of {where} has values of type {type(value).__name__}, not text; choose "
                    "another with data.column."
                )
            if value is not None:
                yield value


def saved_datasets(path: str | Path) -> Any:
    """Load the Dataset or DatasetDict that `datasets.save_to_disk` wrote to a folder; None for other folders."""
    folder = Path(path).expanduser()
    if not any((folder / name).is_file() for name in _SAVED):
        return None
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"{folder} was saved by Hugging Face's datasets, which is not installed: {how_to_install('transformers')}."
        ) from error
    return datasets.load_from_disk(str(folder))


def text_of_html(source: str) -> str:
    r"""Return the visible text of a page, one line per paragraph.

    Examples:
        >>> text_of_html("<p>a &lt; b<br>c</p><script>x()</script><li>d")
        'a < b\nc\nd\n'
    """
    parser = _Text()
    parser.feed(source)
    parser.close()
    lines = "".join(parser.pieces).splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines if line.strip())


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self._hidden_depth = 0

    def handle_starttag(self, tag: str, attrs: Any, step: int = 1) -> None:
        self._hidden_depth = max(0, self._hidden_depth + step * (tag in _HIDDEN))
        if _BLOCKS.fullmatch(tag):
            self.pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.handle_starttag(tag, (), -1)

    def handle_data(self, data: str) -> None:
        if not self._hidden_depth:
            self.pieces.append(data)


@dataclass(frozen=True)
class TextTokenizer:
    """Tokenizer of the library `tokenizers`; `end_text` is the token after each document."""

    core: Any
    end_text: str

    def __post_init__(self) -> None:
        # Encode special tokens that occur in a text letter by letter.
        self.core.encode_special_tokens = True

    def __len__(self) -> int:
        """One more than the largest token id."""
        return max(self.core.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def end(self) -> int:
        """Id of the token after each document."""
        return self.core.token_to_id(self.end_text)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of each text, with the end of text, int64 [T]."""
        encodings = self.core.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array([*encoding.ids, self.end], dtype=np.int64) for encoding in encodings]

    def byte_lengths(self) -> np.ndarray | None:
        """Return the bytes of UTF-8 per token id, int64 [vocabulary]; None if tokens do not stand for bytes."""
        described = json.loads(self.core.to_str())
        if not _is_byte_level(described.get("decoder")):
            return None
        lengths = np.zeros(len(self), dtype=np.int64)
        for token, number in self.core.get_vocab(with_added_tokens=False).items():
            # Byte-level tokenizers write each byte as one character.
            lengths[number] = len(token)
        for token in described.get("added_tokens", ()):
            lengths[token["id"]] = 0 if token["special"] else len(token["content"].encode())
        return lengths

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` and the settings that `AutoTokenizer.from_pretrained` needs."""
        self.core.save(str(folder / _TOKENIZER))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.end_text}
        (folder / _SETTINGS[0]).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Train byte-level byte-pair encoding (Radford et al. 2019), which encodes any text without loss.

    The vocabulary includes the 256 bytes and `END_OF_TEXT`; it is smaller than `vocab_size` if the text has no more
    pairs to merge.
    """
    library = _library()
    core = library.Tokenizer(library.models.BPE())
    core.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return TextTokenizer(core, END_OF_TEXT)


def load_tokenizer(path: str, end_of_text: str | None = None) -> TextTokenizer:
    """Load a `tokenizer.json`, or its folder, whose settings name the end of text unless `end_of_text` does."""
    file = tokenizer_file(path)
    try:
        core = _library().Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exceptions
        raise UserError(f"data.tokenizer={path} cannot be read: {first_line(error)}.") from error
    # Saved with the tokenizer, but not wanted here.
    core.no_truncation()
    core.no_padding()
    known = core.get_vocab(with_added_tokens=True)
    end = end_of_text or _end_in(file.parent) or next((token for token in _ENDS if token in known), None)
    if end is None or end not in known:
        raise UserError(
            f"data.tokenizer={path}: the end of a text ({end or 'none of the usual names'}) is not among its "
            f"{len(known)} tokens; choose the token that ends a text with data.end_of_text."
        )
    return TextTokenizer(core, end)


def tokenizer_file(path: str) -> Path:
    """Return a path to `tokenizer.json` from that path or its folder."""
    place = Path(path).expanduser()
    file = place / _TOKENIZER if place.is_dir() else place
    if not file.is_file():
        raise UserError(
            f"data.tokenizer={path}: {file} does not exist; transformers writes one with "
            "AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)."
        )
    return file


def _end_in(folder: Path) -> str | None:
    for path in (folder / name for name in _SETTINGS):
        if path.is_file() and (token := json.loads(path.read_text(encoding="utf-8")).get("eos_token")):
            return token["content"] if isinstance(token, dict) else token
    return None


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    return decoder.get("type") == "ByteLevel" or any(map(_is_byte_level, decoder.get("decoders", ())))


def _library() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise UserError(f"data=tokens needs tokenizers: {how_to_install('transformers')}.") from error
    return tokenizers

"""Documents in files of text: plain, gzipped, HTML, a column of Parquet, a folder of Hugging Face's `datasets`."""

import glob
import gzip
import hashlib
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from growlab.base.errors import UserError, how_to_install
from growlab.lab.data.arguments import refuse_unreadable

# What `datasets.save_to_disk` leaves in a folder of splits and in one of a single split.
_SAVED = ("dataset_dict.json", "state.json")
_HTML = (".html", ".htm")
# Elements whose content nobody reads, and those that end a line.
_UNSEEN = {"script", "style", "template"}
_BLOCKS = {
    *[
        "p",
        "div",
        "br",
        "li",
        "ul",
        "ol",
        "dl",
        "dt",
        "dd",
        "tr",
        "table",
        "pre",
        "section",
        "article",
        "blockquote",
    ],
    *("h1", "h2", "h3", "h4", "h5", "h6"),
}
_CHUNK = 1024  # rows of a column that are read at once


@dataclass(frozen=True)
class TextReading:
    """Files that are documents, and how to read them; see `TokenData`.

    Raises:
        UserError: no suffixes, or one without its dot.
    """

    suffixes: Sequence[str] = (".txt", ".md", ".rst", ".html")
    column: str = "text"
    strip_html: bool = True

    def __post_init__(self) -> None:
        wrong = [suffix for suffix in self.suffixes if not suffix.startswith(".")]
        if wrong or not self.suffixes:
            raise UserError(
                f"data.suffixes={list(self.suffixes)} must be endings of names such as .txt, with their dots."
            )


class Documents:
    """Documents of files, read again each time that they are iterated over, in the order of their paths.

    Args:
        path: a file, a folder (searched with all below it), a pattern with `*`, or a folder that `datasets` saved.
        reading: how files are read.
        split: of a saved data set of several splits, the one that is read.

    Attributes:
        skipped: files of a folder that hold no text in UTF-8; known once the documents were read.

    Raises:
        UserError: nothing is there; while they are read also: a file cannot be read.
    """

    def __init__(self, path: str, reading: TextReading, split: str | None = None) -> None:
        self.path, self.reading, self.split = path, reading, split
        self.files = _files(path, reading, split)
        self.skipped: list[Path] = []
        self._named = len(self.files) == 1

    def __iter__(self) -> Iterator[str]:
        self.skipped = []
        if (folder := saved_folder(self.path)) is not None:
            yield from self._rows(_split_of(folder, self.split), str(folder))
            return
        for path in self.files:
            if path.suffix == ".parquet":
                yield from self._parquet(path)
            elif (text := self._text(path)) is not None:
                yield text

    def digest(self) -> str:
        """Return a hash of the files' content and of how they are read."""
        found = hashlib.sha256(repr((self.reading.column, self.reading.strip_html, self.split)).encode())
        for path in self.files:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256")
            found.update(f"{path.suffixes[-2:]}\t{content.hexdigest()}\n".encode())
        return found.hexdigest()

    def _text(self, path: Path) -> str | None:
        try:
            content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            text = content.decode("utf-8")
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            if self._named or isinstance(error, PermissionError):
                raise UserError(f"data.path: {path} cannot be read: {_reason(error)}.") from error
            self.skipped.append(path)
            return None
        html = path.name.removesuffix(".gz").endswith(_HTML)
        return text_of_html(text) if html and self.reading.strip_html else text

    def _parquet(self, path: Path) -> Iterator[str]:
        column = self.reading.column
        try:
            with pq.ParquetFile(path) as file:
                _check_column(column, file.schema_arrow.names, str(path))
                for batch in file.iter_batches(_CHUNK, columns=[column]):
                    yield from _strings(batch.column(0).to_pylist(), column, str(path))
        except (OSError, pa.ArrowException) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"data.path: cannot read {path} as Parquet ({reason}).") from error

    def _rows(self, rows: Any, where: str) -> Iterator[str]:
        column = self.reading.column
        _check_column(column, rows.column_names, where)
        rows = rows.select_columns([column])
        for start in range(0, len(rows), _CHUNK):
            yield from _strings(rows[start : start + _CHUNK][column], column, where)


def saved_folder(path: str | Path) -> Path | None:
    """Return the folder, if `datasets.save_to_disk` wrote it."""
    folder = Path(path).expanduser()
    return folder if any((folder / name).is_file() for name in _SAVED) else None


def saved_datasets(path: str | Path) -> Any:
    """Return the data set, or its splits by name, that `datasets.save_to_disk` wrote into a folder; None for others.

    Raises:
        UserError: `datasets` is not installed.
    """
    if (folder := saved_folder(path)) is None:
        return None
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"{folder} was saved by Hugging Face's datasets, which is not installed: {how_to_install('transformers')}."
        ) from error
    return datasets.load_from_disk(str(folder))


def saved_splits(path: str) -> list[str]:
    """Return the names of the splits of a saved data set; none where it has but one, or the path is something else."""
    found = saved_datasets(path)
    return sorted(found) if isinstance(found, dict) else []


def text_of_html(source: str) -> str:
    r"""Return the text that a page shows, a line for each paragraph.

    Examples:
        >>> text_of_html("<p>a &lt; b<br>c</p><script>x()</script><li>d")
        'a < b\nc\nd\n'
    """
    parser = _Text()
    parser.feed(source)
    parser.close()
    lines = ("".join(parser.found) + "\n").splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines if line.strip())


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[str] = []
        self._unseen = 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._unseen += tag in _UNSEEN
        self.found += ["\n"] * (tag in _BLOCKS)

    def handle_endtag(self, tag: str) -> None:
        self._unseen = max(0, self._unseen - (tag in _UNSEEN))
        self.found += ["\n"] * (tag in _BLOCKS)

    def handle_data(self, data: str) -> None:
        if not self._unseen:
            self.found.append(data)


def _files(path: str, reading: TextReading, split: str | None) -> list[Path]:
    place = Path(path).expanduser()
    if saved_folder(path) is not None:
        _split_of(place, split)
        return sorted(file for file in place.rglob("*") if file.is_file())
    if place.is_dir():
        endings = tuple(f"{suffix}{packed}" for suffix in reading.suffixes for packed in ("", ".gz"))
        found = (
            Path(parent, name)
            for parent, _, names in os.walk(place, onerror=refuse_unreadable)
            for name in names
            if name.endswith((*endings, ".parquet"))
        )
        missing = f"no file that ends with {', '.join(reading.suffixes)} or .parquet; set data.suffixes"
    elif glob.has_magic(str(place)):
        found = (Path(name) for name in glob.iglob(str(place), recursive=True))
        missing = "no file of this pattern"
    elif place.is_file():
        return [place]
    else:
        raise UserError(
            f"data.path={path} is not there: give a file, a folder or a pattern such as 'docs/**/*.txt'."
        )
    files = sorted(file for file in found if file.is_file())
    if not files:
        raise UserError(f"data.path={path} has {missing}.")
    return files


def _split_of(folder: Path, split: str | None) -> Any:
    rows, name = saved_datasets(folder), split or "train"
    if not isinstance(rows, dict):
        return rows
    if name not in rows:
        raise UserError(f"{folder} has the splits {', '.join(rows)} and no {name}.")
    return rows[name]


def _strings(values: Sequence[Any], column: str, where: str) -> Iterator[str]:
    for value in values:
        if value is None:
            continue
        if not isinstance(value, str):
            raise UserError(
                f"the column {column} of {where} holds {type(value).__name__}, not text; name another with data.column."
            )
        yield value


def _check_column(column: str, names: Sequence[str], where: str) -> None:
    if column not in names:
        raise UserError(
            f"{where} has no column {column}: its columns are {', '.join(names)}; name one with data.column."
        )


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else "it is no text in UTF-8"

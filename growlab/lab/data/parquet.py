"""Hugging Face's Parquet layout: one column of encoded images, one of labels."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from growlab.base.errors import UserError
from growlab.lab.data.cache import files_fingerprint
from growlab.lab.data.crops import Fit
from growlab.lab.data.folders import split_folders
from growlab.lab.data.image_sets import EncodedImages, class_names

IMAGE_COLUMNS = ("img", "image")
LABEL_COLUMNS = ("label", "fine_label", "labels")
_SHARD = re.compile(r"(?P<split>.+-)(?P<number>\d{5})-of-(?P<count>\d{5}).*|(?P<alone>\d+)")
# Above this, encoded images are read row group by row group instead of kept in memory.
_HELD_BYTES = 2 << 30
# So much of them is kept for those who read one image at a time.
_RECENT_BYTES = 256 << 20


def find_parquet(root: Path) -> dict[str, list[Path]]:
    """Return the Parquet files of "train", "test" and "val", in `root` or one folder below it.

    A split is known by how the file's name begins, train, test or val(idation), or by the folder of such a name that
    the file lies in, as in `train/0000.parquet`. Validation files serve as the test set where there is none, or one
    without labels (-1), as ImageNet's. Empty if there is no training file.

    Raises:
        UserError: several folders hold a training set, or files of a split are missing.
    """
    parts = set(split_folders(root).values())
    folders = [root, *sorted(path for path in root.iterdir() if path.is_dir() and path not in parts)]
    found = {folder: _splits(folder) for folder in folders}
    found = {folder: splits for folder, splits in found.items() if "train" in splits}
    if len(found) > 1:
        names = " and ".join(str(folder) for folder in found)
        raise UserError(f"training Parquet files lie in several folders, {names}; point data.root at one.")
    return next(iter(found.values()), {})


def open_parquet(splits: dict[str, list[Path]], fit: Fit) -> dict[str, EncodedImages]:
    """Open the training, the test and, if it is there, the validation set; images are read when asked for.

    Raises:
        UserError: a file is unreadable, or has no column of images or labels.
    """
    image_column, label_column, names = _columns(splits["train"][0])
    splits = dict(splits)
    labels = {split: _labels(paths, label_column) for split, paths in splits.items()}
    if "val" in splits and (labels["test"] < 0).all():
        splits["test"], labels["test"] = splits.pop("val"), labels.pop("val")
    for split in splits.keys() - {"train"}:
        *_, other_names = _columns(splits[split][0])
        if names and other_names and names != other_names:
            raise UserError(
                f"{splits[split][0]} numbers its classes otherwise than {splits['train'][0].name}: "
                f"{_first(names, other_names)}; write both with the same names."
            )
    classes = class_names(list(labels.values()), names, str(splits["train"][0].parent))
    sets: dict[str, EncodedImages] = {}
    for split, paths in splits.items():
        payloads, positions = ParquetPayloads(paths, image_column), np.arange(len(labels[split]))
        sets[split] = EncodedImages(payloads, labels[split], classes, positions, fit, sets.get("train"))
    return sets


def _first(names: Sequence[str], others: Sequence[str]) -> str:
    """Name the first class that two lists number differently."""
    number = next(i for i in range(len(names) + 1) if names[i : i + 1] != others[i : i + 1])
    told = [repr(part[number]) if number < len(part) else "none" for part in (others, names)]
    return f"class {number} is {told[0]} there and {told[1]} here"


class ParquetPayloads:
    """The image column of Parquet files: in memory from its first use, or read row group by row group.

    Args:
        paths: the files of one split, in order.
        column: name of the column: encoded bytes, or a struct with a field `bytes`.
    """

    def __init__(self, paths: Sequence[Path], column: str) -> None:
        self.paths = list(paths)
        self.column = column
        rows = [_read(path, _group_rows) for path in self.paths]
        self._file_starts = np.cumsum([0, *map(sum, rows)])
        self._num_bytes = sum(path.stat().st_size for path in self.paths)
        streamed = self._num_bytes > _HELD_BYTES
        self.blocks = RowGroups(self.paths, column, rows) if streamed else None
        self._open()

    def __len__(self) -> int:
        return int(self._file_starts[-1])

    def __getstate__(self) -> dict[str, Any]:
        # Worker processes open the files themselves.
        return {name: value for name, value in self.__dict__.items() if name not in ("_images", "_recent")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def read(self, position: int) -> bytes:
        """Return the encoded image at this row."""
        if self.blocks is not None:
            block = int(np.searchsorted(self.blocks.starts, position, side="right")) - 1
            return self._recent(block)[position - self.blocks.starts[block]]
        if self._images is None:
            tables = [_read(path, lambda p: pq.read_table(p, columns=[self.column])) for path in self.paths]
            self._images = pa.concat_tables(tables).column(self.column)
        return _content(self._images[position], lambda: self.describe(position))

    def describe(self, position: int) -> str:
        """Return `in row 17 of train.parquet`, with its folder."""
        file = int(np.searchsorted(self._file_starts, position, side="right")) - 1
        return f"in row {position - self._file_starts[file]} of {self.paths[file]}"

    def fingerprint(self) -> str:
        """Return the files' names, sizes and times of change."""
        return files_fingerprint(self.paths)

    def _open(self) -> None:
        self._images: pa.ChunkedArray | None = None
        if self.blocks is not None:
            block_bytes = self._num_bytes // len(self.blocks.starts)
            self._recent = lru_cache(maxsize=max(1, _RECENT_BYTES // block_bytes))(self.blocks.read)


class RowGroups:
    """Row groups of Parquet files, each read as a whole.

    Args:
        paths: the files of one split, in order.
        column: name of the image column.
        rows: for each file, the number of rows in each row group.
    """

    def __init__(self, paths: Sequence[Path], column: str, rows: Sequence[Sequence[int]]) -> None:
        self.column = column
        #: (file, row group in it, first row of the file in it) of each block.
        self.places = [
            (path, group, sum(counts[:group]))
            for path, counts in zip(paths, rows, strict=True)
            for group in range(len(counts))
        ]
        self.starts = np.cumsum([0, *(count for counts in rows for count in counts)])[:-1]

    def read(self, block: int) -> list[bytes]:
        """Return the encoded images of a row group.

        Raises:
            UserError: the file cannot be read, or a row has no bytes.
        """
        path, group, first_row = self.places[block]

        def read_group(path: Path) -> pa.ChunkedArray:
            with pq.ParquetFile(path) as file:
                return file.read_row_group(group, columns=[self.column]).column(self.column)

        rows = enumerate(_read(path, read_group), start=first_row)
        return [_content(value, lambda row=row: f"in row {row} of {path}") for row, value in rows]


def _group_rows(path: Path) -> list[int]:
    metadata = pq.read_metadata(path)
    return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


def _content(value: pa.Scalar, where: Callable[[], str]) -> bytes:
    content = value.as_py()
    if isinstance(content, dict):
        content = content.get("bytes")
    if content is None:
        raise UserError(f"{where()} holds no image bytes; write the images into the file.")
    if not isinstance(content, bytes):
        raise UserError(
            f"the image {where()} is of type {type(content).__name__}, not the bytes of an image file; write images as "
            "PNG or JPEG into the column."
        )
    return content


def _splits(folder: Path) -> dict[str, list[Path]]:
    files, inside = sorted(folder.glob("*.parquet")), split_folders(folder)
    splits = {}
    for split in ("train", "test", "val"):
        within = sorted(inside[split].glob("*.parquet")) if split in inside else []
        splits[split] = [*(path for path in files if path.name.startswith(split)), *within]
        _check_complete(splits[split])
    if not splits["test"]:
        splits["test"] = splits.pop("val")
    return {split: paths for split, paths in splits.items() if paths}


def _check_complete(paths: Sequence[Path]) -> None:
    """Refuse numbered files that lack one: `train-00000-of-00002.parquet`, or `0001.parquet` without `0000.parquet`."""
    there: dict[tuple[Path, str, int, int], set[int]] = defaultdict(set)
    for path in paths:
        if shard := _SHARD.fullmatch(path.stem):
            number = shard["number"] or shard["alone"]
            key = (path.parent, shard["split"] or "", len(number), int(shard["count"] or 0))
            there[key].add(int(number))
    for (folder, split, width, count), numbers in there.items():
        if missing := sorted(set(range(count or max(numbers))) - numbers):
            of = f"-of-{count:05d}" if count else ".parquet"
            raise UserError(
                f"{folder} lacks {split}{missing[0]:0{width}d}{of}; fetch it too, or rename those that are there."
            )


def _columns(path: Path) -> tuple[str, str, list[str] | None]:
    schema = _read(path, pq.read_schema)
    image = next((name for name in IMAGE_COLUMNS if name in schema.names), None)
    label = next((name for name in LABEL_COLUMNS if name in schema.names), None)
    if image is None or label is None or not pa.types.is_integer(schema.field(label).type):
        raise UserError(
            f"{path} has the columns {', '.join(schema.names)}, but an image column (img or image) and a "
            "column of whole numbers (label, fine_label or labels) are needed; rename them."
        )
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = list(features[label]["names"])
    except (KeyError, TypeError, ValueError):
        names = None
    return image, label, names


def _labels(paths: Sequence[Path], column: str) -> np.ndarray:
    parts = [_read(path, lambda p: pq.read_table(p, columns=[column])).column(column) for path in paths]
    labels = np.concatenate([part.to_numpy() for part in parts])
    if labels.size == 0 or labels.dtype.kind == "f":
        raise UserError(f"{paths[0]} has no rows or rows without a label; take them out.")
    return labels.astype(np.int64)


def _read(path: Path, read: Any) -> Any:
    try:
        return read(path)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"cannot read {path} as Parquet ({reason}); replace the file or data.root."
        ) from error

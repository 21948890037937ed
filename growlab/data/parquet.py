"""Hugging Face's Parquet layout: one column of encoded images, one of labels."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from growlab.data.cache import cached_file, files_fingerprint
from growlab.data.images import EncodedImages, class_names
from growlab.errors import UserError

IMAGE_COLUMNS = ("img", "image")
LABEL_COLUMNS = ("label", "fine_label", "labels")
# Above this, encoded images are mapped from a file instead of held in memory.
_MAPPED_BYTES = 2 << 30


def find_parquet(root: Path) -> dict[str, list[Path]]:
    """Return the Parquet files of "train" and "test", in `root` or one folder below it.

    A split is known by how the file's name begins: train, test or val(idation); a validation file serves as
    the test set where there is none. Empty if there is no training file.

    Raises:
        UserError: several folders hold a training set.
    """
    folders = [root, *sorted(path for path in root.iterdir() if path.is_dir())]
    found = {folder: _splits(folder) for folder in folders}
    found = {folder: splits for folder, splits in found.items() if "train" in splits}
    if len(found) > 1:
        names = " and ".join(str(folder) for folder in found)
        raise UserError(f"training Parquet files lie in several folders, {names}; point data.root at one.")
    return next(iter(found.values()), {})


def open_parquet(
    splits: dict[str, list[Path]], image_size: int | None
) -> tuple[EncodedImages, EncodedImages]:
    """Open the training and the test set; images are read when asked for.

    Raises:
        UserError: a file is unreadable, or has no column of images or labels.
    """
    image_column, label_column, names = _columns(splits["train"][0])
    labels = {split: _labels(paths, label_column) for split, paths in splits.items()}
    classes = class_names(list(labels.values()), names, str(splits["train"][0].parent))
    sets: list[EncodedImages] = []
    for split in ("train", "test"):
        payloads = ParquetPayloads(splits[split], image_column)
        positions = np.arange(len(labels[split]))
        sets.append(
            EncodedImages(
                payloads, labels[split], classes, positions, image_size, frame_of=sets[0] if sets else None
            )
        )
    return sets[0], sets[1]


class ParquetPayloads:
    """The image column of Parquet files, read at first use; large files through a mapped Arrow file.

    Args:
        paths: the files of one split, in order.
        column: name of the column: encoded bytes, or a struct with a field `bytes`.
    """

    def __init__(self, paths: Sequence[Path], column: str) -> None:
        self.paths = list(paths)
        self.column = column
        self._length = sum(_read(path, lambda p: pq.read_metadata(p).num_rows) for path in self.paths)
        self._images: pa.ChunkedArray | None = None

    def __len__(self) -> int:
        return self._length

    def __getstate__(self) -> dict[str, Any]:
        # Worker processes open the files themselves.
        return {**self.__dict__, "_images": None}

    def read(self, position: int) -> bytes:
        """Return the encoded image at this row."""
        if self._images is None:
            self._images = self._load()
        content = self._images[position].as_py()
        if isinstance(content, dict):
            content = content.get("bytes")
        if content is None:
            raise UserError(
                f"{self.describe(position)} holds no image bytes; write the images into the file."
            )
        return content

    def describe(self, position: int) -> str:
        """Return `in row 17 of train.parquet`, with its folder."""
        for path in self.paths:
            rows = pq.read_metadata(path).num_rows
            if position < rows:
                return f"in row {position} of {path}"
            position -= rows
        raise IndexError(position)

    def fingerprint(self) -> str:
        """Return the files' names, sizes and times of change."""
        return files_fingerprint(self.paths)

    def _load(self) -> pa.ChunkedArray:
        if sum(path.stat().st_size for path in self.paths) <= _MAPPED_BYTES:
            tables = [_read(path, lambda p: pq.read_table(p, columns=[self.column])) for path in self.paths]
            return pa.concat_tables(tables).column(self.column)
        arrow_file = cached_file(f"{self.fingerprint()} {self.column}", ".arrow", self._write_arrow)
        return pa.ipc.open_file(pa.memory_map(str(arrow_file))).read_all().column(self.column)

    def _write_arrow(self, file: Any) -> None:
        writer = None
        for path in self.paths:
            for batch in pq.ParquetFile(path).iter_batches(batch_size=1024, columns=[self.column]):
                writer = writer or pa.ipc.new_file(file, batch.schema)
                writer.write_batch(batch)
        if writer is not None:
            writer.close()


def _splits(folder: Path) -> dict[str, list[Path]]:
    files = sorted(folder.glob("*.parquet"))
    names = ("train", "test", "val")
    splits = {split: [path for path in files if path.name.startswith(split)] for split in names}
    if not splits["test"]:
        splits["test"] = splits["val"]
    return {split: paths for split, paths in splits.items() if paths and split != "val"}


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

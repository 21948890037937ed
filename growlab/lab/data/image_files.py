"""Open labelled images in a folder: torchvision's files, Hugging Face's Parquet files, or one folder per class."""

import contextlib
import hashlib
import json
import logging
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from growlab.base.errors import UserError
from growlab.base.files import write_atomically
from growlab.lab.data.arrival import stratified_split
from growlab.lab.data.cache import cache_dir, files_fingerprint, locked, refuse
from growlab.lab.data.images import EncodedImages, Fit, ImageArray, Images, Source
from growlab.lab.data.run_data import PART_NAMES

log = logging.getLogger(__name__)
T = TypeVar("T")

# name: (class in torchvision.datasets, its files or folders under `root`)
DATASETS = {
    "cifar10": ("CIFAR10", ("cifar-10-batches-py", "cifar-10-python.tar.gz")),
    "cifar100": ("CIFAR100", ("cifar-100-python", "cifar-100-python.tar.gz")),
    "mnist": ("MNIST", ("MNIST",)),
    "fashion_mnist": ("FashionMNIST", ("FashionMNIST",)),
}
_LAYOUTS = (
    "Parquet files (train*.parquet or train/*.parquet, test likewise), folders (train/<class>/*.png, "
    "test/<class>/*.png; data=folder also takes <class>/*.png)"
)
_EXTENSIONS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
# Parquet files up to this total size are read into memory; larger ones are memory-mapped.
_IN_MEMORY_BYTES = 2 << 30
# A download fails after this long without a response.
_TIMEOUT_SEC = 20


def default_root(name: str) -> Path:
    """Return the default folder of a data set: `$GROWLAB_DATA/<name>`, else in the cache folder."""
    base = os.environ.get("GROWLAB_DATA")
    return (Path(base) if base else cache_dir()) / name


def open_images(
    name: str,
    root: str | os.PathLike[str] | None,
    download: bool = True,
    fit: Fit | None = None,
    skip_damaged: bool = False,
    without_test: bool = False,
) -> dict[str, Images]:
    """Return the sets of `name`: "train", "test", and "val" if the data has one as well as a test set.

    Args:
        name: key of `DATASETS`, "digits", or any name for data in `root`.
        root: folder with Parquet files, class folders or torchvision's files; None: `default_root(name)`.
        download: fetch the data if the folder is empty.
        fit: brings images to one size.
        skip_damaged: leave out images in class folders that cannot be decoded.
        without_test: accept class folders directly in `root`, as a training set without a test set.
    """
    if name == "digits" and root is None:
        return load_digits()
    folder = Path(root).expanduser() if root is not None else default_root(name)
    if folder.is_dir() and any(folder.iterdir()):
        if found := _open_folder(name, folder, download, fit or Fit(), skip_damaged, without_test):
            return found
    elif name in DATASETS and download:
        return load_torchvision(name, folder, download=True)
    hint = "; without data.root the digits come from scikit-learn" if name == "digits" else ""
    raise UserError(f"found no {name} data in {folder}: {_searched_for(name)}{hint}.")


def _open_folder(
    name: str, folder: Path, download: bool, fit: Fit, skip_damaged: bool, without_test: bool
) -> dict[str, Images]:
    if name in DATASETS and any((folder / entry).exists() for entry in DATASETS[name][1]):
        return load_torchvision(name, folder, download)
    parts = _part_folders(folder)
    if "train" in parts and any(path.is_dir() for path in _entries(parts["train"])):
        return {**_open_class_folders(_with_test(parts), fit, skip_damaged)}
    if splits := _find_parquet(folder):
        return {**_open_parquet(splits, fit)}
    if without_test and len(classes := _class_folders(folder)) > 1:
        if both := sorted(set(parts.values()) & set(classes)):
            raise UserError(
                f"{folder} has {both[0].name}/ among class folders: is it a class or a part? Put the class folders of "
                "the training images below train/, or give that folder another name."
            )
        return {**_open_class_folders({"train": folder}, fit, skip_damaged)}
    return {}


def _searched_for(name: str) -> str:
    torchvision = f" or torchvision's {' / '.join(DATASETS[name][1])}" if name in DATASETS else ""
    return f"searched for {_LAYOUTS}{torchvision}; point data.root=FOLDER at one of these"


def _with_test(parts: dict[str, T]) -> dict[str, T]:
    """Use the validation set as the test set if there is no test set."""
    return {"test" if name == "val" and "test" not in parts else name: part for name, part in parts.items()}


def load_digits() -> dict[str, Images]:
    """Return scikit-learn's 1,797 handwritten digits of 8x8 pixels, scaled from 0..16 to 0..255.

    A fixed stratified split gives 1,438 training and 359 test images.
    """
    import sklearn.datasets

    bunch = sklearn.datasets.load_digits()
    images_NHWC = torch.from_numpy(np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., None])
    labels = bunch.target.astype(np.int64)
    everything = ImageArray(images_NHWC, torch.from_numpy(labels), tuple(str(digit) for digit in range(10)))
    train, test = stratified_split(labels, fraction=0.2, seed=0)
    return {"train": everything.select(train), "test": everything.select(test)}


def load_torchvision(name: str, root: Path, download: bool) -> dict[str, Images]:
    """Return the training and test sets from torchvision's files, which are downloaded if missing."""
    import torchvision.datasets

    kind = getattr(torchvision.datasets, DATASETS[name][0])

    def opened(fetch: bool) -> list[Any]:
        return [kind(str(root), train=train, download=fetch) for train in (True, False)]

    try:
        sets = opened(False)
    except Exception:  # RuntimeError, UnpicklingError, ValueError, KeyError, OSError among them
        if not download:
            raise
        sets = _downloaded(lambda: opened(True), name, root)
    parts: dict[str, Images] = {}
    for part, dataset in zip(("train", "test"), sets, strict=True):
        images = torch.from_numpy(np.ascontiguousarray(dataset.data))
        labels_N = torch.as_tensor(dataset.targets, dtype=torch.int64)
        classes = tuple(str(name) for name in dataset.classes)
        parts[part] = ImageArray(images if images.ndim == 4 else images[..., None], labels_N, classes)
    return parts


def _downloaded(fetch: Callable[[], list[Any]], name: str, root: Path) -> list[Any]:
    timeout = socket.getdefaulttimeout()
    try:
        socket.setdefaulttimeout(_TIMEOUT_SEC)
        # torchvision prints its progress; keep standard output for results.
        with locked(cache_dir() / f"download-{name}"), contextlib.redirect_stdout(sys.stderr):
            sets = fetch()
    except Exception as error:  # torchvision's and urllib's exceptions have no common base
        reason = str(getattr(error, "reason", "") or error).partition("\n")[0] or type(error).__name__
        raise UserError(
            f"found no {name} in {root} and could not download it ({reason}); {_searched_for(name)}."
        ) from error
    finally:
        socket.setdefaulttimeout(timeout)
    log.info("downloaded %s to %s", name, root)
    return sets


def _part_folders(root: Path) -> dict[str, Path]:
    """Return the folders of "train", "val" and "test" in `root`; lower-case names win over other spellings."""
    folders = [path for path in _entries(root) if path.is_dir()]
    found = {}
    for part, names in PART_NAMES.items():
        if matching := [path for path in folders if path.name.lower() in names]:
            found[part] = min(matching, key=lambda p: (names.index(p.name.lower()), p.name not in names, p))
    return found


def _class_folders(root: Path) -> dict[Path, list[str]]:
    """Return the folders in `root` that contain images, with the images' paths relative to `root`."""
    found = {}
    for folder in _entries(root):
        if folder.is_dir() and (names := sorted(_image_names(folder))):
            found[folder] = [os.path.join(folder.name, name) for name in names]
    return found


def _open_class_folders(folders: dict[str, Path], fit: Fit, skip_damaged: bool) -> dict[str, EncodedImages]:
    """Open the sets, "train" first; its folders with images, in alphabetical order, are the classes."""
    sets: dict[str, EncodedImages] = {}
    classes: tuple[str, ...] = ()
    for part, folder in folders.items():
        names = {path.name: images for path, images in _class_folders(folder).items()}
        classes = classes or tuple(names)
        if not names:
            raise UserError(f"class folders in {folder} have no images ({', '.join(sorted(_EXTENSIONS))}).")
        if unknown := names.keys() - set(classes):
            raise UserError(
                f"{folder / min(unknown)} has images of a class that the training set lacks; the classes are "
                f"{', '.join(classes[:10])}{', ...' if len(classes) > 10 else ''}."
            )
        source = _Files(folder, [name for images in names.values() for name in images])
        labels = np.repeat([classes.index(name) for name in names], [len(images) for images in names.values()])
        encoded = _encoded(source, labels, classes, fit, sets)
        if skip_damaged and (damaged := encoded.damaged()):
            log.warning(
                "skipped %s of %s images in %s that cannot be read, the first one %s",
                *(len(damaged), len(source), folder, source.describe(damaged[0])),
            )
            kept = np.setdiff1d(np.arange(len(source)), damaged)
            files = _Files(folder, [os.fsdecode(source.names[position]) for position in kept])
            encoded = _encoded(files, labels[kept], classes, fit, sets)
        sets[part] = encoded
    return sets


def _encoded(
    source: Source, labels: np.ndarray, classes: tuple[str, ...], fit: Fit, sets: dict[str, EncodedImages]
) -> EncodedImages:
    return EncodedImages(source, labels, classes, np.arange(len(labels)), fit, sets.get("train"))


class _Files(Source):
    """Image files, read on demand."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder = folder
        # One array: reference counting would copy a million strings into every worker process.
        self.names = np.array([os.fsencode(name) for name in names])

    def __len__(self) -> int:
        return len(self.names)

    def path(self, position: int) -> Path:
        return self.folder / os.fsdecode(self.names[position])

    def read(self, position: int) -> bytes:
        return self.path(position).read_bytes()

    def describe(self, position: int) -> str:
        return str(self.path(position))

    def fingerprint(self) -> str:
        return files_fingerprint([self.path(position) for position in range(len(self))])


def _image_names(folder: Path) -> Iterator[str]:
    # Not Path.rglob: ten times as slow for a million files, and it silently skips unreadable folders.
    for parent, _, files in os.walk(folder, onerror=refuse, followlinks=True):
        below = os.path.relpath(parent, folder)
        for name in files:
            if os.path.splitext(name)[1].lower() in _EXTENSIONS:
                yield name if below == "." else os.path.join(below, name)


def _entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _find_parquet(root: Path) -> dict[str, list[Path]]:
    """Return the Parquet files of "train", "test" and "val" in `root` or up to two folders below.

    The split is the start of a file's name (train, test or val), or its folder, as in `train/0000.parquet`.
    """
    splits: dict[str, list[Path]] = {split: [] for split in PART_NAMES}
    for path in sorted(path for pattern in ("", "*/", "*/*/") for path in root.glob(f"{pattern}*.parquet")):
        for split, names in PART_NAMES.items():
            if path.name.startswith(split) or path.parent.name.lower() in names:
                splits[split].append(path)
                break
    splits = {split: paths for split, paths in splits.items() if paths}
    for split, paths in splits.items():
        if len(folders := sorted({str(path.parent) for path in paths})) > 1:
            raise UserError(
                f"Parquet files of {split} are in several folders, {' and '.join(folders)}; point data.root at one."
            )
        counts = [int(found[1]) for path in paths if (found := re.search(r"-of-(\d{5})", path.stem))]
        if len(paths) < max(counts, default=0):
            raise UserError(f"{folders[0]} has only {len(paths)} of {max(counts)} files of {split}; fetch all.")
    return _with_test(splits) if "train" in splits else {}


def _open_parquet(splits: dict[str, list[Path]], fit: Fit) -> dict[str, EncodedImages]:
    """Open the sets; the validation set is used for the test if test labels are missing (-1), as in ImageNet."""
    columns = {split: _columns(paths[0]) for split, paths in splits.items()}
    labels = {split: _labels(paths, columns[split][1]) for split, paths in splits.items()}
    if "val" in splits and (labels["test"] < 0).all():
        splits = {"train": splits["train"], "test": splits["val"]}
        labels["test"] = labels.pop("val")
    image_column, _, names = columns["train"]
    for split in splits:
        if names and columns[split][2] not in (None, names):
            raise UserError(
                f"{splits[split][0]} has other class names than {splits['train'][0].name}, or another order; write "
                "both with the same names."
            )
    low, high = (int(end(end(part) for part in labels.values())) for end in (min, max))
    if low < 0 or (names and high >= len(names)):
        last = f" to {len(names) - 1}" if names else ""
        raise UserError(
            f"the labels in {splits['train'][0].parent} run from {low} to {high}; number the classes from 0{last}."
        )
    classes = tuple(names or map(str, range(high + 1)))
    sets: dict[str, EncodedImages] = {}
    for split, paths in splits.items():
        sets[split] = _encoded(_Rows(paths, image_column), labels[split], classes, fit, sets)
    return sets


def _columns(path: Path) -> tuple[str, str, list[str] | None]:
    """Return the image column, the label column, and the class names if the file has them."""
    schema = _readable(path, lambda: pq.read_schema(path))
    image = next((name for name in ("img", "image") if name in schema.names), None)
    label = next((name for name in ("label", "fine_label", "labels") if name in schema.names), None)
    if image is None or label is None or not pa.types.is_integer(schema.field(label).type):
        raise UserError(
            f"{path} has the columns {', '.join(schema.names)}, but an image column (img or image) and an "
            "integer column (label, fine_label or labels) are needed; rename them."
        )
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return image, label, list(features[label]["names"])
    except (KeyError, TypeError, ValueError):
        return image, label, None


def _labels(paths: Sequence[Path], column: str) -> np.ndarray:
    labels = _readable(paths[0], lambda: pq.ParquetDataset(paths).read(columns=[column]).column(column))
    if labels.null_count:
        raise UserError(f"{paths[0]} has rows without a label; remove them.")
    return labels.to_numpy().astype(np.int64)


class _Rows(Source):
    """Image column of Parquet files; large ones are memory-mapped from an uncompressed copy in the cache."""

    def __init__(self, paths: Sequence[Path], column: str) -> None:
        self.paths, self.column = list(paths), column
        lengths = [_readable(path, partial(pq.read_metadata, path)).num_rows for path in paths]
        self._starts, self._length = np.cumsum([0, *lengths]), sum(lengths)

    @cached_property
    def _values(self) -> pa.ChunkedArray:
        if sum(path.stat().st_size for path in self.paths) <= _IN_MEMORY_BYTES:
            read = partial(pq.read_table, columns=[self.column])
            columns = [_readable(path, partial(read, path)) for path in self.paths]
            return pa.concat_tables(columns).column(0)
        name = hashlib.sha256(f"{self.column}\n{self.fingerprint()}".encode()).hexdigest()[:24]
        copy = cache_dir() / "images" / f"{name}.arrow"
        with locked(copy):
            if not copy.is_file():
                write_atomically(copy, self._copy)
        return pa.ipc.open_file(pa.memory_map(str(copy))).read_all().column(0)

    def _copy(self, file: IO[bytes]) -> None:
        schema = pa.schema([pq.read_schema(self.paths[0]).field(self.column)])
        with pa.ipc.new_file(file, schema) as written:
            for path in self.paths:
                opened = _readable(path, partial(pq.ParquetFile, path))
                for batch in opened.iter_batches(columns=[self.column]):
                    written.write_batch(batch.cast(schema))

    def __getstate__(self) -> dict[str, Any]:
        # Each worker process reads the column itself.
        return {name: value for name, value in vars(self).items() if name != "_values"}

    def __len__(self) -> int:
        return self._length

    def read(self, position: int) -> bytes:
        value = self._values[position].as_py()
        return value["bytes"] if isinstance(value, dict) else value

    def describe(self, position: int) -> str:
        file = int(np.searchsorted(self._starts, position, side="right")) - 1
        return f"in row {position - int(self._starts[file])} of {self.paths[file]}"

    def fingerprint(self) -> str:
        return files_fingerprint(self.paths)


def _readable(path: Path, read: Callable[[], T]) -> T:
    try:
        return read()
    except (OSError, pa.ArrowException) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"cannot read {path} as Parquet ({reason}); replace the file.") from error

"""Folders of images, one for each class: `train/<class>/*.png` and `test/<class>/*.png` (or `val/`)."""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from growlab.base.errors import UserError
from growlab.base.files import write_text
from growlab.lab.data.arguments import cores, refuse_unreadable
from growlab.lab.data.cache import cache_dir, files_fingerprint, locked
from growlab.lab.data.crops import Fit
from growlab.lab.data.image_sets import EncodedImages

log = logging.getLogger(__name__)

EXTENSIONS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
# What parts are called, in any case.
_TRAIN, _TEST, _VAL = ("train", "training"), ("test", "testing"), ("val", "valid", "validation")


def find_folders(root: Path) -> dict[str, Path]:
    """Return the folders of "train", "test" and "val" as far as they are there; empty without `train/<class>/`.

    Where there is no test/, val/ is the test set.
    """
    found = split_folders(root)
    if "train" not in found or not any(path.is_dir() for path in _entries(found["train"])):
        return {}
    if "test" not in found and "val" in found:
        found["test"] = found.pop("val")
    return found


def split_folders(root: Path) -> dict[str, Path]:
    """The folders in `root` that are called by "train", "test" and "val", as far as they are there."""
    found = {
        part: _called(root, names) for part, names in (("train", _TRAIN), ("test", _TEST), ("val", _VAL))
    }
    return {part: folder for part, folder in found.items() if folder is not None}


def has_class_folders(root: Path) -> bool:
    """True if class folders lie in `root` itself.

    Raises:
        UserError: one of them is called as a part.
    """
    classes = [path for path in _entries(root) if path.is_dir() and next(_image_names(path), None)]
    parts = [path.name for path in classes if path.name.lower() in _TRAIN + _TEST + _VAL]
    if len(classes) > 1 and parts:
        raise UserError(
            f"{root} holds {parts[0]}/ among class folders: is it a class or a part? Put the class folders of the "
            "training images below train/, or give that folder another name."
        )
    return len(classes) > 1


def _called(root: Path, names: Sequence[str]) -> Path | None:
    """The folder that has the first of these names, as it is spelt or else in another case."""
    there = [path for path in _entries(root) if path.is_dir()]
    order = sorted(
        (names.index(path.name.lower()), path.name not in names, path)
        for path in there
        if path.name.lower() in names
    )
    return order[0][-1] if order else None


def open_folders(folders: dict[str, Path], fit: Fit, skip_damaged: bool = False) -> dict[str, EncodedImages]:
    """Open the sets; classes are the training set's folders with images, in alphabetical order.

    Args:
        folders: of each part, of "train" first.
        fit: how images are brought to one size.
        skip_damaged: leave out images that cannot be decoded, with a warning; the whole set is decoded for it once.

    Raises:
        UserError: there are no images, or another part has a class that the training set lacks.
    """
    below = [path for path in _entries(folders["train"]) if path.is_dir()]
    classes = tuple(path.name for path in below if next(_image_names(path), None))
    sets: dict[str, EncodedImages] = {}
    for part, folder in folders.items():
        names, labels = _images(folder, classes)
        found = _encoded(folder, names, labels, classes, fit, sets.get("train"))
        if skip_damaged and (damaged := damaged_images(found)):
            kept = np.setdiff1d(np.arange(len(names)), damaged)
            first = found.payloads.describe(damaged[0])
            told = f"{len(damaged)} of {len(names)} images in {folder} cannot be read, the first one {first}"
            if len(damaged) > len(names) / 2:
                raise UserError(f"{told}: too many for data.on_error=skip; look at the files.")
            log.warning("left out: %s", told)
            found = _encoded(folder, [names[i] for i in kept], labels[kept], classes, fit, sets.get("train"))
        sets[part] = found
    return sets


def damaged_images(images: EncodedImages) -> list[int]:
    """Return the positions of images that cannot be decoded, kept in the cache folder for the next time."""
    key = hashlib.sha256(images.payloads.fingerprint().encode()).hexdigest()[:24]
    path = cache_dir() / "damaged" / f"{key}.json"
    with locked(path):
        try:
            return list(json.loads(path.read_text()))
        except (OSError, ValueError):
            # Threads: PIL decodes without holding the interpreter's lock.
            with ThreadPoolExecutor(max_workers=min(8, cores())) as pool:
                readable = list(pool.map(images.is_readable, range(len(images.payloads))))
            found = [position for position, fine in enumerate(readable) if not fine]
            try:
                write_text(path, json.dumps(found))
            except UserError as error:
                log.warning("which images are damaged is not kept for the next run: %s", error)
            return found


class FilePayloads:
    """Image files, read when asked for.

    Args:
        folder: that holds them all.
        names: their paths below it.
    """

    blocks = None

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder = folder
        # One array: a million strings would be copied into every worker process, as Python counts references.
        self._names = np.array([os.fsencode(name) for name in names])

    def __len__(self) -> int:
        return len(self._names)

    def path(self, position: int) -> Path:
        """Return the file's path."""
        return self.folder / os.fsdecode(self._names[position])

    def read(self, position: int) -> bytes:
        """Return the file's bytes."""
        return self.path(position).read_bytes()

    def describe(self, position: int) -> str:
        """Return the file's path as text."""
        return str(self.path(position))

    def fingerprint(self) -> str:
        """Return the files' names, sizes and times of change."""
        return files_fingerprint([self.path(position) for position in range(len(self))])


def _encoded(
    folder: Path,
    names: Sequence[str],
    labels: np.ndarray,
    classes: tuple[str, ...],
    fit: Fit,
    frame_of: EncodedImages | None,
) -> EncodedImages:
    payloads = FilePayloads(folder, names)
    return EncodedImages(payloads, labels, classes, np.arange(len(names)), fit, frame_of)


def _images(folder: Path, classes: tuple[str, ...]) -> tuple[list[str], np.ndarray]:
    number = {name: label for label, name in enumerate(classes)}
    names: list[str] = []
    labels: list[int] = []
    for class_folder in _entries(folder):
        if not class_folder.is_dir():
            continue
        images = sorted(_image_names(class_folder))
        if images and class_folder.name not in number:
            raise UserError(
                f"{class_folder} holds images of a class that the training set lacks; the classes are "
                f"{', '.join(classes[:10])}{', ...' if len(classes) > 10 else ''}."
            )
        names += [os.path.join(class_folder.name, name) for name in images]
        labels += [number[class_folder.name]] * len(images) if images else []
    if not names:
        raise UserError(f"the class folders in {folder} hold no images ({', '.join(sorted(EXTENSIONS))}).")
    return names, np.array(labels, dtype=np.int64)


def _image_names(folder: Path) -> Iterator[str]:
    # Not Path.rglob, which takes ten times as long for a million files.
    for parent, folders, files in os.walk(folder, onerror=refuse_unreadable, followlinks=True):
        below = os.path.relpath(parent, folder)
        # A link to a folder above it would show the same images again and again.
        above = os.path.realpath(parent)
        folders[:] = [
            name
            for name in folders
            if not os.path.islink(place := os.path.join(parent, name))
            or os.path.commonpath([above, real := os.path.realpath(place)]) != real
        ]
        for name in files:
            if os.path.splitext(name)[1].lower() in EXTENSIONS:
                yield name if below == "." else os.path.join(below, name)


def _entries(folder: Path) -> list[Path]:
    return (
        sorted(path for path in folder.iterdir() if not path.name.startswith(".")) if folder.is_dir() else []
    )

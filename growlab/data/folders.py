"""Folders of images, one for each class: `train/<class>/*.png` and `test/<class>/*.png` (or `val/`)."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from growlab.data.cache import files_fingerprint
from growlab.data.crops import Fit
from growlab.data.images import EncodedImages
from growlab.errors import UserError

EXTENSIONS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
TEST_FOLDERS = ("test", "val", "valid", "validation")


def find_folders(root: Path) -> dict[str, Path]:
    """Return {"train": folder, "test": folder} as far as they are there; empty without `train/<class>/`."""
    if not any(path.is_dir() for path in _entries(root / "train")):
        return {}
    folders = {"train": root / "train"}
    test = next((root / name for name in TEST_FOLDERS if (root / name).is_dir()), None)
    return {**folders, "test": test} if test else folders


def open_folders(folders: dict[str, Path], fit: Fit) -> tuple[EncodedImages, EncodedImages]:
    """Open the training and the test set; classes are the training set's folders in alphabetical order.

    Raises:
        UserError: there are no images, or the test set has a class that the training set lacks.
    """
    classes = tuple(path.name for path in _entries(folders["train"]) if path.is_dir())
    sets: list[EncodedImages] = []
    for split in ("train", "test"):
        names, labels = _images(folders[split], classes)
        sets.append(
            EncodedImages(
                FilePayloads(folders[split], names),
                labels,
                classes,
                np.arange(len(names)),
                fit,
                frame_of=sets[0] if sets else None,
            )
        )
    return sets[0], sets[1]


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
    for parent, _, files in os.walk(folder, followlinks=True):
        below = os.path.relpath(parent, folder)
        for name in files:
            if os.path.splitext(name)[1].lower() in EXTENSIONS:
                yield name if below == "." else os.path.join(below, name)


def _entries(folder: Path) -> list[Path]:
    return (
        sorted(path for path in folder.iterdir() if not path.name.startswith(".")) if folder.is_dir() else []
    )

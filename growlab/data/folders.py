"""Folders of images, one for each class: `train/<class>/*.png` and `test/<class>/*.png` (or `val/`)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from growlab.data.cache import files_fingerprint
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


def open_folders(folders: dict[str, Path], image_size: int | None) -> tuple[EncodedImages, EncodedImages]:
    """Open the training and the test set; classes are the training set's folders in alphabetical order.

    Raises:
        UserError: there are no images, or the test set has a class that the training set lacks.
    """
    classes = tuple(path.name for path in _entries(folders["train"]) if path.is_dir())
    sets: list[EncodedImages] = []
    for split in ("train", "test"):
        paths, labels = _images(folders[split], classes)
        sets.append(
            EncodedImages(
                FilePayloads(paths),
                labels,
                classes,
                np.arange(len(paths)),
                image_size,
                frame_of=sets[0] if sets else None,
            )
        )
    return sets[0], sets[1]


class FilePayloads:
    """Image files, read when asked for."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, position: int) -> bytes:
        """Return the file's bytes."""
        return self.paths[position].read_bytes()

    def describe(self, position: int) -> str:
        """Return the file's path."""
        return str(self.paths[position])

    def fingerprint(self) -> str:
        """Return the files' names, sizes and times of change."""
        return files_fingerprint(self.paths)


def _images(folder: Path, classes: tuple[str, ...]) -> tuple[list[Path], np.ndarray]:
    paths: list[Path] = []
    labels: list[int] = []
    for class_folder in _entries(folder):
        if not class_folder.is_dir():
            continue
        images = sorted(path for path in class_folder.rglob("*") if path.suffix.lower() in EXTENSIONS)
        if images and class_folder.name not in classes:
            raise UserError(
                f"{class_folder} holds images of a class that the training set lacks; the classes are "
                f"{', '.join(classes[:10])}{', ...' if len(classes) > 10 else ''}."
            )
        paths += images
        labels += [classes.index(class_folder.name)] * len(images) if images else []
    if not paths:
        raise UserError(f"the class folders in {folder} hold no images ({', '.join(sorted(EXTENSIONS))}).")
    return paths, np.array(labels, dtype=np.int64)


def _entries(folder: Path) -> list[Path]:
    return (
        sorted(path for path in folder.iterdir() if not path.name.startswith(".")) if folder.is_dir() else []
    )

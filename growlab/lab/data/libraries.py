"""Data sets that come with torchvision, which downloads them, and with scikit-learn."""

import contextlib
import logging
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from growlab.base.errors import UserError
from growlab.lab.data.cache import cache_dir, locked
from growlab.lab.data.image_sets import ImageArray
from growlab.lab.data.split import stratified_split

log = logging.getLogger(__name__)

_TIMEOUT_SEC = 20

# name: (class in torchvision.datasets, what it keeps in its root)
DATASETS = {
    "cifar10": ("CIFAR10", ("cifar-10-batches-py", "cifar-10-python.tar.gz")),
    "cifar100": ("CIFAR100", ("cifar-100-python", "cifar-100-python.tar.gz")),
    "mnist": ("MNIST", ("MNIST",)),
    "fashion_mnist": ("FashionMNIST", ("FashionMNIST",)),
}


def load_digits() -> tuple[ImageArray, ImageArray]:
    """Return the 1,797 handwritten digits of 8x8 pixels: 1,438 training and 359 test images, a fixed stratified split.

    Pixels are scaled from scikit-learn's 0..16 to 0..255.
    """
    # A slow import, that other data need not wait for.
    import sklearn.datasets

    bunch = sklearn.datasets.load_digits()
    images_NHWC = torch.from_numpy(np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., None])
    labels = bunch.target.astype(np.int64)
    everything = ImageArray(images_NHWC, torch.from_numpy(labels), tuple(str(digit) for digit in range(10)))
    train, test = stratified_split(labels, fraction=0.2, seed=0)
    return everything.select(train), everything.select(test)


def has_torchvision_files(name: str, root: Path) -> bool:
    """Return True if `root` has torchvision's files of this data set, or the beginning of them."""
    return name in DATASETS and any((root / entry).exists() for entry in DATASETS[name][1])


def load_torchvision(name: str, root: Path, download: bool) -> tuple[ImageArray, ImageArray]:
    """Return the training and the test set from torchvision's files, downloaded first if they are missing.

    Raises:
        UserError: the files are missing or damaged and may not or cannot be downloaded.
    """
    train, test = (_open(name, root, train=part, download=download) for part in (True, False))
    return _decoded(train), _decoded(test)


def _open(name: str, root: Path, train: bool, download: bool) -> Any:
    # A slow import, that other data need not wait for.
    import torchvision.datasets

    dataset = getattr(torchvision.datasets, DATASETS[name][0])
    try:
        return dataset(str(root), train=train, download=False)
    except Exception as error:  # RuntimeError, UnpicklingError, ValueError, KeyError, OSError among them
        if not download:
            raise UserError(
                f"torchvision's files of {name} in {root} are incomplete or damaged; let them be fetched "
                "again with data.download=true, or point data.root=... at another copy."
            ) from error
    with locked(cache_dir() / f"download-{name}"):
        return _download(dataset, name, root, train)


def _download(dataset: Callable[..., Any], name: str, root: Path, train: bool) -> Any:
    existed = root.exists()
    timeout = socket.getdefaulttimeout()
    try:
        # A network that swallows packets must not hold the run for minutes.
        socket.setdefaulttimeout(_TIMEOUT_SEC)
        # torchvision prints its progress; standard output is for results.
        with contextlib.redirect_stdout(sys.stderr):
            downloaded = dataset(str(root), train=train, download=True)
    except Exception as error:  # what torchvision and urllib raise is not one family
        if not existed:
            _remove_empty(root)
        reason = str(getattr(error, "reason", "") or error).partition("\n")[0] or type(error).__name__
        raise UserError(
            f"found no {name} in {root} and could not download it ({reason}); point data.root=FOLDER at "
            "torchvision's files, at Parquet files (train*.parquet or train/*.parquet) or at folders of images "
            "(train/<class>/*.png, test/<class>/*.png)."
        ) from error
    finally:
        socket.setdefaulttimeout(timeout)
    log.info("downloaded %s to %s", name, root)
    return downloaded


def _decoded(dataset: Any) -> ImageArray:
    images = torch.from_numpy(np.ascontiguousarray(dataset.data))
    images_NHWC = images if images.ndim == 4 else images[..., None]
    labels_N = torch.as_tensor(dataset.targets, dtype=torch.int64)
    return ImageArray(images_NHWC, labels_N, tuple(str(name) for name in dataset.classes))


def _remove_empty(folder: Path) -> None:
    # What a failed download leaves: folders without a file.
    if folder.is_dir():
        for path in sorted(folder.rglob("*"), reverse=True):
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
        if not any(folder.iterdir()):
            folder.rmdir()

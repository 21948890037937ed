"""The files that torchvision's datasets download and read."""

import logging
import socket
from pathlib import Path
from typing import Any

import numpy as np
import torch

from growlab.data.cache import cache_dir, locked
from growlab.data.images import ImageArray
from growlab.errors import UserError

log = logging.getLogger(__name__)

# name: (class in torchvision.datasets, what it keeps in its root)
DATASETS = {
    "cifar10": ("CIFAR10", ("cifar-10-batches-py", "cifar-10-python.tar.gz")),
    "cifar100": ("CIFAR100", ("cifar-100-python", "cifar-100-python.tar.gz")),
    "mnist": ("MNIST", ("MNIST",)),
    "fashion_mnist": ("FashionMNIST", ("FashionMNIST",)),
}


def has_torchvision_files(name: str, root: Path) -> bool:
    """Whether `root` holds torchvision's files of this data set, or the beginning of them."""
    return name in DATASETS and any((root / entry).exists() for entry in DATASETS[name][1])


def load_torchvision(name: str, root: Path, download: bool) -> tuple[ImageArray, ImageArray]:
    """Return the training and the test set from torchvision's files, downloaded first if asked for and missing.

    Raises:
        UserError: torchvision is not installed, a file is damaged, or the download failed.
    """
    train, test = (_open(name, root, train=part, download=download) for part in (True, False))
    return _decoded(train), _decoded(test)


def _open(name: str, root: Path, train: bool, download: bool) -> Any:
    try:
        import torchvision.datasets
    except ImportError as error:
        raise UserError(f"reading {name} from {root} needs torchvision (pip install torchvision).") from error
    dataset = getattr(torchvision.datasets, DATASETS[name][0])
    existed = root.exists()
    try:
        return dataset(str(root), train=train, download=False)
    except (
        Exception
    ) as error:  # torchvision raises RuntimeError, UnpicklingError, ValueError, OSError, KeyError
        if not download:
            raise UserError(
                f"the {name} files in {root} are missing or damaged ({error}); let them be downloaded "
                "(data.download=true) or point data.root=... at another copy."
            ) from error
    timeout = socket.getdefaulttimeout()
    try:
        # A network that swallows packets must not hold the run for minutes.
        socket.setdefaulttimeout(20)
        with locked(cache_dir() / f"download-{name}"):
            log.info("downloading %s to %s", name, root)
            return dataset(str(root), train=train, download=True)
    except Exception as error:
        if not existed and root.is_dir():
            _remove_empty(root)
        reason = str(getattr(error, "reason", "") or error).strip().splitlines()[0:1]
        raise UserError(
            f"found no {name} in {root} and could not download it ({''.join(reason) or type(error).__name__}); "
            "point data.root=FOLDER at torchvision's files, Parquet files or folders train/<class>/*.png."
        ) from error
    finally:
        socket.setdefaulttimeout(timeout)


def _decoded(dataset: Any) -> ImageArray:
    images = torch.from_numpy(np.ascontiguousarray(dataset.data))
    images_NHWC = images if images.ndim == 4 else images[..., None]
    labels_N = torch.as_tensor(dataset.targets, dtype=torch.int64)
    return ImageArray(images_NHWC, labels_N, tuple(str(name) for name in dataset.classes))


def _remove_empty(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    if not any(folder.iterdir()):
        folder.rmdir()

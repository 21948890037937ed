"""Find out what kind of images a folder has, and open it."""

import os
from pathlib import Path

from growlab.base.errors import UserError
from growlab.lab.data.cache import cache_dir
from growlab.lab.data.crops import Fit
from growlab.lab.data.folders import find_folders, has_class_folders, open_folders
from growlab.lab.data.image_sets import Images
from growlab.lab.data.libraries import DATASETS, has_torchvision_files, load_digits, load_torchvision
from growlab.lab.data.parquet import find_parquet, open_parquet

_LAYOUTS = (
    "Parquet files (train*.parquet or train/*.parquet, test likewise), folders (train/<class>/*.png, "
    "test/<class>/*.png; data=folder also takes <class>/*.png)"
)


def default_root(name: str) -> Path:
    """Return the folder of data where none is given: `$GROWLAB_DATA/<name>`, else in the cache folder."""
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
    """Return the sets of `name`: "train", "test", and "val" where the data has one as well as a test set.

    Args:
        name: digits, cifar10, cifar100, mnist, fashion_mnist, or any name for data that lies in `root`.
        root: folder with Parquet files, folders of images or torchvision's files; None =
            `default_root(name)`, but digits come from scikit-learn.
        download: fetch the data (of the names that torchvision knows) where the folder is empty or missing.
        fit: how images in folders and Parquet files are brought to one size; None = as they are.
        skip_damaged: leave out images in class folders that cannot be decoded, with a warning.
        without_test: accept data without a test set, such as `<class>/*.png` in `root`.

    Raises:
        UserError: nothing usable is there, in a sentence that says what was looked for and where.
    """
    if name == "digits" and root is None:
        return _named(load_digits())
    folder = Path(root).expanduser() if root is not None else default_root(name)
    try:
        return _open_folder(name, folder, download, fit or Fit(), skip_damaged, without_test)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"cannot read the {name} data in {folder} ({reason}); point data.root=... at a readable folder."
        ) from error


def _open_folder(
    name: str, folder: Path, download: bool, fit: Fit, skip_damaged: bool, without_test: bool
) -> dict[str, Images]:
    if folder.exists() and not folder.is_dir():
        raise UserError(
            f"data.root={folder} is a file; point data.root=... at the folder that holds the data."
        )
    if folder.is_dir():
        if has_torchvision_files(name, folder):
            return _named(load_torchvision(name, folder, download))
        if folders := find_folders(folder):
            return {
                **open_folders(folders if without_test else _complete(folders, folder), fit, skip_damaged)
            }
        if splits := find_parquet(folder):
            return {**open_parquet(splits if without_test else _complete(splits, folder), fit)}
        if without_test and has_class_folders(folder):
            return {**open_folders({"train": folder}, fit, skip_damaged)}
        if any(folder.iterdir()):
            raise UserError(f"{folder} holds no {name} data that growlab knows: {_looked_for(name)}.")
    if name in DATASETS and download:
        return _named(load_torchvision(name, folder, download=True))
    hint = "; without data.root the digits come from scikit-learn" if name == "digits" else ""
    raise UserError(f"found no {name} data in {folder}: {_looked_for(name)}{hint}.")


def _named(sets: tuple[Images, Images]) -> dict[str, Images]:
    return dict(zip(("train", "test"), sets, strict=True))


def _looked_for(name: str) -> str:
    torchvision = f" or torchvision's {' / '.join(DATASETS[name][1])}" if name in DATASETS else ""
    return f"looked for {_LAYOUTS}{torchvision}; point data.root=FOLDER at one of these"


def _complete(splits: dict, folder: Path) -> dict:
    if "test" not in splits:
        raise UserError(
            f"{folder} holds a training set but no test set; add one beside it, named test or val."
        )
    return splits

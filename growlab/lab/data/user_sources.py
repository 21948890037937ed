"""Opening what a user gives as data: a LightningDataModule, a DataLoader, a Dataset, or Hugging Face's `datasets`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import LightningDataModule
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from growlab.base.errors import UserError, how_to_install
from growlab.lab.data.cache import cache_dir, locked
from growlab.lab.data.samples import Columns, Part, random_state_kept, seed_all

_KINDS = "a LightningDataModule, DataLoader, Dataset or Hugging Face data set, or a mapping of such by train, val, test"
_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "validation", "valid", "dev"),
    "test": ("test", "testing"),
}
# Samplers that an order by (seed, epoch) takes the place of.
_PLAIN = (SequentialSampler, RandomSampler, DistributedSampler)


def open_source(source: Any, columns: Columns) -> dict[str, Part]:
    """The parts of a user's data, "train" and what else there is of "val" and "test".

    Args:
        source: a LightningDataModule, a DataLoader, a Dataset, a data set of Hugging Face's `datasets`, the folder of
            one (`save_to_disk`), or a mapping of train, val and test to such.
        columns: what of a sample is what, where samples are mappings.

    Raises:
        UserError: it is none of these, or cannot be used.
    """
    if isinstance(source, (str, Path)):
        source = _from_disk(Path(source).expanduser())
    if isinstance(source, LightningDataModule):
        return _of_module(source, columns)
    if isinstance(source, Mapping):
        known = {name: part for part, names in _NAMES.items() for name in names}
        unknown = [str(name) for name in source if name not in known]
        if unknown:
            raise UserError(
                f"data.source has the parts {', '.join(unknown)}, but train, val and test are wanted."
            )
        parts = {
            known[name]: _part(one, columns, str(name)) for name, one in source.items() if one is not None
        }
        if "train" not in parts:
            raise UserError("data.source has no part to train on; name one of its parts train.")
        return parts
    return {"train": _part(source, columns, "source")}


def epoch_order(part: Part, seed: int, epoch: int) -> np.ndarray:
    """Positions of an epoch's samples, as the part's own sampler draws them from (seed, epoch).

    Raises:
        UserError: it yields other things than positions.
    """
    sampler = part.sampler
    with random_state_kept():
        seed_all(hash((seed, epoch)) & (2**62 - 1))
        if isinstance(getattr(sampler, "generator", None), torch.Generator):
            sampler.generator.manual_seed(hash((seed, epoch)) & (2**62 - 1))
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        try:
            order = np.array([int(position) for position in sampler], dtype=np.int64)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"the sampler {type(sampler).__name__} must yield positions of samples."
            ) from error
    return order


def _of_module(module: LightningDataModule, columns: Columns) -> dict[str, Part]:
    # Downloads once a machine; the others wait, and find what is there.
    with locked(cache_dir() / "prepare" / type(module).__qualname__):
        module.prepare_data()
    for stage in ("fit", "test"):
        module.setup(stage)
    parts = {}
    for name in _NAMES:
        try:
            loader = getattr(module, f"{name}_dataloader")()
        except MisconfigurationException:
            continue  # Lightning's own, which no one has written over.
        if isinstance(loader, (list, tuple)):
            if len(loader) > 1:
                raise UserError(
                    f"{type(module).__name__}.{name}_dataloader gives {len(loader)} loaders; growlab takes one."
                )
            loader = loader[0] if loader else None
        if loader is not None:
            parts[name] = _part(loader, columns, f"{type(module).__name__}.{name}_dataloader")
    if "train" not in parts:
        raise UserError(f"{type(module).__name__} has no train_dataloader; give it one.")
    return parts


def _part(source: Any, columns: Columns, where: str) -> Part:
    if isinstance(source, (str, Path)):
        source = _from_disk(Path(source).expanduser())
    loader = source if isinstance(source, DataLoader) else None
    dataset = source if loader is None else loader.dataset
    named = f"{where} ({type(dataset).__name__})"
    if isinstance(source, type) or (callable(source) and not hasattr(source, "__getitem__")):
        raise UserError(
            f"data: {where} is {source}, not {_KINDS}; call it by its _target_, without _partial_."
        )
    if isinstance(dataset, IterableDataset) or type(dataset).__name__ in (
        "IterableDataset",
        "IterableDatasetDict",
    ):
        raise UserError(
            f"data: {named} is iterated over, so nobody knows how many samples an epoch has or can go on in the middle "
            "of one: give a Dataset with a length, whose samples are read by position."
        )
    if isinstance(dataset, Mapping) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise UserError(f"data: {named} is not {_KINDS}.")
    dataset, in_rows = _as_tensors(dataset)
    number = len(dataset)
    if not number:
        raise UserError(f"data: {named} is empty.")
    positions = np.arange(number)
    if loader is None:
        return Part(dataset, positions, columns=columns, in_rows=in_rows)
    if type(loader.batch_sampler) not in (BatchSampler, type(None)) or loader.batch_size is None:
        raise UserError(
            f"data: {named} has a batch sampler of its own ({type(loader.batch_sampler).__name__}), but batch sizes "
            "follow the growth schedule: give a sampler of single positions, or none."
        )
    sampler = None if isinstance(loader.sampler, _PLAIN) else loader.sampler
    return Part(
        *(dataset, positions, loader.collate_fn, columns, sampler, loader.drop_last, loader.batch_size),
        num_workers=loader.num_workers,
        in_rows=in_rows,
    )


def _as_tensors(dataset: Any) -> tuple[Any, bool]:
    """A data set of Hugging Face in torch's format if it has none, and whether it is one that reads rows at once."""
    if not (hasattr(dataset, "with_format") and hasattr(dataset, "column_names")):
        return dataset, False
    known = (getattr(dataset, "format", None) or {}).get("type")
    return (dataset if known is not None else dataset.with_format("torch")), known != "custom"


def _from_disk(folder: Path) -> Any:
    if not folder.exists():
        raise UserError(f"data.source={folder} is not there.")
    if not any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        raise UserError(
            f"data.source={folder} is no data set that datasets.save_to_disk wrote; images in class folders are read "
            "by data=folder data.root=FOLDER, anything else by data.source._target_=MODULE.FUNCTION."
        )
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"data.source={folder} needs datasets: {how_to_install('transformers')}.") from error
    return datasets.load_from_disk(str(folder))

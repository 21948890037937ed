"""A user's own samples: the sources they come from, and batches of them read by position.

What transforms draw from the generators of torch, numpy and random is a function of (seed, epoch, position of the
sample) alone, so that a resumed run, another number of workers or of ranks sees the same samples.
"""

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import LightningDataModule
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from growlab.base.errors import UserError
from growlab.lab.data.cache import cache_dir, locked
from growlab.lab.data.documents import saved_datasets
from growlab.lab.data.order import COLLATE, SAMPLE, draws

# Names under which the target of a sample that is a mapping is searched for.
TARGETS = ("target", "targets", "label", "labels", "y", "mask", "fine_label", "class")
_KINDS = "a LightningDataModule, DataLoader, Dataset or Hugging Face data set, or a mapping of such by train, val, test"
_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "validation", "valid", "dev"),
    "test": ("test", "testing"),
}
# Samplers that an order by (seed, epoch) takes the place of.
_PLAIN = (SequentialSampler, RandomSampler, DistributedSampler)


@dataclass(frozen=True)
class Columns:
    """Inputs and target of samples that are mappings.

    Attributes:
        inputs: their names, in the order of the network's arguments; None: all but the target.
        target: its name; None: the first one there is of `TARGETS`.
    """

    inputs: Sequence[str] | None = None
    target: str | None = None

    def of(self, names: Sequence[str]) -> tuple[list[str], str]:
        """Names of the inputs and of the target among those of a sample.

        Raises:
            UserError: one is not there.
        """
        target = self.target or next((name for name in TARGETS if name in names), None)
        listed = ", ".join(map(str, names))
        if target is None:
            raise UserError(
                f"samples have the entries {listed}, none of which is known as a target; name it: "
                "data.columns.target=NAME."
            )
        inputs = [name for name in names if name != target] if self.inputs is None else list(self.inputs)
        for key, name in [*(("inputs", name) for name in inputs), ("target", target)]:
            if name not in names:
                raise UserError(f"data.columns.{key} names {name}, but samples have the entries {listed}.")
        if not inputs:
            raise UserError(f"samples have nothing beside the target {target}; inputs are needed too.")
        return inputs, target


@dataclass(frozen=True, eq=False)
class Part:
    """The training, validation or test part of a user's data.

    Attributes:
        dataset: samples by position.
        positions: int64 [N], of those that belong to this part.
        collate: makes a batch of samples.
        columns: what of a sample is what.
        sampler: draws the positions of an epoch in place of a permutation; None: a permutation.
        drop_last: leave out a last, smaller batch of training.
        batch_size: of the loader that the part came from, if it came from one.
        num_workers: likewise.
        in_rows: the data set reads many samples at once, and draws nothing.
    """

    dataset: Any
    positions: np.ndarray
    collate: Callable[[list[Any]], Any] = default_collate
    columns: Columns = Columns()
    sampler: Any = None
    drop_last: bool = False
    batch_size: int | None = None
    num_workers: int = 0
    in_rows: bool = False

    def __len__(self) -> int:
        return len(self.positions)

    def select(self, chosen: np.ndarray) -> "Part":
        """The samples at these places of the part."""
        return replace(self, positions=self.positions[chosen])

    def read(self, places: np.ndarray, seed: int, epoch: int | None) -> Any:
        """The batch of the samples at these places.

        Raises:
            UserError: samples cannot be put together.
        """
        positions = self.positions[places]
        if type(self.dataset) is TensorDataset and self.collate is default_collate:
            index = torch.from_numpy(positions)
            return tuple(tensor[index] for tensor in self.dataset.tensors)
        seeds = draws(positions, SAMPLE, seed, -1 if epoch is None else epoch)
        with contextlib.nullcontext() if get_worker_info() is not None else random_state_kept():
            if self.in_rows:
                samples = self.dataset.__getitems__(positions.tolist())
            else:
                samples = []
                for position, own in zip(positions.tolist(), seeds.tolist(), strict=True):
                    seed_all(own)
                    samples.append(self.dataset[position])
            seed_all(int(draws(positions[:1], COLLATE, seed, -1 if epoch is None else epoch)[0]))
            return self._together(samples)

    def _together(self, samples: list[Any]) -> Any:
        if self.collate is not default_collate:
            return self.collate(samples)
        try:
            return default_collate(samples)
        except (TypeError, RuntimeError) as error:
            reason = str(error).strip().partition("\n")[0].rstrip(".")
            raise UserError(
                f"samples cannot be put together to a batch: {reason}; let the data set's transform make tensors of "
                "one shape, or give a DataLoader with a collate_fn."
            ) from error

    def inputs_and_target(self, batch: Any) -> tuple[Tensor, ...]:
        """A batch as (inputs..., target): numbers in float32, images of bytes ([C, H, W]) in 0..1, classes in int64.

        Raises:
            UserError: it is no such batch.
        """
        if isinstance(batch, Mapping):
            inputs, target = self.columns.of(list(batch))
            batch = [batch[name] for name in (*inputs, target)]
        if not isinstance(batch, (tuple, list)) or len(batch) < 2:
            given = type(batch).__name__ if not isinstance(batch, (tuple, list)) else f"{len(batch)} entries"
            raise UserError(
                f"samples must be (inputs..., target) or a mapping with a target, not {given}; a network that restores "
                "its input takes (x, x)."
            )
        for place, entry in enumerate(batch):
            if not isinstance(entry, Tensor):
                what = "the target" if place == len(batch) - 1 else f"input {place}"
                raise UserError(
                    f"{what} of a batch is a {type(entry).__name__}, not a tensor: let the data set's transform make "
                    "tensors, or data.columns leave it out."
                )
        *inputs, target = batch
        return (*(_as_input(entry) for entry in inputs), _as_target(target))


@dataclass(frozen=True)
class SampleRequest:
    """Places of a batch's samples, and the epoch."""

    places: np.ndarray
    epoch: int | None


@dataclass
class SampleBatches(Dataset):
    """A data set whose items are whole batches, for `Readers`."""

    part: Part
    seed: int

    def requests(self, batches: Sequence[np.ndarray], epoch: int | None) -> Iterator[SampleRequest]:
        """Yield what the workers are sent for each batch."""
        return (SampleRequest(places, epoch) for places in batches)

    def __getitem__(self, request: SampleRequest) -> Any:
        try:
            return self.part.read(request.places, self.seed, request.epoch)
        except UserError as error:
            return error


def classes_of(part: Part) -> np.ndarray | None:
    """Class labels of a part's samples, int64 [N], if they can be read cheaply, else None."""
    found = _classes_of(part.dataset, part.columns)
    return None if found is None else found[part.positions]


def _classes_of(dataset: Any, columns: Columns) -> np.ndarray | None:
    if isinstance(dataset, Subset):
        inside = _classes_of(dataset.dataset, columns)
        return None if inside is None else inside[np.asarray(dataset.indices)]
    if isinstance(dataset, ConcatDataset):
        parts = [_classes_of(one, columns) for one in dataset.datasets]
        return None if any(one is None for one in parts) else np.concatenate(parts)
    if type(dataset) is TensorDataset:
        found = dataset.tensors[-1].cpu().numpy()
    elif hasattr(dataset, "column_names") and hasattr(dataset, "features"):
        # Of Hugging Face's datasets: a column is read without the others.
        column = dataset.with_format("numpy")[columns.of(dataset.column_names)[1]]
        found = np.asarray(column[:])
    else:
        # As torchvision's data sets have them; a transform might make other targets of them.
        known = getattr(dataset, "targets", None)
        if known is None or getattr(dataset, "target_transform", None) is not None:
            return None
        try:
            found = np.asarray(known)
        except ValueError:
            return None
    right = found.ndim == 1 and found.dtype.kind in "iub" and len(found) == len(dataset)
    return found.astype(np.int64) if right else None


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Leave the generators of torch (on the CPU), numpy and random as they were."""
    torch_state, numpy_state, own = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(own)


def seed_all(seed: int) -> None:
    """Seed the generators of torch (on the CPU), numpy and random."""
    torch.default_generator.manual_seed(seed & (2**63 - 1))
    np.random.seed(seed & (2**32 - 1))
    random.seed(seed)


def _as_input(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.uint8 and tensor.dim() > 3:
        return tensor.float() / 255
    return tensor.float() if tensor.is_floating_point() else tensor


def _as_target(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor.long()


def open_source(source: Any, columns: Columns) -> dict[str, Part]:
    """Open the parts of a user's data: "train", and "val" and "test" where the source has them.

    Args:
        source: a LightningDataModule, a DataLoader, a Dataset, a data set of Hugging Face's `datasets`, the folder of
            one (`save_to_disk`), or a mapping of train, val and test to such.
        columns: inputs and target of samples that are mappings.

    Raises:
        UserError: it is something else, or cannot be used.
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
    """Draw the positions of an epoch's samples by the part's own sampler, seeded by (seed, epoch).

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
            f"data: {named} is iterated over, so epochs have no known length and cannot be resumed in the middle: give "
            "a Dataset with a length, whose samples are read by position."
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
    """A Hugging Face data set in torch's format unless it has another; True with it if it reads many rows at once."""
    if not (hasattr(dataset, "with_format") and hasattr(dataset, "column_names")):
        return dataset, False
    known = (getattr(dataset, "format", None) or {}).get("type")
    return (dataset if known is not None else dataset.with_format("torch")), known != "custom"


def _from_disk(folder: Path) -> Any:
    if not folder.exists():
        raise UserError(f"data.source={folder} is not there.")
    if (found := saved_datasets(folder)) is None:
        raise UserError(
            f"data.source={folder} is no data set that datasets.save_to_disk wrote; images in class folders are read "
            "by data=folder data.root=FOLDER, anything else by data.source._target_=MODULE.FUNCTION."
        )
    return found

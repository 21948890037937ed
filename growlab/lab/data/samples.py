"""Samples of a user's own data set as batches: read by position, drawn by (seed, epoch, position), told apart.

What transforms draw from the generators of torch, numpy and random is a function of (seed, epoch, position of the
sample) alone, so that a resumed run, another number of workers or of ranks sees the same samples.
"""

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate, get_worker_info

from growlab.base.errors import UserError
from growlab.lab.data.order import COLLATE, SAMPLE, draws

# Entries of a sample that is a mapping under which its target is looked for.
TARGETS = ("target", "targets", "label", "labels", "y", "mask", "fine_label", "class")
_AS_IMAGES = "images of files in class folders are read by data=folder"


@dataclass(frozen=True)
class Columns:
    """Which entries of a sample that is a mapping the network is called with, and which one is the target.

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
        sampler: draws the positions of an epoch in place of a permutation; None: there is none.
        drop_last: whether a last, smaller batch of training is left out.
        batch_size: of the loader that the part came from, if it came from one.
        num_workers: likewise.
        in_rows: whether the data set reads many samples at once, and draws nothing.
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
            raise UserError(_why_not_together(samples, error)) from error

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
    """The class of each of a part's samples, int64 [N], where the data set tells it without reading samples."""
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


def _why_not_together(samples: list[Any], error: Exception) -> str:
    """A sentence about samples that torch cannot stack."""
    first = samples[0].values() if isinstance(samples[0], Mapping) else samples[0]
    parts = list(first) if isinstance(first, (tuple, list)) or hasattr(first, "__iter__") else [first]
    kinds = next((type(one) for one in parts if type(one).__module__.startswith("PIL.")), None)
    if kinds is not None:
        return (
            "samples hold images of PIL: give the data set a transform that makes tensors, such as "
            f"torchvision.transforms.ToTensor; {_AS_IMAGES}."
        )
    shapes = {
        tuple(one[0].shape)
        for one in samples
        if isinstance(one, (tuple, list)) and isinstance(one[0], Tensor)
    }
    if len(shapes) > 1:
        listed = " and ".join(str(list(shape)) for shape in sorted(shapes)[:2])
        return (
            f"samples differ in shape ({listed}): bring them to one in the data set's transform, or give a DataLoader "
            "with a collate_fn."
        )
    reason = str(error).strip().partition("\n")[0].rstrip(".")
    return f"samples cannot be put together to a batch: {reason}; a DataLoader may bring a collate_fn."

"""A user's own data in growlab's runs: split, ordered and batched as growing and exact resuming need it.

What transforms draw from the generators of torch, numpy and random is a function of (seed, epoch, position of the
sample) alone, so that a resumed run, another number of workers or of ranks sees the same samples.
"""

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import LightningDataModule
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
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
from growlab.base.settings import not_none, whole
from growlab.lab.data.arrival import first_balanced, stratified_split
from growlab.lab.data.cache import cache_dir, locked
from growlab.lab.data.documents import saved_datasets
from growlab.lab.data.loaders import EpochPlan, StreamLoader, WorkerPool
from growlab.lab.data.order import COLLATE, SAMPLE, draws
from growlab.lab.data.run_data import PART_NAMES, RunData

_BATCH_SIZE = 128
# Samples that are read through for their classes: to split by them, and at most to count them.
_FEW, _MANY = 2_000, 50_000
_READ_TOGETHER = 256
# Names under which the target of a sample that is a mapping is searched for.
_TARGETS = ("target", "targets", "label", "labels", "y", "mask", "fine_label", "class")
# Samplers that an order by (seed, epoch) takes the place of.
_PLAIN = (SequentialSampler, RandomSampler, DistributedSampler)


@dataclass(frozen=True)
class Split:
    """Parts of the training set to hold out where the source has no validation or test set.

    Each class gives the same part of its samples where a sample's target is a class; otherwise they are drawn at
    random.

    Attributes:
        validation: part that is validated on after each epoch; 0: no validation, also on a set of the source.
        test: part that the result is of.
        seed: decides which samples, whatever the seed of the run.
    """

    validation: float = 0.1
    test: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.validation >= 0 and self.test >= 0 and self.validation + self.test < 1):
            raise UserError(
                f"data.split.validation={self.validation} and data.split.test={self.test} must be at least 0 and leave "
                "something to train on."
            )


@dataclass(frozen=True)
class Columns:
    """Inputs and target of samples that are mappings.

    Attributes:
        inputs: their names, in the order of the network's arguments; None: all but the target.
        target: its name; None: target, targets, label, labels, y, mask, fine_label or class, the first there is.
    """

    inputs: Sequence[str] | None = None
    target: str | None = None

    def of(self, names: Sequence[str]) -> tuple[list[str], str]:
        """Names of the inputs and of the target among those of a sample."""
        target = self.target or next((name for name in _TARGETS if name in names), "target")
        inputs = [name for name in names if name != target] if self.inputs is None else list(self.inputs)
        for key, name in [*(("inputs", name) for name in inputs), ("target", target)]:
            if name not in names:
                raise UserError(
                    f"samples have the entries {', '.join(map(str, names))} and no {name}; set data.columns.{key}."
                )
        return inputs, target


@dataclass(frozen=True, eq=False)
class SamplePart:
    """The training, validation or test part of a user's data, whose samples are read by position.

    Attributes:
        positions: int64 [N], of those that belong to this part.
        sampler: draws the positions of an epoch in place of a permutation; None: a permutation.
        batch_size: of the loader that the part came from, if it came from one; `num_workers` likewise.
        in_rows: the data set reads many samples at once, and draws nothing.
    """

    dataset: Any
    positions: np.ndarray
    seed: int
    columns: Columns
    collate: Callable[[list[Any]], Any] = default_collate
    sampler: Any = None
    drop_last: bool = False
    batch_size: int | None = None
    num_workers: int = 0
    in_rows: bool = False

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def num_drawn(self) -> int:
        """Samples in an epoch."""
        return len(self if self.sampler is None else self.sampler)

    def order(self, epoch: int) -> np.ndarray:
        """Draw the places of an epoch's samples by the part's own sampler, seeded by (seed, epoch)."""
        seed = hash((self.seed, epoch)) & (2**62 - 1)
        with isolate_rng(include_cuda=False):
            _seed_all(seed)
            if isinstance(getattr(self.sampler, "generator", None), torch.Generator):
                self.sampler.generator.manual_seed(seed)
            if hasattr(self.sampler, "set_epoch"):
                self.sampler.set_epoch(epoch)
            return np.array([int(position) for position in self.sampler], dtype=np.int64)

    def read_batch(self, places: np.ndarray, epoch: int | None) -> Any:
        """The collated batch of the samples at these places."""
        positions = self.positions[places]
        if type(self.dataset) is TensorDataset and self.collate is default_collate:
            index = torch.from_numpy(positions)
            return tuple(tensor[index] for tensor in self.dataset.tensors)
        key = (self.seed, -1 if epoch is None else epoch)
        in_worker = get_worker_info() is not None
        with contextlib.nullcontext() if in_worker else isolate_rng(include_cuda=False):
            if self.in_rows:
                samples = self.dataset.__getitems__(positions.tolist())
            else:
                samples = []
                seeds = draws(positions, SAMPLE, *key).tolist()
                for position, seed in zip(positions.tolist(), seeds, strict=True):
                    _seed_all(seed)
                    samples.append(self.dataset[position])
            _seed_all(int(draws(positions[:1], COLLATE, *key)[0]))
            return self.collate(samples)

    def inputs_and_target(self, batch: Any) -> tuple[Tensor, ...]:
        """A batch as (inputs..., target): numbers in float32, images of bytes ([C, H, W]) in 0..1, classes in int64."""
        if isinstance(batch, Mapping):
            inputs, target = self.columns.of(list(batch))
            batch = [batch[name] for name in (*inputs, target)]
        entries = batch if isinstance(batch, (tuple, list)) else [batch]
        if len(entries) < 2 or not all(isinstance(entry, Tensor) for entry in entries):
            kinds = ", ".join(type(entry).__name__ for entry in entries)
            raise UserError(
                f"samples must be (inputs..., target) or a mapping with a target, of tensors, not ({kinds}): "
                "let the data set's transform make tensors, or data.columns leave others out."
            )
        *found, last = (entry.float() if entry.is_floating_point() else entry for entry in entries)
        found = [x.float() / 255 if x.dtype == torch.uint8 and x.dim() > 3 else x for x in found]
        return (*found, last if last.is_floating_point() else last.long())


def _classes_of(dataset: Any, columns: Columns) -> np.ndarray | None:
    if isinstance(dataset, Subset):
        inside = _classes_of(dataset.dataset, columns)
        return None if inside is None else inside[np.asarray(dataset.indices)]
    if isinstance(dataset, ConcatDataset):
        parts = [_classes_of(one, columns) for one in dataset.datasets]
        known = [part for part in parts if part is not None]
        return np.concatenate(known) if len(known) == len(parts) else None
    if type(dataset) is TensorDataset:
        found = dataset.tensors[-1].cpu().numpy()
    elif hasattr(dataset, "column_names") and hasattr(dataset, "features"):
        # Of Hugging Face's datasets: a column is read without the others.
        column = dataset.with_format("numpy")[columns.of(dataset.column_names)[1]]
        found = np.asarray(column[:])
    else:
        # As torchvision's data sets have them; a transform might make other targets of them.
        targets = getattr(dataset, "targets", None)
        if targets is None or getattr(dataset, "target_transform", None) is not None:
            return None
        try:
            found = np.asarray(targets)
        except ValueError:
            return None
    right = found.ndim == 1 and found.dtype.kind in "iub" and len(found) == len(dataset)
    return found.astype(np.int64) if right else None


def _seed_all(seed: int) -> None:
    """Seed the generators of torch (on the CPU), numpy and random."""
    torch.default_generator.manual_seed(seed & (2**63 - 1))
    np.random.seed(seed & (2**32 - 1))
    random.seed(seed)


def open_source(source: Any, columns: Columns, seed: int) -> dict[str, SamplePart]:
    """Open the parts of a user's data: "train", and "val" and "test" where the source has them; see `CustomData`."""
    source = _opened(source)
    if isinstance(source, LightningDataModule):
        found = _loaders(source)
    else:
        found = dict(source) if isinstance(source, Mapping) else {"train": source}
        parts = {name: part for part, names in PART_NAMES.items() for name in names}
        if unknown := ", ".join(str(name) for name in found if name not in parts):
            raise UserError(f"data.source has the parts {unknown}, but train, val and test are wanted.")
        found = {parts[name]: one for name, one in found.items() if one is not None}
    if "train" not in found:
        raise UserError("data.source has no part to train on: name one train, or give it a train_dataloader.")
    return {part: _part(one, columns, seed, part) for part, one in found.items()}


def _loaders(module: LightningDataModule) -> dict[str, Any]:
    """Loader of each part."""
    # Downloads once a machine; the others wait, and find what is there.
    with locked(cache_dir() / "prepare" / type(module).__qualname__):
        module.prepare_data()
    for stage in ("fit", "test"):
        module.setup(stage)
    found = {}
    for part in PART_NAMES:
        # Lightning's own methods, which the user has not overridden, raise.
        with contextlib.suppress(MisconfigurationException):
            loader = getattr(module, f"{part}_dataloader")()
            several = loader if isinstance(loader, (list, tuple)) else [loader]
            if len(several) > 1:
                raise UserError(f"{part}_dataloader gives {len(several)} loaders; growlab takes one.")
            if several and several[0] is not None:
                found[part] = several[0]
    return found


def _part(source: Any, columns: Columns, seed: int, where: str) -> SamplePart:
    source = _opened(source)
    dataset: Any
    loader = source if isinstance(source, DataLoader) else None
    dataset = source if loader is None else loader.dataset
    named = f"{where} ({type(dataset).__name__})"
    by_position = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if not by_position or isinstance(dataset, IterableDataset | Mapping):
        raise UserError(
            f"data.source: {named} is not a LightningDataModule, DataLoader, Dataset or Hugging Face data set, or a "
            "mapping of such by train, val, test, with samples that are read by position: what is iterated over cannot "
            "be resumed in the middle, and a function is called by its _target_, without _partial_."
        )
    in_rows = hasattr(dataset, "with_format") and hasattr(dataset, "column_names")
    if in_rows:
        # A Hugging Face data set, in torch's format unless it has another; one with a transform may draw.
        format = (getattr(dataset, "format", None) or {}).get("type")
        dataset, in_rows = dataset.with_format("torch") if format is None else dataset, format != "custom"
    if not len(dataset):
        raise UserError(f"data.source: {named} is empty.")
    part = SamplePart(dataset, np.arange(len(dataset)), seed, columns, in_rows=in_rows)
    if loader is None:
        return part
    if type(loader.batch_sampler) not in (BatchSampler, type(None)) or loader.batch_size is None:
        raise UserError(
            f"data.source: {named} has a batch sampler of its own ({type(loader.batch_sampler).__name__}), but batch "
            "sizes follow the growth schedule: give a sampler of single positions, or none."
        )
    sampler = None if isinstance(loader.sampler, _PLAIN) else loader.sampler
    of_loader = {name: getattr(loader, name) for name in ("drop_last", "batch_size", "num_workers")}
    return replace(part, collate=loader.collate_fn, sampler=sampler, **of_loader)


def _opened(source: Any) -> Any:
    """The source, or the data set in the folder that it names."""
    if not isinstance(source, str | Path):
        return source
    if (found := saved_datasets(source)) is None:
        raise UserError(
            f"data.source={source} is no folder that datasets.save_to_disk wrote; images in class folders are read "
            "by data=folder data.root=FOLDER, anything else by data.source._target_=MODULE.FUNCTION."
        )
    return found


class CustomData(RunData):
    """A user's own data: a LightningDataModule, DataLoader, Dataset or data set of Hugging Face's `datasets`.

    Samples are (inputs..., target), or mappings, see `columns`. A batch is (inputs..., target): numbers in float32,
    images of bytes ([C, H, W] of uint8) in 0..1, whole targets int64. Order and what transforms draw are functions of
    (seed, epoch, sample), so a resumed run and a run on another number of ranks see the same. Of a LightningDataModule
    its loaders' data sets, `collate_fn`, samplers and `drop_last` are taken, and its hooks around the transfer of a
    batch to the device.

    Args:
        source: the data; a folder that `datasets.save_to_disk` wrote; or a mapping of train, val and test to data
            sets.
        batch_size: samples in a training batch over all ranks; None: the source's loader's, else 128.
        eval_batch_size: likewise of validation and test; None: their loaders', else as in training.
        split: parts of the training set to hold out where the source has no validation or test set.
        columns: inputs and target of samples that are mappings.
        network: arguments that the network is made with, such as `num_classes`; others are found from the data.
        num_workers: processes that read; None: the source's loader's, else 0.
        seed: of the order and of transforms.
    """

    goes_with = (
        "custom data need model=custom and an objective that suits their targets: classification, multilabel, "
        "regression, segmentation or custom"
    )

    def __init__(
        self,
        source: Any,
        batch_size: int | None = None,
        eval_batch_size: int | None = None,
        split: Split | None = None,
        columns: Columns | None = None,
        network: Mapping[str, Any] | None = None,
        num_workers: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size or _BATCH_SIZE, seed)
        whole(1, **not_none(batch_size=batch_size, eval_batch_size=eval_batch_size))
        whole(0, **not_none(num_workers=num_workers))
        self._source, self._network = source, dict(network or {})
        self._module = source if isinstance(source, LightningDataModule) else None
        self.split, self.columns = split or Split(), columns or Columns()
        self._batch_size, self._eval_batch_size, self._num_workers = batch_size, eval_batch_size, num_workers
        self._parts: dict[str, SamplePart] = {}
        self._classes: np.ndarray | None = None

    def _read(self) -> None:
        parts = open_source(self._source, self.columns, self.seed)
        self.batch_size = self._batch_size or parts["train"].batch_size or _BATCH_SIZE
        self._parts = parts = self._complete(parts)
        if self.split.validation == 0:
            parts.pop("val", None)
        self.num_train, self.num_test = sum(self.samples_in_batches(0, self.batch_size)), len(parts["test"])
        self.num_val = len(parts["val"]) if "val" in parts else 0
        # Two samples, so that faults in them are reported before anything else begins.
        *inputs, target = self._first(2)
        self._shapes, self._target = [list(x.shape[1:]) for x in inputs], target

    def teardown(self, stage: str | None = None) -> None:
        """End the processes that read samples."""
        super().teardown(stage)
        if self._module is not None:
            self._module.teardown(stage or "test")

    def state_dict(self) -> dict[str, Any]:
        """The source's own state, if it has any."""
        return {} if self._module is None else self._module.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the source's own state."""
        if self._module is not None:
            self._module.load_state_dict(state_dict)

    def training_loader(self, epoch: int, draw: int) -> StreamLoader:
        """Return batches of the training samples in the sizes of an epoch, ordered and drawn as those of another."""
        return self._loader("train", self._plan(epoch, draw))

    def training_batches(
        self, count: int, epoch: int | None = None, augmented: bool = False
    ) -> list[tuple[Tensor, ...]]:
        """Return the first batches of an epoch as they are trained on, read in this process; see `RunData`."""
        epoch = self._now if epoch is None else epoch
        batches = self._plan(epoch, epoch).batches()[:count]
        return [self._batch("train", places, epoch, number) for number, places in enumerate(batches)]

    def samples_in_batches(self, epoch: int, batch_size: int) -> list[int]:
        """Return the number of samples in each training batch of an epoch that has batches of this size."""
        train = self._parts["train"]
        plan = EpochPlan(train.num_drawn, batch_size, self.seed, epoch, drop_last=train.drop_last, steps=self.steps)
        return plan.sizes

    def probe_batch(self, n: int) -> Tensor | tuple[Tensor, ...]:
        """Return the network's inputs of n training samples: always the same ones, repeated if there are fewer.

        As many of each class as can be, where classes are known.
        """
        *inputs, _ = self._first(n)
        return inputs[0] if len(inputs) == 1 else tuple(inputs)

    @property
    def network_arguments(self) -> dict[str, Any]:
        """The arguments that the user gives as `network`."""
        return self._network

    def offer(self, name: str) -> Any | None:
        """Return the value of an argument that a network may take; None if the data do not know it.

        Known are `image_shape` [C, H, W], `input_shape`, `in_features`, `in_channels`; `num_classes` (of targets that
        are numbers, how many there are in a sample) and `out_features`, the same.
        """
        shape = self._shapes[0]
        found: dict[str, Any] = {"input_shape": shape, "target_shape": list(self._target.shape[1:])}
        found |= {"in_features": shape[0]} if len(shape) == 1 else {"in_channels": shape[0]} if shape else {}
        found |= {"image_shape": shape} if len(shape) == 3 else {}
        return self._num_outputs() if name in ("num_classes", "out_features") else found.get(name)

    def _num_outputs(self) -> int:
        target = self._target
        if target.is_floating_point() or target.dim() == 2:
            return target.shape[1] if target.dim() > 1 else 1
        part = self._parts["train"]
        known = getattr(part.dataset, "classes", None)
        features = getattr(part.dataset, "features", None)
        if isinstance(features, Mapping):
            known = getattr(features[part.columns.of(list(features))[1]], "names", None)
        if isinstance(known, (list, tuple)):
            return len(known)
        if self._classes is not None:
            return int(self._classes.max()) + 1
        hint = "+data.network.num_classes=N"
        if len(part) > _MANY:
            raise UserError(
                "the network takes num_classes, and the data set does not know it without reading all "
                f"{len(part)} samples: set {hint}."
            )
        print(f"reading {len(part)} samples to count their classes; {hint} saves that", file=sys.stderr)
        # 255 marks pixels of no class.
        return 1 + max(int(t[t != 255].max()) if bool((t != 255).any()) else 0 for t in self._targets(part))

    def _complete(self, parts: dict[str, SamplePart]) -> dict[str, SamplePart]:
        """The parts; those that are missing are held out of the training part."""
        train, left = parts["train"], 1.0
        self._classes = self._classes_of(train)
        for name, fraction in (("test", self.split.test), ("val", self.split.validation)):
            if name in parts or not (fraction or name == "test"):
                continue
            if train.sampler is not None:
                raise UserError(
                    f"the loader's own sampler ({type(train.sampler).__name__}) draws from all training samples, so "
                    f"none can be held out of them: give the source a {name} set"
                    + (", or set data.split.validation=0." if name == "val" else ".")
                )
            kept, held_out = stratified_split(self._labels(train), fraction / left, self.split.seed)
            if not len(kept) or not len(held_out):
                raise UserError(
                    f"{len(train)} training samples are too few to hold {fraction:.0%} out; give the source a {name} "
                    "set, or change data.split."
                )
            parts[name], train = (replace(train, positions=train.positions[p]) for p in (held_out, kept))
            self._classes = None if self._classes is None else self._classes[kept]
            left -= fraction
        return {**parts, "train": train}

    def _labels(self, train: SamplePart) -> np.ndarray:
        """Classes of the training samples; 0 where they are not known."""
        return np.zeros(len(train), dtype=np.int64) if self._classes is None else self._classes

    def _classes_of(self, part: SamplePart) -> np.ndarray | None:
        """Class labels, int64 [N], if they can be read cheaply, else None."""
        self._parts = {"train": part}
        target = self._batch("train", np.arange(1), None, 0)[-1]
        if target.is_floating_point() or target.dim() != 1:
            return None
        found = _classes_of(part.dataset, part.columns)
        if found is not None and found[0] == int(target[0]):
            return found
        return torch.cat(list(self._targets(part))).numpy() if len(part) <= _FEW else None

    def _targets(self, part: SamplePart) -> Iterator[Tensor]:
        for start in range(0, len(part), _READ_TOGETHER):
            places = np.arange(start, min(start + _READ_TOGETHER, len(part)))
            yield self._batch("train", places, None, 0)[-1].cpu()

    def _first(self, n: int) -> tuple[Tensor, ...]:
        places = first_balanced(self._labels(self._parts["train"]), n)
        return self._batch("train", np.resize(places, n), None, 0)

    def _batch(self, name: str, places: np.ndarray, epoch: int | None, number: int) -> tuple[Tensor, ...]:
        return self._finish(name, epoch, self._parts[name].read_batch(places, epoch), number)

    def _finish(self, name: str, epoch: int | None, batch: Any, number: int) -> tuple[Tensor, ...]:
        """A collated batch on the device, through the source's hooks, as (inputs..., target)."""
        module, device, (rank, _) = self._module, self._device, self._place()
        if module is None:
            return self._parts[name].inputs_and_target(move_data_to_device(batch, device))
        if self.trainer is not None:
            module.trainer = self.trainer
        with isolate_rng(include_cuda=False):
            key = (self.seed, -1 if epoch is None else epoch, rank)
            _seed_all(int(draws(np.array([number]), COLLATE, *key)[0]))
            batch = module.on_before_batch_transfer(batch, 0)
            batch = module.transfer_batch_to_device(batch, device, 0)
            batch = module.on_after_batch_transfer(batch, 0)
        return self._parts[name].inputs_and_target(batch)

    def _plan(self, epoch: int, draw: int) -> EpochPlan:
        part = self._parts["train"]
        order = None if part.sampler is None else part.order
        return self._training_plan(part.num_drawn, epoch, draw, order=order, drop_last=part.drop_last)

    def evaluation(self, name: str) -> StreamLoader:
        """Return the batches of "val" or "test", in order."""
        part = self._parts[name]
        size = self._eval_batch_size or part.batch_size or self.batch_size
        return self._loader(name, self._evaluation_plan(len(part), size))

    def _loader(self, name: str, plan: EpochPlan) -> StreamLoader:
        part = self._parts[name]
        if name not in self._workers:
            number = part.num_workers if self._num_workers is None else self._num_workers
            self._workers[name] = WorkerPool(part, number, pinned=self._device.type == "cuda")

        def finish(batch: Any, number: int) -> tuple[Tensor, ...]:
            return self._finish(name, plan.epoch if plan.training else None, batch, number)

        return StreamLoader(plan, self._workers[name], finish)

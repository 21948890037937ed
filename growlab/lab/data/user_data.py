"""Data module for a user's own data: splits, order and batches that growth and bit-exact resuming need.

The global generators of torch, numpy and random are seeded for each sample from (seed, epoch, position), so random
transforms give the same samples in a resumed run and with any number of workers or ranks.
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

from growlab.base.errors import UserError, first_line
from growlab.base.settings import not_none, whole
from growlab.lab.data.arrival import first_balanced, stratified_split
from growlab.lab.data.cache import cache_dir, locked
from growlab.lab.data.documents import saved_datasets
from growlab.lab.data.loaders import EpochPlan, StreamLoader, WorkerPool
from growlab.lab.data.order import COLLATE, SAMPLE, draws
from growlab.lab.data.run_data import PART_NAMES, RunData

_BATCH_SIZE = 128
# Up to _FEW samples are read to find their classes for a stratified split; up to _MANY to count the classes.
_FEW, _MANY = 2_000, 50_000
_READ_TOGETHER = 256
# Keys tried for the target of a mapping sample, in order.
_TARGETS = ("target", "targets", "label", "labels", "y", "mask", "fine_label", "class")


@dataclass(frozen=True)
class Split:
    """Fractions of the training set to hold out if the source has no validation or test set.

    The split is stratified by class if targets are classes, otherwise random.

    Attributes:
        validation: fraction to validate on after each epoch; 0: no validation, not even on the source's own set.
        test: fraction to test on.
        seed: of the split, independent of the seed of the run.
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
    """Keys of the inputs and the target in mapping samples.

    Attributes:
        inputs: keys in the order of the network's arguments; None: all but the target.
        target: key; None: the first present of target, targets, label, labels, y, mask, fine_label and class.
    """

    inputs: Sequence[str] | None = None
    target: str | None = None

    def of(self, names: Sequence[str]) -> tuple[list[str], str]:
        """Input keys and target key of samples that have the keys `names`."""
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
    """Training, validation or test part of a user's data.

    Attributes:
        positions: this part's indices into `dataset`, int64 [N].
        sampler: draws the samples of an epoch; None: a permutation of all.
        batch_size: of the source's loader; None without a loader. `num_workers` likewise.
        in_rows: read a batch with one `__getitems__` call, without seeding each sample: nothing in it is random.
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
        """Return the order of an epoch, drawn by the part's own sampler seeded by (seed, epoch)."""
        seed = hash((self.seed, epoch)) & (2**62 - 1)
        with isolate_rng(include_cuda=False):
            _seed_all(seed)
            if isinstance(getattr(self.sampler, "generator", None), torch.Generator):
                self.sampler.generator.manual_seed(seed)
            if hasattr(self.sampler, "set_epoch"):
                self.sampler.set_epoch(epoch)
            return np.array([int(position) for position in self.sampler], dtype=np.int64)

    def read_batch(self, places: np.ndarray, epoch: int | None) -> Any:
        """Return the collated batch of the samples at `places`, indices into `positions`."""
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
            try:
                return self.collate(samples)
            except (TypeError, RuntimeError) as error:
                if self.collate is not default_collate:
                    raise
                raise UserError(
                    f"samples do not fit into one batch ({first_line(error)}): let the data set's transform make "
                    "tensors of one shape, or give a DataLoader with a collate_fn."
                ) from error

    def inputs_and_target(self, batch: Any) -> tuple[Tensor, ...]:
        """Return (inputs..., target): floats as float32, uint8 images [B, C, H, W] in 0..1, integer targets int64."""
        if isinstance(batch, Mapping):
            input_names, target_name = self.columns.of(list(batch))
            batch = [batch[name] for name in (*input_names, target_name)]
        entries = batch if isinstance(batch, (tuple, list)) else [batch]
        if len(entries) < 2 or not all(isinstance(entry, Tensor) for entry in entries):
            kinds = ", ".join(type(entry).__name__ for entry in entries)
            raise UserError(
                f"samples must be (inputs..., target) or a mapping with a target, of tensors, not ({kinds}): "
                "let the data set's transform make tensors, or data.columns leave others out."
            )
        *inputs, target = (entry.float() if entry.is_floating_point() else entry for entry in entries)
        inputs = [x.float() / 255 if x.dtype == torch.uint8 and x.dim() > 3 else x for x in inputs]
        return (*inputs, target if target.is_floating_point() else target.long())


def _stored_labels(dataset: Any, columns: Columns) -> np.ndarray | None:
    """Class labels, int64 [N], that the data set keeps apart from its samples; else None."""
    if isinstance(dataset, Subset):
        labels = _stored_labels(dataset.dataset, columns)
        return None if labels is None else labels[np.asarray(dataset.indices)]
    if isinstance(dataset, ConcatDataset):
        parts = [_stored_labels(part, columns) for part in dataset.datasets]
        known = [part for part in parts if part is not None]
        return np.concatenate(known) if len(known) == len(parts) else None
    if type(dataset) is TensorDataset:
        targets = dataset.tensors[-1].cpu().numpy()
    elif hasattr(dataset, "column_names") and hasattr(dataset, "features"):
        # Hugging Face's datasets read a column without the others.
        targets = np.asarray(dataset.with_format("numpy")[columns.of(dataset.column_names)[1]][:])
    else:
        # torchvision's data sets have `targets`, but a transform may change them.
        if getattr(dataset, "target_transform", None) is not None:
            return None
        try:
            targets = np.asarray(getattr(dataset, "targets", None))
        except ValueError:
            return None
    are_labels = targets.ndim == 1 and targets.dtype.kind in "iub" and len(targets) == len(dataset)
    return targets.astype(np.int64) if are_labels else None


def _seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(seed & (2**63 - 1))
    np.random.seed(seed & (2**32 - 1))
    random.seed(seed)


def open_source(source: Any, columns: Columns, seed: int) -> dict[str, SamplePart]:
    """Open the parts of a user's data: "train", and "val" and "test" if the source has them; see `CustomData`."""
    source = _opened(source)
    if isinstance(source, LightningDataModule):
        sources = _loaders(source)
    else:
        sources = dict(source) if isinstance(source, Mapping) else {"train": source}
        parts = {name: part for part, names in PART_NAMES.items() for name in names}
        if unknown := ", ".join(str(name) for name in sources if name not in parts):
            raise UserError(f"data.source has the parts {unknown}, but train, val and test are wanted.")
        sources = {parts[name]: part for name, part in sources.items() if part is not None}
    if "train" not in sources:
        raise UserError("data.source has no part to train on: name one train, or give it a train_dataloader.")
    return {part: _part(opened, columns, seed, part) for part, opened in sources.items()}


def _loaders(module: LightningDataModule) -> dict[str, Any]:
    # One process per machine downloads; the others wait and find the files.
    with locked(cache_dir() / "prepare" / type(module).__qualname__):
        module.prepare_data()
    for stage in ("fit", "test"):
        module.setup(stage)
    loaders = {}
    for part in PART_NAMES:
        # Raised by Lightning's default of a method that the user has not overridden.
        with contextlib.suppress(MisconfigurationException):
            loader = getattr(module, f"{part}_dataloader")()
            several = loader if isinstance(loader, (list, tuple)) else [loader]
            if len(several) > 1:
                raise UserError(f"{part}_dataloader gives {len(several)} loaders; growlab takes one.")
            if several and several[0] is not None:
                loaders[part] = several[0]
    return loaders


def _part(source: Any, columns: Columns, seed: int, name: str) -> SamplePart:
    source = _opened(source)
    loader = source if isinstance(source, DataLoader) else None
    dataset: Any = source if loader is None else loader.dataset
    named = f"{name} ({type(dataset).__name__})"
    by_position = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if not by_position or isinstance(dataset, IterableDataset | Mapping):
        raise UserError(
            f"data.source: {named} is not a LightningDataModule, DataLoader, Dataset or Hugging Face data set (or a "
            "mapping from train, val and test to these) that reads samples by index: an iterable cannot be resumed in "
            "the middle, and a function is called by its _target_, without _partial_."
        )
    in_rows = hasattr(dataset, "with_format") and hasattr(dataset, "column_names")
    if in_rows:
        # A Hugging Face data set: torch's format is the default; format "custom" is a transform, perhaps a random one.
        format = (getattr(dataset, "format", None) or {}).get("type")
        dataset, in_rows = dataset.with_format("torch") if format is None else dataset, format != "custom"
    if not len(dataset):
        raise UserError(f"data.source: {named} is empty.")
    part = SamplePart(dataset, np.arange(len(dataset)), seed, columns, in_rows=in_rows)
    if loader is None:
        return part
    if type(loader.batch_sampler) not in (BatchSampler, type(None)) or loader.batch_size is None:
        raise UserError(
            f"data.source: {named} has a custom batch sampler ({type(loader.batch_sampler).__name__}), but batch "
            "sizes follow the growth schedule: use a sampler of single indices, or none."
        )
    sampler: Any = loader.sampler
    if isinstance(sampler, RandomSampler):
        plain = not sampler.replacement and sampler.num_samples == len(dataset)
    else:
        plain = isinstance(sampler, SequentialSampler | DistributedSampler)
    if not hasattr(sampler, "__len__"):
        raise UserError(
            f"data.source: {named} has a sampler ({type(sampler).__name__}) without __len__, the number of samples in "
            "an epoch: add it."
        )
    of_loader = {key: getattr(loader, key) for key in ("drop_last", "batch_size", "num_workers")}
    part = replace(part, collate=loader.collate_fn, sampler=None if plain else sampler, **of_loader)
    if plain or name == "train":
        # A plain sampler is replaced by our own (seed, epoch) order.
        return part
    # Samplers may split a data set that the loaders share.
    return replace(part, positions=part.order(0), sampler=None)


def _opened(source: Any) -> Any:
    """Load a data set from its folder; return any other source as it is."""
    if not isinstance(source, str | Path):
        return source
    if (saved := saved_datasets(source)) is None:
        raise UserError(
            f"data.source={source} is no folder that datasets.save_to_disk wrote; images in class folders are read "
            "by data=folder data.root=FOLDER, anything else by data.source._target_=MODULE.FUNCTION."
        )
    return saved


class CustomData(RunData):
    """A user's own data: a LightningDataModule, DataLoader, Dataset or data set of Hugging Face's `datasets`.

    Samples are (inputs..., target), or mappings, see `columns`. A batch is (inputs..., target): floats as float32,
    uint8 images ([C, H, W]) in 0..1, integer targets as int64. Order and random transforms are functions of (seed,
    epoch, sample), so they are the same in a resumed run and on another number of ranks. From a DataLoader, or those of
    a LightningDataModule, the data set, `collate_fn`, sampler and `drop_last` are used; a LightningDataModule's hooks
    around the transfer of a batch to the device are called.

    Args:
        source: the data; a folder that `datasets.save_to_disk` wrote; or a mapping from train, val and test to data
            sets.
        batch_size: samples in a training batch over all ranks; None: that of the source's loader, else 128.
        eval_batch_size: samples in a validation or test batch; None: that of their loaders, else `batch_size`.
        split: fractions of the training set to hold out if the source has no validation or test set.
        columns: keys of the inputs and the target in mapping samples.
        network: arguments of the network, such as `num_classes`; they override those inferred from the data.
        num_workers: worker processes; None: that of the source's loader, else 0.
        seed: of the order and of random transforms.
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
        # Read some samples now, so that errors in the data surface early.
        *inputs, target = self._first(2)
        self._shapes, self._target = [list(x.shape[1:]) for x in inputs], target
        for name in parts.keys() - {"train"}:
            target = self._batch(name, np.arange(1), None, 0)[-1]
            is_label = target.dim() == 1 and not target.is_floating_point()
            labels = _stored_labels(parts[name].dataset, self.columns) if is_label else None
            if labels is not None and labels.max() < 0:
                raise UserError(
                    f"data.source: all labels of {name} are negative, as in data sets that keep them secret: leave "
                    "this part out, and training samples are held out in its place."
                )

    def teardown(self, stage: str | None = None) -> None:
        """End the worker processes."""
        super().teardown(stage)
        if self._module is not None:
            self._module.teardown(stage or "test")

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a source that is a LightningDataModule, else an empty dict."""
        return {} if self._module is None else self._module.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of a source that is a LightningDataModule."""
        if self._module is not None:
            self._module.load_state_dict(state_dict)

    def training_loader(self, epoch: int, draw: int) -> StreamLoader:
        """Return the training batches with the sizes of `epoch`, and the order and random draws of epoch `draw`."""
        return self._loader("train", self._plan(epoch, draw))

    def training_batches(
        self, count: int, epoch: int | None = None, augmented: bool = False
    ) -> list[tuple[Tensor, ...]]:
        """Return the first training batches of an epoch, read in this process; see `RunData`."""
        epoch = self._now if epoch is None else epoch
        batches = self._plan(epoch, epoch).batches()[:count]
        return [self._batch("train", places, epoch, number) for number, places in enumerate(batches)]

    def samples_in_batches(self, epoch: int, batch_size: int) -> list[int]:
        """Return the number of samples in each training batch of an epoch with global batches of this size."""
        train = self._parts["train"]
        plan = EpochPlan(train.num_drawn, batch_size, self.seed, epoch, drop_last=train.drop_last, steps=self.steps)
        return plan.sizes

    def probe_batch(self, n: int) -> Tensor | tuple[Tensor, ...]:
        """Return the network's inputs for n fixed training samples, class-balanced if classes are known.

        Samples are repeated if there are fewer than n.
        """
        *inputs, _ = self._first(n)
        return inputs[0] if len(inputs) == 1 else tuple(inputs)

    @property
    def network_arguments(self) -> dict[str, Any]:
        """The user's arguments of the network."""
        return self._network

    def offer(self, name: str) -> Any | None:
        """Return the value of a network's argument; None if it cannot be inferred from the data.

        Inferred are `image_shape` [C, H, W], `input_shape`, `target_shape`, `in_features`, `in_channels`, and
        `num_classes` or `out_features`: the number of classes, or of numbers in a target that is not a class.
        """
        if name in ("num_classes", "out_features"):
            return self._num_outputs()
        shape = self._shapes[0]
        known: dict[str, Any] = {"input_shape": shape, "target_shape": list(self._target.shape[1:])}
        if shape:
            known["in_features" if len(shape) == 1 else "in_channels"] = shape[0]
        if len(shape) == 3:
            known["image_shape"] = shape
        return known.get(name)

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
                "the network takes num_classes, which cannot be inferred without reading all "
                f"{len(part)} samples: set {hint}."
            )
        print(f"reading {len(part)} samples to count their classes; {hint} saves that", file=sys.stderr)
        # In masks, 255 marks pixels without a class.
        labels = (t if t.dim() == 1 else t[t != 255] for t in self._targets(part))
        return 1 + max((int(t.max()) for t in labels if t.numel()), default=0)

    def _complete(self, parts: dict[str, SamplePart]) -> dict[str, SamplePart]:
        """Split missing parts off the training part."""
        train, left = parts["train"], 1.0
        self._classes = self._read_classes(train)
        for name, fraction in (("test", self.split.test), ("val", self.split.validation)):
            if name in parts or not (fraction or name == "test"):
                continue
            if train.sampler is not None:
                raise UserError(
                    f"the loader's sampler ({type(train.sampler).__name__}) draws from all training samples, so "
                    f"none can be held out: give the source a {name} set"
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
        """Class labels of the training samples; all 0 if unknown."""
        return np.zeros(len(train), dtype=np.int64) if self._classes is None else self._classes

    def _read_classes(self, part: SamplePart) -> np.ndarray | None:
        """Class labels, int64 [N], if they can be read cheaply, else None."""
        self._parts = {"train": part}
        target = self._batch("train", np.arange(1), None, 0)[-1]
        if target.is_floating_point() or target.dim() != 1:
            return None
        labels = _stored_labels(part.dataset, part.columns)
        if labels is not None and labels[0] == int(target[0]):
            return labels
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
        """Move a collated batch to the device through the source's hooks; return (inputs..., target)."""
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

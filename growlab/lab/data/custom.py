"""A user's own data in growlab's runs: split, ordered and batched as growing and exact resuming need it."""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning import LightningDataModule
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from growlab.base.errors import UserError
from growlab.lab.data.arguments import check_numbers
from growlab.lab.data.augment import Augmentation
from growlab.lab.data.loaders import EpochPlan, ResumableLoader
from growlab.lab.data.order import COLLATE, ORDER, draws, evaluation_batches, permutation, training_batches
from growlab.lab.data.readers import Readers
from growlab.lab.data.run_data import RunData
from growlab.lab.data.samples import (
    Columns,
    Part,
    SampleBatches,
    classes_of,
    epoch_order,
    open_source,
    random_state_kept,
    seed_all,
)
from growlab.lab.data.split import first_balanced, stratified_split

_BATCH_SIZE = 128
# Samples that are read through for their classes: to split by them, and at most to count them.
_FEW, _MANY = 2_000, 50_000
_READ_TOGETHER = 256


@dataclass(frozen=True)
class Split:
    """Parts of the training set to hold out where the source has no validation or test set.

    Each class gives the same part of its samples where a sample's target is a class; otherwise they are drawn at
    random.

    Attributes:
        validation: part that is validated on behind each epoch; 0: no validation, also on a set of the source.
        test: part that the result is of.
        seed: decides which samples, whatever the seed of the run.

    Raises:
        UserError: there are no such parts.
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


@dataclass
class SamplePlan(EpochPlan):
    """The samples in each batch of an epoch; `part.sampler`, if there is one, draws them."""

    part: Part | None = None

    def __len__(self) -> int:
        training = self.augmentation is not None
        return len(sizes(self.part, self.batch_size) if training else self.batches())

    def batches(self) -> list[np.ndarray]:
        """Return the places of the samples of each batch."""
        if self.augmentation is None:
            return evaluation_batches(self.num_images, self.batch_size, self.rank, self.world_size)
        if self.part.sampler is None:
            order = permutation(self.num_images, ORDER, self.seed, self.epoch)
        else:
            order = epoch_order(self.part, self.seed, self.epoch)
        return training_batches(order, self.batch_size, self.rank, self.world_size)[: len(self)]


@dataclass
class SampleLoader(ResumableLoader):
    """Batches (inputs..., target) of a user's data.

    Attributes:
        readers: reads what is collated of the samples.
        finish: makes (inputs..., target) of that, by the number of the batch in its epoch.
    """

    readers: Readers
    finish: Callable[[Any, int], tuple[Tensor, ...]]

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        batches = self._left()
        training = self.plan.augmentation is not None
        for batch in self.readers.read(batches, self.plan.epoch if training else None):
            finished = self.finish(batch, self._given)
            self._given += 1
            yield finished


def sizes(part: Part, batch_size: int) -> list[int]:
    """The number of samples in each training batch."""
    number = len(part) if part.sampler is None else len(part.sampler)
    whole, rest = divmod(number, batch_size)
    return [batch_size] * whole + [rest] * bool(rest and not (part.drop_last and whole))


class CustomData(RunData):
    """A user's own data: a LightningDataModule, DataLoader, Dataset or data set of Hugging Face's `datasets`.

    Samples are (inputs..., target), or mappings, see `columns`. A batch is (inputs..., target):
    numbers in float32, images of bytes ([C, H, W] of uint8) in 0..1, whole targets int64. Order and what transforms
    draw are functions of (seed, epoch, sample), so a resumed run and a run on another number of ranks see the same. Of
    a LightningDataModule its loaders' data sets, `collate_fn`, samplers and `drop_last` are taken, and its hooks around
    the transfer of a batch to the device.

    Args:
        source: the data; a folder that `datasets.save_to_disk` wrote; or a mapping of train, val and test to data sets.
        batch_size: samples in a training batch over all ranks; None: the source's loader's, else 128.
        eval_batch_size: likewise of validation and test; None: their loaders', else as in training.
        split: parts of the training set to hold out where the source has no validation or test set.
        columns: inputs and target of samples that are mappings.
        network: arguments that the network is made with, such as `num_classes`; others are found from the data.
        num_workers: processes that read; None: the source's loader's, else 0.
        seed: of the order and of transforms.

    Raises:
        UserError: an argument cannot be used; from `setup()` also, the data cannot.
    """

    goes_with = (
        "data of your own go with model=custom and the objective of their targets: classification, multilabel, "
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
        check_numbers(1, batch_size=batch_size, eval_batch_size=eval_batch_size)
        check_numbers(0, num_workers=num_workers)
        self._source, self._network = source, dict(network or {})
        self._module = source if isinstance(source, LightningDataModule) else None
        self.split, self.columns = split or Split(), columns or Columns()
        self._batch_size, self._eval_batch_size, self._num_workers = batch_size, eval_batch_size, num_workers
        self._parts: dict[str, Part] = {}
        self._readers: dict[str, Readers] = {}
        self._classes: np.ndarray | None = None

    def setup(self, stage: str | None = None) -> None:
        """Open the data, once, whatever the stage."""
        if self.split.validation == 0 and self.trainer is not None:
            # Else Lightning warns of an empty list, and likewise if the method were missing.
            self.trainer.limit_val_batches = 0
        if self._parts:
            return
        parts = open_source(self._source, self.columns)
        self.batch_size = self._batch_size or parts["train"].batch_size or _BATCH_SIZE
        self._parts = parts = self._complete(parts)
        if self.split.validation == 0:
            parts.pop("val", None)
        self.num_train, self.num_test = sum(sizes(parts["train"], self.batch_size)), len(parts["test"])
        self.num_val = len(parts["val"]) if "val" in parts else 0
        # Two samples, so that faults in them are reported before anything else begins.
        *inputs, target = self._first(2)
        self._shapes, self._target = [list(x.shape[1:]) for x in inputs], target

    def teardown(self, stage: str | None = None) -> None:
        """End the processes that read samples."""
        for readers in self._readers.values():
            readers.close()
        self._readers.clear()
        if self._module is not None:
            self._module.teardown(stage or "test")

    def state_dict(self) -> dict[str, Any]:
        """The source's own state, if it has any."""
        return {} if self._module is None else self._module.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the source's state."""
        if self._module is not None:
            self._module.load_state_dict(state_dict)

    # Batches -------------------------------------------------------------------------------------------

    def training_loader(self, epoch: int, draw: int) -> SampleLoader:
        """Return batches of the training samples in the sizes of an epoch, ordered and drawn as those of another."""
        return self._loader("train", self._training_plan(epoch, draw))

    def training_batches(
        self, count: int, epoch: int | None = None, augmented: bool = False
    ) -> list[tuple[Tensor, ...]]:
        """Return the first batches of an epoch, this rank's part of each, as they are trained on.

        Args:
            count: number of batches; as many as there are, if there are fewer.
            epoch: None: the trainer's current one.
            augmented: samples are drawn as in training anyway.
        """
        epoch = self._now if epoch is None else epoch
        batches = self._training_plan(epoch, epoch).batches()[:count]
        return [self._read("train", places, epoch, number) for number, places in enumerate(batches)]

    def val_dataloader(self) -> SampleLoader | list:
        """Return the validation samples in order; an empty list without validation."""
        return self._evaluation("val") if self.num_val else []

    def test_dataloader(self) -> SampleLoader:
        """Return the test samples in order."""
        return self._evaluation("test")

    def samples_in_batches(self, epoch: int, batch_size: int) -> list[int]:
        """Return the number of samples in each training batch of an epoch that has batches of this size."""
        return sizes(self._parts["train"], batch_size)

    def probe_batch(self, n: int) -> Tensor | tuple[Tensor, ...]:
        """Return the network's inputs of n training samples: always the same ones, repeated if there are fewer.

        As many of each class as can be, where classes are known.
        """
        *inputs, _ = self._first(n)
        return inputs[0] if len(inputs) == 1 else tuple(inputs)

    # Arguments of networks ------------------------------------------------------------------------

    @property
    def network_arguments(self) -> dict[str, Any]:
        """The arguments that the user gives as `network`."""
        return self._network

    def offer(self, name: str) -> Any | None:
        """Return the value of an argument that a network may take and the data tell; None if they do not tell it.

        Known are `image_shape` [C, H, W], `input_shape`, `in_features`, `in_channels`; `num_classes` (of targets that
        are numbers, how many there are in a sample) and `out_features`, the same.

        Raises:
            UserError: classes would have to be counted over too many samples.
        """
        shape = self._shapes[0]
        found = {"input_shape": shape, "target_shape": list(self._target.shape[1:])}
        if len(shape) == 1:
            found["in_features"] = shape[0]
        if len(shape) > 1:
            found["in_channels"] = shape[0]
        if len(shape) == 3:
            found["image_shape"] = shape
        if name in ("num_classes", "out_features"):
            return self._num_outputs()
        return found.get(name)

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
        if len(part) > _MANY:
            raise UserError(
                "the network takes num_classes, and the data set does not tell it without reading all "
                f"{len(part)} samples: set +data.network.num_classes=N."
            )
        print(
            f"reading {len(part)} samples to count their classes; +data.network.num_classes=N saves that",
            file=sys.stderr,
        )
        # 255 marks pixels of no class.
        tops = [int(t[t != 255].max()) if bool((t != 255).any()) else 0 for t in self._targets(part)]
        return max(tops) + 1

    # Parts -----------------------------------------------------------------------------------------------

    def _complete(self, parts: dict[str, Part]) -> dict[str, Part]:
        """The parts; those that are missing are held out of the training part."""
        wanted = {"test": self.split.test, "val": self.split.validation}
        wanted = {name: part for name, part in wanted.items() if name not in parts}
        if wanted.get("test") == 0:
            raise UserError(
                "the source has no test set, and a result needs one: set data.split.test above 0."
            )
        train, left = parts["train"], 1.0
        self._classes = self._classes_of(train)
        for name, fraction in wanted.items():
            if not fraction:
                continue
            if train.sampler is not None:
                raise UserError(
                    f"the loader's own sampler ({type(train.sampler).__name__}) draws from all training samples, so "
                    f"none can be held out of them: give the source a {name} set"
                    + (", or set data.split.validation=0." if name == "val" else ".")
                )
            labels = np.zeros(len(train), dtype=np.int64) if self._classes is None else self._classes
            kept, held_out = stratified_split(labels, fraction / left, self.split.seed)
            if not len(kept) or not len(held_out):
                raise UserError(
                    f"{len(train)} training samples are too few to hold {fraction:.0%} out; give the source a {name} "
                    "set."
                )
            parts[name], train = train.select(held_out), train.select(kept)
            self._classes = None if self._classes is None else self._classes[kept]
            left -= fraction
        return {**parts, "train": train}

    def _classes_of(self, part: Part) -> np.ndarray | None:
        """Class labels if they can be read cheaply, else None."""
        self._parts = {"train": part}
        target = self._read("train", np.arange(1), None, 0)[-1]
        if target.is_floating_point() or target.dim() != 1:
            return None
        found = classes_of(part)
        if found is not None and found[0] == int(target[0]):
            return found
        return torch.cat(list(self._targets(part))).numpy() if len(part) <= _FEW else None

    def _targets(self, part: Part) -> Iterator[Tensor]:
        for start in range(0, len(part), _READ_TOGETHER):
            places = np.arange(start, min(start + _READ_TOGETHER, len(part)))
            yield self._read("train", places, None, 0)[-1].cpu()

    def _first(self, n: int) -> tuple[Tensor, ...]:
        number = len(self._parts["train"])
        labels = np.zeros(number, dtype=np.int64) if self._classes is None else self._classes
        return self._read("train", np.resize(first_balanced(labels, n), n), None, 0)

    # Reading ---------------------------------------------------------------------------------------------

    def _read(self, name: str, places: np.ndarray, epoch: int | None, number: int) -> tuple[Tensor, ...]:
        return self._finish(name, epoch, self._parts[name].read(places, self.seed, epoch), number)

    def _finish(self, name: str, epoch: int | None, batch: Any, number: int) -> tuple[Tensor, ...]:
        """A collated batch on the device, through the source's hooks, as (inputs..., target)."""
        module, device, (rank, _) = self._module, self._device, self._place()
        if module is None:
            return self._parts[name].inputs_and_target(move_data_to_device(batch, device))
        if self.trainer is not None:
            module.trainer = self.trainer
        with random_state_kept():
            key = (self.seed, -1 if epoch is None else epoch, rank)
            seed_all(int(draws(np.array([number]), COLLATE, *key)[0]))
            batch = module.on_before_batch_transfer(batch, 0)
            batch = module.transfer_batch_to_device(batch, device, 0)
            batch = module.on_after_batch_transfer(batch, 0)
        return self._parts[name].inputs_and_target(batch)

    def _training_plan(self, epoch: int, draw: int) -> SamplePlan:
        size = self.global_batch_size(epoch)
        rank, world_size = self._place_for(size)
        part = self._parts["train"]
        return SamplePlan(len(part), size, self.seed, draw, Augmentation(), rank, world_size, part=part)

    def _evaluation(self, name: str) -> SampleLoader:
        part = self._parts[name]
        size = self._eval_batch_size or part.batch_size or self.batch_size
        return self._loader(name, SamplePlan(len(part), size, self.seed, 0, None, *self._place(), part=part))

    def _loader(self, name: str, plan: SamplePlan) -> SampleLoader:
        part = self._parts[name]
        if name not in self._readers:
            workers = part.num_workers if self._num_workers is None else self._num_workers
            pinned = self._device.type == "cuda"
            self._readers[name] = Readers(SampleBatches(part, self.seed), workers, pinned)

        def finish(batch: Any, number: int) -> tuple[Tensor, ...]:
            return self._finish(name, None if plan.augmentation is None else plan.epoch, batch, number)

        return SampleLoader(plan, self._readers[name], finish)

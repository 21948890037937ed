"""Interface between data and runs: everything that the runner and the planner use of a data module."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from lightning import LightningDataModule
from torch import Tensor

from growlab.base.errors import UserError
from growlab.lab.data.arrival import Incremental
from growlab.lab.data.loaders import EpochPlan, Steps, WorkerPool
from growlab.parts import Part

Batch = tuple[Tensor, ...]
#: Accepted names of folders, files and splits for each part of the data, the usual one first.
PART_NAMES = {"train": ("train", "training"), "val": ("val", "valid", "validation", "dev"), "test": ("test", "testing")}


class RunData(LightningDataModule, ABC):
    """Data of a run. Batches are (inputs..., target), and functions of (seed, epoch) alone.

    Args:
        batch_size: samples in a training batch over all ranks.
        seed: of the order.

    Attributes:
        batch_size_at_epoch: global batch size of an epoch, set by the run from the growth schedule; None:
            `batch_size`.
        num_train: number of training samples; known after `setup()`, like `num_val` and `num_test`.
        epochs_per_pass: number of epochs in a pass over the training samples.
        steps: lengths of the epochs of a run that counts steps, set by its plan; None: see `epochs_per_pass`.
        tokens_per_sample: number of predicted tokens in a sample; None for data other than windows of tokens.
        incremental: fraction of the data that each stage of the run has; None: all data from the start.
        only_in_epochs: name of a setting that counts epochs and so rules out a run in steps, else "".
        goes_with: networks and objectives that fit the data, for messages.
    """

    goes_with = ""
    only_in_epochs = ""
    epochs_per_pass = 1
    steps: Steps | None = None
    tokens_per_sample: int | None = None
    incremental: Incremental | None = None
    num_train: int
    num_val: int
    num_test: int

    def __init__(self, batch_size: int, seed: int) -> None:
        super().__init__()
        self.batch_size, self.seed = batch_size, seed
        self.batch_size_at_epoch: Callable[[int], int] | None = None
        self._is_read = False
        # By part of the data, for parts that worker processes read.
        self._workers: dict[str, WorkerPool] = {}

    def prepare_data(self) -> None:
        """Download and read the data; Lightning calls this in one process per machine."""
        self.setup()

    def setup(self, stage: str | None = None) -> None:
        """Read the data on the first call, whatever the stage."""
        if not self._is_read:
            self._read()
            self._is_read = True
        if not self.num_val and self.trainer is not None:
            # Lightning would warn about an empty list of loaders, and also about a missing `val_dataloader`.
            self.trainer.limit_val_batches = 0

    @abstractmethod
    def _read(self) -> None:
        """Read the data and set `num_train`, `num_val` and `num_test`."""

    @abstractmethod
    def training_loader(self, epoch: int, draw: int) -> Iterable[Batch]:
        """Return the training batches of an epoch.

        Args:
            epoch: determines the available samples and the batch size.
            draw: determines order and augmentation, with the seed.
        """

    def samples_in_batches(self, epoch: int, batch_size: int) -> list[int]:
        """Return the number of samples in each training batch of an epoch with global batches of this size."""
        number = self.num_train_at(epoch, batch_size)
        return EpochPlan(number, batch_size, self.seed, epoch, parts=self.epochs_per_pass, steps=self.steps).sizes

    @abstractmethod
    def probe_batch(self, n: int) -> Any:
        """Return the inputs of n fixed training samples on the CPU."""

    def train_dataloader(self) -> Any:
        """Return the batches of the trainer's current epoch (0 without a trainer)."""
        return self.training_loader(self._now, self._now)

    def val_dataloader(self) -> Any:
        """Return the validation samples in order; an empty list without validation."""
        return self.evaluation(self.watched) if self.num_val else []

    def test_dataloader(self) -> Any:
        """Return the test samples in order."""
        return self.evaluation("test")

    @abstractmethod
    def evaluation(self, part: str) -> Iterable[Batch]:
        """Return this rank's batches of "val" or "test", in order."""

    def training_batches(self, count: int, epoch: int | None = None, augmented: bool = False) -> list[Any]:
        """Return the first batches of an epoch, this rank's part of each.

        Args:
            count: most batches to return.
            epoch: None: the trainer's current one.
            augmented: augment images as in training.
        """
        epoch = self._now if epoch is None else epoch
        return list(islice(self.training_loader(epoch, epoch), count))

    def global_batch_size(self, epoch: int) -> int:
        """Return the number of samples in a training batch of this epoch, over all ranks."""
        return self.batch_size if self.batch_size_at_epoch is None else self.batch_size_at_epoch(epoch)

    @property
    def watched(self) -> str:
        """Part that `val_dataloader` reads: "val" or "test"."""
        return "val"

    def num_train_at(self, epoch: int, batch_size: int | None = None) -> int:
        """Return the number of training samples in this epoch, with `batch_size` in place of the epoch's own."""
        return self.num_train

    def follow_stages(self, starts: Sequence[int], of: int, epochs: int) -> None:
        """Set the first epoch of each stage, in a run `of` epochs, and the number of `epochs` to scale them to.

        Incremental data arrive with these stages; until the call, a single stage has all data.
        """

    @property
    @abstractmethod
    def network_arguments(self) -> dict[str, Any]:
        """Arguments to pass to every network for this data."""

    def offer(self, name: str) -> Any:
        """Return the value of an argument that a network may take; None if it cannot be inferred from the data."""
        return None

    def parts(self) -> list[Part]:
        """Return the parts of the run that the data require."""
        return []

    @property
    def probe_size(self) -> int:
        """Default number of training samples that growth is checked on."""
        return 32

    @property
    def bytes_of_tokens(self) -> Tensor | None:
        """Bytes of text per token id, float32 [vocabulary]; None for data other than tokens."""
        return None

    def describe(self) -> str:
        """Return a line about the data to print at the start of a run, or ""."""
        return ""

    def copy_tokenizer(self, folder: Path) -> None:
        """Copy the files of the tokenizer, if any, to a folder for `from_pretrained`."""

    def teardown(self, stage: str | None = None) -> None:
        """End the worker processes."""
        for workers in self._workers.values():
            workers.close()
        self._workers.clear()

    @property
    def _now(self) -> int:
        return self.trainer.current_epoch if self.trainer is not None else 0

    def _place(self) -> tuple[int, int]:
        """Return this process's rank and the world size."""
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)

    def _training_plan(self, num_samples: int, epoch: int, draw: int, **more: Any) -> EpochPlan:
        """Return the plan of the training batches with the sizes of `epoch` and the order of epoch `draw`."""
        size, (rank, world_size) = self.global_batch_size(epoch), self._place()
        if size % world_size:
            raise UserError(
                f"a batch of {size} does not divide among {world_size} processes; choose a data.batch_size that "
                f"{world_size} divides, or another number of devices."
            )
        more |= {"parts": self.epochs_per_pass, "steps": self.steps}
        return EpochPlan(num_samples, size, self.seed, draw, True, rank, world_size, **more)

    def _evaluation_plan(self, num_samples: int, batch_size: int) -> EpochPlan:
        """Return the plan of all samples in order."""
        return EpochPlan(num_samples, batch_size, self.seed, 0, False, *self._place())

    @property
    def _device(self) -> torch.device:
        return self.trainer.strategy.root_device if self.trainer is not None else torch.device("cpu")

"""Resumable loaders of one epoch's batches on one rank, and the worker processes that read data not in memory."""

import os
import signal
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from growlab.base.errors import UserError
from growlab.lab.data.images import Augmentation, ImageArray, Images, Normalisation, RandomCrop
from growlab.lab.data.order import ORDER, evaluation_batches, permutation, training_batches

# Start of torch's RuntimeError about a dead worker process. Its SIGCHLD handler raises it wherever the main thread
# happens to be, so any code of a run may see it.
DIED = "DataLoader worker (pid"
# More worker processes per training process hardly help.
_MOST_WORKERS = 16
# Time for a worker process to finish its current batch before it is killed.
_GRACE_SEC = 1.0


@dataclass(frozen=True)
class Steps:
    """Lengths of the epochs of a run that counts steps instead of passes over the data.

    Attributes:
        lengths: batches of each epoch; an epoch continues the pass where the previous epoch ended.
        repeat: cycle through this many batches of the first pass; None: use all.
    """

    lengths: Sequence[int]
    repeat: int | None = None

    def numbers(self, epoch: int) -> list[int]:
        """Numbers of the batches of an epoch, counted over all passes."""
        start = sum(self.lengths[:epoch])
        numbers = range(start, start + self.lengths[min(epoch, len(self.lengths) - 1)])
        return [number % self.repeat for number in numbers] if self.repeat else list(numbers)


@dataclass
class EpochPlan:
    """The samples in each batch of an epoch on this rank.

    Attributes:
        num_samples: in a pass over the set.
        training: False = evaluation: in order, every sample once over all ranks.
        parts: number of epochs in a pass over the samples.
        order: maps the number of a pass to its positions, int64 [N]; None = a permutation by (seed, number).
        drop_last: drop a smaller last training batch, unless it is the only one.
        steps: lengths of the epochs in steps; None = a pass has `parts` epochs.
    """

    num_samples: int
    batch_size: int
    seed: int
    epoch: int = 0
    training: bool = True
    rank: int = 0
    world_size: int = 1
    parts: int = 1
    order: Callable[[int], np.ndarray] | None = None
    drop_last: bool = False
    steps: Steps | None = None

    def __len__(self) -> int:
        return len(self._numbers if self.training else self.batches())

    @property
    def _in_pass(self) -> int:
        """Batches in a pass."""
        whole = self.num_samples // self.batch_size
        return max(1, whole) if self.drop_last else -(-self.num_samples // self.batch_size)

    @property
    def _numbers(self) -> Sequence[int]:
        """Numbers of the epoch's batches, counted over all passes."""
        if self.steps is not None:
            return self.steps.numbers(self.epoch)
        (number, part), length = divmod(self.epoch, self.parts), self._in_pass
        start, stop = (number * length + end * length // self.parts for end in (part, part + 1))
        return range(start, stop)

    @property
    def sizes(self) -> list[int]:
        """Samples in each training batch of the epoch, over all ranks."""
        if self.steps is None and self._in_pass < self.parts:
            raise UserError(
                f"data.epochs_per_pass={self.parts} leaves epochs without a batch: a pass over the samples has "
                f"{self._in_pass} batches of {self.batch_size}."
            )
        size, in_pass = self.batch_size, self._in_pass
        return [min(size, self.num_samples - number % in_pass * size) for number in self._numbers]

    def pass_of(self, place: int) -> int:
        """Return the number of the pass that the epoch's batch at `place` belongs to."""
        return self._numbers[place] // self._in_pass

    def set_epoch(self, epoch: int) -> None:
        """Switch to another epoch."""
        self.epoch = epoch

    def batches(self) -> list[np.ndarray]:
        """Return the positions of the samples of each batch."""
        if not self.training:
            return evaluation_batches(self.num_samples, self.batch_size, self.rank, self.world_size)
        order = self.order or (lambda number: permutation(self.num_samples, ORDER, self.seed, number))
        numbers = [divmod(number, self._in_pass) for number in self._numbers]
        passes = {
            number: training_batches(order(number), self.batch_size, self.rank, self.world_size)
            for number in dict(numbers)
        }
        return [passes[number][place] for number, place in numbers]


@dataclass
class ResumableLoader:
    """Base class of all loaders, with the attributes that Lightning expects.

    Lightning saves `state_dict` in checkpoints and restores it before the first batch. A batch is a function of seed,
    epoch and its number in the epoch, so the number is the only state, and it is valid on any number of ranks.
    """

    plan: Any
    _given: int = field(default=0, init=False)
    _skip: int = field(default=0, init=False)

    # Lightning reads this from every loader that has a `sampler`.
    batch_sampler: ClassVar[None] = None

    @property
    def sampler(self) -> Any:
        """The plan; Lightning calls its `set_epoch` at the start of each epoch."""
        return self.plan

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        self._given, self._skip = self._skip, 0
        for batch in self._made(self.plan.batches()[self._given :]):
            self._given += 1
            yield batch

    @abstractmethod
    def _made(self, batches: list[np.ndarray]) -> Iterator[tuple[Tensor, ...]]:
        """Yield the batches of the samples at these positions; `_given` is the current batch's number in the epoch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the number of batches that it has yielded."""
        return {"epoch": self.plan.epoch, "batches": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Skip the batches yielded before the checkpoint, in the next iteration only."""
        if state["epoch"] != self.plan.epoch:
            raise ValueError(f"a loader of epoch {self.plan.epoch} cannot resume in epoch {state['epoch']}.")
        self._skip = self._given = state["batches"]


@dataclass
class MemoryLoader(ResumableLoader):
    """Batches gathered from one uint8 tensor, augmented and normalised on its device.

    Yields (x float32 [B, C, H, W], y int64 [B]).
    """

    images: ImageArray
    augmentation: Augmentation
    normalisation: Normalisation
    channels_last: bool

    def _made(self, batches: list[np.ndarray]) -> Iterator[tuple[Tensor, Tensor]]:
        if not batches:
            return
        plan, device = self.plan, self.images.labels_N.device
        # One transfer per epoch instead of one per batch.
        positions = np.concatenate(batches)
        drawn = self.augmentation.draw(positions, plan.seed, plan.epoch) if plan.training else None
        draw_3N = None if drawn is None else drawn.to(device)
        index = torch.from_numpy(positions).to(device)
        start = 0
        for batch in batches:
            part = slice(start, start + len(batch))
            start = part.stop
            images_BHWC = self.images.images_NHWC.index_select(0, index[part])
            if draw_3N is not None:
                images_BHWC = self.augmentation.apply(images_BHWC, draw_3N[:, part])
            x_BCHW = self.normalisation.apply(images_BHWC, self.channels_last)
            yield x_BCHW, self.images.labels_N.index_select(0, index[part])


@dataclass
class StreamLoader(ResumableLoader):
    """Batches from `workers`; `finish` turns each, with its number in the epoch, into (inputs..., target)."""

    workers: "WorkerPool"
    finish: Callable[[Any, int], tuple[Tensor, ...]]

    def _made(self, batches: list[np.ndarray]) -> Iterator[tuple[Tensor, ...]]:
        for batch in self.workers.read(batches, self.plan.epoch if self.plan.training else None):
            yield self.finish(batch, self._given)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def workers_of_rank(num_ranks: int) -> int:
    """Return the number of worker processes per rank on this machine: its share of the cores, at most 16."""
    return min(_MOST_WORKERS, max(1, cores() // num_ranks))


class BatchSource(Protocol):
    """Reads whole batches of a set."""

    def read_batch(self, positions: np.ndarray, epoch: int | None) -> Any:
        """Return the batch of the samples at these positions, int64 [B]; `epoch` is None for evaluation."""


@dataclass
class ImageBatches:
    """Reads batches (images uint8 [B, H, W, C], labels int64 [B]), cropped and augmented in training."""

    images: Images
    seed: int
    augmentation: Augmentation
    crop: RandomCrop | None

    def read_batch(self, positions: np.ndarray, epoch: int | None) -> tuple[Tensor, Tensor]:
        """Return the images at these positions, cropped and augmented in training, and their labels."""
        views = None
        if self.crop is not None and epoch is not None:
            frame = self.images.frame
            views = self.crop.views(positions, self.seed, epoch, (frame.height, frame.width))
        images_BHWC = self.images.read(positions, views)
        if epoch is not None:
            draw_3B = self.augmentation.draw(positions, self.seed, epoch)
            images_BHWC = self.augmentation.apply(images_BHWC, draw_3B)
        return images_BHWC, torch.from_numpy(self.images.labels[positions])


class WorkerPool:
    """Reads batches of one set in persistent worker processes.

    A batch is a function of (positions, epoch) alone, whatever the number of workers. The workers end with `close()`,
    with this object, and with this process, however it ends.

    Args:
        num_workers: number of processes, capped at the number of usable cores; 0 reads in this process.
        pinned: copy batches to page-locked memory for faster transfer to a GPU.
    """

    def __init__(self, source: BatchSource, num_workers: int = 0, pinned: bool = False) -> None:
        # torch warns about more processes than cores.
        self._requests, num_workers = _Requests(), min(num_workers, cores())
        self._loader = DataLoader(
            _Batches(source),
            sampler=self._requests,
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=pinned,
            # Without it, creating the iterator would draw from the global generator.
            generator=torch.Generator(),
            worker_init_fn=_ignore_signals,
        )
        self._readings = 0
        self._end: Callable[[], object] | None = None

    def read(self, batches: Sequence[np.ndarray], epoch: int | None) -> Iterator[Any]:
        """Yield the batches, on the CPU; a new call ends the previous iteration.

        Raises:
            RuntimeError: a newer call has ended this iteration, or a worker process died (`DIED`).
        """
        self._readings += 1
        reading = self._readings
        self._requests.items = ((positions, epoch) for positions in batches)
        iterator = iter(self._loader)
        if self._end is None and self._loader.num_workers:
            # Not weakref.finalize: at exit, multiprocessing would wait for the workers before running it.
            self._end = Finalize(self, _end_workers, (iterator,), exitpriority=0)
        try:
            while reading == self._readings:
                batch = next(iterator, None)
                if batch is None:
                    return
                if isinstance(batch, UserError):
                    raise batch
                yield batch
        except (EOFError, ConnectionError) as error:
            # A worker's pipe broke before torch noticed its death: raise the same message as torch.
            raise RuntimeError(f"{DIED} ?) is gone.") from error
        finally:
            # A traceback that references this frame would keep the worker processes alive.
            del iterator
        raise RuntimeError("these batches are read no further: another reading has begun")

    def close(self) -> None:
        """End the worker processes, whatever they are doing; the pool cannot be used afterwards."""
        self._readings += 1
        if self._end is not None:
            self._end()
        del self._loader


class _Requests:
    """Sampler whose items are sent to the workers, a few ahead of the batches."""

    items: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.items


@dataclass
class _Batches(Dataset):
    """A data set whose items are whole batches."""

    source: BatchSource

    def __getitem__(self, request: tuple[np.ndarray, int | None]) -> Any:
        try:
            return self.source.read_batch(*request)
        except UserError as error:
            # Raised here, its message would be buried in a worker's traceback.
            return error


def _unchanged(batch: Any) -> Any:
    return batch


def _ignore_signals(worker: int) -> None:
    # Ctrl-C and SLURM signal every process of a run, but the training process still needs batches to end its step.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)


def _end_workers(iterator: Any) -> None:
    """End the worker processes of a loader's iterator, which may still be referenced, and wait until they are gone.

    torch alone would wait five seconds for each worker and then send SIGTERM, which our workers ignore.
    """
    workers = list(iterator._workers)

    def kill() -> None:
        for worker in workers:
            worker.kill()

    # Otherwise torch's SIGCHLD handler would raise an error for each killed worker.
    signal_handling._remove_worker_pids(id(iterator))
    iterator._worker_pids_set = False
    late = threading.Timer(_GRACE_SEC, kill)
    late.start()
    iterator._shutdown_workers()
    late.cancel()
    kill()
    for worker in workers:
        worker.join()

"""Worker processes that read batches: of images that are not in memory, or of a user's samples."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from growlab.base.errors import UserError
from growlab.lab.data.arguments import cores
from growlab.lab.data.augment import Augmentation
from growlab.lab.data.crops import RandomCrop
from growlab.lab.data.image_sets import EncodedImages, ImageArray

Batch = tuple[Tensor, Tensor]
# First words of torch's RuntimeError about a dead worker process. Its handler of SIGCHLD raises it wherever the
# main thread is just then, so a whole run has to look out for it.
DIED = "DataLoader worker (pid"
# More worker processes than this hardly pay for one training process.
_MOST_WORKERS = 16
# Seconds that a worker process which should end may take to finish the batch it is reading.
_GRACE_SEC = 1.0


def workers_of_rank(num_ranks: int) -> int:
    """Return the number of worker processes for each rank on this machine: its share of the cores, at most 16."""
    return min(_MOST_WORKERS, max(1, cores() // num_ranks))


class Readers:
    """Reads batches of one set in worker processes, which are kept from epoch to epoch.

    A batch is a function of (positions, epoch) alone, whatever the number of workers. The workers end with `close()`,
    with this object, and with this process, whatever ends it.

    Args:
        source: `ImageBatches` or `SampleBatches`, whose items are whole batches, and whose `requests` yields what the
            workers are sent for each batch.
        num_workers: processes, of which there are no more than cores that this one may use; 0 reads in this one.
        pinned: copy batches to page-locked memory, from which a GPU fetches them faster.
    """

    def __init__(self, source: Any, num_workers: int = 0, pinned: bool = False) -> None:
        # torch warns of more processes than cores.
        self._requests, num_workers = _Requests(source), min(num_workers, cores())
        self._loader = DataLoader(
            source,
            sampler=self._requests,
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=pinned,
            # Without its own generator, making the iterator would draw from the global one.
            generator=torch.Generator(),
            worker_init_fn=_finish_what_is_begun,
        )
        self._readings = 0
        self._end: Callable[[], object] | None = None

    def read(self, batches: Sequence[np.ndarray], epoch: int | None) -> Iterator[Any]:
        """Yield the batches, on the CPU.

        A new reading ends the one before it.

        Args:
            batches: positions of the samples of each batch.
            epoch: counted from 0; None reads images as they are.

        Raises:
            UserError: a sample cannot be read.
            RuntimeError: another reading began meanwhile, or a worker process died (`DIED`).
        """
        self._readings += 1
        reading = self._readings
        self._requests.batches, self._requests.epoch = batches, epoch
        iterator = iter(self._loader)
        if self._end is None and self._loader.num_workers:
            # Not weakref.finalize: at the interpreter's exit multiprocessing waits for the workers before that runs.
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
            # Its half of a pipe is gone: as torch says it where it notices by itself.
            raise RuntimeError(f"{DIED} ?) is gone.") from error
        finally:
            # A traceback that holds this frame would keep the worker processes alive.
            del iterator
        raise RuntimeError("these batches are read no further: another reading has begun")

    def close(self) -> None:
        """End the worker processes, whatever they are doing; nothing can be read any more."""
        self._readings += 1
        if self._end is not None:
            self._end()
        del self._loader


def _end_workers(iterator: Any) -> None:
    """End the worker processes of a loader's iterator and wait until they are gone.

    Anyone may still hold the iterator, such as the traceback of what went wrong. torch alone would wait for each worker
    for five seconds and then send it SIGTERM, which workers do not listen to.

    Args:
        iterator: `torch.utils.data.dataloader._MultiProcessingDataLoaderIter`.
    """
    workers = list(iterator._workers)

    def kill() -> None:
        for worker in workers:
            worker.kill()

    # Else torch's handler of SIGCHLD would raise an error for each worker that is killed.
    signal_handling._remove_worker_pids(id(iterator))
    iterator._worker_pids_set = False
    late = threading.Timer(_GRACE_SEC, kill)
    late.start()
    iterator._shutdown_workers()
    late.cancel()
    kill()
    for worker in workers:
        worker.join()


def _finish_what_is_begun(worker: int) -> None:
    # Ctrl-C and SLURM signal every process of a run; the one that trains still needs batches to end its step.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


@dataclass
class _Request:
    """A batch to read: positions of its images, the epoch, and the images' bytes where they are read in blocks."""

    positions: np.ndarray
    epoch: int | None
    contents: list[bytes] | None


@dataclass
class _Requests:
    """The sampler: each request that it yields is sent to a worker, a few ahead of the batches."""

    source: Any
    batches: Sequence[np.ndarray] = ()
    epoch: int | None = None

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        yield from self.source.requests(self.batches, self.epoch)


def _unchanged(batch: Any) -> Any:
    return batch


def _ahead(items: Iterator[list[bytes]]) -> Iterator[list[bytes]]:
    """Yield the same items, the next one fetched by a thread meanwhile."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        following = thread.submit(next, items, None)
        while (item := following.result()) is not None:
            following = thread.submit(next, items, None)
            yield item


@dataclass
class ImageBatches(Dataset):
    """A data set whose item is a whole batch, so that augmentation is vectorised in the workers too.

    A batch is (images uint8 [B, H, W, C], labels int64 [B]).

    Attributes:
        images: the set.
        seed: augmentation is a function of seed and epoch.
        augmentation: shifts and mirroring, in training.
        crop: random crops before them, in training.
    """

    images: EncodedImages | ImageArray
    seed: int
    augmentation: Augmentation | None
    crop: RandomCrop | None = None
    labels_N: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.labels_N = torch.from_numpy(self.images.labels)

    def requests(self, batches: Sequence[np.ndarray], epoch: int | None) -> Iterator[_Request]:
        """Yield what the workers are sent for each batch."""
        if isinstance(self.images, ImageArray) or self.images.payloads.blocks is None:
            yield from (_Request(positions, epoch, None) for positions in batches)
            return
        # Here, in one process, each block is read once an epoch, however many workers there are.
        contents = _ahead(self.images.contents(batches))
        for positions, part in zip(batches, contents, strict=True):
            yield _Request(positions, epoch, part)

    def __getitem__(self, request: _Request) -> Batch | UserError:
        try:
            return self._read(request)
        except UserError as error:
            # Raised here, it would reach the user inside the traceback of a worker process.
            return error

    def _read(self, request: _Request) -> Batch:
        positions, epoch = request.positions, request.epoch
        views = None
        if self.crop is not None and epoch is not None:
            frame = self.images.frame
            views = self.crop.views(positions, self.seed, epoch, (frame.height, frame.width))
        images_BHWC = self.images.read(positions, views, request.contents)
        if self.augmentation is not None and epoch is not None:
            draw_3B = self.augmentation.draw(positions, self.seed, epoch)
            images_BHWC = self.augmentation.apply(images_BHWC, draw_3B)
        return images_BHWC, self.labels_N[positions]

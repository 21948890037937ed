"""`schedule.batch_size=auto`: find each stage's batch size from the available memory and Eq. 8.

Lightning's `BatchSizeFinder` handles one network; here each stage has one, and their batch sizes depend on each other.
"""

import contextlib
import copy
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.memory import garbage_collection_cuda, is_oom_error
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from growlab.base.errors import UserError
from growlab.growth.schedule import stage_batch_sizes
from growlab.widths import WidthGraph, resize

# Sizes tried between powers of two; few, so that a few bytes more or less rarely change the result.
_PER_OCTAVE = 8
_GIB = 2**30
# Fraction of a GPU's free memory to use; the rest is for fragmentation, workspaces, growth events and validation.
_FREE_PART = 0.9
# Images of every trial's first step: batch normalisation needs two.
SMALLEST = 2


def fit_batch_sizes(
    num_stages: int,
    settings: Mapping[str, Any],
    num_train: int,
    num_processes: int,
    fits: Callable[[int, int], bool],
    agree: Callable[[int], int],
) -> list[dict[str, int]]:
    """Find the batch size of every stage.

    The last stage (or the first, `batch_size_stage`) takes the largest batch that fits. The others follow by Eq. 8, or
    take the largest that fits if that is smaller.

    Returns:
        A dict per stage: `stage`, `eq8` (the global size by Eq. 8) and `batch_size` (the one to train with).
    """
    if settings["batch_sizes"] is not None:
        raise UserError("schedule.batch_size=auto finds the sizes; leave schedule.batch_sizes out.")
    limits = [num_train, settings["max_batch_size"]]
    most = min(limit for limit in limits if limit is not None) // num_processes
    most = min(most, settings["max_batch_size_per_device"] or most)
    if most < SMALLEST:
        raise UserError(
            f"schedule.batch_size=auto needs room for {SMALLEST} images on each of {num_processes} devices, but "
            f"schedule.max_batch_size, max_batch_size_per_device and the {num_train} training images leave {most}."
        )

    def largest(stage: int, at_most: int) -> int:
        sizes = _sizes(at_most)
        number = len(sizes)
        if not fits(stage, at_most):
            number = bisect_left(sizes, True, hi=number - 1, key=lambda size: not fits(stage, size))
        size = agree(sizes[number - 1] if number else 0)
        if size == 0:
            raise UserError(
                f"not even {SMALLEST} images on each device fit into memory in stage {stage} of 0 to {num_stages - 1}; "
                "raise schedule.max_memory_gib_per_device, or choose a smaller network or smaller images."
            )
        return size

    reference = num_stages - 1 if settings["batch_size_stage"] == "last" else 0
    base = largest(reference, most)
    by_eq8 = stage_batch_sizes(
        num_stages,
        base * num_processes,
        settings["batch_growth_rate"],
        most * num_processes,
        num_processes,
        settings["batch_size_stage"],
    )
    sizes = [base if i == reference else largest(i, size // num_processes) for i, size in enumerate(by_eq8)]
    return [
        {"stage": i, "eq8": eq8, "batch_size": size * num_processes}
        for i, (eq8, size) in enumerate(zip(by_eq8, sizes, strict=True))
    ]


def _sizes(at_most: int) -> Sequence[int]:
    """Sizes to try, in steps of about 12 percent up to `at_most`."""
    sizes, size = [], SMALLEST
    while size < at_most:
        sizes.append(size)
        size += max(1, (1 << (size.bit_length() - 1)) // _PER_OCTAVE)
    return [*sizes, at_most]


@dataclass(frozen=True)
class TrialRun:
    """Everything that takes memory in a training step.

    Attributes:
        num_copies: additional copies of all weights, such as an average or gradient buckets.
        held_bytes: bytes of the data on the device.
        narrow: removes what a stage lacks from a copy of the network, and returns the copy's width graph.
        max_memory_gib: memory limit for training; None: nine tenths of a GPU's free memory.
    """

    network: nn.Module
    graph: WidthGraph
    make_optimizer: Callable[..., torch.optim.Optimizer]
    precision: Precision
    device: torch.device
    image_shape: Sequence[int]
    channels_last: bool = True
    num_copies: int = 0
    held_bytes: int = 0
    narrow: Callable[[nn.Module, int], WidthGraph] | None = None
    max_memory_gib: float | None = None


class TrialSteps:
    """Tries training steps, within a context that limits the GPU's memory.

    On CUDA a step either succeeds or runs out of memory. On other devices the bytes of live tensors are counted
    (`LiveTensors`). There a step that is too large by extrapolation from two smaller ones is not tried, since the
    system would kill the process.
    """

    def __init__(self, run: TrialRun, stages: Sequence[Mapping[str, int]]) -> None:
        self._run, self._stages = run, stages
        self._stage: int | None = None
        self._step: _Step | None = None
        limit_gib, cuda = run.max_memory_gib, run.device.type == "cuda"
        if limit_gib is None and not cuda:
            raise UserError(
                f"schedule.batch_size=auto cannot know how much memory a run on the {run.device.type} may take: set "
                "schedule.max_memory_gib_per_device, or leave schedule.batch_size out."
            )
        free = torch.cuda.mem_get_info(run.device)[0] * _FREE_PART if cuda else 0.0
        self.limit_bytes = round(free if limit_gib is None else limit_gib * _GIB)

    def __enter__(self) -> "TrialSteps":
        self._context = contextlib.ExitStack()
        device, cuda = self._run.device, self._run.device.type == "cuda"
        self._context.enter_context(torch.random.fork_rng(devices=[device] if cuda else []))
        if cuda:
            self._context.enter_context(_limited(device, self.limit_bytes))
        return self

    def __exit__(self, *error: Any) -> None:
        self._forget()
        self._context.close()

    def fits(self, stage: int, size: int) -> bool:
        """Return True if this process's training step with `size` images fits at a stage's widths."""
        if stage != self._stage:
            self._forget()
            self._stage = stage
        try:
            if self._step is None:
                self._step = _Step(self._run, stage, self._stages[stage])
            return self._step.fits(max(size, SMALLEST), self.limit_bytes)
        except RuntimeError as error:
            if not (isinstance(error, torch.OutOfMemoryError) or is_oom_error(error)):
                raise
        # After the handler, since the traceback keeps the step's tensors alive.
        self._forget()
        return False

    def _forget(self) -> None:
        self._step = None
        garbage_collection_cuda()


class _Step:
    """A copy of the network at a stage's widths, with its optimizer and everything else that takes memory."""

    def __init__(self, run: TrialRun, stage: int, widths: Mapping[str, int]) -> None:
        network = copy.deepcopy(run.network)
        graph = run.graph if run.narrow is None else run.narrow(network, stage)
        resize(network, graph, run.graph.full_widths, widths)
        self._run = run
        self._network = run.precision.convert_module(network).to(run.device).train()
        self._optimizer = run.make_optimizer(self._network.parameters())
        tensors = [*self._network.parameters(), *self._network.buffers()]
        extra_bytes = run.held_bytes + run.num_copies * sum(tensor.nbytes for tensor in tensors)
        self._extra = torch.empty(extra_bytes, dtype=torch.uint8, device=run.device)
        self._live = LiveTensors([*tensors, self._extra])
        # Peak bytes of the steps so far, by number of images.
        self._peaks: dict[int, int] = {}

    def fits(self, size: int, limit_bytes: int) -> bool:
        if self._run.device.type == "cuda":
            for images in (SMALLEST, size):
                self._take(images)
            torch.cuda.synchronize(self._run.device)
            return True
        for images in (SMALLEST, min(4 * SMALLEST, size), size):
            if images in self._peaks:
                continue
            if len(self._peaks) > 1:
                # Extrapolate from the two largest steps.
                (low, low_bytes), (high, high_bytes) = sorted(self._peaks.items())[-2:]
                if high_bytes + (high_bytes - low_bytes) / (high - low) * (images - high) > limit_bytes:
                    return False
            with self._live:
                if not self._peaks:
                    # The first step creates the optimizer's state.
                    self._take(SMALLEST)
                self._live.peak = self._live.bytes
                self._take(images)
            self._peaks[images] = self._live.peak
        return self._peaks[size] <= limit_bytes

    def _take(self, size: int) -> None:
        run = self._run
        layout = torch.channels_last if run.channels_last else torch.contiguous_format
        x = torch.randn(size, *run.image_shape, device=run.device).to(memory_format=layout)
        with run.precision.forward_context():
            logits = self._network(run.precision.convert_input(x))
            # The number of classes may grow with the stages.
            loss = F.cross_entropy(logits, torch.randint(logits.shape[1], (size,), device=run.device))
        # As in Lightning, the last step's gradients are still in memory with this one's activations.
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()


@contextlib.contextmanager
def _limited(device: torch.device, limit_bytes: int) -> Iterator[None]:
    """Let torch's allocator run out of memory at a limit."""
    before = torch.cuda.get_per_process_memory_fraction(device)
    total = torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of live tensors, deterministically and on any device.

    While active, it counts the outputs of operations, including the backward pass's, until they are freed. Temporary
    memory within an operation is not counted.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._alive: dict[int, weakref.ref[Any]] = {}
        for tensor in tensors:
            self._count(tensor)

    def _count(self, tensor: Tensor) -> None:
        # Views share a storage, and torch keeps one Python object for it as long as it lives.
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._alive:
            return

        def forget(_: Any) -> None:
            del self._alive[key]
            self.bytes -= size

        self._alive[key] = weakref.ref(storage, forget)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_iter(out):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return out

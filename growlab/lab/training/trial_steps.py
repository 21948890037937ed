"""Training steps for trial: does a batch fit into a device's memory at a stage's widths?"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.memory import garbage_collection_cuda, is_oom_error
from torch import nn
from torch.nn import functional as F

from growlab.base.errors import UserError
from growlab.lab.training.memory import LiveTensors
from growlab.widths import WidthGraph, resize

_GIB = 2**30
# Of what is free on a GPU: the rest is for fragments, kernels' workspace, growth events and validation.
_FREE_PART = 0.9
# Images of the first step, that of every trial: batch normalisation needs two.
SMALLEST = 2


@dataclass(frozen=True)
class TrialRun:
    """What a training step of a run consists of, as far as memory goes.

    Attributes:
        network: at full width, on the CPU; copied.
        graph: its width graph.
        make_optimizer: makes the optimizer from the parameters.
        precision: Lightning's plugin for the run's precision.
        device: where the run trains.
        image_shape: (C, H, W).
        channels_last: memory layout of batches.
        num_copies: of all weights that a run holds beside the network: an average, buckets of gradients.
        held_bytes: what else the run holds on the device: its images.
        narrow: takes out of a copy what a stage, by its number, does not have, and gives its width graph.
        max_memory_gib: that training may take; None: nine tenths of what is free on a GPU.
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
    """Tries training steps; used as a context, within which a GPU's memory is limited.

    On CUDA a step either runs or runs out of memory. Elsewhere the bytes of live tensors are counted
    (`LiveTensors`), and what two smaller steps let expect is not even tried if it is too much: a process that took
    more than there is would be killed.

    Args:
        run: what a step consists of.
        stages: width of each group at each stage.

    Raises:
        UserError: no limit is given where none is known, or it is not positive.
    """

    def __init__(self, run: TrialRun, stages: Sequence[Mapping[str, int]]) -> None:
        self._run, self._stages = run, stages
        self._stage: int | None = None
        self._step: _Step | None = None
        given = run.max_memory_gib
        if given is not None and not given > 0:
            raise UserError(f"schedule.max_memory_gib_per_device={given} must be positive.")
        if run.device.type == "cuda":
            free = torch.cuda.mem_get_info(run.device)[0] * _FREE_PART
        elif given is None:
            raise UserError(
                f"schedule.batch_size=auto cannot know how much memory a run on the {run.device.type} may take: set "
                "schedule.max_memory_gib_per_device, or leave schedule.batch_size out."
            )
        self.limit_bytes = round(given * _GIB) if given is not None else round(free)

    def __enter__(self) -> "TrialSteps":
        self._context = contextlib.ExitStack()
        device = self._run.device
        cuda = device.type == "cuda"
        self._context.enter_context(torch.random.fork_rng(devices=[device] if cuda else []))
        if cuda:
            self._context.enter_context(_limited(device, self.limit_bytes))
        return self

    def __exit__(self, *error: Any) -> None:
        self._forget()
        self._context.close()

    def fits(self, stage: int, size: int) -> bool:
        """Whether a step of this process with so many images fits at a stage's widths."""
        if stage != self._stage:
            self._forget()
            self._stage = stage
        try:
            if self._step is None:
                self._step = _Step(self._run, stage, self._stages[stage])
            return self._step.fits(size, self.limit_bytes)
        except RuntimeError as error:
            if not (isinstance(error, torch.OutOfMemoryError) or is_oom_error(error)):
                raise
        # Here, where no traceback holds on to what the step had made.
        self._forget()
        return False

    def _forget(self) -> None:
        self._step = None
        garbage_collection_cuda()


class _Step:
    """A copy of the network at some widths, with its optimizer and all that is held beside it."""

    def __init__(self, run: TrialRun, stage: int, widths: Mapping[str, int]) -> None:
        network = copy.deepcopy(run.network)
        graph = run.graph if run.narrow is None else run.narrow(network, stage)
        resize(network, graph, run.graph.full_widths, widths)
        self._run = run
        self._network = run.precision.convert_module(network).to(run.device).train()
        self._optimizer = run.make_optimizer(self._network.parameters())
        tensors = [*self._network.parameters(), *self._network.buffers()]
        beside = run.held_bytes + run.num_copies * sum(tensor.nbytes for tensor in tensors)
        self._beside = torch.empty(beside, dtype=torch.uint8, device=run.device)
        self._live = LiveTensors([*tensors, self._beside])
        #: Bytes at most, by the number of images.
        self._known: dict[int, int] = {}

    def fits(self, size: int, limit_bytes: int) -> bool:
        size = max(size, SMALLEST)
        if self._run.device.type == "cuda":
            for images in (SMALLEST, size):
                self._take(images)
            torch.cuda.synchronize(self._run.device)
            return True
        for images in (SMALLEST, min(4 * SMALLEST, size), size):
            if images not in self._known:
                if self._expected(images) > limit_bytes:
                    return False
                self._known[images] = self._count(images)
        return self._known[size] <= limit_bytes

    def _expected(self, size: int) -> float:
        """Bytes along the line through the two largest steps so far; 0 before there are two."""
        if len(self._known) < 2:
            return 0.0
        (low, less), (high, more) = sorted(self._known.items())[-2:]
        return more + (more - less) / (high - low) * (size - high)

    def _count(self, size: int) -> int:
        with self._live:
            if not self._known:
                # The first step makes the optimizer's state, which all others begin with.
                self._take(SMALLEST)
            self._live.peak = self._live.bytes
            self._take(size)
        return self._live.peak

    def _take(self, size: int) -> None:
        run = self._run
        layout = torch.channels_last if run.channels_last else torch.contiguous_format
        x = torch.randn(size, *run.image_shape, device=run.device).to(memory_format=layout)
        with run.precision.forward_context():
            logits = self._network(run.precision.convert_input(x))
            # As many classes as the network has at this stage.
            loss = F.cross_entropy(logits, torch.randint(logits.shape[1], (size,), device=run.device))
        # In Lightning's order: the last step's gradients lie beside this one's activations.
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

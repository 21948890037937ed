"""Training batches as CUDA graphs, captured again after each growth event."""

from functools import partial
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn

from growlab.base.errors import UserError
from growlab.lab.training.task import Task


class CudaGraphs(Callback):
    """Replays the network's forward and backward on training batches as CUDA graphs.

    The steps of a small network then take the time that the GPU needs, and not the time that Python needs to start
    its kernels. A graph is captured (`torch.cuda.make_graphed_callables`) for each shape of the batches and again
    after each growth event; while norms are annealed, steps run without. Nothing else in the forward may change from
    step to step but random numbers and the statistics of batch normalisation.

    Raises:
        UserError: training is not on one CUDA device.
    """

    def __init__(self) -> None:
        self._graphs: dict[tuple[Any, ...], tuple[nn.Module, list[Any]]] = {}
        self._events = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over the module's forward."""
        if not _on_one_device(trainer):
            raise UserError("callbacks=cuda_graphs needs training on one CUDA device: trainer=gpu.")
        assert isinstance(pl_module, Task)
        self._graphs = {}
        pl_module.forward = partial(self._forward, pl_module)  # type: ignore[method-assign]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give it back."""
        vars(pl_module).pop("forward", None)
        self._graphs = {}

    def _forward(self, task: Task, *inputs: Tensor) -> Tensor:
        if not (task.network.training and torch.is_grad_enabled()) or task.grower.state.norm_weights:
            return task.network(*inputs)
        if self._events != len(task.grower.events):
            self._graphs, self._events = {}, len(task.grower.events)
        key = tuple((x.shape, x.dtype) for x in inputs)
        resizers = [part.resizer for part in task.grower.parts if hasattr(part, "resizer")]
        if key not in self._graphs:
            called = _captured(task.network, inputs)
            self._graphs[key] = called, [resizer.cut for resizer in resizers]
        called, cuts = self._graphs[key]
        # A replay runs no hooks of Python: targets are resized as at the capture.
        for resizer, cut in zip(resizers, cuts, strict=True):
            resizer.cut = cut
        return called(*inputs)


def _on_one_device(trainer: Trainer) -> bool:
    return trainer.strategy.root_device.type == "cuda" and trainer.world_size == 1


class _Called(nn.Module):
    """Calls a network, whose own hooks then are part of a capture."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.network(*inputs)


def _captured(network: nn.Module, inputs: tuple[Tensor, ...]) -> nn.Module:
    """Capture a network in training mode; the trial passes leave its buffers as they were."""
    before = [(buffer, buffer.clone()) for buffer in network.buffers()]
    mixed, precision = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    called = _Called(network)
    with torch.autocast("cuda", precision, enabled=mixed, cache_enabled=False):
        examples = tuple(x.clone() for x in inputs)
        torch.cuda.make_graphed_callables(called, examples, allow_unused_input=True)
    with torch.no_grad():
        for buffer, value in before:
            buffer.copy_(value)
    return called

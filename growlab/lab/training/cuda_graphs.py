"""Train with CUDA graphs, captured again after each growth event."""

from functools import partial
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn

from growlab.base.errors import UserError
from growlab.lab.training.task import Task


class CudaGraphs(Callback):
    """Replays the network's forward and backward on training batches as CUDA graphs.

    Steps of a small network are then no longer limited by the time that Python needs to launch kernels. A graph is
    captured (`torch.cuda.make_graphed_callables`) for each batch shape, and again after each growth event; steps run
    without graphs while norms are annealed. Only random numbers and the statistics of batch normalisation may change
    between steps of the forward.

    Raises:
        UserError: training is not on one CUDA device.
    """

    def __init__(self) -> None:
        self._graphs: dict[tuple[Any, ...], tuple[nn.Module, list[Any]]] = {}
        self._events = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Override the module's forward."""
        if not _on_one_device(trainer):
            raise UserError("callbacks=cuda_graphs needs training on one CUDA device: trainer=gpu.")
        assert isinstance(pl_module, Task)
        self._graphs = {}
        pl_module.forward = partial(self._forward, pl_module)  # type: ignore[method-assign]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the module's forward."""
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
            self._graphs[key] = _captured(task.network, inputs), [resizer.cut for resizer in resizers]
        caller, cuts = self._graphs[key]
        # A replay runs no Python hooks, so targets are resized as at the capture.
        for resizer, cut in zip(resizers, cuts, strict=True):
            resizer.cut = cut
        return caller(*inputs)


def _on_one_device(trainer: Trainer) -> bool:
    return trainer.strategy.root_device.type == "cuda" and trainer.world_size == 1


class _Caller(nn.Module):
    """Calls a network, so that the network's own hooks are captured too."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.network(*inputs)


def _captured(network: nn.Module, inputs: tuple[Tensor, ...]) -> nn.Module:
    """Capture a network in training mode; its buffers are restored after the warm-up passes."""
    before = [(buffer, buffer.clone()) for buffer in network.buffers()]
    mixed, precision = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    caller = _Caller(network)
    with torch.autocast("cuda", precision, enabled=mixed, cache_enabled=False):
        examples = tuple(x.clone() for x in inputs)
        torch.cuda.make_graphed_callables(caller, examples, allow_unused_input=True)
    with torch.no_grad():
        for buffer, value in before:
            buffer.copy_(value)
    return caller

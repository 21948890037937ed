"""Distributed training: environment, strategy, synchronised batch normalisation, comparison of ranks."""

import os
from itertools import chain
from typing import Any

import torch
from lightning import Callback, Trainer
from lightning.pytorch.plugins import TorchSyncBatchNorm
from lightning.pytorch.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.nn.modules.batchnorm import _BatchNorm

from growlab.base.errors import UserError
from growlab.base.ranks import broadcast_buffers, compare
from growlab.frontends.lightning import starts_by_copies
from growlab.lab.training.task import Task

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class OneProcess(LightningEnvironment):
    """Environment of a single process.

    Lightning's environment would start further processes by running the command line again, and would leave
    environment variables behind that mislead the next job of a sweep.
    """

    # As `growlab.lab.training.launcher` does.
    creates_processes_externally = True


def cluster_environment(started_by_growlab: bool) -> list[ClusterEnvironment]:
    """Return the trainer plugin that provides this process's rank; empty if Lightning can detect it."""
    if started_by_growlab:
        return [TorchElasticEnvironment() if TorchElasticEnvironment.detect() else OneProcess()]
    if "SLURM_PROCID" in os.environ and "GROUP_RANK" not in os.environ:
        # By default Lightning would save and requeue at a signal.
        return [SLURMEnvironment(auto_requeue=False)]
    return []


def check_strategy(trainer: Trainer) -> None:
    """Reject strategies that growth does not support."""
    strategy = trainer.strategy
    if isinstance(strategy, SingleDeviceStrategy):
        return
    # Not isinstance: DeepSpeed's strategy inherits from DDPStrategy.
    if type(strategy) is not DDPStrategy:
        raise UserError(
            f"growlab cannot train with {type(strategy).__name__}: growing needs every parameter whole on each "
            "device; use trainer=ddp."
        )
    if starts_by_copies(strategy):
        raise UserError("growlab starts the processes of DDP itself; use trainer=ddp, not another strategy.")


class CPUSyncBatchNorm(_BatchNorm):
    """`torch.nn.SyncBatchNorm` for CPUs, which torch's own does not support."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, not {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise [N, C, ...] by the mean and variance over the images of all ranks."""
        if not self.training or not torch.distributed.is_initialized():
            return super().forward(input)
        self._check_input_dim(input)
        # Statistics in float32 under autocast, as in torch.
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        dims = [d for d in range(x.dim()) if d != 1]
        count = x.new_tensor([x.numel() / x.shape[1]])
        totals = _SumOverRanks.apply(torch.cat([count, x.sum(dims)]))
        count, mean_C = totals[0], totals[1:] / totals[0]
        shape = [1, -1] + [1] * (x.dim() - 2)
        centred = x - mean_C.view(shape)
        # In two passes, to avoid the cancellation in E[x^2] - E[x]^2.
        var_C = _SumOverRanks.apply(centred.square().sum(dims)) / count
        if self.num_batches_tracked is not None and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
                self.running_mean.lerp_(mean_C.to(self.running_mean), momentum)
                self.running_var.lerp_((var_C * count / (count - 1)).to(self.running_var), momentum)
        normed = centred * (var_C + self.eps).rsqrt().view(shape)
        if self.affine:
            normed = normed * self.weight.view(shape)
            normed = normed if self.bias is None else normed + self.bias.view(shape)
        return normed.to(input.dtype)


class _SumOverRanks(torch.autograd.Function):
    """Differentiable sum over ranks: the backward pass sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.detach().clone()
        torch.distributed.all_reduce(total, ReduceOp.SUM)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        # The sum is its own adjoint. Growth methods differentiate twice, so this must be differentiable too.
        return _SumOverRanks.apply(grad)


class SynchroniseBatchNorm(TorchSyncBatchNorm):
    """Synchronise batch normalisation over all ranks while training (`trainer.sync_batchnorm=true`).

    Lightning's version replaces modules and cannot restore them. Here modules change their class temporarily, so that
    the trained network has its original modules.
    """

    def __init__(self, on_cpu: bool) -> None:
        self._class = CPUSyncBatchNorm if on_cpu else nn.SyncBatchNorm
        self._classes: dict[nn.Module, type[nn.Module]] = {}

    def apply(self, model: nn.Module) -> nn.Module:
        """Synchronise every batch normalisation, in place."""
        averages = model.grower.copies().values() if isinstance(model, Task) else ()
        for name, module in chain(*(network.named_modules() for network in (model, *averages))):
            if type(module) in BATCH_NORMS:
                self._classes[module] = type(module)
                module.__class__ = self._class
                module.process_group = None
            elif isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
                raise UserError(
                    f"trainer.sync_batchnorm=true cannot synchronise {name}, a {type(module).__name__}: it works for "
                    "torch's own BatchNorm layers; leave it out."
                )
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        """Restore every module's class."""
        for module, kind in self._classes.items():
            module.__class__ = kind
            del module.process_group
        self._classes.clear()
        return model


class RankCheck(Callback):
    """Stops a run whose ranks have diverged.

    Ranks are compared when training begins, after every growth event (by the grower), at the end of the epoch that
    follows it, and at the end of training. They exchange one hash each, and checksums per tensor only if it differs.
    """

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled

    def on_train_start(self, trainer: Trainer, pl_module: Task) -> None:
        """Compare ranks at the start."""
        self._compare(trainer, pl_module, "at the start")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Task) -> None:
        """Synchronise running statistics; compare ranks after the first epoch of a stage and the last epoch."""
        if trainer.world_size == 1:
            return
        for network in (pl_module.network, *pl_module.grower.copies().values()):
            broadcast_buffers(network)
        epoch, schedule = trainer.current_epoch, pl_module.schedule
        if epoch in schedule.starts or epoch == schedule.total_epochs - 1:
            self._compare(trainer, pl_module, f"at the end of epoch {epoch}")

    def _compare(self, trainer: Trainer, task: Task, when: str) -> None:
        if self._enabled and trainer.world_size > 1:
            when = f"{when} (stage {task.grower.state.stage})"
            compare(task.grower.state_to_compare(), when, ", or set check_ranks=false to continue")

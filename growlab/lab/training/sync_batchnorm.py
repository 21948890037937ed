"""Batch normalisation over the images of all ranks, on CPUs too, that leaves the network's own classes behind."""

from itertools import chain
from typing import Any

import torch
from lightning.pytorch.plugins import TorchSyncBatchNorm
from torch import Tensor, nn
from torch.distributed import ReduceOp

from growlab.base.errors import UserError
from growlab.lab.training.task import Task

_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class CPUSyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """What `torch.nn.SyncBatchNorm` is on GPUs, on the CPU."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, not {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise [N, C, ...] by the mean and variance over the images of all ranks."""
        if not self.training or not torch.distributed.is_initialized():
            return super().forward(input)
        self._check_input_dim(input)
        # As torch does: statistics in the precision of the weights, whatever autocast made of the input.
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        dims = [d for d in range(x.dim()) if d != 1]
        count = x.new_tensor([x.numel() / x.shape[1]])
        totals = _SumOverRanks.apply(torch.cat([count, x.sum(dims)]))
        count, mean_C = totals[0], totals[1:] / totals[0]
        shape = [1, -1] + [1] * (x.dim() - 2)
        centred = x - mean_C.view(shape)
        # In two passes: the mean of squares less the squared mean would cancel.
        var_C = _SumOverRanks.apply(centred.square().sum(dims)) / count
        if self.track_running_stats:
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                momentum = self.momentum or 1.0 / float(self.num_batches_tracked)
                self.running_mean.lerp_(mean_C.to(self.running_mean), momentum)
                self.running_var.lerp_((var_C * count / (count - 1)).to(self.running_var), momentum)
        normed = centred * (var_C + self.eps).rsqrt().view(shape)
        if self.affine:
            normed = normed * self.weight.view(shape)
            normed = normed if self.bias is None else normed + self.bias.view(shape)
        return normed.to(input.dtype)


class _SumOverRanks(torch.autograd.Function):
    """Sum of all ranks' tensors; every rank's gradient reaches every rank's input, second derivatives included."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.detach().clone()
        torch.distributed.all_reduce(total, ReduceOp.SUM)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        # Its own adjoint; the function itself, since growth methods differentiate this once more.
        return _SumOverRanks.apply(grad)


class SynchroniseBatchNorm(TorchSyncBatchNorm):
    """What `trainer.sync_batchnorm=true` does: batch normalisation over all ranks while training.

    Lightning's own replaces modules by others and cannot say afterwards what they were. Here modules stay and
    change their class, so that the trained network is of its original classes again.

    Args:
        on_cpu: whether the network trains on the CPU.
    """

    def __init__(self, on_cpu: bool) -> None:
        self._class = CPUSyncBatchNorm if on_cpu else nn.SyncBatchNorm
        self._classes: dict[nn.Module, type[nn.Module]] = {}

    def apply(self, model: nn.Module) -> nn.Module:
        """Turn every batch normalisation into a synchronised one, in place.

        Raises:
            UserError: one is of a class of its own, whose forward would be lost.
        """
        averages = model.grower.copies().values() if isinstance(model, Task) else ()
        for name, module in chain(*(network.named_modules() for network in (model, *averages))):
            if type(module) in _PLAIN:
                self._classes[module] = type(module)
                module.__class__ = self._class
                module.process_group = None
            elif isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(
                module, nn.SyncBatchNorm
            ):
                raise UserError(
                    f"trainer.sync_batchnorm=true cannot synchronise {name}, a {type(module).__name__}: it works for "
                    "torch's own BatchNorm layers; leave it out."
                )
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        """Give every module its class back."""
        for module, kind in self._classes.items():
            module.__class__ = kind
            del module.process_group
        self._classes.clear()
        return model

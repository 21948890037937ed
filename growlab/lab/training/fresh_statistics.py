"""Recompute the statistics of batch normalisation for held-out evaluation (PreciseBN).

Running averages lag behind fast-changing weights: a momentum of 0.1 averages about ten steps, within which a high
learning rate, or the steps after a growth event, change the layers' outputs. Training is unaffected, since it
normalises by its batches, but the held-out loss may be ten times as high as with up-to-date statistics. They are
therefore recomputed before each evaluation: means over some training batches, each normalised as in training (Wu &
Johnson, "Rethinking 'Batch' in BatchNorm", 2021, arXiv 2105.07576, Section 3). Training keeps its running averages,
so its bits do not change.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from lightning import Callback, Trainer
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.instancenorm import _InstanceNorm

from growlab.base.ranks import averaged
from growlab.lab.training.task import Task

_STATISTICS = ("running_mean", "running_var")


@torch.no_grad()
def fresh_statistics(network: nn.Module, batches: Sequence[tuple[Tensor, ...]]) -> dict[str, Tensor]:
    """Means of the statistics over batches and ranks, by the name of their running buffer.

    A norm's batches are those that it sees. Left out are norms that evaluation does not call, as in auxiliary heads,
    those whose statistics do not follow the batches (a momentum of 0, or no such attribute), and InstanceNorm.
    """
    norms = {
        name: module
        for name, module in network.named_modules()
        if all(isinstance(getattr(module, kind, None), Tensor) for kind in _STATISTICS)
        and getattr(module, "momentum", 0) != 0
        and not isinstance(module, _InstanceNorm)
    }
    buffers = dict(network.named_buffers())
    keys = {name: [f"{name}.{kind}".lstrip(".") for kind in _STATISTICS] for name in norms}
    totals = {key: torch.zeros_like(buffers[key], dtype=_precise(buffers[key])) for name in norms for key in keys[name]}
    seen = Counter[str]()
    modes = {module: module.training for module in network.modules()}
    network.eval()
    for module in norms.values():
        module.training = True
    try:
        for inputs in batches if norms else ():
            # From zero, so that a batch leaves its own statistics times its weight in the running average.
            empty = {name: torch.zeros_like(b) for name, b in buffers.items() if name.rpartition(".")[0] in norms}
            functional_call(network, empty, inputs)
            for name, norm in norms.items():
                weight = _weight(norm, empty.get(f"{name}.num_batches_tracked".lstrip(".")))
                for key in keys[name] if weight else ():
                    totals[key] += empty[key].to(_precise(empty[key])) / (weight * len(batches))
                    seen[key] += 1
    finally:
        for module, training in modes.items():
            module.training = training
    if not totals:
        return {}
    # All ranks average all norms, since a norm may see batches on some ranks only.
    shares = [seen[key] / max(1, len(batches)) for key in totals]
    shares = averaged(next(iter(totals.values())).new_tensor(shares)).tolist()
    means = [averaged(total) for total in totals.values()]
    return {
        key: (mean / share).to(buffers[key].dtype)
        for key, mean, share in zip(totals, means, shares, strict=True)
        if share
    }


def _precise(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _weight(norm: Any, tracked: Tensor | None) -> float:
    """Weight of a batch's statistics in a running average that began at 0, after `tracked` calls."""
    calls = 1 if tracked is None else int(tracked)
    return float(calls > 0) if norm.momentum is None else 1 - (1 - norm.momentum) ** calls


class FreshStatistics(Callback):
    """Evaluates on held-out data with fresh statistics, and stores them in the trained network.

    Between the batches of an evaluation the network has its running averages, so that checkpoints contain these.
    Batches are a function of seed and epoch, so a resumed run computes the same statistics.
    """

    def __init__(self, images: int, batches: Callable[[int, int, bool], Sequence[tuple[Tensor, ...]]] | None) -> None:
        self._images, self._batches = images, batches
        # Statistics of the network and its averages, and the epoch that they were computed in.
        self._fresh: list[tuple[nn.Module, dict[str, Tensor]]] = []
        self._epoch: int | None = None
        self._saved: list[dict[str, Tensor]] = []

    def on_validation_start(self, trainer: Trainer, pl_module: Task) -> None:
        """Compute the statistics at the epoch's end for the evaluation."""
        self._update(trainer, pl_module, trainer.current_epoch)
        pl_module.evaluating = self._in_place

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Task) -> None:
        """Compute the statistics of a last epoch without evaluation, before it is saved."""
        if trainer.current_epoch + 1 == trainer.max_epochs and self._epoch != trainer.current_epoch:
            self._update(trainer, pl_module, trainer.current_epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the last statistics, so that a run resumed after its last epoch finishes with the same."""
        return {"epoch": self._epoch, "fresh": [tensors for _, tensors in self._fresh]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the statistics of the checkpoint."""
        self._epoch, self._saved = state_dict["epoch"], state_dict["fresh"]

    def finish(self, task: Task) -> None:
        """Store the statistics of the last evaluation in the trained network and its averages."""
        statistics = [tensors for _, tensors in self._fresh] or self._saved
        with torch.no_grad():
            for network, fresh in zip(self._networks(task), statistics, strict=False):
                for name, tensor in fresh.items():
                    network.get_buffer(name).copy_(tensor)

    @staticmethod
    def _networks(task: Task) -> list[nn.Module]:
        return [task.network, *task.grower.copies().values()]

    def _update(self, trainer: Trainer, task: Task, epoch: int) -> None:
        self._fresh, self._epoch = [], epoch
        if not self._images or self._batches is None:
            return
        size = task.schedule.batch_size_at(epoch)
        batches = self._batches(-(-self._images // size), epoch, True)
        # An epoch's last batch may be too small for statistics.
        batches = [batch for batch in batches if len(batch[0]) == len(batches[0][0])]
        convert = trainer.precision_plugin.convert_input
        inputs = [tuple(convert(x.to(task.device)) for x in batch[:-1]) for batch in batches]
        with trainer.precision_plugin.forward_context():
            self._fresh = [(network, fresh_statistics(network, inputs)) for network in self._networks(task)]

    @contextlib.contextmanager
    def _in_place(self) -> Iterator[None]:
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for network, tensors in self._fresh:
            for name, tensor in tensors.items():
                module, _, attribute = name.rpartition(".")
                owner = network.get_submodule(module)
                tensors[name] = getattr(owner, attribute)
                setattr(owner, attribute, tensor)

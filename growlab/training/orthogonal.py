"""Dynamic orthogonalised SGD in a run (Yuan et al. 2023, App. H): a pass over the old data before each growth event."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

import torch
from lightning import Callback, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from growlab.analysis.flops import forward_flops
from growlab.data import ImageData
from growlab.growth.parity import buffers_kept
from growlab.optim import Orthogonalised
from growlab.ranks import sum_over_ranks
from growlab.training.objective import network_inputs
from growlab.training.task import Task
from growlab.widths import WidthGraph

Batch = tuple[Tensor, ...]


def mean_gradients(
    task: Task, batches: Iterable[Batch], pass_number: int = 0
) -> tuple[dict[str, Tensor], int]:
    """The gradient of the mean loss over batches, in train mode and the parameters' own precision.

    Statistics of normalisation are left as they were, and no optimizer steps.

    Args:
        task: with the network as it is before it grows.
        batches: this rank's part of them.
        pass_number: what dropout draws is a function of it, of the batch's number and the rank.

    Returns:
        By parameter name, and the number of images over all ranks.
    """
    parameters = {name: p for name, p in task.network.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
    # Not whole where classes have weights.
    count = torch.zeros(
        (), dtype=torch.float32 if task.device.type == "mps" else torch.float64, device=task.device
    )
    images = torch.zeros((), dtype=torch.long, device=task.device)
    modes = {module: module.training for module in task.network.modules()}
    task.network.train()
    try:
        with torch.enable_grad(), torch.compiler.set_stance("force_eager"), buffers_kept(task.network):
            for index, batch in enumerate(batches):
                task.seed_step(-1 - pass_number, index)
                *inputs, target = network_inputs(batch, task.network)
                loss, seen = task.objective(task(*inputs), task.positions(target))
                found = torch.autograd.grad(loss * seen[-1], list(parameters.values()), allow_unused=True)
                for total, gradient in zip(sums.values(), found, strict=True):
                    if gradient is not None:
                        total += gradient
                count += seen[-1]
                images += len(target)
    finally:
        for module, training in modes.items():
            module.training = training
    count = sum_over_ranks(count)
    gradients = {name: sum_over_ranks(total) / count for name, total in sums.items()}
    return gradients, int(sum_over_ranks(images))


class OldGradient(Callback):
    """Dynamic orthogonalised SGD in a run: when it looks back, and how much it then takes out of gradients.

    Before each growth event the gradient on the data of the stage that ends is taken anew; `look_back` and `follow`
    are called by the growth callback.

    Args:
        network: the run's network.
        anneal: "stage": the strength falls evenly from 1 at the first step after an event to 0 at the last one before
            the next; "run": from 1 after the first event to 0 at the end of the run.
        steps: optimizer steps of each epoch.
    """

    def __init__(self, network: nn.Module, anneal: Literal["stage", "run"], steps: Sequence[int]) -> None:
        self._orthogonalised = Orthogonalised(network)
        self._anneal = anneal
        self._ends = list(accumulate(steps))

    def state_dict(self) -> dict[str, Any]:
        """The gradient that is remembered."""
        return self._orthogonalised.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._orthogonalised.load_state_dict(state_dict)

    def look_back(self, trainer: Trainer, task: Task, probe: tuple[Any, ...]) -> dict[str, int]:
        """Remember the gradient on the data of the stage that ends.

        Args:
            trainer: with growlab's data module, at the epoch that the new stage begins with.
            task: before the network grows.
            probe: inputs [B, ...].

        Returns:
            What the pass took, for the receipt: forward FLOPs, to which a backward pass comes as in training, and
            images.
        """
        data: ImageData = trainer.datamodule  # type: ignore[attr-defined]
        stage = task.growth_state.stage + 1
        # An order and augmentation that no epoch of training has.
        batches = data.training_images(max(0, trainer.current_epoch - 1), task.schedule.total_epochs + stage)
        gradients, images = mean_gradients(task, batches, stage)
        self._orthogonalised.remember(gradients)
        one = tuple(value[:1] if isinstance(value, Tensor) else value for value in probe)
        return {"auxiliary_flops": forward_flops(task.network, one) * images, "auxiliary_samples": images}

    def follow(self, graph: WidthGraph, before: Mapping[str, int], after: Mapping[str, int]) -> None:
        """Let it go through a growth event, from some widths to others."""
        self._orthogonalised.follow(graph, before, after)

    def strength(self, task: Task, step: int) -> float:
        """How much is taken out at a step, counted over the run: lambda of Eq. 21."""
        if not task.events:
            return 0.0
        begin, last = task.events[0]["step"], self._ends[-1] - 1
        if self._anneal == "stage":
            stage = task.growth_state.stage
            begin = task.events[-1]["step"]
            last = self._ends[task.schedule.starts[stage] + task.schedule.epochs[stage] - 1] - 1
        return 1.0 - (step - begin) / max(1, last - begin)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Task, optimizer: Optimizer) -> None:
        """Take out of the gradients what lies along the remembered one."""
        self._orthogonalised.project(self.strength(pl_module, trainer.global_step))

"""Record statistics of each layer during training (Chang et al. 2020, Figure 1)."""

from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningDataModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from growlab.base.errors import UserError
from growlab.base.files import write_text
from growlab.grower import Grower
from growlab.growth.outputs import device_and_precision
from growlab.lab.data import ImageData
from growlab.lab.training.task import Task

LAYER_COLUMNS = ("step", "layer", "quantity", "mean", "std", "low", "high", "counts")
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Test images that are looked at (Chang et al. 2020, Appendix B.1), and bins of a histogram.
_IMAGES, _BINS = 300, 60
# Ends of a histogram, in standard deviations from the mean.
_REACH = 4.0


def layer_statistics(
    every: int | None, data: LightningDataModule, grower: Grower, run_dir: Path
) -> list["LayerStatistics"]:
    """Make the callback of `log_layers_every_n_steps`, on the first images of the test set; None for null."""
    if every is None:
        return []
    if not isinstance(data, ImageData) or any(part.groups for part in grower.parts):
        raise UserError(
            "log_layers_every_n_steps needs all classes from the start, and images that are classified; set it to null."
        )
    batches: list[tuple[Tensor, ...]] = []
    for batch in data.test_dataloader():
        batches.append(batch)
        if sum(len(y) for _, y in batches) >= _IMAGES:
            break
    images, labels = (torch.cat(column)[:_IMAGES] for column in zip(*batches, strict=True))
    return [LayerStatistics(run_dir, images, labels, every)]


class LayerStatistics(Callback):
    """Keeps layers.csv: mean, deviation and histogram of each layer's numbers, over training steps.

    A histogram spans `low` to `high`: four deviations from the mean, or the extreme values if these are closer.

    Quantities are `activation`, a layer's output; `gradient`, the loss's gradient by it; `weight`, also a computed
    one; and `weight_gradient`. There are also rows of `loss` and `accuracy` on the same images.
    """

    def __init__(self, run_dir: Path, images: Tensor, labels: Tensor, every_n_steps: int) -> None:
        self.run_dir, self.every_n_steps = run_dir, every_n_steps
        self._images, self._labels = images, labels
        self._rows: list[str] = []
        self._last_step = -1

    def state_dict(self) -> dict[str, Any]:
        """Return everything recorded so far, in plain containers."""
        return {"rows": "\n".join(self._rows), "last_step": self._last_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the records of the checkpoint."""
        self._rows, self._last_step = state_dict["rows"].splitlines(), state_dict["last_step"]

    def on_train_batch_start(self, trainer: Trainer, pl_module: Task, batch: Any, batch_idx: int) -> None:
        """Measure before the step, if it is due."""
        step = trainer.global_step
        if step % self.every_n_steps == 0 and step != self._last_step and trainer.is_global_zero:
            self._measure(pl_module, step)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Task) -> None:
        """Write the file, after a final measurement in the run's last epoch."""
        if not trainer.is_global_zero:
            return
        if trainer.current_epoch + 1 == trainer.max_epochs and trainer.global_step != self._last_step:
            self._measure(pl_module, trainer.global_step)
        write_text(self.run_dir / "layers.csv", "\n".join([",".join(LAYER_COLUMNS), *self._rows]) + "\n")

    def _measure(self, task: Task, step: int) -> None:
        self._last_step = step
        layers = {name: one for name, one in task.network.named_modules() if isinstance(one, _LAYERS)}
        outputs: dict[str, Tensor] = {}

        def keep(name: str) -> Any:
            return lambda module, inputs, output: outputs.__setitem__(name, output)

        hooks = [module.register_forward_hook(keep(name)) for name, module in layers.items()]
        modes = {module: module.training for module in task.network.modules()}
        device, precision = device_and_precision(task.network)
        x, y = self._images.to(device, precision), self._labels.to(device)
        task.network.eval()
        try:
            # Every weight is computed once, so that the gradient is by the very tensor that the layer used.
            with torch.enable_grad(), torch.random.fork_rng(devices=[]), parametrize.cached():
                logits = task(x)
                loss = F.cross_entropy(logits, y)
                weights = {name: layers[name].weight for name in outputs}
                wanted = [*outputs.values(), *weights.values()]
                wanted = [tensor for tensor in wanted if tensor.requires_grad]
                found = torch.autograd.grad(loss, wanted, allow_unused=True)
                grads = dict(zip(map(id, wanted), found, strict=True))
        finally:
            for hook in hooks:
                hook.remove()
            for module, training in modes.items():
                module.training = training
        accuracy = (logits.argmax(1) == y).float().mean()
        for quantity, value in (("loss", loss), ("accuracy", accuracy)):
            self._rows.append(f"{step},network,{quantity},{float(value.detach()):.6g},,,,")
        for name, output in outputs.items():
            for tensor, kinds in ((output, ("activation", "gradient")), (weights[name], ("weight", "weight_gradient"))):
                for kind, values in zip(kinds, (tensor.detach(), grads.get(id(tensor))), strict=True):
                    if values is not None:
                        self._add(step, name, kind, values)

    def _add(self, step: int, name: str, quantity: str, tensor: Tensor) -> None:
        values = tensor.float().flatten()
        # Also with heavy tails the bins show the middle: values further out are not counted.
        mean, reach = float(values.mean()), _REACH * float(values.std())
        low, high = max(float(values.min()), mean - reach), min(float(values.max()), mean + reach)
        counts = torch.histc(values.cpu(), _BINS, low, high).long().tolist() if low < high else []
        numbers = ",".join(f"{number:.6g}" for number in (mean, float(values.std()), low, high))
        self._rows.append(f"{step},{name},{quantity},{numbers},{'|'.join(map(str, counts))}")

"""Lightning modules without growlab, their data, and comparable runs of Lightning's Trainer."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from growlab.frontends.lightning import Growth
from growlab.growth import GrowthMethod, VarianceTransfer

EPOCHS, STEPS, SIZE = 4, 3, 8
STAGES = {0: 0.5, 1: 0.75, 3: 1.0}
SOURCE = torch.Generator().manual_seed(5)
IMAGES, LABELS = torch.randn(48, 6, generator=SOURCE), torch.randint(3, (48,), generator=SOURCE)


class Loader:
    """Batches that are a function of the epoch and position; checkpoints store the position."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.epoch, self.at, self.rank, self.ranks = 0, 0, rank, ranks

    def __len__(self) -> int:
        return STEPS

    @property
    def sampler(self) -> "Loader":
        return self

    batch_sampler = None

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.at = epoch, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(IMAGES), generator=torch.Generator().manual_seed(self.epoch))
        self.at %= STEPS
        while self.at < STEPS:
            first = (self.at * self.ranks + self.rank) * SIZE % len(IMAGES)
            self.at += 1
            yield IMAGES[order[first : first + SIZE]], LABELS[order[first : first + SIZE]]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


def body() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    )


class Plain(L.LightningModule):
    """One network, a loss, and a learning rate that decreases by epochs."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = body()
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.make_optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = self.criterion(self.network(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.network.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]


class Validated(Plain):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.criterion(self.network(batch[0]), batch[1]), on_epoch=True)


def growth(network: str | None = None, **settings: Any) -> Growth:
    method: GrowthMethod = VarianceTransfer(noise_std=1e-3)
    return Growth(network, **{"method": method, "trigger": STAGES, "anneal_steps": 2, **settings})


class Save(L.Callback):
    """Save a checkpoint after every step and every epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.paths = folder, list[Path]()

    def save(self, trainer: L.Trainer, name: str) -> None:
        self.paths.append(self.folder / f"{name}.ckpt")
        trainer.save_checkpoint(self.paths[-1])

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.save(trainer, f"step{len(self.paths) - trainer.current_epoch}")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.save(trainer, f"epoch{trainer.current_epoch}")


def trainer_of(folder: Path, *callbacks: L.Callback, **settings: Any) -> L.Trainer:
    usual = {"enable_checkpointing": False, "accelerator": "cpu", "max_epochs": EPOCHS, "logger": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    return L.Trainer(default_root_dir=folder, callbacks=list(callbacks), **{**usual, **quiet, **settings})


def fitted(
    folder: Path,
    module: L.LightningModule,
    *callbacks: L.Callback,
    data: Any = None,
    ckpt_path: Any = None,
    **more: Any,
) -> L.Trainer:
    """Train a module, from a checkpoint if one is given, and return the trainer."""
    trainer = trainer_of(folder, *callbacks, **more)
    trainer.fit(module, Loader() if data is None else data, ckpt_path=ckpt_path)
    return trainer


def outcome(trainer: L.Trainer) -> list[Any]:
    """The final state of a run, comparable bit for bit."""
    (growth,) = (callback for callback in trainer.callbacks if isinstance(callback, Growth))
    optimizers = [optimizer.state_dict() for optimizer in trainer.optimizers]
    moments = [v for o in optimizers for entry in o["state"].values() for v in entry.values()]
    tensors = [*trainer.lightning_module.state_dict().values(), *(torch.as_tensor(moment) for moment in moments)]
    for part in growth.grower.parts:
        tensors += part.state_dict().values()
    events = [{n: v for n, v in event.as_dict().items() if not n.startswith("seconds")} for event in growth.events]
    return [*(t.tolist() for t in tensors), [o["param_groups"] for o in optimizers], events]

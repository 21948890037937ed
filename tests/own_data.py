"""A user's data and networks, without imports of growlab; tests copy this file to runs as `mine.py`."""

import os
import random
from typing import Any

import numpy as np
import torch
from lightning import LightningDataModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Normally distributed numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Waves(Dataset):
    """Sine of a projection, in float64; the transform draws from torch's, numpy's and Python's generators."""

    def __init__(self, num: int = 120) -> None:
        self.x, self.y = drawn(num, 6), torch.sin(drawn(num, 6) @ drawn(6, seed=1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[np.ndarray, float]:
        noise = torch.randn(6) + float(np.random.randn()) + random.random()
        return (self.x[index] + 0.05 * noise).double().numpy(), float(self.y[index])


class Net(nn.Sequential):
    """Multi-layer perceptron."""

    def __init__(self, in_features: int, out_features: int, norm: bool = False) -> None:
        layers = [nn.Linear(in_features, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU()]
        super().__init__(*layers, *([nn.BatchNorm1d(12)] if norm else []), nn.Linear(12, out_features))


class Discs(Dataset):
    """Images of a disc and masks with an ignored border, as mappings."""

    def __init__(self, num: int = 40) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> dict[str, Any]:
        y, x = torch.meshgrid(torch.arange(12), torch.arange(12), indexing="ij")
        mask = ((x - index % 12) ** 2 + (y - index % 7) ** 2 < 16).to(torch.uint8)
        image = (drawn(3, 12, 12, seed=index) * 20 + 100 * mask + 60).clamp(0, 255).to(torch.uint8)
        mask[0] = 255
        return {"name": f"disc {index}", "image": image, "mask": mask}


class Segmenter(nn.Module):
    """Segmentation network with outputs in a mapping, as in torchvision."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(in_channels, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.up = nn.ConvTranspose2d(8, 8, 2, 2)
        self.head = nn.Conv2d(8, num_classes, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Logits [B, classes, H, W]."""
        return {"out": self.head(torch.relu(self.up(self.down(x))))}


class Two(nn.Module):
    """Network with two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 8), nn.Linear(4, 8), nn.Linear(8, 5)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Logits [B, 5]."""
        return self.last(torch.relu(self.first(a) + self.second(b)))


def pairs(num: int = 60) -> TensorDataset:
    """Samples of two inputs and five labels."""
    return TensorDataset(drawn(num, 3), drawn(num, 4, seed=1), (drawn(num, 5, seed=2) > 0).int())


class Images(LightningDataModule):
    """Images in three classes, without a validation set; batches are augmented after their transfer."""

    def prepare_data(self) -> None:
        """Called once per machine."""
        self.prepared = True

    def setup(self, stage: str) -> None:
        """Make the samples."""
        assert self.prepared
        x = drawn(150, 3, 8, 8)
        self.data = TensorDataset(x, (x.mean((1, 2, 3)) > 0).long() + (x[:, 0, 0, 0] > 0.5))

    def train_dataloader(self) -> DataLoader:
        """Return batches of 15, which growlab replaces by its own."""
        return DataLoader(TensorDataset(*self.data[:110]), batch_size=15, shuffle=True)

    def test_dataloader(self) -> DataLoader:
        """Return the rest."""
        return DataLoader(TensorDataset(*self.data[110:]), batch_size=25)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Add noise while training."""
        training = self.trainer is not None and self.trainer.training
        return [batch[0] + 0.01 * torch.randn_like(batch[0]), batch[1]] if training else batch


def loaders() -> dict[str, Any]:
    """Loader with a sampler, a `collate_fn`, `drop_last` and workers, and plain data sets."""
    sampler = WeightedRandomSampler(torch.rand(120, generator=torch.Generator().manual_seed(0)), 65)
    # torch warns of more processes than cores.
    workers = min(2, len(os.sched_getaffinity(0)))
    train = DataLoader(Waves(), 10, sampler=sampler, drop_last=True, collate_fn=collate, num_workers=workers)
    return {"train": train, "validation": Waves(30), "test": Waves(33)}


def collate(samples: list[Any]) -> list[Tensor]:
    """Collate with a random scale of the inputs."""
    x, y = (torch.tensor(np.array(column), dtype=torch.float32) for column in zip(*samples, strict=True))
    return [x * (1 + 0.1 * torch.rand(())), y]


class Endless(IterableDataset):
    """Data set without a length."""

    def __iter__(self) -> Any:
        return iter([])


class Odd(Dataset):
    """Samples in forms that are not supported."""

    def __init__(self, kind: str, num: int = 30) -> None:
        self.kind, self.num = kind, num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Any:
        return {
            "alone": torch.zeros(3),
            "words": ("a word", 0),
            "unnamed": {"a": torch.zeros(3), "b": torch.zeros(1)},
            "objects": (object(), 0),
            "ragged": (torch.zeros(2 + index % 2), 0),
        }[self.kind]

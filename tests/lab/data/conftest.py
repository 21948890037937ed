import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> Path:
    """Use an empty cache folder, and ignore $GROWLAB_DATA."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("GROWLAB_DATA", raising=False)
    return tmp_path / "cache" / "growlab"


@pytest.fixture
def shared_data() -> Path:
    """Folder of real data next to the checkout."""
    folder = Path(__file__).parents[4] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no shared/data next to the checkout")
    return folder


class Pictures:
    """Random images in four classes, and functions that write them in several layouts."""

    def __init__(self, num_train: int = 40, num_test: int = 12, size: int = 10, channels: int = 3) -> None:
        rng = np.random.default_rng(0)
        self.classes = ("ant", "bee", "cat", "dog")
        self.channels = channels
        shape = (size, size + 2, channels)
        self.images = {
            "train": rng.integers(0, 256, (num_train, *shape), dtype=np.uint8),
            "test": rng.integers(0, 256, (num_test, *shape), dtype=np.uint8),
        }
        # Sorted by class, as when reading folders.
        self.labels = {
            split: np.sort(np.arange(len(images)) % len(self.classes)) for split, images in self.images.items()
        }

    def png(self, split: str, position: int) -> bytes:
        image = self.images[split][position]
        buffer = io.BytesIO()
        PIL.Image.fromarray(image[..., 0] if self.channels == 1 else image).save(buffer, "PNG")
        return buffer.getvalue()

    def as_folders(self, root: Path, test_name: str = "test") -> Path:
        for split, name in (("train", "train"), ("test", test_name)):
            for position, label in enumerate(self.labels[split]):
                folder = root / name / self.classes[label]
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{position:05}.png").write_bytes(self.png(split, position))
        return root

    def as_parquet(
        self,
        root: Path,
        names: Callable[[str], str] = "{}.parquet".format,
        image_column: str = "img",
        label_column: str = "label",
        shards: int = 1,
        row_group_size: int | None = None,
        wrap: Callable[[bytes], object] = lambda content: {"bytes": content, "path": None},
    ) -> Path:
        for split, labels in self.labels.items():
            contents = [wrap(self.png(split, position)) for position in range(len(labels))]
            for shard, positions in enumerate(np.array_split(np.arange(len(labels)), shards)):
                table = pa.table({image_column: [contents[p] for p in positions], label_column: labels[positions]})
                name = names(split).replace("SHARD", f"{shard:05}-of-{shards:05}")
                path = root / name.replace("NUMBER", f"{shard:04}")
                path.parent.mkdir(parents=True, exist_ok=True)
                pq.write_table(table, path, row_group_size=row_group_size)
        return root


@pytest.fixture
def pictures() -> Pictures:
    return Pictures()


@pytest.fixture
def grey_pictures() -> Pictures:
    return Pictures(channels=1)


def placed(data, epoch: int = 0, rank: int = 0, world_size: int = 1):
    """Attach a fake trainer with this epoch and rank to the data."""
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    data.trainer = SimpleNamespace(
        current_epoch=epoch, global_rank=rank, world_size=world_size, strategy=strategy, training=True
    )
    return data


def train_batches(data, epoch: int = 0, rank: int = 0, world_size: int = 1) -> list:
    """Return the training batches of an epoch and rank."""
    return list(placed(data, epoch, rank, world_size).train_dataloader())


def equal(ours, others) -> bool:
    """True if batches are bit-identical."""
    return len(ours) == len(others) and all(
        torch.equal(a, b) for pair in zip(ours, others, strict=True) for a, b in zip(*pair, strict=True)
    )


def assert_equal_on_gpu(data, cpu_batches) -> None:
    """Assert that training batches on the first GPU equal those on the CPU."""
    data.trainer.strategy.root_device = torch.device("cuda", 0)
    for (x, y), (cpu_x, cpu_y) in zip(data.train_dataloader(), cpu_batches, strict=True):
        assert x.is_cuda and y.is_cuda and x.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(x.cpu(), cpu_x, rtol=0, atol=1e-6)
        assert torch.equal(y.cpu(), cpu_y)


@pytest.fixture
def make_unreadable(monkeypatch) -> Callable[[Path], None]:
    """Return a function that simulates a folder without read permission, since root may read everything."""
    listed = os.scandir

    def make(closed: Path) -> None:
        def scandir(path):
            if Path(path) == closed:
                raise PermissionError(errno.EACCES, "Permission denied", str(closed))
            return listed(path)

        monkeypatch.setattr(os, "scandir", scandir)

    return make

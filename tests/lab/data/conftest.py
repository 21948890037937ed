import io
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
    """Give every test its own cache folder, and no data folder from outside."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("GROWLAB_DATA", raising=False)
    return tmp_path / "cache" / "growlab"


@pytest.fixture
def shared_data() -> Path:
    """Folder of real data next to the checkout."""
    folder = Path(__file__).parents[4] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no shared/data beside the checkout")
    return folder


class Pictures:
    """Random images in classes, and the layouts of folders with them."""

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
    """Attach a trainer in this epoch and process to the data."""
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    data.trainer = SimpleNamespace(
        current_epoch=epoch, global_rank=rank, world_size=world_size, strategy=strategy, training=True
    )
    return data


def train_batches(data, epoch: int = 0, rank: int = 0, world_size: int = 1) -> list:
    """Training batches of an epoch and rank."""
    return list(placed(data, epoch, rank, world_size).train_dataloader())


def equal(ours, others) -> bool:
    """True if batches are bit-identical."""
    return len(ours) == len(others) and all(
        torch.equal(a, b) for pair in zip(ours, others, strict=True) for a, b in zip(*pair, strict=True)
    )

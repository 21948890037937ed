"""Images of many sizes, read on demand from folders and Parquet shards, like ImageNet."""

import io
import os
import signal

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torchvision.transforms import v2

from growlab.base.errors import UserError
from growlab.lab.data import ImageData, image_files
from growlab.lab.data.loaders import DIED, StreamLoader
from tests.lab.data.conftest import assert_equal_on_gpu, equal, train_batches

OPTIONS = {
    "batch_size": 8,
    "eval_batch_size": 5,
    "image_size": 16,
    "resize_size": 20,
    "crop_scale": [0.08, 1.0],
    "mirror": True,
    "interpolation": "bilinear",
    "mean": [0.485, 0.456, 0.406],
    "std": [0.229, 0.224, 0.225],
    "in_memory": None,
}
MODES = ["RGB", "RGB", "L", "CMYK", "RGBA"]


def _content(number: int) -> bytes:
    """Return a JPEG or PNG whose size and mode depend on the number."""
    rng = np.random.default_rng(number)
    height, width = (int(side) for side in rng.integers(18, 60, 2))
    picture = PIL.Image.fromarray(rng.integers(0, 256, (height // 3, width // 3, 3), dtype=np.uint8))
    mode = MODES[number % len(MODES)]
    buffer = io.BytesIO()
    picture.resize((width, height)).convert(mode).save(buffer, "PNG" if mode == "RGBA" else "JPEG")
    return buffer.getvalue()


CONTENTS = {"train": [_content(n) for n in range(50)], "val": [_content(n) for n in range(50, 64)]}
LABELS = {split: np.sort(np.arange(len(contents)) % 4) for split, contents in CONTENTS.items()}
CLASSES = ["n01440764", "n01443537", "n01484850", "n01491361"]


@pytest.fixture
def folders(tmp_path):
    root = tmp_path / "folders"
    for split, contents in CONTENTS.items():
        for number, (content, label) in enumerate(zip(contents, LABELS[split], strict=True)):
            folder = root / split / CLASSES[label]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{CLASSES[label]}_{number:04}.JPEG").write_bytes(content)
    return root


@pytest.fixture
def shards(tmp_path, monkeypatch):
    """The same images in shards with small row groups, read from disk."""
    monkeypatch.setattr(image_files, "_IN_MEMORY_BYTES", 0)
    root = tmp_path / "shards" / "data"
    root.mkdir(parents=True)
    for split, name in (("train", "train"), ("val", "validation")):
        parts = np.array_split(np.arange(len(CONTENTS[split])), 3)
        for shard, part in enumerate(parts):
            images = [{"bytes": CONTENTS[split][n], "path": f"{n}.JPEG"} for n in part]
            table = pa.table({"image": images, "label": LABELS[split][part]})
            pq.write_table(table, root / f"{name}-{shard:05}-of-00003.parquet", row_group_size=5)
    return root.parent


def _open(root, **kwargs) -> ImageData:
    data = ImageData("imagenet", str(root), **{**OPTIONS, **kwargs})
    data.setup()
    return data


def _normalised(picture: PIL.Image.Image) -> torch.Tensor:
    tensor = v2.functional.pil_to_tensor(picture).double() / 255
    return v2.functional.normalize(tensor, OPTIONS["mean"], OPTIONS["std"])


def _rgb(content: bytes) -> PIL.Image.Image:
    return PIL.Image.open(io.BytesIO(content)).convert("RGB")


@pytest.mark.parametrize("layout", ["folders", "shards"])
def test_evaluation_and_crops_are_torchvisions(layout, request):
    data = _open(request.getfixturevalue(layout))
    assert (data.num_train, data.num_test, data.num_classes, data.image_shape) == (50, 14, 4, (3, 16, 16))
    preset = v2.Compose([v2.Resize(20), v2.CenterCrop(16)])
    expected = torch.stack([_normalised(preset(_rgb(content))) for content in CONTENTS["val"]])
    batches = list(data.test_dataloader())
    torch.testing.assert_close(torch.cat([x for x, _ in batches]).double(), expected, rtol=0, atol=3e-6)
    assert torch.cat([y for _, y in batches]).tolist() == LABELS["val"].tolist()
    # Compare each training crop with torchvision's crop of the original file, mirrored or not.
    loader = data.train_dataloader()
    assert isinstance(loader, StreamLoader)
    seen = []
    for positions, (x, y) in zip(loader.plan.batches(), loader, strict=True):
        seen += positions.tolist()
        assert y.tolist() == LABELS["train"][positions].tolist()
        views = data.crop.views(positions, 0, 0, (16, 16))
        mirrored = data.augmentation.draw(positions, 0, 0)[2]
        for image, position, view, flip in zip(x, positions, views, mirrored, strict=True):
            expected = _normalised(view(_rgb(CONTENTS["train"][position])))
            expected = expected.flip(-1) if flip else expected
            torch.testing.assert_close(image.double(), expected, rtol=0, atol=3e-6)
    assert sorted(seen) == list(range(50))


@pytest.mark.parametrize("layout", ["folders", "shards"])
def test_a_resumed_run_sees_the_same_batches_with_any_number_of_workers(layout, request, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    root = request.getfixturevalue(layout)
    whole = _open(root, num_workers=2)
    epochs = [train_batches(whole, epoch) for epoch in range(3)]
    (pids,) = {tuple(w.pid for w in whole._workers["train"]._loader._iterator._workers)}
    assert len(pids) == 2  # kept over three epochs
    before = torch.get_rng_state()
    assert equal(train_batches(_open(root, num_workers=0), 2), epochs[2])
    assert torch.equal(torch.get_rng_state(), before)
    assert not equal(epochs[1], epochs[2])
    ranks = [train_batches(_open(root), 1, rank, 2) for rank in range(2)]
    for step, (x, _) in enumerate(epochs[1]):
        assert torch.equal(torch.cat([ranks[0][step][0], ranks[1][step][0]])[: len(x)], x)
    workers = whole._workers["train"]._loader._iterator._workers
    whole.teardown()
    assert not any(worker.is_alive() for worker in workers)


def test_workers_ignore_every_signal_at_which_a_run_may_save(folders):
    data = _open(folders, num_workers=1)
    expected = [train_batches(data, epoch) for epoch in range(2)]
    (worker,) = data._workers["train"]._loader._iterator._workers
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT"):
        os.kill(worker.pid, signal.Signals[name])
    assert equal(train_batches(data, 1), expected[1])
    assert worker.is_alive()
    data.teardown()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_abandoned_epoch_does_not_affect_the_next(folders, num_workers):
    data = _open(folders, num_workers=num_workers)
    expected = train_batches(_open(folders), 1)
    abandoned = iter(data.train_dataloader())
    next(abandoned)
    assert equal(train_batches(data, 1), expected)
    with pytest.raises(RuntimeError, match="another reading"):
        next(abandoned)
    data.teardown()


def test_limits_and_validation_splits_of_shards(shards, folders):
    options = {"limit_train": 20, "validation": "split", "validation_fraction": 0.2}
    ours, theirs = _open(shards, **options), _open(folders, **options)
    assert (ours.num_train, ours.num_val) == (16, 4)
    assert equal(list(ours.val_dataloader()), list(theirs.val_dataloader()))
    assert equal(train_batches(ours), train_batches(theirs))
    assert torch.equal(ours.probe_batch(6), theirs.probe_batch(6))


def test_a_damaged_image_read_by_a_worker_is_named(folders):
    (path,) = folders.rglob("*_0020.JPEG")
    path.write_bytes(path.read_bytes()[: len(CONTENTS["train"][20]) // 2])
    data = _open(folders, num_workers=1)
    with pytest.raises(UserError) as raised:
        train_batches(data)
    message = str(raised.value)
    assert str(path) in message and "\n" not in message and message.endswith("data.on_error=skip.")
    data.teardown()


def test_a_dead_worker_raises_torchs_error(folders, monkeypatch):
    """`growlab.lab.training.run` recognises the error by the start of its message."""
    data = _open(folders, num_workers=1)
    # Without torch's signal handler, which could raise anywhere in the tests, the loader detects the death by polling.
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
    try:
        loader = iter(data.train_dataloader())
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        next(loader)
        worker = data._workers["train"]._loader._iterator._workers[0]
        os.kill(worker.pid, signal.SIGKILL)
        worker.join()
        with pytest.raises(RuntimeError) as raised:
            list(loader)
        assert str(raised.value).startswith(DIED)
        del loader
        data.teardown()
    finally:
        signal.signal(signal.SIGCHLD, handler)


def test_random_crops_of_images_in_memory(folders):
    """The digits have no files to crop on reading."""
    data = ImageData("digits", batch_size=500, crop_scale=[0.3, 1.0], interpolation="bilinear")
    data.setup()
    plain = ImageData("digits", batch_size=500)
    plain.setup()
    (x, y), (whole, labels) = next(iter(data.train_dataloader())), next(iter(plain.train_dataloader()))
    assert x.shape == whole.shape == (500, 1, 8, 8) and torch.equal(y, labels)
    assert not torch.equal(x, whole)
    assert equal(list(data.test_dataloader()), list(plain.test_dataloader()))


@pytest.mark.gpu
def test_on_a_gpu_pinned_batches_equal_those_on_the_cpu(folders):
    expected = train_batches(_open(folders), 1)
    data = _open(folders, num_workers=2)
    train_batches(data, 1)
    data.teardown()
    assert_equal_on_gpu(data, expected)
    data.teardown()

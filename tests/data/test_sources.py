import json
import logging
import pickle
import shutil
import struct
import urllib.error
from hashlib import md5
from pathlib import Path

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torchvision.datasets

from growlab.base.errors import UserError
from growlab.lab.data import ImageData
from growlab.lab.data.cache import decoded
from growlab.lab.data.crops import Fit
from growlab.lab.data.image_sets import EncodedImages
from growlab.lab.data.sources import default_root, open_images


def _arrays(name, root, **kwargs):
    """Both sets decoded: (images uint8 [N, H, W, C], labels) of each."""
    sets = [
        decoded(part) if isinstance(part, EncodedImages) else part
        for part in open_images(name, root, **kwargs).values()
    ]
    return [(part.images_NHWC.numpy(), part.labels) for part in sets]


def _assert_same(sets, pictures):
    for (images, labels), split in zip(sets, ("train", "test"), strict=True):
        assert np.array_equal(images, pictures.images[split])
        assert np.array_equal(labels, pictures.labels[split])


def _error(name, root, **kwargs) -> str:
    with pytest.raises(UserError) as raised:
        _arrays(name, root, **kwargs)
    message = str(raised.value)
    assert "\n" not in message and message.endswith(".")
    return message


# Layouts: all hold the same pictures and must give the same tensors.


@pytest.mark.parametrize("test_name", ["test", "val", "validation"])
def test_folders(pictures, tmp_path, test_name):
    root = pictures.as_folders(tmp_path / "data", test_name)
    _assert_same(_arrays("insects", root), pictures)
    assert open_images("insects", root)["train"].classes == pictures.classes


@pytest.mark.parametrize(
    ("names", "options"),
    [
        ("{}.parquet", {}),
        ("{}-SHARD.parquet", {"shards": 3, "image_column": "image"}),
        ("data/{}-SHARD.parquet", {"label_column": "fine_label"}),
        ("plain_text/{}-SHARD.parquet", {"shards": 2, "wrap": bytes}),
        ("{}/NUMBER.parquet", {}),
        ("{0}/{0}-SHARD.parquet", {"shards": 2}),
        ("plain_text/{}/NUMBER.parquet", {"shards": 3}),
    ],
)
def test_parquet(pictures, tmp_path, names, options):
    root = pictures.as_parquet(tmp_path / "data", names.format, **options)
    _assert_same(_arrays("insects", root), pictures)


def test_parquet_of_three_splits_in_folders(pictures, tmp_path):
    root = pictures.as_parquet(tmp_path, "default/{}/NUMBER.parquet".format)
    shutil.copytree(root / "default" / "test", root / "default" / "validation")
    assert open_images("insects", root).keys() == {"train", "test", "val"}
    shutil.rmtree(root / "default" / "test")
    assert open_images("insects", root).keys() == {"train", "test"}


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        ("data/{}-SHARD.parquet", "data/train-00001-of-00003.parquet"),
        ("{0}/{0}-SHARD.parquet", "train/train-00001-of-00003.parquet"),
        ("{}/NUMBER.parquet", "train/0001.parquet"),
        ("plain_text/{}/NUMBER.parquet", "plain_text/test/0000.parquet"),
    ],
)
def test_parquet_files_that_are_missing_are_told(pictures, tmp_path, names, missing):
    root = pictures.as_parquet(tmp_path, names.format, shards=3)
    (root / missing).unlink()
    message = _error("insects", root)
    assert f"lacks {Path(missing).stem}" in message and str((root / missing).parent) in message


def test_parquet_takes_the_names_of_classes_from_hugging_faces_metadata(pictures, tmp_path):
    root = pictures.as_parquet(tmp_path)
    assert open_images("insects", root)["train"].classes == ("0", "1", "2", "3")
    table = pq.read_table(root / "train.parquet")
    info = '{"info": {"features": {"label": {"names": ["a", "b", "c", "d", "e"]}}}}'
    pq.write_table(table.replace_schema_metadata({"huggingface": info}), root / "train.parquet")
    assert open_images("insects", root)["train"].classes == ("a", "b", "c", "d", "e")


def test_large_parquet_is_read_by_row_groups(pictures, tmp_path, monkeypatch):
    monkeypatch.setattr("growlab.lab.data.parquet._HELD_BYTES", 0)
    root = pictures.as_parquet(tmp_path, "{}-SHARD.parquet".format, shards=3, row_group_size=4)
    train, test = open_images("insects", root).values()
    # 14 + 13 + 13 rows in groups of at most four.
    rows = [4, 4, 4, 2, 4, 4, 4, 1, 4, 4, 4, 1]
    assert train.blocks_N.tolist() == np.repeat(np.arange(12), rows).tolist()
    _assert_same([(part.read(np.arange(len(part))).numpy(), part.labels) for part in (train, test)], pictures)
    # A worker process gets the set pickled, without the open files.
    copy = pickle.loads(pickle.dumps(train))
    assert torch.equal(copy.read(np.array([3, 1])), train.read(np.array([3, 1])))


def test_an_unlabelled_test_set_gives_way_to_the_validation_set(pictures, tmp_path):
    """As in Hugging Face's ImageNet."""
    root = pictures.as_parquet(tmp_path)
    (root / "test.parquet").rename(root / "validation.parquet")
    table = pq.read_table(root / "train.parquet")
    pq.write_table(
        table.set_column(1, "label", pa.array([-1] * len(table), pa.int64())), root / "test.parquet"
    )
    _assert_same(_arrays("insects", root), pictures)


def _write_idx(path, array):
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def _write_mnist(root, folder, pictures):
    for split, prefix in (("train", "train"), ("test", "t10k")):
        _write_idx(root / folder / "raw" / f"{prefix}-images-idx3-ubyte", pictures.images[split][..., 0])
        _write_idx(root / folder / "raw" / f"{prefix}-labels-idx1-ubyte", pictures.labels[split])


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
def test_torchvisions_mnist_files(grey_pictures, tmp_path, name, folder):
    _write_mnist(tmp_path, folder, grey_pictures)
    _assert_same(_arrays(name, tmp_path), grey_pictures)
    _assert_same(_arrays("grey", grey_pictures.as_folders(tmp_path / "folders")), grey_pictures)
    assert len(open_images(name, tmp_path)["train"].classes) == 10


@pytest.mark.parametrize(
    ("name", "folder", "dataset", "label_key", "meta"),
    [
        ("cifar10", "cifar-10-batches-py", torchvision.datasets.CIFAR10, b"labels", "batches.meta"),
        ("cifar100", "cifar-100-python", torchvision.datasets.CIFAR100, b"fine_labels", "meta"),
    ],
)
def test_torchvisions_cifar_files(tmp_path, monkeypatch, name, folder, dataset, label_key, meta):
    rng = np.random.default_rng(0)
    images = {"train": rng.integers(0, 256, (8, 32, 32, 3)), "test": rng.integers(0, 256, (4, 32, 32, 3))}
    labels = {split: np.arange(len(part)) % 3 for split, part in images.items()}
    (tmp_path / folder).mkdir()

    def write(file, content):
        (tmp_path / folder / file).write_bytes(pickle.dumps(content))
        return md5((tmp_path / folder / file).read_bytes()).hexdigest()

    for split in images:
        data = images[split].astype(np.uint8).transpose(0, 3, 1, 2).reshape(-1, 3072)
        checksum = write(f"{split}_batch", {"data": data, label_key.decode(): labels[split].tolist()})
        monkeypatch.setattr(dataset, f"{split}_list", [[f"{split}_batch", checksum]])
    key = dataset.meta["key"]
    monkeypatch.setattr(
        dataset, "meta", {"filename": meta, "key": key, "md5": write(meta, {key: ["a", "b", "c"]})}
    )
    for (ours, our_labels), split in zip(_arrays(name, tmp_path, download=False), images, strict=True):
        assert np.array_equal(ours, images[split]) and np.array_equal(our_labels, labels[split])


def test_default_root_is_the_users_cache_or_growlab_data(tmp_path, monkeypatch, pictures, own_cache):
    assert default_root("insects") == own_cache / "insects"
    monkeypatch.setenv("GROWLAB_DATA", str(tmp_path / "data"))
    pictures.as_folders(tmp_path / "data" / "insects")
    _assert_same(_arrays("insects", None), pictures)


# Images of many kinds.


def test_grey_images_among_coloured_ones_become_coloured(pictures, tmp_path):
    root = pictures.as_folders(tmp_path)
    grey = pictures.images["train"][1][..., 0]
    PIL.Image.fromarray(grey).save(root / "train" / "ant" / "00001.png")
    images = _arrays("insects", root)[0][0]
    assert np.array_equal(images[1], np.repeat(grey[..., None], 3, axis=2))
    assert np.array_equal(images[0], pictures.images["train"][0])


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
@pytest.mark.filterwarnings("error")
def test_images_of_every_mode_become_coloured(pictures, tmp_path, mode):
    root = pictures.as_folders(tmp_path)
    picture = PIL.Image.new("RGB", (12, 10), (255, 255, 255)).convert(mode)
    options = {"transparency": b"\0" * 9} if mode == "P" else {}
    # Pillow 11 does not read back the YCbCr that it writes into a TIFF.
    kinds = {"CMYK": "TIFF", "YCbCr": "JPEG"}
    picture.save(root / "train" / "ant" / "00001.png", kinds.get(mode, "PNG"), **options)
    images = _arrays("insects", root)[0][0]
    assert (images[1] == 255).all() and np.array_equal(images[0], pictures.images["train"][0])


def test_image_size_scales_the_shorter_side_and_crops_the_centre(pictures, tmp_path):
    root = pictures.as_folders(tmp_path)
    # 10x12 pixels: at size 10 nothing is scaled, one column goes on either side.
    images = _arrays("insects", root, fit=Fit(10))[0][0]
    assert np.array_equal(images, pictures.images["train"][:, :, 1:11])
    PIL.Image.new("RGB", (50, 90), (1, 2, 3)).save(root / "train" / "ant" / "00001.png")
    images = _arrays("insects", root, fit=Fit(5))[0][0]
    assert images.shape[1:] == (5, 5, 3) and (images[1] == (1, 2, 3)).all()


def test_images_of_other_sizes_are_named(pictures, tmp_path):
    root = pictures.as_folders(tmp_path)
    PIL.Image.new("RGB", (50, 90)).save(root / "train" / "bee" / "other.png")
    message = _error("insects", root)
    assert "other.png" in message and "50x90" in message and "data.image_size=N" in message


def test_a_damaged_image_is_named(pictures, tmp_path):
    root = pictures.as_folders(tmp_path)
    file = root / "train" / "bee" / "damaged.png"
    file.write_bytes(b"no image")
    assert str(file) in _error("insects", root)
    whole = pictures.png("train", 0)
    file.write_bytes(whole[: len(whole) // 2])
    assert str(file) in _error("insects", root)


def test_an_image_of_sixteen_bits_beside_others_is_read(pictures, tmp_path):
    root = pictures.as_folders(tmp_path)
    PIL.Image.fromarray(np.full((10, 12), 40_000, dtype=np.uint16)).save(root / "train" / "bee" / "deep.png")
    images = open_images("insects", root)["train"]
    read = images.read(np.arange(len(images)))
    assert read.shape == (41, 10, 12, 3) and 156 in read.amax((1, 2, 3))


# Nothing usable.


def test_nothing_there_says_what_was_looked_for_and_where(tmp_path):
    message = _error("insects", tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in message and "train*.parquet" in message and "data.root=" in message
    message = _error("cifar10", tmp_path / "nowhere", download=False)
    assert "cifar-10-batches-py" in message and "train/<class>/*.png" in message
    assert "scikit-learn" in _error("digits", tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "mnist", "fashion_mnist"])
def test_without_network_the_download_fails_in_one_sentence(name, tmp_path, monkeypatch, capsys, caplog):
    caplog.set_level(logging.INFO)

    def refuse(*args, **kwargs):
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    message = _error(name, tmp_path / "nowhere")
    assert (
        str(tmp_path / "nowhere") in message and "could not download" in message and "data.root=" in message
    )
    assert not (tmp_path / "nowhere").exists()
    assert capsys.readouterr().out == "" and not caplog.records


def test_a_foreign_folder_is_not_filled_with_downloads(tmp_path):
    (tmp_path / "letters.txt").write_text("dear")
    message = _error("cifar10", tmp_path)
    assert "holds no cifar10 data" in message
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["letters.txt"]


def test_a_file_as_root(tmp_path):
    (tmp_path / "train.parquet").write_bytes(b"")
    assert "is a file" in _error("cifar10", tmp_path / "train.parquet")


def test_damaged_torchvision_files(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(b"torn")
    message = _error("cifar10", tmp_path, download=False)
    assert "incomplete or damaged" in message and "data.download=true" in message


def test_damaged_parquet(pictures, tmp_path):
    root = pictures.as_parquet(tmp_path)
    content = (root / "train.parquet").read_bytes()
    (root / "train.parquet").write_bytes(content[: len(content) // 2])
    assert "cannot read" in (message := _error("insects", root)) and "train.parquet" in message


def test_parquet_without_images_or_with_labels_missing(pictures, tmp_path):
    root = pictures.as_parquet(tmp_path, image_column="photo")
    assert "columns photo, label" in _error("insects", root)
    root = pictures.as_parquet(tmp_path)
    table = pq.read_table(root / "train.parquet")
    labels = pa.array([None, *pictures.labels["train"][1:]], pa.int64())
    pq.write_table(table.set_column(1, "label", labels), root / "train.parquet")
    assert "without a label" in _error("insects", root)


def test_labels_outside_the_classes(pictures, tmp_path):
    pictures.labels["test"] = pictures.labels["test"] - 1
    assert "run from -1 to 3" in _error("insects", pictures.as_parquet(tmp_path))


def test_missing_image_bytes_name_file_and_row(pictures, tmp_path):
    root = pictures.as_parquet(
        tmp_path, "{}-SHARD.parquet".format, shards=2, wrap=lambda content: {"bytes": content}
    )
    shard = root / "train-00001-of-00002.parquet"
    table = pq.read_table(shard)
    images = table.column("img").to_pylist()
    images[4] = {"bytes": None}
    pq.write_table(table.set_column(0, "img", pa.array(images, table.schema.field("img").type)), shard)
    message = _error("insects", root)
    assert f"row 4 of {shard}" in message and "no image bytes" in message


@pytest.mark.parametrize("value", ["1.png", [[1, 2], [3, 4]]], ids=["a name", "pixels"])
def test_a_column_of_something_else_than_image_files_is_told(pictures, tmp_path, value):
    root = pictures.as_parquet(tmp_path)
    table = pq.read_table(root / "train.parquet")
    pq.write_table(table.set_column(0, "img", pa.array([value] * len(table))), root / "train.parquet")
    message = _error("insects", root)
    assert f"row 0 of {root / 'train.parquet'} is of type {type(value).__name__}" in message
    assert "on_error" not in message


def test_parquet_of_which_a_file_is_missing(pictures, tmp_path):
    root = pictures.as_parquet(tmp_path, "{}-SHARD.parquet".format, shards=2)
    (root / "train-00000-of-00002.parquet").unlink()
    assert "lacks train-00000-of-00002;" in _error("insects", root)


def test_parquet_whose_parts_number_the_classes_differently(pictures, tmp_path):
    root = pictures.as_parquet(tmp_path)
    for part, names in (("train", ["ant", "bee", "cat", "dog"]), ("test", ["ant", "cat", "bee", "dog"])):
        about = json.dumps({"info": {"features": {"label": {"names": names}}}})
        table = pq.read_table(root / f"{part}.parquet").replace_schema_metadata({"huggingface": about})
        pq.write_table(table, root / f"{part}.parquet")
    assert "train.parquet: class 1 is 'cat' there and 'bee' here" in _error("insects", root)


def test_labels_that_are_no_numbers_of_classes(pictures, tmp_path):
    pictures.labels["train"] = pictures.labels["train"] * 10**9
    assert "more than there are images" in _error("insects", pictures.as_parquet(tmp_path))


@pytest.mark.parametrize("layout", ["as_parquet", "as_folders"])
def test_one_class_alone(pictures, tmp_path, layout):
    pictures.labels = {part: labels * 0 for part, labels in pictures.labels.items()}
    root = getattr(pictures, layout)(tmp_path)
    with pytest.raises(UserError, match=r"all training images are of one class, '(0|ant)'"):
        ImageData("insects", str(root)).setup()


def test_a_link_to_a_folder_above_shows_no_image_twice(pictures, tmp_path):
    root = pictures.as_folders(tmp_path / "pictures")
    more = tmp_path / "more"
    more.mkdir()
    (more / "extra.png").write_bytes(pictures.png("train", 0))
    data = ImageData("insects", str(root))
    data.setup()
    (root / "train" / "ant" / "above").symlink_to(root / "train", target_is_directory=True)
    (root / "train" / "ant" / "elsewhere").symlink_to(more, target_is_directory=True)
    linked = ImageData("insects", str(root))
    linked.setup()
    assert linked.num_train == data.num_train + 1


def test_training_sets_in_two_folders(pictures, tmp_path):
    pictures.as_parquet(tmp_path / "a")
    pictures.as_parquet(tmp_path / "b")
    assert "several folders" in _error("insects", tmp_path)


def test_no_test_set(pictures, tmp_path):
    root = pictures.as_parquet(tmp_path / "parquet")
    (root / "test.parquet").unlink()
    assert "no test set" in _error("insects", root)


def test_a_test_class_that_the_training_set_lacks(pictures, tmp_path):
    root = pictures.as_folders(tmp_path)
    (root / "test" / "wasp").mkdir()
    (root / "test" / "wasp" / "1.png").write_bytes(pictures.png("test", 0))
    message = _error("insects", root)
    assert "wasp" in message and "ant, bee, cat, dog" in message


def test_empty_class_folders(tmp_path):
    (tmp_path / "train" / "ant").mkdir(parents=True)
    (tmp_path / "test").mkdir()
    assert "hold no images" in _error("insects", tmp_path)


@pytest.mark.parametrize("layout", ["folders", "parquet"])
@pytest.mark.parametrize(("validation", "held_out"), [("split", 39), ("test", 12), ("none", 0)])
def test_a_validation_set_beside_the_test_set_is_validated_on(
    pictures, tmp_path, layout, validation, held_out
):
    """All training images are trained on; the validation set is theirs but one."""
    if layout == "folders":
        root = pictures.as_folders(tmp_path / "data")
        shutil.copytree(root / "train", root / "val")
        next((root / "val").rglob("*.png")).unlink()
    else:
        root = pictures.as_parquet(tmp_path / "data", "{}-00000.parquet".format)
        table = pq.read_table(root / "train-00000.parquet")
        pq.write_table(table.slice(1), root / "validation-00000.parquet")
    data = ImageData("insects", str(root), validation=validation)
    data.setup()
    assert (data.num_train, data.num_val, data.num_test) == (40, held_out, 12)

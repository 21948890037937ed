"""Images in folders, Parquet files and torchvision's files: layouts, decoding, and errors."""

import json
import logging
import pickle
import shutil
import struct
import urllib.error
from collections.abc import Callable
from hashlib import md5
from pathlib import Path

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sklearn.datasets
import torch
import torchvision.datasets

from growlab.base.errors import UserError
from growlab.lab.data import ImageData, image_files
from growlab.lab.data.image_files import default_root, load_digits, open_images
from growlab.lab.data.images import EncodedImages, Fit


def arrays(name: str, root: Path | None, **options) -> list[tuple[np.ndarray, np.ndarray]]:
    """Decode the training and test sets to (images uint8 [N, H, W, C], labels)."""
    sets = [
        part.decoded() if isinstance(part, EncodedImages) else part
        for part in open_images(name, root, **options).values()
    ]
    return [(part.images_NHWC.numpy(), part.labels) for part in sets]


def assert_same(sets, pictures) -> None:
    for (images, labels), split in zip(sets, ("train", "test"), strict=True):
        assert np.array_equal(images, pictures.images[split])
        assert np.array_equal(labels, pictures.labels[split])


def opened(root: Path, name: str = "folder", **settings) -> ImageData:
    usual = {"validation": "split", "batch_size": 8, "mean": [0.5] * 3, "std": [0.5] * 3, "test_fraction": 0.1}
    data = ImageData(name, str(root), **{**usual, **settings})
    data.setup()
    return data


def numbers(data: ImageData) -> tuple[int, int, int]:
    return data.num_train, data.num_val, data.num_test


def rewritten(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    pq.write_table(change(pq.read_table(path)), path)


# Layouts with the same pictures give the same tensors.


@pytest.mark.parametrize(
    "names", [("train", "val"), ("training", "Validation"), ("TRAIN", "Test"), ("Training", "testing")], ids=str
)
def test_folders(pictures, tmp_path, names):
    root = pictures.as_folders(tmp_path / "data")
    for old, new in zip(("train", "test"), names, strict=True):
        (root / old).rename(root / f"{old}_aside")
        (root / f"{old}_aside").rename(root / new)
    assert_same(arrays("insects", root), pictures)
    assert open_images("insects", root)["train"].classes == pictures.classes


def test_symlinks_are_followed_and_lower_case_names_are_preferred(pictures, tmp_path):
    root = pictures.as_folders(tmp_path / "pictures")
    (root / "TEST" / "ant").mkdir(parents=True)
    if (root / "test").samefile(root / "TEST"):
        pytest.skip("names differ by more than case here")
    assert numbers(opened(root)) == (36, 4, 12)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "extra.png").write_bytes(pictures.png("train", 0))
    (root / "train" / "ant" / "elsewhere").symlink_to(tmp_path / "more", target_is_directory=True)
    assert len(open_images("insects", root)["train"]) == 41


@pytest.mark.parametrize(
    ("names", "options"),
    [
        ("{}.parquet", {}),
        ("{}-SHARD.parquet", {"shards": 3, "image_column": "image"}),
        ("data/{}-SHARD.parquet", {"label_column": "fine_label"}),
        ("plain_text/{}-SHARD.parquet", {"shards": 2, "wrap": bytes}),
        ("{0}/{0}-SHARD.parquet", {"shards": 2}),
        ("plain_text/{}/NUMBER.parquet", {"shards": 3}),
    ],
)
def test_parquet(pictures, tmp_path, names, options):
    root = pictures.as_parquet(tmp_path / "data", names.format, **options)
    assert_same(arrays("insects", root), pictures)


def test_parts_of_parquet_files_and_their_classes(pictures, tmp_path):
    root = pictures.as_parquet(tmp_path, "default/{}/NUMBER.parquet".format)
    folder = root / "default"
    shutil.copytree(folder / "test", folder / "validation")
    assert open_images("insects", root).keys() == {"train", "test", "val"}
    # The validation set replaces an unlabelled test set, as in Hugging Face's ImageNet.
    unlabelled = pa.array([-1] * 12, pa.int64())
    rewritten(folder / "test" / "0000.parquet", lambda table: table.set_column(1, "label", unlabelled))
    assert_same(arrays("insects", root), pictures)
    shutil.rmtree(folder / "test")
    assert_same(arrays("insects", root), pictures)
    assert open_images("insects", root)["train"].classes == ("0", "1", "2", "3")
    about = {"huggingface": json.dumps({"info": {"features": {"label": {"names": list("abcde")}}}})}
    rewritten(folder / "train" / "0000.parquet", lambda table: table.replace_schema_metadata(about))
    assert open_images("insects", root)["train"].classes == tuple("abcde")


def test_large_parquet_is_read_from_a_copy_in_the_cache(pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(image_files, "_IN_MEMORY_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = pictures.as_parquet(tmp_path, "{}-SHARD.parquet".format, shards=3, row_group_size=4)
    train, test = open_images("insects", root).values()
    assert_same([(part.read(np.arange(len(part))).numpy(), part.labels) for part in (train, test)], pictures)
    assert len(list((tmp_path / "cache").rglob("*.arrow"))) == 2
    # A pickle for worker processes does not contain images.
    copy = pickle.loads(pickle.dumps(train))
    assert torch.equal(copy.read(np.array([3, 1])), train.read(np.array([3, 1])))


def test_torchvisions_mnist_files(grey_pictures, tmp_path):
    for split, prefix in (("train", "train"), ("test", "t10k")):
        contents = {"images-idx3": grey_pictures.images[split][..., 0], "labels-idx1": grey_pictures.labels[split]}
        for kind, array in contents.items():
            path = tmp_path / "MNIST" / "raw" / f"{prefix}-{kind}-ubyte"
            path.parent.mkdir(parents=True, exist_ok=True)
            header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            path.write_bytes(header + array.astype(np.uint8).tobytes())
    assert_same(arrays("mnist", tmp_path), grey_pictures)
    assert len(open_images("mnist", tmp_path)["train"].classes) == 10
    (tmp_path / "MNIST").rename(tmp_path / "FashionMNIST")
    assert_same(arrays("fashion_mnist", tmp_path), grey_pictures)
    assert_same(arrays("grey", grey_pictures.as_folders(tmp_path / "folders")), grey_pictures)


@pytest.mark.parametrize(
    ("name", "folder", "key", "meta"),
    [
        ("cifar10", "cifar-10-batches-py", "labels", "batches.meta"),
        ("cifar100", "cifar-100-python", "fine_labels", "meta"),
    ],
)
def test_torchvisions_cifar_files(tmp_path, monkeypatch, name, folder, key, meta):
    dataset = getattr(torchvision.datasets, name.upper())
    images = np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(12) % 3
    (tmp_path / folder).mkdir()

    def write(file, content):
        (tmp_path / folder / file).write_bytes(pickle.dumps(content))
        return md5((tmp_path / folder / file).read_bytes()).hexdigest()

    parts = {"train": slice(8), "test": slice(8, 12)}
    for split, part in parts.items():
        data = images[part].transpose(0, 3, 1, 2).reshape(-1, 3072)
        checksum = write(f"{split}_batch", {"data": data, key: labels[part].tolist()})
        monkeypatch.setattr(dataset, f"{split}_list", [[f"{split}_batch", checksum]])
    names = dataset.meta["key"]
    checksum = write(meta, {names: ["a", "b", "c"]})
    monkeypatch.setattr(dataset, "meta", {"filename": meta, "key": names, "md5": checksum})
    for (ours, our_labels), part in zip(arrays(name, tmp_path, download=False), parts.values(), strict=True):
        assert np.array_equal(ours, images[part]) and np.array_equal(our_labels, labels[part])


def test_the_split_of_the_digits_is_fixed():
    train, test = load_digits().values()
    assert (len(train), len(test)) == (1438, 359)
    original = sklearn.datasets.load_digits()
    rounded = np.rint(original.images * 255 / 16).astype(np.uint8)
    ours = np.concatenate([train.images_NHWC.numpy(), test.images_NHWC.numpy()]).reshape(1797, 64)
    assert sorted(map(bytes, ours)) == sorted(map(bytes, rounded.reshape(1797, 64)))
    for part in (train, test):
        shares = np.bincount(part.labels) / len(part)
        np.testing.assert_allclose(shares, np.bincount(original.target) / 1797, atol=0.003)


def test_default_root_is_the_users_cache_or_growlab_data(tmp_path, monkeypatch, pictures, own_cache):
    assert default_root("insects") == own_cache / "insects"
    monkeypatch.setenv("GROWLAB_DATA", str(tmp_path / "data"))
    pictures.as_folders(tmp_path / "data" / "insects")
    assert_same(arrays("insects", None), pictures)


# Parts.


def laid_out(pictures, root: Path, layout: str) -> Path:
    """Write 40 + 12 pictures to the root, or to train/ with test/, val/, both or neither."""
    pictures.as_folders(root)
    if layout in ("flat", "train"):
        shutil.rmtree(root / "test")
    if layout == "flat":
        for folder in (root / "train").iterdir():
            folder.rename(root / folder.name)
        (root / "train").rmdir()
        (root / "an_empty_folder").mkdir()
    elif layout == "train_val":
        (root / "test").rename(root / "val")
    elif layout == "train_val_test":
        shutil.copytree(root / "test", root / "val")
        next((root / "val").rglob("*.png")).unlink()
    return root


@pytest.mark.parametrize(
    ("layout", "validation", "expected"),
    [
        ("flat", "split", (32, 4, 4)),
        ("flat", "none", (36, 0, 4)),
        ("train", "split", (32, 4, 4)),
        ("train_test", "split", (36, 4, 12)),
        ("train_val", "split", (36, 4, 12)),
        ("train_val_test", "split", (40, 11, 12)),
        ("train_val_test", "test", (40, 12, 12)),
        ("train_val_test", "none", (40, 0, 12)),
    ],
)
def test_layouts_are_split_into_train_val_and_test(pictures, tmp_path, layout, validation, expected) -> None:
    root = laid_out(pictures, tmp_path / "data", layout)
    data = opened(root, validation=validation)
    assert numbers(data) == expected and data.num_classes == 4 and data.image_shape == (3, 10, 12)
    seen = [y.tolist() for loader in (data.train_dataloader(), data.test_dataloader()) for _, y in loader]
    assert sum(map(len, seen)) == expected[0] + expected[2]
    # The test split is stratified and fixed.
    ((_, y),) = data.test_dataloader()
    assert y.bincount().tolist() == [expected[2] // 4] * 4
    again, other = opened(root, validation=validation), opened(root, validation=validation, split_seed=1)
    tests = [next(iter(d.test_dataloader()))[0] for d in (data, again, other)]
    assert tests[0].equal(tests[1]) and tests[0].equal(tests[2]) == (expected[2] == 12)


# Images of many kinds.


@pytest.mark.parametrize(("validation", "held_out"), [("split", 39), ("test", 12), ("none", 0)])
def test_a_validation_set_of_parquet_files_is_used(pictures, tmp_path, validation, held_out):
    root = pictures.as_parquet(tmp_path / "data", "{}-00000.parquet".format)
    pq.write_table(pq.read_table(root / "train-00000.parquet").slice(1), root / "validation-00000.parquet")
    assert numbers(opened(root, validation=validation)) == (40, held_out, 12)


@pytest.mark.filterwarnings("error")
def test_images_of_every_mode_become_coloured(pictures, tmp_path):
    """White images in every mode among coloured ones."""
    root = pictures.as_folders(tmp_path)
    # Pillow cannot read its own TIFF files with YCbCr.
    kinds = {"CMYK": "TIFF", "YCbCr": "JPEG", "I": "TIFF"}
    modes = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I", "I;16")
    for mode in modes:
        if mode in ("I", "I;16"):
            white = PIL.Image.fromarray(np.full((10, 12), 65535, np.int32 if mode == "I" else np.uint16))
        else:
            white = PIL.Image.new("RGB", (12, 10), (255, 255, 255)).convert(mode)
        options = {"transparency": b"\0" * 9} if mode == "P" else {}
        white.save(root / "train" / "ant" / f"white_{mode}.png", kinds.get(mode, "PNG"), **options)
    PIL.Image.new("LAB", (12, 10)).save(root / "train" / "ant" / "lab.png", "TIFF")
    # Skip LAB, which Pillow does not convert.
    images = open_images("insects", root, skip_damaged=True)["train"]
    paths = [Path(images.source.describe(p)).stem for p in range(len(images))]
    read = dict(zip(paths, images.read(np.arange(len(images))), strict=True))
    assert [mode for mode in modes if not (read[f"white_{mode}"] == 255).all()] == []
    assert np.array_equal(read["00000"], pictures.images["train"][0])


RAMP = np.arange(120).reshape(10, 12) / 119


@pytest.mark.parametrize(
    ("pixels", "ending", "least", "largest"),
    [
        ((RAMP * 65535).astype(np.uint16), "tif", 0, 1),
        # 12 bits, as from a microscope; the brightest pixel uses most of the range.
        ((RAMP * 3000).astype(np.uint16), "png", 0, 3000 / 4095),
        ((RAMP * 200).astype(np.uint16), "png", 0, 200 / 255),
        ((RAMP * 4000 - 1000).astype(np.int32), "tif", 0, 1),
        ((RAMP * 0.5).astype(np.float32), "tif", 0, 0.5),
        ((RAMP * 255).astype(np.float32), "tif", 0, 1),
        ((RAMP * 2000 - 1000).astype(np.float32), "tif", 0, 1),
        (np.where(RAMP > 0.99, np.nan, RAMP).astype(np.float32), "tif", 0, 0.99),
    ],
)
def test_images_of_more_than_eight_bits_are_scaled(tmp_path, pixels, ending, least, largest) -> None:
    for name in ("ant", "bee"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(10):
            PIL.Image.fromarray(pixels).save(tmp_path / "data" / name / f"{number}.{ending}")
    data = opened(tmp_path / "data", mean=[0.0], std=[1.0])
    assert data.image_shape == (1, 10, 12)
    x = next(iter(data.test_dataloader()))[0]
    assert x.min() == pytest.approx(least, abs=0.01) and x.max() == pytest.approx(largest, abs=0.015)


def test_image_size_scales_the_shorter_side_and_crops_the_centre(pictures, tmp_path):
    root = pictures.as_folders(tmp_path)
    # 10x12 pixels: size 10 only crops one column on either side.
    images = arrays("insects", root, fit=Fit(10))[0][0]
    assert np.array_equal(images, pictures.images["train"][:, :, 1:11])
    PIL.Image.new("RGB", (50, 90), (1, 2, 3)).save(root / "train" / "ant" / "00001.png")
    images = arrays("insects", root, fit=Fit(5))[0][0]
    assert images.shape[1:] == (5, 5, 3) and (images[1] == (1, 2, 3)).all()


@pytest.mark.parametrize("in_memory", [None, False])
def test_damaged_images_are_skipped_or_named(pictures, tmp_path, own_cache, caplog, monkeypatch, in_memory) -> None:
    root = laid_out(pictures, tmp_path / "data", "flat")
    complete = (root / "bee").glob("*.png")
    truncated = next(complete)
    truncated.write_bytes(truncated.read_bytes()[:60])
    (root / "ant" / "empty.jpg").touch()
    (root / "cat" / "lost.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(UserError, match=r"cannot read the image .*empty\.jpg .* data\.on_error=skip\.$"):
        list(opened(root, in_memory=in_memory).train_dataloader())
    data = opened(root, on_error="skip", in_memory=in_memory)
    assert sum(numbers(data)) == 39 and sum(len(y) for _, y in data.train_dataloader()) == data.num_train
    (record,) = caplog.records
    sentence = f"skipped 3 of 42 images in {root} that cannot be read, the first one {root}/ant/empty.jpg"
    assert sentence in record.message
    # The list of damaged images is cached; a changed file is read again.
    decoded = []
    plain = EncodedImages._plain
    monkeypatch.setattr(EncodedImages, "_plain", lambda *args: decoded.append(args[1]) or plain(*args))
    assert sum(numbers(opened(root, on_error="skip", in_memory=False))) == 39
    assert not decoded
    truncated.write_bytes(next(complete).read_bytes())
    assert sum(numbers(opened(root, on_error="skip", in_memory=False))) == 40 and len(decoded) == 40


# Errors.


def test_a_failed_download_is_one_line(tmp_path, monkeypatch, capsys, caplog):
    caplog.set_level(logging.INFO)

    def refuse(*args, **kwargs):
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    for name in ("cifar10", "mnist"):
        with pytest.raises(UserError, match=r"could not download it \(.+\);.*data\.root="):
            open_images(name, tmp_path / "nowhere")
    assert capsys.readouterr().out == "" and not caplog.records


def test_nothing_is_downloaded_into_a_folder_of_other_files(tmp_path):
    (tmp_path / "letters.txt").write_text("dear")
    with pytest.raises(UserError, match="found no cifar10 data"):
        open_images("cifar10", tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["letters.txt"]


def test_an_unreadable_class_folder_is_an_error(pictures, tmp_path, make_unreadable) -> None:
    root = pictures.as_folders(tmp_path / "data")
    make_unreadable(root / "train" / "ant")
    with pytest.raises(PermissionError):
        opened(root)


def refused(sentence: str, root: Path, **settings) -> None:
    with pytest.raises(UserError, match=sentence) as raised:
        opened(root, name="cifar10", download=False, **{"test_fraction": None, **settings})
    assert "\n" not in str(raised.value) and str(raised.value).endswith(".")


def test_unusable_folders_are_refused(pictures, tmp_path):
    root = pictures.as_folders(tmp_path / "data")
    refused(r"found no cifar10 data in .*train/<class>.*cifar-10-batches-py", tmp_path / "nowhere")
    refused("found no cifar10 data in .*: searched for .*<class>/", root / "test" / "ant")
    refused("leaves nothing to train or to test on", root / "test", test_fraction=0.01)
    (root / "test" / "wasp").mkdir()
    shutil.copy(root / "test" / "ant" / "00000.png", root / "test" / "wasp")
    refused("wasp has images .* classes are ant, bee, cat, dog", root)
    shutil.rmtree(root / "test")
    refused("leaves nothing to train or to test on", root)
    PIL.Image.new("RGB", (50, 90)).save(root / "train" / "bee" / "other.png")
    refused(r"other\.png has 50x90 .* data\.image_size=N", root, test_fraction=0.1)
    shutil.copytree(root / "train" / "ant", root / "train" / "Test" / "ant")
    refused(r"has Test/ among class folders: is it a class or a part\?", root / "train", test_fraction=0.1)
    shutil.rmtree(root / "train" / "Test")
    shutil.copytree(root / "train" / "ant", tmp_path / "alone" / "train" / "ant")
    refused("all training images are of one class, 'ant'", tmp_path / "alone", test_fraction=0.5, validation="none")


def test_unusable_parquet_files_are_refused(pictures, tmp_path):
    root = pictures.as_parquet(tmp_path / "data")
    train, test, table = root / "train.parquet", root / "test.parquet", pq.read_table(root / "train.parquet")
    for number, name, values, sentence in (
        (0, "photo", [b""] * 40, "columns photo, label"),
        (1, "label", [None, *[0] * 39], "without a label"),
        (1, "label", [-1] * 40, "run from -1 to 3"),
        (0, "img", ["1.png"] * 40, r"cannot read the image in row 0 of .*train\.parquet \(.*not 'str'\)"),
    ):
        pq.write_table(table.set_column(number, name, pa.array(values)), train)
        refused(sentence, root)
    for path, names in ((train, list("abcd")), (test, list("bacd"))):
        about = {"huggingface": json.dumps({"info": {"features": {"label": {"names": names}}}})}
        pq.write_table(table.replace_schema_metadata(about), path)
    refused("has other class names than", root)
    pq.write_table(table.set_column(1, "label", pa.array([0] * 40)), train)
    pq.write_table(table.set_column(1, "label", pa.array([0] * 40)), test)
    refused("all training images are of one class, '0'", root)
    train.write_bytes(train.read_bytes()[:500])
    refused(r"cannot read .*train\.parquet as Parquet", root)
    sharded = pictures.as_parquet(tmp_path / "sharded", "{0}/{0}-SHARD.parquet".format, shards=3)
    (sharded / "train" / "train-00001-of-00003.parquet").unlink()
    refused("has only 2 of 3 files of train", sharded)
    for name in ("a", "b"):
        pictures.as_parquet(tmp_path / "several" / name)
    refused("several folders", tmp_path / "several")

"""Images in class folders: which part is what, and what becomes of files that are damaged."""

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from growlab.base.errors import UserError
from growlab.lab.data import ImageData

USUAL = {"validation": "split", "batch_size": 8, "mean": [0.5] * 3, "std": [0.5] * 3}


def _opened(root: Path, **arguments) -> ImageData:
    data = ImageData("folder", str(root), **{**USUAL, "test_fraction": 0.1, **arguments})
    data.setup()
    return data


def _numbers(data: ImageData) -> tuple[int, int, int]:
    return data.num_train, data.num_val, data.num_test


def _laid_out(pictures, root: Path, layout: str) -> Path:
    """40 + 12 pictures: below root itself, with train/ alone, with test/ or val/, with both."""
    pictures.as_folders(root)
    if layout == "flat":
        shutil.rmtree(root / "test")
        for folder in (root / "train").iterdir():
            folder.rename(root / folder.name)
        (root / "train").rmdir()
        (root / "an_empty_folder").mkdir()
    elif layout == "train":
        shutil.rmtree(root / "test")
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
    ],
)
def test_every_layout_has_its_parts(pictures, tmp_path, layout, validation, expected) -> None:
    root = _laid_out(pictures, tmp_path / "data", layout)
    data = _opened(root, validation=validation)
    assert _numbers(data) == expected and data.num_classes == 4 and data.image_shape == (3, 10, 12)
    seen = [y.tolist() for loader in (data.train_dataloader(), data.test_dataloader()) for _, y in loader]
    assert sum(map(len, seen)) == expected[0] + expected[2]
    # What is held out is of each class alike, and the same every time.
    assert [(y == c).sum().item() for c in range(4) for _, y in data.test_dataloader()] == [
        expected[2] // 4
    ] * 4
    again, other = _opened(root, validation=validation), _opened(root, validation=validation, split_seed=1)
    tests = [next(iter(d.test_dataloader()))[0] for d in (data, again, other)]
    assert tests[0].equal(tests[1]) and tests[0].equal(tests[2]) == (expected[2] == 12)


@pytest.mark.parametrize("in_memory", [None, False])
def test_damaged_images_are_left_out_or_named(
    pictures, tmp_path, own_cache, caplog, monkeypatch, in_memory
) -> None:
    root = _laid_out(pictures, tmp_path / "data", "flat")
    whole = (root / "bee").glob("*.png")
    truncated = next(whole)
    truncated.write_bytes(truncated.read_bytes()[:60])
    (root / "ant" / "empty.jpg").touch()
    (root / "cat" / "lost.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(UserError, match=r"cannot read the image .*empty\.jpg .* data\.on_error=skip\.$"):
        list(_opened(root, in_memory=in_memory).train_dataloader())
    data = _opened(root, on_error="skip", in_memory=in_memory)
    assert sum(_numbers(data)) == 39 and sum(len(y) for _, y in data.train_dataloader()) == data.num_train
    (record,) = caplog.records
    assert (
        f"left out: 3 of 42 images in {root} cannot be read, the first one {root}/ant/empty.jpg"
        in record.message
    )
    # The second time nothing is decoded for it, until a file changes.
    monkeypatch.setattr("growlab.lab.data.image_sets.EncodedImages.is_readable", None)
    assert sum(_numbers(_opened(root, on_error="skip"))) == 39
    truncated.write_bytes(next(whole).read_bytes())
    with pytest.raises(TypeError):
        _opened(root, on_error="skip")


def test_what_is_no_such_folder_is_a_sentence(pictures, tmp_path) -> None:
    (tmp_path / "file.png").touch()
    root = pictures.as_folders(tmp_path / "data")
    for path in (root / "train").rglob("*.png"):
        path.write_bytes(b"no image")
    for arguments, said in (
        ({"root": tmp_path / "nowhere"}, "found no folder data in"),
        ({"root": tmp_path / "file.png"}, "is a file; point data.root"),
        ({"root": root / "test" / "ant"}, "holds no folder data that growlab knows: looked for .*<class>/"),
        ({"root": root / "train", "on_error": "skip"}, "40 of 40 images .* too many for data.on_error=skip"),
        ({"root": root / "test", "test_fraction": 0.01}, "leaves nothing to train or to test on"),
        ({"root": root, "test_fraction": 1.0}, "must lie between 0 and 1"),
        ({"root": root, "on_error": "ignore"}, "data.on_error=ignore is unknown; choose one of raise, skip"),
    ):
        with pytest.raises(UserError, match=said):
            _opened(**arguments)


@pytest.mark.parametrize(
    "names", [("Training", "Testing"), ("TRAIN", "Test"), ("training", "Validation"), ("Train", "VAL")]
)
def test_parts_are_found_whatever_their_names_case(pictures, tmp_path, names) -> None:
    root = pictures.as_folders(tmp_path / "data")
    for old, new in zip(("train", "test"), names, strict=True):
        (root / old).rename(root / f"{old}_aside")
        (root / f"{old}_aside").rename(root / new)
    data = _opened(root)
    assert _numbers(data) == (36, 4, 12) and data.num_classes == 4


def test_a_part_beside_class_folders_is_no_class(pictures, tmp_path) -> None:
    root = _laid_out(pictures, tmp_path / "data", "flat")
    shutil.copytree(root / "ant", root / "Test" / "ant")
    with pytest.raises(UserError, match=r"holds Test/ among class folders: is it a class or a part\?"):
        _opened(root)


def test_of_two_spellings_the_plain_one_counts(pictures, tmp_path) -> None:
    root = pictures.as_folders(tmp_path / "data")
    (root / "TEST" / "ant").mkdir(parents=True)
    if (root / "test" / "ant" / "..").resolve().samefile(root / "TEST"):
        pytest.skip("names differ by more than case here")
    assert _numbers(_opened(root)) == (36, 4, 12)


def test_a_class_folder_that_may_not_be_read_is_no_empty_one(
    pictures, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its class would be missing without a word; the user who runs the tests may read everything."""
    root = pictures.as_folders(tmp_path / "data")
    closed, listed = str(sorted((root / "train").iterdir())[0]), os.scandir

    def scandir(path):
        if str(path) == closed:
            raise PermissionError(errno.EACCES, "Permission denied", closed)
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UserError, match=f"cannot read {closed}: Permission denied"):
        _opened(root)


RAMP = np.arange(120).reshape(10, 12) / 119


@pytest.mark.parametrize(
    ("pixels", "ending", "least", "largest"),
    [
        ((RAMP * 65535).astype(np.uint16), "png", 0, 1),
        ((RAMP * 65535).astype(np.uint16), "tif", 0, 1),
        # 12 bits of a microscope, of which the brightest pixel uses most.
        ((RAMP * 3000).astype(np.uint16), "png", 0, 3000 / 4095),
        ((RAMP * 200).astype(np.uint16), "png", 0, 200 / 255),
        ((RAMP * 4000 - 1000).astype(np.int32), "tif", 0, 1),
        (RAMP.astype(np.float32), "tif", 0, 1),
        ((RAMP * 0.5).astype(np.float32), "tif", 0, 0.5),
        ((RAMP * 255).astype(np.float32), "tif", 0, 1),
        ((RAMP * 2000 - 1000).astype(np.float32), "tif", 0, 1),
        (np.where(RAMP > 0.99, np.nan, RAMP).astype(np.float32), "tif", 0, 0.99),
    ],
)
def test_images_of_more_than_eight_bits_are_scaled(
    tmp_path, own_cache, pixels, ending, least, largest
) -> None:
    for name in ("ant", "bee"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(10):
            PIL.Image.fromarray(pixels).save(tmp_path / "data" / name / f"{number}.{ending}")
    for on_error in ("raise", "skip"):
        data = _opened(tmp_path / "data", mean=[0.0], std=[1.0], on_error=on_error)
        assert data.image_shape == (1, 10, 12)
        x = next(iter(data.test_dataloader()))[0]
        assert x.min() == pytest.approx(least, abs=0.01) and x.max() == pytest.approx(largest, abs=0.015)


@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB", "I;16", "I", "F"]
)
def test_images_of_every_kind_are_read_or_left_out(tmp_path, own_cache, mode) -> None:
    grey = PIL.Image.fromarray((RAMP * 255).astype(np.uint8))
    image = grey if mode in ("I;16", "I", "F") else grey.convert("RGB")
    endings = {"CMYK": "tif", "YCbCr": "tif", "LAB": "tif", "I": "tif", "F": "tif", "I;16": "tif"}
    try:
        image = (
            PIL.Image.fromarray(np.asarray(grey).astype(np.uint16)) if mode == "I;16" else image.convert(mode)
        )
    except ValueError:
        image = PIL.Image.new(mode, (12, 10))
    for name in ("ant", "bee"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(10):
            path = tmp_path / "data" / name / f"{number}.{endings.get(mode, 'png')}"
            (grey if number else image if mode not in ("PA", "HSV") else image.convert("RGBA")).save(path)
    data = _opened(tmp_path / "data", on_error="skip", mean=None, std=None)
    assert sum(len(y) for _, y in data.train_dataloader()) == data.num_train >= 14

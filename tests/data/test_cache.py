import logging
import os

import numpy as np
import pytest
import torch

from growlab.lab.data.cache import decoded
from growlab.lab.data.image_sets import EncodedImages
from growlab.lab.data.sources import open_images


@pytest.fixture
def root(many_pictures, tmp_path):
    return many_pictures.as_parquet(tmp_path / "data")


@pytest.fixture
def decodings(monkeypatch):
    """How many images have been decoded."""
    counts = {"images": 0}
    decode = EncodedImages._decode

    def counted(self, *args):
        counts["images"] += 1
        return decode(self, *args)

    monkeypatch.setattr(EncodedImages, "_decode", counted)
    return counts


def _train(root):
    return decoded(open_images("insects", root)["train"])


def _archives(cache):
    return list(cache.rglob("*.npz"))


def test_the_second_run_decodes_nothing(root, many_pictures, own_cache, decodings):
    first = _train(root)
    assert decodings["images"] == len(first) == 2400 and len(_archives(own_cache)) == 1
    second = _train(root)
    assert decodings["images"] == 2400
    assert np.array_equal(first.images_NHWC, many_pictures.images["train"])
    assert torch.equal(first.images_NHWC, second.images_NHWC) and torch.equal(first.labels_N, second.labels_N)


def test_selections_come_from_the_cache_of_the_whole(root, many_pictures, decodings):
    _train(root)
    positions = np.array([7, 3, 2399])
    few = decoded(open_images("insects", root)["train"].select(positions))
    assert decodings["images"] == 2400
    assert np.array_equal(few.images_NHWC, many_pictures.images["train"][positions])
    assert np.array_equal(few.labels, many_pictures.labels["train"][positions])


def test_a_few_images_are_decoded_alone(root, many_pictures, own_cache, decodings):
    positions = np.arange(0, 2400, 100)
    few = decoded(open_images("insects", root)["train"].select(positions))
    assert decodings["images"] == 24 and not _archives(own_cache)
    assert np.array_equal(few.images_NHWC, many_pictures.images["train"][positions])


@pytest.mark.parametrize("damage", ["torn", "foreign", "bit", "shape", "empty"])
def test_a_damaged_cache_is_ignored_and_replaced(root, many_pictures, own_cache, decodings, damage, caplog):
    _train(root)
    (archive,) = _archives(own_cache)
    content = bytearray(archive.read_bytes())
    if damage == "torn":
        archive.write_bytes(content[: len(content) // 2])
    elif damage == "foreign":
        archive.write_text("something else")
    elif damage == "bit":
        content[len(content) // 2] ^= 1
        archive.write_bytes(content)
    elif damage == "shape":
        np.savez(archive, images=np.zeros((3, 4, 6, 3), dtype=np.uint8))
    else:
        archive.write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        again = _train(root)
    assert np.array_equal(again.images_NHWC, many_pictures.images["train"])
    assert decodings["images"] == 4800 and "ignoring" in caplog.text
    _train(root)
    assert decodings["images"] == 4800


def test_changed_files_are_decoded_anew(root, many_pictures, decodings):
    _train(root)
    os.utime(root / "train.parquet", ns=(0, 0))
    _train(root)
    assert decodings["images"] == 4800


def test_a_cache_that_cannot_be_written_costs_time_not_the_run(
    root, many_pictures, tmp_path, monkeypatch, caplog
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        train = _train(root)
    assert np.array_equal(train.images_NHWC, many_pictures.images["train"])
    assert "not kept" in caplog.text


def test_folders_are_cached_too(many_pictures, tmp_path, decodings):
    root = many_pictures.as_folders(tmp_path / "folders")
    first, second = _train(root), _train(root)
    assert decodings["images"] == 2400
    assert np.array_equal(first.images_NHWC, many_pictures.images["train"])
    assert torch.equal(first.images_NHWC, second.images_NHWC)

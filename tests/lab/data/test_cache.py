"""Cache of decoded images."""

import logging
import os

import numpy as np
import pytest

from growlab.lab.data import images
from growlab.lab.data.image_files import open_images


@pytest.fixture(params=["as_parquet", "as_folders"])
def root(request, pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(images, "_WORTH_CACHING", 40)
    return getattr(pictures, request.param)(tmp_path / "data")


@pytest.fixture
def decodings(monkeypatch):
    """Count the decoded images."""
    counts = {"images": 0}
    plain = images.EncodedImages._plain

    def counted(self, *args):
        counts["images"] += 1
        return plain(self, *args)

    monkeypatch.setattr(images.EncodedImages, "_plain", counted)
    return counts


def _train(root, positions=None):
    train = open_images("insects", root)["train"]
    return (train if positions is None else train.select(np.array(positions))).decoded()


def test_a_second_run_decodes_nothing_until_a_file_changes(root, pictures, own_cache, decodings):
    # Only the selected images are decoded.
    few = _train(root, [3, 7])
    assert decodings["images"] == 2 and not list(own_cache.rglob("*.npy"))
    for _ in range(2):
        train = _train(root)
        assert decodings["images"] == 42 and len(list(own_cache.rglob("*.npy"))) == 1
        assert np.array_equal(train.images_NHWC, pictures.images["train"])
        assert np.array_equal(train.labels, pictures.labels["train"])
    again = _train(root, [3, 7])
    assert decodings["images"] == 42
    for part in (few, again):
        assert np.array_equal(part.images_NHWC, pictures.images["train"][[3, 7]])
        assert np.array_equal(part.labels, pictures.labels["train"][[3, 7]])
    changed = [path for path in sorted(root.rglob("*")) if path.is_file() and "train" in str(path)]
    os.utime(changed[-1], ns=(0, 0))
    _train(root)
    assert decodings["images"] == 82


def test_a_damaged_or_unwritable_cache_does_not_fail_the_run(root, pictures, own_cache, tmp_path, monkeypatch, caplog):
    _train(root)
    (archive,) = own_cache.rglob("*.npy")
    archive.write_bytes(archive.read_bytes()[:300])
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        assert np.array_equal(_train(root).images_NHWC, pictures.images["train"])
        assert "ignoring the unreadable cache" in caplog.text
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        assert np.array_equal(_train(root).images_NHWC, pictures.images["train"])
    assert "cannot cache" in caplog.text

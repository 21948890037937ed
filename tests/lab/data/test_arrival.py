"""Subsets of images: splits, class-balanced limits, and data that change or arrive during training."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from growlab.base.errors import UserError
from growlab.lab.data import ImageData, Incremental
from growlab.lab.data.arrival import Arrival, first_balanced, positions_of, stratified_split
from tests.lab.data.conftest import placed

LABELS = st.lists(st.integers(0, 5), min_size=1, max_size=120).map(np.array)
# Stages of 2, 1 and 2 epochs.
STARTS, EPOCHS = (0, 2, 3), 5


def opened(**settings) -> ImageData:
    data = ImageData("digits", **settings)
    data.setup()
    data.follow_stages(STARTS, EPOCHS, EPOCHS)
    return data


def labels_in(loader) -> list[int]:
    return torch.cat([y for _, y in loader]).tolist()


@given(LABELS, st.floats(0.01, 0.99), st.integers())
def test_split_is_disjoint_complete_and_stratified(labels, fraction, seed):
    first, second = stratified_split(labels, fraction, seed)
    assert np.array_equal(np.sort(np.concatenate([first, second])), np.arange(len(labels)))
    assert np.array_equal(first, np.sort(first)) and np.array_equal(second, np.sort(second))
    assert len(second) == round(fraction * len(labels))
    for label in np.unique(labels):
        assert abs((labels[second] == label).sum() - fraction * (labels == label).sum()) < 1 + 1e-9


@given(LABELS, st.integers(1, 150))
def test_first_balanced_takes_the_first_images_of_each_class(labels, count):
    chosen = first_balanced(labels, count)
    assert np.array_equal(chosen, np.unique(chosen)) and len(chosen) == min(count, len(labels))
    taken = {label: np.flatnonzero(labels == label) for label in np.unique(labels)}
    counts = {label: np.isin(where, chosen).sum() for label, where in taken.items()}
    most = max(counts.values())
    for label, where in taken.items():
        assert np.isin(where[: counts[label]], chosen).all()
        # Class counts differ by at most one, unless a class is used up.
        assert counts[label] >= most - 1 or counts[label] == len(where)


def test_classes_by_epoch() -> None:
    schedule = Arrival({0: [1, 0], 5: [2], 3: [0, 1, 2]})
    assert [schedule.key(epoch, 1) for epoch in (0, 2, 3, 4, 5, 99)] == [
        *((0, 1), (0, 1), (0, 1, 2), (0, 1, 2), (2,), (2,))
    ]
    assert Arrival().key(3, 1) is None
    labels = np.array([0, 1, 2, 0, 1])
    assert positions_of(labels, [0, 2]).tolist() == [0, 2, 3]
    assert positions_of(labels, [1], 5).tolist() == [1, 4, 1, 4, 1]


def test_every_epoch_has_equally_many_images_of_its_classes_only() -> None:
    data = opened(batch_size=50, class_schedule={0: [3, 4], 2: [0, 1, 2]}, validation="test")
    for epoch, classes in ((0, {3, 4}), (1, {3, 4}), (2, {0, 1, 2})):
        seen = labels_in(placed(data, epoch).train_dataloader())
        assert len(seen) == data.num_train and set(seen) == classes
        for loader in (data.val_dataloader(), data.test_dataloader()):
            assert set(labels := labels_in(loader)) == classes and len(labels) < data.num_test


def test_arrival_is_as_in_the_paper() -> None:
    by_class, by_image = Incremental("classes"), Incremental("images")
    assert by_class.num_classes(100, 9) == [20, 30, 40, 50, 60, 70, 80, 90, 100]
    assert [float(share) for share in by_image.shares(9)] == pytest.approx([0.2 + 0.1 * s for s in range(9)])
    assert sorted(by_class.order(100)) == list(range(100)) != by_class.order(100)
    assert by_class.order(100) != Incremental("classes", seed=1).order(100)
    # A single stage has all data.
    assert by_class.num_classes(10, 1) == [10] and by_image.shares(1) == [1]


@pytest.mark.parametrize("incremental", [Incremental("images"), Incremental("images", replacement=False)])
def test_each_stage_includes_the_images_of_the_previous_one(incremental: Incremental) -> None:
    labels = np.repeat(np.arange(10), 50)
    parts = [incremental.positions("train", labels, 10, stage, 5) for stage in range(5)]
    assert [len(part) for part in parts] == [100, 200, 300, 400, 500]
    assert all(set(before) <= set(after) for before, after in pairwise(parts))
    distinct = len(set(parts[-1].tolist()))
    assert (0.55 < distinct / 500 < 0.72) if incremental.replacement else distinct == 500
    # Held-out images do not arrive in stages.
    assert len(incremental.positions("val", labels, 10, 0, 5)) == 500


def test_no_batch_is_a_single_image() -> None:
    """289 images are four batches of 72 and a single image, which is left for the next stage."""
    data = opened(batch_size=72, incremental=Incremental("images", 289 / 1438, replacement=False))
    sizes = [len(y) for _, y in data.train_dataloader()]
    assert sizes == [72] * 4 == data.samples_in_batches(0, 72)
    # Other batch sizes leave no such remainder.
    assert data.samples_in_batches(0, 100) == [100, 100, 89] and data.num_train_at(4) == data.num_train


def test_classes_appear_with_the_stages() -> None:
    arriving = Incremental("classes", 0.4)
    data = opened(batch_size=50, limit_train=400, validation="test", incremental=arriving)
    order = arriving.order(10)
    for epoch, count in enumerate([4, 4, 7, 10, 10]):
        seen = labels_in(placed(data, epoch).train_dataloader())
        assert set(seen) == set(order[:count])
        # Each image once, so epochs get longer.
        assert len(seen) == data.num_train_at(epoch) == 40 * count
        assert len(data.train_dataloader()) == -(-40 * count // 50)
        assert set(labels_in(data.val_dataloader())) == set(order[:count])
    # A run of another length has the same subsets.
    data.follow_stages(STARTS, EPOCHS, 10)
    assert [data.num_train_at(epoch) // 40 for epoch in range(10)] == [4, 4, 4, 4, 7, 7, 10, 10, 10, 10]


def test_data_of_an_earlier_stage_can_be_loaded_again() -> None:
    data = opened(batch_size=30, limit_train=300, shift=1, incremental=Incremental("images", 0.5))
    now = labels_in(placed(data, 2).train_dataloader())
    old, again, other = (list(data.training_loader(1, draw)) for draw in (7, 7, 8))
    assert sum(len(y) for _, y in old) == data.num_train_at(1) < len(now)
    assert all(torch.equal(x, x2) and torch.equal(y, y2) for (x, y), (x2, y2) in zip(old, again, strict=True))
    assert not all(torch.equal(y, y2) for (_, y), (_, y2) in zip(old, other, strict=True))
    assert labels_in(data.train_dataloader()) == now


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Incremental(start=0.0), "start must be above 0"),
        (lambda: Incremental(start=1.5), "at most 1, not 1.5"),
        (lambda: opened(class_schedule={1: [0]}), "from epoch 0 on"),
        (lambda: opened(class_schedule={0: []}), "from epoch 0 on"),
        (lambda: opened(class_schedule={0: [0, 10]}), r"\[10\]; this data has 0 to 9"),
        (lambda: ImageData("digits", incremental=Incremental(), class_schedule={0: [1]}), "set one"),
    ],
)
def test_invalid_schedules_are_refused(make, sentence: str) -> None:
    with pytest.raises((UserError, ValueError), match=sentence):
        make()

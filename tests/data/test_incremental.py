"""Data that arrives with the stages of a run."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from growlab.base.errors import UserError
from growlab.lab.data import ImageData, Incremental

# Stages of 2, 1 and 2 epochs.
STARTS, EPOCHS = (0, 2, 3), 5


def labels_in(data: ImageData, epoch: int) -> list[int]:
    data.trainer = SimpleNamespace(
        current_epoch=epoch, global_rank=0, world_size=1, strategy=SimpleNamespace(root_device="cpu")
    )
    return torch.cat([y for _, y in data.train_dataloader()]).tolist()


def test_the_papers_classes_and_images() -> None:
    by_class, by_image = Incremental("classes"), Incremental("images")
    assert by_class.num_classes(100, 9) == [20, 30, 40, 50, 60, 70, 80, 90, 100]
    assert [float(share) for share in by_image.shares(9)] == pytest.approx([0.2 + 0.1 * s for s in range(9)])
    assert sorted(by_class.order(100)) == list(range(100)) != by_class.order(100)
    assert by_class.order(100) != Incremental("classes", seed=1).order(100)
    # One stage has everything.
    assert by_class.num_classes(10, 1) == [10] and by_image.shares(1) == [1]


@pytest.mark.parametrize("incremental", [Incremental("images"), Incremental("images", replacement=False)])
def test_parts_of_the_images_lie_in_each_other(incremental: Incremental) -> None:
    labels = np.repeat(np.arange(10), 50)
    parts = [incremental.positions("train", labels, 10, stage, 5) for stage in range(5)]
    assert [len(part) for part in parts] == [100, 200, 300, 400, 500]
    assert all(set(before) <= set(after) for before, after in pairwise(parts))
    distinct = len(set(parts[-1].tolist()))
    assert (0.55 < distinct / 500 < 0.72) if incremental.replacement else distinct == 500
    # All of them are validated and tested on.
    assert len(incremental.positions("val", labels, 10, 0, 5)) == 500


def test_no_batch_is_a_single_image() -> None:
    """A part of 289 images would be four batches of 72 and one more image, which waits."""
    data = ImageData(
        "digits", batch_size=72, incremental=Incremental("images", 289 / 1438, replacement=False)
    )
    data.setup()
    data.follow_stages(STARTS, EPOCHS, EPOCHS)
    sizes = [len(y) for _, y in data.train_dataloader()]
    assert sizes == [72] * 4 == data.samples_in_batches(0, 72)
    # With other batches there is no such rest.
    assert data.samples_in_batches(0, 100) == [100, 100, 89] and data.num_train_at(4) == data.num_train


def test_classes_appear_with_the_stages() -> None:
    data = ImageData(
        "digits", batch_size=50, limit_train=400, validation="test", incremental=Incremental("classes", 0.4)
    )
    data.setup()
    data.follow_stages(STARTS, EPOCHS, EPOCHS)
    order = data.incremental.order(10)
    for epoch, count in enumerate([4, 4, 7, 10, 10]):
        seen = labels_in(data, epoch)
        assert set(seen) == set(order[:count])
        # Each image once: epochs get longer.
        assert len(seen) == data.num_train_at(epoch) == 40 * count
        assert len(data.train_dataloader()) == -(-40 * count // 50)
        assert set(torch.cat([y for _, y in data.val_dataloader()]).tolist()) == set(order[:count])
    # A run of another length has the same parts.
    data.follow_stages(STARTS, EPOCHS, 10)
    assert [data.num_train_at(epoch) // 40 for epoch in range(10)] == [4, 4, 4, 4, 7, 7, 10, 10, 10, 10]


def test_old_images_can_be_gone_through_again() -> None:
    data = ImageData(
        "digits", batch_size=30, limit_train=300, shift=1, incremental=Incremental("images", 0.5)
    )
    data.setup()
    data.follow_stages(STARTS, EPOCHS, EPOCHS)
    now = labels_in(data, 2)
    old = list(data.training_loader(1, 7))
    again = list(data.training_loader(1, 7))
    other = list(data.training_loader(1, 8))
    assert sum(len(y) for _, y in old) == data.num_train_at(1) < len(now)
    assert all(torch.equal(x, x2) and torch.equal(y, y2) for (x, y), (x2, y2) in zip(old, again, strict=True))
    assert not all(torch.equal(y, y2) for (_, y), (_, y2) in zip(old, other, strict=True))
    assert labels_in(data, 2) == now


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"mode": "pixels"}, "classes or images, not pixels"),
        ({"start": 0.0}, "start=0.0 must lie above 0"),
        ({"start": 1.5}, "start=1.5 must lie above 0"),
    ],
)
def test_wrong_settings_are_told(settings: dict, told: str) -> None:
    with pytest.raises(UserError, match=told):
        Incremental(**settings)


def test_two_kinds_of_change_do_not_go_together() -> None:
    with pytest.raises(UserError, match="set one"):
        ImageData("digits", incremental=Incremental(), class_schedule={0: [1]})

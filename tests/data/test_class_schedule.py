"""Tasks that change while a network trains, and inputs standardised one by one."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from growlab.base.errors import UserError
from growlab.lab.data import ImageData
from growlab.lab.data.arrival import Arrival, positions_of


def test_classes_by_epoch() -> None:
    schedule = Arrival({0: [1, 0], 5: [2], 3: [0, 1, 2]})
    assert [schedule.classes_at(epoch) for epoch in (0, 2, 3, 4, 5, 99)] == [
        *((0, 1), (0, 1), (0, 1, 2), (0, 1, 2), (2,), (2,))
    ]
    assert Arrival().classes_at(3) is None
    labels = np.array([0, 1, 2, 0, 1])
    assert positions_of(labels, [0, 2]).tolist() == [0, 2, 3]
    assert positions_of(labels, [1], 5).tolist() == [1, 4, 1, 4, 1]


def test_every_epoch_has_as_many_images_of_its_classes_alone() -> None:
    data = ImageData("digits", batch_size=50, class_schedule={0: [3, 4], 2: [0, 1, 2]}, validation="test")
    data.setup()
    for epoch, classes in ((0, {3, 4}), (1, {3, 4}), (2, {0, 1, 2})):
        data.trainer = SimpleNamespace(
            current_epoch=epoch, global_rank=0, world_size=1, strategy=SimpleNamespace(root_device="cpu")
        )
        batches = list(data.train_dataloader())
        assert sum(len(y) for _, y in batches) == data.num_train
        assert set(torch.cat([y for _, y in batches]).tolist()) == classes
        for loader in (data.val_dataloader(), data.test_dataloader()):
            labels = torch.cat([y for _, y in loader])
            assert set(labels.tolist()) == classes and len(labels) < data.num_test


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        ({1: [0]}, "from epoch 0 on"),
        ({0: []}, "from epoch 0 on"),
        ({0: [0, 10]}, r"\[10\]; this data has 0 to 9"),
    ],
)
def test_a_wrong_schedule_is_told(schedule: dict, told: str) -> None:
    with pytest.raises(UserError, match=told):
        ImageData("digits", class_schedule=schedule).setup()


def test_every_input_is_standardised_by_itself() -> None:
    data = ImageData("digits", standardise="feature", batch_size=2000, limit_train=400)
    data.setup()
    x = torch.cat([x for x, _ in data.train_dataloader()]).flatten(1).double()
    constant = x.std(0) == 0
    assert 0 < constant.sum() < 20 and torch.equal(x[:, constant], torch.zeros_like(x[:, constant]))
    assert torch.allclose(x.mean(0), torch.zeros(64).double(), atol=1e-5)
    assert torch.allclose(x[:, ~constant].std(0, correction=0), torch.ones(1).double(), atol=1e-5)
    with pytest.raises(UserError, match=r"data\.standardise=\w+ is unknown; choose one of channel, feature"):
        ImageData("digits", standardise="pixel")

"""A user's data: splits, inferred arguments, and batches that depend only on seed and epoch."""

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from growlab.base.errors import UserError
from growlab.lab.data import Columns, CustomData, Split
from tests.lab.data.conftest import placed
from tests.own_data import Discs, Endless, Images, Odd, Waves, drawn, loaders


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Avoid torch's warning about loaders with two processes on a single core."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})


def opened(source: Any, **arguments: Any) -> CustomData:
    data = CustomData(source, **arguments)
    data.setup()
    return data


def classes(num: int = 100) -> TensorDataset:
    """Samples with ten features, half of them in one of four classes."""
    return TensorDataset(drawn(num, 10), torch.arange(num) % 2 * (1 + torch.arange(num) % 3))


class Named(Dataset):
    """Data set with the given attributes; without them its classes are found by reading."""

    def __init__(self, **known: Any) -> None:
        vars(self).update(known)

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(2, 4, 4), index % 3


def test_splits_are_stratified_and_independent_of_the_runs_seed() -> None:
    data, other = opened(classes(), split=Split(0.2, 0.1)), opened(classes(), split=Split(0.2, 0.1), seed=5)
    assert (data.num_train, data.num_val, data.num_test) == (70, 20, 10)
    for part, count in (("train", 35), ("val", 10), ("test", 5)):
        positions = data._parts[part].positions
        assert (positions % 2 == 0).sum() == count and np.array_equal(positions, other._parts[part].positions)
    everything = np.concatenate([part.positions for part in data._parts.values()])
    assert sorted(everything) == list(range(100))
    assert not np.array_equal(
        opened(classes(), split=Split(0.2, 0.1, 1))._parts["val"].positions, data._parts["val"].positions
    )


def test_parts_of_the_source_are_not_split_again() -> None:
    source = {"train": Waves(50), "validation": Waves(7), "test": DataLoader(Waves(9), batch_size=4)}
    data = opened(source)
    assert (data.num_train, data.num_val, data.num_test) == (50, 7, 9)
    assert [len(y) for _, y in data.test_dataloader()] == [3, 3, 3]
    assert opened(source, split=Split(validation=0)).num_val == 0
    # A LightningDataModule without validation.
    data = opened(Images())
    assert (data.num_train, data.num_val, data.num_test, data.batch_size) == (99, 11, 40, 15)


@pytest.mark.parametrize("make", [Waves, loaders, Images])
def test_ranks_and_workers_see_the_samples_of_one_process(make: Any) -> None:
    """With random transforms, which do not change the global generators."""
    alone, several = (opened(make(), batch_size=20, num_workers=0), opened(make(), batch_size=20, num_workers=2))
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    whole = list(placed(alone, epoch=3).train_dataloader())
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[2]
    assert np.array_equal(np.random.get_state()[1], states[1])
    by_workers = list(placed(several, epoch=3).train_dataloader())
    several.teardown()
    for (x, y), (own_x, own_y) in zip(whole, by_workers, strict=True):
        assert torch.equal(x, own_x) and torch.equal(y, own_y)
    assert [len(y) for _, y in whole] == several.samples_in_batches(3, 20)
    shares = [list(placed(alone, 3, rank, 2).train_dataloader()) for rank in range(2)]
    together = [torch.cat([a[1], b[1]]) for a, b in zip(*shares, strict=True)]
    assert all(torch.equal(y, both[: len(y)]) for (_, y), both in zip(whole, together, strict=True))
    if make is Waves:
        x = torch.cat([shares[0][0][0], shares[1][0][0]])
        assert torch.equal(x, whole[0][0]) and x.dtype == torch.float32
    other = next(iter(placed(alone, epoch=4).train_dataloader()))
    assert not torch.equal(other[1], whole[0][1])
    (first, *_) = placed(alone, epoch=3).training_batches(1)
    assert torch.equal(first[0], whole[0][0])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (classes(), {"num_classes": 4, "in_features": 10, "input_shape": [10], "image_shape": None}),
        (Subset(classes(), range(4, 90)), {"num_classes": 4}),
        (ConcatDataset([classes(), classes()]), {"num_classes": 4}),
        (Named(), {"num_classes": 3, "image_shape": [2, 4, 4], "in_channels": 2}),
        (Named(classes=["a", "b", "c", "d", "e"]), {"num_classes": 5}),
        (Named(targets=[i % 3 for i in range(30)]), {"num_classes": 3}),
        # The attribute does not match the samples, so these are read.
        (Named(targets=[7] * 30), {"num_classes": 3}),
        (Waves(), {"num_classes": 1, "out_features": 1, "width": None}),
        (TensorDataset(drawn(40, 3).half(), drawn(40, 6).bfloat16()), {"out_features": 6}),
        (TensorDataset(drawn(40, 3), (drawn(40, 5) > 0).int()), {"num_classes": 5}),
        (Discs(), {"num_classes": 2, "image_shape": [3, 12, 12]}),
    ],
)  # fmt: skip
def test_arguments_of_networks_are_inferred(source: Any, expected: dict[str, Any]) -> None:
    data = opened(source, columns=Columns(["image"]) if isinstance(source, Discs) else None)
    assert {name: data.offer(name) for name in expected} == expected
    # Floats are converted to float32.
    kinds = {tensor.dtype for tensor in next(iter(data.train_dataloader())) if tensor.is_floating_point()}
    assert kinds <= {torch.float32}


def test_many_samples_are_not_read_for_their_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("growlab.lab.data.user_data._MANY", 20)
    monkeypatch.setattr("growlab.lab.data.user_data._FEW", 20)
    data = opened(Named())
    with pytest.raises(UserError, match=r"reading all 24 samples: set \+data\.network\.num_classes=N\.$"):
        data.offer("num_classes")
    assert opened(Named(), network={"num_classes": 7}).network_arguments == {"num_classes": 7}


def test_class_255_counts_unless_it_marks_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("growlab.lab.data.user_data._FEW", 20)

    class Many(Named):
        def __len__(self) -> int:
            return 320

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.zeros(2), index % 256

    assert opened(Many()).offer("num_classes") == 256


@pytest.mark.parametrize(("settings", "batches"), [({"replacement": True}, 10), ({"num_samples": 30}, 3), ({}, 10)])
def test_random_samplers_keep_their_settings(settings: dict[str, Any], batches: int) -> None:
    train = TensorDataset(torch.arange(100.0)[:, None], torch.arange(100) % 2)
    loader = DataLoader(train, batch_size=10, sampler=RandomSampler(train, **settings))
    first, again = (list(opened({"train": loader, "test": train}, split=Split(0)).train_dataloader()) for _ in "ab")
    assert len(first) == batches
    x = torch.cat([x for x, _ in first]).flatten()
    assert torch.equal(x, torch.cat([x for x, _ in again]).flatten())
    assert (len(x.unique()) < len(x)) == ("replacement" in settings)


def test_samplers_may_split_a_data_set_that_loaders_share() -> None:
    shared = TensorDataset(torch.arange(100.0)[:, None], torch.arange(100) % 2)
    bounds = {"train": (0, 60), "val": (60, 80), "test": (80, 100)}
    loaders = {name: DataLoader(shared, 10, sampler=SubsetRandomSampler(range(*ends))) for name, ends in bounds.items()}
    data = opened(loaders)
    assert (data.num_train, data.num_val, data.num_test) == (60, 20, 20)
    read = {"train": data.train_dataloader(), "val": data.val_dataloader(), "test": data.test_dataloader()}
    for name, batches in read.items():
        assert sorted(torch.cat([x for x, _ in batches]).flatten().tolist()) == list(range(*bounds[name]))


class Unlimited(Sampler):
    """Sampler without a length."""

    def __iter__(self) -> Any:
        return iter(range(10))


def test_hugging_face_data_sets(tmp_path: Any) -> None:
    datasets = pytest.importorskip("datasets")
    import PIL.Image

    images = [PIL.Image.fromarray(np.full((4, 5, 3), i, dtype=np.uint8)) for i in range(40)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])})
    labels = [i % 2 for i in range(40)]
    whole = datasets.Dataset.from_dict({"image": images, "label": labels}, features=features)
    datasets.DatasetDict({"train": whole, "validation": whole.select(range(6))}).save_to_disk(str(tmp_path))
    data = opened(str(tmp_path), batch_size=8)
    assert (data.num_train, data.num_val, data.num_test) == (36, 6, 4)
    assert data.offer("num_classes") == 3 and data.offer("image_shape") == [3, 4, 5]
    x, y = next(iter(data.train_dataloader()))
    assert x.shape == (8, 3, 4, 5) and x.dtype == torch.float32 and y.dtype == torch.int64
    assert torch.equal((x[:, 0, 0, 0] * 255).round().long() % 2, y)
    assert (data._parts["test"].positions % 2).sum() == 2


@pytest.mark.parametrize(
    ("make", "settings", "sentence"),
    [
        (lambda: {"train": Waves(), "tset": Waves()}, {}, "data.source has the parts tset, but train, val"),
        (lambda: DataLoader(Endless()), {}, "train (Endless) is not a LightningDataModule, DataLoader, Dataset or"),
        (lambda: partial(Waves, 30), {}, "a function is called by its _target_, without _partial_"),
        (lambda: DataLoader(Waves(), batch_sampler=[[0, 1]]), {}, "has a custom batch sampler (list)"),
        (lambda: DataLoader(Waves(), sampler=Unlimited()), {}, "has a sampler (Unlimited) without __len__"),
        (lambda: {"train": classes(), "test": Odd("alone")}, {}, "or a mapping with a target, of tensors"),
        (
            lambda: {"train": classes(), "test": TensorDataset(drawn(9, 10), -torch.ones(9).long())},
            *({}, "all labels of test are negative"),
        ),
        (lambda: loaders()["train"], {}, "draws from all training samples, so none can be held out"),
        (lambda: str(__file__.rpartition("/")[0]), {}, "is no folder that datasets.save_to_disk wrote"),
        (lambda: 3, {}, "train (int) is not a LightningDataModule, DataLoader"),
        (lambda: Odd("alone"), {}, "or a mapping with a target, of tensors, not (Tensor)"),
        (lambda: Odd("words"), {}, "not (tuple, Tensor): let the data set's transform"),
        (lambda: Odd("objects"), {}, "samples do not fit into one batch (default_collate: batch must contain tensors"),
        (lambda: Odd("ragged"), {}, "let the data set's transform make tensors of one shape"),
        (lambda: Odd("unnamed"), {}, "samples have the entries a, b and no target; set data.columns.target"),
        (lambda: {"test": Waves()}, {}, "no part to train on"),
        (lambda: Odd("alone", 0), {}, "train (Odd) is empty"),
        (lambda: Split(0.3, 0.7), {}, "leave something to train on"),
        (Waves, {"split": Split(test=0.0)}, "too few to hold 0% out; give the source a test set"),
        (lambda: Waves(3), {}, "3 training samples are too few to hold 10% out"),
        (Discs, {}, "not (list, "),
        (Discs, {"columns": Columns(["picture"])}, "and no picture; set data.columns.inputs"),
    ],
)  # fmt: skip
def test_unusable_sources_are_refused(make: Any, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as raised:
        opened(make(), **settings)
    assert sentence in str(raised.value) and str(raised.value).endswith(".")

"""Image data in memory: batches are functions of (seed, epoch, rank), also in Lightning's trainer."""

import lightning
import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from growlab.base.errors import UserError
from growlab.lab.data import ImageData
from growlab.lab.data.loaders import EpochPlan, MemoryLoader, Steps, StreamLoader
from tests.lab.data.conftest import assert_equal_on_gpu, equal, placed, train_batches
from tests.lab.training.test_growth_callback import new_trainer

# Lightning 2.6 asks torch 2.15's pytree in a deprecated way whenever it collects loaders.
pytestmark = pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)`:FutureWarning")


def _digits(**kwargs) -> ImageData:
    data = ImageData(name="digits", **{"batch_size": 100, "shift": 1, "mirror": True, **kwargs})
    data.setup()
    return data


def test_sizes_and_shapes_of_batches(monkeypatch):
    data = _digits(validation="split", validation_fraction=0.25, limit_test=20)
    assert (data.num_classes, data.image_shape) == (10, (1, 8, 8))
    assert (data.num_train, data.num_val, data.num_test) == (1438 - 360, 360, 20)
    sizes = []
    for x, y in data.train_dataloader():
        assert x.dtype == torch.float32 and y.dtype == torch.int64
        assert x.shape == (len(y), 1, 8, 8) and x.is_contiguous(memory_format=torch.channels_last)
        sizes.append(len(y))
    assert sizes == [100] * 10 + [78] == data.samples_in_batches(0, 100) and len(data.train_dataloader()) == 11
    # Limits are balanced over classes.
    assert torch.cat([y for _, y in data.test_dataloader()]).bincount().tolist() == [2] * 10
    # The validation split is independent of the run's seed.
    seeds = ({"seed": 5}, {"split_seed": 5})
    a, b, c = (_digits(validation="split", validation_fraction=0.25, **one) for one in ({}, *seeds))
    held_out = [torch.cat([x.flatten(1) for x, _ in one.val_dataloader()]) for one in (a, b, c)]
    assert torch.equal(held_out[0], held_out[1]) and not torch.equal(held_out[0], held_out[2])
    few = _digits(limit_train=50)
    assert torch.cat([y for _, y in few.train_dataloader()]).bincount().tolist() == [5] * 10
    assert _digits(limit_train=10**9).num_train == 1438
    monkeypatch.setattr("growlab.lab.data.image_data.open_images", lambda *args: pytest.fail("read twice"))
    data.prepare_data()
    data.setup("test")


@pytest.mark.parametrize("validation", ["none", "split"])
def test_training_images_are_normalised_by_their_own_statistics(validation):
    plain = {"shift": 0, "mirror": False, "validation": validation}
    x = torch.cat([x for x, _ in _digits(**plain).train_dataloader()]).double()
    assert abs(x.mean()) < 1e-6 and abs(x.std(correction=0) - 1) < 1e-6
    fixed = _digits(mean=[0.0], std=[1.0], **plain)
    x = torch.cat([x for x, _ in fixed.train_dataloader()])
    assert (x.min(), x.max()) == (0, 1) and fixed.mean == [0.0]
    data = _digits(standardise="feature", batch_size=2000, limit_train=400, **plain)
    x = torch.cat([x for x, _ in data.train_dataloader()]).flatten(1).double()
    constant = x.std(0) == 0
    assert 0 < constant.sum() < 20 and torch.equal(x[:, constant], torch.zeros_like(x[:, constant]))
    assert torch.allclose(x.mean(0), torch.zeros(64).double(), atol=1e-5)
    assert torch.allclose(x[:, ~constant].std(0, correction=0), torch.ones(1).double(), atol=1e-5)


def test_augmentation_differs_between_epochs_and_not_in_evaluation():
    # With a single image, order does not matter.
    data = _digits(limit_train=1, limit_test=1, shift=3, validation="test")
    views = {tuple(train_batches(data, epoch)[0][0].flatten().tolist()) for epoch in range(20)}
    assert len(views) > 10
    assert equal(list(data.test_dataloader()), list(placed(data, 7).val_dataloader()))
    assert data.watched == "test" and data.num_val == 1
    assert _digits().val_dataloader() == [] and _digits(validation="split").watched == "val"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ({"shift": -1}, "shift must be at least 0"),
        ({"num_workers": -1}, "num_workers must be at least 0"),
        ({"validation": "split", "limit_train": 2}, "nothing to train or to validate on"),
        ({"mean": [0.1, 0.2, 0.3]}, "data.mean and data.std have 3 and 1 numbers, the images 1 channels"),
        ({"resize_size": 15, "image_size": 16}, "data.resize_size=15 must be at least data.image_size"),
    ],
)
def test_invalid_arguments_are_refused(arguments, sentence):
    with pytest.raises((UserError, ValueError), match=sentence):
        _digits(**arguments)


def test_batches_depend_only_on_seed_and_epoch():
    data = _digits()
    fourth = train_batches(data, epoch=4)
    torch.manual_seed(123)
    before = torch.get_rng_state()
    assert equal(fourth, train_batches(_digits(), epoch=4))
    assert torch.equal(torch.get_rng_state(), before)
    assert not equal(fourth, train_batches(data, epoch=5))
    assert not equal(fourth, train_batches(_digits(seed=1), epoch=4))
    # Each epoch has every image once, in another order.
    plain = _digits(shift=0, mirror=False)
    first, second = (torch.cat([x.flatten(1) for x, _ in train_batches(plain, epoch)]) for epoch in (0, 1))
    assert not torch.equal(first, second) and sorted(first.tolist()) == sorted(second.tolist())


def test_evaluation_over_ranks_counts_every_image_once():
    data = _digits(eval_batch_size=90)
    labels = []
    for rank in range(4):
        labels += [y for _, y in placed(data, rank=rank, world_size=4).test_dataloader()]
    assert sum(map(len, labels)) == data.num_test
    whole = torch.cat([y for _, y in placed(data).test_dataloader()])
    assert torch.equal(torch.cat(labels).sort().values, whole.sort().values)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_streamed_batches_equal_those_in_memory(pictures, tmp_path, num_workers):
    root = str(pictures.as_folders(tmp_path / "data"))
    options = dict(root=root, batch_size=16, eval_batch_size=5, shift=2, mirror=True, limit_train=30)
    kept = ImageData("insects", **options)
    streamed = ImageData("insects", **options, in_memory=False, num_workers=num_workers)
    kept.setup()
    streamed.setup()
    assert isinstance(kept.train_dataloader(), MemoryLoader)
    assert isinstance(streamed.train_dataloader(), StreamLoader)
    assert kept.mean == streamed.mean and kept.std == streamed.std
    before = torch.get_rng_state()
    assert equal(train_batches(kept, epoch=2), train_batches(streamed, epoch=2))
    assert equal(list(kept.test_dataloader()), list(streamed.test_dataloader()))
    assert torch.equal(torch.get_rng_state(), before)
    x = next(iter(streamed.train_dataloader()))[0]
    assert x.is_contiguous(memory_format=torch.channels_last)
    streamed.teardown()


def test_probe_batch_is_fixed_balanced_and_not_augmented():
    data = _digits(shift=3)
    probe = data.probe_batch(20)
    assert probe.shape == (20, 1, 8, 8) and probe.dtype == torch.float32
    assert torch.equal(probe, placed(data, epoch=5).probe_batch(20))
    plain = _digits(shift=0, mirror=False)
    of_image = {
        tuple(x.flatten().tolist()): int(y) for xs, ys in plain.train_dataloader() for x, y in zip(xs, ys, strict=True)
    }
    assert sorted(of_image[tuple(x.flatten().tolist())] for x in probe) == sorted(list(range(10)) * 2)
    assert _digits(limit_train=3).probe_batch(7).shape == (7, 1, 8, 8)


class _Recorder(lightning.LightningModule):
    """Trains a linear layer and records its batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 10)
        self.seen: dict[int, list[torch.Tensor]] = {}
        self.validated = 0

    def training_step(self, batch, _):
        x, y = batch
        self.seen.setdefault(self.current_epoch, []).append(x)
        return nn.functional.cross_entropy(self.layer(x.flatten(1)), y)

    def validation_step(self, batch, _):
        self.validated += len(batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(data: ImageData, **options) -> _Recorder:
    module = _Recorder()
    new_trainer(3, log_every_n_steps=1, **options).fit(module, data)
    return module


@pytest.mark.parametrize("validation", ["none", "split"])
def test_the_batch_size_in_lightnings_trainer_follows_the_epoch(validation):
    sizes = {0: 400, 1: 300, 2: 100}
    data = _digits(validation=validation)
    data.batch_size_at_epoch = sizes.get
    module = _fit(data)
    assert module.validated == 3 * data.num_val
    for epoch, batches in module.seen.items():
        assert len(batches[0]) == sizes[epoch] and sum(map(len, batches)) == data.num_train
        assert len(batches) == len(data.samples_in_batches(epoch, data.global_batch_size(epoch)))
        again = _digits(validation=validation, batch_size=sizes[epoch])
        expected = [x for x, _ in train_batches(again, epoch=epoch)]
        assert all(torch.equal(x, other) for x, other in zip(batches, expected, strict=True))


def test_a_kept_loader_gives_a_new_order_in_each_epoch():
    kept, reloaded = _fit(_digits(), reload_dataloaders_every_n_epochs=0), _fit(_digits())
    for epoch in range(3):
        pairs = zip(kept.seen[epoch], reloaded.seen[epoch], strict=True)
        assert all(torch.equal(x, other) for x, other in pairs)
    assert not torch.equal(kept.seen[0][0], kept.seen[1][0])


def test_epochs_in_steps_continue_the_passes_over_the_data() -> None:
    lengths, passes = [3, 5, 4], [EpochPlan(50, 16, 3, number).batches() for number in range(3)]
    plans = [EpochPlan(50, 16, 3, epoch, steps=Steps(lengths)) for epoch in range(3)]
    flat = [batch.tolist() for one in passes for batch in one]
    assert [batch.tolist() for plan in plans for batch in plan.batches()] == flat
    assert [len(plan) for plan in plans] == lengths
    assert [plans[1].pass_of(place) for place in range(5)] == [0, 1, 1, 1, 1]
    assert [plan.sizes for plan in plans] == [[len(batch) for batch in plan.batches()] for plan in plans]


@given(parts=st.integers(1, 15), batch_size=st.integers(90, 400))
def test_epochs_that_are_parts_of_a_pass_add_up_to_it(parts: int, batch_size: int) -> None:
    whole, divided = EpochPlan(1438, batch_size, 3, 1), EpochPlan(1438, batch_size, 3, 1, parts=parts)
    found = []
    for epoch in range(parts, 2 * parts):
        divided.set_epoch(epoch)
        assert len(divided) == len(divided.batches())
        found += divided.batches()
    assert [batch.tolist() for batch in found] == [batch.tolist() for batch in whole.batches()]


def test_epochs_that_are_parts_of_a_pass_match_the_plan():
    data = _digits(epochs_per_pass=4)
    for epoch in range(5):
        planned = data.samples_in_batches(epoch, 100)
        assert planned == [len(y) for _, y in train_batches(data, epoch=epoch)] and len(planned) in (3, 4)
    with pytest.raises(UserError, match=r"data\.epochs_per_pass=16 leaves epochs without a batch"):
        _digits(epochs_per_pass=16).samples_in_batches(0, 100)


def test_decoded_images_are_resized_like_encoded_ones():
    small = _digits(image_size=5, limit_train=20, limit_test=10, shift=0, mirror=False)
    assert small.image_shape == (1, 5, 5)
    plain = _digits(limit_train=20, limit_test=10, shift=0, mirror=False)
    fit, images = small._images["test"], plain._images["test"].images_NHWC
    expected = [np.asarray(small.fit(PIL.Image.fromarray(image.squeeze(-1).numpy()))) for image in images]
    assert np.array_equal(fit.images_NHWC.squeeze(-1).numpy(), np.stack(expected))


@pytest.mark.gpu
def test_on_a_gpu_batches_equal_those_on_the_cpu():
    data = _digits(shift=2)
    expected = train_batches(data, epoch=1)
    assert_equal_on_gpu(data, expected)
    assert data.probe_batch(4).device.type == "cpu"

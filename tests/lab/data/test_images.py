"""Crops, shifts and normalisation of images, compared with torchvision and numpy."""

from typing import get_args

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tvf

from growlab.lab.data.images import Augmentation, Fit, Interpolation, Normalisation, RandomCrop, image_statistics
from growlab.lab.data.order import CROP, draws


def _random_images(batch: int, height: int, width: int, channels: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(0, 256, (batch, height, width, channels), dtype=torch.uint8, generator=generator)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 4), st.booleans(), st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 3]), st.integers())
def test_a_batch_equals_pad_crop_and_flip_of_each_image(shift, mirror, height, width, channels, seed):
    images = _random_images(17, height, width, channels)
    augmentation = Augmentation(shift, mirror)
    draw = augmentation.draw(np.arange(100, 117), seed, epoch=2)
    out = augmentation.apply(images, draw)
    for image, result, (top, left, mirrored) in zip(images, out, draw.T.tolist(), strict=True):
        expected = tvf.pad(image.permute(2, 0, 1), [shift] * 4, fill=0)
        expected = tvf.crop(expected, top, left, height, width)
        if mirrored:
            expected = tvf.horizontal_flip(expected)
        assert torch.equal(result.permute(2, 0, 1), expected)


def test_every_shift_and_flip_is_equally_likely():
    shift, n = 2, 50_000
    top, left, mirrored = Augmentation(shift, True).draw(np.arange(n), 0, 0)
    counts = torch.bincount(top * 10 + left * 2 + mirrored, minlength=50).double()
    assert len(counts) == 50
    expected = n / 50
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_squared - 49) < 5 * np.sqrt(2 * 49)


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("channels", [1, 3])
def test_normalisation_equals_the_formula_in_float64(channels, channels_last):
    images = _random_images(4, 6, 7, channels)
    mean, std = [0.5, 0.4, 0.3][:channels], [0.2, 0.25, 0.3][:channels]
    x = Normalisation(mean, std).apply(images, channels_last)
    expected = (images.double() / 255 - torch.tensor(mean)) / torch.tensor(std)
    assert x.dtype == torch.float32
    torch.testing.assert_close(x.double(), expected.permute(0, 3, 1, 2), rtol=0, atol=2e-6)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert x.is_contiguous(memory_format=layout)


def test_a_constant_channel_stays_finite():
    images = torch.full((2, 3, 3, 1), 51, dtype=torch.uint8)
    mean, std = image_statistics(images)
    assert mean == pytest.approx([0.2]) and std == pytest.approx([0.0], abs=1e-7)
    assert Normalisation(mean, [0.0]).apply(images).abs().max() < 1e-6


@pytest.mark.parametrize("count", [1, 255, 256, 257, 600])
def test_statistics_equal_numpys_in_float64(count):
    images = _random_images(count, 3, 5, 3)
    mean, std = image_statistics(images)
    pixels = images.numpy().reshape(-1, 3) / 255.0
    np.testing.assert_allclose(mean, pixels.mean(0), rtol=1e-12)
    np.testing.assert_allclose(std, pixels.std(0), rtol=1e-10)


def _picture(height, width, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8)
    return PIL.Image.fromarray(pixels).resize((width, height), PIL.Image.Resampling.BICUBIC)


@pytest.mark.parametrize(
    ("height", "width", "interpolation"),
    [*zip((60, 91, 32, 20, 501, 60), (90, 47, 32, 33, 375, 33), get_args(Interpolation), strict=True)],
)
def test_fit_is_torchvisions_resize_and_centre_crop(height, width, interpolation):
    picture = _picture(height, width)
    mode = v2.InterpolationMode(interpolation)
    expected = v2.Compose([v2.Resize(36, mode), v2.CenterCrop(32)])(picture)
    assert np.array_equal(Fit(32, 36, interpolation)(picture), expected)


def test_views_are_torchvisions_crops_by_image_seed_and_epoch():
    picture, crop = _picture(40, 50), RandomCrop((0.2, 0.5), interpolation="bicubic")
    before = torch.get_rng_state()

    def pixels(indices, seed=0, epoch=0):
        return [np.asarray(view(picture)) for view in crop.views(np.array(indices), seed, epoch, (16, 24))]

    first = pixels([3, 7, 9])
    assert torch.equal(torch.get_rng_state(), before)
    assert all(image.shape == (16, 24, 3) for image in first) and np.array_equal(pixels([7])[0], first[1])
    for other in (pixels([8]), pixels([7], seed=1), pixels([7], epoch=1)):
        assert not np.array_equal(other[0], first[1])
    torch.manual_seed(int(draws(np.array([7]), CROP, 0, 0)[0]) >> 1)
    theirs = v2.RandomResizedCrop((16, 24), (0.2, 0.5), interpolation=v2.InterpolationMode.BICUBIC)
    assert np.array_equal(theirs(picture), first[1])

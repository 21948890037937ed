import numpy as np
import PIL.Image
import pytest
import torch
from scipy.stats import ks_2samp
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tvf

from growlab.lab.data.images import INTERPOLATIONS, Fit, RandomCrop


def _picture(height, width, seed=0):
    pixels = np.random.default_rng(seed).integers(
        0, 256, (height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8
    )
    return PIL.Image.fromarray(pixels).resize((width, height), PIL.Image.Resampling.BICUBIC)


@pytest.mark.parametrize(
    ("height", "width", "interpolation"),
    [*zip((60, 91, 32, 20, 501, 60), (90, 47, 32, 33, 375, 33), INTERPOLATIONS, strict=True)],
)
def test_fit_is_torchvisions_resize_and_centre_crop(height, width, interpolation):
    picture = _picture(height, width)
    mode = v2.InterpolationMode(interpolation)
    expected = v2.Compose([v2.Resize(36, mode), v2.CenterCrop(32)])(picture)
    assert np.array_equal(Fit(32, 36, interpolation)(picture), expected)


@pytest.mark.parametrize("size", [(375, 500), (500, 90), (30, 31)])
def test_crops_are_distributed_as_torchvisions(size):
    """Area, aspect ratio, top and left against torchvision's own draws (two-sample Kolmogorov-Smirnov)."""
    crop = RandomCrop()
    count = 3000
    numbers = np.random.default_rng(0).random((count, 10, 4))
    ours = np.array([crop.box(*size, numbers_T4) for numbers_T4 in numbers], dtype=float)
    torch.manual_seed(0)
    transform = v2.RandomResizedCrop(8, antialias=True)
    picture = tvf.to_image(PIL.Image.new("RGB", size[::-1]))
    drawn = [transform.make_params([picture]) for _ in range(count)]
    theirs = np.array(
        [[one[key] for key in ("top", "left", "height", "width")] for one in drawn], dtype=float
    )
    assert (ours[:, :2] >= 0).all() and (ours[:, :2] + ours[:, 2:] <= size).all()
    for a, b in ((ours, theirs), (ours[:, 2:].prod(1), theirs[:, 2:].prod(1))):
        columns = zip(np.atleast_2d(a.T), np.atleast_2d(b.T), strict=True)
        assert min(ks_2samp(x, y).pvalue for x, y in columns) > 1e-3


@pytest.mark.parametrize(("height", "width"), [(10, 400), (400, 10)])
def test_an_image_too_long_for_any_crop_gives_its_middle(height, width):
    numbers = np.full((10, 4), 0.999)
    top, left, h, w = RandomCrop().box(height, width, numbers)
    assert (h, w) == ((10, 13) if height == 10 else (13, 10))
    assert top == (height - h) // 2 and left == (width - w) // 2


def test_views_follow_the_image_the_seed_and_the_epoch():
    picture, crop = _picture(40, 50), RandomCrop()

    def pixels(indices, seed=0, epoch=0):
        return [np.asarray(view(picture)) for view in crop.views(np.array(indices), seed, epoch, (16, 24))]

    first = pixels([3, 7, 9])
    assert all(image.shape == (16, 24, 3) for image in first)
    assert np.array_equal(pixels([7])[0], first[1])
    for other in (pixels([8]), pixels([7], seed=1), pixels([7], epoch=1)):
        assert not np.array_equal(other[0], first[1])


def test_a_view_is_torchvisions_resized_crop():
    picture, crop = _picture(40, 50), RandomCrop((0.2, 0.5), interpolation="bicubic")
    numbers = np.random.default_rng(1).random((10, 4))
    box = crop.box(40, 50, numbers)
    expected = tvf.resized_crop(picture, *box, [12, 12], v2.InterpolationMode.BICUBIC)
    assert np.array_equal(crop._cut(picture, numbers, (12, 12)), expected)
    assert 0.15 < box[2] * box[3] / 2000 < 0.55

from typing import get_args

import numpy as np
import PIL.Image
import pytest
import torch
from torchvision.transforms import v2

from growlab.lab.data.images import Fit, Interpolation, RandomCrop
from growlab.lab.data.order import CROP, draws


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


def test_views_are_torchvisions_crops_and_follow_the_image_the_seed_and_the_epoch():
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

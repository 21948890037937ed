"""The data sets beside the checkout, read as a user would point at them."""

import time

import numpy as np
import pytest

from growlab.lab.data import ImageData
from growlab.lab.data.augment import Augmentation


@pytest.fixture
def cifar10(shared_data) -> ImageData:
    data = ImageData(
        "cifar10", str(shared_data / "cifar10"), shift=4, mirror=True, limit_train=1000, limit_test=300
    )
    data.setup()
    return data


def test_cifar10(cifar10):
    assert (cifar10.num_classes, cifar10.image_shape) == (10, (3, 32, 32))
    assert (cifar10.num_train, cifar10.num_test) == (1000, 300)
    assert cifar10._images["train"].classes[:2] == ("airplane", "automobile")
    assert np.bincount(cifar10._images["train"].labels).tolist() == [100] * 10
    # The data's README gives these for all 50,000 images.
    np.testing.assert_allclose(cifar10.mean, [0.4913, 0.4821, 0.4465], atol=0.015)
    np.testing.assert_allclose(cifar10.std, [0.2452, 0.2428, 0.2606], atol=0.01)


def test_an_augmented_cifar10_batch_equals_a_reference_of_single_images(cifar10):
    loader = cifar10.train_dataloader()
    positions = loader.sampler.batches()[0]
    x, y = next(iter(loader))
    augmentation = Augmentation(4, True)
    draw = augmentation.draw(positions, seed=0, epoch=0).T.tolist()
    raw = cifar10._images["train"].images_NHWC.numpy()
    for image, position, (top, left, mirrored) in zip(x, positions, draw, strict=True):
        padded = np.pad(raw[position], ((4, 4), (4, 4), (0, 0)))
        crop = padded[top : top + 32, left : left + 32]
        crop = crop[:, ::-1] if mirrored else crop
        expected = (crop / 255 - np.array(cifar10.mean)) / np.array(cifar10.std)
        np.testing.assert_allclose(image.permute(1, 2, 0).numpy(), expected, atol=3e-6)
    assert np.array_equal(y, cifar10._images["train"].labels[positions])


def test_mnist_from_parquet(shared_data):
    data = ImageData("mnist", str(shared_data / "mnist10k"), validation="split")
    data.setup()
    assert (data.num_train, data.num_val, data.num_test) == (7200, 800, 2000)
    assert (data.num_classes, data.image_shape) == (10, (1, 28, 28))
    # Of all of MNIST mean and standard deviation are 0.1307 and 0.3081.
    np.testing.assert_allclose((data.mean[0], data.std[0]), (0.1307, 0.3081), atol=0.004)


@pytest.mark.slow
def test_all_of_cifar10_has_the_statistics_of_its_readme_and_loads_fast_from_the_cache(shared_data):
    seconds = []
    for _ in range(2):
        data = ImageData("cifar10", str(shared_data / "cifar10"))
        start = time.perf_counter()
        data.setup()
        seconds.append(time.perf_counter() - start)
    np.testing.assert_allclose(data.mean, [0.4913, 0.4821, 0.4465], atol=6e-5)
    np.testing.assert_allclose(data.std, [0.2452, 0.2428, 0.2606], atol=6e-5)
    assert (data.num_train, data.num_test) == (50_000, 10_000)
    assert seconds[1] < seconds[0] / 3

"""Real data sets next to the checkout."""

import numpy as np
import pytest

from growlab.lab.data import ImageData


def test_cifar10_and_mnist_from_parquet(shared_data):
    options = {"limit_train": 1000, "limit_test": 300}
    cifar10 = ImageData("cifar10", str(shared_data / "cifar10"), shift=4, mirror=True, **options)
    cifar10.setup()
    assert (cifar10.num_classes, cifar10.image_shape) == (10, (3, 32, 32))
    assert (cifar10.num_train, cifar10.num_test) == (1000, 300)
    assert cifar10._images["train"].classes[:2] == ("airplane", "automobile")
    assert np.bincount(cifar10._images["train"].labels).tolist() == [100] * 10
    # Values for all 50,000 images, from the data's README.
    np.testing.assert_allclose(cifar10.mean, [0.4913, 0.4821, 0.4465], atol=0.015)
    np.testing.assert_allclose(cifar10.std, [0.2452, 0.2428, 0.2606], atol=0.01)
    mnist = ImageData("mnist", str(shared_data / "mnist10k"), validation="split")
    mnist.setup()
    assert (mnist.num_train, mnist.num_val, mnist.num_test) == (7200, 800, 2000)
    assert (mnist.num_classes, mnist.image_shape) == (10, (1, 28, 28))
    # Mean and standard deviation of all of MNIST are 0.1307 and 0.3081.
    np.testing.assert_allclose((mnist.mean[0], mnist.std[0]), (0.1307, 0.3081), atol=0.004)


@pytest.mark.slow
def test_all_of_cifar10_has_the_statistics_of_its_readme(shared_data):
    data = ImageData("cifar10", str(shared_data / "cifar10"))
    data.setup()
    np.testing.assert_allclose(data.mean, [0.4913, 0.4821, 0.4465], atol=6e-5)
    np.testing.assert_allclose(data.std, [0.2452, 0.2428, 0.2606], atol=6e-5)
    assert (data.num_train, data.num_test) == (50_000, 10_000)

"""The 1,797 handwritten digits that come with scikit-learn: 8x8 pixels, no download."""

import numpy as np
import torch

from growlab.lab.data.image_sets import ImageArray
from growlab.lab.data.split import stratified_split


def load_digits() -> tuple[ImageArray, ImageArray]:
    """Return the training set (1,438 images) and the test set (359), a fixed stratified split.

    Pixels are scaled from scikit-learn's 0..16 to 0..255.
    """
    # A slow import, that other data need not wait for.
    import sklearn.datasets

    bunch = sklearn.datasets.load_digits()
    images_NHWC = torch.from_numpy(np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., None])
    labels = bunch.target.astype(np.int64)
    everything = ImageArray(images_NHWC, torch.from_numpy(labels), tuple(str(digit) for digit in range(10)))
    train, test = stratified_split(labels, fraction=0.2, seed=0)
    return everything.select(train), everything.select(test)

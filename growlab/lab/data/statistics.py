"""Means and deviations of images.

Shape suffixes: N images, H rows, W columns, C channels.
"""

import numpy as np
import torch
from torch import Tensor


def channel_statistics(images_NHWC: Tensor) -> tuple[list[float], list[float]]:
    """Return mean and population standard deviation of each channel on the scale 0..1, of uint8 images."""
    N, H, W, C = images_NHWC.shape
    total_C = torch.zeros(C, dtype=torch.float64)
    squares_C = torch.zeros(C, dtype=torch.float64)
    # 256 * 255^2 < 2^24: the sums over 256 images are whole numbers that float32 holds exactly.
    for images in images_NHWC.split(256):
        x = images.reshape(len(images), -1).float()
        total_C += x.sum(0).double().view(H * W, C).sum(0).cpu()
        squares_C += x.square_().sum(0).double().view(H * W, C).sum(0).cpu()
    mean_C = total_C / (N * H * W)
    std_C = (squares_C / (N * H * W) - mean_C**2).clamp(min=0).sqrt()
    return (mean_C / 255).tolist(), (std_C / 255).tolist()


def feature_statistics(images_NHWC: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and population standard deviation of each pixel and channel, float64 [H, W, C] on the scale 0..1."""
    shape = images_NHWC.shape[1:]
    total, squares = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for images in images_NHWC.split(1024):
        x = images.double()
        total += x.sum(0).cpu()
        squares += x.square_().sum(0).cpu()
    mean = total / len(images_NHWC)
    std = (squares / len(images_NHWC) - mean**2).clamp(min=0).sqrt()
    return (mean / 255).numpy(), (std / 255).numpy()

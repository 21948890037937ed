"""Steps with a rate per region on a GPU: the same numbers as on the CPU, without synchronisation."""

import contextlib
import warnings
from collections.abc import Iterator

import pytest
import torch

from growlab.optim import NormRatio
from tests.unit.optim.test_regional_steps import SETTINGS, start


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    """Raise an error if the CPU waits for the GPU."""
    try:
        with warnings.catch_warnings():
            # torch warns that this mode is a prototype.
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_gpu_takes_the_steps_of_a_cpu(setting):
    cls, options = SETTINGS[setting]
    ways = []
    for device in ("cuda", "cpu"):
        params, regions = start(torch.float64)
        moved = [torch.nn.Parameter(param.detach().to(device)) for param in params]
        optimizer = cls(moved, lr=0.03, rule=NormRatio(), **options)
        optimizer.set_regions({new: regions[old] for old, new in zip(params, moved, strict=True)})
        for number in range(4):
            for param in moved:
                param.grad = torch.full_like(param, 0.1 * number - 0.1)
            # The first steps check the largest factor and fill caches.
            with no_synchronisation() if device == "cuda" and number > 1 else contextlib.nullcontext():
                optimizer.step()
        ways.append(([torch.nn.Parameter(param.detach().cpu()) for param in moved], optimizer))
    (ours, _), (theirs, _) = ways
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)

"""The steps for a GPU as Triton interprets them on a CPU; `test_gpu.py` runs this file in a process of its own.

Triton reads TRITON_INTERPRET when it is imported, so these tests cannot share a process with the others.
"""

import os

import pytest
import torch

from growlab.optim import SGD, AdamW, NormRatio, Regions, gpu, native, regional
from tests.optim.test_native import SETTINGS, Fixed, assert_same, start, trained

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")

SHAPES = [(7, 5), (6, 4, 3, 3), (1, 3), (9, 1), (17, 40, 3, 3)]


@pytest.fixture
def interpreted(monkeypatch):
    """Optimizers of CPU tensors take the GPU's kernels."""
    monkeypatch.setattr(gpu, "available", lambda device, dtype: dtype in (torch.float32, torch.float64))
    monkeypatch.setattr(regional, "_kernels", lambda param: gpu)
    monkeypatch.setattr("tests.optim.test_native.SHAPES", SHAPES)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_weights_and_state_are_those_of_torchs_operations(setting, channels_last, interpreted, monkeypatch):
    cls, options = SETTINGS[setting]

    def make(params):
        return cls(params, lr=0.03, rule=Fixed(), **options)

    how = {"dtype": torch.float64, "channels_last": channels_last, "interleaved": channels_last, "steps": 2}
    ours = trained(make, True, monkeypatch, **how)
    with monkeypatch.context() as patch:
        patch.setattr(regional, "_kernels", lambda param: native)
        assert_same(ours, trained(make, False, monkeypatch, **how), rtol=1e-12, atol=1e-12)


def test_norms_left_by_a_step_are_those_of_the_weights(interpreted, monkeypatch):
    params, optimizer = trained(lambda p: SGD(p, 0.03, rule=NormRatio()), True, monkeypatch)
    for param in params:
        left = optimizer._square_sums[param][2]
        anew = gpu.square_sums(param, optimizer._table(param), len(left))
        assert torch.equal(left, anew.to(left.dtype)), "a resumed run would take other rates"
        torch.testing.assert_close(left, optimizer._regions[param].sums(param.detach().square()))


def test_rates_follow_a_weight_that_somebody_else_has_written(interpreted):
    params, regions = start(torch.float64)
    optimizer = SGD(params, 0.03, rule=NormRatio())
    optimizer.set_regions(regions)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    with torch.no_grad():
        params[4][3:] *= 5.0
    factors = optimizer._factors(params)[4, : regions[params[4]].num_regions]
    torch.testing.assert_close(factors, NormRatio().factors(regions[params[4]].norms(params[4])))


def test_adamw_with_many_regions_of_a_float32_weight(interpreted):
    weight = torch.nn.Parameter(torch.randn(70, 33, generator=torch.Generator().manual_seed(0)))
    regions = Regions(torch.arange(70), torch.arange(33))
    optimizer = AdamW([weight], lr=0.01, rule=NormRatio())
    optimizer.set_regions({weight: regions})
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    torch.testing.assert_close(
        optimizer._square_sums[weight][2], regions.sums(weight.detach().square()), rtol=1e-5, atol=1e-5
    )

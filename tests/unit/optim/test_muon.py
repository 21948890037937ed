"""Muon against torch's, its convolutions and vectors against what they are said to be."""

import pytest
import torch
from torch import nn

from growlab.optim import Muon, NormRatio, Regions
from tests.unit.optim.test_optimizers import AllOnes, FirstOnly

REGIONS = Regions(torch.tensor([0, 0, 0, 1, 1, 2, 2]), torch.tensor([0, 0, 1, 2, 2]))
OPTIONS = [
    {},
    {"nesterov": False, "weight_decay": 0.0, "momentum": 0.5},
    {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3, "lr": torch.tensor(0.05)},
    {"adjust_lr_fn": "spectral_unclamped", "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-5},
]


def trained(make, regions=None, shape=(7, 5), steps=4, dtype=torch.float32):
    source = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(shape, generator=source).to(dtype))
    optimizer = make([weight])
    if regions is not None:
        optimizer.set_regions({weight: regions})
    for _ in range(steps):
        weight.grad = torch.randn(shape, generator=source).to(dtype)
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_matrix_of_one_region_moves_as_with_torch_bit_for_bit(options, dtype):
    options = {"lr": 0.1, **options}
    adjustment = options.get("adjust_lr_fn")
    try:
        torch.optim.Muon([torch.zeros(1, 1, requires_grad=True)], adjust_lr_fn=adjustment)
    except ValueError:
        pytest.skip(f"the Muon of torch {torch.__version__} has no {adjustment}")
    reference = trained(lambda p: torch.optim.Muon(p, **options), dtype=dtype)
    one = Regions(torch.zeros(7, dtype=torch.long), torch.zeros(5, dtype=torch.long))
    assert torch.equal(trained(lambda p: Muon(p, **options), dtype=dtype), reference)
    assert torch.equal(trained(lambda p: Muon(p, rule=NormRatio(), **options), one, dtype=dtype), reference)
    with_ones = trained(lambda p: Muon(p, rule=AllOnes(), **options), REGIONS, dtype=dtype)
    torch.testing.assert_close(with_ones, reference)


def test_factors_scale_update_and_weight_decay_of_their_region():
    young = REGIONS.index_OI > 0
    start = trained(lambda p: Muon(p), steps=0)
    frozen = trained(lambda p: Muon(p, 0.1, rule=FirstOnly()), REGIONS)
    assert torch.equal(frozen[young], start[young]) and (frozen[~young] != start[~young]).all()
    moved = trained(lambda p: Muon(p, 0.1, rule=NormRatio()), REGIONS, steps=1)
    plain = trained(lambda p: Muon(p, 0.1), steps=1)
    norms = torch.stack([start[REGIONS.index_OI == k].norm() for k in range(3)])
    factors = (norms / norms[0])[REGIONS.index_OI]
    torch.testing.assert_close(moved - start, factors * (plain - start))


def test_a_convolution_is_the_matrix_of_its_output_channels():
    flat = trained(lambda p: torch.optim.Muon(p, 0.1), shape=(6, 4 * 3 * 3))
    kernel = trained(lambda p: Muon(p, 0.1), shape=(6, 4, 3, 3))
    assert torch.equal(kernel.flatten(1), flat)


@pytest.mark.parametrize("shape", [(7,), ()])
def test_vectors_take_adamw(shape):
    ours = trained(lambda p: Muon(p, 0.1, 0.02, betas=(0.8, 0.9), adam_eps=1e-3), shape=shape)
    theirs = trained(lambda p: torch.optim.AdamW(p, 0.1, (0.8, 0.9), 1e-3, 0.02), shape=shape)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be at least 0"),
        ({"momentum": -0.1}, "momentum"),
        ({"betas": (1.0, 0.9)}, "beta"),
        ({"adam_eps": -1.0}, "adam_eps must be at least 0"),
        ({"adjust_lr_fn": "none"}, "is not supported"),
        ({"ns_steps": 0}, "ns_steps must be at least 1, not 0"),
        ({"ns_steps": 2.5}, "ns_steps must be an integer, not 2.5"),
        ({"ns_steps": 100}, "ns_steps must be below 100, not 100"),
    ],
)
def test_numbers_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        trained(lambda p: Muon(p, **options), steps=0)


def test_complex_parameters_are_refused():
    with pytest.raises(RuntimeError, match="complex"):
        trained(lambda p: Muon(p), dtype=torch.complex64, steps=1)

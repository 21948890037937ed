"""Steps with a rate per region, for weights of all shapes, layouts and precisions."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from growlab.optim import LARS, SGD, Adam, AdamW, AvaGrad, BaseRate, MaxOne, Muon, NormRatio, Regions

# One row, one column, short and long runs, many blocks.
SHAPES = [(7, 5), (6, 4, 3, 3), (1, 3), (9, 1), (33, 17, 1, 1), (40, 70, 3, 3), (150, 1000)]
SETTINGS = {
    "sgd": (SGD, {}),
    "sgd damped": (SGD, {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.3}),
    "sgd nesterov": (SGD, {"momentum": 0.9, "nesterov": True, "maximize": True, "weight_decay": 0.1}),
    "adam": (Adam, {"weight_decay": 0.1}),
    "adam amsgrad": (Adam, {"amsgrad": True, "maximize": True}),
    "adam quick": (Adam, {"betas": (0.3, 0.5), "eps": 1e-3}),
    "adamw": (AdamW, {"weight_decay": 0.1}),
    "adamw amsgrad": (AdamW, {"weight_decay": 0.1, "amsgrad": True, "maximize": True, "betas": (0.4, 0.9)}),
}


class Fixed:
    """Different rates that do not depend on norms, because summing norms rounds."""

    def factors(self, norms_K):
        return torch.linspace(0.5, 2.0, norms_K.shape[-1]).to(norms_K).expand_as(norms_K)


def grown(length, interleaved):
    births = torch.arange(length) * 4 // length
    return births[torch.randperm(length, generator=torch.Generator().manual_seed(0))] if interleaved else births


def start(dtype, channels_last=False, interleaved=False, offset=0):
    source = torch.Generator().manual_seed(0)
    params, regions = [], {}
    for shape in SHAPES:
        size = torch.Size(shape).numel()
        # With an offset the weight is unaligned, because it begins inside another tensor.
        value = torch.randn(size + offset, generator=source).to(dtype)[offset:].view(shape)
        if channels_last and len(shape) == 4:
            value = value.contiguous(memory_format=torch.channels_last)
        params.append(nn.Parameter(value))
        regions[params[-1]] = Regions(grown(shape[0], interleaved), grown(shape[1], interleaved))
    return params, regions


def train(make, dtype=torch.float32, steps=4, **how):
    params, regions = start(dtype, **how)
    optimizer = make(params)
    optimizer.set_regions(regions)
    source = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for param in params:
            gradient = torch.randn(param.shape, generator=source).to(dtype)
            param.grad = torch.empty_like(param).copy_(gradient)
        optimizer.step()
    return params, optimizer


def regions_apart(cls, options, lr, dtype, steps=4, **how):
    """The same training by torch's optimizers, with a separate parameter and rate for each region."""
    params, regions = start(dtype, **how)
    masks = [
        (params[i], regions[params[i]].spread(torch.arange(regions[params[i]].num_regions), params[i].dim()))
        for i in range(len(params))
    ]
    parts = [(p, (m == k).expand(p.shape)) for p, m in masks for k in range(int(m.max()) + 1)]
    most = max(each.num_regions for each in regions.values())
    factors = [float(Fixed().factors(torch.ones(most))[k]) for _, m in masks for k in range(int(m.max()) + 1)]
    own = [nn.Parameter(p.detach()[part].clone()) for p, part in parts]
    groups = [{"params": [each], "lr": lr * factor} for each, factor in zip(own, factors, strict=True)]
    optimizer = getattr(torch.optim, cls.__name__)(groups, lr=lr, **options)
    source = torch.Generator().manual_seed(1)
    for _ in range(steps):
        gradients = {param: torch.randn(param.shape, generator=source).to(dtype) for param in params}
        for each, (param, part) in zip(own, parts, strict=True):
            each.grad = gradients[param][part]
        optimizer.step()
    for each, (param, part) in zip(own, parts, strict=True):
        param.data[part] = each.data
    return params


def assert_same(ours, theirs, **tolerance):
    (params, optimizer), (others, other) = ours, theirs
    for a, b in zip(params, others, strict=True):
        pairs = [(a, b), *((optimizer.state[a][key], other.state[b][key]) for key in optimizer.state[a])]
        for x, y in pairs:
            if isinstance(x, torch.Tensor) and tolerance:
                torch.testing.assert_close(x, y, **tolerance)
            else:
                assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_region_moves_as_torch_moves_it_at_its_own_rate(setting, dtype, channels_last):
    cls, options = SETTINGS[setting]
    how = {"dtype": dtype, "channels_last": channels_last, "interleaved": channels_last}
    ours, _ = train(lambda params: cls(params, lr=0.03, rule=Fixed(), **options), **how)
    theirs = regions_apart(cls, options, 0.03, **how)
    eps = torch.finfo(dtype).eps
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=100 * eps, atol=100 * eps)


@pytest.mark.parametrize("options", [{"weight_decay": 0.1, "dampening": 0.3}, {"maximize": True}])
def test_fused_steps_are_the_others_up_to_rounding(options):
    """Also if the parameters have become float64 but their momentum has not."""

    def make(params, fused):
        return SGD(params, lr=0.03, momentum=0.9, rule=Fixed(), fused=fused, **options)

    both = []
    for fused in (True, None):
        params, optimizer = train(lambda p, fused=fused: make(p, fused))
        for param in params:
            param.data, param.grad = param.data.double(), None
            param.grad = torch.ones_like(param)
        optimizer.step()
        both.append((params, optimizer))
    assert_same(*both, rtol=1e-5, atol=1e-6)


def test_a_weight_may_change_its_layout_between_steps():
    """As by `network.to(memory_format=...)`."""
    both = []
    for layout in (torch.contiguous_format, torch.channels_last):
        params, optimizer = train(lambda p: SGD(p, 0.03, 0.9, rule=Fixed()))
        for param in params:
            if param.dim() == 4:
                param.data, param.grad = param.data.contiguous(memory_format=layout), None
            param.grad = torch.arange(param.numel()).to(param).view(param.shape).sin()
        optimizer.step()
        both.append((params, optimizer))
    assert_same(*both, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", [NormRatio(), MaxOne(1e6), BaseRate()], ids=lambda rule: type(rule).__name__)
def test_blocks_are_whole_weights_up_to_the_rounding_of_sums(rule, monkeypatch):
    def make(params):
        return AdamW(params, lr=0.03, rule=rule)

    ours = train(make, dtype=torch.float64)
    monkeypatch.setattr("growlab.optim.regional._MAX_RUNS", 0)
    assert_same(ours, train(make, dtype=torch.float64), rtol=1e-9, atol=1e-9)


class Counted(TorchDispatchMode):
    """Counts operations that compute or copy something."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("setting", SETTINGS)
def test_off_the_cpu_a_step_has_as_many_operations_for_many_weights_as_for_few(setting, monkeypatch):
    cls, options = SETTINGS[setting]
    # Weights that are not cut into blocks on a CPU take the path of a GPU.
    monkeypatch.setattr("growlab.optim.regional._MAX_RUNS", 0)
    numbers = []
    for copies in (1, 3):
        params, regions = [], {}
        for _ in range(copies):
            more, own = start(torch.float32)
            params += more
            regions |= own
        optimizer = cls(params, lr=0.03, rule=NormRatio(), fused=True, **options)
        optimizer.set_regions(regions)
        for _ in range(3):
            for param in params:
                param.grad = torch.ones_like(param)
            with Counted() as counted:
                optimizer.step()
        numbers.append(counted.number)
    assert numbers[0] == numbers[1] <= 60


def test_norms_left_by_a_step_are_those_of_the_weights():
    params, optimizer = train(lambda p: SGD(p, 0.03, rule=NormRatio()))
    for param in params:
        kept = optimizer._square_sums[param][2]
        recomputed = optimizer._cut(param).square_sums(param.detach())
        assert torch.equal(kept, recomputed), "a resumed run would take other rates"
        torch.testing.assert_close(kept, optimizer._regions[param].sums(param.detach().square()))


def test_autograd_notices_a_step():
    weight = nn.Parameter(torch.ones(4, 4))
    optimizer = SGD([weight], 0.1, 0.9, rule=Fixed())
    optimizer.set_regions({weight: Regions(torch.arange(4), torch.arange(4))})
    loss = (weight * weight).sum()
    weight.grad = torch.ones(4, 4)
    version = weight._version
    optimizer.step()
    assert weight._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("cls", [SGD, AdamW, AvaGrad, LARS, Muon], ids=lambda cls: cls.__name__)
def test_columns_over_several_axes_are_those_of_the_flattened_tensor(cls):
    """A weight [O, I, K, 2] whose second and third axes grew, against the matrix [O, 2 I K]."""
    rows, columns = torch.tensor([0, 0, 1, 2]), torch.tensor([[0, 0, 1], [2, 2, 2]]).flatten()
    deep = Regions(rows, columns, (2, 3))
    flat = Regions(rows, columns.repeat_interleave(2))
    value = torch.randn(4, 2, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = []
    for shape, regions, last in ((value.shape, deep, False), (value.shape, deep, True), ((4, 12), flat, False)):
        weight = nn.Parameter(value.reshape(shape).clone())
        if last:
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)
        optimizer = cls([weight], lr=0.1, rule=NormRatio())
        assert regions.fits(weight) and not regions.fits(weight[:, 1:])
        optimizer.set_regions({weight: regions})
        for step in range(3):
            source = torch.Generator().manual_seed(step)
            gradient = torch.randn(4, 12, generator=source, dtype=torch.float64).view(shape)
            weight.grad = torch.empty_like(weight).copy_(gradient)
            optimizer.step()
        found.append(weight.detach().reshape(4, 12))
        torch.testing.assert_close(optimizer.region_norms(weight)[1], flat.norms(found[-1]))
    assert not torch.allclose(found[2], value.reshape(4, 12))
    torch.testing.assert_close(found[0], found[2], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[1], found[2], rtol=1e-12, atol=1e-12)

"""growlab's optimizers as drop-in replacements: equal to torch's, bit for bit, in all that a training loop does."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from growlab.optim import LARS, SGD, Adam, AdamW, AvaGrad, BaseRate, NormRatio, Regions, load_named_state, named_state
from tests.unit.optim.test_optimizers import AllOnes

TWINS = {
    "sgd": (SGD, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adam": (Adam, torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "adamw": (AdamW, torch.optim.AdamW, {"lr": 0.01}),
}
BOTH = pytest.mark.parametrize("twin", TWINS)


def network(dtype=torch.float32):
    torch.manual_seed(0)
    layers = (nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 3))
    return nn.Sequential(*layers).to(dtype)


def regions_of(model, num_stages=3):
    """Regions of the two weights; with one stage, a single region each."""
    conv, linear = model[0].weight, model[4].weight
    rows = torch.arange(6) * num_stages // 6
    columns = (torch.arange(96) // 16) * num_stages // 6
    return {
        conv: Regions(rows, torch.zeros(2, dtype=torch.long)),
        linear: Regions(torch.zeros(3, dtype=torch.long), columns),
    }


def batch(step, dtype=torch.float32):
    source = torch.Generator().manual_seed(step)
    x = torch.randn(8, 2, 4, 4, generator=source, dtype=torch.float64).to(dtype)
    return x, torch.randint(3, (8,), generator=source)


def backward(model, optimizer, step, scaler=None):
    x, y = batch(step, next(model.parameters()).dtype)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    (loss if scaler is None else scaler.scale(loss)).backward()
    return loss


def both(twin, loop, groups=lambda model: model.parameters(), dtype=torch.float32, regions=regions_of, **options):
    """Weights after the same loop with our optimizer, with single regions, and with torch's."""
    ours, theirs, defaults = TWINS[twin]
    options = {**defaults, **options}
    results = []
    for make in (lambda p: ours(p, rule=NormRatio(), **options), lambda p: theirs(p, **options)):
        model = network(dtype)
        optimizer = make(groups(model))
        if isinstance(optimizer, ours):
            optimizer.set_regions(regions(model, 1))
        loop(model, optimizer)
        results.append([p.detach().clone() for p in model.parameters()])
    return results


def assert_same(pair):
    assert all(torch.equal(a, b) for a, b in zip(*pair, strict=True))


@BOTH
def test_groups_with_settings_of_their_own_and_one_added_later(twin):
    def groups(model):
        return [
            {"params": model[0].parameters(), "lr": 0.02, "weight_decay": 0.1},
            {"params": [model[4].weight], "maximize": True},
        ]

    def loop(model, optimizer):
        for step in range(6):
            if step == 3:
                optimizer.add_param_group({"params": [model[4].bias, *model[1].parameters()], "lr": 0.5})
            backward(model, optimizer, step)
            optimizer.step()

    assert_same(both(twin, loop, groups))


@pytest.mark.parametrize("cls", [SGD, Adam, AvaGrad, LARS])
def test_each_group_has_its_rate_in_regions_too(cls):
    """Two groups of one optimizer train like two optimizers."""
    alone, together = network(), network()
    (conv, linear), settings = regions_of(alone).items(), ({"lr": 0.02}, {"lr": 0.3, "weight_decay": 0.1})
    pairs = [([alone[0].weight], conv, settings[0]), ([alone[4].weight], linear, settings[1])]
    singles = [cls(params, rule=NormRatio(), **setting) for params, _, setting in pairs]
    for single, (_, region, _) in zip(singles, pairs, strict=True):
        single.set_regions(dict([region]))
    groups = [{"params": [together[i].weight], **setting} for i, setting in zip((0, 4), settings, strict=True)]
    optimizer = cls(groups, rule=NormRatio())
    optimizer.set_regions(regions_of(together))
    for step in range(4):
        for model, optimizers in ((alone, singles), (together, [optimizer])):
            model.zero_grad()
            x, y = batch(step)
            F.cross_entropy(model(x), y).backward()
            for each in optimizers:
                each.step()
    assert_same(([p.detach() for p in alone.parameters()], [p.detach() for p in together.parameters()]))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes(twin, dtype):
    def loop(model, optimizer):
        for step in range(4):
            source = torch.Generator().manual_seed(step)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=source).to(dtype)
            optimizer.step()

    assert_same(both(twin, loop, dtype=dtype, eps=1e-4) if twin != "sgd" else both(twin, loop, dtype=dtype))


@pytest.mark.parametrize("cls", [SGD, AdamW, AvaGrad, LARS])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_regions_in_half_precision_follow_those_in_single_precision(cls, dtype):
    results = []
    for each in (dtype, torch.float32):
        model = network().to(dtype).to(each)
        start = [p.detach().float().clone() for p in model.parameters()]
        options = {"eps": 1e-3, "betas": (0.9, 0.9)} if cls is AdamW else {}
        optimizer = cls(model.parameters(), lr=0.1, rule=NormRatio(), **options)
        optimizer.set_regions(regions_of(model))
        source = torch.Generator().manual_seed(0)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=source).to(dtype).to(each)
        optimizer.step()
        results.append([p.detach().float() - s for p, s in zip(model.parameters(), start, strict=True)])
    for half, single in zip(*results, strict=True):
        torch.testing.assert_close(half, single, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("size", [1e-4, 2000.0])
def test_norms_in_half_precision_do_not_leave_its_range(size, whole, monkeypatch):
    """In float16 the square of 256 is infinite and that of 1e-4 is zero, which would make rates NaN, 0 or 1."""
    if whole:
        monkeypatch.setattr("growlab.optim.regional._MAX_RUNS", 0)
    weight = nn.Parameter((size * torch.randn(8, 6, generator=torch.Generator().manual_seed(0))).half())
    weight.grad = weight.detach().clone()
    regions = Regions(torch.arange(8) // 4, torch.arange(6) // 3)
    exact = regions.norms(weight.double())
    for optimizer in (SGD([weight], lr=0.0, rule=NormRatio()), LARS([weight], lr=0.0, rule=NormRatio())):
        optimizer.set_regions({weight: regions})
        for _ in range(2):
            torch.testing.assert_close(optimizer.region_norms(weight)[1].double(), exact, rtol=1e-4, atol=0)
            torch.testing.assert_close(optimizer._squares([weight])[0].sqrt().double(), exact, rtol=1e-4, atol=0)
            optimizer.step()


@pytest.mark.parametrize("shape", [(8, 6), (2000, 60)])
def test_lars_in_half_precision_takes_norms_in_single_precision(shape):
    """A weight of norm 1e5 and a gradient of 1e-5."""
    source = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=source)
    single = nn.Parameter((weight * (1e5 / weight.norm())).half().float())
    single.grad = (torch.randn(shape, generator=source) * 6e-6).half().float()
    half = nn.Parameter(single.detach().half())
    half.grad = single.grad.half()
    moved = []
    for param in (single, half):
        before = param.detach().clone()
        LARS([param], lr=1.0, trust_coefficient=0.1).step()
        moved.append((param.detach() - before).float())
    assert moved[0].norm() > 1
    assert (moved[1] - moved[0]).norm() < 0.02 * moved[0].norm()


@BOTH
def test_complex_empty_and_unused_parameters(twin):
    ours, theirs, options = TWINS[twin]
    results = []
    for make in (lambda p: ours(p, rule=NormRatio(), **options), lambda p: theirs(p, **options)):
        source = torch.Generator().manual_seed(0)
        shapes = ((4, 3), (0, 3), (5,), (3, 3))
        params = [nn.Parameter(torch.randn(s, generator=source)) for s in shapes]
        params.append(nn.Parameter(torch.randn(4, 3, generator=source, dtype=torch.complex64)))
        optimizer = make(params)
        if isinstance(optimizer, ours):
            both_empty = {p: Regions(torch.zeros(len(p), dtype=torch.long), torch.arange(3)) for p in params[1:2]}
            optimizer.set_regions(both_empty)
        for step in range(4):
            for i, p in enumerate(params):
                # The fourth is never used, the third only later.
                used = i != 3 and (i != 2 or step > 1)
                p.grad = torch.randn(p.shape, generator=source, dtype=p.dtype) if used else None
            optimizer.step()
        results.append([p.detach() for p in params])
    assert_same(results)
    with pytest.raises(ValueError, match="complex"):
        optimizer = ours(params, rule=NormRatio(), **options)
        optimizer.set_regions({params[4]: Regions(torch.arange(4), torch.arange(3))})


def test_sparse_gradients():
    def trained(make):
        table = nn.Embedding(6, 3, sparse=True, _weight=torch.ones(6, 3))
        optimizer = make(table.parameters())
        for step in range(3):
            optimizer.zero_grad()
            table(torch.tensor([step, 2])).square().sum().backward()
            optimizer.step()
        return table.weight

    ours = trained(lambda p: SGD(p, 0.1, rule=NormRatio()))
    assert torch.equal(ours, trained(lambda p: torch.optim.SGD(p, 0.1)))

    def regional(params):
        (weight,) = params
        optimizer = SGD([weight], 0.1, rule=NormRatio())
        optimizer.set_regions({weight: Regions(torch.arange(6), torch.arange(3))})
        return optimizer

    with pytest.raises(RuntimeError, match="sparse gradients of regions"):
        trained(regional)


@BOTH
def test_schedulers_and_closures(twin):
    def loop(model, optimizer):
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
        for step in range(6):
            returned = optimizer.step(lambda step=step: backward(model, optimizer, step))
            assert torch.is_tensor(returned)
            scheduler.step()

    assert_same(both(twin, loop))


@BOTH
@pytest.mark.parametrize("fused", [None, True])
def test_gradient_scaler(twin, fused):
    """The third step has an infinite gradient, is skipped, and halves the scale."""

    def loop(model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for step in range(5):
            backward(model, optimizer, step, scaler)
            if step == 2:
                model[0].weight.grad[0, 0, 0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 32.0

    ours, theirs = both(twin, loop, fused=fused)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    if fused is None:
        assert_same((ours, theirs))


@BOTH
def test_storage_and_dtype_that_change_between_steps(twin):
    """Use load_state_dict, p.data = ..., and convert the module to another dtype."""

    def loop(model, optimizer):
        saved = copy.deepcopy(model.state_dict())
        for step in range(9):
            if step == 2:
                model.load_state_dict(saved)
            if step == 4:
                for p in model.parameters():
                    p.data = p.data.clone()
            if step == 6:
                model.double()
                optimizer.load_state_dict(optimizer.state_dict())
            backward(model, optimizer, step)
            optimizer.step()

    assert_same(both(twin, loop))
    ours, _, options = TWINS[twin]
    model = network()
    optimizer = ours(model.parameters(), rule=AllOnes(), **options)
    optimizer.set_regions(regions_of(model))
    loop(model, optimizer)
    for p, reference in zip(model.parameters(), both(twin, loop)[1], strict=True):
        torch.testing.assert_close(p.detach(), reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("cls", [Adam, AdamW])
def test_ages_are_read_back_by_a_fresh_optimizer(cls, when, by_name):
    """Stage 2 is two steps old when the state is saved; regions are set before it is loaded, or after."""
    model, other = network(), network()
    optimizer, fresh = (cls(one.parameters(), lr=0.01, rule=BaseRate()) for one in (model, other))
    optimizer.set_regions(regions_of(model, 2))
    for step in range(5):
        if step == 3:
            weight = model[4].weight
            young = regions_of(model)[weight].spread(torch.tensor([0.0, 0.0, 1.0]), 2) > 0
            for key in ("exp_avg", "exp_avg_sq"):
                optimizer.state[weight][key][young.expand_as(weight)] = 0.0
            optimizer.set_regions(regions_of(model))
        backward(model, optimizer, step)
        optimizer.step()
    state = named_state(optimizer, model) if by_name else optimizer.state_dict()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": state}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other.load_state_dict(saved["model"])
    if when == "before":
        fresh.set_regions(regions_of(other))
    if by_name:
        load_named_state(fresh, other, saved["optimizer"])
    else:
        fresh.load_state_dict(saved["optimizer"])
    if when == "after":
        fresh.set_regions(regions_of(other))
    assert optimizer.region_ages(model[4].weight).tolist() == [5, 5, 2]
    assert fresh.region_ages(other[4].weight).tolist() == [5, 5, 2]
    for each, own in ((model, optimizer), (other, fresh)):
        backward(each, own, 5)
        own.step()
    assert_same(([*model.parameters()], [*other.parameters()]))


@BOTH
def test_state_dicts_are_interchangeable_with_torchs(twin):
    ours, theirs, options = TWINS[twin]
    results = []
    for first, second in ((ours, theirs), (theirs, ours), (theirs, theirs)):
        model = network()
        optimizer = first(model.parameters(), **options)
        for step in range(4):
            if step == 2:
                saved = optimizer.state_dict()
                optimizer = second(model.parameters(), **options)
                optimizer.load_state_dict(saved)
            backward(model, optimizer, step)
            optimizer.step()
        results.append([p.detach() for p in model.parameters()])
    assert_same(results[:2])
    assert_same(results[1:])


@pytest.mark.parametrize("cls", [Adam, AdamW])
def test_regions_are_not_captured_in_a_cuda_graph(cls):
    model = network()
    optimizer = cls(model.parameters(), capturable=True, rule=NormRatio())
    optimizer.set_regions(regions_of(model))
    backward(model, optimizer, 0)
    model[1].weight.grad = model[1].bias.grad = model[4].bias.grad = None
    with pytest.raises(RuntimeError, match="leave capturable=False"):
        optimizer.step()

"""Regional optimizers, Muon among them, against torch's own and against direct formulas in float64."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from growlab.base.errors import UserError
from growlab.optim import LARS, SGD, Adam, AdamW, AvaGrad, BaseRate, MaxOne, Muon, NormRatio, Regions, exempt_from_decay
from growlab.optim.regional import BLOCK_ELEMENTS
from tests.cases import Around, tracked

SHAPES = {"linear": (7, 5), "conv": (6, 4, 3, 3), "bias": (7,)}
BIRTHS = {"linear": ([0, 0, 0, 1, 1, 2, 2], [0, 0, 1, 2, 2]), "conv": ([0, 1, 0, 1, 2, 2], [0, 0, 1, 1])}
FULL = {**BIRTHS, "bias": ([0], [0, 0, 0, 1, 1, 2, 2])}


class AllOnes:
    """Factors of 1 from a rule of which the optimizer does not know that it changes nothing."""

    def factors(self, norms_K):
        return torch.ones_like(norms_K)


class FirstOnly:
    """Only the oldest region moves."""

    def factors(self, norms_K):
        return (torch.arange(norms_K.shape[-1]) == 0).to(norms_K).expand_as(norms_K)


def parameters(dtype=torch.float64, channels_last=False):
    source = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, generator=source).to(dtype) for name, shape in SHAPES.items()}
    if channels_last:
        made["conv"] = made["conv"].contiguous(memory_format=torch.channels_last)
    return {name: nn.Parameter(tensor) for name, tensor in made.items()}


def gradients(step, dtype=torch.float64):
    source = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=source).to(dtype) for name, shape in SHAPES.items()}


def set_gradients(params, step):
    for name, gradient in gradients(step, next(iter(params.values())).dtype).items():
        params[name].grad = torch.empty_like(params[name]).copy_(gradient)


def stages(name, births):
    """Stage of each element of a parameter."""
    rows, columns = map(torch.tensor, births[name])
    stage, dims = torch.maximum(rows[:, None], columns[None, :]), len(SHAPES[name])
    return (stage[0] if dims == 1 else stage.view(*stage.shape, *[1] * (dims - 2))).expand(SHAPES[name])


def regions(births=BIRTHS, vector=True):
    births = {**births, "bias": FULL["bias"]} if vector else births
    return {name: Regions(torch.tensor(rows), torch.tensor(columns)) for name, (rows, columns) in births.items()}


def one_region():
    births = {name: ([0] * shape[0], [0] * shape[1]) for name, shape in SHAPES.items() if len(shape) > 1}
    return regions(births, vector=False)


def run(make, births=None, steps=5, dtype=torch.float64, channels_last=False, before_step=None):
    params = parameters(dtype, channels_last)
    optimizer = make(list(params.values()))
    if births is not None:
        optimizer.set_regions({params[name]: region for name, region in births.items()})
    for step in range(steps):
        set_gradients(params, step)
        if before_step is not None:
            before_step(step, optimizer, params)
        optimizer.step()
    return params, optimizer


def assert_same(ours, theirs):
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), f"{name}: {(ours[name] - theirs[name]).abs().max():.1e}"


SETTINGS = {
    "sgd": (SGD, torch.optim.SGD, {}),
    "sgd momentum": (SGD, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.3}),
    "sgd nesterov": (SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    "sgd foreach": (SGD, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "foreach": True}),
    "sgd fused": (SGD, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "fused": True}),
    "adam": (Adam, torch.optim.Adam, {"weight_decay": 0.1}),
    "adam amsgrad": (Adam, torch.optim.Adam, {"amsgrad": True, "maximize": True, "foreach": True}),
    "adam fused": (Adam, torch.optim.Adam, {"fused": True}),
    "adamw": (AdamW, torch.optim.AdamW, {"weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-3}),
    "adamw tensor lr": (AdamW, torch.optim.AdamW, {"lr": torch.tensor(0.02, dtype=torch.float64)}),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("dtype", "channels_last"), [(torch.float32, False), (torch.float64, True)], ids=str)
def test_factors_of_one_are_torch_bit_for_bit(setting, dtype, channels_last):
    ours, theirs, options = SETTINGS[setting]
    options, how = {"lr": 0.03, **options}, {"dtype": dtype, "channels_last": channels_last}
    reference, _ = run(lambda p: theirs(p, **options), **how)
    rules = [(None, None), (NormRatio(), one_region())]
    # Fused kernels round differently at the end of a tensor, and regions end elsewhere.
    if ours is SGD and "fused" not in options:
        rules.append((AllOnes(), regions()))
    for rule, births in rules:
        assert_same(run(lambda p, r=rule: ours(p, rule=r, **options), births, **how)[0], reference)


def ratio_factors(weight, stage):
    """||W_k|| / ||W_0|| for every element."""
    factors = torch.ones_like(weight)
    for k in stage.unique():
        factors[stage == k] = weight[stage == k].norm() / weight[stage == 0].norm()
    return factors


def adam_reference(name, decoupled, decay=0.1, newborn_at=3, steps=6, eps=1e-4):
    """A parameter trained by Adam with an age per element; stage 2 is born after `newborn_at` steps."""
    w = parameters()[name].detach().clone()
    m, v, newborn = torch.zeros_like(w), torch.zeros_like(w), stages(name, FULL) == 2
    for step in range(steps):
        if step == newborn_at:
            m[newborn] = 0.0
            v[newborn] = 0.0
        age = (step + 1 - torch.where(newborn & (step >= newborn_at), newborn_at, 0)).double()
        grad = gradients(step)[name]
        if decoupled:
            w = w * (1 - 0.02 * decay)
        else:
            grad = grad + decay * w
        m = 0.9 * m + 0.1 * grad
        v = 0.99 * v + 0.01 * grad**2
        w = w - 0.02 * m / (1 - 0.9**age) / ((v / (1 - 0.99**age)).sqrt() + eps)
    return w


@pytest.mark.parametrize("make, decoupled", [(Adam, False), (AdamW, True)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_adam_corrects_bias_at_each_regions_age(make, decoupled, channels_last):
    """Stage 2 is added after three steps with moments of zero, as after growth."""
    young = {name: ([min(1, r) for r in rows], [min(1, c) for c in columns]) for name, (rows, columns) in FULL.items()}

    def set_regions(step, optimizer, params):
        if step == 0:
            optimizer.set_regions({params[name]: r for name, r in regions(young, vector=False).items()})
        if step == 3:
            for name, region in regions(FULL, vector=False).items():
                mask = region.spread((region.stages == 2).double(), params[name].dim()).expand_as(params[name]) > 0
                for key in ("exp_avg", "exp_avg_sq"):
                    optimizer.state[params[name]][key][mask] = 0.0
            optimizer.set_regions({params[name]: r for name, r in regions(FULL, vector=False).items()})
            assert optimizer.region_ages(params["linear"]).tolist() == [3, 3, 0]

    # BaseRate, because with NormRatio the elements of stage 2 would first have counted for stage 1's norm.
    mine, optimizer = run(
        lambda p: make(p, 0.02, (0.9, 0.99), 1e-4, 0.1, rule=BaseRate()),
        steps=6,
        channels_last=channels_last,
        before_step=set_regions,
    )
    assert optimizer.region_ages(mine["bias"]).tolist() == [6, 6, 3]
    for name in SHAPES:
        torch.testing.assert_close(mine[name].data, adam_reference(name, decoupled), rtol=1e-11, atol=1e-12)


def avagrad_reference(stage_of, steps=5, per_tensor=False):
    weights = {name: p.detach().clone() for name, p in parameters().items()}
    m, v = ({name: torch.zeros_like(w) for name, w in weights.items()} for _ in range(2))
    for step in range(steps):
        eta = {name: 1 / (v[name].sqrt() + 0.1) for name in weights}
        for name, w in weights.items():
            grad = gradients(step)[name] + 0.01 * w
            m[name] = 0.9 * m[name] + 0.1 * grad
            normalised = torch.empty_like(w)
            for k in stage_of[name].unique():
                names = [name] if per_tensor else list(weights)
                values = torch.cat([eta[n][stage_of[n] == k] for n in names])
                here = stage_of[name] == k
                normalised[here] = eta[name][here] / (values / len(values) ** 0.5).norm()
            weights[name] = w - 0.3 * normalised * m[name]
            v[name] = 0.99 * v[name] + 0.01 * grad**2
    return weights


@pytest.mark.parametrize(
    ("rule", "per_tensor"), [(BaseRate(), False), (BaseRate(), True), (NormRatio(), False), (None, False)]
)
def test_avagrad_normalises_each_stage_by_itself(rule, per_tensor):
    stage_of = {name: stages(name, FULL) * isinstance(rule, BaseRate) for name in SHAPES}
    options = {"betas": (0.9, 0.99), "weight_decay": 0.01, "normaliser": "region" if per_tensor else "stage"}
    known = one_region() if isinstance(rule, NormRatio) else regions()
    mine, _ = run(lambda p: AvaGrad(p, 0.3, rule=rule, **options), known)
    for name, weight in avagrad_reference(stage_of, per_tensor=per_tensor).items():
        torch.testing.assert_close(mine[name].data, weight, rtol=1e-10, atol=1e-11, msg=name)


@pytest.mark.parametrize("rule", [None, NormRatio()], ids=["plain", "regional"])
def test_lars_follows_the_direct_formula(rule):
    mine, _ = run(lambda p: LARS(p, 0.2, 0.9, 0.05, trust_coefficient=0.02, rule=rule), regions())
    for name, param in parameters().items():
        w, velocity = param.detach().clone(), torch.zeros_like(param)
        for step in range(5):
            g = gradients(step)[name]
            trust = 0.02 * w.norm() / (g.norm() + 0.05 * w.norm()) if w.dim() > 1 else 1.0
            velocity = 0.9 * velocity + 0.2 * trust * (g + 0.05 * w)
            factor = ratio_factors(w, stages(name, BIRTHS)) if rule is not None and name in BIRTHS else 1.0
            w = w - factor * velocity
        torch.testing.assert_close(mine[name].data, w, rtol=1e-11, atol=1e-12)


# Drop-in ---------------------------------------------------------------------------------------------------

RATIO, AT_MOST_ONE = NormRatio(), MaxOne()
MAKERS = {
    "sgd": lambda p, rule=RATIO: SGD(p, 0.1, 0.9, weight_decay=0.1, rule=rule),
    "adam": lambda p, rule=RATIO: Adam(p, 0.1, rule=rule),
    "adamw": lambda p, rule=AT_MOST_ONE: AdamW(p, 0.1, rule=rule),
    "avagrad": lambda p, rule=RATIO: AvaGrad(p, 0.1, rule=rule),
    "lars": lambda p, rule=RATIO: LARS(p, 0.1, 0.9, 0.1, rule=rule),
    "muon": lambda p, rule=RATIO: Muon(p, 0.1, rule=rule),
}


@pytest.mark.parametrize("name", MAKERS)
def test_factors_scale_the_whole_step_of_their_region(name):
    """Weight decay too; a rate of zero freezes exactly."""
    start, known = parameters(), regions(vector=False)
    frozen, _ = run(lambda p: MAKERS[name](p, FirstOnly()), known)
    moved, optimizer = run(MAKERS[name], known, steps=0)
    factors = {key: optimizer.factors(moved[key]) for key in known}
    assert optimizer.factors(moved["bias"]) is None
    set_gradients(moved, 0)
    rates = {key: optimizer.factors(moved[key]) for key in known}
    optimizer.step()
    plain, _ = run(lambda p: MAKERS[name](p, None), steps=1)
    for key, region in known.items():
        young, dims = stages(key, BIRTHS) > 0, start[key].dim()
        assert torch.equal(frozen[key][young], start[key][young])
        assert (frozen[key][~young] != start[key][~young]).all()
        # AvaGrad normalises each stage by itself.
        if name != "avagrad":
            expected = region.spread(factors[key], dims) * (plain[key] - start[key])
            torch.testing.assert_close(moved[key] - start[key], expected)
        # With a gradient, LARS's factors have the layer's rate in them.
        if name in ("sgd", "lars"):
            update = 0.1 * (gradients(0)[key] + 0.1 * start[key])
            torch.testing.assert_close(start[key] - moved[key], region.spread(rates[key], dims) * update)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_resumed_copied_and_pickled_equal_uninterrupted_bit_for_bit(name, dtype):
    make, young = MAKERS[name], {n: ([0] * len(r), c) for n, (r, c) in BIRTHS.items()}

    def set_regions(step, optimizer, params):
        if step == 2:
            optimizer.set_regions({params[n]: r for n, r in regions().items()})

    uninterrupted, _ = run(make, regions(young), steps=6, dtype=dtype, before_step=set_regions)
    params, optimizer = run(make, regions(young), steps=4, dtype=dtype, before_step=set_regions)
    file = io.BytesIO()
    torch.save({"weights": dict(params), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    fresh, resumed = run(make, regions(), steps=0, dtype=dtype)
    with torch.no_grad():
        for n, param in fresh.items():
            param.copy_(saved["weights"][n])
    resumed.load_state_dict(saved["optimizer"])
    for other in (resumed, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer)), optimizer):
        theirs = dict(zip(SHAPES, other.param_groups[0]["params"], strict=True))
        for step in (4, 5):
            set_gradients(theirs, step)
            other.step()
        assert_same(theirs, uninterrupted)


def test_norms_are_never_stale():
    """Rates use the current weights, however they were written between steps."""
    make = MAKERS["sgd"]

    def double(step, optimizer, params):
        if step == 2:
            with torch.no_grad():
                params["linear"][5:].mul_(2.0)

    def replaced(step, optimizer, params):
        if step == 2:
            data = params["linear"].detach().clone()
            data[5:] *= 2.0
            params["linear"].data = data

    def fresh(step, optimizer, params):
        double(step, optimizer, params)
        optimizer.set_regions({params[n]: r for n, r in regions().items()})

    expected, _ = run(make, regions(), before_step=fresh)
    for change in (double, replaced):
        assert_same(run(make, regions(), before_step=change)[0], expected)


@pytest.mark.parametrize("make", [SGD, Adam])
def test_differentiable_steps_carry_gradients(make):
    """d(updated weight)/d(initial weight) against finite differences of the rate-weighted step."""
    start = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    weight = start.clone()
    weight.retain_grad()
    optimizer = make([weight], lr=0.1, differentiable=True, rule=FirstOnly())
    optimizer.set_regions({weight: Regions(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 0, 0]))})
    weight.grad = (start**3).clone()
    optimizer.step()
    weight.sum().backward()
    assert torch.isfinite(start.grad).all()
    torch.testing.assert_close(start.grad[2:], torch.ones(2, 4, dtype=torch.float64))
    if make is SGD:
        torch.testing.assert_close(start.grad[:2], 1 - 0.1 * 3 * start[:2].detach() ** 2)


def test_large_weights_are_cut_into_blocks_that_fit_in_cache():
    from growlab.optim.regional import Pieces, batches

    weight = torch.zeros(1024, 1024)
    rows = torch.arange(1024) // 300
    pieces = Pieces(weight, Regions(rows, torch.zeros(1024, dtype=torch.long)))
    cut = pieces.cut(weight)
    assert sum(len(piece) for piece in cut) == 1024
    assert all(piece.numel() <= BLOCK_ELEMENTS for piece in cut)
    for piece in cut:
        piece.add_(1)
    assert (weight == 1).all()
    parts = list(batches(pieces.elements))
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(len(cut)))


def test_factors_are_bounded_and_have_no_jump() -> None:
    """New weights that are nearly zero (GradMax) would never move at a rate proportional to their norm."""
    rule = NormRatio()
    norms = torch.tensor([[2.0, 2.0**-100, 1.0, 0.0, 20.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert rule.factors(norms).tolist() == [[1.0, 1.0, 0.5, 1.0, 10.0], [1.0] * 5]
    # The factor falls from 1 at zero to 0.001, then equals the ratio, up to the bound.
    ratios = torch.logspace(-16, 0.99, 2000, dtype=torch.float64)
    factors = rule.factors(torch.stack([torch.ones_like(ratios), ratios], 1))[:, 1]
    usual = ratios >= 1e-3
    assert torch.equal(factors[usual], ratios[usual])
    assert float(factors[0]) == pytest.approx(1.0) and bool((factors.diff()[~usual[1:]] <= 0).all())
    near = torch.tensor([[1.0, 1e-3 * (1 - 1e-9)], [1.0, 1e-3]], dtype=torch.float64)
    assert abs(float(rule.factors(near)[:, 1].diff())) < 1e-8


@pytest.mark.parametrize(
    ("rule", "norms", "bounded"),
    [
        (NormRatio(), [1e-12, 1.0], [1.0, 10.0]),
        (NormRatio(max_factor=2.0), [0.0, 1.0], [1.0, 2.0]),
        (NormRatio(), [[1.0, 3.0], [1.0, 11.0]], [[1.0, 3.0], [1.0, 10.0]]),
        (MaxOne(), [0.5, 1e12], [1.0, 100.0]),
    ],
    ids=["tiny", "zero", "matrix", "max_one"],
)
def test_a_bound_that_applies_causes_one_warning(rule, norms: list, bounded: list) -> None:
    with pytest.warns(UserWarning, match=rf"{type(rule).__name__} asks for .* max_factor={rule.max_factor:g}:"):
        assert rule.factors(torch.tensor(norms)).tolist() == bounded
    assert rule.factors(torch.tensor(norms)).tolist() == bounded


@pytest.mark.parametrize("rule", [NormRatio(), MaxOne()], ids=lambda rule: type(rule).__name__)
def test_norms_that_are_nan_give_factors_that_are_nan(rule) -> None:
    factors = rule.factors(torch.tensor([[1.0, torch.nan, 2.0], [torch.nan, 1.0, 3.0]]))
    assert factors[0, 0] == 1.0 and factors[0, 2] == 2.0
    assert bool(factors[0, 1].isnan()) and bool(factors[1, 0].isnan())


# Weight decay ------------------------------------------------------------------------------------------------


def scaled(inner: nn.Module) -> nn.Module:
    """A module times a single number."""
    return Around(lambda net, x: net.scale * net.inner(x), inner=inner, scale=nn.Parameter(torch.tensor(0.5)))


@pytest.mark.parametrize("cls", [SGD, Adam, AdamW, AvaGrad, LARS, Muon, torch.optim.AdamW])
def test_weight_decay_spares_single_numbers_and_slopes(cls):
    """With a gradient of zero only decay moves parameters: weights, biases and gains, not single numbers or slopes."""
    torch.manual_seed(0)
    network = nn.Sequential(
        *(nn.Linear(3, 4), nn.LayerNorm(4), scaled(nn.Tanh())), *(nn.Linear(4, 1), scaled(nn.PReLU()), nn.PReLU(1))
    )
    nn.init.ones_(network[0].bias)
    nn.init.ones_(network[1].bias)
    optimizer = cls(network.parameters(), lr=0.1, weight_decay=0.1)
    exempt_from_decay(optimizer, network)
    exempt_from_decay(optimizer, network)
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    for p in network.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    kept = {name for name, p in network.named_parameters() if torch.equal(p, before[name])}
    assert kept == {"2.scale", "4.scale", "4.inner.weight", "5.weight"}
    assert len(tracked(optimizer)) == len(set(tracked(optimizer))) == len(before)


def test_exempt_parameters_keep_their_names_and_those_of_another_optimizer_stay_there():
    network = nn.Sequential(nn.Linear(3, 4), nn.PReLU(), nn.Linear(4, 1), nn.PReLU())
    optimizer = torch.optim.SGD(network[:2].named_parameters(), lr=0.1, weight_decay=0.1)
    exempt_from_decay(optimizer, network)
    assert [group["param_names"] for group in optimizer.param_groups] == [["0.weight", "0.bias"], ["1.weight"]]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1]


def test_optimizers_that_do_not_decay_keep_one_group():
    network = nn.Sequential(nn.Linear(3, 4), nn.PReLU())
    for optimizer in (SGD(network.parameters(), lr=0.1), torch.optim.Rprop(network.parameters())):
        exempt_from_decay(optimizer, network)
        assert len(optimizer.param_groups) == 1
    alone = AdamW(network[1].parameters(), weight_decay=0.1)
    exempt_from_decay(alone, network[1])
    assert [group["weight_decay"] for group in alone.param_groups] == [0.0]


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
        *(({"rule": rule}, "must be a rate rule") for rule in ("ratio", NormRatio, 0.5)),
    ],
)
def test_optimizers_reject_arguments_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        trained(lambda p: Muon(p, **options), steps=0)


def test_unsupported_parameters_regions_and_bounds_raise_errors():
    with pytest.raises(RuntimeError, match="complex"):
        trained(lambda p: Muon(p), dtype=torch.complex64, steps=1)
    params = parameters()
    with pytest.raises(ValueError, match="do not fit"):
        SGD(list(params.values())).set_regions({params["linear"]: regions()["conv"]})
    for rule in (NormRatio, MaxOne):
        for bound in (0.5, -1.0, float("nan")):
            with pytest.raises(UserError, match="must be at least 1"):
                rule(max_factor=bound)

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from growlab import parts
from growlab.base.errors import UserError
from growlab.base.settings import left_out
from growlab.grower import trace_for_growth
from growlab.grower.triggers import Plateau
from growlab.growth import FixedSize, GrowthMethod, PairGrowth
from growlab.lab.data import ImageData
from growlab.lab.networks import CifarResNet, mlp8
from growlab.lab.training.build import optimizer_maker
from growlab.lab.training.plan import Loop, Plan, Planning, StageCost
from growlab.widths import trace
from tests.cases import Around
from tests.whole_runs import mlp8_flops

SETTINGS = {"total_epochs": 9, "epochs": [2, 1], "widths": [0.5, 1], "batch_sizes": [50, 20], "equal_flops": False}
LOOP = Loop()
NO_RATES = {"_target_": "growlab.lab.training.RateAdaptation"}


@pytest.fixture(scope="module")
def data() -> ImageData:
    made = ImageData("digits", limit_train=110, limit_test=10, batch_size=20)
    made.setup()
    return made


def plan(data: ImageData, growth=None, demand=None, **changes) -> Plan:
    network = mlp8(data.image_shape, 10, width=8)
    loop = Loop(changes.pop("limit", None), changes.pop("accumulate", 1))
    return planned(network, SETTINGS | changes, growth or PairGrowth(), data, loop, demand)


def planned(
    network: torch.nn.Module, settings: dict, growth: GrowthMethod, data: ImageData, loop: Loop = LOOP, demand=None
) -> Plan:
    graph = trace(network, data.probe_batch(2))
    planning = Planning(settings, growth, demand, data, loop)
    return planning.plan(planning.trigger(), graph, StageCost(network, graph, (), data.probe_batch(1)))[1]


def test_the_plan_of_a_growing_run(data: ImageData) -> None:
    made = plan(data)
    assert made.schedule.epochs == (2, 1)
    assert made.flops == [mlp8_flops(4), mlp8_flops(8)]
    assert (made.batches, made.steps, made.samples) == ([3, 3, 6], [3, 3, 6], [110] * 3)
    assert made.train_flops == 3 * 110 * (2 * mlp8_flops(4) + mlp8_flops(8))
    expected = 100 * (2 * mlp8_flops(4) + mlp8_flops(8)) / (3 * mlp8_flops(8))
    assert made.train_cost_percent == pytest.approx(expected)


def test_a_network_that_cannot_grow_is_refused_and_trains_at_fixed_size(data: ImageData) -> None:
    sort = Around(lambda _, x: x.sort(dim=1).values)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8), sort)
    network.add_module("classifier", torch.nn.Linear(8, 10))
    with pytest.raises(UserError, match=r"nothing in this network can grow \(.*classifier: the network's out"):
        planned(network, SETTINGS, PairGrowth(), data)
    settings = SETTINGS | {"widths": None, "batch_sizes": None, "epochs": None}
    assert planned(network, settings, FixedSize(), data).schedule.epochs == (9,)


@pytest.mark.parametrize("wrong", [{"lr": "abc"}, {"weight_decay": -1}, {"momentum": [0.9]}])
def test_invalid_settings_of_an_optimizer_are_refused(wrong: dict) -> None:
    settings = {"_target_": "growlab.optim.SGD", "_partial_": True, "lr": 0.1}
    weight = torch.nn.Parameter(torch.zeros(2))
    assert optimizer_maker(DictConfig({"optimizer": settings, "lr_adapt": NO_RATES}))([weight]).defaults["lr"] == 0.1
    make = optimizer_maker(DictConfig({"optimizer": settings | wrong, "lr_adapt": NO_RATES}))
    with pytest.raises(UserError, match=f"^{next(iter(wrong))} must be "):
        make([weight])


@pytest.mark.parametrize(
    ("limit", "accumulate", "batches", "steps", "samples"),
    [
        (None, 2, [3, 3, 6], [2, 2, 3], [110, 110, 110]),
        (2, 1, [2, 2, 2], [2, 2, 2], [100, 100, 40]),
        (0.5, 1, [1, 1, 3], [1, 1, 3], [50, 50, 60]),
    ],
)
def test_plans_of_limited_and_accumulated_batches(data, limit, accumulate, batches, steps, samples) -> None:
    made = plan(data, limit=limit, accumulate=accumulate)
    assert (made.batches, made.steps, made.samples) == (batches, steps, samples)
    assert made.train_flops == 3 * sum(made.flops_in_epoch)


@pytest.mark.parametrize("multiple", [0.5, 1.5])
def test_equal_flops_count_the_width(data: ImageData, multiple: float) -> None:
    grown = plan(data, epochs=[20, 10])
    fixed = plan(data, FixedSize(multiple), epochs=[20, 10], equal_flops=True)
    assert fixed.reference_epochs == 30 and len(fixed.schedule.epochs) == len(fixed.flops) == 1
    assert (fixed.flops[0], fixed.full_flops) == (mlp8_flops(int(8 * multiple)), mlp8_flops(8))
    one_epoch = 3 * 110 * fixed.flops[0]
    assert abs(fixed.train_flops - grown.train_flops) <= one_epoch / 2


@pytest.mark.parametrize(
    ("growth", "changes", "depth", "budget"),
    [
        (FixedSize(), {}, None, 7),
        (FixedSize(0.5), {}, None, 9.3),
        (FixedSize(depth_multiple=0.0), {}, "auto", 7),
        (PairGrowth(), {"initial_width": 0.5}, None, 9.3),
        (PairGrowth(), {"initial_width": 0.25, "num_stages": 3, "batch_growth_rate": 0.5}, "auto", 7),
        (PairGrowth(), {"initial_epochs": 3, "num_stages": 2}, None, 7),
    ],
)
def test_runs_of_one_budget_cost_the_same(growth, changes: dict, depth: str | None, budget: float) -> None:
    """Up to an epoch of the last stage; a pass has two epochs."""
    data = ImageData("digits", limit_train=110, limit_test=10, batch_size=20, epochs_per_pass=2)
    data.setup()
    rates = {name: None for name in ("epochs", "widths", "batch_sizes")} | {"num_stages": 4}
    settings = SETTINGS | rates | {"budget": budget} | changes
    network = CifarResNet(2, 10, 1, (4, 8))
    planning = Planning(settings, growth, None, data)
    trigger = planning.trigger()
    chosen = [parts.Depth(depth)] if depth else []
    graph = trace_for_growth(network, data.probe_batch(2), growth, chosen)
    cost = StageCost(network, graph, chosen, data.probe_batch(1))
    _, made = planning.plan(trigger, graph, cost, chosen)
    allowed, spent = budget * 110 * made.full_flops, sum(made.flops_in_epoch)
    assert 0 <= allowed - spent <= made.flops[-1] * 60
    assert made.schedule.total_epochs == planning.settings["total_epochs"]
    assert made.reference_epochs == 2 * budget
    smaller = isinstance(growth, FixedSize) and made.flops[0] < made.full_flops
    assert (made.schedule.total_epochs > 2 * budget) == (smaller or not isinstance(growth, FixedSize))


BUDGET = {"epochs": None, "budget": 5.0}


@pytest.mark.parametrize(
    ("changes", "growth", "demand", "message"),
    [
        *(({"limit": limit}, PairGrowth(), None, "limit_train_batches") for limit in (0, 0.1, 1.5)),
        ({"equal_flops": True}, PairGrowth(), None, "growth=none"),
        ({**BUDGET, "epochs": [1, 2]}, PairGrowth(), None, r"schedule.epochs both set the length"),
        ({**BUDGET, "equal_flops": True}, FixedSize(), None, "schedule.equal_flops both set the length"),
        (BUDGET, PairGrowth(), Plateau(), "decides them while it trains"),
        # An epoch of each stage: 1 + mlp8_flops(4) / mlp8_flops(8).
        ({**BUDGET, "budget": 0.9}, PairGrowth(), None, "shortest run of 2 stages, which costs 1.39 epochs of"),
    ],
)
def test_impossible_plans_are_refused(data: ImageData, changes, growth, demand, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(data, growth, demand, **changes)


def test_a_network_without_multiply_adds_has_no_cost(data: ImageData) -> None:
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LayerNorm(64))
    with pytest.raises(UserError, match="no multiply-adds to count"):
        planned(network, SETTINGS | {"epochs": None, "widths": None, "batch_sizes": None}, FixedSize(), data)


def test_total_tokens_must_be_at_least_a_step() -> None:
    text: Any = SimpleNamespace(tokens_per_sample=16, batch_size=4)
    settings = {"total_tokens": 63, "batch_growth_rate": 0.0, "batch_sizes": None}
    with pytest.raises(UserError, match="total_tokens=63 must be at least one step's 64 tokens"):
        Planning(settings, PairGrowth(), None, text)


def test_a_part_is_left_out_by_its_first_argument() -> None:
    target = "growlab.parts.Own"
    assert left_out(None) and left_out({"_target_": target, "first": None, "second": 1})
    assert not left_out({"_target_": target, "first": 1, "second": None})
    assert not left_out({"_target_": target})

"""Demands, their decisions and guarantees; triggers whose stages are known beforehand."""

from fractions import Fraction
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from growlab.base.errors import UserError
from growlab.grower import Grower
from growlab.grower.triggers import (
    At,
    Budget,
    Clock,
    Demand,
    Expressivity,
    GradientNorm,
    Never,
    OnDemand,
    Plateau,
    Progress,
    Scheduled,
)
from growlab.growth import Bottleneck, Net2Net, PairGrowth, Schedule, make_schedule
from tests.cases import Around

STEPS = [{"a": 2, "b": 4}, {"a": 4, "b": 8}, {"a": 6, "b": 10}, {"a": 8, "b": 16}]


def rows(metric: str, *values: float | None) -> list[dict[str, Any]]:
    return [{metric: value} for value in values]


def progress(rows: list[dict[str, Any]], **other: Any) -> Progress:
    return Progress(**{"epoch": 5, "total_epochs": 100, "rows": rows, "steps_left": 2, **other})


@pytest.mark.parametrize(
    ("losses", "grows"),
    [
        ([3.0, 2.0, 1.0], False),
        ([3.0, 1.0, 1.0], False),
        ([3.0, 1.0, 1.0, 1.0], True),
        # 0.5 % is no improvement, 2 % is one.
        ([3.0, 1.0, 0.995, 0.993], True),
        ([3.0, 1.0, 0.98, 0.975], False),
        ([3.0, 1.0, 2.0, float("nan")], True),
        ([], False),
    ],
)
def test_plateau_grows_when_the_metric_stops_improving(losses: list[float], grows: bool) -> None:
    assert Plateau(patience=2, min_delta=0.01).wants(progress(rows("val_loss", *losses))) == grows
    accuracies = rows("val_accuracy", *(4.0 - loss for loss in losses))
    if losses and grows:
        assert Plateau("val_accuracy", patience=2, min_delta=0.01).wants(progress(accuracies))


def test_a_metric_that_is_not_recorded_raises_an_error() -> None:
    recorded = ["epoch", "train_loss", "train_accuracy", "test_loss"]
    with pytest.raises(ValueError, match="metric='val_loss' is not recorded: hold out a validation set, or"):
        Plateau().check_records(recorded)
    with pytest.raises(ValueError, match="metric='train_accuracy' is not recorded: use train_loss"):
        Plateau("train_accuracy").check_records(["train_loss"])
    Plateau("train_accuracy").check_records(recorded)
    GradientNorm().check_records([])


def test_expressivity_grows_when_little_is_within_reach() -> None:
    demand, some = Expressivity(0.8), {"a": Bottleneck(1.0, 0.5)}
    assert not demand.wants(progress([{}], bottlenecks=some, out_of_reach=[0.9]))
    assert not demand.wants(progress([{}], bottlenecks=some, out_of_reach=[0.9, 0.915]))
    assert demand.wants(progress([{}], bottlenecks=some, out_of_reach=[0.9, 0.925]))
    # All measurable groups are at full width, so the others need not wait.
    assert demand.wants(progress([{}], bottlenecks={}, out_of_reach=[0.9, 1.0]))


def test_a_network_without_measurable_channels_raises_an_error_before_training() -> None:
    """Its stream has two producing layers."""
    network = Around(
        lambda net, x: net.head((h := net.stem(x)) + net.branch(torch.relu(h))), stem=[3, 8], branch=[8, 8], head=[8, 2]
    )
    schedule = Schedule((1, 3), (Fraction(1, 2), Fraction(1)), (4, 4))
    trigger = OnDemand(Expressivity(), schedule, 4)
    grower = Grower(network, torch.ones(2, 3), method=PairGrowth(), trigger=trigger)
    grower.provide(records=list, samples=[1], flops=lambda *_: 1, reference_flops=1.0)
    with pytest.raises(UserError, match="one producing and one consuming layer, and this network has none"):
        grower.step(epoch=0)


def test_groups_grow_where_most_is_missing() -> None:
    demand = Plateau("train_loss", patience=1, groups="bottleneck", groups_fraction=0.5)
    assert demand.wants_bottlenecks and not demand.wants_gradients
    missing = {"a": Bottleneck(9.0, 1.0), "b": Bottleneck(3.0, 2.0)}
    now = progress(rows("train_loss", 1.0, 1.0), bottlenecks=missing, steps_left=3)
    assert demand.decide(now, STEPS[0], STEPS) == {"a": 2, "b": 8}


def test_gradient_norm_grows_when_the_gradient_is_small() -> None:
    demand = GradientNorm(0.5)
    assert not demand.wants(progress(rows("gradient_norm", 1.0)))
    assert not demand.wants(progress(rows("gradient_norm", 1.0, 3.0, 1.6)))
    assert demand.wants(progress(rows("gradient_norm", 1.0, 3.0, 1.4)))


def test_groups_with_the_largest_gradients_grow() -> None:
    demand = GradientNorm(1.0, groups="gradient", groups_fraction=0.5)
    seen = progress(rows("gradient_norm", 2.0, 1.0), steps_left=3, gradient_norms={"a": 0.1, "b": 0.2})
    assert demand.decide(seen, STEPS[0], STEPS) == {"a": 2, "b": 8}
    # A group at full width is not chosen, however large its gradient.
    assert demand.decide(seen, {"a": 2, "b": 16}, STEPS) == {"a": 4, "b": 16}
    # At the last possible event all groups grow to full width.
    due = progress(seen.rows, steps_left=1, epoch=95, gradient_norms=seen.gradient_norms)
    assert demand.decide(due, {"a": 2, "b": 16}, STEPS) == STEPS[-1]


class Whim(Demand):
    """Returns the given wishes, epoch by epoch."""

    def __init__(self, wishes: list[bool], **other: Any) -> None:
        super().__init__(**other)
        self.wishes = wishes

    def wants(self, progress: Progress) -> bool:
        return self.wishes[progress.epoch % len(self.wishes)]


def run(demand: Demand, total_epochs: int, flops: tuple[int, ...]) -> tuple[list[int], float]:
    """Simulate a run: return the stage of each epoch, and the cost in percent."""
    stages, stage, age = [], 0, 0
    for epoch in range(total_epochs):
        left = len(STEPS) - 1 - stage
        spent = sum(flops[s] for s in stages)
        rest = [flops[min(stage + 1 + i // demand.min_epochs, 3)] for i in range(total_epochs - epoch)]
        percent = 100.0 / (flops[-1] * total_epochs)
        seen = Progress(epoch, total_epochs, [{}] * age, left, spent * percent, (spent + sum(rest)) * percent)
        if epoch and demand.decide(seen, STEPS[stage], STEPS) != STEPS[stage]:
            stage, age = stage + 1, 0
        stages.append(stage)
        age += 1
    return stages, 100.0 * sum(flops[s] for s in stages) / (flops[-1] * total_epochs)


@settings(max_examples=100, deadline=None)
@given(
    wishes=st.lists(st.booleans(), min_size=1, max_size=30),
    total=st.integers(13, 40),
    every=st.integers(1, 3),
    final=st.sampled_from([0.0, 0.1, 0.3]),
)
def test_full_width_is_reached_in_time(wishes: list[bool], total: int, every: int, final: float) -> None:
    demand = Whim(wishes, min_epochs=every, final_fraction=final)
    demand.check(total, 3, 50.0)
    stages, _ = run(demand, total, (1, 4, 9, 16))
    lengths = [stages.count(stage) for stage in range(4)]
    assert min(lengths[:3]) >= every and lengths[3] >= max(1, final * total)


@settings(max_examples=100, deadline=None)
@given(percent=st.floats(40, 100), total=st.integers(12, 60), every=st.integers(1, 3), seed=st.integers(1, 15))
def test_a_budget_is_kept_and_used(percent: float, total: int, every: int, seed: int) -> None:
    demand, flops = Budget(percent, min_epochs=every, final_fraction=0.1), (seed, 20, 60, 100)
    _, cheapest = run(Whim([False], min_epochs=every, final_fraction=0.1), total, flops)
    if cheapest > percent:
        with pytest.raises(ValueError, match="the cost of growing as late"):
            demand.check(total, 3, cheapest)
        return
    stages, cost = run(demand, total, flops)
    assert cost <= percent and stages[-1] == 3
    # Growing one epoch earlier would exceed the budget, unless growth began at the first possible epoch.
    begin = stages.index(1)
    if begin > max(1, every):
        earlier = [0] * (begin - 1) + stages[begin:] + [3]
        assert 100.0 * sum(flops[s] for s in earlier) / (100 * total) > percent


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Plateau(metric="loss"), "metric must be val_loss"),
        (lambda: Plateau(patience=0), "patience must be at least 1"),
        (lambda: Budget(0), "percent must be above 0"),
        (lambda: GradientNorm(2), "ratio must be in"),
        (lambda: Plateau(min_epochs=0), "min_epochs must be at least 1"),
        (lambda: Plateau(final_fraction=1), "final_fraction must be in"),
        (lambda: Plateau(groups="some"), "all, gradient or bottleneck, not 'some'"),
        (lambda: Plateau(groups_fraction=0), "groups_fraction must be in"),
        (lambda: Plateau(patience="x"), "patience must be an integer, not 'x'"),
        (lambda: Plateau(final_fraction=None), "final_fraction must be a finite number, not None"),
        (lambda: Expressivity("x"), "ratio must be a finite number, not 'x'"),
        (lambda: Plateau(min_epochs=3).check(9, 3, 50.0), "9 epochs are too few to grow 3 times"),
        (lambda: Budget(30).check(100, 3, 41.0), "percent=30 is below 41.0"),
        (lambda: OnDemand("plateau", make_schedule(10, 32, num_stages=2), 10), "needs a demand and a schedule"),
        (lambda: OnDemand(Plateau(), [0.5, 1.0], 10), "needs a demand and a schedule"),
        (lambda: Scheduled([0.5, 1.0]), r"needs a schedule, as growlab\.make_schedule returns"),
        (lambda: Never(width="0.5"), r"must be above 0|must be a fraction of the blocks"),
        (lambda: Never(width=0), r"must be above 0|must be a fraction of the blocks"),
        (lambda: Never(depth="1"), r"must be above 0|must be a fraction of the blocks"),
        (lambda: Never(depth=1.5), r"must be above 0|must be a fraction of the blocks"),
    ],
)
def test_triggers_and_demands_reject_invalid_arguments(make: Any, message: str) -> None:
    with pytest.raises((UserError, ValueError), match=message):
        make()


@pytest.mark.parametrize("sizes", [[8, 0], [8, 4.5], [8, True], [8, None], [8], 8])
def test_batch_sizes_are_whole_numbers_above_0(sizes: Any) -> None:
    with pytest.raises(UserError, match="must be whole numbers above 0, one for each of its 2 stages"):
        At({0: 0.5, 1: 1.0}, batch_sizes=sizes)


# Stages that are known beforehand ------------------------------------------------------------------------------


def grower(trigger: Any) -> Grower:
    network = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    return Grower(network, torch.randn(8, 4), method=Net2Net(), trigger=trigger)


@pytest.mark.parametrize(
    ("trigger", "sentence"),
    [
        ({0: {"0": 8}, 1: {"0": 20}}, "the width 20 of group '0' must be a whole number from 1 to its full width 16"),
        ({0: {"0": 2.5}, 1: 1.0}, "the width 2.5 of group '0' must be a whole number"),
        ({0: {"0": "8"}}, "the width '8' of group '0' must be a whole number"),
        ({0: {"0": 8, 3: 4}}, "no width group 3, only 0"),
        ({0: True, 1: 1}, "a width of True must be a fraction"),
        ({0: 2.0}, "a width of 2.0 must be a fraction"),
        ({0: nan}, "a width of nan must be a fraction"),
        ({0: "0.5"}, "a width of '0.5' must be a fraction"),
        ({0: 0.5, "1": 1.0}, "start '1' of a trigger's stage must be a finite number"),
        ({0: 0.5, inf: 1.0}, "start inf of a trigger's stage must be a finite number"),
        ({False: 0.5, 1: 1.0}, "start False of a trigger's stage must be a finite number"),
        ({-1: 0.5, 1: 1.0}, "must begin at 0"),
    ],
)
def test_triggers_reject_invalid_widths_and_times(trigger: dict[Any, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        grower(trigger)


@pytest.mark.parametrize("number", [np.int64, np.int32, np.float32, np.float64, Fraction, int, float])
def test_numbers_of_any_type_are_taken(number: Any) -> None:
    trigger = At(
        {number(0): {"0": number(4)}, number(2): Fraction(1, 2), number(3): number(1)},
        batch_sizes=[number(8), number(8), number(16)],
    )
    made = grower(trigger)
    assert [trigger.stage_at(Clock(epoch=epoch)) for epoch in range(4)] == [0, 0, 1, 2]
    assert trigger.batch_sizes == (8, 8, 16) and type(made.seed_widths["0"]) is int
    assert [stage["0"] for stage in trigger.forecast(made.graph)] == [4, 8, 16]

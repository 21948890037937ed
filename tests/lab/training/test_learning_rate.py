from collections.abc import Callable
from itertools import accumulate
from math import cos, pi, sqrt
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from growlab.base.errors import UserError
from growlab.growth import make_schedule
from growlab.lab.training import LearningRate

SCHEDULE = make_schedule(6, 32, epochs=[2, 3, 1], widths=[0.5, 0.7, 1], batch_sizes=[128, 64, 32])
STEPS = [2, 2, 4, 4, 4, 8]
STARTS = [0, *accumulate(STEPS)]
FLOPS = [10, 10, 20, 20, 20, 80]


def factors(rate: LearningRate) -> list[float]:
    factor = rate.factor_at_step(SCHEDULE, STEPS, FLOPS)
    return [factor(step) for step in range(sum(STEPS) + 1)]


class At(NamedTuple):
    """A moment of training: steps, epochs and fraction of FLOPs so far, and the position in the stage."""

    step: int
    epoch: float
    spent: float
    batch_size: int = 32
    of_stage: float = 1.0
    since_growth: int = 8


def moments() -> list[At]:
    """Moments before each step, and the end."""
    found, spent = [], 0.0
    for first, last in ((0, 2), (2, 5), (5, 6)):
        for epoch in range(first, last):
            for index in range(STEPS[epoch]):
                now, since = epoch + index / STEPS[epoch], len(found) - STARTS[first]
                place = ((now - first) / (last - first), since if first else 8)
                found.append(At(len(found), now, spent, SCHEDULE.batch_size_at(epoch), *place))
                spent += FLOPS[epoch] / STEPS[epoch] / sum(FLOPS)
    return [*found, At(len(found), 6.0, spent)]


def cosine(part: float) -> float:
    return (1 + cos(pi * part)) / 2


def risen(part: float, after: Callable[[float], float]) -> float:
    """Linear warm-up, then another function."""
    return part if part < 1 else after(part)


COST = {"progress_unit": "cost"}
WSD = {**COST, "warmup_fraction": 0.125, "decay_fraction": 0.25}
CONSTANT = {"shape": "constant"}
FORMULAS: list[tuple[dict[str, Any], Callable[[At], float]]] = [
    ({}, lambda at: cosine(at.epoch / 6)),
    ({"warmup_epochs": 2.5}, lambda at: risen(at.epoch / 2.5, lambda _: cosine((at.epoch - 2.5) / 3.5))),
    (
        {"warmup_steps": 4, "progress_unit": "steps"},
        lambda at: risen(at.step / 4, lambda _: cosine((at.step - 4) / 20)),
    ),
    ({**COST, "warmup_fraction": 0.1}, lambda at: risen(at.spent / 0.1, lambda _: cosine((at.spent - 0.1) / 0.9))),
    ({"restarts": "stage"}, lambda at: cosine(at.of_stage)),
    ({"warmup_steps_after_growth": 3}, lambda at: cosine(at.epoch / 6) * min(1, at.since_growth / 3)),
    (CONSTANT, lambda at: 1),
    ({**CONSTANT, "batch_rule": "linear"}, lambda at: at.batch_size / 32),
    ({**CONSTANT, "batch_rule": "sqrt"}, lambda at: sqrt(at.batch_size / 32)),
    ({"shape": "wsd", **WSD}, lambda at: risen(at.spent / 0.125, lambda _: min(1, (1 - at.spent) / 0.25))),
    (
        {"shape": "wsd", **WSD, "decay_shape": "1-sqrt"},
        lambda at: risen(at.spent / 0.125, lambda _: 1 - sqrt(max(0, at.spent - 0.75) / 0.25)),
    ),
    ({"shape": "steps", "milestones": [2, 4.5], "decay": 0.1}, lambda at: 0.1 ** sum(at.epoch >= m for m in (2, 4.5))),
    ({"shape": "inverse_sqrt", "warmup_steps": 4}, lambda at: risen(at.step / 4, lambda part: part**-0.5)),
]


@pytest.mark.parametrize(("settings", "formula"), FORMULAS, ids=lambda value: "" if callable(value) else str(value))
def test_factors_equal_formulas(settings: dict[str, Any], formula: Callable[[At], float]) -> None:
    assert factors(LearningRate(**settings)) == pytest.approx([formula(at) for at in moments()], abs=1e-7)


@given(
    warmup=st.floats(0, 5.9),
    restarts=st.sampled_from(["none", "stage"]),
    shape=st.sampled_from(["cosine", "constant", "wsd", "one_cycle"]),
    clock=st.sampled_from(["epochs", "cost"]),
    rewarm=st.integers(0, 5),
)
def test_factors_stay_between_zero_and_one(warmup: float, restarts: str, shape: str, clock: str, rewarm: int) -> None:
    by_epochs = clock == "epochs" and shape != "one_cycle"
    warmups = {"warmup_epochs": warmup} if by_epochs else {"warmup_fraction": warmup / 6}
    decay = {"decay_fraction": max((1 - warmup / 6) / 2, 1e-3)}
    rate = LearningRate(
        shape, restarts=restarts, progress_unit=clock, warmup_steps_after_growth=rewarm, **warmups, **decay
    )
    assert all(0 <= f <= 1 for f in factors(rate))


@pytest.mark.parametrize("rise", [0.0, 0.125, 0.5])
def test_one_cycle_is_torchs(rise: float) -> None:
    """Phases end one step earlier in torch, which counts the current step."""
    steps = sum(STEPS)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.7, momentum=0.9)
    peak = ((rise or 0.3) * steps + 1) / (steps + 1)
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.7, total_steps=steps + 1, pct_start=peak)
    expected = []
    for _ in range(steps):
        expected.append(optimizer.param_groups[0]["lr"] / 0.7)
        optimizer.step()
        theirs.step()
    schedule = make_schedule(1, 32, epochs=[1], widths=[1])
    factor = LearningRate("one_cycle", warmup_fraction=rise).factor_at_step(schedule, [steps])
    assert [factor(step) for step in range(steps)] == pytest.approx(expected, rel=1e-9)


def test_one_cycle_may_restart_in_each_stage() -> None:
    got = factors(LearningRate("one_cycle", warmup_fraction=0.5, restarts="stage"))
    assert [got[STARTS[epoch]] for epoch in (0, 2, 5)] == pytest.approx([1 / 25] * 3)
    assert [got[STARTS[epoch]] for epoch in (1,)] == pytest.approx([1]) and got[-1] == pytest.approx(1 / 25e4)
    with pytest.raises(ValueError, match="warmup_epochs at 0"):
        LearningRate("one_cycle", warmup_epochs=1)


@given(batches=st.lists(st.integers(1, 20), min_size=6, max_size=6))
def test_cost_equals_epochs_if_all_samples_cost_the_same(batches: list[int]) -> None:
    for rate in ({}, {"shape": "wsd", "warmup_fraction": 0.2}, {"restarts": "stage"}):
        by_cost, by_epochs = (
            LearningRate(**rate, progress_unit=clock).factor_at_step(SCHEDULE, batches, [7] * 6)
            for clock in ("cost", "epochs")
        )
        for step in range(sum(batches) + 1):
            assert by_cost(step) == pytest.approx(by_epochs(step), abs=1e-12)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"shape": "cosin"}, {"restarts": "epoch"}, {"batch_rule": "square"}),
        *({"warmup_epochs": -1}, {"warmup_epochs": float("nan")}),
        *({"warmup_steps": 3, "shape": "one_cycle"}, {"warmup_steps": 0, "shape": "inverse_sqrt"}),
        *({"progress_unit": "images"}, {"decay_shape": "sqrt", "shape": "wsd"}, {"warmup_steps_after_growth": -1}),
        *({"warmup_epochs": 1, "progress_unit": "cost"}, {"warmup_epochs": 1, "warmup_fraction": 0.1}),
        *(
            {"progress_unit": "cost", "shape": "steps"},
            {"progress_unit": "cost", "shape": "inverse_sqrt", "warmup_steps": 3},
        ),
        *({"warmup_fraction": 1}, {"warmup_fraction": -0.1}, {"decay_fraction": 0, "shape": "wsd"}),
        {"decay_fraction": 0.9, "shape": "wsd", "warmup_fraction": 0.2},
    ],
)
def test_invalid_schedules_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LearningRate(**wrong)


def test_a_warm_up_in_epochs_names_all_that_a_run_in_steps_needs() -> None:
    rate = {"warmup_epochs": 0.25}
    with pytest.raises(UserError, match=r"set warmup_epochs=0 and warmup_steps\."):
        LearningRate(**rate).by_steps()
    with pytest.raises(ValueError, match="warmup_steps needs warmup_epochs=0"):
        LearningRate(**rate, warmup_steps=3)
    assert LearningRate(warmup_steps=3).by_steps().warmup_steps == 3


@pytest.mark.parametrize("warmup", [{"warmup_epochs": 4}, {"warmup_steps": 12}])
def test_warm_up_may_take_the_whole_run(warmup: dict) -> None:
    factor = LearningRate(**warmup).factor_at_step(make_schedule(4, 8, num_stages=1), [3] * 4)
    assert [factor(step) for step in (6, 12)] == [0.5, 1.0]


@pytest.mark.parametrize("unit", ["epochs", "steps", "auto"])
def test_milestones_of_a_run_in_steps_are_steps(unit: str) -> None:
    rate = LearningRate(shape="steps", milestones=[50], progress_unit=unit).by_steps()
    factor = rate.factor_at_step(make_schedule(10, 8, num_stages=1), [10] * 10, [1.0] * 10)
    assert [factor(step) for step in (49, 50)] == [1.0, 0.1]


def test_auto_counts_steps_in_a_run_of_steps_whose_cost_is_unknown() -> None:
    """An epoch of such a run is the interval between evaluations, of which the last may be shorter."""
    made = LearningRate(progress_unit="auto")
    known, unknown = made.by_steps(True), made.by_steps(False)
    assert (known.progress_unit, unknown.progress_unit) == ("auto", "steps")
    factor = unknown.factor_at_step(make_schedule(3, 8, num_stages=1), [40, 40, 20])
    assert factor(50) == pytest.approx(0.5)


def test_progress_by_cost_needs_flops() -> None:
    with pytest.raises(UserError, match="progress_unit=cost needs to know the FLOPs"):
        LearningRate(progress_unit="cost").factor_at_step(SCHEDULE, STEPS)


def test_progress_unit_auto_is_cost_if_possible() -> None:
    def got(flops: list[int] | None, **settings: object) -> list[float]:
        factor = LearningRate(**settings).factor_at_step(SCHEDULE, STEPS, flops)
        return [factor(step) for step in range(sum(STEPS) + 1)]

    by_cost, by_epochs = (got(FLOPS, shape="wsd", progress_unit=clock) for clock in ("cost", "epochs"))
    assert by_cost != by_epochs
    assert got(FLOPS, shape="wsd", progress_unit="auto") == by_cost
    assert got(None, shape="wsd", progress_unit="auto") == by_epochs
    for counted in ({"warmup_epochs": 1}, {"shape": "steps", "milestones": [1, 3]}):
        assert got(FLOPS, **counted, progress_unit="auto") == got(FLOPS, **counted, progress_unit="epochs")

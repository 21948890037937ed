from itertools import accumulate
from math import cos, pi, sqrt

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


def test_cosine_runs_over_epochs_whatever_their_number_of_steps() -> None:
    got = factors(LearningRate())
    for epoch, (start, steps) in enumerate(zip(STARTS, STEPS, strict=False)):
        for step in range(steps):
            assert got[start + step] == pytest.approx((1 + cos(pi * (epoch + step / steps) / 6)) / 2)
    assert got[-1] == pytest.approx(0, abs=1e-15)


def test_warm_up_rises_from_zero_and_the_cosine_starts_behind_it() -> None:
    got = factors(LearningRate(warmup_epochs=2.5))
    assert got[:5] == pytest.approx([0, 0.5 / 2.5, 1 / 2.5, 1.5 / 2.5, 2 / 2.5])
    assert got[6] == pytest.approx(1)
    assert got[STARTS[5]] == pytest.approx((1 + cos(pi * 2.5 / 3.5)) / 2)


def test_warm_up_and_clock_in_steps() -> None:
    got = factors(LearningRate(warmup_steps=4, progress_unit="steps"))
    assert got[:5] == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    assert got[4:] == pytest.approx([(1 + cos(pi * step / 20)) / 2 for step in range(21)], abs=1e-15)


def test_restarts_begin_each_stage_at_the_full_rate_and_end_it_near_zero() -> None:
    got = factors(LearningRate(restarts="stage"))
    assert [got[STARTS[epoch]] for epoch in (0, 2, 5)] == pytest.approx([1, 1, 1])
    assert got[STARTS[2] - 1] == pytest.approx((1 + cos(pi * 1.5 / 2)) / 2)
    assert got[STARTS[5] - 1] == pytest.approx((1 + cos(pi * 2.75 / 3)) / 2)


@pytest.mark.parametrize(("rule", "scale"), [("none", lambda r: 1), ("linear", lambda r: r), ("sqrt", sqrt)])
def test_the_rate_follows_the_batch_size(rule: str, scale) -> None:
    got = factors(LearningRate(shape="constant", batch_rule=rule))
    for epoch, size in enumerate([128, 128, 64, 64, 64, 32]):
        assert got[STARTS[epoch] : STARTS[epoch + 1]] == [pytest.approx(scale(size / 32))] * STEPS[epoch]


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
    """torch counts the last step as done, so that its phases end one step earlier."""
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


def flops_spent() -> list[float]:
    """Part of the run's FLOPs that are spent before each step, and behind the last one."""
    each = [FLOPS[e] / steps for e, steps in enumerate(STEPS) for _ in range(steps)]
    return [spent / sum(FLOPS) for spent in accumulate(each, initial=0)]


def test_the_cosine_by_cost_runs_over_the_flops_that_are_spent() -> None:
    warmup = 0.1
    rate = LearningRate(progress_unit="cost", warmup_fraction=warmup)
    expected = [
        spent / warmup if spent < warmup else (1 + cos(pi * (spent - warmup) / (1 - warmup))) / 2
        for spent in flops_spent()
    ]
    assert factors(rate) == pytest.approx(expected, abs=1e-12)
    # Half of the FLOPs are left when the last of six epochs begins.
    assert factors(LearningRate(progress_unit="cost"))[STARTS[5]] == pytest.approx((1 + cos(pi / 2)) / 2)
    assert factors(LearningRate())[STARTS[5]] == pytest.approx((1 + cos(pi * 5 / 6)) / 2)


@given(batches=st.lists(st.integers(1, 20), min_size=6, max_size=6))
def test_where_all_samples_cost_the_same_both_clocks_agree(batches: list[int]) -> None:
    for rate in ({}, {"shape": "wsd", "warmup_fraction": 0.2}, {"restarts": "stage"}):
        by_cost, by_epochs = (
            LearningRate(**rate, progress_unit=clock).factor_at_step(SCHEDULE, batches, [7] * 6)
            for clock in ("cost", "epochs")
        )
        for step in range(sum(batches) + 1):
            assert by_cost(step) == pytest.approx(by_epochs(step), abs=1e-12)


@pytest.mark.parametrize(("decay_shape", "left"), [("linear", lambda x: 1 - x), ("1-sqrt", lambda x: 1 - sqrt(x))])
def test_wsd_is_constant_and_then_decays_over_the_last_part(decay_shape: str, left) -> None:
    rate = LearningRate(
        "wsd", progress_unit="cost", warmup_fraction=0.125, decay_fraction=0.25, decay_shape=decay_shape
    )
    expected = [
        spent / 0.125 if spent < 0.125 else 1.0 if spent <= 0.75 else left((spent - 0.75) / 0.25)
        for spent in flops_spent()
    ]
    assert factors(rate) == pytest.approx(expected, abs=1e-7)


def test_the_rate_rises_again_after_each_growth_event() -> None:
    plain, rewarmed = factors(LearningRate()), factors(LearningRate(warmup_steps_after_growth=3))
    # Stages begin at steps 0, 4 and 16; the last is followed by 8 steps, the others by more.
    rise = [1.0] * len(plain)
    for start in (4, 16):
        rise[start : start + 3] = [0, 1 / 3, 2 / 3]
    assert rewarmed == pytest.approx([p * r for p, r in zip(plain, rise, strict=True)])


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
def test_impossible_schedules_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LearningRate(**wrong)


def test_a_clock_without_flops_is_refused() -> None:
    with pytest.raises(UserError, match="progress_unit=cost needs to know the FLOPs"):
        LearningRate(progress_unit="cost").factor_at_step(SCHEDULE, STEPS)


def test_steps_fall_at_milestones() -> None:
    got = factors(LearningRate("steps", milestones=[2, 4.5], decay=0.1))
    assert got[: STARTS[2]] == [1] * STARTS[2]
    assert got[STARTS[2] : STARTS[4] + 2] == pytest.approx([0.1] * (STARTS[4] + 2 - STARTS[2]))
    assert got[STARTS[4] + 2 : -1] == pytest.approx([0.01] * (len(got) - STARTS[4] - 3))


def test_the_inverse_square_root_rises_to_the_base_rate_and_falls() -> None:
    got = factors(LearningRate("inverse_sqrt", warmup_steps=4))
    assert got[:5] == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    assert got[16] == pytest.approx(0.5)
    assert got[4:] == sorted(got[4:], reverse=True)


def test_the_clock_auto_counts_cost_where_it_can() -> None:
    def got(flops: list[int] | None, **settings: object) -> list[float]:
        factor = LearningRate(**settings).factor_at_step(SCHEDULE, STEPS, flops)
        return [factor(step) for step in range(sum(STEPS) + 1)]

    by_cost, by_epochs = (got(FLOPS, shape="wsd", progress_unit=clock) for clock in ("cost", "epochs"))
    assert by_cost != by_epochs
    assert got(FLOPS, shape="wsd", progress_unit="auto") == by_cost
    assert got(None, shape="wsd", progress_unit="auto") == by_epochs
    for counted in ({"warmup_epochs": 1}, {"shape": "steps", "milestones": [1, 3]}):
        assert got(FLOPS, **counted, progress_unit="auto") == got(FLOPS, **counted, progress_unit="epochs")

"""The verdict on curves whose answer is known."""

from dataclasses import replace

import numpy as np
import pytest

from growlab.lab.planner.verdict import MISSED, Gain, judge
from tests.plan.curves import Law, gain_of_growing, share, verdict, world

FULL: Law = (0.3, 0.5, 0.35)
# Fast at first and soon at its limit; worse everywhere; better everywhere; the full network itself.
EARLY, WORSE, BETTER = (0.62, 0.12, 0.3), (0.9, 0.4, 0.3), (0.3, 0.38, 0.35)
SEEDS = range(10)


def test_growing_is_said_where_it_pays() -> None:
    assert gain_of_growing(FULL, EARLY) > 0.05
    assert share(lambda seed: verdict(FULL, EARLY, seed, size="full").kind == "grow", SEEDS) > 0.8
    best = verdict(FULL, EARLY, 0, size="full").growing[0]
    assert 0.04 <= best.switch <= best.guess <= 0.75 and best.loss.median > 0.05
    # Without a difference in seconds a FLOP, seconds are saved as FLOPs are.
    assert best.seconds.median == pytest.approx(best.cost.median)


def test_a_gain_is_decided_on_where_it_is_more_than_laws_miss_by() -> None:
    known = {"size": "full", "noise": 0.003, "lost": 0.0}
    small: Law = (0.0, 0.3, 0.3)
    steep, flat = verdict((0.0, 1.0, 0.5), small, 0, **known), verdict((0.1, 1.0, 0.2), small, 0, **known)
    assert (steep.kind, steep.decided, steep.growing[0].loss.low > 0) == ("grow", True, True)
    # The laws' draws all gain; what they miss by is more.
    gain = flat.growing[0].loss
    assert (flat.kind, flat.decided) == ("grow", False) and -MISSED * 1.1 < gain.low < 0


def test_a_range_is_wider_by_its_margin_on_each_side() -> None:
    gain = Gain.of(np.linspace(0, 1, 101), 0.25)
    assert (gain.low, gain.median, gain.high) == pytest.approx((0.05 - 0.25, 0.5, 0.95 + 0.25))
    # Of a network that does not grow as of one that does.
    curves, trials = world(FULL, BETTER, 0)
    one = judge(curves, trials, "full", {"full": 1.0, "small": 1.0})
    draws = curves["full"].law(1.0) - curves["small"].loss(1.0)
    margin = MISSED * float(np.median(curves["full"].law(1.0)))
    assert one.smaller[0].loss == Gain.of(draws, margin)


@pytest.mark.parametrize("size", ["any", "full"])
@pytest.mark.parametrize("small", [WORSE, FULL], ids=["worse", "the same"])
@pytest.mark.parametrize("noise", [0.003, 0.03])
def test_growing_is_not_said_where_it_does_not_pay(small: Law, size: str, noise: float) -> None:
    assert gain_of_growing(FULL, small) <= 0
    wrong = share(lambda seed: verdict(FULL, small, seed, size=size, noise=noise).kind == "grow", SEEDS)
    assert wrong <= 0.1


@pytest.mark.parametrize("full", [FULL, (0.0, 1.0, 0.15), (1.0, 0.2, 0.5)], ids=str)
def test_it_is_seldom_said_in_a_world_of_any_kind(full: Law) -> None:
    """Worlds drawn at random: of those in which growing would lose, few are told to grow."""
    rng, said, wrong = np.random.default_rng(0), 0, 0
    for seed in range(30):
        small = (
            full[0] + rng.uniform(0, 0.6),
            full[1] * rng.uniform(0.2, 1.1),
            full[2] * rng.uniform(0.8, 1.2),
        )
        lost = rng.uniform(0, 0.6)
        says = verdict(full, small, seed, size="full", lost=lost).kind == "grow"
        said += says
        wrong += says and gain_of_growing(full, small, lost) <= 0
    assert wrong <= 2 and said >= 3


def test_a_growth_that_forgets_everything_is_not_proposed() -> None:
    assert share(lambda seed: verdict(FULL, EARLY, seed, size="full", lost=1.0).kind == "grow", SEEDS) <= 0.1


def test_a_smaller_network_is_proposed_where_it_is_better_and_will_do() -> None:
    known = {"probed": (0.0626, 0.0626)}
    kinds = [verdict(FULL, BETTER, seed, **known) for seed in SEEDS]
    assert sum(one.kind == "smaller" and one.candidate == "small" for one in kinds) >= 8
    # Not where the full network is wanted in any case.
    assert all(verdict(FULL, BETTER, seed, size="full", **known).kind != "smaller" for seed in SEEDS)


def test_the_full_network_is_decided_on_where_all_else_loses() -> None:
    one = verdict(FULL, WORSE, 0, noise=0.003)
    assert (one.kind, one.decided, one.candidate) == ("full", True, None)


def test_too_short_a_probe_leaves_it_undecided() -> None:
    one = verdict(FULL, EARLY, 0, size="full", probed=(0.02, 0.04))
    assert (one.kind, one.decided) == ("full", False) and "trusted to 32% of the budget" in one.reason


@pytest.mark.parametrize("name", ["full", "small"])
@pytest.mark.parametrize("small", [EARLY, WORSE], ids=["would pay", "would not"])
def test_curves_that_follow_no_law_decide_nothing(name: str, small: Law) -> None:
    curves, trials = world(FULL, small, 0, noise=0.003)
    curves = {**curves, name: replace(curves[name], steady=False)}
    one = judge(curves, trials, "full", {"full": 1.0, "small": 1.0}, size="full")
    assert (one.kind, one.decided) == ("full", False)


def test_an_experiment_grows_where_the_medians_say_even_beyond_the_trusted_range() -> None:
    """A small network that soon stands where the full one never comes: trusted curves see no gain in waiting longer."""
    curves, trials = world(FULL, BETTER, 0, noise=0.003)
    trusted = judge(curves, trials, "full", {"full": 1.0, "small": 1.0}, size="full").growing[0]
    assert trusted.guess > 1.5 * trusted.switch
    doubtful = {**curves, "full": replace(curves["full"], steady=False)}
    one = judge(doubtful, trials, "full", {"full": 1.0, "small": 1.0}, size="full").growing[0]
    assert one.guess == one.switch


def test_savings_that_end_where_the_law_is_trusted_are_a_least() -> None:
    """The small network is soon where the full one's law comes to only later: an interval would be none."""
    curves, trials = world(FULL, EARLY, 0, noise=0.003)
    for reach, beyond in ((curves["full"].reach, False), (0.1, True)):
        known = {**curves, "full": replace(curves["full"], reach=reach)}
        one = judge(known, trials, "full", {"full": 1.0, "small": 1.0}, size="full").growing[0]
        assert one.beyond == beyond and one.saved().startswith("at least ") == beyond
        assert (one.cost.high - one.cost.low < 0.01) == beyond


def test_without_a_trial_there_is_no_growing() -> None:
    curves, _ = world(FULL, EARLY, 0)
    one = judge(curves, {}, "full", {"full": 1.0, "small": 1.0}, size="full")
    assert (one.kind, one.decided, one.growing) == ("full", False, ())


def test_a_slow_small_network_saves_fewer_seconds_than_flops() -> None:
    curves, trials = world(FULL, EARLY, 0)
    slow = judge(curves, trials, "full", {"full": 1.0, "small": 2.0}, size="full").growing[0]
    assert slow.seconds.median == pytest.approx(slow.cost.median - slow.switch)


def test_a_worse_trial_never_speaks_more_for_growing() -> None:
    curves, trials = world(FULL, EARLY, 0)
    gains = []
    for more in (0.0, 0.05, 0.2, 1.0):
        trial = replace(trials["small"], loss=trials["small"].loss + more)
        gains.append(
            judge(curves, {"small": trial}, "full", {"full": 1.0, "small": 1.0}, size="full").growing[0]
        )
    medians = [one.loss.median for one in gains]
    kept = [one.kept.median for one in gains]
    assert (
        medians == sorted(medians, reverse=True) and kept == sorted(kept, reverse=True) and kept[-1] < kept[0]
    )

"""Laws of loss over cost: known ones are found again, and no more is claimed than can be known."""

from dataclasses import replace

import numpy as np
import pytest

from growlab.lab.planner.fit import MIN_POINTS, Measured, fit, settled
from tests.plan.curves import Law, loss, measured

LAW: Law = (0.4, 0.3, 0.35)


def test_a_law_without_noise_is_found_again() -> None:
    rng = np.random.default_rng(0)
    curves = fit({"full": measured(LAW, 1.0, 0.0, rng, first=200.0)}, "full")["full"]
    cost = np.geomspace(0.01, 4.0, 9)
    found = np.median(curves.loss(cost[:, None]), axis=1)
    assert np.abs(found - loss(LAW, cost)).max() < 0.03


@pytest.mark.parametrize("law", [LAW, (0.2, 0.8, 0.2), (1.0, 0.1, 0.5)], ids=str)
def test_the_interval_covers_what_comes(law: Law) -> None:
    """Ninety percent of the draws hold the truth at 16 times the probe's cost in most worlds."""
    hits = 0
    for seed in range(20):
        seen = {"full": measured(law, 0.0626, 0.01, np.random.default_rng(seed))}
        low, high = np.quantile(fit(seen, "full", seed=seed)["full"].loss(1.0), [0.05, 0.95])
        hits += low <= loss(law, 1.0) <= high
    assert hits >= 16


def test_uncertainty_grows_with_the_distance() -> None:
    seen = {"full": measured(LAW, 0.0626, 0.01, np.random.default_rng(1))}
    low, high = np.quantile(
        fit(seen, "full")["full"].loss(np.array([[0.06], [0.2], [1.0]])), [0.05, 0.95], axis=1
    )
    assert (np.diff(high - low) > 0).all()


def test_nothing_is_said_beyond_the_multiple() -> None:
    seen = {"full": measured(LAW, 0.01, 0.005, np.random.default_rng(2))}
    curves = fit(seen, "full", multiple=16.0)["full"]
    assert curves.reach == pytest.approx(0.16)
    assert (curves.loss(1.0) == curves.loss(0.16)).all() and (curves.law(1.0) < curves.loss(1.0)).all()


def test_a_smaller_networks_limit_is_no_lower_than_the_full_ones() -> None:
    rng = np.random.default_rng(3)
    seen = {"full": measured(LAW, 0.0626, 0.02, rng), "small": measured((0.5, 0.2, 0.35), 0.04, 0.02, rng)}
    curves = fit(seen, "full")
    assert (curves["small"].a >= curves["full"].a - 1e-12).mean() > 0.95
    # Their exponents are tied.
    near = np.abs(np.log(curves["small"].c / curves["full"].c))
    assert np.median(near) < 0.5


def test_cost_and_loss_are_each_others_inverse() -> None:
    curves = fit({"full": measured(LAW, 1.0, 0.01, np.random.default_rng(4))}, "full")["full"]
    assert np.allclose(curves.cost_at(curves.law(0.37)), 0.37)
    assert np.isinf(curves.cost_at(curves.a)).all()


def test_a_few_points_are_no_curve() -> None:
    short = tuple(range(1, MIN_POINTS))
    with pytest.raises(ValueError, match="at least 4 checkpoints, not 3"):
        Measured(tuple(map(float, short)), tuple(map(float, short)))
    with pytest.raises(ValueError, match="full was not measured"):
        fit({}, "full")


def test_training_that_still_gains_speed_is_left_out() -> None:
    cost = np.geomspace(0.005, 0.0626, 9)
    falling = loss(LAW, cost)
    slow = np.concatenate([np.linspace(falling[3] + 0.1, falling[3] + 0.05, 3), falling[3:]])
    assert settled(cost, falling) == (0, True) and settled(cost, slow)[0] in (2, 3)
    # Still gaining speed at the end; and rising.
    assert settled(cost, 3 - np.exp(20 * cost)) == (len(cost) - MIN_POINTS, False)
    assert not settled(cost, [*falling[:-1], 1.2 * falling[-2]])[1]
    # As many as a law needs fit one whatever they are: nothing shows that it goes on.
    assert settled(cost[:MIN_POINTS], falling[:MIN_POINTS]) == (0, False)
    assert settled(cost[: MIN_POINTS + 1], falling[: MIN_POINTS + 1]) == (0, True)


def test_a_curve_cut_to_the_last_few_checkpoints_is_no_law() -> None:
    """ResNet-20 on the digits, 26 steps: a law of the last four has 0.85 at the end, and the network came to 0.11."""
    cost = [0.0124, 0.0173, 0.0247, 0.0346, 0.0495, 0.0643]
    assert settled(cost, [2.25, 2.2, 2.021, 1.554, 1.308, 1.203]) == (2, False)


def test_a_curve_that_follows_no_law_is_hardly_trusted() -> None:
    one = measured(LAW, 0.0626, 0.01, np.random.default_rng(6))
    assert fit({"full": replace(one, steady=False)}, "full")["full"].reach == pytest.approx(2 * 0.0626)


def test_the_error_of_few_checkpoints_is_no_less_than_the_noise() -> None:
    """Checkpoints lie nearer to the law that is drawn through them than to the true one."""
    cost, noise, medians = np.geomspace(0.01, 1.0, 6), 0.03, []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        seen = loss(LAW, cost) + noise * rng.standard_normal(len(cost))
        curves = fit({"full": Measured(tuple(cost), tuple(seen))}, "full", draws=200, seed=seed)["full"]
        medians.append(np.median(curves.error))
    assert 1.0 <= np.median(medians) / noise <= 1.3

"""Cost against accuracy over schedules: series, the edge of what was measured, gains over fixed size."""

import numpy as np
import pytest

from growlab.base.errors import UserError
from growlab.lab.analysis.figures import frontier, frontier_seconds
from growlab.lab.analysis.results import load_runs
from growlab.lab.analysis.schedules import best_at_cost, gains, series_over_budgets
from growlab.lab.analysis.tables import grid, summarise

from .fake_runs import write_run

FIXED = {"growth": "none", "lr_adapt": "none"}


@pytest.fixture
def runs(tmp_path):
    for epochs, accuracy in ((4, 0.70), (8, 0.78), (16, 0.86)):
        write_run(
            tmp_path / f"fixed{epochs}",
            **FIXED,
            stage_epochs=(epochs,),
            cost_percent=100.0,
            test_accuracy=accuracy,
            reference_epochs=epochs,
        )
    for name, rate, lengths, cost, accuracy in (
        ("exp_short", 0.2, (2, 2, 4), 75, 0.75),  # 6 epochs' worth: fixed size reaches 0.74
        ("exp_long", 0.2, (4, 4, 8), 75, 0.83),  # 12 epochs' worth: fixed size reaches 0.82
        ("linear", 0.0, (3, 2, 3), 50, 0.69),  # 4 epochs' worth
    ):
        for seed in (0, 1):
            write_run(
                tmp_path / f"{name}{seed}",
                lr_adapt="none",
                seed=seed,
                stage_epochs=lengths,
                cost_percent=cost,
                test_accuracy=accuracy + (0.01 if seed else -0.01),
                overrides=[f"schedule.epoch_growth_rate={rate}"],
                schedule={"epoch_growth_rate": rate, "initial_fraction": 0.1, "initial_width": 0.25},
            )
    return load_runs(tmp_path)


def test_rows_that_differ_by_their_budget_make_one_series(runs):
    fixed, linear, exponential = series_over_budgets(summarise(runs))
    assert [one.name for one in (fixed, linear, exponential)] == [
        "fixed-size",
        "ours, p_t = 0",
        "ours, p_t = 0.2",
    ]
    assert [point.cost for point in fixed.points] == pytest.approx([4, 8, 16])
    assert [point.cost for point in exponential.points] == pytest.approx([6, 12])
    assert [point.score for point in exponential.points] == pytest.approx([0.75, 0.83])
    assert [point.cost for point in linear.points] == pytest.approx([4])


def arm(folder, name, epochs, rate, accuracy, **settings):
    write_run(
        folder / name,
        stage_epochs=(epochs,),
        cost_percent=100.0,
        reference_epochs=epochs,
        test_accuracy=accuracy,
        overrides=[f"optimizer.lr={rate}"],
        **settings,
    )


def test_a_method_with_a_rate_of_its_own_at_each_budget_is_one_series(tmp_path):
    arm(tmp_path, "a", 4, 0.2, 0.70, lr_adapt="none", schedule={"budget": 4})
    arm(tmp_path, "b", 8, 0.1, 0.78, lr_adapt="none", schedule={"budget": 8})
    arm(tmp_path, "c", 16, 0.1, 0.80, lr_adapt="none", schedule={"budget": 16})
    arm(tmp_path, "d", 8, 0.4, 0.75, **FIXED, schedule={"budget": 8})
    fixed, grown = series_over_budgets(summarise(load_runs(tmp_path)))
    assert (fixed.name, grown.name) == ("fixed-size, optimizer.lr=0.4", "ours, optimizer.lr=0.2/0.1")
    assert [point.score for point in grown.points] == pytest.approx([0.70, 0.78, 0.80])


def test_two_rates_at_one_budget_are_two_series(tmp_path):
    arm(tmp_path, "a", 4, 0.2, 0.70, lr_adapt="none", schedule={"budget": 4})
    arm(tmp_path, "b", 8, 0.1, 0.78, lr_adapt="none", schedule={"budget": 8})
    arm(tmp_path, "c", 8, 0.2, 0.75, lr_adapt="none", schedule={"budget": 8})
    low, high = series_over_budgets(summarise(load_runs(tmp_path)))
    assert (low.name, high.name) == ("ours, optimizer.lr=0.1", "ours, optimizer.lr=0.2")
    assert [point.score for point in low.points] == pytest.approx([0.78])
    assert [point.score for point in high.points] == pytest.approx([0.70, 0.75])


def test_the_full_network_comes_before_others_that_never_grow(tmp_path):
    arm(tmp_path, "a", 4, 0.2, 0.70, **FIXED)
    write_run(tmp_path / "b", **FIXED, stage_epochs=(4,), overrides=["model.width=8", "optimizer.lr=0.1"])
    names = [one.name for one in series_over_budgets(summarise(load_runs(tmp_path)))]
    assert names == ["fixed-size, optimizer.lr=0.2", "fixed-size, model.width=8, optimizer.lr=0.1"]


def test_the_first_stage_s_part_of_a_training_is_of_the_shape_and_its_epochs_are_not(tmp_path):
    for name, schedule in (
        ("short", {"initial_fraction": 0.05}),
        ("half", {"initial_fraction": 0.5}),
        ("two", {"initial_fraction": 0.5, "initial_epochs": 2}),
        ("four", {"initial_fraction": 0.05, "initial_epochs": 4}),
    ):
        write_run(tmp_path / name, lr_adapt="none", schedule=schedule, overrides=[f"schedule.a={name}"])
    names = [one.name for one in series_over_budgets(summarise(load_runs(tmp_path)))]
    assert names == ["ours", "ours, T_0 = 5 %", "ours, T_0 = 50 %"]


def test_a_setting_that_is_younger_than_a_run_is_off_there(tmp_path):
    rate = {"milestones": [], "decay": 0.1, "decay_fraction": 0.5, "decay_shape": "linear"}
    rate |= {"clock": "epochs", "warmup_fraction": 0.0, "rewarm_steps": 0}
    new = {"batch_size_of": "last", "demand": None, "learning_rate": rate}
    for name, lengths, schedule in (("old", (2, 2, 4), {}), ("new", (4, 4, 8), new)):
        write_run(tmp_path / name, lr_adapt="none", stage_epochs=lengths, schedule=schedule)
    (one,) = series_over_budgets(summarise(load_runs(tmp_path)))
    assert one.name == "ours" and len(one.points) == 2


def test_gains_are_against_fixed_size_of_equal_cost(runs):
    found = {(name, round(point.cost)): gain for name, point, gain in gains(summarise(runs))}
    assert found == {
        ("ours, p_t = 0", 4): pytest.approx(-0.01),
        ("ours, p_t = 0.2", 6): pytest.approx(0.01),
        ("ours, p_t = 0.2", 12): pytest.approx(0.01),
    }


def test_there_is_no_gain_outside_of_the_budgets_measured(tmp_path):
    write_run(tmp_path / "fixed", **FIXED, stage_epochs=(8,), cost_percent=100)
    write_run(tmp_path / "grown", stage_epochs=(4, 4), cost_percent=60)
    ((_, _, gain),) = gains(summarise(load_runs(tmp_path)))
    assert gain is None


def test_the_edge_holds_what_nothing_cheaper_beats(runs):
    points = [point for one in series_over_budgets(summarise(runs)) for point in one.points]
    edge = best_at_cost(points)
    assert [point.cost for point in edge] == pytest.approx([4, 6, 8, 12, 16])
    assert np.all(np.diff([point.score for point in edge]) > 0)


def test_the_figure_has_a_curve_a_series_and_says_how_many_seeds(runs):
    figure = frontier(runs)
    axes = figure.axes[0]
    edge, *curves = axes.lines[:4]
    assert [list(curve.get_xdata()) for curve in curves] == [
        pytest.approx([4, 8, 16]),
        pytest.approx([4]),
        pytest.approx([6, 12]),
    ]
    np.testing.assert_allclose(curves[2].get_ydata(), [75, 83])
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    curves_named = [
        "fixed-size (n=1)",
        "variance transfer, $p_t$ = 0 (n=2)",
        "variance transfer, $p_t$ = 0.2 (n=2)",
    ]
    assert names == [*curves_named, "best at this cost or below"]
    told = figure.legends[0].get_title().get_text().replace("\n", " ")
    assert (
        "bars: one sample standard deviation" in told and "$p_t$: growth rate of the stages' lengths" in told
    )
    assert "p_b" not in told and "p_c" not in told
    points = [container.lines[0].get_xydata()[0].astype(float) for container in axes.containers]
    np.testing.assert_allclose(points, [[4, 70], [8, 78], [16, 86], [4, 69], [6, 75], [12, 83]])
    (bars,) = axes.containers[4].lines[2]
    np.testing.assert_allclose(
        bars.get_segments()[0][:, 1], [75 - np.sqrt(2) * 1, 75 + np.sqrt(2) * 1], rtol=1e-6
    )
    assert edge.get_gid() == "frontier" and edge.get_drawstyle() == "steps-post"
    assert axes.child_axes[0].get_xlabel() == "% of 16 epochs"


def test_costs_that_are_far_apart_stand_on_a_logarithmic_axis(tmp_path):
    for epochs in (2, 5, 16):
        write_run(tmp_path / str(epochs), **FIXED, stage_epochs=(epochs,), reference_epochs=epochs)
        figure = frontier(load_runs([tmp_path]))
        assert figure.axes[0].get_xscale() == ("log" if epochs == 16 else "linear")
    figure.canvas.draw()
    axes = figure.axes[0]
    shown = [[label.get_text() for label in each.get_xticklabels()] for each in (axes, axes.child_axes[0])]
    assert {"2", "5", "10"} <= set(shown[0]) and {"20", "50", "100"} <= set(shown[1])


@pytest.mark.parametrize(("epochs", "scale"), [(11, "linear"), (13, "log")])
def test_costs_by_a_factor_of_six_or_less_stand_on_a_linear_axis(tmp_path, epochs, scale):
    for one in (2, epochs):
        write_run(tmp_path / str(one), **FIXED, stage_epochs=(one,), reference_epochs=one)
    assert frontier(load_runs([tmp_path])).axes[0].get_xscale() == scale


def test_parts_of_an_epoch_are_not_called_a_percentage_of_epochs(tmp_path):
    write_run(tmp_path, **FIXED, stage_epochs=(8,), reference_epochs=8, schedule={"budget": 0.1})
    (top,) = frontier(load_runs([tmp_path])).axes[0].child_axes
    assert top.get_xlabel() == "% of the largest budget"


def test_points_stand_at_their_cost_with_open_markers(tmp_path):
    for i in range(3):
        write_run(
            tmp_path / str(i), stage_epochs=(1, 1), cost_percent=60, overrides=[f"growth.noise_std={i}"]
        )
    figure = frontier(load_runs(tmp_path))
    (axes,) = figure.axes
    markers = [container.lines[0] for container in axes.containers]
    assert len(markers) == 3 and {marker.get_markerfacecolor() for marker in markers} == {"none"}
    assert all(marker.get_transform() == axes.transData for marker in markers)
    assert figure.legends[0].get_title().get_text() == "one seed each: no interval is known"
    # The axis of percent closes the top, so the right side is closed too.
    assert axes.child_axes and axes.spines["right"].get_visible()


def test_runs_of_different_data_are_refused(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", data="digits")
    with pytest.raises(UserError, match="a frontier is of one network and data set"):
        frontier(load_runs(tmp_path))


def test_within_budgets_cost_counts_passes_over_the_data_and_arms_have_names(tmp_path):
    arms = {
        "fixed_size": ({**FIXED}, 4.0),
        "smaller": ({**FIXED, "overrides": ["method=smaller"]}, 9.0),
        "grown_depth": ({"growth": "pairs", "lr_adapt": "none", "overrides": ["method=grown_depth"]}, 6.0),
        "grown_both": ({"growth": "pairs", "lr_adapt": "none", "overrides": ["method=grown_both"]}, 7.0),
    }
    for arm, (settings, passes) in arms.items():
        for budget in (2, 4):
            # Ten parts to a pass: so many epochs of the loop.
            write_run(
                tmp_path / f"{arm}_{budget}",
                **settings,
                stage_epochs=(int(passes * budget * 5), int(passes * budget * 5)),
                cost_percent=100.0,
                reference_epochs=10 * budget,
                schedule={"budget": budget, "initial_width": 0.5 if arm == "grown_both" else 1.0},
            )
    rows = summarise(load_runs(tmp_path))
    assert {row.reference_epochs for row in rows} == {4}
    series = series_over_budgets(rows)
    assert [one.name for one in series] == [
        *("fixed-size", "fixed-size, fewer blocks"),
        *("pairs, grown in depth", "pairs, grown in depth and from 1/2 of the width"),
    ]
    for one in series:
        assert [point.cost for point in one.points] == pytest.approx([2, 4])
    cells = {(line[1], line[0]) for line in grid(rows).rows}
    assert ("fixed-size, fewer blocks", "36") in cells and ("fixed-size", "8") in cells


def timed(folder, name, seconds, accuracy, *, epochs=4, seed=0, threads=2, **settings):
    write_run(
        folder / name,
        stage_epochs=(epochs,),
        reference_epochs=epochs,
        test_accuracy=accuracy,
        seed=seed,
        seconds=seconds,
        machine={"name": "a machine", "threads": threads},
        **settings,
    )


def test_a_frontier_over_seconds(tmp_path):
    timed(tmp_path, "a", 10.0, 0.70, **FIXED)
    timed(tmp_path, "b", 14.0, 0.72, seed=1, **FIXED)
    timed(tmp_path, "c", 9.0, 0.60, lr_adapt="none")
    figure = frontier_seconds(load_runs(tmp_path))
    (axes,) = figure.axes
    assert axes.get_xlabel() == "seconds of a training"
    (edge,) = [line for line in axes.lines if line.get_gid() == "frontier"]
    assert edge.get_xdata() == pytest.approx([9, 12]) and edge.get_ydata() == pytest.approx([60, 71])
    # One sample standard deviation to each side, at the mean: of the method with two seeds.
    spans = [
        segment for lines in axes.collections for segment in lines.get_segments() if np.ptp(segment[:, 0])
    ]
    assert len(spans) == 1
    assert spans[0] == pytest.approx(np.array([[12 - 8**0.5, 71], [12 + 8**0.5, 71]]))


def test_seconds_of_two_machines_do_not_compare(tmp_path):
    timed(tmp_path, "a", 10.0, 0.70, **FIXED)
    timed(tmp_path, "b", 9.0, 0.60, lr_adapt="none", threads=4)
    with pytest.raises(
        UserError, match=r"several machines do not compare \(a machine, 2 threads; a machine, 4 threads\)"
    ):
        frontier_seconds(load_runs(tmp_path))


def test_a_run_without_seconds_has_no_place(tmp_path):
    timed(tmp_path, "a", None, 0.70, **FIXED)
    with pytest.raises(UserError, match="runs without seconds"):
        frontier_seconds(load_runs(tmp_path))

"""Series over budgets, frontiers of cost and accuracy, and time to a score."""

import math

import numpy as np
import pytest

from growlab.base.errors import UserError
from growlab.lab.analysis.__main__ import main
from growlab.lab.analysis.comparison import frontier, frontier_seconds
from growlab.lab.analysis.results import load_runs
from growlab.lab.analysis.schedules import best_at_cost, series_over_budgets, time_to_score_table, times_to_scores
from growlab.lab.analysis.tables import table

from .fake_runs import FIXED, changed, rows_of, write_run


def arm(folder, name, epochs, accuracy, **settings):
    """Write a run with one stage at full cost."""
    whole = {"stage_epochs": (epochs,), "cost_percent": 100.0, "reference_epochs": epochs}
    write_run(folder / name, **{**whole, "test_accuracy": accuracy, **settings})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("schedules")
    for epochs, accuracy in ((4, 0.70), (8, 0.78), (16, 0.86)):
        arm(folder, f"fixed{epochs}", epochs, accuracy, **FIXED)
    for name, rate, lengths, cost, accuracy in (
        ("exp_short", 0.2, (2, 2, 4), 75, 0.75),  # 6 epochs at full width: fixed size reaches 0.74
        ("exp_long", 0.2, (4, 4, 8), 75, 0.83),  # 12 epochs: fixed size reaches 0.82
        ("linear", 0.0, (3, 2, 3), 50, 0.69),  # 4 epochs
    ):
        schedule = {"epoch_growth_rate": rate, "initial_fraction": 0.1, "initial_width": 0.25}
        about = {"lr_adapt": "none", "stage_epochs": lengths, "cost_percent": cost, "schedule": schedule}
        about["overrides"] = [f"schedule.epoch_growth_rate={rate}"]
        for seed, more in enumerate((-0.01, 0.01)):
            write_run(folder / f"{name}{seed}", seed=seed, test_accuracy=accuracy + more, **about)
    return folder


def named(folder):
    return [one.name for one in series_over_budgets(rows_of(folder))]


def test_rows_that_differ_only_in_their_budget_make_one_series(folder):
    series = series_over_budgets(rows_of(folder))
    fixed, linear, exponential = series
    assert [one.name for one in series] == ["fixed-size", "ours, p_t = 0", "ours, p_t = 0.2"]
    assert [point.cost for point in fixed.points] == pytest.approx([4, 8, 16])
    assert [point.cost for point in exponential.points] == pytest.approx([6, 12])
    assert [point.score for point in exponential.points] == pytest.approx([0.75, 0.83])
    assert [point.cost for point in linear.points] == pytest.approx([4])
    edge = best_at_cost([point for one in series for point in one.points])
    assert [point.cost for point in edge] == pytest.approx([4, 6, 8, 12, 16])
    assert np.all(np.diff([point.score for point in edge]) > 0)


def test_a_method_with_a_rate_for_each_budget_is_one_series(tmp_path):
    for name, epochs, rate, score in (("a", 4, 0.2, 0.70), ("b", 8, 0.1, 0.78), ("c", 16, 0.1, 0.80)):
        about = {"lr_adapt": "none", "schedule": {"budget": epochs}, "overrides": [f"optimizer.lr={rate}"]}
        arm(tmp_path, name, epochs, score, **about)
    arm(tmp_path, "d", 8, 0.75, **FIXED, schedule={"budget": 8}, overrides=["optimizer.lr=0.4"])
    fixed, grown = series_over_budgets(rows_of(tmp_path))
    assert (fixed.name, grown.name) == ("fixed-size, optimizer.lr=0.4", "ours, optimizer.lr=0.2/0.1")
    assert [point.score for point in grown.points] == pytest.approx([0.70, 0.78, 0.80])
    # Two rates at one budget are two series.
    arm(tmp_path, "e", 8, 0.75, lr_adapt="none", schedule={"budget": 8}, overrides=["optimizer.lr=0.2"])
    _, low, high = series_over_budgets(rows_of(tmp_path))
    assert (low.name, high.name) == ("ours, optimizer.lr=0.1", "ours, optimizer.lr=0.2")
    assert [point.score for point in high.points] == pytest.approx([0.70, 0.75])


def test_series_are_named_by_their_shape(tmp_path):
    """The name contains the first stage's fraction of the epochs, not their number."""
    for name, schedule in (
        ("short", {"initial_fraction": 0.05}),
        ("half", {"initial_fraction": 0.5}),
        ("two", {"initial_fraction": 0.5, "initial_epochs": 2}),
        ("four", {"initial_fraction": 0.05, "initial_epochs": 4}),
    ):
        write_run(tmp_path / name, lr_adapt="none", schedule=schedule, overrides=[f"schedule.a={name}"])
    assert named(tmp_path) == ["ours", "ours, T_0 = 5 %", "ours, T_0 = 50 %"]
    # The full network comes before others that never grow.
    arm(tmp_path / "fixed", "a", 4, 0.70, **FIXED, overrides=["optimizer.lr=0.2"])
    arm(tmp_path / "fixed", "b", 4, 0.70, **FIXED, overrides=["model.width=8", "optimizer.lr=0.1"])
    small = "fixed-size, model.width=8, optimizer.lr=0.1"
    assert named(tmp_path / "fixed") == ["fixed-size, optimizer.lr=0.2", small]
    # A setting that an older run lacks is off.
    rate = {"milestones": [], "decay": 0.1, "decay_fraction": 0.5, "decay_shape": "linear"}
    rate |= {"progress_unit": "epochs", "warmup_fraction": 0.0, "warmup_steps_after_growth": 0}
    new = {"batch_size_stage": "last", "grow_when": None, "learning_rate": rate}
    for name, lengths, schedule in (("old", (2, 2, 4), {}), ("new", (4, 4, 8), new)):
        write_run(tmp_path / "ages" / name, lr_adapt="none", stage_epochs=lengths, schedule=schedule)
    (one,) = series_over_budgets(rows_of(tmp_path / "ages"))
    assert one.name == "ours" and len(one.points) == 2


def test_runs_with_budgets_are_named_and_cost_counts_passes_over_the_data(tmp_path):
    pairs = {"growth": "pairs", "lr_adapt": "none"}
    kinds = {
        "fixed_size": (FIXED, 4.0),
        "smaller": ({**FIXED, "overrides": ["method=smaller"]}, 9.0),
        "grown_depth": ({**pairs, "overrides": ["method=grown_depth"]}, 6.0),
        "grown_both": ({**pairs, "overrides": ["method=grown_both"]}, 7.0),
    }
    for kind, (settings, passes) in kinds.items():
        for budget in (2, 4):
            schedule = {"budget": budget, "initial_width": 0.5 if kind == "grown_both" else 1.0}
            # Ten epochs are a pass over the data.
            about = {"stage_epochs": (int(passes * budget * 5),) * 2, "reference_epochs": 10 * budget}
            write_run(tmp_path / f"{kind}_{budget}", **settings, **about, schedule=schedule, cost_percent=100.0)
    rows = rows_of(tmp_path)
    assert {row.reference_epochs for row in rows} == {4}
    series = series_over_budgets(rows)
    assert [one.name for one in series] == [
        *("fixed-size", "fixed-size, fewer blocks"),
        *("pairs, grown in depth", "pairs, grown in depth and from 1/2 of the width"),
    ]
    for one in series:
        assert [point.cost for point in one.points] == pytest.approx([2, 4])
    cells = {(line[1], line[0]) for line in table(rows).rows}
    assert ("fixed-size, fewer blocks", "36") in cells and ("fixed-size", "8") in cells


# Frontiers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("epochs", "scale"), [((2, 5, 11), "linear"), ((2, 5, 16), "log")])
def test_costs_that_differ_by_more_than_six_times_have_a_logarithmic_axis(tmp_path, epochs, scale):
    for one in epochs:
        arm(tmp_path, str(one), one, 0.8, **FIXED)
    figure = frontier(load_runs(tmp_path))
    (axes,) = figure.axes
    assert axes.get_xscale() == scale
    assert figure.legends[0].get_title().get_text() == "one seed each: no interval is known"
    if scale == "log":
        figure.canvas.draw()
        shown = [[tick.get_text() for tick in one.get_xticklabels()] for one in (axes, axes.child_axes[0])]
        assert {"2", "5", "10"} <= set(shown[0]) and {"20", "50", "100"} <= set(shown[1])


def test_with_budgets_below_an_epoch_the_axis_is_relative_to_the_largest(tmp_path):
    arm(tmp_path, "a", 8, 0.8, **FIXED, schedule={"budget": 0.1})
    (top,) = frontier(load_runs(tmp_path)).axes[0].child_axes
    assert top.get_xlabel() == "% of the largest budget"
    arm(tmp_path, "b", 8, 0.8, data="digits")
    with pytest.raises(UserError, match="a frontier needs one network and data set"):
        frontier(load_runs(tmp_path))


def test_a_frontier_over_seconds(tmp_path):
    about = {"machine": {"name": "a machine", "threads": 2}}
    arm(tmp_path, "a", 4, 0.70, seconds=10.0, **FIXED, **about)
    arm(tmp_path, "b", 4, 0.72, seconds=14.0, seed=1, **FIXED, **about)
    arm(tmp_path, "c", 4, 0.60, seconds=9.0, lr_adapt="none", **about)
    (axes,) = frontier_seconds(load_runs(tmp_path)).axes
    assert axes.get_xlabel() == "seconds of a training"
    (edge,) = [line for line in axes.lines if line.get_gid() == "frontier"]
    assert edge.get_xdata() == pytest.approx([9, 12]) and edge.get_ydata() == pytest.approx([60, 71])
    # One sample standard deviation on each side of the mean, for the method with two seeds.
    segments = [segment for lines in axes.collections for segment in lines.get_segments()]
    (span,) = [segment for segment in segments if np.ptp(segment[:, 0])]
    assert span == pytest.approx(np.array([[12 - 8**0.5, 71], [12 + 8**0.5, 71]]))
    changed(tmp_path / "c", seconds=None)
    with pytest.raises(UserError, match="needs runs with seconds"):
        frontier_seconds(load_runs(tmp_path))
    changed(tmp_path / "c", **about, world_size=4)
    with pytest.raises(
        UserError, match=r"are not comparable \(a machine, 2 threads; a machine, 2 threads, 4 processes"
    ):
        frontier_seconds(load_runs(tmp_path))


# Time to a score -------------------------------------------------------------------------------------------

BUDGETS = (2, 4, 8, 16)


def score_at(cost, lead):
    """Score that is linear in the logarithm of the cost, so that interpolation is exact."""
    return 0.4 + 0.1 * math.log2(cost * lead)


def budgets(folder, lead=2.0, speed=0.5):
    """Write a full network, and one that grows: `1 / lead` of the cost, `speed` times the seconds per cost."""
    kinds = {"full": (FIXED, 1, 1), "grown": ({"growth": "pairs", "lr_adapt": "none"}, lead, speed)}
    for name, (settings, gain, pace) in kinds.items():
        for budget in BUDGETS:
            about = {"schedule": {"budget": budget}, "overrides": [f"schedule.budget={budget}"]}
            about |= {**settings, "seconds": 100 * pace * budget}
            arm(folder, f"{name}_{budget}", budget, score_at(budget, gain), **about)
    return rows_of(folder)


def of(times, name, level):
    (found,) = [one for one in times if one.series.name == name and math.isclose(one.level, level)]
    return found


@pytest.mark.parametrize("lead", [1.3, 3.7])
def test_ratios_of_cost_and_seconds(tmp_path, lead):
    times = times_to_scores(budgets(tmp_path, lead=lead, speed=0.6))
    for budget in BUDGETS:
        one, own = (of(times, name, score_at(budget, 1)) for name in ("pairs", "fixed-size"))
        assert own.cost.value == pytest.approx(budget)
        assert own.cost_ratio.value == own.seconds_ratio.value == 1
        if budget / lead < BUDGETS[0]:
            assert (one.cost.sign, one.cost.value) == ("<", BUDGETS[0])
            assert (one.cost_ratio.sign, one.cost_ratio.value) == ("<", BUDGETS[0] / budget)
        else:
            assert one.cost_ratio.sign == one.seconds_ratio.sign == ""
            assert one.cost.value == pytest.approx(budget / lead)
            assert one.cost_ratio.value == pytest.approx(1 / lead)
            assert one.seconds.value == pytest.approx(60 * budget / lead)
            assert one.seconds_ratio.value == pytest.approx(0.6 / lead)


def test_a_score_between_budgets_and_beyond_them(tmp_path):
    rows = budgets(tmp_path, lead=0.5)
    between = of(times_to_scores(rows, level=score_at(5.5, 1)), "pairs", score_at(5.5, 1))
    assert between.cost.value == pytest.approx(11)
    assert between.cost_ratio.value == pytest.approx(2)
    beyond = of(times_to_scores(rows, level=score_at(12, 1)), "pairs", score_at(12, 1))
    # The grown network's largest budget, 16, does not reach it, and the reference needs 12: above 16 / 12.
    assert beyond.cost.sign == ">" and beyond.cost_ratio.text(3) == "> 1.333"
    # No network reaches it: the ratio is unknown.
    assert of(times_to_scores(rows, level=0.99), "pairs", 0.99).cost_ratio.value is None
    low = times_to_scores(rows, against="pairs", level=score_at(2.5, 0.5))
    assert of(low, "fixed-size", score_at(2.5, 0.5)).cost_ratio.text(1) == "< 0.8"
    # A measured score is reached in spite of rounding.
    for noise in (-1e-12, 0.0, 1e-12):
        level = score_at(8, 1) * (1 + noise)
        one = of(times_to_scores(rows, level=level), "fixed-size", level)
        assert one.cost.sign == "" and one.cost.value == pytest.approx(8)
    with pytest.raises(UserError, match="a score of nan cannot be reached"):
        times_to_scores(rows, level=math.nan)


def test_of_a_curve_that_is_not_monotonic_the_first_crossing_counts(tmp_path):
    for budget, accuracy in zip(BUDGETS, (0.5, 0.7, 0.6, 0.8), strict=True):
        arm(tmp_path, str(budget), budget, accuracy, **FIXED)
    (one,) = times_to_scores(rows_of(tmp_path), level=0.65)
    assert one.cost.value == pytest.approx(2 * 2**0.75)


def test_lower_is_better_for_a_loss(tmp_path):
    for growth, lead in (("none", 1.0), ("pairs", 2.0)):
        for budget in BUDGETS:
            about = {"metric": {"name": "error", "higher_is_better": False}, "growth": growth, "lr_adapt": "none"}
            arm(tmp_path, f"{growth}_{budget}", budget, 0.8, test_error=-score_at(budget, lead), **about)
    times = times_to_scores(rows_of(tmp_path))
    assert of(times, "pairs", -score_at(8, 1)).cost_ratio.value == pytest.approx(0.5)


def test_seconds_of_several_machines_are_left_out_and_the_reference_is_a_full_network(tmp_path):
    budgets(tmp_path)
    changed(tmp_path / "grown_4", machine={"processor": "another"})
    for budget in BUDGETS:
        half = {"cost_percent": 50.0, "overrides": ["method=smaller", f"schedule.budget={budget}"]}
        arm(tmp_path, f"smaller_{budget}", 2 * budget, score_at(budget, 4), **FIXED, **half)
    rows = rows_of(tmp_path)
    times = times_to_scores(rows)
    assert all(one.seconds.value is None and one.seconds_ratio.value is None for one in times)
    assert "several machines" in time_to_score_table(times).caption
    assert {one.reference.name for one in times} == {"fixed-size"}
    assert of(times, "fixed-size, fewer blocks", score_at(16, 1)).cost_ratio.value == pytest.approx(1 / 4)
    grown = [row for row in rows if not row.group.is_fixed_size]
    with pytest.raises(UserError, match="no fixed-size network at full width; choose the method"):
        times_to_scores(grown)
    assert all(one.cost_ratio.value == 1 for one in times_to_scores(grown, against="pairs"))


def test_the_command_prints_the_table_or_names_all_methods(tmp_path, capsys):
    budgets(tmp_path)
    assert main(["time", str(tmp_path), "--score", "60"]) == 0
    cells = [cell.strip() for cell in capsys.readouterr().out.splitlines()[3].split("|")[1:-1]]
    assert cells == ["60.00", "pairs", "2.00", "0.50", "100", "0.25"]
    assert main(["time", str(tmp_path), "--against", "net2net"]) == 2
    names = "no method net2net; choose the method to compare with by --against, one of: fixed-size; pairs."
    assert names in capsys.readouterr().err

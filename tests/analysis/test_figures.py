"""What figures contain: curves with the run's numbers, events where they happened, labels apart."""

import numpy as np
import pytest
from matplotlib.colors import to_hex

from growlab.base.errors import UserError
from growlab.lab.analysis import style
from growlab.lab.analysis.comparison import compare
from growlab.lab.analysis.figures import learning_curves, rate_factors, widths_over_time, write_run_figures
from growlab.lab.analysis.results import load_runs, open_run

from .fake_runs import PARAMETERS, STAGE_WIDTHS, STEPS_BETWEEN_RATES, write_run

EVENTS = [1, 2, 3, 4, 5, 6, 8, 10]


@pytest.fixture
def run(tmp_path):
    return open_run(write_run(tmp_path / "run"))


def event_positions(axes):
    return [line.get_xdata()[0] for line in axes.lines if line.get_gid() == style.EVENT]


def curves(axes):
    return [line for line in axes.lines if line.get_gid() != style.EVENT]


def overlaps(figure, texts):
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in texts if text.get_visible() and text.get_text()]
    return [(i, j) for i in range(len(boxes)) for j in range(i) if boxes[i].overlaps(boxes[j])]


def test_learning_curves_show_the_metrics_the_events_and_the_test_value(run):
    figure = learning_curves(run)
    loss, accuracy = figure.axes
    for axes, quantity, scale in ((loss, "loss", 1), (accuracy, "accuracy", 100)):
        assert event_positions(axes) == EVENTS
        train, held_out, test = curves(axes)
        assert train.get_xdata().tolist() == list(range(1, 17))
        np.testing.assert_allclose(train.get_ydata(), scale * run.metrics[f"train_{quantity}"])
        np.testing.assert_allclose(held_out.get_ydata(), scale * run.metrics[f"val_{quantity}"])
        assert test.get_xdata().tolist() == [16]
        assert test.get_ydata()[0] == pytest.approx(scale * run.results[f"test_{quantity}"])
    assert accuracy.get_legend().get_texts()[-1].get_text() == "test, final: 82.00 %"
    # 4+8+16 of 16+32+64 channels in the seed: a quarter; the labels stand over their stages.
    assert [text.get_text() for text in loss.texts][:2] == ["25", "30"]
    assert [text.get_text() for text in loss.texts][-2:] == ["100", "width %"]
    assert [text.get_position()[0] for text in loss.texts[:9]] == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 7, 9, 13]
    assert overlaps(figure, loss.texts) == []


def test_curves_without_validation_or_test_are_left_out(tmp_path):
    run = open_run(write_run(tmp_path, validation=False, finished=False))
    for axes in learning_curves(run).axes:
        assert [line.get_label() for line in curves(axes)] == ["training"]


def test_stage_labels_that_would_touch_are_hidden(tmp_path):
    run = open_run(write_run(tmp_path, stage_epochs=(1,) * 8 + (150,)))
    figure = learning_curves(run)
    labels = figure.axes[0].texts
    assert overlaps(figure, labels[:-1]) == []
    visible = [text.get_text() for text in labels if text.get_visible()]
    assert "100" in visible and "25" in visible and len(visible) < 10


def test_a_fixed_size_run_has_no_event_lines_and_no_stage_labels(tmp_path):
    run = open_run(write_run(tmp_path, growth="none", lr_adapt="none"))
    loss = learning_curves(run).axes[0]
    assert event_positions(loss) == [] and list(loss.texts) == []
    widths = curves(widths_over_time(run).axes[0])
    assert sorted(line.get_ydata()[0] for line in widths) == [16, 32, 64]


def test_widths_share_a_line_where_groups_grow_alike(run):
    figure = widths_over_time(run)
    (axes,) = figure.axes
    assert event_positions(axes) == EVENTS
    lines = curves(axes)
    for line, full_width in zip(lines, (64, 32, 16), strict=True):
        assert list(line.get_xdata()) == [0, *EVENTS, 16]
        assert tuple(line.get_ydata()[:-1]) == STAGE_WIDTHS[full_width]
        assert line.get_drawstyle() == "steps-post"
    texts = [text.get_text() for text in axes.texts if text.get_visible()]
    assert [text for text in texts if ":" in text] == ["64: 4 groups", "32: 4 groups", "16: 4 groups"]
    assert {"58", "48", "20", "4"} <= set(texts)
    assert overlaps(figure, axes.texts) == []


def test_names_of_many_groups_keep_apart(tmp_path):
    groups = {f"b{i}": {"full_width": 90 + i, "widths": [20 + i, 40 + i, 90 + i]} for i in range(40)}
    figure = widths_over_time(open_run(write_run(tmp_path, groups=groups, stage_epochs=(1, 1, 1))))
    (axes,) = figure.axes
    assert len(curves(axes)) == 40
    names = [text for text in axes.texts if ":" in text.get_text()]
    assert 5 < len(names) < 40 and names[0].get_text() == "129: b39" and names[-1].get_text() == "90: b0"
    # The extent of an annotation spans its leader line; the words alone are what must not touch.
    figure.draw_without_rendering()
    heights = sorted(axes.transData.transform((0, name.xyann[1]))[1] for name in names)
    assert np.diff(heights).min() >= 7 / 72 * figure.dpi


def test_rate_factors_have_a_curve_per_region_in_epochs(run):
    figure = rate_factors(run)
    median, first, middle, last = figure.axes[:4]
    assert [axes.get_title(loc="left") for axes in (first, middle, last)] == [
        PARAMETERS[0],
        PARAMETERS[len(PARAMETERS) // 2],
        PARAMETERS[-1],
    ]
    for axes in (median, first, middle, last):
        assert event_positions(axes) == EVENTS
        regions = [line for line in curves(axes) if not isinstance(line.get_color(), str)]
        assert len(regions) == 9
        starts = [line.get_xdata()[0] for line in regions]
        # A region's first value is recorded at most so many steps after its birth.
        np.testing.assert_array_less(np.array([0, *EVENTS]) - 1e-9, starts)
        assert (np.array(starts) - [0, *EVENTS] < STEPS_BETWEEN_RATES / 130).all()
    rates = run.rates
    part = rates[(rates["parameter"] == PARAMETERS[0]) & (rates["region"] == 3)]
    line = next(line for line in curves(first) if len(line.get_xdata()) == len(part))
    np.testing.assert_allclose(line.get_ydata(), part["rate_factor"])
    overall = rates[rates["region"] == 8].groupby("step")["rate_factor"].median()
    np.testing.assert_allclose(curves(median)[-1].get_ydata(), overall)


def test_an_unknown_parameter_is_answered_with_the_nearest(run):
    assert len(rate_factors(run, ["fc.weight"]).axes) == 3
    with pytest.raises(UserError, match=r"did you mean fc\.weight\?"):
        rate_factors(run, ["fc.weights"])


def test_steps_become_epochs_through_the_changing_steps_an_epoch(run):
    figure = rate_factors(run)
    ends = dict(zip(run.metrics["step"], run.metrics["epoch"] + 1, strict=True))
    whole = [step for step in run.rates["step"].unique() if step in ends]
    x = curves(figure.axes[0])[1].get_xdata()
    for step in whole:
        assert np.isclose(x, ends[step]).any()
    assert (np.diff(x) > 0).all()


def test_compare_shows_means_bands_and_cost_against_accuracy(tmp_path):
    for seed in range(3):
        write_run(tmp_path / f"ours{seed}", seed=seed, test_accuracy=0.80 + 0.01 * seed, cost_percent=60)
        write_run(tmp_path / f"fixed{seed}", growth="none", lr_adapt="none", seed=seed, test_accuracy=0.85)
    write_run(tmp_path / "pairs", growth="pairs", lr_adapt="none", test_accuracy=0.81, cost_percent=60)
    runs = load_runs(tmp_path)
    figure = compare(runs)
    loss, cost, accuracy = figure.axes
    assert event_positions(loss) == EVENTS and event_positions(accuracy) == EVENTS
    lines = curves(loss)
    assert len(lines) == 3 and len(loss.collections) == 2
    mean = np.mean([run.metrics["train_loss"] for run in runs if run.group.growth == "ours"], axis=0)
    np.testing.assert_allclose(lines[1].get_ydata(), mean)
    assert accuracy.get_ylabel() == "held-out accuracy (%)"
    points = [container.lines[0].get_xydata()[0].tolist() for container in cost.containers]
    np.testing.assert_allclose(points, [[100, 85], [60, 81], [60, 81]])
    (bar,) = cost.containers[1].lines[2]
    np.testing.assert_allclose(bar.get_segments()[0][:, 1], [80, 82])
    # Points stand where they are measured, open: those behind others show through.
    for container in cost.containers:
        marker = container.lines[0]
        assert marker.get_transform() == cost.transData and marker.get_markerfacecolor() == "none"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "fixed-size (n=3)",
        "ours (variance transfer + rates by age) (n=3)",
        "pairs (n=1)",
    ]
    told = legend.get_title().get_text().replace("\n", " ")
    assert "one sample standard deviation" in told and told.endswith("dashed lines: growth events")
    assert to_hex(lines[0].get_color()) == "#000000"


def test_compare_marks_different_schedules_in_the_colour_of_their_method(tmp_path):
    write_run(tmp_path / "a", stage_epochs=(2, 2, 4), test_accuracy=0.9)
    write_run(tmp_path / "b", growth="pairs", stage_epochs=(1, 3, 4), test_accuracy=0.8)
    loss = compare(load_runs(tmp_path)).axes[0]
    assert event_positions(loss) == []
    ticks = [c for c in loss.collections if c.get_gid() == style.EVENT]
    assert [[segment[0][0] for segment in c.get_segments()] for c in ticks] == [[2, 4], [1, 4]]
    assert [to_hex(c.get_color()[0]) for c in ticks] == [line.get_color().lower() for line in loss.lines]
    told = loss.figure.legends[0].get_title().get_text()
    assert told == "one seed each: no interval is known; ticks at the top: growth events"


@pytest.mark.parametrize("num_runs", [2, 9])
def test_equal_costs_are_a_column_for_each_method_with_its_name(tmp_path, num_runs):
    for i in range(num_runs):
        write_run(
            tmp_path / str(i), stage_epochs=(1, 1), cost_percent=60, overrides=[f"growth.noise_std={i}"]
        )
    figure = compare(load_runs(tmp_path))
    cost = figure.axes[1]
    figure.draw_without_rendering()
    assert [c.lines[0].get_xdata()[0] for c in cost.containers] == list(range(num_runs))
    labels = cost.get_xticklabels()
    assert len({label.get_text() for label in labels}) == num_runs
    assert all("noise_std" in label.get_text() for label in labels)
    assert overlaps(figure, labels) == []


@pytest.mark.parametrize(
    "scores, least",
    [([[0.800], [0.801]], 3.0), ([[0.79, 0.81], [0.80, 0.82]], 10 * np.sqrt(2)), ([[0.2], [0.9]], 70.0)],
    ids=["one seed", "two seeds", "far apart"],
)
def test_the_axis_of_scores_is_not_shorter_than_ten_deviations_over_seeds(tmp_path, scores, least):
    for method, of_seeds in zip(("ours", "pairs"), scores, strict=True):
        for seed, score in enumerate(of_seeds):
            write_run(
                tmp_path / f"{method}{seed}", growth=method, seed=seed, test_accuracy=score, cost_percent=60
            )
    low, high = compare(load_runs(tmp_path)).axes[1].get_ylim()
    assert high - low >= 0.999 * least


def test_a_method_that_collapsed_once_leaves_the_axis_of_scores_to_the_others(tmp_path):
    scores = {"ours": [0.98, 0.99], "pairs": [0.97, 0.98], "net2net": [0.95, 0.55]}
    for method, of_seeds in scores.items():
        for seed, score in enumerate(of_seeds):
            write_run(
                tmp_path / f"{method}{seed}", growth=method, seed=seed, test_accuracy=score, cost_percent=60
            )
    low, high = compare(load_runs(tmp_path)).axes[1].get_ylim()
    # Bars of one deviation fill it: from 46.7 to 103.3.
    assert 56.5 < high - low < 100


def test_scores_of_some_epochs_only_are_joined(tmp_path):
    (run,) = load_runs(write_run(tmp_path, stage_epochs=(8,)))
    run.metrics["val_accuracy"] = [np.nan, 0.2, np.nan, np.nan, 0.5, np.nan, np.nan, 0.7]
    (line,) = curves(compare([run]).axes[2])
    assert line.get_xdata().tolist() == [2, 5, 8]
    np.testing.assert_allclose(line.get_ydata(), [20, 50, 70])


def test_compare_draws_equal_costs_side_by_side_and_curves_that_coincide_less_their_mean(tmp_path):
    for i in range(3):
        for seed in range(2):
            write_run(
                tmp_path / f"{i}{seed}",
                seed=seed,
                stage_epochs=(4, 4),
                cost_percent=60,
                overrides=[f"growth.noise_std={i}"],
            )
    runs = load_runs(tmp_path)
    for run, more in zip(runs, (0.0, 0.0, 0.003, 0.003, 0.009, 0.009), strict=True):
        run.metrics["train_loss"] = np.linspace(2, 1, 8) + more
    # One seed tells too little for differences that are magnified.
    alone = compare([run for run in runs if run.results["seed"] == 0]).axes[0]
    assert alone.get_ylabel() == "training loss"
    loss, cost, _ = compare(runs).axes
    assert loss.get_ylabel() == "training loss,\nless the mean"
    assert sorted(float(line.get_ydata()[0]) for line in curves(loss)) == pytest.approx(
        [-0.004, -0.001, 0.005]
    )
    assert [c.lines[0].get_xdata()[0] for c in cost.containers] == [0, 1, 2]
    assert "60.0 %" in cost.get_xlabel() and cost.get_xlabel().startswith("method")


def test_compare_refuses_runs_of_different_networks(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", model="mlp")
    with pytest.raises(UserError, match="mlp on cifar10, resnet20 on cifar10"):
        compare(load_runs(tmp_path))


def test_a_run_gets_the_figures_it_has_data_for(tmp_path):
    grown = write_run(tmp_path / "grown", stage_epochs=(1, 2))
    assert write_run_figures(grown) == [
        grown / "figures" / f"{name}.png" for name in ("learning_curves", "widths", "rate_factors")
    ]
    fixed = write_run(tmp_path / "fixed", growth="none", lr_adapt="none", finished=False)
    assert [path.stem for path in write_run_figures(fixed)] == ["learning_curves", "widths"]
    (fixed / "growth.json").unlink()
    assert [path.stem for path in write_run_figures(fixed)] == ["learning_curves"]


def test_drawing_leaves_global_settings_and_pyplot_alone(run):
    import matplotlib

    before = dict(matplotlib.rcParams)
    learning_curves(run)
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("positions", [[0.0, 0.0, 0.0], [3.0, 1.0, 1.2, 9.0], [0.0, 0.9, 1.8, 2.7], []])
def test_spread_keeps_the_gap_the_order_and_the_mean(positions):
    placed = style.spread(positions, gap=1.0)
    order = np.argsort(positions, kind="stable")
    assert (np.diff(np.array(placed)[order.astype(int)]) >= 1 - 1e-9).all()
    assert sum(placed) == pytest.approx(sum(positions))


def test_a_legend_of_long_names_takes_fewer_columns_than_would_be_wider_than_the_figure():
    figure = style.new_figure(4.0, 2.0)
    handles = figure.subplots().plot([[0, 1, 2, 3], [1, 2, 3, 4]])
    style.legend_below(figure, handles, ["a name that takes a good part of the width"] * 4, columns=4)
    (legend,) = figure.legends
    assert legend.get_window_extent().width <= figure.bbox.width
    short = style.new_figure(4.0, 2.0)
    style.legend_below(short, short.subplots().plot([[0, 1], [1, 2]]), ["a", "b"], columns=2)
    assert short.legends[0].get_window_extent().height < 0.2 * short.bbox.height

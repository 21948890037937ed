"""Figures: curves, growth events, labels without overlap, one colour per method."""

import itertools

import numpy as np
import pytest
from matplotlib.colors import to_hex
from omegaconf import OmegaConf

from growlab.base.errors import UserError
from growlab.lab.analysis import style
from growlab.lab.analysis.comparison import compare, learning_rates
from growlab.lab.analysis.figures import learning_curves, resources, widths_over_time, write_run_figures
from growlab.lab.analysis.results import load_runs, open_run
from growlab.lab.analysis.style import FIXED_SIZE, MARKERS, PALETTE, line_styles

from .fake_runs import FIXED, changed, write_run


def event_positions(axes):
    return [line.get_xdata()[0] for line in axes.lines if line.get_gid() == style.EVENT]


def curves(axes):
    return [line for line in axes.lines if line.get_gid() != style.EVENT]


def overlaps(figure, texts):
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in texts if text.get_visible() and text.get_text()]
    return [(i, j) for i in range(len(boxes)) for j in range(i) if boxes[i].overlaps(boxes[j])]


def legend_title(figure):
    return figure.legends[0].get_title().get_text().replace("\n", " ")


# One run ---------------------------------------------------------------------------------------------------


def test_curves_without_validation_or_test_are_left_out(tmp_path):
    run = open_run(write_run(tmp_path, validation=False, finished=False))
    for axes in learning_curves(run).axes:
        assert [line.get_label() for line in curves(axes)] == ["training"]


def test_overlapping_stage_labels_are_hidden(tmp_path):
    figure = learning_curves(open_run(write_run(tmp_path, stage_epochs=(1,) * 8 + (150,))))
    labels = figure.axes[0].texts[1:]
    assert overlaps(figure, labels) == []
    visible = [text.get_text() for text in labels if text.get_visible()]
    assert "100" in visible and "25" in visible and len(visible) < 9


def test_a_fixed_size_run_has_no_event_lines_and_no_stage_labels(tmp_path):
    run = open_run(write_run(tmp_path, **FIXED))
    loss = learning_curves(run).axes[0]
    assert event_positions(loss) == [] and list(loss.texts) == []
    widths = curves(widths_over_time(run).axes[0])
    assert sorted(line.get_ydata()[0] for line in widths) == [16, 32, 64]


def test_a_run_gets_the_figures_it_has_data_for(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("growlab.lab.analysis.figures.save", lambda figure, path: drawn.append(path) or path)
    grown = write_run(tmp_path / "grown", stage_epochs=(1, 2))
    names = ("learning_curves", "widths", "rate_factors")
    assert write_run_figures(grown) == drawn == [grown / "figures" / f"{name}.png" for name in names]
    fixed = write_run(tmp_path / "fixed", **FIXED, stage_epochs=(3,), finished=False)
    assert [path.stem for path in write_run_figures(fixed)] == ["learning_curves", "widths"]
    (fixed / "growth.json").unlink()
    assert [path.stem for path in write_run_figures(fixed)] == ["learning_curves"]


# Resources -------------------------------------------------------------------------------------------------


def stages(memory=(None, None, None), batch=(96, 64, 32)):
    rows = zip((1, 1, 2), memory, (1.0, 2.0, 6.0), (300.0, 200.0, 100.0), batch, strict=True)
    keys = ("epochs", "peak_memory_bytes", "seconds", "samples_per_sec", "batch_size")
    return [dict(zip(keys, row, strict=True)) for row in rows]


def test_resources_omit_unrecorded_memory_and_refuse_different_stages(tmp_path):
    write_run(tmp_path / "a" / "a", stage_epochs=(1, 1, 2), stages=stages())
    figure = resources(load_runs(tmp_path))
    assert [axes.get_ylabel() for axes in figure.axes] == ["samples per second", "seconds"]
    write_run(tmp_path / "b", stage_epochs=(2, 2))
    with pytest.raises(UserError, match="needs runs whose stages have equal numbers of epochs"):
        resources(load_runs(tmp_path))
    write_run(tmp_path / "fixed", **FIXED)
    with pytest.raises(UserError, match="at least one run that grows"):
        resources(load_runs(tmp_path / "fixed"))


# Compare ---------------------------------------------------------------------------------------------------


def test_resources_name_batch_sizes_in_the_order_of_stages(tmp_path):
    folder = write_run(tmp_path, stage_epochs=(2, 2))
    stages = [
        {**stage, "batch_size": size} for stage, size in zip(open_run(folder).results["stages"], (64, 256), strict=True)
    ]
    changed(folder, stages=stages)
    (legend,) = resources(load_runs(tmp_path)).legends
    assert "batch 64 to 256:" in legend.get_texts()[0].get_text()


def test_compare_rounds_a_budget_of_a_third_of_an_epoch(tmp_path):
    for growth, cost in (("ours", 50.0), ("none", 100.0)):
        write_run(tmp_path / growth, growth=growth, cost_percent=cost, schedule={"budget": 1 / 3})
    axes = compare(load_runs(tmp_path)).axes
    assert "training cost (%; 100 = fixed-size, 0.333333 epochs)" in [each.get_xlabel() for each in axes]


def test_compare_marks_different_schedules_in_the_colour_of_their_method(tmp_path):
    write_run(tmp_path / "a", stage_epochs=(2, 2, 4), test_accuracy=0.9)
    write_run(tmp_path / "b", growth="pairs", stage_epochs=(1, 3, 4), test_accuracy=0.8)
    figure = compare(load_runs(tmp_path))
    loss = figure.axes[0]
    assert event_positions(loss) == []
    ticks = [c for c in loss.collections if c.get_gid() == style.EVENT]
    assert [[segment[0][0] for segment in c.get_segments()] for c in ticks] == [[2, 4], [1, 4]]
    assert [to_hex(c.get_color()[0]) for c in ticks] == [line.get_color().lower() for line in loss.lines]
    assert legend_title(figure) == "one seed each: no interval is known; ticks at the top: growth events"


@pytest.mark.parametrize("num_runs", [2, 9])
def test_methods_of_equal_cost_have_a_labelled_column_each(tmp_path, num_runs):
    for i in range(num_runs):
        noise = [f"growth.noise_std={i}"]
        write_run(tmp_path / str(i), stage_epochs=(1, 1), cost_percent=60, overrides=noise)
    figure = compare(load_runs(tmp_path))
    cost = figure.axes[1]
    figure.draw_without_rendering()
    assert [c.lines[0].get_xdata()[0] for c in cost.containers] == list(range(num_runs))
    assert "60.0 %" in cost.get_xlabel() and cost.get_xlabel().startswith("method")
    labels = cost.get_xticklabels()
    assert len({label.get_text() for label in labels}) == num_runs
    assert all("noise_std" in label.get_text() for label in labels)
    assert overlaps(figure, labels) == []


@pytest.mark.parametrize(
    "scores, least, most",
    [
        ({"ours": [0.800], "pairs": [0.801]}, 3.0, 3.1),
        ({"ours": [0.79, 0.81], "pairs": [0.80, 0.82]}, 10 * np.sqrt(2), 14.2),
        ({"ours": [0.2], "pairs": [0.9]}, 70.0, 100),
        # One seed of a method collapsed; its bar of one deviation, 46.7 to 103.3, fills the axis.
        ({"ours": [0.98, 0.99], "pairs": [0.97, 0.98], "net2net": [0.95, 0.55]}, 56.5, 100),
    ],
    ids=["one seed", "two seeds", "far apart", "collapsed once"],
)
def test_the_axis_of_scores_spans_at_least_ten_deviations_over_seeds(tmp_path, scores, least, most):
    for method, of_seeds in scores.items():
        for seed, score in enumerate(of_seeds):
            about = {"growth": method, "seed": seed, "test_accuracy": score}
            write_run(tmp_path / f"{method}{seed}", **about, cost_percent=60, stage_epochs=(1, 1))
    low, high = compare(load_runs(tmp_path)).axes[1].get_ylim()
    assert 0.999 * least <= high - low < most


def test_nearly_equal_curves_are_drawn_minus_their_mean(tmp_path):
    for i, seed in itertools.product(range(3), range(2)):
        write_run(tmp_path / f"{i}{seed}", seed=seed, stage_epochs=(4, 4), overrides=[f"growth.noise_std={i}"])
    runs = load_runs(tmp_path)
    for run, more in zip(runs, (0.0, 0.0, 0.003, 0.003, 0.009, 0.009), strict=True):
        run.metrics["train_loss"] = np.linspace(2, 1, 8) + more
    # Differences are not magnified with a single seed.
    assert compare(runs[::2]).axes[0].get_ylabel() == "training loss"
    loss = compare(runs).axes[0]
    assert loss.get_ylabel() == "training loss,\nless the mean"
    starts = sorted(float(line.get_ydata()[0]) for line in curves(loss))
    assert starts == pytest.approx([-0.004, -0.001, 0.005])


# Learning rates --------------------------------------------------------------------------------------------


def at_rate(folder, rate, *, named=True, overrides=(), **settings):
    """Write a run at a rate, given by an override unless `named` is False."""
    write_run(folder, overrides=[*overrides, *([f"optimizer.lr={rate}"] * named)], stage_epochs=(2, 2), **settings)
    config = OmegaConf.load(folder / "config.yaml")
    OmegaConf.update(config, "optimizer.lr", rate, force_add=True)
    OmegaConf.save(config, folder / "config.yaml")


def test_learning_rates_need_several_rates_and_one_data_set(tmp_path):
    at_rate(tmp_path / "a", 0.1, **FIXED)
    at_rate(tmp_path / "b", 0.1)
    with pytest.raises(UserError, match=r"all runs have optimizer.lr=0.1: name runs of several rates"):
        learning_rates(load_runs(tmp_path))
    at_rate(tmp_path / "c", 0.2, data="digits")
    with pytest.raises(UserError, match="needs one network and data set"):
        learning_rates(load_runs(tmp_path))


# Style -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("low, high", [(1.0, 6.0), (0.3, 20.0), (1e-6, 1.0)])
@style.styled()
def test_logarithmic_axes_have_plain_labels_without_overlap(low, high):
    figure = style.new_figure(3, 2)
    axes = figure.subplots()
    axes.plot([0, 1], [low, high])
    style.log_axis(axes)
    figure.draw_without_rendering()
    figure.draw_without_rendering()
    bottom, top = axes.get_ylim()
    ticks = [tick for tick in axes.yaxis.get_major_ticks() if bottom <= tick.get_loc() <= top]
    boxes = [tick.label1.get_window_extent() for tick in sorted(ticks, key=lambda tick: tick.get_loc())]
    assert len(boxes) >= 2
    assert all(lower.y1 < upper.y0 for lower, upper in itertools.pairwise(boxes))


@pytest.mark.parametrize("positions", [[0.0, 0.0, 0.0], [3.0, 1.0, 1.2, 9.0], [0.0, 0.9, 1.8, 2.7], []])
def test_spread_keeps_the_gap_the_order_and_the_mean(positions):
    placed = style.spread(positions, gap=1.0)
    order = np.argsort(positions, kind="stable")
    assert (np.diff(np.array(placed)[order.astype(int)]) >= 1 - 1e-9).all()
    assert sum(placed) == pytest.approx(sum(positions))


def test_a_legend_of_long_names_fits_the_figure():
    figure = style.new_figure(4.0, 2.0)
    handles = figure.subplots().plot([[0, 1, 2, 3], [1, 2, 3, 4]])
    style.legend_below(figure, handles, ["a name that takes a good part of the width"] * 4, columns=4)
    (legend,) = figure.legends
    assert legend.get_window_extent().width <= figure.bbox.width
    short = style.new_figure(4.0, 2.0)
    style.legend_below(short, short.subplots().plot([[0, 1], [1, 2]]), ["a", "b"], columns=2)
    assert short.legends[0].get_window_extent().height < 0.2 * short.bbox.height


def colours(*methods):
    return [line["color"] for line in line_styles(methods)]


def test_a_method_keeps_its_colour_among_others():
    ours, net2net, full = colours("ours + stagewise_norm", "net2net", "fixed-size, data.validation=none")
    among = colours("fixed-size", "random", "net2net", "tiny", "ours + stagewise_adam")
    assert among[2::2] == [net2net, ours] and full == FIXED_SIZE[0]
    # A curve without an assigned colour gets a free one, also if it comes first.
    assert colours("zero", "one", "ours + stagewise_norm")[2] == ours
    assert len(set(colours("zero", "one", "ours + stagewise_norm"))) == 3
    # The plain method gets the colour, also if a variant comes first.
    assert colours("ours + stagewise_norm, osgd.anneal=stage", "ours + stagewise_norm")[1] == ours
    assert colours("net2net, a=1", "net2net", "net2net, b=1")[1] == net2net


@pytest.mark.parametrize("less", ["fewer blocks", "schedule.equal_flops=true", "growth.width_multiple=0.5"])
def test_only_the_full_network_is_black(less):
    assert colours(f"fixed-size, {less}", "fixed-size") == [FIXED_SIZE[1], FIXED_SIZE[0]]
    assert colours("classical, xavier_in", "xavier_in")[0] == FIXED_SIZE[0]


def test_all_curves_have_different_styles():
    many = [f"ours, schedule.num_stages={n}" for n in range(20)] + [f"fixed-size, a={n}" for n in range(4)]
    assert len({(line["color"], str(line["linestyle"])) for line in line_styles(many)}) == len(many)
    few = line_styles([*(f"method{n}" for n in range(len(PALETTE))), "fixed-size", "fixed-size, fewer blocks"])
    assert len({line["marker"] for line in few}) == len(few) == len(MARKERS)

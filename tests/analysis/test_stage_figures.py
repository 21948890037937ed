"""Figures of regions, widths, resources: the run's numbers in the right places, labels apart."""

import itertools

import numpy as np
import pytest
from matplotlib.colors import to_hex

from growlab.base.errors import UserError
from growlab.lab.analysis import style
from growlab.lab.analysis.figures import network_map, region_norms, resources, silhouettes
from growlab.lab.analysis.results import load_runs, open_run

from .fake_runs import PARAMETERS, STAGE_EPOCHS, STAGE_WIDTHS, write_run


@pytest.fixture
def run(tmp_path):
    return open_run(write_run(tmp_path / "run"))


def texts_apart(figure, texts):
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in texts if text.get_visible() and text.get_text()]
    return not any(boxes[i].overlaps(boxes[j]) for i in range(len(boxes)) for j in range(i))


def region_curves(axes):
    return [line for line in axes.lines if line.get_gid() != style.EVENT]


def test_norms_of_one_run_are_those_of_its_parameters(run):
    figure = region_norms([run])
    above, below = figure.axes[:3], figure.axes[3:6]
    assert [axes.get_title(loc="left") for axes in above] == [PARAMETERS[i] for i in (0, 10, -1)]
    for row, quantity in ((above, "weight_norm"), (below, "grad_norm")):
        for axes, name in zip(row, (PARAMETERS[0], PARAMETERS[10], PARAMETERS[-1]), strict=True):
            lines = region_curves(axes)
            assert len(lines) == len(STAGE_EPOCHS) and axes.get_yscale() == "log"
            for region, line in enumerate(lines):
                rates = run.rates
                part = rates[(rates["parameter"] == name) & (rates["region"] == region)]
                np.testing.assert_allclose(line.get_ydata(), part[quantity])
    assert above[0].get_ylim() == above[1].get_ylim() != below[0].get_ylim()


def test_norms_of_two_runs_stand_side_by_side(tmp_path):
    for name in ("ours", "pairs"):
        write_run(tmp_path / name, growth=name, stage_epochs=(1, 1, 2))
    runs = load_runs(tmp_path)
    figure = region_norms(runs, ["fc.weight"])
    titles = [axes.get_title(loc="left") for axes in figure.axes[:2]]
    assert titles == ["ours (variance transfer + rates by\nage)", "pairs + rates by age"]
    assert figure.get_suptitle() == "fc.weight"
    for axes, one in zip(figure.axes[:2], runs, strict=True):
        part = one.rates[(one.rates["parameter"] == "fc.weight") & (one.rates["region"] == 2)]
        np.testing.assert_allclose(region_curves(axes)[2].get_ydata(), part["weight_norm"])
    with pytest.raises(UserError, match="give --parameter once"):
        region_norms(runs, ["fc.weight", "conv1.weight"])
    with pytest.raises(UserError, match="shows 3 runs side by side and there are 4"):
        region_norms([*runs, *runs])


def test_norms_without_gradients_show_the_weights_alone(run):
    path = run.path / "rates.csv"
    lines = [line.rsplit(",", 1)[0] for line in path.read_text().splitlines()]
    path.write_text("\n".join(lines) + "\n")
    figure = region_norms([open_run(run.path)], ["fc.weight"])
    assert [axes.get_ylabel() for axes in figure.axes] == ["weight norm", "region: stage of birth"]


@pytest.mark.parametrize("low, high", [(1.0, 6.0), (0.3, 20.0), (1e-6, 1.0)])
def test_logarithmic_axes_have_a_few_plain_labels_that_keep_apart(low, high):
    with style.styled():
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


def test_the_map_has_the_width_of_every_group_at_every_stage(run):
    figure = network_map(run)
    (axes,) = figure.axes
    cells = {text.get_position(): text.get_text() for text in axes.texts}
    for row, group in enumerate(run.growth["groups"].values()):
        assert [cells[stage, row] for stage in range(9)] == [
            str(w) for w in STAGE_WIDTHS[group["full_width"]]
        ]
    assert [label.get_text() for label in axes.get_yticklabels()] == list(run.growth["groups"])
    heads = [label.get_text() for label in axes.get_xticklabels()]
    assert heads == [f"{i}\n{n} ep." for i, n in enumerate(STAGE_EPOCHS)]
    assert texts_apart(figure, [*axes.texts, *axes.get_yticklabels(), *axes.get_xticklabels()])
    shades = axes.images[0].get_array()
    np.testing.assert_allclose(shades[:, -1], 1)
    np.testing.assert_allclose(shades[:, 0], 0.25)


def test_neighbours_that_grow_alike_share_a_row_of_a_large_map(tmp_path):
    groups = {f"g{i}": {"full_width": 8 * (1 + i // 25), "widths": [2, 8 * (1 + i // 25)]} for i in range(50)}
    figure = network_map(open_run(write_run(tmp_path, groups=groups, stage_epochs=(1, 1))))
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == ["g0 ... g24 (25)", "g25 ... g49 (25)"]


def test_silhouettes_show_kept_new_and_full_width(run):
    figure = silhouettes(run)
    (axes,) = figure.axes
    num_rows = len(run.growth["groups"])
    bars = np.array([(patch.get_width(), patch.get_y()) for patch in axes.patches]).reshape(9, num_rows, 3, 2)
    for row, group in enumerate(run.growth["groups"].values()):
        full, widths = group["full_width"], group["widths"]
        for stage in range(9):
            expected = [full, widths[stage], widths[max(stage - 1, 0)]]
            np.testing.assert_allclose(bars[stage, row, :, 0], expected)
    assert texts_apart(figure, [*axes.get_xticklabels(), *axes.get_yticklabels()])


def test_maps_need_width_groups(tmp_path):
    path = write_run(tmp_path)
    (path / "growth.json").unlink()
    for draw in (network_map, silhouettes):
        with pytest.raises(UserError, match="no width groups"):
            draw(open_run(path))


def stages(
    memory=(None, None, None), seconds=(1.0, 2.0, 6.0), speeds=(300.0, 200.0, 100.0), batch=(96, 64, 32)
):
    rows = zip((1, 1, 2), memory, seconds, speeds, batch, strict=True)
    keys = ("epochs", "peak_memory_bytes", "seconds", "samples_per_sec", "batch_size")
    return [dict(zip(keys, row, strict=True)) for row in rows]


def test_resources_have_a_bar_a_stage_and_the_fixed_size_network_as_a_line(tmp_path):
    gib = 2**30
    write_run(tmp_path / "a", stage_epochs=(1, 1, 2), stages=stages((gib, 2 * gib, 4 * gib)), seconds=9.0)
    steady = stages((gib, gib, gib), batch=(32, 32, 32))
    write_run(tmp_path / "b", growth="pairs", stage_epochs=(1, 1, 2), stages=steady, seconds=9.0)
    one = [{**stages((3 * gib,) * 3)[0], "epochs": 4, "seconds": 20.0, "batch_size": 32}]
    fixed = {"growth": "none", "lr_adapt": "none", "stage_epochs": (4,), "cost_percent": 100}
    write_run(tmp_path / "c", **fixed, stages=one, seconds=20.0)
    figure = resources(load_runs(tmp_path))
    memory, speed, seconds = figure.axes
    assert memory.get_ylabel() == "peak memory (GiB)"
    assert [bar.get_height() for bar in memory.patches] == [1, 2, 4, 1, 1, 1]
    assert memory.lines[0].get_ydata().tolist() == [3, 3, 3, 3]
    assert [bar.get_height() for bar in speed.patches[:3]] == [300, 200, 100]
    # Four epochs in 20 s: 5 s, 5 s and 10 s for stages of 1, 1 and 2 epochs.
    assert seconds.lines[0].get_ydata().tolist() == [5, 5, 10, 10]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names[0] == "ours (variance transfer + rates by age), batch 96 to 32: 9 s in all"
    assert names[2] == "fixed-size, batch 32: 20 s in all"
    assert texts_apart(figure, figure.legends[0].get_texts())
    faces = {to_hex(bar.get_facecolor()) for bar in memory.patches}
    assert faces == {look["color"].lower() for look in style.line_styles(["ours + stagewise_norm", "pairs"])}


def test_resources_leave_out_memory_that_was_not_recorded(tmp_path):
    write_run(tmp_path / "a", stage_epochs=(1, 1, 2), stages=stages())
    figure = resources(load_runs(tmp_path))
    assert [axes.get_ylabel() for axes in figure.axes] == ["samples per second", "seconds"]


def test_resources_refuse_runs_without_stages_or_with_other_ones(tmp_path):
    write_run(tmp_path / "fixed", growth="none", lr_adapt="none")
    with pytest.raises(UserError, match="at least one run that grows"):
        resources(load_runs(tmp_path))
    write_run(tmp_path / "a", stage_epochs=(1, 1, 2))
    write_run(tmp_path / "b", stage_epochs=(2, 2))
    with pytest.raises(UserError, match="these differ"):
        resources(load_runs(tmp_path))

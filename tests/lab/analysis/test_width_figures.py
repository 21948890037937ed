"""Figures of widths: lines, maps and silhouettes of one run; paths and changes of several runs."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from growlab.base.errors import UserError
from growlab.lab.analysis.figures import network_map, silhouettes, widths_over_time
from growlab.lab.analysis.results import Run, open_run
from growlab.lab.analysis.width_figures import CHANGE, TASK, width_changes, width_paths

from .fake_runs import write_run
from .test_figures import curves


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return open_run(write_run(tmp_path_factory.mktemp("run")))


def test_names_of_many_groups_do_not_overlap(tmp_path):
    groups = {f"b{i}": {"full_width": 90 + i, "widths": [20 + i, 90 + i]} for i in range(40)}
    figure = widths_over_time(open_run(write_run(tmp_path, groups=groups, stage_epochs=(1, 1))))
    (axes,) = figure.axes
    assert len(curves(axes)) == 40
    names = [text for text in axes.texts if ":" in text.get_text()]
    assert 5 < len(names) < 40 and names[0].get_text() == "129: b39" and names[-1].get_text() == "90: b0"
    # The extent of an annotation includes its leader line, so compare positions of the text.
    figure.draw_without_rendering()
    heights = sorted(axes.transData.transform((0, name.xyann[1]))[1] for name in names)
    assert np.diff(heights).min() >= 7 / 72 * figure.dpi


def test_neighbours_that_grow_equally_share_a_row_of_a_large_map(tmp_path):
    groups = {f"g{i}": {"full_width": 8 * (1 + i // 25), "widths": [2, 8 * (1 + i // 25)]} for i in range(50)}
    figure = network_map(open_run(write_run(tmp_path, groups=groups, stage_epochs=(1, 1))))
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == ["g0 ... g24 (25)", "g25 ... g49 (25)"]


def test_maps_need_width_groups(tmp_path):
    path = write_run(tmp_path)
    (path / "growth.json").unlink()
    for draw in (network_map, silhouettes, widths_over_time):
        with pytest.raises(UserError, match="no width groups"):
            draw(open_run(path))


# Several runs ----------------------------------------------------------------------------------------------


def fake(widths: dict[str, list[int]], stages: list[int], accuracy: object, **more: object) -> Run:
    groups = {name: {"full_width": path[0], "widths": path} for name, path in widths.items()}
    run = Run(Path("run"), {})
    metrics = pd.DataFrame({"epoch": range(len(stages)), "stage": stages})
    known = {"config": {}, "metrics": metrics if accuracy is None else metrics.assign(test_accuracy=accuracy)}
    run.__dict__.update({"growth": {"events": [], "groups": groups}, **known, **more})
    return run


def test_runs_with_equal_starts_share_a_colour_and_an_entry_of_the_legend() -> None:
    cases = [([2, 9], [0, 1, 1]), ([2, 10], [0, 0, 1]), ([64, 13], [0, 0, 1])]
    runs = [fake({"a": widths}, stages, [0.1, 0.5, 0.9]) for widths, stages in cases]
    above, below = width_paths(runs).axes
    legend = above.get_legend()
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["from 2 to 9-10 (n=2)", "from 64 to 13 (n=1)"]
    assert legend.get_title().get_text() == "each line is one run"
    colours = [line.get_color() for line in above.lines[:3]]
    assert colours[0] == colours[1] != colours[2]
    assert list(above.lines[0].get_ydata()) == [2, 9, 9, 9]
    assert list(above.get_yticks()) == [2, 4, 8, 16, 32, 64]
    assert np.allclose(below.lines[0].get_ydata(), [10, 50, 90])


def test_axes_of_summed_widths_and_marks_of_changed_tasks() -> None:
    config = {"data": {"class_schedule": {0: [3, 4], 2: [0, 1, 2, 3, 4, 5]}}}
    above, below = width_paths([fake({"a": [2, 9], "b": [3, 3]}, [0, 1, 1], 0.5, config=config)]).axes
    assert above.get_ylabel() == "width, sum of 2 layers"
    assert above.get_yscale() == "linear" and all(tick == int(tick) for tick in above.get_yticks())
    assert below.get_ylabel() == "test accuracy (%)"
    assert [line.get_xdata()[0] for line in above.lines if line.get_gid() == TASK] == [0, 2]
    assert [text.get_text() for text in above.texts] == ["classes 3, 4", "6 classes"]


def test_an_axis_without_a_power_of_two_has_the_end_widths_as_ticks() -> None:
    above, _ = width_paths([fake({"a": [70, 100]}, [0, 1, 1], 0.5)]).axes
    assert above.get_yticks().tolist() == [70, 100]
    (axes,) = widths_over_time(fake({"a": [48]}, [0, 0], 0.5)).axes
    low, high = axes.get_ylim()
    assert [tick for tick in axes.get_yticks() if low < tick < high] == [48]


def moving(path: list[int], accuracy: object, grows: bool = True) -> Run:
    stages = list(np.cumsum([0] + [int(a != b) for a, b in pairwise(path)]))
    widths = [path[stages.index(stage)] for stage in range(stages[-1] + 1)]
    overrides = ("model.width=4",) if grows else ("model.activation=elementwise_tanh", f"model.width={path[0]}")
    return fake(
        {"hidden": widths}, stages, accuracy, group=SimpleNamespace(is_fixed_size=not grows, overrides=overrides)
    )


def drawn_lines(axes):
    return [line for line in axes.lines if line.get_gid() != CHANGE and len(line.get_xdata()) > 1]


def test_the_common_start_of_lines_is_drawn_once() -> None:
    ends = {2: 0.3, 5: 0.5, 4: 0.4}
    figure = width_changes([moving([4, 4, 4, end], [0.2, 0.3, 0.4, last]) for end, last in ends.items()], "start")
    lines = drawn_lines(figure.axes[0])
    assert [line.get_xdata().tolist() for line in lines] == [[1, 2, 3], [3, 4], [3, 4], [3, 4]]
    assert lines[0].get_color() == "0.45"
    (legend,) = figure.legends
    assert "one run each: no interval" in legend.get_title().get_text()
    assert [text.get_text() for text in legend.get_texts()] == ["not changed yet", "to 2", "to 4", "to 5"]


def test_runs_that_cannot_be_drawn_are_named() -> None:
    with pytest.raises(UserError, match="needs a run of a growth method"):
        width_changes([moving([2, 2], 0.1, grows=False)], "start")
    with pytest.raises(UserError, match="run has no held-out accuracy"):
        width_changes([moving([2, 3], None)], "end")

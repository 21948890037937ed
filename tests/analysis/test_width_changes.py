"""Runs that move between widths, sorted by either end."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from growlab.base.errors import UserError
from growlab.lab.analysis.width_figures import CHANGE, width_changes


def fake(path: list[int], accuracy: float, grows: bool = True, validated: bool = True) -> SimpleNamespace:
    stages = np.cumsum([0] + [int(a != b) for a, b in pairwise(path)])
    widths = [path[int(np.argmax(stages == stage))] for stage in range(stages[-1] + 1)]
    overrides = (
        ("model.width=4",) if grows else ("model.activation=elementwise_tanh", f"model.width={path[0]}")
    )
    return SimpleNamespace(
        path="run",
        group=SimpleNamespace(is_fixed_size=not grows, overrides=overrides),
        growth={"groups": {"hidden": {"full_width": path[0], "widths": widths}}},
        metrics=pd.DataFrame({"stage": stages}),
        held_out=lambda quantity: accuracy + np.zeros(len(path)) if validated else None,
        curve=lambda column: None if column.startswith("val") else np.zeros(len(path)),
    )


RUNS = [
    *(fake([4, 4, 3, 2], 0.4), fake([4, 4, 3, 2], 0.5), fake([4, 4, 4, 4], 0.6), fake([2, 2, 3, 4], 0.3)),
    *(fake([4] * 4, 0.2, grows=False), fake([2] * 4, 0.1, grows=False)),
]


@pytest.mark.parametrize(
    ("by", "panels"),
    [
        (
            "start",
            {"from width 2": {"to 4": 30, "tanh": 10}, "from width 4": {"to 2": 45, "to 4": 60, "tanh": 20}},
        ),
        (
            "end",
            {
                "to width 2": {"from 4": 45, "tanh": 10},
                "to width 4": {"from 2": 30, "from 4": 60, "tanh": 20},
            },
        ),
    ],
)
def test_panels_hold_means_over_seeds_and_the_runs_without_growth(by, panels) -> None:
    figure = width_changes(RUNS, by)
    (legend,) = figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    control = "without growth, elementwise_tanh"
    assert texts == [*sorted({name for lines in panels.values() for name in lines} - {"tanh"}), control]
    colours = dict(zip((line.get_color() for line in legend.get_lines()), texts, strict=True))
    told = legend.get_title().get_text().replace("\n", " ")
    assert (
        "means over n = 1-2 seeds" in told and "their bars and bands: one sample standard deviation" in told
    )
    found = {}
    for axes in figure.axes:
        assert axes.spines["bottom"].get_bounds() == (0, 4)
        curves = [line for line in axes.lines if line.get_gid() != CHANGE and len(line.get_xdata()) > 1]
        heights = {colours[line.get_color()]: line.get_ydata() for line in curves}
        assert all(np.ptp(height) == 0 for height in heights.values())
        found[axes.get_title()] = {
            name.replace(control, "tanh"): round(float(height[0]), 9) for name, height in heights.items()
        }
    assert found == panels


def test_each_line_marks_its_own_change_of_width_and_the_axis_says_what_was_watched() -> None:
    figure = width_changes(RUNS, "start")
    bars = {
        axes.get_title(): [
            (line.get_color(), *line.get_xdata()) for line in axes.lines if line.get_gid() == CHANGE
        ]
        for axes in figure.axes
    }
    blue, orange = "#0072B2", "#D55E00"
    assert bars == {"from width 2": [(orange, 2, 4)], "from width 4": [(blue, 2, 4)]}
    assert figure.axes[0].get_ylabel() == "test accuracy (%)"


def test_the_end_of_a_line_has_one_sample_deviation_over_seeds_and_fixed_runs_a_band() -> None:
    axes = width_changes(RUNS, "start").axes[1]
    ends = [
        container.lines[2][0].get_segments()[0][:, 1] for container in axes.containers if container.lines[2]
    ]
    (end,) = ends
    assert np.allclose(end, 45 + np.sqrt(50) * np.array([-1, 1]))
    assert axes.containers[0].lines[0].get_xdata()[0] > 4
    bands = [c for c in axes.collections if c.get_gid() is None and len(c.get_paths()[0].vertices) > 4]
    assert len(bands) == 1 and set(bands[0].get_paths()[0].vertices[:, 1]) == {20.0}


def test_what_lines_share_is_drawn_once() -> None:
    runs = [fake([4, 4, 4, 2], 0.4), fake([4, 4, 4, 5], 0.4), fake([4, 4, 4, 4], 0.4)]
    for run, last in zip(runs, (0.3, 0.5, 0.4), strict=True):
        run.held_out = lambda quantity, last=last: np.array([0.2, 0.3, 0.4, last])
    figure = width_changes(runs, "start")
    curves = [line for line in figure.axes[0].lines if line.get_gid() != CHANGE and len(line.get_xdata()) > 1]
    assert [line.get_xdata().tolist() for line in curves] == [[1, 2, 3], [3, 4], [3, 4], [3, 4]]
    assert curves[0].get_color() == "0.45"
    assert "one run each: no interval" in figure.legends[0].get_title().get_text()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "not changed yet",
        "to 2",
        "to 4",
        "to 5",
    ]


def test_runs_that_cannot_be_drawn_are_named() -> None:
    with pytest.raises(UserError, match="there is none"):
        width_changes([fake([2, 2], 0.1, grows=False)], "start")
    with pytest.raises(UserError, match="run has no held-out accuracy"):
        width_changes([fake([2, 3], 0.1, validated=False)], "end")

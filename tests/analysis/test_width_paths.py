"""Widths of several runs in one figure."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from growlab.base.errors import UserError
from growlab.lab.analysis.width_figures import TASK, path_of, width_paths


def fake(widths: dict[str, list[int]], stages: list[int], path: Path = Path("run")) -> SimpleNamespace:
    groups = {name: {"full_width": path[0], "widths": path} for name, path in widths.items()}
    return SimpleNamespace(
        path=path,
        growth={"events": [], "groups": groups},
        metrics=pd.DataFrame({"stage": stages}),
        held_out=lambda quantity: np.linspace(0.1, 0.9, len(stages)),
        curve=lambda column: np.linspace(0.1, 0.9, len(stages)),
    )


def test_every_epoch_has_the_width_that_it_ended_with() -> None:
    assert path_of(fake({"a": [4, 3, 6], "b": [2, 2, 1]}, [0, 0, 1, 2, 2])) == [6, 6, 5, 7, 7]
    with pytest.raises(UserError, match="has no width groups"):
        path_of(fake({}, [0]))


def test_runs_of_one_start_share_a_colour_and_a_line_of_the_legend() -> None:
    runs = [fake({"a": [2, 9]}, [0, 1, 1]), fake({"a": [2, 10]}, [0, 0, 1]), fake({"a": [64, 13]}, [0, 0, 1])]
    above, below = width_paths(runs).axes
    assert [text.get_text() for text in above.get_legend().get_texts()] == [
        "from 2 to 9-10 (n=2)",
        "from 64 to 13 (n=1)",
    ]
    assert above.get_legend().get_title().get_text() == "each line is one run"
    colours = [line.get_color() for line in above.lines[:3]]
    assert colours[0] == colours[1] != colours[2]
    assert list(above.lines[0].get_ydata()) == [2, 9, 9, 9] and list(above.get_yticks()) == [
        2,
        4,
        8,
        16,
        32,
        64,
    ]
    assert np.allclose(below.lines[0].get_ydata(), [10, 50, 90])
    with pytest.raises(UserError, match="at least one run"):
        width_paths([])


def test_a_width_that_is_the_sum_of_layers_says_so() -> None:
    told = [
        width_paths([fake(widths, [0])]).axes[0].get_ylabel() for widths in ({"a": [2]}, {"a": [2], "b": [3]})
    ]
    assert told == ["width", "width, sum of 2 layers"]


def test_few_neurons_are_counted_and_changes_of_the_task_marked(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("data: {class_schedule: {0: [3, 4], 2: [0, 1, 2, 3, 4, 5]}}\n")
    above, below = width_paths([fake({"a": [2, 9]}, [0, 1, 1], tmp_path)]).axes
    assert above.get_yscale() == "linear" and all(tick == int(tick) for tick in above.get_yticks())
    assert below.get_ylabel() == "validation accuracy (%)"
    assert [line.get_xdata()[0] for line in above.lines if line.get_gid() == TASK] == [0, 2]
    assert [text.get_text() for text in above.texts] == ["classes 3, 4", "6 classes"]

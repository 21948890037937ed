"""Figures from layers.csv."""

from pathlib import Path

import numpy as np
import pytest

from growlab.analysis import figures
from growlab.analysis.results import load_runs
from growlab.errors import UserError
from tests.analysis.fake_runs import write_run

HEADER = "step,layer,quantity,mean,std,low,high,counts\n"
NAMES = [
    f"{quantity}_{when}"
    for quantity in ("activations", "gradients", "weights")
    for when in ("at_start", "over_training")
]


def with_layers(folder: Path, initialisation: str, scale: float) -> Path:
    run = write_run(
        folder, growth="none", overrides=("model=hypernetwork", f"model.initialisation={initialisation}")
    )
    lines = []
    for step in (0, 50, 100):
        lines += [f"{step},network,loss,{2 - step / 100},,,,", f"{step},network,accuracy,{step / 200},,,,"]
        for layer in ("hidden.0", "hidden.2"):
            for quantity in ("activation", "gradient", "weight"):
                lines.append(f"{step},{layer},{quantity},0.1,{scale},{-3 * scale},{3 * scale},1|5|9|5|1")
            lines.append(f"{step},{layer},weight_gradient,0,0,0,0,")
    (run / "layers.csv").write_text(HEADER + "\n".join(lines) + "\n")
    return run


@pytest.mark.parametrize("name", [*NAMES, "loss_over_steps"])
def test_a_panel_or_line_for_every_run(tmp_path: Path, name: str) -> None:
    for number, init in enumerate(("xavier_in", "hyperfan_in", "hyperfan_out")):
        with_layers(tmp_path / init, init, 1.0 + number)
    figure = figures.find(name)(load_runs([tmp_path], print), None)
    shown = [axes for axes in figure.axes if axes.get_visible()]
    texts = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    if name == "loss_over_steps":
        assert sorted(texts) == ["hyperfan_in", "hyperfan_out", "xavier_in"]
        line = figure.axes[0].lines[0]
        assert np.array_equal(line.get_xdata(), [0, 50, 100]) and np.array_equal(
            line.get_ydata(), [2, 1.5, 1]
        )
    else:
        assert sorted(axes.get_title() for axes in shown) == ["hyperfan_in", "hyperfan_out", "xavier_in"]
        assert texts == ["hidden.0", "hidden.2"]
    assert figures.save(figure, tmp_path / "figure.png").stat().st_size > 5000


def test_bars_are_one_deviation(tmp_path: Path) -> None:
    with_layers(tmp_path / "a", "xavier_in", 2.0)
    figure = figures.find("weights_over_training")(load_runs([tmp_path], print), None)
    bars = figure.axes[0].containers[0]
    (segments,) = bars[2]
    heights = [segment[:, 1].tolist() for segment in segments.get_segments()]
    assert heights[0] == pytest.approx([-1.9, 2.1])


def test_runs_without_the_table_are_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", growth="none")
    with pytest.raises(UserError, match="train with log_layers_every_n_steps=N"):
        figures.find("weights_at_start")(load_runs([run], print), None)
    (run / "layers.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="not a table of layers"):
        figures.find("weights_at_start")(load_runs([run], print), None)

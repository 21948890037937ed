"""Figures from layers.csv."""

from pathlib import Path

import numpy as np
import pytest

from growlab.base.errors import UserError
from growlab.lab.analysis import figures
from growlab.lab.analysis.results import load_runs
from growlab.lab.analysis.step_figures import QUANTITIES, labels
from tests.analysis.fake_runs import write_run

HEADER = "step,layer,quantity,mean,std,low,high,counts\n"
NAMES = [
    f"{quantity}_{when}"
    for quantity in ("activations", "gradients", "weights", "weight_gradients")
    for when in ("at_start", "over_training", "at_end")
]


def with_layers(folder: Path, initialisation: str, scale: float) -> Path:
    run = write_run(
        folder, growth="none", overrides=("model=hypernetwork", f"model.initialisation={initialisation}")
    )
    lines = []
    for step in (0, 50, 100):
        lines += [f"{step},network,loss,{2 - step / 100},,,,", f"{step},network,accuracy,{step / 200},,,,"]
        for layer in ("hidden.0", "hidden.2"):
            for quantity in ("activation", "gradient", "weight", "weight_gradient"):
                spread = scale * (1 + step / 100)
                lines.append(f"{step},{layer},{quantity},0.1,{spread},{-spread},{spread},1|5|9|5|1")
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
        *of_runs, held_out, training = texts
        assert sorted(of_runs) == ["hyperfan_in", "hyperfan_out", "xavier_in"]
        assert (held_out, training) == ("held-out", "training, mean of an epoch")
        # A line is held-out and markers are training, however many epochs there are.
        assert [line.get_linestyle() == "None" for line in figure.axes[0].lines] == [False, True] * 3
        assert "band: one standard error" in figure.legends[0].get_title().get_text()
        line = figure.axes[0].lines[0]
        assert np.array_equal(line.get_xdata(), [0, 50, 100]) and np.array_equal(
            line.get_ydata(), [2, 1.5, 1]
        )
    else:
        titles = ["hyperfan_in", "hyperfan_out", "xavier_in"]
        if not name.endswith("over_training"):
            *histograms, last = shown
            assert last.get_xlabel() == "layer" and last.get_title() == ""
            assert {axes.get_xlabel() for axes in histograms} == {QUANTITIES[name.rpartition("_at_")[0][:-1]]}
            assert [text.get_text() for text in last.get_legend().get_texts()] == [
                axes.get_title() for axes in histograms
            ]
            # The lines fill their panel.
            assert last.get_xlim()[1] < 1.5
            shown = histograms
        assert sorted(axes.get_title() for axes in shown) == titles
        assert texts == ["hidden.0", "hidden.2"]
    assert figures.save(figure, tmp_path / "figure.png").stat().st_size > 5000


def test_overrides_are_told_in_words(tmp_path: Path) -> None:
    for number, more in enumerate(
        (("model.biases=true",), ("model.network.activation=relu", "model.gain=2"))
    ):
        write_run(tmp_path / str(number), overrides=("model.initialisation=hyperfan_in", *more))
    assert labels(load_runs([tmp_path])) == ["with biases", "ReLU, gain 2"]


def test_deviations_over_training_share_one_scale(tmp_path: Path) -> None:
    for number, init in enumerate(("xavier_in", "hyperfan_in")):
        with_layers(tmp_path / init, init, 1.0 + number)
    figure = figures.find("weights_over_training")(load_runs([tmp_path], print), None)
    assert [line.get_ydata().tolist() for axes in figure.axes for line in axes.lines[:1]] == [
        [2, 3, 4],
        [1, 1.5, 2],
    ]
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    assert figure.get_suptitle() == "weights; no mean is above 0.1 deviations"
    assert figure.legends[0].get_title().get_text() == "one run each"


@pytest.mark.parametrize(("when", "spread"), [("at_start", 1.0), ("at_end", 2.0)])
def test_histograms_are_of_the_first_or_the_last_step(tmp_path: Path, when: str, spread: float) -> None:
    with_layers(tmp_path / "a", "xavier_in", 1.0)
    panel, deviations = figures.find(f"weights_{when}")(load_runs([tmp_path], print), None).axes
    counts, edges, _ = panel.patches[0].get_data()
    assert counts.tolist() == [1 / 9, 5 / 9, 1, 5 / 9, 1 / 9] and edges[-1] == pytest.approx(spread)
    assert deviations.lines[0].get_ydata().tolist() == [spread, spread]


def test_a_histogram_without_a_shape_is_told_and_not_drawn(tmp_path: Path) -> None:
    run = with_layers(tmp_path / "a", "xavier_in", 1.0)
    path = run / "layers.csv"
    path.write_text(
        path.read_text().replace("hidden.0,gradient,0.1,1.0,-1.0,1.0", "hidden.0,gradient,0.1,1.0,-9,9")
    )
    panel, deviations = figures.find("gradients_at_start")(load_runs([tmp_path], print), None).axes
    assert panel.get_title() == "xavier_in (too heavy-tailed to show: hidden.0)" and len(panel.patches) == 1
    assert deviations.lines[0].get_ydata().tolist() == [1.0, 1.0]


def test_runs_without_the_table_are_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", growth="none")
    with pytest.raises(UserError, match="train with log_layers_every_n_steps=N"):
        figures.find("weights_at_start")(load_runs([run], print), None)
    (run / "layers.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="not a table of layers"):
        figures.find("weights_at_start")(load_runs([run], print), None)

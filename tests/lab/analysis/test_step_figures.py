"""Figures of records over steps: regions from rates.csv, layers from layers.csv."""

from pathlib import Path

import numpy as np
import pytest

from growlab.base.errors import UserError
from growlab.lab.analysis import figures
from growlab.lab.analysis.figures import rate_factors, region_norms
from growlab.lab.analysis.results import load_runs, open_run
from growlab.lab.analysis.step_figures import QUANTITIES, labels

from .fake_runs import PARAMETERS, STAGE_EPOCHS, STEPS_BETWEEN_RATES, write_run
from .test_figures import EVENTS, curves, event_positions


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return open_run(write_run(tmp_path_factory.mktemp("run")))


def test_rate_factors_have_a_curve_per_region_in_epochs(run):
    figure = rate_factors(run)
    median, first, middle, last = figure.axes[:4]
    names = [axes.get_title(loc="left") for axes in (first, middle, last)]
    assert names == [PARAMETERS[0], PARAMETERS[len(PARAMETERS) // 2], PARAMETERS[-1]]
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
    # Steps become epochs through the changing number of steps an epoch.
    ends = dict(zip(run.metrics["step"], run.metrics["epoch"] + 1, strict=True))
    x = curves(median)[1].get_xdata()
    assert all(np.isclose(x, ends[step]).any() for step in rates["step"].unique() if step in ends)
    assert (np.diff(x) > 0).all()


def test_an_unknown_parameter_is_answered_with_the_nearest(run):
    assert len(rate_factors(run, ["fc.weight"]).axes) == 3
    with pytest.raises(UserError, match=r"did you mean fc\.weight\?"):
        rate_factors(run, ["fc.weights"])


def test_norms_of_one_run_are_those_of_its_parameters(run):
    figure = region_norms([run])
    above, below = figure.axes[:3], figure.axes[3:6]
    shown = [PARAMETERS[i] for i in (0, 10, -1)]
    assert [axes.get_title(loc="left") for axes in above] == shown
    for row, quantity in ((above, "weight_norm"), (below, "grad_norm")):
        for axes, name in zip(row, shown, strict=True):
            lines = curves(axes)
            assert len(lines) == len(STAGE_EPOCHS) and axes.get_yscale() == "log"
            for region, line in enumerate(lines):
                part = run.rates[(run.rates["parameter"] == name) & (run.rates["region"] == region)]
                np.testing.assert_allclose(line.get_ydata(), part[quantity])
    assert above[0].get_ylim() == above[1].get_ylim() != below[0].get_ylim()


def test_norms_of_two_runs_stand_side_by_side(tmp_path):
    for name in ("ours", "pairs"):
        write_run(tmp_path / name, growth=name, stage_epochs=(1, 1, 2))
    # Older runs recorded no gradients.
    path = tmp_path / "pairs" / "rates.csv"
    path.write_text("".join(line.rsplit(",", 1)[0] + "\n" for line in path.read_text().splitlines()))
    runs = load_runs(tmp_path)
    figure = region_norms(runs, ["fc.weight"])
    assert [axes.get_ylabel() for axes in figure.axes] == ["weight norm", "", "region: stage of birth"]
    titles = [axes.get_title(loc="left") for axes in figure.axes[:2]]
    assert titles == ["ours (variance transfer + rates by\nage)", "pairs + rates by age"]
    assert figure.get_suptitle() == "fc.weight"
    for axes, one in zip(figure.axes[:2], runs, strict=True):
        part = one.rates[(one.rates["parameter"] == "fc.weight") & (one.rates["region"] == 2)]
        np.testing.assert_allclose(curves(axes)[2].get_ydata(), part["weight_norm"])
    with pytest.raises(UserError, match="give --parameter once"):
        region_norms(runs, ["fc.weight", "conv1.weight"])
    with pytest.raises(UserError, match="shows 3 runs side by side and there are 4"):
        region_norms([*runs, *runs])


# Layers ----------------------------------------------------------------------------------------------------

HEADER = "step,layer,quantity,mean,std,low,high,counts\n"


def with_layers(folder: Path, initialisation: str, scale: float) -> Path:
    overrides = ("model=hypernetwork", f"model.initialisation={initialisation}")
    run = write_run(folder, growth="none", lr_adapt="none", stage_epochs=(4,), overrides=overrides)
    lines = []
    for step in (0, 50, 100):
        lines += [f"{step},network,loss,{2 - step / 100},,,,", f"{step},network,accuracy,{step / 200},,,,"]
        for layer in ("hidden.0", "hidden.2"):
            for quantity in QUANTITIES:
                spread = scale * (1 + step / 100)
                lines.append(f"{step},{layer},{quantity},0.1,{spread},{-spread},{spread},1|5|9|5|1")
    (run / "layers.csv").write_text(HEADER + "\n".join(lines) + "\n")
    return run


def drawn(folder: Path, name: str):
    return figures.find(name)(load_runs([folder], print), None)


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layers")
    for number, init in enumerate(("xavier_in", "hyperfan_in", "hyperfan_out")):
        with_layers(folder / init, init, 1.0 + number)
    return folder


INITS = ["hyperfan_in", "hyperfan_out", "xavier_in"]


@pytest.mark.parametrize(
    ("name", "quantity"), [("activations_at_start", "activation"), ("weight_gradients_at_end", "weight_gradient")]
)
def test_histograms_have_a_panel_a_run_and_one_of_deviations(layered: Path, name: str, quantity: str) -> None:
    figure = drawn(layered, name)
    *histograms, last = [axes for axes in figure.axes if axes.get_visible()]
    assert sorted(axes.get_title() for axes in histograms) == INITS
    assert {axes.get_xlabel() for axes in histograms} == {QUANTITIES[quantity]}
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["hidden.0", "hidden.2"]
    assert last.get_xlabel() == "layer" and last.get_title() == "" and last.get_xlim()[1] < 1.5
    names = [text.get_text() for text in last.get_legend().get_texts()]
    assert names == [axes.get_title() for axes in histograms]


def test_loss_over_steps_has_a_line_and_markers_a_run(layered: Path) -> None:
    figure = drawn(layered, "loss_over_steps")
    *of_runs, held_out, training = [text.get_text() for text in figure.legends[0].get_texts()]
    assert sorted(of_runs) == INITS and (held_out, training) == ("held-out", "training, mean of an epoch")
    # A line is held-out and markers are training, however many epochs there are.
    assert [line.get_linestyle() == "None" for line in figure.axes[0].lines] == [False, True] * 3
    assert "band: one standard error" in figure.legends[0].get_title().get_text()
    line = figure.axes[0].lines[0]
    assert list(line.get_xdata()) == [0, 50, 100] and list(line.get_ydata()) == [2, 1.5, 1]


def test_deviations_over_training_share_one_scale(layered: Path) -> None:
    figure = drawn(layered, "weights_over_training")
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in shown] == INITS
    assert [axes.lines[0].get_ydata().tolist() for axes in shown] == [[2, 3, 4], [3, 4.5, 6], [1, 1.5, 2]]
    assert len({axes.get_ylim() for axes in shown}) == 1
    assert figure.get_suptitle() == "weights; no mean is above 0.1 deviations"
    assert figure.legends[0].get_title().get_text() == "one run each"


def test_overrides_are_said_in_words(tmp_path: Path) -> None:
    relu = ("model.network.activation=relu", "model.gain=2")
    for number, more in enumerate((("model.biases=true",), relu)):
        write_run(tmp_path / str(number), overrides=("model.initialisation=hyperfan_in", *more))
    assert labels(load_runs([tmp_path])) == ["with biases", "ReLU, gain 2"]


@pytest.mark.parametrize(("when", "spread"), [("at_start", 1.0), ("at_end", 2.0)])
def test_histograms_are_of_the_first_or_the_last_step(tmp_path: Path, when: str, spread: float) -> None:
    with_layers(tmp_path / "a", "xavier_in", 1.0)
    panel, deviations = drawn(tmp_path, f"weights_{when}").axes
    counts, edges, _ = panel.patches[0].get_data()
    assert counts.tolist() == [1 / 9, 5 / 9, 1, 5 / 9, 1 / 9] and edges[-1] == pytest.approx(spread)
    assert deviations.lines[0].get_ydata().tolist() == [spread, spread]


def test_a_histogram_without_a_shape_is_named_and_not_drawn(tmp_path: Path) -> None:
    path = with_layers(tmp_path / "a", "xavier_in", 1.0) / "layers.csv"
    narrow, wide = "hidden.0,gradient,0.1,1.0,-1.0,1.0", "hidden.0,gradient,0.1,1.0,-9,9"
    path.write_text(path.read_text().replace(narrow, wide))
    panel, deviations = drawn(tmp_path, "gradients_at_start").axes
    assert panel.get_title() == "xavier_in (too heavy-tailed to show: hidden.0)" and len(panel.patches) == 1
    assert deviations.lines[0].get_ydata().tolist() == [1.0, 1.0]
    path.unlink()
    with pytest.raises(UserError, match="train with log_layers_every_n_steps=N"):
        drawn(tmp_path, "weights_at_start")

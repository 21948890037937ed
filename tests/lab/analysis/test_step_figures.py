"""Figures over steps: regions from rates.csv, layers from layers.csv."""

from pathlib import Path

import numpy as np
import pytest

from growlab.base.errors import UserError
from growlab.lab.analysis import figures
from growlab.lab.analysis.figures import rate_factors, region_norms
from growlab.lab.analysis.results import load_runs, open_run
from growlab.lab.analysis.step_figures import QUANTITIES, labels

from .fake_runs import write_run
from .test_figures import curves


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return open_run(write_run(tmp_path_factory.mktemp("run")))


def test_an_unknown_parameter_gives_a_suggestion(run):
    assert len(rate_factors(run, ["fc.weight"]).axes) == 3
    with pytest.raises(UserError, match=r"did you mean fc\.weight\?"):
        rate_factors(run, ["fc.weights"])


def test_norms_of_two_runs_have_a_panel_each(tmp_path):
    for name in ("ours", "pairs"):
        write_run(tmp_path / name, growth=name, stage_epochs=(1, 1, 2))
    # Older runs have no norms of gradients.
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
    with pytest.raises(UserError, match="shows at most 3 runs, not 4"):
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


def test_labels_describe_overrides(tmp_path: Path) -> None:
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


def test_a_heavy_tailed_histogram_is_named_and_not_drawn(tmp_path: Path) -> None:
    path = with_layers(tmp_path / "a", "xavier_in", 1.0) / "layers.csv"
    narrow, wide = "hidden.0,gradient,0.1,1.0,-1.0,1.0", "hidden.0,gradient,0.1,1.0,-9,9"
    path.write_text(path.read_text().replace(narrow, wide))
    panel, deviations = drawn(tmp_path, "gradients_at_start").axes
    assert panel.get_title() == "xavier_in (too heavy-tailed to show: hidden.0)" and len(panel.patches) == 1
    assert deviations.lines[0].get_ydata().tolist() == [1.0, 1.0]
    path.unlink()
    with pytest.raises(UserError, match="train with log_layers_every_n_steps=N"):
        drawn(tmp_path, "weights_at_start")

"""Loss and score over the learning rate."""

from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from growlab.base.errors import UserError
from growlab.lab.analysis.comparison import learning_rates, over_rates
from growlab.lab.analysis.figures import find
from growlab.lab.analysis.results import load_runs
from growlab.lab.analysis.tables import summarise
from tests.analysis.fake_runs import write_run

FIXED = {"growth": "none", "lr_adapt": "none", "cost_percent": 100.0}


def at_rate(folder: Path, rate: float, *, named: bool = True, **settings: object) -> None:
    """A run at a rate; the experiment's own is named by no override."""
    overrides = [*settings.pop("overrides", ()), *([f"optimizer.lr={rate}"] if named else [])]
    write_run(folder, overrides=overrides, stage_epochs=(2, 2), **settings)
    path = folder / "config.yaml"
    config = OmegaConf.load(path)
    OmegaConf.update(config, "optimizer.lr", rate, force_add=True)
    OmegaConf.save(config, path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for rate, accuracy, loss in ((0.2, 0.6, 1.5), (0.05, 0.7, 1.0), (0.1, 0.8, 0.5)):
        for seed in (0, 1):
            found = {"test_accuracy": accuracy + 0.01 * seed, "train_loss": loss + 0.2 * seed}
            at_rate(tmp_path / f"fixed{rate}_{seed}", rate, named=rate != 0.1, seed=seed, **FIXED, **found)
    at_rate(tmp_path / "ours0.1", 0.1, named=False, test_accuracy=0.75, train_loss=0.7)
    at_rate(tmp_path / "ours0.2", 0.2, test_accuracy=0.65, train_loss=float("nan"))
    return tmp_path


def test_rows_that_differ_by_their_rate_make_one_curve(folder: Path) -> None:
    fixed, ours = over_rates(summarise(load_runs(folder)))
    assert (fixed.name, ours.name) == ("fixed-size", "ours + stagewise_norm")
    assert [rate for rate, _ in fixed.rows] == [0.05, 0.1, 0.2] and [rate for rate, _ in ours.rows] == [
        0.1,
        0.2,
    ]
    assert [row.n for _, row in fixed.rows] == [2, 2, 2]


def test_the_figure_shows_means_over_seeds_with_their_deviation(folder: Path) -> None:
    figure = find("learning_rates")(load_runs(folder), None)
    loss, score = figure.axes
    lines = {line.get_color(): line for line in score.lines if len(line.get_xdata()) == 3}
    (fixed,) = lines.values()
    assert fixed.get_xdata() == pytest.approx([0.05, 0.1, 0.2])
    assert fixed.get_ydata() == pytest.approx([70.5, 80.5, 60.5])
    bars = [bar.get_segments()[0][:, 1] for bar in score.collections]
    assert [np.ptp(bar) for bar in bars] == pytest.approx([2 * 100 * 0.01 / 2**0.5] * 3)
    (fixed,) = [line for line in loss.lines if len(line.get_xdata()) == 3]
    assert fixed.get_ydata() == pytest.approx([1.1, 0.6, 1.6])
    # One rate of the other method has no finite loss.
    ours = [line for line in loss.lines if line.get_color() != fixed.get_color()]
    assert {tuple(line.get_xdata()) for line in ours} == {(0.1,)}
    assert [text.get_text() for text in score.get_xticklabels()] == ["0.05", "0.1", "0.2"]
    assert loss.get_yscale() == "linear"


def test_losses_far_apart_stand_on_a_logarithmic_axis(folder: Path) -> None:
    at_rate(folder / "far", 0.4, train_loss=100.0)
    assert learning_rates(load_runs(folder)).axes[0].get_yscale() == "log"


def test_what_else_tells_methods_apart_stays_in_their_names(tmp_path: Path) -> None:
    for rate in (0.1, 0.2):
        for decay in (0.0, 0.1):
            at_rate(tmp_path / f"{rate}_{decay}", rate, overrides=[f"optimizer.weight_decay={decay}"])
    curves = over_rates(summarise(load_runs(tmp_path)))
    assert sorted(curve.name for curve in curves) == [
        f"ours + stagewise_norm, optimizer.weight_decay={decay}" for decay in ("0", "0.1")
    ]
    assert all([rate for rate, _ in curve.rows] == [0.1, 0.2] for curve in curves)


def test_runs_that_have_no_curve_over_rates_are_refused(tmp_path: Path) -> None:
    at_rate(tmp_path / "a", 0.1, growth="none", lr_adapt="none")
    at_rate(tmp_path / "b", 0.1)
    with pytest.raises(UserError, match=r"all runs have optimizer.lr=0.1: name runs of several rates"):
        learning_rates(load_runs(tmp_path))
    at_rate(tmp_path / "c", 0.2, data="digits")
    with pytest.raises(UserError, match="is of one network and data set"):
        learning_rates(load_runs(tmp_path))
    (tmp_path / "a" / "config.yaml").write_text("seed: 0\noptimizer: none\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"config.yaml tells no optimizer.lr"):
        learning_rates(load_runs([tmp_path / "a", tmp_path / "b"]))

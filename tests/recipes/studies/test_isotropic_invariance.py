"""The study of invariances on small networks."""

import csv
import json
from pathlib import Path

import pytest

from tests.command_line import CommandLine

SMALL = (
    *("experiment=papers/isotropic_invariance", "experiment_function.width=12", "experiment_function.depth=4"),
    *("experiment_function.epochs=2", "experiment_function.num_seeds=2"),
    *("experiment_function.changes=[-9,-1,9]", "experiment_function.divergence_steps=3", "data.limit_train=64"),
    "data.limit_test=40",
)


@pytest.fixture(scope="module")
def folder(cli: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("invariance")
    outcome = cli.done(*SMALL, "hydra.run.dir=run", cwd=folder)
    assert json.loads(outcome.out) == json.loads((folder / "run" / "summary.json").read_text())
    return folder / "run"


def test_growth_and_bases_change_nothing_and_removal_does(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    errors = {change: row["largest_relative_error"] for change, row in summary["changes"].items()}
    assert set(errors) == {"-9", "-1", "+9"} and summary["num_networks"] == 2
    assert errors["+9"] < 1e-12 < errors["-1"] < errors["-9"]
    assert summary["changes"]["+9"]["accuracy"] == summary["changes"]["+9"]["accuracy_before"]
    assert summary["divergence"]["SGD"] < 1e-10 < summary["divergence"]["Adam"]


def test_diagonal_layers_keep_as_many_parameters_as_the_formula_says(folder: Path) -> None:
    sparsity = json.loads((folder / "summary.json").read_text())["sparsity"]
    assert sparsity["largest_relative_error"] < 1e-12
    # Three maps of 12 x 12 between hidden layers, of which the first and the third become vectors.
    assert sparsity["share_of_parameters"] == pytest.approx((2 * 24 + 12 * 13) / (3 * 12 * 13))
    assert sparsity["share_by_equation_19"] == pytest.approx(sparsity["share_of_parameters"])


def test_singular_values_are_kept_for_every_epoch(folder: Path) -> None:
    rows = list(csv.DictReader((folder / "spectra.csv").read_text().splitlines()))
    assert len(rows) == 3 * 4 * 12
    of_layer = [float(row["singular_value"]) for row in rows[:12]]
    assert of_layer == sorted(of_layer, reverse=True) and of_layer[-1] >= 0
    assert (folder / "invariance.png").stat().st_size > 10_000

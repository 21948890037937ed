"""The study of invariances on small networks."""

import json
from pathlib import Path

import pytest

from tests.whole_runs import table

SMALL = (
    *("experiment=papers/isotropic_invariance", "experiment_function.width=12", "experiment_function.depth=4"),
    *("experiment_function.epochs=2", "experiment_function.num_seeds=2"),
    *("experiment_function.changes=[-9,-1,9]", "experiment_function.divergence_steps=3", "data.limit_train=64"),
    "data.limit_test=40",
)


def test_growth_and_bases_preserve_outputs_and_removal_does_not(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    errors = {change: row["largest_relative_error"] for change, row in summary["changes"].items()}
    assert set(errors) == {"-9", "-1", "+9"} and summary["num_networks"] == 2
    assert errors["+9"] < 1e-12 < errors["-1"] < errors["-9"]
    assert summary["changes"]["+9"]["accuracy"] == summary["changes"]["+9"]["accuracy_before"]
    assert summary["divergence"]["SGD"] < 1e-10 < summary["divergence"]["Adam"]


def test_diagonal_layers_have_as_many_parameters_as_in_equation_19(folder: Path) -> None:
    sparsity = json.loads((folder / "summary.json").read_text())["sparsity"]
    assert sparsity["largest_relative_error"] < 1e-12
    # Of three 12 x 12 maps between hidden layers, the first and the third become vectors.
    assert sparsity["share_of_parameters"] == pytest.approx((2 * 24 + 12 * 13) / (3 * 12 * 13))
    assert sparsity["share_by_equation_19"] == pytest.approx(sparsity["share_of_parameters"])


def test_singular_values_are_written_for_every_epoch(folder: Path) -> None:
    rows = table(folder / "spectra.csv")
    assert len(rows) == 3 * 4 * 12
    of_layer = [float(row["singular_value"]) for row in rows[:12]]
    assert of_layer == sorted(of_layer, reverse=True) and of_layer[-1] >= 0
    assert (folder / "invariance.png").stat().st_size > 10_000

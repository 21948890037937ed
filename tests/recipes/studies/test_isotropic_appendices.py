"""The study of the appendices on small networks."""

import copy
import json
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

from growlab.parts.isotropic import IsotropicActivation, isotropic_mlp
from growlab.recipes.papers.studies import isotropic_appendices as study
from tests.whole_runs import table

SMALL = (
    *("experiment=papers/isotropic_appendices", "experiment_function.width=12", "experiment_function.epochs=2"),
    "experiment_function.num_seeds=1",
    *("experiment_function.removed=[1,6]", "experiment_function.divergence_steps=3", "data.limit_train=64"),
    "data.limit_test=80",
)


@pytest.mark.slow
def test_vectors_of_one_length_have_one_gain_and_rings_are_classified(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["num_networks"] == 1
    assert summary["gain_spread"]["rings, shell"] < 1e-12 < 0.01 < summary["gain_spread"]["rings, plain"]
    assert summary["accuracy"]["rings, shell"] > 0.95 and summary["not_affine"]["rings, shell"] > 0.5
    # Without biases f(-x) = -f(x): opposite points of a ring cannot both be right.
    assert summary["accuracy"]["rings, shell without biases"] < 0.6


def test_affine_networks_are_recognised() -> None:
    linear = torch.nn.Sequential(torch.nn.Linear(2, 4), IsotropicActivation(length=1e12), torch.nn.Linear(4, 2))
    x, labels = study._rings(torch.Generator().manual_seed(0))
    assert study._affinity(linear.double(), x, labels)["not_affine"] < 1e-9
    assert float(labels.double().mean()) == 0.5
    normalised = torch.nn.Sequential(study.Shell(), IsotropicActivation(length=1e12), torch.nn.Linear(2, 2))
    found = study._affinity(normalised.double(), x, labels)
    assert found["not_affine_unit"] < 1e-9 < 0.01 < found["not_affine"]


@pytest.mark.slow
def test_equal_networks_diverge_except_with_new_columns_of_zeros(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    assert max(summary["difference_at_start"].values()) < 1e-12
    ends, moved = summary["difference_at_end"], summary["new_weights_at_end"]
    assert ends["zero"] < 1e-12 and moved["zero"] == 0.0
    assert min(ends[name] for name in ("product", "orthogonal", "copy", "random")) > 1e-6
    assert all(moved[name] > 0 for name in ("orthogonal", "copy", "random", "small"))


def test_a_factored_layer_computes_the_same() -> None:
    torch.manual_seed(0)
    network = isotropic_mlp((1, 2, 3), 3, 8, 2).double()
    x = torch.randn(7, 1, 2, 3, dtype=torch.float64)
    factored = study._factored(network)
    assert torch.allclose(factored(x), network(x), rtol=1e-12)
    inner, outer = factored.hidden[0]
    assert torch.allclose(outer.weight.T @ outer.weight, torch.eye(8).double(), atol=1e-12)
    gram = inner.weight @ inner.weight.T
    assert torch.allclose(gram, torch.diag(gram.diagonal()), atol=1e-12)


def test_a_gradient_step_on_a_factored_layer_is_by_equation_50() -> None:
    """To first order in the rate: A B x moves by -eta (g B^T B x . x + A A^T g x . x), W x by -eta g x . x."""
    torch.manual_seed(0)
    network = isotropic_mlp((1, 1, 4), 2, 3, 1).double()
    factored = study._factored(network)
    x, upstream, rate = torch.randn(1, 4).double(), torch.randn(1, 3).double(), 1e-6
    moved = []
    for layer in (copy.deepcopy(network.hidden[0]), copy.deepcopy(factored.hidden[0])):
        before = layer(x)
        (before * upstream).sum().backward()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter -= rate * parameter.grad
            moved.append((layer(x) - before) / rate)
    inner, outer = factored.hidden[0]
    square = x.square().sum()
    plain = -upstream * (square + 1)
    product = -upstream * ((inner(x).square()).sum() + 1) - upstream @ outer.weight @ outer.weight.T * square
    assert torch.allclose(moved[0], plain, rtol=1e-4)
    assert torch.allclose(moved[1], product, rtol=1e-4)


@pytest.mark.slow
def test_every_table_is_written(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    counts = {name: len(table(folder / f"{name}.csv")) for name in ("collapse", "divergence", "directions", "lengths")}
    assert counts == {"collapse": 8, "divergence": 6 * 4, "directions": 4, "lengths": 4}
    errors = summary["removal_error"]
    assert errors["forward, 1"] < errors["forward, 6"] and errors["backward, 1"] < errors["backward, 6"]
    assert summary["smallest_length"] < 0
    assert (folder / "appendices.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_figure_has_legends_and_the_number_of_seeds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(study.style, "save", lambda figure, path: drawn.append(figure) or path)
    study.draw(folder)
    legends = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in drawn[0].axes]
    assert [len(names) for names in legends] == [2, 6, 2] and not drawn[0].legends
    assert "n = 1 seeds" in drawn[0].get_supxlabel()

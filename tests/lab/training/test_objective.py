"""Objectives: losses compared with torch, metrics with torchmetrics over batches, equal weights of tokens."""

import math
import re
from typing import Any

import pytest
import torch
import torchmetrics as tm
from torch.nn import functional as F

from growlab.base.errors import UserError
from growlab.growth.outputs import network_inputs
from growlab.lab.training.objectives import (
    CharacterPrediction,
    Classification,
    CustomObjective,
    MultiLabel,
    Regression,
    Segmentation,
    TokenPrediction,
)

PADDING = 1


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 7, 11, generator=generator, dtype=torch.float64)
    target = torch.randint(2, 11, (4, 7), generator=generator)
    target[1, 3:] = target[3, 1:] = PADDING
    return logits, target


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_equals_torchs(smoothing):
    logits, target = tokens()
    loss, _ = TokenPrediction(smoothing, PADDING)(logits, target)
    expected = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PADDING, label_smoothing=smoothing)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


def test_metrics_are_means_over_all_tokens():
    logits, target = tokens()
    objective = TokenPrediction(0.1, PADDING)
    parts = [objective(logits[part], target[part])[1] for part in (slice(1), slice(1, 4))]
    metrics = objective.metrics(sum(parts).tolist())
    is_token = target != PADDING
    nll = F.cross_entropy(logits[is_token], target[is_token])
    assert metrics["perplexity"] == pytest.approx(math.exp(nll), rel=1e-5)
    accuracy = (logits.argmax(-1) == target)[is_token].double().mean().item()
    assert metrics["accuracy"] == pytest.approx(accuracy, rel=1e-6)
    assert set(metrics) == set(objective.metric_names)
    assert objective.metrics([1e9, 0.0, 1e9, 1.0])["perplexity"] == math.inf


def test_a_batch_without_tokens_counts_for_nothing():
    logits, _ = tokens()
    for objective in (TokenPrediction(padding=PADDING), CharacterPrediction(padding=PADDING)):
        loss, sums = objective(logits, torch.full((4, 7), PADDING))
        assert loss == 0
        assert all(math.isnan(value) for value in objective.metrics(sums.tolist()).values())


def test_inputs_are_cast_to_the_networks_precision_except_indices():
    network = torch.nn.Linear(2, 2).double()
    numbers, indices = network_inputs((torch.zeros(2), torch.zeros(2, dtype=torch.int64)), network)
    assert (numbers.dtype, indices.dtype) == (torch.float64, torch.int64)


# Metrics over an epoch -------------------------------------------------------------------------------------

# Uneven batches, like the last of an epoch and those of ranks.
PARTS = (slice(0, 5), slice(5, 7), slice(7, 12))


def drawn(*shapes: tuple[int, ...], classes: int = 0) -> list[torch.Tensor]:
    """Normally distributed numbers; the last tensor has class indices if `classes` is given."""
    generator = torch.Generator().manual_seed(1)
    *numbers, target = (torch.randn(shape, generator=generator) for shape in shapes)
    return [*numbers, target if not classes else (target.abs() * classes / 2).long().clamp(max=classes - 1)]


def masks() -> list[torch.Tensor]:
    logits, target = drawn((12, 3, 2, 4), (12, 2, 4), classes=3)
    target[:6, 0] = 255
    return [logits, target]


OBJECTIVES = {
    "smoothed": (Classification(0.1), drawn((12, 3), (12,), classes=3), tm.Accuracy("multiclass", num_classes=3)),
    "multilabel": (MultiLabel(), drawn((12, 4), (12, 4), classes=2), tm.F1Score("multilabel", num_labels=4)),
    "regression": (Regression(), drawn((12, 2), (12, 2)), tm.R2Score()),
    "regression_of_one": (Regression("huber"), drawn((12, 1), (12,)), tm.MeanSquaredError(squared=False)),
    "segmentation": (
        *(Segmentation(), masks()),
        tm.JaccardIndex("multiclass", num_classes=3, ignore_index=255, average="macro"),
    ),
    "weighted": (
        CustomObjective(
            torch.nn.CrossEntropyLoss(torch.tensor([1.0, 5.0, 0.5]), ignore_index=2, label_smoothing=0.2),
            {"f1": tm.F1Score("multiclass", num_classes=3, average="macro")},
        ),
        drawn((12, 3), (12,), classes=3),
        tm.F1Score("multiclass", num_classes=3, average="macro"),
    ),
    "columns": (
        CustomObjective(torch.nn.L1Loss(), {"mae": tm.R2Score(multioutput="uniform_average")}),
        drawn((12, 2), (12, 2)),
        tm.R2Score(),
    ),
}
KEYS = {"smoothed": "accuracy", "multilabel": "f1", "regression": "r2", "regression_of_one": "rmse"}
KEYS |= {"segmentation": "mean_iou", "weighted": "f1", "columns": "mae"}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_metrics_over_uneven_batches_equal_those_of_torchmetrics(name: str) -> None:
    objective, (output, target), reference = OBJECTIVES[name]
    if name == "multilabel":
        reference.average = "micro"
    found = objective.metrics(sum(objective(output[part], target[part])[1].double() for part in PARTS).tolist())
    assert tuple(found) == tuple(objective.metric_names)
    predicted = output.squeeze(-1) if output.dim() == target.dim() + 1 and output.shape[-1] == 1 else output
    assert found[KEYS[name]] == pytest.approx(float(reference(predicted, target)), rel=1e-5)
    # The mean loss over the epoch is that of all samples at once.
    assert found["loss"] == pytest.approx(float(objective(output, target)[0]), rel=1e-5)


def test_metrics_without_sums_collect_all_batches() -> None:
    output, target = drawn((12,), (12,))
    objective = CustomObjective(torch.nn.MSELoss(), {"order": tm.KendallRankCorrCoef(), "mae": tm.MeanAbsoluteError()})
    assert (objective.metric_names, objective.evaluated_names) == (("loss", "mae"), ("order",))
    for part in PARTS:
        objective.observe(output[part], target[part])
    expected = float(tm.KendallRankCorrCoef()(output, target))
    assert objective.evaluate(None, "val", 0) == {"order": pytest.approx(expected)}
    objective.observe(output[:5], target[:5])
    assert objective.evaluate(None, "val", 1) == {
        "order": pytest.approx(float(tm.KendallRankCorrCoef()(output[:5], target[:5])))
    }


@pytest.mark.parametrize("objective", [Classification(), TokenPrediction(), Segmentation()])
def test_auxiliary_heads_are_ignored(objective: Any) -> None:
    dims = (4,) if isinstance(objective, Classification) else (4, 5)
    logits, target = torch.randn(*dims, 3), torch.randint(3, dims)
    if isinstance(objective, Segmentation):
        logits, target = masks()
    expected, sums = objective(logits, target)
    for output in ({"out": logits, "aux": torch.zeros(1)}, (logits, torch.zeros(1))):
        loss, own = objective(output, target)
        assert loss == expected and torch.equal(own, sums)


def test_predict_gives_metrics_probabilities() -> None:
    """torchmetrics treats logits within [0, 1] as probabilities, and 0.2 as negative."""
    output, target = torch.tensor([0.2, 0.4, 0.9]), torch.tensor([1.0, 1.0, 1.0])
    accuracies = []
    for predict in (None, torch.nn.Sigmoid()):
        objective = CustomObjective(torch.nn.BCEWithLogitsLoss(), {"accuracy": tm.Accuracy("binary")}, predict)
        accuracies.append(objective.metrics(objective(output, target)[1].tolist())["accuracy"])
    assert accuracies == [pytest.approx(1 / 3), 1.0]


MSE = torch.nn.MSELoss
REFUSED: list[tuple[Any, list[tuple[int, ...]], str]] = [
    (lambda: MultiLabel(), [(4, 3), (4,)], "takes outputs [batch, labels] and targets [batch, labels]"),
    (lambda: Regression(), [(4, 2), (4, 3)], "outputs and targets of one shape, not outputs [4, 2] of float32"),
    (lambda: Segmentation(), [(4, 3), (4,)], "takes outputs [batch, classes, height, width]"),
    (lambda: TokenPrediction(), [(4, 3), (4,)], "and targets [batch, positions], not outputs [4, 3] of float32"),
    (lambda: Classification(), [(4, 3), (4,)], "takes outputs [batch, classes] and whole numbers [batch]"),
    (lambda: CustomObjective(MSE(reduction="none")), [], "objective.loss.reduction=none must be mean"),
    (lambda: CustomObjective(torch.sub), [(4,), (4,)], "returns [4], not the mean loss as a scalar"),
    (lambda: CustomObjective(torch.nn.Linear(2, 2)), [], "has parameters, which would not train"),
    (lambda: MultiLabel(1.0), [], "objective.threshold=1.0 must lie between 0 and 1"),
    (lambda: TokenPrediction(1.5), [], "objective.label_smoothing=1.5"),
]


@pytest.mark.parametrize(
    ("make", "shapes", "sentence"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_incompatible_shapes_and_settings_are_refused(make: Any, shapes: list[tuple[int, ...]], sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)) as raised:
        make()(*map(torch.zeros, shapes))
    assert str(raised.value).endswith(".") and "\n" not in str(raised.value)


def test_a_loss_that_would_broadcast_is_an_error() -> None:
    with pytest.raises(UserWarning, match="target size"):
        CustomObjective(MSE())(torch.zeros(4, 2), torch.zeros(4))

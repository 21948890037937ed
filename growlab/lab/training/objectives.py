"""Objectives: a loss, and metrics from sums over batches.

Shape suffixes: B samples, L labels, C classes.
"""

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_sum

from growlab.base.errors import UserError

# Losses that average over class weights and leave out `ignore_index`.
_BY_CLASS = (nn.CrossEntropyLoss, nn.NLLLoss)


class Objective:
    """A loss and its metrics; subclasses define both.

    A batch is a tuple: the network's positional inputs, then the target.

    Attributes:
        metric_names: names of the metrics, "loss" among them, in the column order of metrics.csv.
        evaluated_names: names of the numbers that `evaluate` adds to an epoch's metrics.
        uneven: True if ranks may predict different numbers of items in a batch, such as tokens.
        compared_by: the metric that runs are compared by, and True if higher is better.
        goes_with: networks and objectives that suit the data, for error messages.
    """

    metric_names: Sequence[str] = ("loss", "accuracy")
    evaluated_names: Sequence[str] = ()
    uneven = False
    compared_by: tuple[str, bool] = ("accuracy", True)
    goes_with = ""

    def bind(self, data: Any) -> None:
        """Read settings from the run's data module; called once, before anything else."""
        self.goes_with = data.goes_with

    def __call__(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean loss of a batch, and detached sums over it from which `metrics` are computed.

        Args:
            output: the network's output.
            target: the last element of the batch.

        Returns:
            The loss (a scalar), and sums [k] that end with the number of predicted items.
        """
        raise NotImplementedError

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Compute metrics by name from sums over any number of batches and ranks."""
        raise NotImplementedError

    def observe(self, output: Any, target: Tensor) -> None:
        """Receive a validation or test batch, for metrics that `evaluate` computes over all of them."""

    def evaluate(self, task: Any, split: str, epoch: int | None) -> dict[str, Any]:
        """Compute further results of the network; called on every rank after all batches of an evaluation.

        Args:
            task: maps inputs to logits; in eval mode.
            split: "val" or "test".
            epoch: the current epoch, from 0; None after the run.

        Returns:
            Numbers by name; after the run also strings that describe how they were computed.
        """
        return {}

    def exports(self, network: nn.Module) -> dict[str, Any]:
        """Further files for the run's folder, by name: text, or an object for `torch.save`."""
        return {}

    def _refuse(self, takes: str, output: Any, target: Tensor) -> UserError:
        """Error about outputs and targets of unsupported shapes or dtypes."""
        actual = [f"{list(x.shape)} of {str(x.dtype).removeprefix('torch.')}" for x in (output, target)]
        advice = f": {self.goes_with}." if self.goes_with else "."
        return UserError(
            f"{type(self).__name__} takes {takes}, not outputs {actual[0]} and targets {actual[1]}{advice}"
        )


def _first_tensor(output: Any) -> Tensor:
    """The output itself, or the first tensor of a mapping (torchvision's "out") or tuple."""
    while not isinstance(output, Tensor):
        output = next(iter(output.values() if isinstance(output, Mapping) else output))
    return output


def _aligned(output: Tensor, target: Tensor) -> Tensor:
    """Squeeze outputs [B, 1] for targets [B]: torch would broadcast them to [B, B]."""
    return output.squeeze(-1) if output.shape == (*target.shape, 1) else output


def _sums_of(*numbers: Tensor | float | int) -> Tensor:
    """Concatenate sums into one vector, in float64 where the device supports it, so that pixel counts stay exact."""
    parts = [torch.as_tensor(number).detach().reshape(-1) for number in numbers]
    device = next((part.device for part in parts if part.device.type != "cpu"), torch.device("cpu"))
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.cat([part.to(device, dtype) for part in parts])


def _checked_smoothing(smoothing: float) -> float:
    if not 0 <= smoothing < 1:
        raise UserError(f"objective.label_smoothing={smoothing} must be at least 0 and below 1.")
    return smoothing


class Classification(Objective):
    """Cross-entropy and accuracy for one class per sample.

    Args:
        label_smoothing: fraction of the target's probability spread evenly over all classes.

    Examples:
        >>> loss, sums = Classification()(torch.tensor([[0.0, 0.0], [8.0, 0.0]]), torch.tensor([1, 0]))
        >>> Classification().metrics(sums.tolist())["accuracy"]
        0.5
    """

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = _checked_smoothing(label_smoothing)

    def __call__(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss of logits [B, C] and classes [B]; sums of the loss, correct predictions and samples."""
        logits = _first_tensor(output)
        if logits.dim() != 2 or target.shape != logits.shape[:1] or target.is_floating_point():
            raise self._refuse("outputs [batch, classes] and whole numbers [batch]", logits, target)
        loss = F.cross_entropy(logits, target, label_smoothing=self.label_smoothing)
        correct = (logits.detach().argmax(1) == target).sum()
        count = torch.tensor(len(target)).to(correct)
        return loss, torch.stack([loss.detach().float() * len(target), correct.float(), count])

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Mean loss and accuracy."""
        loss, correct, count = sums
        return {"loss": loss / count, "accuracy": correct / count}


class TokenPrediction(Objective):
    """Cross-entropy, accuracy and perplexity for one token per position, without padding.

    The loss may be smoothed (Szegedy et al. 2016); perplexity is the exponential of the mean loss without smoothing.

    Args:
        label_smoothing: fraction of the target's probability spread evenly over all tokens.
        padding: token in targets to ignore.

    Examples:
        >>> loss, sums = TokenPrediction(padding=1)(torch.zeros(1, 3, 4), torch.tensor([[0, 2, 1]]))
        >>> round(TokenPrediction().metrics(sums.tolist())["perplexity"], 3)  # four equally likely tokens
        4.0
    """

    metric_names: Sequence[str] = ("loss", "accuracy", "perplexity")
    compared_by: tuple[str, bool] = ("perplexity", False)
    uneven = True

    def __init__(self, label_smoothing: float = 0.0, padding: int = -100) -> None:
        self.label_smoothing, self.padding = _checked_smoothing(label_smoothing), padding

    def __call__(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss of logits [B, T, V] and tokens [B, T]; sums: loss, correct, negative log-likelihood, tokens."""
        logits = _first_tensor(output)
        if logits.dim() != 3 or target.shape != logits.shape[:2]:
            takes = "outputs [batch, positions, tokens] and targets [batch, positions]"
            raise self._refuse(takes, logits, target)
        # In float32: sums over a vocabulary lose too much in half precision.
        log_probability = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        is_token = target != self.padding
        index = target.masked_fill(~is_token, 0).unsqueeze(-1)
        nll = -log_probability.gather(-1, index).squeeze(-1)[is_token].sum()
        uniform = -log_probability.mean(-1)[is_token].sum() if self.label_smoothing else nll
        total = (1 - self.label_smoothing) * nll + self.label_smoothing * uniform
        correct = ((logits.detach().argmax(-1) == target) & is_token).sum()
        count = is_token.sum()
        sums = [total.detach().float(), correct.float(), nll.detach().float(), count.float()]
        return total / count.clamp(min=1), torch.stack(sums)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Mean loss, accuracy and perplexity over tokens; NaN without tokens."""
        loss, correct, nll, count = sums
        count = count or math.nan
        try:
            perplexity = math.exp(nll / count)
        except OverflowError:
            perplexity = math.inf
        return {"loss": loss / count, "accuracy": correct / count, "perplexity": perplexity}


class CharacterPrediction(TokenPrediction):
    """Cross-entropy of the next character; bits per character are its mean negative log2-likelihood.

    Examples:
        >>> loss, sums = CharacterPrediction()(torch.zeros(1, 3, 8), torch.tensor([[0, 2, 1]]))
        >>> round(CharacterPrediction().metrics(sums.tolist())["bits_per_character"], 3)  # eight equally likely
        3.0
    """

    metric_names: Sequence[str] = (*TokenPrediction.metric_names, "bits_per_character")
    compared_by = ("bits_per_character", False)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Mean loss, accuracy, perplexity and bits per character."""
        _, _, nll, count = sums
        return {**super().metrics(sums), "bits_per_character": nll / (count or math.nan) / math.log(2)}


class SubwordPrediction(TokenPrediction):
    """Cross-entropy of the next token, and bits per byte of the text.

    Bits per byte, the text's negative log2-likelihood divided by its length in UTF-8, can be compared between
    tokenizers; losses per token cannot.

    Examples:
        >>> import types
        >>> objective = SubwordPrediction()
        >>> objective.bind(types.SimpleNamespace(goes_with="", bytes_of_tokens=torch.tensor([0.0, 1.0, 2.0, 3.0])))
        >>> loss, sums = objective(torch.zeros(1, 3, 4), torch.tensor([[3, 1, 2]]))
        >>> round(objective.metrics(sums.tolist())["bits_per_byte"], 3)  # three tokens of two bits each, six bytes
        1.0
    """

    metric_names: Sequence[str] = (*TokenPrediction.metric_names, "bits_per_byte")
    compared_by = ("bits_per_byte", False)

    def bind(self, data: Any) -> None:
        """Read the number of bytes of each token from the data."""
        super().bind(data)
        lengths: Tensor | None = data.bytes_of_tokens
        if lengths is None:
            advice = f": {self.goes_with}" if self.goes_with else ""
            raise UserError(f"objective=tokens needs data that know the bytes of their tokens, as data=tokens{advice}.")
        self._bytes_of_tokens = lengths

    def __call__(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss of logits [B, T, V] and tokens [B, T]; as `TokenPrediction`, with bytes before the tokens' sum."""
        loss, sums = super().__call__(output, target)
        if self._bytes_of_tokens.device != target.device:
            self._bytes_of_tokens = self._bytes_of_tokens.to(target.device)
        size = self._bytes_of_tokens[target[target != self.padding]].sum()
        return loss, torch.cat([sums[:-1], size[None], sums[-1:]])

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Mean loss, accuracy and perplexity over tokens, and bits per byte."""
        loss, correct, nll, size, count = sums
        bits = nll / math.log(2) / size if size else math.nan
        return {**super().metrics((loss, correct, nll, count)), "bits_per_byte": bits}


class MultiLabel(Objective):
    """Binary cross-entropy of any number of labels per sample.

    Metrics: `accuracy`, the fraction of labels predicted correctly; micro-averaged `f1`; and `exact_match`, the
    fraction of samples whose labels are all correct.

    Args:
        threshold: probability at and above which a label counts as predicted.

    Examples:
        >>> loss, sums = MultiLabel()(torch.tensor([[2.0, -1.0], [3.0, 1.0]]), torch.tensor([[1, 0], [0, 1]]))
        >>> MultiLabel().metrics(sums.tolist())["exact_match"]
        0.5
    """

    metric_names: Sequence[str] = ("loss", "accuracy", "f1", "exact_match")
    compared_by = ("f1", True)

    def __init__(self, threshold: float = 0.5) -> None:
        if not 0 < threshold < 1:
            raise UserError(f"objective.threshold={threshold} must lie between 0 and 1.")
        self.threshold = threshold

    def __call__(self, output: Any, target_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss of logits [B, L] and labels [B, L] of 0 and 1; sums over the batch."""
        logits_BL = _first_tensor(output)
        if logits_BL.dim() < 2 or logits_BL.shape != target_BL.shape:
            takes = "outputs [batch, labels] and targets [batch, labels] of 0 and 1"
            raise self._refuse(takes, logits_BL, target_BL)
        loss = F.binary_cross_entropy_with_logits(logits_BL, target_BL.to(logits_BL.dtype))
        true_BL, predicted_BL = target_BL > 0.5, logits_BL.detach().sigmoid() >= self.threshold
        correct_BL = true_BL == predicted_BL
        samples = len(target_BL)
        return loss, _sums_of(
            loss.detach() * samples,
            correct_BL.sum(),
            (true_BL & predicted_BL).sum(),
            true_BL.sum() + predicted_BL.sum(),
            correct_BL.flatten(1).all(1).sum(),
            target_BL.numel(),
            samples,
        )

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Mean loss, accuracy, F1 and exact matches; F1 is 1 without true and predicted labels."""
        loss, correct, both, either, exact, labels, samples = sums
        f1 = 2 * both / either if either else 1.0
        return {"loss": loss / samples, "accuracy": correct / labels, "f1": f1, "exact_match": exact / samples}


_LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
}


class Regression(Objective):
    """Mean squared error, or another regression loss.

    Metrics: mean absolute error `mae`, root mean squared error `rmse`, and the coefficient of determination `r2`:
    averaged over the columns of targets [B, D], and over all numbers at once for targets of more dimensions.

    Args:
        loss: mse, l1, smooth_l1 or huber, as in torch.nn.functional.

    Examples:
        >>> loss, sums = Regression()(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([1.0, 2.0, 4.0]))
        >>> round(Regression().metrics(sums.tolist())["rmse"], 4)
        0.5774
    """

    metric_names: Sequence[str] = ("loss", "mae", "rmse", "r2")
    compared_by = ("rmse", False)

    def __init__(self, loss: Literal["mse", "l1", "smooth_l1", "huber"] = "mse") -> None:
        self.loss = _LOSSES[loss]

    def __call__(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss of outputs and targets of the same shape; targets [B] also match outputs [B, 1]."""
        predicted = _aligned(_first_tensor(output), target)
        if predicted.shape != target.shape:
            raise self._refuse("outputs and targets of one shape", predicted, target)
        target = target.to(predicted.dtype)
        loss = self.loss(predicted, target)
        columns = predicted.shape[1] if predicted.dim() == 2 else 1
        # Apple's GPUs have no float64.
        exact = (values.cpu() if values.device.type == "mps" else values for values in (predicted.detach(), target))
        x, y = (values.double().reshape(-1, columns) for values in exact)
        error, samples = x - y, len(target)
        sums = (error.abs().sum(), error.square().sum(0), y.sum(0), y.square().sum(0), x.numel(), samples)
        return loss, _sums_of(loss.detach() * samples, *sums)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Mean loss, mean absolute and root mean squared error, and R2, which is NaN for constant targets."""
        loss, absolute, *columns, numbers, samples = sums
        num_columns = len(columns) // 3
        errors, totals, squares = (columns[i * num_columns : (i + 1) * num_columns] for i in range(3))
        rows = numbers / num_columns
        variations = [square - total**2 / rows for total, square in zip(totals, squares, strict=True)]
        r2 = [1 - e / v if v > 0 else math.nan for e, v in zip(errors, variations, strict=True)]
        return {
            "loss": loss / samples,
            "mae": absolute / numbers,
            "rmse": (sum(errors) / numbers) ** 0.5,
            "r2": sum(r2) / num_columns,
        }


class Segmentation(Objective):
    """Cross-entropy of one class per pixel (or position, in any number of dimensions).

    Metrics: `accuracy` of pixels, and `mean_iou`, the intersection over union (Jaccard index) of predicted and true
    pixels, averaged over the classes that occur in either.

    Args:
        label_smoothing: as in `Classification`.
        ignore_index: class of pixels to ignore, such as borders in Pascal VOC's masks.

    Examples:
        >>> logits, masks = torch.zeros(1, 2, 1, 4), torch.tensor([[[0, 0, 1, 255]]])
        >>> metrics = Segmentation().metrics(Segmentation()(logits, masks)[1].tolist())
        >>> round(metrics["accuracy"], 3), round(metrics["mean_iou"], 3)  # class 0 is predicted everywhere
        (0.667, 0.333)
    """

    metric_names: Sequence[str] = ("loss", "accuracy", "mean_iou")
    compared_by = ("mean_iou", True)
    uneven = True

    def __init__(self, label_smoothing: float = 0.0, ignore_index: int = 255) -> None:
        self.label_smoothing, self.ignore_index = _checked_smoothing(label_smoothing), ignore_index

    def __call__(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss of logits [B, C, ...] and classes [B, ...]; sums over pixels."""
        logits = _first_tensor(output)
        fits = logits.dim() > 2 and logits.shape[:1] + logits.shape[2:] == target.shape
        if not fits or target.is_floating_point():
            takes = "outputs [batch, classes, height, width] and whole numbers [batch, height, width]"
            raise self._refuse(takes, logits, target)
        target, classes = target.long(), logits.shape[1]
        kept = target != self.ignore_index
        count = kept.sum()
        ignored, smoothing = self.ignore_index, self.label_smoothing
        total = F.cross_entropy(logits, target, ignore_index=ignored, reduction="sum", label_smoothing=smoothing)
        true, predicted = target[kept], logits.detach().argmax(1)[kept]
        pixels = (torch.bincount(x, minlength=classes) for x in (true[true == predicted], true, predicted))
        return total / count.clamp(min=1), _sums_of(total, *pixels, count)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Mean loss over pixels, their accuracy, and mean intersection over union."""
        loss, *columns, count = sums
        classes = len(columns) // 3
        correct, true, predicted = (columns[i * classes : (i + 1) * classes] for i in range(3))
        ious = [c / (t + p - c) for c, t, p in zip(correct, true, predicted, strict=True) if t + p]
        count = max(count, 1.0)
        mean_iou = sum(ious) / len(ious) if ious else math.nan
        return {"loss": loss / count, "accuracy": sum(correct) / count, "mean_iou": mean_iou}


class CustomObjective(Objective):
    """Any loss, with metrics of torchmetrics over whole epochs and all ranks.

    Metrics whose states are sums (accuracy, F1, confusion matrices, errors, R2, binned curves) are computed for
    training, validation and test. They add up the states of single batches, so they do not depend on the batch size or
    the number of ranks. Metrics that collect all predictions, such as rank correlations, are computed for validation
    and test only.

    Args:
        loss: maps (outputs, targets) to their mean loss, a scalar: a loss of torch.nn, or any callable.
        metrics: metrics of torchmetrics by name, each of which computes a single number.
        predict: maps outputs to inputs of the metrics, such as `torch.nn.Sigmoid`; None: the outputs.
    """

    def __init__(
        self,
        loss: Callable[..., Tensor],
        metrics: Mapping[str, Metric] | None = None,
        predict: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        metrics = dict(metrics or {})
        if isinstance(loss, nn.Module) and next(loss.parameters(), None) is not None:
            raise UserError("objective.loss has parameters, which would not train: put them into the network.")
        if (reduction := getattr(loss, "reduction", "mean")) != "mean":
            raise UserError(f"objective.loss.reduction={reduction} must be mean.")
        self.loss, self.predict = loss, predict
        self._adding = {name: metric for name, metric in metrics.items() if _is_sum(metric)}
        self._collecting = {name: metric for name, metric in metrics.items() if name not in self._adding}
        for metric in self._adding.values():
            # The sums are already reduced over ranks.
            metric.sync_on_compute = False
        self.metric_names: Sequence[str] = ("loss", *self._adding)
        self.evaluated_names: Sequence[str] = tuple(self._collecting)
        self.uneven = isinstance(loss, _BY_CLASS)
        directed = ((n, m.higher_is_better) for n, m in metrics.items() if m.higher_is_better is not None)
        self.compared_by = next(directed, ("loss", False))
        # Updated with each batch: some states take their shape from the first one.
        self._shapes = {name: _shapes(metric) for name, metric in self._adding.items()}
        self._checked_shapes: set[tuple[Any, ...]] = set()

    def __call__(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of a batch, and the states of its metrics as sums."""
        output = self._aligned_output(output, target)
        loss = self._loss(output, target)
        weight = self._weight(target)
        sums: list[Any] = []
        with torch.no_grad():
            predicted = self._predicted(output)
            for name, metric in self._adding.items():
                metric.reset()
                metric.to(predicted.device).update(predicted, target)
                self._shapes[name] = _shapes(metric)
                sums += metric.metric_state.values()
            return loss, _sums_of(*sums, loss.detach() * weight, weight)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Mean loss and metrics."""
        *states, loss, weight = sums
        result = {"loss": loss / weight if weight else math.nan}
        start = 0
        for name, metric in self._adding.items():
            metric = copy.deepcopy(metric).cpu()
            for state, shape in self._shapes[name].items():
                numbers = torch.tensor(states[start : start + shape.numel()], dtype=torch.float64)
                setattr(metric, state, numbers.reshape(shape).to(getattr(metric, state).dtype))
                start += shape.numel()
            # Without an update, `compute` would warn.
            metric._update_count = 1
            result[name] = float(metric.compute())
        return result

    def observe(self, output: Any, target: Tensor) -> None:
        """Update the collecting metrics with a validation or test batch."""
        predicted = self._predicted(self._aligned_output(output, target)) if self._collecting else None
        for metric in self._collecting.values():
            metric.to(target.device).update(predicted, target)

    def evaluate(self, task: Any, split: str, epoch: int | None) -> dict[str, Any]:
        """Compute the collecting metrics over the batches of all ranks."""
        result = {name: float(metric.compute()) for name, metric in self._collecting.items()}
        for metric in self._collecting.values():
            metric.reset()
        return result

    @staticmethod
    def _aligned_output(output: Any, target: Tensor) -> Tensor:
        output = _first_tensor(output)
        return _aligned(output, target) if target.is_floating_point() else output

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        loss = self.loss.to(output.device) if isinstance(self.loss, nn.Module) else self.loss
        key = (output.shape[1:], target.shape[1:])
        if key in self._checked_shapes:
            return loss(output, target)
        with warnings.catch_warnings():
            # torch only warns when it broadcasts the target, which is never intended.
            warnings.filterwarnings("error", message="Using a target size")
            value = loss(output, target)
        if value.dim():
            raise UserError(f"objective.loss returns {list(value.shape)}, not the mean loss as a scalar.")
        self._checked_shapes.add(key)
        return value

    def _weight(self, target: Tensor) -> Tensor | int:
        """Weight of a batch in the mean loss."""
        if not isinstance(self.loss, _BY_CLASS) or target.is_floating_point():
            return len(target)
        classes = target[target != self.loss.ignore_index]
        # torch divides by the same with label smoothing.
        return classes.numel() if self.loss.weight is None else self.loss.weight[classes].sum()

    def _predicted(self, output: Tensor) -> Tensor:
        return output.detach() if self.predict is None else self.predict(output.detach())


def _is_sum(metric: Metric) -> bool:
    """True if a metric's state over an epoch is the sum of its batches' states."""
    tensors = all(isinstance(state, Tensor) for state in metric.metric_state.values())
    return tensors and set(metric._reductions.values()) == {dim_zero_sum}


def _shapes(metric: Metric) -> dict[str, torch.Size]:
    states: dict[str, Any] = metric.metric_state
    return {name: state.shape for name, state in states.items()}

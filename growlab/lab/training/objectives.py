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

from growlab.base.errors import UserError

# Losses of class indices, whose mean runs over the weights of the classes that are not ignored.
_BY_CLASS = (nn.CrossEntropyLoss, nn.NLLLoss)


class Objective:
    """A loss and the metrics that go with it; subclasses add both.

    A batch is a tuple: the network's positional inputs, and the target behind them.

    Attributes:
        metric_names: names of the metrics, in the order of the columns of metrics.csv; "loss" is among them.
        evaluated_names: names of the numbers that `evaluate` adds to an epoch's metrics.
        uneven: ranks' parts of a batch may weigh differently, such as sentences of different lengths.
        compared_by: the metric that runs are compared by, and True if the higher value is the better one.
        goes_with: networks and objectives that the data suit, for messages.
    """

    metric_names: Sequence[str] = ("loss", "accuracy")
    evaluated_names: Sequence[str] = ()
    uneven = False
    compared_by: tuple[str, bool] = ("accuracy", True)
    goes_with = ""

    def bind(self, data: Any) -> None:
        """Take what it needs from the run's data module; called once, before anything else."""
        self.goes_with = data.goes_with

    def __call__(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss of a batch, and sums over it that `metrics` is made from, without gradient.

        Args:
            output: what the network returns.
            target: the last member of the batch.

        Returns:
            The loss (a scalar), and sums [k], of which the last is the number of what was predicted.
        """
        raise NotImplementedError

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Metrics by name, from sums over any number of batches and ranks."""
        raise NotImplementedError

    def observe(self, output: Any, target: Tensor) -> None:
        """See a batch of validation or test, for what `evaluate` returns after all of them."""

    def evaluate(self, task: Any, split: str, epoch: int | None) -> dict[str, Any]:
        """More results, of a whole network at once; called on every rank behind an evaluation over all batches.

        Args:
            task: maps inputs to logits; in eval mode.
            split: "val" or "test".
            epoch: the one that ends, from 0; None after the run.

        Returns:
            Numbers by name; after the run also text about how they came about.
        """
        return {}

    def exports(self, network: nn.Module) -> dict[str, Any]:
        """Further files of the run's folder by name: text, or what `torch.save` takes; the network is model.pt's."""
        return {}

    def _refuse(self, takes: str, output: Any, target: Tensor) -> UserError:
        """Error about outputs and targets of other shapes or types than the objective takes."""
        given = [f"{list(one.shape)} of {str(one.dtype).removeprefix('torch.')}" for one in (output, target)]
        advice = f": {self.goes_with}." if self.goes_with else "."
        return UserError(f"{type(self).__name__} takes {takes}, not outputs {given[0]} and targets {given[1]}{advice}")


def _tensor_of(output: Any) -> Tensor:
    """The tensor that is trained on: the output itself, or the first of a mapping (torchvision's "out") or tuple."""
    while not isinstance(output, Tensor):
        output = next(iter(output.values() if isinstance(output, Mapping) else output))
    return output


def _aligned(output: Tensor, target: Tensor) -> Tensor:
    """Outputs [B, 1] as [B], where the targets are numbers [B]: torch would compare every one with every other."""
    single = output.dim() == target.dim() + 1 and output.shape[-1] == 1
    return output.squeeze(-1) if single and output.shape[:-1] == target.shape else output


def _sums_of(*numbers: Tensor | float | int) -> Tensor:
    """One vector of sums, float64 where the device has it, so that counts of pixels stay exact."""
    parts = [torch.as_tensor(number).detach().reshape(-1) for number in numbers]
    device = next((part.device for part in parts if part.device.type != "cpu"), torch.device("cpu"))
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.cat([part.to(device, dtype) for part in parts])


def _smoothing(part: float) -> float:
    if not 0 <= part < 1:
        raise UserError(f"objective.label_smoothing={part} must be at least 0 and below 1.")
    return part


class Classification(Objective):
    """Cross-entropy of one class for each sample; accuracy.

    Args:
        label_smoothing: the part of the target's probability that is spread over all classes; 0: none.

    Examples:
        >>> loss, sums = Classification()(torch.tensor([[0.0, 0.0], [8.0, 0.0]]), torch.tensor([1, 0]))
        >>> Classification().metrics(sums.tolist())["accuracy"]
        0.5
    """

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = _smoothing(label_smoothing)

    def __call__(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss of logits [B, C] and classes [B]; sums of loss, hits and samples."""
        logits = _tensor_of(output)
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
    """Cross-entropy of one token for each position, padding left out; accuracy and perplexity.

    The loss may be smoothed (Szegedy et al. 2016); perplexity is e to the mean of the loss that is not.

    Args:
        label_smoothing: the part of the target's probability that is spread over all tokens; 0: none.
        padding: the token that fills up targets; -100: none does.

    Examples:
        >>> loss, sums = TokenPrediction(padding=1)(torch.zeros(1, 3, 4), torch.tensor([[0, 2, 1]]))
        >>> round(TokenPrediction().metrics(sums.tolist())["perplexity"], 3)  # one of four tokens, and two positions
        4.0
    """

    metric_names: Sequence[str] = ("loss", "accuracy", "perplexity")
    compared_by: tuple[str, bool] = ("perplexity", False)
    uneven = True

    def __init__(self, label_smoothing: float = 0.0, padding: int = -100) -> None:
        self.label_smoothing, self.padding = _smoothing(label_smoothing), padding

    def __call__(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss of logits [B, T, V] and tokens [B, T]; sums of loss, hits, likelihood and tokens."""
        logits = _tensor_of(output)
        if logits.dim() != 3 or target.shape != logits.shape[:2]:
            takes = "outputs [batch, positions, tokens] and targets [batch, positions]"
            raise self._refuse(takes, logits, target)
        # In float32: sums over a vocabulary lose too much in half precision.
        log_probability = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        real = target != self.padding
        index = target.masked_fill(~real, 0).unsqueeze(-1)
        likelihood = -log_probability.gather(-1, index).squeeze(-1)[real].sum()
        smooth = -log_probability.mean(-1)[real].sum() if self.label_smoothing else likelihood
        total = (1 - self.label_smoothing) * likelihood + self.label_smoothing * smooth
        correct = ((logits.detach().argmax(-1) == target) & real).sum()
        count = real.sum()
        sums = [total.detach().float(), correct.float(), likelihood.detach().float(), count.float()]
        return total / count.clamp(min=1), torch.stack(sums)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Mean loss, accuracy and perplexity over tokens."""
        loss, correct, likelihood, count = sums
        try:
            perplexity = math.exp(likelihood / count)
        except OverflowError:
            perplexity = math.inf
        return {"loss": loss / count, "accuracy": correct / count, "perplexity": perplexity}


class CharacterPrediction(TokenPrediction):
    """Cross-entropy of the next character, and what it comes to in bits: the mean negative log2 likelihood.

    Examples:
        >>> loss, sums = CharacterPrediction()(torch.zeros(1, 3, 8), torch.tensor([[0, 2, 1]]))
        >>> round(CharacterPrediction().metrics(sums.tolist())["bits_per_character"], 3)  # one of eight
        3.0
    """

    metric_names: Sequence[str] = (*TokenPrediction.metric_names, "bits_per_character")
    compared_by = ("bits_per_character", False)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Mean loss, accuracy, perplexity and bits per character."""
        _, _, likelihood, count = sums
        return {**super().metrics(sums), "bits_per_character": likelihood / count / math.log(2)}


class SubwordPrediction(TokenPrediction):
    """Cross-entropy of the next token, and what it comes to in bits for each byte of the text.

    Losses per token cannot be compared between tokenizers, bits per byte can: the negative log2 likelihood of the text
    over its length in UTF-8.

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
        """Take the number of bytes that each token stands for."""
        super().bind(data)
        found: Tensor | None = data.bytes_of_tokens
        if found is None:
            advice = f": {self.goes_with}" if self.goes_with else ""
            raise UserError(f"objective=tokens needs data that know the bytes of their tokens, as data=tokens{advice}.")
        self._bytes_of_tokens = found

    def __call__(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss of logits [B, T, V] and tokens [B, T]; sums of loss, hits, likelihood, bytes and tokens."""
        loss, sums = super().__call__(output, target)
        if self._bytes_of_tokens.device != target.device:
            self._bytes_of_tokens = self._bytes_of_tokens.to(target.device)
        size = self._bytes_of_tokens[target[target != self.padding]].sum()
        return loss, torch.cat([sums[:-1], size[None], sums[-1:]])

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Mean loss, accuracy and perplexity over tokens, and bits per byte."""
        loss, correct, likelihood, size, count = sums
        bits = likelihood / math.log(2) / size if size else math.nan
        return {**super().metrics((loss, correct, likelihood, count)), "bits_per_byte": bits}


class MultiLabel(Objective):
    """Binary cross-entropy of any number of labels for each sample.

    Metrics: `accuracy`, the part of all labels that is right; `f1` of all labels together (micro-averaged); and
    `exact_match`, the part of the samples whose labels are all right.

    Args:
        threshold: probability from which on a label counts as predicted.

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
        """The mean loss of logits [B, L] and labels [B, L] of 0 and 1; sums over the batch."""
        logits_BL = _tensor_of(output)
        if logits_BL.dim() < 2 or logits_BL.shape != target_BL.shape:
            takes = "outputs [batch, labels] and targets [batch, labels] of 0 and 1"
            raise self._refuse(takes, logits_BL, target_BL)
        loss = F.binary_cross_entropy_with_logits(logits_BL, target_BL.to(logits_BL.dtype))
        wanted_BL, found_BL = target_BL > 0.5, logits_BL.detach().sigmoid() >= self.threshold
        right_BL = wanted_BL == found_BL
        samples = len(target_BL)
        return loss, _sums_of(
            loss.detach() * samples,
            right_BL.sum(),
            (wanted_BL & found_BL).sum(),
            wanted_BL.sum() + found_BL.sum(),
            right_BL.flatten(1).all(1).sum(),
            target_BL.numel(),
            samples,
        )

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Mean loss, accuracy, F1 and exact matches; F1 is 1 where nothing is to be found and nothing was."""
        loss, right, both, either, exact, labels, samples = sums
        f1 = 2 * both / either if either else 1.0
        return {"loss": loss / samples, "accuracy": right / labels, "f1": f1, "exact_match": exact / samples}


_LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
}


class Regression(Objective):
    """Mean squared error, or another loss between numbers.

    Metrics: mean absolute error `mae`, root mean squared error `rmse`, and `r2`, the part of the targets' variance that
    is explained: of each column of targets [B, D], averaged; of all numbers together for targets of more dimensions.

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
        """The mean loss of outputs and targets of one shape; targets [B] also go with outputs [B, 1]."""
        found = _aligned(_tensor_of(output), target)
        if found.shape != target.shape:
            raise self._refuse("outputs and targets of one shape", found, target)
        wanted = target.to(found.dtype)
        loss = self.loss(found, wanted)
        columns = found.shape[1] if found.dim() == 2 else 1
        # No float64 on Apple's GPUs.
        exact = (one.cpu() if one.device.type == "mps" else one for one in (found.detach(), wanted))
        x, y = (one.double().reshape(-1, columns) for one in exact)
        error, samples = x - y, len(target)
        sums = (error.abs().sum(), error.square().sum(0), y.sum(0), y.square().sum(0), x.numel(), samples)
        return loss, _sums_of(loss.detach() * samples, *sums)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Mean loss, absolute and root mean squared error, and explained variance; NaN where targets are all equal."""
        loss, absolute, *columns, numbers, samples = sums
        number = len(columns) // 3
        errors, totals, squares = (columns[i * number : (i + 1) * number] for i in range(3))
        rows = numbers / number
        spread = [square - total**2 / rows for total, square in zip(totals, squares, strict=True)]
        parts = [1 - e / s if s > 0 else float("nan") for e, s in zip(errors, spread, strict=True)]
        return {
            "loss": loss / samples,
            "mae": absolute / numbers,
            "rmse": (sum(errors) / numbers) ** 0.5,
            "r2": sum(parts) / number,
        }


class Segmentation(Objective):
    """Cross-entropy of one class for every pixel (or place of any number of dimensions).

    Metrics: `accuracy` of pixels, and `mean_iou`, the mean over classes of the intersection of found and true pixels
    over their union (Jaccard index); classes that neither stand in the targets nor were found do not count.

    Args:
        label_smoothing: as in `Classification`.
        ignore_index: pixels of this class count nowhere, such as borders in Pascal VOC's masks.

    Examples:
        >>> logits, masks = torch.zeros(1, 2, 1, 4), torch.tensor([[[0, 0, 1, 255]]])
        >>> metrics = Segmentation().metrics(Segmentation()(logits, masks)[1].tolist())
        >>> round(metrics["accuracy"], 3), round(metrics["mean_iou"], 3)  # class 0 is found everywhere
        (0.667, 0.333)
    """

    metric_names: Sequence[str] = ("loss", "accuracy", "mean_iou")
    compared_by = ("mean_iou", True)
    # Ranks' pixels that count differ in number.
    uneven = True

    def __init__(self, label_smoothing: float = 0.0, ignore_index: int = 255) -> None:
        self.label_smoothing, self.ignore_index = _smoothing(label_smoothing), ignore_index

    def __call__(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss of logits [B, C, ...] and classes [B, ...]; sums over pixels."""
        logits = _tensor_of(output)
        fits = logits.dim() > 2 and logits.shape[:1] + logits.shape[2:] == target.shape
        if not fits or target.is_floating_point():
            takes = "outputs [batch, classes, height, width] and whole numbers [batch, height, width]"
            raise self._refuse(takes, logits, target)
        target, classes = target.long(), logits.shape[1]
        real = target != self.ignore_index
        count = real.sum()
        ignored, smoothing = self.ignore_index, self.label_smoothing
        total = F.cross_entropy(logits, target, ignore_index=ignored, reduction="sum", label_smoothing=smoothing)
        wanted, found = target[real], logits.detach().argmax(1)[real]
        both = torch.bincount(wanted[wanted == found], minlength=classes)
        wanted, found = torch.bincount(wanted, minlength=classes), torch.bincount(found, minlength=classes)
        return total / count.clamp(min=1), _sums_of(total, both, wanted, found, count)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Mean loss over pixels, their accuracy, and mean intersection over union."""
        loss, *columns, count = sums
        number = len(columns) // 3
        both, wanted, found = (columns[i * number : (i + 1) * number] for i in range(3))
        unions = [w + f - b for b, w, f in zip(both, wanted, found, strict=True)]
        parts = [b / u for b, u in zip(both, unions, strict=True) if u]
        count = max(count, 1.0)
        mean_iou = sum(parts) / len(parts) if parts else float("nan")
        return {"loss": loss / count, "accuracy": sum(both) / count, "mean_iou": mean_iou}


class CustomObjective(Objective):
    """A loss, and metrics of torchmetrics over whole epochs and all ranks.

    A metric whose states are sums (accuracy, F1, confusion matrices, errors, R2, binned curves) is taken of training,
    validation and test, and is exact whatever the batches and ranks: the states of single batches are added.
    Others, such as rank correlations, collect what they see: they are taken of validation and test alone.

    Args:
        loss: maps (outputs, targets) to their mean loss, a scalar: a loss of torch.nn, or any callable.
        metrics: metrics of torchmetrics by name, each of a single number.
        predict: maps outputs to what metrics take, such as `torch.nn.Sigmoid`; None: the outputs.
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
            # Sums come from all ranks already.
            metric.sync_on_compute = False
        self.metric_names: Sequence[str] = ("loss", *self._adding)
        self.evaluated_names: Sequence[str] = tuple(self._collecting)
        self.uneven = isinstance(loss, _BY_CLASS)
        directed = ((n, m.higher_is_better) for n, m in metrics.items() if m.higher_is_better is not None)
        self.compared_by = next(directed, ("loss", False))
        # Some states have the shape of the first batch's columns.
        self._shapes = {name: _shapes(metric) for name, metric in self._adding.items()}
        self._known: set[tuple[Any, ...]] = set()

    def __call__(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of a batch, and the sums that its metrics are made from."""
        found = self._found(output, target)
        loss = self._loss(found, target)
        weight = self._weight(target)
        sums: list[Tensor | float] = []
        with torch.no_grad():
            predicted = self._predicted(found)
            for name, metric in self._adding.items():
                metric.reset()
                metric.to(predicted.device).update(predicted, target)
                self._shapes[name] = _shapes(metric)
                sums += _states(metric).values()
                metric.reset()
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
                setattr(metric, state, numbers.reshape(shape).to(_states(metric)[state].dtype))
                start += shape.numel()
            # Else it warns of being asked before any batch.
            metric._update_count = 1
            result[name] = float(metric.compute())
        return result

    def observe(self, output: Any, target: Tensor) -> None:
        """Let metrics that are no sums see a batch of validation or test."""
        predicted = self._predicted(self._found(output, target)) if self._collecting else None
        for metric in self._collecting.values():
            metric.to(target.device).update(predicted, target)

    def evaluate(self, task: Any, split: str, epoch: int | None) -> dict[str, Any]:
        """Metrics that are no sums, over what all ranks have seen."""
        result = {name: float(metric.compute()) for name, metric in self._collecting.items()}
        for metric in self._collecting.values():
            metric.reset()
        return result

    @staticmethod
    def _found(output: Any, target: Tensor) -> Tensor:
        found = _tensor_of(output)
        return _aligned(found, target) if target.is_floating_point() else found

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        loss = self.loss.to(output.device) if isinstance(self.loss, nn.Module) else self.loss
        key = (output.shape[1:], target.shape[1:])
        if key in self._known:
            return loss(output, target)
        with warnings.catch_warnings():
            # Of shapes that torch would broadcast, which is never meant.
            warnings.filterwarnings("error", message="Using a target size")
            value = loss(output, target)
        if value.dim():
            raise UserError(f"objective.loss returns {list(value.shape)}, not the mean loss as a scalar.")
        self._known.add(key)
        return value

    def _weight(self, target: Tensor) -> Tensor | int:
        """Weight of a batch in the mean loss."""
        if not isinstance(self.loss, _BY_CLASS) or target.is_floating_point():
            return len(target)
        real = target[target != self.loss.ignore_index]
        # Smoothed, torch divides by the same.
        return real.numel() if self.loss.weight is None else self.loss.weight[real].sum()

    def _predicted(self, output: Tensor) -> Tensor:
        return output.detach() if self.predict is None else self.predict(output.detach())


def _is_sum(metric: Metric) -> bool:
    """True if the state of a whole epoch is the sum of its batches' states."""
    added = [getattr(one, "__name__", "") == "dim_zero_sum" for one in metric._reductions.values()]
    tensors = all(isinstance(state, Tensor) for state in metric.metric_state.values())
    return bool(added) and tensors and all(added)


def _states(metric: Metric) -> dict[str, Any]:
    return dict(metric.metric_state)


def _shapes(metric: Metric) -> dict[str, torch.Size]:
    return {name: state.shape for name, state in _states(metric).items()}

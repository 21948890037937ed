"""Objectives: a loss, and metrics from sums over batches."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab.base.errors import UserError

# The target that torch's cross-entropy leaves out.
_IGNORED = -100


class Objective(Protocol):
    """A loss and the metrics that go with it.

    A batch is a tuple: the network's positional inputs, and the target behind them.
    """

    #: Names of the metrics, in the order of the columns of metrics.csv; "loss" is among them.
    metric_names: Sequence[str]
    #: Names of the numbers that `evaluate` adds to an epoch's metrics.
    evaluated_names: Sequence[str]
    #: Whether ranks' parts of a batch may weigh differently, such as sentences of different lengths.
    uneven: bool

    def bind(self, data: Any) -> None:
        """Learn from the run's data module what there is to know; called once, before anything else."""

    def __call__(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss of a batch, and sums over it that `metrics` is made from, without gradient.

        Args:
            logits: what the network returns.
            target: the last member of the batch.

        Returns:
            The loss (a scalar), and float32 sums [k], of which the last is the number of what was predicted.
        """

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Metrics by name, from sums over any number of batches and ranks."""

    def evaluate(self, task: Any, split: str, epoch: int | None) -> dict[str, Any]:
        """More results, of a whole network at once; called on every rank behind an evaluation over all batches.

        Args:
            task: maps inputs to logits; in eval mode.
            split: "val" or "test".
            epoch: the one that ends, from 0; None after the run.

        Returns:
            Numbers by name; after the run also text about how they came about.
        """

    def exports(self, network: nn.Module) -> dict[str, Any]:
        """Further files of the run's folder by name: text, or what `torch.save` takes; the network is model.pt's."""


class SumObjective:
    """An objective whose metrics follow from sums over samples alone; subclasses add the loss and the metrics."""

    metric_names: Sequence[str] = ("loss", "accuracy")
    evaluated_names: Sequence[str] = ()
    uneven = False
    #: The metric that runs are compared by, and whether the higher value is the better one.
    compared_by: tuple[str, bool] = ("accuracy", True)
    #: What the data go with, for an error message.
    goes_with = ""

    def bind(self, data: Any) -> None:
        """Learn what the data go with, for an error message."""
        self.goes_with = data.goes_with

    def observe(self, output: Any, target: Tensor) -> None:
        """See a batch of validation or test, for what `evaluate` returns after all of them."""

    def evaluate(self, task: Any, split: str, epoch: int | None) -> dict[str, Any]:
        """Nothing more."""
        return {}

    def exports(self, network: nn.Module) -> dict[str, Any]:
        """Nothing more."""
        return {}


def output_tensor(output: Any) -> Tensor:
    """The tensor that is trained on: the output itself, or the first tensor of a mapping or tuple.

    Networks of torchvision return `{"out": ..., "aux": ...}`: the loss is of "out" alone.

    Raises:
        UserError: there is no tensor.
    """
    found = output
    while not isinstance(found, Tensor):
        entries = found.values() if isinstance(found, Mapping) else found
        if not isinstance(entries, (Mapping, Sequence)) and not hasattr(entries, "__iter__"):
            raise UserError(f"the network returns a {type(output).__name__}, not a tensor.")
        found = next(iter(entries), None)
    return found


def check_shapes(objective: Any, takes: tuple[str, ...], logits: Any, target: Tensor) -> None:
    """Refuse outputs and targets of other dimensions than an objective takes.

    Args:
        objective: names itself; its `goes_with`, if it has one, says what the data go with.
        takes: names of the dimensions of logits; targets have all but the last.
        logits: what the network returned.
        target: the last member of the batch.

    Raises:
        UserError: they do not fit.
    """
    if isinstance(logits, Tensor) and logits.dim() == len(takes) and target.shape == logits.shape[:-1]:
        return
    outputs = list(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
    advice = getattr(objective, "goes_with", "")
    raise UserError(
        f"{type(objective).__name__} takes outputs [{', '.join(takes)}] and targets [{', '.join(takes[:-1])}], not "
        f"outputs {outputs} and targets {list(target.shape)}" + (f": {advice}." if advice else ".")
    )


def smoothing(part: float) -> float:
    """The part of a target's probability that is spread over all classes, if there is such a part.

    Raises:
        UserError: it does not lie in [0, 1).
    """
    if not 0 <= part < 1:
        raise UserError(f"objective.label_smoothing={part} must be at least 0 and below 1.")
    return part


class Classification(SumObjective):
    """Cross-entropy of one class for each sample; accuracy.

    Args:
        label_smoothing: the part of the target's probability that is spread over all classes; 0: none.

    Raises:
        UserError: no such part.

    Examples:
        >>> loss, sums = Classification()(torch.tensor([[0.0, 0.0], [8.0, 0.0]]), torch.tensor([1, 0]))
        >>> Classification().metrics(sums.tolist())["accuracy"]
        0.5
    """

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = smoothing(label_smoothing)

    def __call__(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss of logits [B, C] and classes [B]; sums of loss, hits and samples.

        Raises:
            UserError: they have other shapes, or a class has no output.
        """
        logits = output_tensor(output)
        check_shapes(self, ("batch", "classes"), logits, target)
        if target.is_floating_point():
            raise UserError(
                "Classification takes classes as targets, not numbers: objective=regression is for numbers."
            )
        try:
            loss = F.cross_entropy(logits, target, label_smoothing=self.label_smoothing)
        except IndexError as error:
            classes = logits.shape[1]
            beyond = target[((target < 0) & (target != _IGNORED)) | (target >= classes)]
            raise UserError(
                f"class {int(beyond[0])} has no output: the network has {classes}, counted from 0."
            ) from error
        correct = (logits.detach().argmax(1) == target).sum()
        count = torch.tensor(len(target)).to(correct)
        return loss, torch.stack([loss.detach().float() * len(target), correct.float(), count])

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Mean loss and accuracy."""
        loss, correct, count = sums
        return {"loss": loss / count, "accuracy": correct / count}


class TokenPrediction(SumObjective):
    """Cross-entropy of one token for each position, padding left out; accuracy and perplexity.

    The loss may be smoothed (Szegedy et al. 2016); perplexity is e to the mean of the loss that is not.

    Args:
        label_smoothing: the part of the target's probability that is spread over all tokens; 0: none.
        padding: the token that fills up targets; -100: none does.

    Raises:
        UserError: no such part.

    Examples:
        >>> loss, sums = TokenPrediction(padding=1)(torch.zeros(1, 3, 4), torch.tensor([[0, 2, 1]]))
        >>> round(TokenPrediction().metrics(sums.tolist())["perplexity"], 3)  # one of four tokens, and two positions
        4.0
    """

    metric_names: Sequence[str] = ("loss", "accuracy", "perplexity")
    compared_by: tuple[str, bool] = ("perplexity", False)
    uneven = True

    def __init__(self, label_smoothing: float = 0.0, padding: int = -100) -> None:
        self.label_smoothing, self.padding = smoothing(label_smoothing), padding

    def __call__(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss of logits [B, T, V] and tokens [B, T]; sums of loss, hits, likelihood and tokens.

        Raises:
            UserError: they have other shapes.
        """
        logits = output_tensor(output)
        check_shapes(self, ("batch", "positions", "tokens"), logits, target)
        # In float32: sums over a vocabulary lose too much in half precision.
        log_probability = (
            logits.float().log_softmax(-1) if logits.dtype != torch.float64 else logits.log_softmax(-1)
        )
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
        >>> import torch
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
        """Learn how many bytes each token stands for.

        Raises:
            UserError: the data do not know.
        """
        super().bind(data)
        found: Tensor | None = data.bytes_of_tokens
        if found is None:
            advice = f": {self.goes_with}" if self.goes_with else ""
            raise UserError(
                f"objective=tokens needs data that know the bytes of their tokens, as data=tokens{advice}."
            )
        self._bytes_of_tokens = found

    def __call__(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss of logits [B, T, V] and tokens [B, T]; sums of loss, hits, likelihood, bytes and tokens.

        Raises:
            UserError: they have other shapes.
        """
        loss, sums = super().__call__(logits, target)
        if self._bytes_of_tokens.device != target.device:
            self._bytes_of_tokens = self._bytes_of_tokens.to(target.device)
        size = self._bytes_of_tokens[target[target != self.padding]].sum()
        return loss, torch.cat([sums[:-1], size[None], sums[-1:]])

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Mean loss, accuracy and perplexity over tokens, and bits per byte."""
        loss, correct, likelihood, size, count = sums
        bits = likelihood / math.log(2) / size if size else math.nan
        return {**super().metrics((loss, correct, likelihood, count)), "bits_per_byte": bits}

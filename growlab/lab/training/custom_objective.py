"""Any loss as an objective, with metrics of torchmetrics."""

import copy
import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from growlab.base.errors import UserError
from growlab.lab.training.objective import SumObjective, output_tensor
from growlab.lab.training.ready_objectives import aligned, shapes_of, sums_of

# Losses of class indices, whose mean runs over the weights of the classes that are not ignored.
_BY_CLASS = (nn.CrossEntropyLoss, nn.NLLLoss)


class CustomObjective(SumObjective):
    """A loss, and metrics over whole epochs and all ranks.

    A metric whose states are sums (accuracy, F1, confusion matrices, errors, R2, binned curves) is taken of training,
    validation and test, and is exact whatever the batches and ranks: the states of single batches are added.
    Others, such as rank correlations, collect what they see: they are taken of validation and test alone.

    Args:
        loss: maps (outputs, targets) to their mean loss, a scalar: a loss of torch.nn, or any callable.
        metrics: metrics of torchmetrics by name, each of a single number.
        predict: maps outputs to what metrics take, such as `torch.nn.Sigmoid`; None: the outputs.

    Raises:
        UserError: something is no loss or no metric.
    """

    def __init__(
        self,
        loss: Callable[..., Tensor],
        metrics: Mapping[str, Metric] | None = None,
        predict: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        metrics = dict(metrics or {})
        _check(loss, metrics, predict)
        self.loss, self.predict = loss, predict
        self._adding = {name: metric for name, metric in metrics.items() if _is_sum(metric)}
        self._collecting = {name: metric for name, metric in metrics.items() if name not in self._adding}
        for metric in self._adding.values():
            # Sums come from all ranks already.
            metric.sync_on_compute = False
        self.metric_names: Sequence[str] = ("loss", *self._adding)
        self.evaluated_names: Sequence[str] = tuple(self._collecting)
        self.uneven = isinstance(loss, _BY_CLASS)
        self.compared_by = next(
            ((n, m.higher_is_better) for n, m in metrics.items() if m.higher_is_better is not None),
            ("loss", False),
        )
        self._states = {name: list(metric.metric_state) for name, metric in self._adding.items()}
        self._shapes: dict[str, list[torch.Size]] = {
            name: [metric.metric_state[state].shape for state in self._states[name]]
            for name, metric in self._adding.items()
        }
        self._known: set[tuple[Any, ...]] = set()

    def __call__(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of a batch, and the sums that its metrics are made from.

        Raises:
            UserError: the loss or a metric does not take such outputs and targets.
        """
        found = output_tensor(output)
        found = aligned(found, target) if target.is_floating_point() else found
        loss = self._loss(found, target)
        weight = self._weight(found, target)
        sums: list[Tensor | float] = []
        with torch.no_grad():
            predicted = self._predicted(found)
            for name, metric in self._adding.items():
                metric.reset()
                self._update(name, metric, predicted, target)
                states = metric.metric_state
                for place, state in enumerate(self._states[name]):
                    self._shapes[name][place] = states[state].shape
                    sums.append(states[state])
                metric.reset()
            return loss, sums_of(*sums, loss.detach() * weight, weight)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Mean loss and metrics.

        Raises:
            UserError: a metric is not a single number.
        """
        *states, loss, weight = sums
        result = {"loss": loss / weight if weight else math.nan}
        start = 0
        for name, metric in self._adding.items():
            metric = copy.deepcopy(metric).cpu()
            for state, shape in zip(self._states[name], self._shapes[name], strict=True):
                default = metric.metric_state[state]
                numbers = torch.tensor(states[start : start + shape.numel()], dtype=torch.float64)
                setattr(metric, state, numbers.reshape(shape).to(default.dtype))
                start += shape.numel()
            # Else it warns of being asked before any batch.
            metric._update_count = 1
            result[name] = _number(name, metric)
        return result

    def observe(self, output: Any, target: Tensor) -> None:
        """Let metrics that are no sums see a batch of validation or test."""
        if not self._collecting:
            return
        found = output_tensor(output)
        found = aligned(found, target) if target.is_floating_point() else found
        for name, metric in self._collecting.items():
            self._update(name, metric, self._predicted(found), target)

    def evaluate(self, task: Any, split: str, epoch: int | None) -> dict[str, Any]:
        """Metrics that are no sums, over what all ranks have seen."""
        result = {name: _number(name, metric) for name, metric in self._collecting.items()}
        for metric in self._collecting.values():
            metric.reset()
        return result

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        loss, device = self.loss, output.device
        if isinstance(loss, nn.Module):
            loss.to(device)
        key = (output.shape[1:], target.shape[1:], output.dtype, target.dtype)
        if key in self._known:
            return loss(output, target)
        try:
            with warnings.catch_warnings():
                # Of shapes that torch would broadcast, which is never meant.
                warnings.filterwarnings("error", message="Using a target size")
                value = loss(output, target)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError, UserWarning) as error:
            reason = str(error).strip().partition("\n")[0].rstrip(".")
            raise UserError(
                f"objective.loss ({_name(loss)}) does not take {shapes_of(output, target)}: {reason}."
            ) from error
        if not isinstance(value, Tensor) or value.dim():
            given = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise UserError(f"objective.loss ({_name(loss)}) returns {given}, not the mean loss as a scalar.")
        self._known.add(key)
        return value

    def _weight(self, output: Tensor, target: Tensor) -> Tensor | int:
        """Weight of a batch in the mean loss."""
        if not isinstance(self.loss, _BY_CLASS) or target.is_floating_point():
            return len(target)
        real = target[target != self.loss.ignore_index]
        # Smoothed, torch divides by the same.
        return real.numel() if self.loss.weight is None else self.loss.weight[real].sum()

    def _predicted(self, output: Tensor) -> Tensor:
        return output.detach() if self.predict is None else self.predict(output.detach())

    def _update(self, name: str, metric: Metric, predicted: Tensor, target: Tensor) -> None:
        metric.to(predicted.device)
        try:
            metric.update(predicted, target)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            reason = str(error).strip().partition("\n")[0].rstrip(".")
            raise UserError(
                f"objective.metrics.{name} ({_name(metric)}) does not take {shapes_of(predicted, target)}: {reason}."
            ) from error


def _check(loss: Any, metrics: Mapping[str, Any], predict: Any) -> None:
    if not callable(loss):
        raise UserError(
            f"objective.loss={loss} is no loss: give it a _target_, such as torch.nn.SmoothL1Loss, and functions "
            "_partial_=true too."
        )
    if isinstance(loss, nn.Module) and next(loss.parameters(), None) is not None:
        raise UserError(
            f"objective.loss ({_name(loss)}) has parameters, which would not train: put them into the network."
        )
    if getattr(loss, "reduction", "mean") != "mean":
        raise UserError(f"objective.loss.reduction={loss.reduction} must be mean.")
    for name, metric in metrics.items():
        if not isinstance(metric, Metric):
            raise UserError(
                f"objective.metrics.{name} is a {type(metric).__name__}, not a metric of torchmetrics: give it a "
                "_target_, such as torchmetrics.MeanAbsoluteError."
            )
    if "loss" in metrics:
        raise UserError("objective.metrics.loss has the name of the loss; choose another.")
    if predict is not None and not callable(predict):
        raise UserError(f"objective.predict={predict} cannot be called; give it a _target_.")


def _is_sum(metric: Metric) -> bool:
    """True if the state of a whole epoch is the sum of its batches' states."""
    reductions = metric._reductions
    tensors = all(isinstance(state, Tensor) for state in metric.metric_state.values())
    return (
        bool(reductions)
        and tensors
        and all(getattr(r, "__name__", "") == "dim_zero_sum" for r in reductions.values())
    )


def _number(name: str, metric: Metric) -> float:
    value = metric.compute()
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    given = f"{list(value.shape)} numbers" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise UserError(
        f"objective.metrics.{name} ({_name(metric)}) gives {given}, not a single one; set its average, such as macro."
    )


def _name(called: Any) -> str:
    # `_partial_=true` wraps the user's function.
    while isinstance(called, functools.partial):
        called = called.func
    return getattr(called, "__name__", type(called).__name__)

"""Objectives for several labels, for numbers, and for a class at every pixel.

Shape suffixes: B samples, L labels, C classes.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from growlab.base.errors import UserError
from growlab.lab.training.objective import SumObjective, output_tensor, smoothing


def shapes_of(output: Tensor, target: Tensor) -> str:
    """Shapes and types of an output and a target, for an error message."""
    said = [
        f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}" for tensor in (output, target)
    ]
    return f"outputs {said[0]} and targets {said[1]}"


def sums_of(*numbers: Tensor | float | int) -> Tensor:
    """One vector of sums, float64 where the device has it, so that counts of pixels stay exact."""
    parts = [torch.as_tensor(number).detach().reshape(-1) for number in numbers]
    device = next((part.device for part in parts if part.device.type != "cpu"), torch.device("cpu"))
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.cat([part.to(device, dtype) for part in parts])


class MultiLabel(SumObjective):
    """Binary cross-entropy of any number of labels for each sample.

    Metrics: `accuracy`, the part of all labels that is right; `f1` of all labels together (micro-averaged); and
    `exact_match`, the part of the samples whose labels are all right.

    Args:
        threshold: probability from which on a label counts as predicted.

    Raises:
        UserError: no such probability.

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
        """The mean loss of logits [B, L] and labels [B, L] of 0 and 1; sums over the batch.

        Raises:
            UserError: they have other shapes.
        """
        logits_BL = output_tensor(output)
        if logits_BL.dim() < 2 or logits_BL.shape != target_BL.shape:
            raise UserError(
                "MultiLabel takes outputs [batch, labels] and targets [batch, labels] of 0 and 1, not "
                f"{shapes_of(logits_BL, target_BL)}."
            )
        loss = F.binary_cross_entropy_with_logits(logits_BL, target_BL.to(logits_BL.dtype))
        wanted_BL, found_BL = target_BL > 0.5, logits_BL.detach().sigmoid() >= self.threshold
        right_BL = wanted_BL == found_BL
        samples = len(target_BL)
        return loss, sums_of(
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
        return {
            "loss": loss / samples,
            "accuracy": right / labels,
            "f1": 2 * both / either if either else 1.0,
            "exact_match": exact / samples,
        }


_LOSSES = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
}


class Regression(SumObjective):
    """Mean squared error, or another loss between numbers.

    Metrics: mean absolute error `mae`, root mean squared error `rmse`, and `r2`, the part of the targets' variance that
    is explained: of each column of targets [B, D], averaged; of all numbers together for targets of more dimensions.

    Args:
        loss: mse, l1, smooth_l1 or huber, as in torch.nn.functional.

    Raises:
        UserError: no such loss.

    Examples:
        >>> loss, sums = Regression()(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([1.0, 2.0, 4.0]))
        >>> round(Regression().metrics(sums.tolist())["rmse"], 4)
        0.5774
    """

    metric_names: Sequence[str] = ("loss", "mae", "rmse", "r2")
    compared_by = ("rmse", False)

    def __init__(self, loss: Literal["mse", "l1", "smooth_l1", "huber"] = "mse") -> None:
        if loss not in _LOSSES:
            raise UserError(f"objective.loss={loss} is unknown; choose one of {', '.join(_LOSSES)}.")
        self.loss = loss

    def __call__(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss of outputs and targets of one shape; targets [B] also go with outputs [B, 1].

        Raises:
            UserError: they have other shapes.
        """
        found = aligned(output_tensor(output), target)
        if found.shape != target.shape:
            raise UserError(
                f"Regression takes outputs and targets of one shape, not {shapes_of(found, target)}: a network that "
                "takes out_features (or num_classes) gets the targets' number."
            )
        wanted = target.to(found.dtype)
        loss = _LOSSES[self.loss](found, wanted)
        columns = found.shape[1] if found.dim() == 2 else 1
        x, y = (tensor.detach().double().reshape(-1, columns) for tensor in _on_cpu_if_mps(found, wanted))
        error, samples = x - y, len(target)
        return loss, sums_of(
            loss.detach() * samples,
            error.abs().sum(),
            error.square().sum(0),
            y.sum(0),
            y.square().sum(0),
            x.numel(),
            samples,
        )

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


class Segmentation(SumObjective):
    """Cross-entropy of one class for every pixel (or place of any number of dimensions).

    Metrics: `accuracy` of pixels, and `mean_iou`, the mean over classes of the intersection of found and true pixels
    over their union (Jaccard index); classes that neither stand in the targets nor were found do not count.

    Args:
        label_smoothing: as in `Classification`.
        ignore_index: pixels of this class count nowhere, such as borders in Pascal VOC's masks.

    Raises:
        UserError: no such smoothing.

    Examples:
        >>> logits, masks = torch.zeros(1, 2, 1, 4), torch.tensor([[[0, 0, 1, 255]]])
        >>> metrics = Segmentation().metrics(Segmentation()(logits, masks)[1].tolist())
        >>> round(metrics["accuracy"], 3), round(metrics["mean_iou"], 3)  # class 0 is found everywhere
        (0.667, 0.333)
    """

    metric_names: Sequence[str] = ("loss", "accuracy", "mean_iou")
    compared_by = ("mean_iou", True)
    #: Ranks' pixels that count differ in number.
    uneven = True

    def __init__(self, label_smoothing: float = 0.0, ignore_index: int = 255) -> None:
        self.label_smoothing, self.ignore_index = smoothing(label_smoothing), ignore_index

    def __call__(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss of logits [B, C, ...] and classes [B, ...]; sums over pixels.

        Raises:
            UserError: they have other shapes, or a class has no output.
        """
        logits = output_tensor(output)
        if (
            logits.dim() < 3
            or logits.shape[:1] + logits.shape[2:] != target.shape
            or target.is_floating_point()
        ):
            raise UserError(
                "Segmentation takes outputs [batch, classes, height, width] and whole numbers [batch, height, width], "
                f"not {shapes_of(logits, target)}."
            )
        target, classes = target.long(), logits.shape[1]
        real = target != self.ignore_index
        beyond = real & ((target < 0) | (target >= classes))
        if target.device.type == "cpu" and bool(beyond.any()):
            raise UserError(
                f"class {int(target[beyond][0])} has no output: the network has {classes}, counted from 0; "
                "objective.ignore_index=N leaves a class out."
            )
        count = real.sum()
        total = F.cross_entropy(
            *(logits, target),
            ignore_index=self.ignore_index,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )
        wanted, found = target[real], logits.detach().argmax(1)[real]
        both = torch.bincount(wanted[wanted == found], minlength=classes)
        wanted, found = torch.bincount(wanted, minlength=classes), torch.bincount(found, minlength=classes)
        return total / count.clamp(min=1), sums_of(total, both, wanted, found, count)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Mean loss over pixels, their accuracy, and mean intersection over union."""
        loss, *columns, count = sums
        number = len(columns) // 3
        both, wanted, found = (columns[i * number : (i + 1) * number] for i in range(3))
        unions = [w + f - b for b, w, f in zip(both, wanted, found, strict=True)]
        parts = [b / u for b, u in zip(both, unions, strict=True) if u]
        count = max(count, 1.0)
        return {
            "loss": loss / count,
            "accuracy": sum(both) / count,
            "mean_iou": sum(parts) / len(parts) if parts else float("nan"),
        }


def aligned(output: Tensor, target: Tensor) -> Tensor:
    """Outputs [B, 1] as [B], where the targets are numbers [B]: torch would compare every one with every other."""
    single = output.dim() == target.dim() + 1 and output.shape[-1] == 1
    return output.squeeze(-1) if single and output.shape[:-1] == target.shape else output


def _on_cpu_if_mps(*tensors: Tensor) -> list[Tensor]:
    # No float64 there.
    return [tensor.cpu() if tensor.device.type == "mps" else tensor for tensor in tensors]

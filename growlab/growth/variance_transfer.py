"""Pairs with variance transfer: the paper's "ours" (Yuan et al. 2023, Section 3.1, Table 1, Appendix A)."""

from dataclasses import dataclass
from math import sqrt
from typing import Literal

import torch
from torch import Tensor

from growlab.growth.method import Expansion, Growth, NewWeights
from growlab.growth.pairs import PairGrowth
from growlab.widths import Norm


class VarianceTransfer(PairGrowth):
    """Grow by pairs and rescale old weights to the variance that new ones are drawn with.

    With fan-in C before and C' after an event (Table 1):

        input layer    W' = W                   new weights N(0, gain / C_x)
        hidden layer   W' = W sqrt(C / C')      new weights N(0, gain / C')
        output layer   W' = W C / C'            new weights N(0, 1 / C'^2)

    `rule="constraint"` takes sqrt(gain / (C Var[W])) from the actual weights of input and hidden layers
    instead (Theorem A.1). A batch normalisation after a layer rescaled by c gets mean c mu, variance c^2 v and
    weight times sqrt((c^2 v + eps) / (c^2 (v + eps))), which makes eval mode exact. Without one, the scale
    runs on: later biases follow it and where streams meet all producers take the first one's scale. A scale
    that would enter a function which is not positively homogeneous (tanh, GELU) is not applied.

    **Preserves** exactly in eval mode, up to `output_factor`, which undoes what scale is left on the logits;
    in train mode up to batch normalisation's eps: about eps (1/c^2 - 1) / (2 v) with batch variance v.
    **Departs from the paper**: the output multiplier (`output_multiplier=False` is the literal rule, whose
    logits shrink by C / C' at each event) and the fold into the norm's weight.

    Args:
        rule: "ratio" (Table 1) or "constraint" (Theorem A.1).
        output_multiplier: undo the scale of the logits by a multiplier on the output.
        noise_std: see `GrowthMethod`.
        gain: see `NewWeights`.

    Raises:
        ValueError: the rule is not one of the two.
    """

    def __init__(
        self,
        rule: Literal["ratio", "constraint"] = "ratio",
        output_multiplier: bool = True,
        noise_std: float = 0.0,
        gain: float = 2.0,
    ) -> None:
        super().__init__(noise_std, gain)
        if rule not in ("ratio", "constraint"):
            raise ValueError(f"growth.rule must be ratio or constraint, not {rule!r}.")
        self.rule = rule
        self.output_multiplier = output_multiplier
        self.new_weights = NewWeights(gain, output_power=2)

    def grow(self, expansion: Expansion) -> Growth:
        """Compute every tensor at the new widths."""
        scales = self._scales(expansion)
        old = dict(expansion.old)
        for weight, factor in scales.weights.items():
            if weight in old:
                old[weight] = old[weight] * factor
        for layer in expansion.graph.layers:
            if layer.bias in old:
                old[layer.bias] = old[layer.bias] * scales.classes[layer.scale_out]
        norm_scale = {}
        for norm in expansion.graph.norms:
            scale = scales.classes.get(norm.scale_in, 1.0)
            if scale != 1.0:
                norm_scale[norm.name] = scale
                old.update(_rescaled_norm(norm, old, scale))
        tensors = {name: self.expand(expansion, name, old[name]) for name in expansion.old}
        return Growth(tensors, 1.0 / scales.classes.get(expansion.graph.output_class, 1.0), norm_scale)

    def _scales(self, expansion: Expansion) -> "_Scales":
        classes = dict.fromkeys(expansion.graph.unit_classes, 1.0)
        weights = {}
        for layer in expansion.graph.layers:
            scale_in = classes.get(layer.scale_in, 1.0)
            if layer.scale_out not in classes:
                classes[layer.scale_out] = scale_in * self._wanted(expansion, layer.weight)
            weights[layer.weight] = classes[layer.scale_out] / scale_in
        return _Scales(weights, classes)

    def _wanted(self, expansion: Expansion, weight: str) -> float:
        layer = expansion.layers.get(weight)
        if layer is None:
            return 1.0
        before = expansion.fan_in(layer, expansion.old_widths)
        after = expansion.fan_in(layer, expansion.new_widths)
        if weight in expansion.output_layers:
            return before / after
        if self.rule == "ratio":
            return sqrt(before / after)
        variance = float(expansion.old[weight].double().var(correction=0))
        # Weights that are all equal have no variance to restore.
        return sqrt(self.new_weights.gain / (before * variance)) if variance > 0 else 1.0


@dataclass(frozen=True)
class _Scales:
    weights: dict[str, float]
    classes: dict[int, float]


def _rescaled_norm(norm: Norm, old: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    new = {}
    variance = old.get(norm.running_var) if norm.running_var else None
    if norm.running_mean in old:
        new[norm.running_mean] = old[norm.running_mean] * scale
    if variance is not None:
        new[norm.running_var] = variance * scale**2
        if norm.weight in old:
            folded = (scale**2 * variance + norm.eps) / (scale**2 * (variance + norm.eps))
            new[norm.weight] = old[norm.weight] * torch.sqrt(folded)
    return new

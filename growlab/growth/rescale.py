"""Rescale activations by constants through the weights, without changing the network's function."""

from collections.abc import Mapping
from dataclasses import replace
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from growlab.base.errors import UserError
from growlab.base.pieces import OneByOne, scalars
from growlab.growth.method import GrownTensors, GrowthContext
from growlab.growth.multipliers import fold_multipliers, multiplied_weights, row_multipliers
from growlab.widths import Norm, WidthGraph, tensors_of


def rescale(
    graph: WidthGraph,
    tensors: Mapping[str, Any],
    classes: Mapping[int, float],
    weights: Mapping[str, float] | None = None,
) -> tuple[dict[str, Any], dict[str, float]]:
    """Multiply every activation by the factor of its scale class (1 where absent).

    The weight of a layer from a class with factor a to one with factor b is multiplied by b / a, or by its entry in
    `weights` (the caller compensates for the rest), and its bias by b. A batch normalisation removes a factor: see
    `_rescaled_norm`. With the number 1.0 in place of a weight, the result is its factor.

    Returns:
        The tensors that change, by name, and the factor on the input of each batch normalisation, by its name.
    """
    new: dict[str, Any] = {}
    norm_scale: dict[str, float] = {}
    # A tensor that several layers share has the same factor in all: assign it, do not accumulate it.
    for layer in graph.layers:
        scale = classes.get(layer.scale_out, 1.0)
        factor = (weights or {}).get(layer.weight, scale / classes.get(layer.scale_in, 1.0))
        for name in (layer.weight, layer.offset):
            if factor != 1.0 and name is not None and name in tensors:
                new[name] = tensors[name] * factor
        if scale != 1.0 and layer.bias is not None and layer.bias in tensors:
            new[layer.bias] = tensors[layer.bias] * scale
    for norm in graph.norms:
        scale = classes.get(norm.scale_in, 1.0)
        if scale != 1.0:
            norm_scale[norm.name] = scale
            new.update(_rescaled_norm(norm, tensors, scale))
    return new, norm_scale


def can_fold(graph: WidthGraph) -> bool:
    """Return True if affine layers alone set the scale of the output."""
    return graph.output_class not in graph.unit_classes


class Folded(NamedTuple):
    """Factors on a parameter and on its gradient after folding; both broadcast."""

    weight: Tensor
    gradient: Tensor


def fold_output_factor(model: nn.Module, graph: WidthGraph, factor: float) -> dict[str, Folded]:
    """Multiply the network's output by `factor` permanently, through the weights and biases that produce it.

    Row multipliers of the forward (`GrowthState.multipliers`) are folded into the weights too. Parameters stay the same
    objects.

    Returns:
        Factors of the parameters that changed and of their gradients, by name. With multipliers m, a weight becomes
        m W and its gradient is multiplied by m (see `growlab.growth.multipliers`); for the output factor f the factors
        are f and 1 / f.

    Raises:
        UserError: the output does not come straight from affine layers.
    """
    new, tensors = folded(model, graph, factor), tensors_of(model, graph)
    factors = {}
    for name, rows in row_multipliers(model).items():
        rows = rows.to(tensors[name].device, tensors[name].dtype)
        factors[name] = Folded(rows, rows)
    ones = scalars(dict(model.named_parameters()))
    outer = rescale(graph, ones, {graph.output_class: factor})[0] if factor != 1.0 else {}
    outer |= {g: outer[v] for g, v in graph.lengths.items() if v in outer}
    for name, scale in outer.items():
        inner = factors.get(name) or Folded(ones[name], ones[name])
        factors[name] = Folded(inner.weight * scale, inner.gradient / scale)
    fold_multipliers(model)
    with torch.no_grad():
        for name in new.keys() & tensors.keys():
            tensors[name].copy_(new[name])
    return factors


def folded(model: nn.Module, graph: WidthGraph, factor: float) -> dict[str, Tensor]:
    """Return the folded tensors that `fold_output_factor` would write, by name; the network is unchanged."""
    if factor != 1.0 and not can_fold(graph):
        raise UserError(
            f"the output factor {factor:.4g} cannot be folded into the network, since no affine layer alone sets the "
            "scale of its output: grow with output_multiplier=False."
        )
    weights = multiplied_weights(model)
    if factor == 1.0:
        return weights
    tensors = {**tensors_of(model, graph), **weights}
    with torch.no_grad():
        scaled, _ = rescale(graph, tensors, {graph.output_class: factor})
        scaled |= {g: tensors[g] * factor for g, v in graph.lengths.items() if v in scaled}
        return weights | scaled


def eps_ratio(variance: Tensor, scale: float, eps: float) -> Tensor:
    """Factor sqrt(c^2 (v + eps) / (c^2 v + eps)) on a normalisation's output when its input is rescaled by c."""
    return torch.sqrt(scale**2 * (variance + eps) / (scale**2 * variance + eps))


def _rescaled_norm(norm: Norm, tensors: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Rescale a norm's running statistics with its input, and fold the effect of eps into its weight."""
    new = {}
    if norm.running_mean is not None and norm.running_mean in tensors:
        new[norm.running_mean] = tensors[norm.running_mean] * scale
    if norm.running_var is not None and norm.running_var in tensors:
        variance = tensors[norm.running_var]
        new[norm.running_var] = variance * scale**2
        if norm.weight is not None and norm.weight in tensors:
            folded = eps_ratio(variance, scale, norm.eps).to(tensors[norm.weight])
            new[norm.weight] = tensors[norm.weight] / folded
    return new


def with_attention_scale(
    context: GrowthContext, growth: GrownTensors, multiplied: frozenset[str] = frozenset()
) -> GrownTensors:
    """Rescale queries to undo the change of attention's scale 1 / sqrt(d) (Yuan et al. 2023, Section 3.1).

    Attention divides the products of queries and keys by the square root of their dimension. When it changes from d
    to d', tensors in which queries are linear are multiplied by sqrt(d' / d), and their gradients divided by it.
    Weights in `multiplied` get the factor as a row multiplier in the forward, so that the method's variance is kept.
    """
    written, scales = dict[str, float](), dict(growth.carry.scales)
    rescaled, multipliers = dict(growth.report.get("rescaled", {})), dict(growth.multipliers)
    for name, factor in attention_factors(context).items():
        if name in multiplied:
            multipliers[name] = multipliers.get(name, 1.0) * factor
            scales[name] = scales.get(name, 1.0) / factor**2
            continue
        written[name] = factor
        scales[name] = scales.get(name, 1.0) / factor
        rescaled[name] = rescaled.get(name, 1.0) * factor
    factors = {"rescaled": rescaled, "multipliers": multipliers}
    report = {**growth.report, **(factors if rescaled or multipliers else {})}
    old = tensors = growth.tensors
    if written:
        tensors = OneByOne(old, lambda name: old[name] * written[name] if name in written else old[name])
    carry = replace(growth.carry, scales=scales)
    return replace(growth, tensors=tensors, carry=carry, multipliers=multipliers, report=report)


def attention_factors(context: GrowthContext) -> dict[str, float]:
    """Factor, by name, on each tensor that queries are linear in: sqrt(d' / d)."""
    factors: dict[str, float] = {}
    for attention in context.graph.attentions:
        before, after = (attention.axis.length(w) for w in (context.old_widths, context.new_widths))
        if before != after:
            for name in attention.queries:
                factors[name] = factors.get(name, 1.0) * sqrt(after / before)
    return factors

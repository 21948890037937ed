"""Compensate the change of attention's softmax scale when the head dimension grows."""

from dataclasses import replace
from math import sqrt

from growlab.growth.method import Expansion, GrownTensors


def with_attention_scale(
    expansion: Expansion, growth: GrownTensors, multiplied: frozenset[str] = frozenset()
) -> GrownTensors:
    """Rescale queries to undo the change of attention's scale 1 / sqrt(d) (Yuan et al. 2023, Section 3.1).

    Attention divides the products of queries and keys by the root of their dimension. From d to d' the tensors that
    queries are linear in are multiplied by sqrt(d' / d), and their gradients divided by it.

    Args:
        expansion: the event.
        growth: the result of the growth method.
        multiplied: names of weights that get the factor as a row multiplier in the forward (see
            `growlab.growth.multipliers`), so that their variance stays as set by the method.
    """
    tensors, scales = dict(growth.tensors), dict(growth.carry.scales)
    rescaled, multipliers = dict(growth.report.get("rescaled", {})), dict(growth.multipliers)
    for name, factor in attention_factors(expansion).items():
        if name in multiplied:
            multipliers[name] = multipliers.get(name, 1.0) * factor
            scales[name] = scales.get(name, 1.0) / factor**2
            continue
        tensors[name] = tensors[name] * factor
        scales[name] = scales.get(name, 1.0) / factor
        rescaled[name] = rescaled.get(name, 1.0) * factor
    told = {"rescaled": rescaled, "multipliers": multipliers}
    report = {**growth.report, **(told if rescaled or multipliers else {})}
    carry = replace(growth.carry, scales=scales)
    return replace(growth, tensors=tensors, carry=carry, multipliers=multipliers, report=report)


def attention_factors(expansion: Expansion) -> dict[str, float]:
    """Factor, by name, on each tensor that queries are linear in: sqrt(d' / d)."""
    factors: dict[str, float] = {}
    for attention in expansion.graph.attentions:
        before, after = (attention.axis.length(w) for w in (expansion.old_widths, expansion.new_widths))
        if before != after:
            for name in attention.queries:
                factors[name] = factors.get(name, 1.0) * sqrt(after / before)
    return factors

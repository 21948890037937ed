"""The softmax scale of attention whose head dimension grows."""

from dataclasses import replace
from math import sqrt

from growlab.growth.method import Expansion, GrownTensors


def with_attention_scale(
    expansion: Expansion, growth: GrownTensors, multiplied: frozenset[str] = frozenset()
) -> GrownTensors:
    """The same growth, with queries that undo the change of the scale 1 / sqrt(d) (Yuan et al. 2023, Section 3.1).

    Attention divides the products of queries and keys by the root of their dimension. From d to d' the tensors that
    queries are linear in are multiplied by sqrt(d' / d), and their gradients divided by it.

    Args:
        expansion: the event.
        growth: what the method gave back.
        multiplied: weights whose old rows are multiplied in the forward (see `multipliers`), so that their variance
            stays what the method has made it.
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
    """By how much the event multiplies tensors that queries are linear in, by name."""
    factors: dict[str, float] = {}
    for attention in expansion.graph.attentions:
        before, after = (attention.axis.length(w) for w in (expansion.old_widths, expansion.new_widths))
        if before != after:
            for name in attention.queries:
                factors[name] = factors.get(name, 1.0) * sqrt(after / before)
    return factors

"""Channel rules, one module for each kind of operation."""

from growlab.widths.rules import (
    affine,
    attention,
    elementwise,
    fourier,
    indexing,
    norms,
    opaque,
    permutations,
    pooling,
    recurrent,
    rotation,
    shapes,
)
from growlab.widths.rules.affine import AFFINE
from growlab.widths.rules.opaque import MIXING
from growlab.widths.rules.registry import RULES, Value, keep_full_width, linear_in, overwritten, values_in
from growlab.widths.rules.shapes import SIZES_ALONE

__all__ = [
    "AFFINE",
    "MIXING",
    "RULES",
    "SIZES_ALONE",
    "Value",
    "affine",
    "attention",
    "elementwise",
    "fourier",
    "indexing",
    "keep_full_width",
    "linear_in",
    "norms",
    "opaque",
    "overwritten",
    "permutations",
    "pooling",
    "recurrent",
    "rotation",
    "shapes",
    "values_in",
]

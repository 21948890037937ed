"""Channel rules, one module for each kind of operation."""

from growlab.widths.rules import affine, attention, elementwise, indexing, norms, pooling, recurrent, shapes
from growlab.widths.rules.registry import AFFINE, MIXING, RULES, keep_full_width, linear_in, overwritten
from growlab.widths.rules.shapes import SIZES_ALONE

__all__ = [
    "AFFINE",
    "MIXING",
    "RULES",
    "SIZES_ALONE",
    "affine",
    "attention",
    "elementwise",
    "indexing",
    "keep_full_width",
    "linear_in",
    "norms",
    "overwritten",
    "pooling",
    "recurrent",
    "shapes",
]

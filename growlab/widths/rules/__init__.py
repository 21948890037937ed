"""Channel rules, one module for each kind of operation; importing them fills the registry."""

from growlab.widths.rules import affine, attention, elementwise, indexing, norms, shapes

__all__ = ["affine", "attention", "elementwise", "indexing", "norms", "shapes"]

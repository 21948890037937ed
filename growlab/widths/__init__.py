"""Width groups of a network: find them (`trace`), read them (`WidthGraph`), change them (`resize`)."""

from growlab.widths.bases import applied, rotate
from growlab.widths.carry import Carry
from growlab.widths.groups import Attention, ChannelNorm, Group, Layer, Norm, Radius, WidthGraph, Written
from growlab.widths.inputs import Example
from growlab.widths.layout import Axis, Part
from growlab.widths.memory_format import avoid_unsafe_kernels
from growlab.widths.resize import grid, replace_tensors, resize, resized, restore_tensors, tensors_of
from growlab.widths.trace import UnsupportedOperation, layouts, trace
from growlab.widths.trials import FAILURES, lightened, tensors_in

__all__ = [
    "FAILURES",
    "Attention",
    "Axis",
    "Carry",
    "ChannelNorm",
    "Example",
    "Group",
    "Layer",
    "Norm",
    "Part",
    "Radius",
    "UnsupportedOperation",
    "WidthGraph",
    "Written",
    "applied",
    "avoid_unsafe_kernels",
    "grid",
    "layouts",
    "lightened",
    "replace_tensors",
    "resize",
    "resized",
    "restore_tensors",
    "rotate",
    "tensors_in",
    "tensors_of",
    "trace",
]

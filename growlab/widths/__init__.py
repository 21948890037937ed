"""Width groups of a network: find them (`trace`), read them (`WidthGraph`), change them (`resize`)."""

from growlab.widths.carry import Carry, applied, rotate
from growlab.widths.groups import (
    Attention,
    Axis,
    ChannelLength,
    ChannelNorm,
    Group,
    HardcodedSize,
    Layer,
    Norm,
    Part,
    WidthGraph,
)
from growlab.widths.inputs import Example, tensors_in
from growlab.widths.meta import FAILURES, Lightened
from growlab.widths.resize import (
    as_run,
    avoid_unsafe_kernels,
    grid,
    replace_tensors,
    resize,
    resized,
    restore_tensors,
    tensors_of,
)
from growlab.widths.trace import UnsupportedOperation, layouts, trace

__all__ = [
    "FAILURES",
    "Attention",
    "Axis",
    "Carry",
    "ChannelLength",
    "ChannelNorm",
    "Example",
    "Group",
    "HardcodedSize",
    "Layer",
    "Lightened",
    "Norm",
    "Part",
    "UnsupportedOperation",
    "WidthGraph",
    "applied",
    "as_run",
    "avoid_unsafe_kernels",
    "grid",
    "layouts",
    "replace_tensors",
    "resize",
    "resized",
    "restore_tensors",
    "rotate",
    "tensors_in",
    "tensors_of",
    "trace",
]

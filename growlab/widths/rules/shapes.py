"""Rules for operations that rearrange entries: permutation, padding, slicing, splitting, concatenation, reshapes."""

import math
import operator
from collections.abc import Sequence
from typing import Any

from growlab.widths.atoms import Run, Runs, fixed
from growlab.widths.groups import Role
from growlab.widths.program import RESHAPING, as_computed, operation_of, shape_of, shapes_of, spans
from growlab.widths.rules.affine import are_weights
from growlab.widths.rules.registry import DRAWN, MIXING, Arguments, freeze_windows, rule
from growlab.widths.values import Record, Value


@rule("permute")
def permute(record: Record, node: Any, args: Arguments) -> Value:
    """Permutation of dimensions."""
    x, last = args["self"], len(args["dims"]) - 1
    order = [dim % len(x.shape) for dim in args["dims"]]
    axes = tuple(x.axes[dim] for dim in order)
    is_factor = all(operation_of(user) in MIXING for user in node.users)
    transposes = is_factor and order == [*range(last - 1), last, last - 1]
    return Value(shape_of(node), axes, x.scale, turned=_turned(x) if transposes else None)


@rule("movedim", "moveaxis")
def movedim(record: Record, node: Any, args: Arguments) -> Value:
    """Move of some dimensions to other positions."""
    x = args["self"]
    dims = [[arg] if isinstance(arg, int) else arg for arg in (args["source"], args["destination"])]
    sources, targets = ([dim % len(x.shape) for dim in each] for each in dims)
    axes = [axis for dim, axis in enumerate(x.axes) if dim not in sources]
    for target, source in sorted(zip(targets, sources, strict=True)):
        axes.insert(target, x.axes[source])
    return Value(shape_of(node), tuple(axes), x.scale)


@rule("transpose", "swapaxes", "transpose_")
def transpose(record: Record, node: Any, args: Arguments) -> Value:
    """Exchange of two dimensions."""
    x = args["self"]
    first = args["dim0"] if "dim0" in args else args["axis0"]
    second = args["dim1"] if "dim1" in args else args["axis1"]
    axes = list(x.axes)
    axes[first], axes[second] = axes[second], axes[first]
    last_two = {first % len(axes), second % len(axes)} == {len(axes) - 2, len(axes) - 1}
    turned = _turned(x) if last_two else None
    return Value(shape_of(node), tuple(axes), x.scale, turned=turned)


@rule("t", "numpy_T")
def turned(record: Record, node: Any, args: Arguments) -> Value:
    """Reversal of the order of dimensions."""
    x = args["self"]
    return Value(shape_of(node), x.axes[::-1], x.scale, turned=_turned(x) if len(x.shape) == 2 else None)


def _turned(x: Value) -> Value | None:
    return x if x.name is not None and len(x.shape) > 1 else None


_MERGED = "several growing dimensions merged into one"
# Operations that fill a tensor, or a new one of the same shape, with random numbers.
_DRAWS = """
rand_like randn_like bernoulli bernoulli_ normal_ uniform_ exponential_ log_normal_ cauchy_ geometric_ random_
"""
_NEW = "new_zeros new_ones new_full new_empty zeros ones full empty rand randn"
_LIKE = "zeros_like ones_like full_like empty_like"
#: Operations that only read the sizes and dtypes of their operands.
SIZES_ALONE = frozenset((*_NEW.split(), *_LIKE.split(), *_DRAWS.split()))


@rule("constant_pad_nd", "pad")
def pad(record: Record, node: Any, args: Arguments) -> Value:
    """Padding: zeros appended to channels are a new group, which completes the stream to a wider one."""
    x, amounts = args["self"], args["pad"]
    value = args.get("value") or 0.0
    plain = value == 0.0 and args.get("mode", "constant") == "constant"
    axes = list(x.axes)
    for index in range(len(amounts) // 2):
        before, after = amounts[2 * index], amounts[2 * index + 1]
        dim = len(axes) - 1 - index
        if not before and not after:
            continue
        record.atoms.settle(axes[dim])
        runs = record.atoms.resolve(axes[dim])
        if all(run.atom is None for run in runs):
            axes[dim] = fixed(x.shape[dim] + before + after)
        elif before < 0 or after < 0 or not plain:
            record.atoms.freeze(runs, "cropped or padded with something else than zeros")
            axes[dim] = fixed(x.shape[dim] + before + after)
        else:
            first = record.atoms.new(before, below=x.shape[dim]) if before else ()
            last = record.atoms.new(after, below=x.shape[dim] + before) if after else ()
            axes[dim] = first + runs + last
    if value != 0.0:
        record.scales.pin(x.scale)
    return Value(shape_of(node), tuple(axes), x.scale)


@rule("slice", "narrow")
def take_slice(record: Record, node: Any, args: Arguments) -> Value:
    """Slice of channels, which grows separately from the parts around it; with a step other than 1 all are frozen.

    A table keeps its width there, and its slice (rows of a table of positions) still counts as the parameter.
    """
    x, dim = args["self"], args.get("dim", 0) % len(args["self"].shape)
    shape, size = shape_of(node), x.shape[dim]
    start, length = args.get("start") or 0, shape[dim]
    if length == size:
        return x
    record.atoms.settle(x.axes[dim])
    table = x.name is not None and len(x.shape) > 1
    if table or args.get("step", 1) != 1 or not length or not isinstance(start, int):
        record.atoms.freeze(x.axes[dim], "a slice of the channels is taken")
        return Value(shape, (*x.axes[:dim], fixed(length), *x.axes[dim + 1 :]), x.scale, x.name)
    start = min(max(start + size if start < 0 else start, 0), size - length)
    sizes = [part for part in (start, length, size - start - length) if part]
    pieces = record.atoms.cut(x.axes[dim], sizes)
    for part, piece in zip(sizes, pieces, strict=True):
        record.note_size(node, part, piece)
    piece = pieces[1 if start else 0]
    return Value(shape, (*x.axes[:dim], piece, *x.axes[dim + 1 :]), x.scale)


@rule("select", "unbind")
def single_positions(record: Record, node: Any, args: Arguments) -> Value | list[Value]:
    """Selection of one position of a dimension, or of each of them: the dimension is frozen."""
    x, dim = args["self"], args.get("dim", 0) % len(args["self"].shape)
    record.atoms.freeze(x.axes[dim], "channels are taken one by one")
    axes = x.axes[:dim] + x.axes[dim + 1 :]
    return as_computed(node, [Value(shape, axes, x.scale) for shape in shapes_of(node)])


@rule("chunk", "split", "split_with_sizes", "tensor_split")
def split(record: Record, node: Any, args: Arguments) -> list[Value]:
    """Split of channels into parts that grow separately.

    If only linear layers read the rows of a parameter (queries, keys, values), these are their weights or biases.
    """
    x, dim = args["self"], args.get("dim", 0) % len(args["self"].shape)
    shapes = shapes_of(node)
    rows_of = x if x.name is not None and dim == 0 and are_weights(record, node) else None
    pieces = record.atoms.cut(x.axes[dim], [shape[dim] for shape in shapes])
    for shape, piece in zip(shapes, pieces, strict=True):
        record.note_size(node, shape[dim], piece)
    return [
        Value(shape, (*x.axes[:dim], piece, *x.axes[dim + 1 :]), x.scale, rows_of=rows_of)
        for shape, piece in zip(shapes, pieces, strict=True)
    ]


@rule("cat", "concat", "concatenate")
def concatenate(record: Record, node: Any, args: Arguments) -> Value:
    """Concatenation of channels, whose parts grow separately."""
    shape = shape_of(node)
    # torch ignores empty tensors of one dimension, such as a cache without entries.
    values = [value for value in args["tensors"] if value.shape != (0,) or len(shape) == 1]
    dim = args.get("dim", 0) % len(shape)
    axes: list[Runs] = []
    scale = values[0].scale
    for other in values[1:]:
        scale = record.scales.union(scale, other.scale)
    for value in values:
        # Concatenated biases of queries, keys and values carry separate channels.
        if value.name is not None and len(shape) > 1:
            # A parameter that is concatenated with activations (a class token) produces their channels.
            for index in range(len(shape)):
                role: Role = "out" if index != dim and value.shape[index] > 1 else "fixed"
                if role == "fixed":
                    record.atoms.freeze(value.axes[index], "concatenated along this dimension")
                record.parameter_axis(value, role, value.axes[index], dimension=index)
    for index in range(len(shape)):
        if index == dim:
            axes.append(tuple(run for value in values for run in value.axes[index]))
        else:
            for other in values[1:]:
                record.atoms.unify(values[0].axes[index], other.axes[index], "concatenated")
            axes.append(values[0].axes[index])
    return Value(shape, tuple(axes), scale)


@rule("expand", "expand_as", "broadcast_to")
def expand(record: Record, node: Any, args: Arguments) -> Value:
    """Expansion: single positions are repeated; other dimensions pass."""
    x, shape = args["self"], shape_of(node)
    new = len(shape) - len(x.shape)
    axes = [record.atoms.of_constants(size) for size in shape]
    for index, (size, axis) in enumerate(zip(x.shape, x.axes, strict=True)):
        if size == shape[new + index] and size > 1:
            axes[new + index] = axis
        elif x.name is not None:
            record.atoms.freeze(axis, "a single value is repeated")
    if x.name is not None:
        for index, size in enumerate(x.shape):
            record.parameter_axis(x, "out" if size > 1 else "fixed", x.axes[index], dimension=index)
    record.note_sizes(node, axes)
    return Value(shape, tuple(axes), x.scale)


@rule(*RESHAPING)
def reshape(record: Record, node: Any, args: Arguments) -> Value:
    """Reshape: match runs of input and output dimensions with equal products; merge or split inside each."""
    x, shape = args["self"], shape_of(node)
    if x.squeezed is not None:
        return x.squeezed
    if _is_taken_back(record, node, x):
        wide = iter([axis for size, axis in zip(x.shape, x.axes, strict=True) if size > 1])
        return Value(shape, tuple(next(wide) if size > 1 else fixed(1) for size in shape), x.scale, squeezed=x)
    if 0 in shape:
        # No entries, such as windows that a short sequence does not fill: match dimensions by size, from the last.
        sized = [*zip(x.shape[::-1], x.axes[::-1], strict=True), *[(-1, fixed(0))] * len(shape)]
        matched = [axis if old == size else fixed(size) for size, (old, axis) in zip(shape[::-1], sized, strict=False)]
        return Value(shape, tuple(matched[::-1]), x.scale)
    axes: list[Runs] = []
    for old, new in spans(x.shape, shape):
        axes += _span(record, node, x, old, [shape[place] for place in new])
    record.note_sizes(node, axes)
    return Value(shape, tuple(axes), x.scale)


def _is_taken_back(record: Record, node: Any, x: Value) -> bool:
    """Return True if later reshapes restore a parameter's shape, such as that of a squeezed kernel."""
    before, after = ([size for size in shape if size > 1] for shape in (x.shape, shape_of(node)))
    restored = all(operation_of(user) in RESHAPING and shape_of(user) == x.shape for user in node.users)
    return record.is_weight(x) and before == after and bool(node.users) and restored


def _span(record: Record, node: Any, x: Value, span: range, sizes: Sequence[int]) -> list[Runs]:
    growing = [index for index in span if record.grows(x.axes[index])]
    wide = [size for size in sizes if size != 1]
    if len(growing) > 1 and wide:
        for index in growing:
            record.atoms.settle(x.axes[index])
        growing = [index for index in growing if record.grows(x.axes[index])]
    if len(growing) > 1 and wide:
        # Channels of layers go before entries of a vector, such as the centres of radial basis functions.
        matrices = record.atoms_of_matrices()
        vectors = [i for i in growing if matrices.isdisjoint(run.atom for run in record.atoms.resolve(x.axes[i]))]
        record.freeze_all([x.axes[index] for index in vectors], _MERGED)
        growing = [index for index in growing if index not in vectors]
    if len(growing) != 1 or not wide:
        reason = _MERGED if wide else "a single channel"
        record.freeze_all([x.axes[index] for index in growing], reason)
        return [fixed(size) for size in sizes]
    # One growing dimension among fixed ones: those before it become repetitions, those after it stretch it.
    outer = math.prod(x.shape[index] for index in span if index < growing[0])
    inner = math.prod(x.shape[index] for index in span if index > growing[0])
    merged = record.atoms.nest(x.axes[growing[0]], outer, inner)
    axes = iter([merged] if len(wide) == 1 else _unmerge(record, node, merged, wide))
    return [fixed(1) if size == 1 else next(axes) for size in sizes]


def _unmerge(record: Record, node: Any, merged: Runs, sizes: Sequence[int]) -> list[Runs]:
    """Split one axis into several dimensions, of which one grows."""
    atoms = record.atoms
    runs = atoms.resolve(merged)
    if len(runs) == 1:
        run = runs[0]
        # The growing dimension is followed by the run's inner positions. If attention turns out to sum over it, the
        # next dimension to the left (the heads) grows instead (`Record.moved`).
        last = next(i for i in reversed(range(len(sizes))) if math.prod(sizes[i:]) > run.inner)
        if (run.outer, run.inner) == (math.prod(sizes[:last]), math.prod(sizes[last + 1 :])):
            # Split as it was merged: no other dimension could grow.
            return [(Run(run.atom),) if i == last else fixed(size) for i, size in enumerate(sizes)]
        index = min(last, len(sizes) - 1 - record.moved.get(node.name, 0))
        before, behind = math.prod(sizes[: max(0, index)]), math.prod(sizes[index + 1 :])
        # Samples that repeat it, and channels of a head that stretch it, may be merged into the dimension.
        times, stretch = max(1, run.outer // before), max(1, run.inner // behind)
        outer, inner, several = before * times, behind * stretch, times * stretch
        if index >= 0 and inner % run.inner == outer % run.outer == sizes[index] % several == 0:
            (within,) = atoms.new(sizes[index] // several)
            atoms.unify(runs, (Run(within.atom, outer, inner),), "split into several dimensions")
            record.note_choice(node, (within,), index)
            grown = atoms.nest((within,), times, stretch)
            return [grown if i == index else fixed(size) for i, size in enumerate(sizes)]
    elif len(sizes) > 1:
        # Several runs, such as queries, keys and values: the first dimension counts them.
        pieces = atoms.cut(runs, [math.prod(sizes[1:])] * sizes[0])
        for piece in pieces[1:]:
            atoms.unify(pieces[0], piece, "parts of one dimension")
        rest = [pieces[0]] if len(sizes) == 2 else _unmerge(record, node, pieces[0], sizes[1:])
        return [fixed(sizes[0]), *rest]
    atoms.freeze(runs, "reshaped into several dimensions")
    return [fixed(size) for size in sizes]


@rule("pixel_shuffle")
def pixel_shuffle(record: Record, node: Any, args: Arguments) -> Value:
    """Pixel shuffle: r x r adjacent channels become one channel of r x r times as many pixels."""
    x, shape, factor = args["self"], shape_of(node), args["upscale_factor"]
    freeze_windows(record, x, 2)
    (within,) = record.atoms.new(shape[-3])
    record.atoms.unify(x.axes[-3], (Run(within.atom, 1, factor * factor),), "pixel shuffle")
    axes = (*x.axes[:-3], record.atoms.resolve((within,)), *map(fixed, shape[-2:]))
    return Value(shape, axes, x.scale)


@rule("pixel_unshuffle")
def pixel_unshuffle(record: Record, node: Any, args: Arguments) -> Value:
    """Pixel unshuffle: each channel becomes r x r adjacent channels."""
    x, shape, factor = args["self"], shape_of(node), args["downscale_factor"]
    freeze_windows(record, x, 2)
    axes = (*x.axes[:-3], record.atoms.nest(x.axes[-3], 1, factor * factor), *map(fixed, shape[-2:]))
    return Value(shape, axes, x.scale)


@rule("im2col")
def windows_as_channels(record: Record, node: Any, args: Arguments) -> Value:
    """Unfolding of images (`im2col`): each channel becomes one channel for every position in a window."""
    x, shape = args["self"], shape_of(node)
    freeze_windows(record, x, 2)
    places = shape[-2] // x.shape[-3]
    return Value(shape, (*x.axes[:-3], record.atoms.nest(x.axes[-3], 1, places), fixed(shape[-1])), x.scale)


@rule("col2im")
def channels_as_windows(record: Record, node: Any, args: Arguments) -> Value:
    """Folding of windows (`col2im`): the channels for the positions in a window are added at these positions."""
    x, shape = args["self"], shape_of(node)
    record.atoms.freeze(x.axes[-1], "windows of an image")
    (within,) = record.atoms.new(shape[-3])
    record.atoms.unify(x.axes[-2], (Run(within.atom, 1, x.shape[-2] // shape[-3]),), "windows of an image")
    axes = (*x.axes[:-2], record.atoms.resolve((within,)), *map(fixed, shape[-2:]))
    return Value(shape, axes, x.scale)


@rule("stack")
def stack(record: Record, node: Any, args: Arguments) -> Value:
    """Stack along a new dimension: all operands have the same channels."""
    values, shape = args["tensors"], shape_of(node)
    dim = args.get("dim", 0) % len(shape)
    scale = values[0].scale
    for other in values[1:]:
        scale = record.scales.union(scale, other.scale)
        for left, right in zip(values[0].axes, other.axes, strict=True):
            record.atoms.unify(left, right, "stacked")
    axes = values[0].axes
    return Value(shape, (*axes[:dim], fixed(shape[dim]), *axes[dim:]), scale)


@rule(*_NEW.split())
def new_tensor(record: Record, node: Any, args: Arguments) -> Value:
    """New tensor of the given sizes, which shares no channels with its operand."""
    shape = shape_of(node)
    axes = tuple(map(record.atoms.of_constants, shape))
    for size, axis in zip(shape, axes, strict=True):
        record.note_size(node, size, axis)
        if operation_of(node).startswith("rand"):
            record.atoms.freeze(axis, DRAWN)
    return record.unit(shape, axes)


@rule(*_LIKE.split(), *_DRAWS.split())
def same_shape(record: Record, node: Any, args: Arguments) -> Value:
    """New tensor of the operand's shape and channels, whose entries do not depend on the operand."""
    x = args["self"]
    if operation_of(node) in _DRAWS.split():
        record.freeze_all(x.axes, DRAWN)
    return record.unit(x.shape, x.axes)


@rule("getitem")
def getitem(record: Record, node: Any, args: Arguments) -> Any:
    """Selection of one of several outputs."""
    return operator.getitem(args["a"], args["b"])

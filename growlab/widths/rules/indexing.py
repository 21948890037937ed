"""Rules for indexing, scattering and sorting along a dimension, which keeps its width while the others pass."""

from typing import Any

import torch

from growlab.widths.atoms import STAYING, Runs, fixed
from growlab.widths.groups import Role
from growlab.widths.program import as_computed, operation_of, shape_of, shapes_of
from growlab.widths.rules.registry import Arguments, first_tensor, keep_full_width, rule
from growlab.widths.values import Record, Value, values_in

_PICKED = "picked by index"
_ORDERED = "topk sort argsort cummax cummin kthvalue median nanmedian mode logcumsumexp flip roll"


@rule("repeat", "tile", "repeat_interleave")
def repeat(record: Record, node: Any, args: Arguments) -> Any:
    """Repetition of whole dimensions or of every entry (`repeat_interleave`).

    Repeated dimensions of size 1 adopt the layout of the axes that they meet later.
    """
    interleaved = operation_of(node) == "repeat_interleave"
    if interleaved and (args.get("dim") is None or not isinstance(args.get("repeats"), int)):
        return keep_full_width(record, node, args)
    x, shape = args["self"], shape_of(node)
    new = len(shape) - len(x.shape)
    axes = [record.atoms.of_constants(size) for size in shape]
    for index, (size, axis) in enumerate(zip(x.shape, x.axes, strict=True)):
        if size > 1:
            times = shape[new + index] // size
            axes[new + index] = record.atoms.nest(axis, *((1, times) if interleaved else (times, 1)))
    record.note_sizes(node, axes)
    return Value(shape, tuple(axes), x.scale)


@rule("index")
def index(record: Record, node: Any, args: Arguments) -> Value:
    """Indexing by tensors: indexed dimensions (of a table of position biases) keep their width; others (heads) pass."""
    x, picked = args["self"], _picked(node, args["indices"])
    if not picked:
        return keep_full_width(record, node, args)
    record.freeze_all(_axes_of(args["indices"]), "positions to pick")
    for dim in picked:
        record.atoms.freeze(_counted_part(record, node, x, dim) if len(picked) == 1 else x.axes[dim], _PICKED)
    shape = shape_of(node)
    before, behind = x.axes[: picked[0]], x.axes[picked[-1] + 1 :]
    middle = shape[len(before) : len(shape) - len(behind)]
    if x.name is not None:
        for dim, axis in enumerate(x.axes):
            role: Role = "fixed" if dim in picked or x.shape[dim] == 1 else "out"
            if role == "fixed":
                record.atoms.freeze(axis, _PICKED)
            record.parameter_axis(x, role, axis, dimension=dim)
    return Value(shape, (*before, *map(fixed, middle), *behind), x.scale)


@rule("masked_scatter", "masked_scatter_")
def masked_scatter(record: Record, node: Any, args: Arguments) -> Value:
    """Assign rows by a mask, such as features of an image among those of tokens: the last dimension passes.

    The mask must be the same for all channels, otherwise channels of the source would be moved to others.
    """
    x, source = args["self"], args["source"]
    mask = node.args[1]
    while operation_of(mask) in ("to", "_to_copy", "clone", "contiguous", "alias", "detach"):
        mask = mask.args[0]
    by_row = operation_of(mask) in ("expand", "expand_as", "broadcast_to")
    if not by_row or shape_of(mask.args[0])[-1:] != (1,) or source.shape[-1:] != x.shape[-1:]:
        return keep_full_width(record, node, args)
    record.freeze_all((*x.axes[:-1], *source.axes[:-1]), "rows to pick")
    record.atoms.unify(x.axes[-1], source.axes[-1], f"scattered among channels {STAYING}")
    record.atoms.unify(x.axes[-1], args["mask"].axes[-1], f"scattered among channels {STAYING}")
    scale = record.scales.union(x.scale, source.scale)
    return Value(x.shape, (*x.axes[:-1], record.atoms.resolve(x.axes[-1])), scale)


def _picked(node: Any, indices: Any) -> list[int]:
    """Return the indexed dimensions (a mask indexes as many as it has); [] if they are not adjacent."""
    picked, dim = list[int](), 0
    for positions, argument in zip(indices, node.args[1], strict=True):
        is_mask = positions is not None and argument.meta["val"].dtype in (torch.bool, torch.uint8)
        covered = len(positions.shape) if is_mask else 1
        picked += range(dim, dim + covered) if positions is not None else ()
        dim += covered
    return picked if picked and picked[-1] - picked[0] + 1 == len(picked) else []


def _counted_part(record: Record, node: Any, x: Value, dim: int) -> Runs:
    """Return the part of a dimension that must be frozen because constant indices count through it from one end.

    Channels in front of the one that `x[:, [-2]]` picks may grow. Of a parameter the whole dimension is frozen.
    """
    numbers, size = record.numbers(node.args[1][dim]), x.shape[dim]
    if not numbers or x.name is not None or min(numbers) < 0 <= max(numbers):
        return x.axes[dim]
    last = max(numbers) + 1 if min(numbers) >= 0 else size + min(numbers)
    pieces = record.atoms.cut(x.axes[dim], [last, size - last])
    return pieces[0] if min(numbers) >= 0 else pieces[1]


def _axes_of(indices: Any) -> list[Any]:
    return [axis for positions in indices if positions is not None for axis in positions.axes]


@rule("index_put", "index_put_")
def index_put(record: Record, node: Any, args: Arguments) -> Value:
    """Assignment by index: the last dimensions of the values are the dimensions after the indexed ones."""
    x, values, picked = args["self"], args["values"], _picked(node, args["indices"])
    if not picked or x.name is not None:
        return keep_full_width(record, node, args)
    record.freeze_all((*(x.axes[dim] for dim in picked), *_axes_of(args["indices"])), _PICKED)
    behind = x.axes[picked[-1] + 1 :] if picked[0] == 0 else ()
    for position, axis in enumerate(reversed(values.axes)):
        if position < len(behind) and record.atoms.length(axis) > 1:
            record.atoms.unify(behind[-1 - position], axis, "put in the place of others")
        else:
            record.atoms.freeze(axis, "put in the place of others")
    if picked[0] != 0:
        record.freeze_all(x.axes, _PICKED)
    record.scales.pin(values.scale)
    record.scales.pin(x.scale)
    return record.unit(x.shape, x.axes)


@rule("index_select")
def index_select(record: Record, node: Any, args: Arguments) -> Value:
    """Selection by indices along one dimension."""
    x, dim = args["self"], args["dim"] % len(args["self"].shape)
    record.atoms.freeze(x.axes[dim], _PICKED)
    shape = shape_of(node)
    return Value(shape, (*x.axes[:dim], fixed(shape[dim]), *x.axes[dim + 1 :]), x.scale)


@rule("gather")
def gather(record: Record, node: Any, args: Arguments) -> Value:
    """Gathering, with an index for each entry of the result: the other dimensions of input and index are unified."""
    x, dim, positions = args["self"], args["dim"] % len(args["self"].shape), args["index"]
    _same_other_dims(record, dim, x, positions)
    return Value(positions.shape, positions.axes, x.scale)


@rule("index_add", "index_add_", "index_copy", "index_copy_")
def index_add(record: Record, node: Any, args: Arguments) -> Value:
    """Addition or copying by index along one dimension: the other dimensions of both tensors are unified."""
    x, dim, source = args["self"], args["dim"] % len(args["self"].shape), args["source"]
    _same_other_dims(record, dim, x, source)
    return Value(x.shape, x.axes, record.scales.union(x.scale, source.scale))


@rule("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_")
def scatter(record: Record, node: Any, args: Arguments) -> Value:
    """Scattering along a dimension: the other dimensions of input, index and source are unified."""
    x, dim, positions, source = args["self"], args["dim"] % len(args["self"].shape), args["index"], args.get("src")
    _same_other_dims(record, dim, x, positions)
    if isinstance(source, Value):
        _same_other_dims(record, dim, x, source)
        record.scales.pin(source.scale)
    record.scales.pin(x.scale)
    return record.unit(x.shape, x.axes)


def _same_other_dims(record: Record, dim: int, x: Value, other: Value) -> None:
    """Unify the dimensions of equal length of two tensors, except `dim`, and freeze the others."""
    for index, axes in enumerate(zip(x.axes, other.axes, strict=True)):
        if index != dim and x.shape[index] == other.shape[index]:
            record.atoms.unify(*axes, f"entries at positions {STAYING}")
        else:
            record.freeze_all(axes, _PICKED)


@rule(*_ORDERED.split())
def ordered(record: Record, node: Any, args: Arguments) -> Value | list[Value]:
    """Sorting, flipping, rolling and similar operations along dimensions, which keep their width."""
    x = first_tensor(args)
    default = None if operation_of(node) in ("median", "nanmedian", "roll") else -1
    dims = args.get("dims", args.get("dim", default))
    dims = [dims] if isinstance(dims, int) else dims or range(len(x.shape))
    chosen = {dim % len(x.shape) for dim in dims}
    record.freeze_all([x.axes[dim] for dim in chosen], f"reordered by {operation_of(node)}")
    moved = operation_of(node) in ("flip", "roll")
    if not moved:
        record.scales.pin(x.scale)
    results = []
    for shape in shapes_of(node):
        axes = [fixed(size) if i in chosen else x.axes[i] for i, size in enumerate(shape)]
        if len(shape) < len(x.shape):
            axes = [axis for i, axis in enumerate(x.axes) if i not in chosen]
        results.append(Value(shape, tuple(axes), x.scale if moved else record.scales.new(unit=True)))
    return as_computed(node, results)


@rule("diff")
def difference(record: Record, node: Any, args: Arguments) -> Value:
    """Differences of neighbours along a dimension, which keeps its width, as do prepended and appended tensors."""
    x, dim = args["self"], args.get("dim", -1) % len(args["self"].shape)
    shape = shape_of(node)
    for value in values_in(args):
        if value is not x:
            record.scales.pin(value.scale)
            record.freeze_all(value.axes, "neighbours are subtracted")
    record.atoms.freeze(x.axes[dim], "neighbours are subtracted")
    return Value(shape, (*x.axes[:dim], fixed(shape[dim]), *x.axes[dim + 1 :]), x.scale)


@rule("tril", "tril_", "triu", "triu_")
def triangle(record: Record, node: Any, args: Arguments) -> Value:
    """Upper or lower triangle: the last two dimensions keep their width."""
    x = args["self"]
    record.freeze_all(x.axes[-2:], "a triangle of a matrix")
    return Value(x.shape, x.axes, x.scale)


@rule("unfold")
def windows(record: Record, node: Any, args: Arguments) -> Value:
    """Sliding windows over one dimension, which keeps its width; positions in a window are a new last dimension."""
    x, dim = args["self"], args["dimension"] % len(args["self"].shape)
    record.atoms.freeze(x.axes[dim], "neighbouring channels are taken together")
    shape = shape_of(node)
    return Value(shape, (*x.axes[:dim], fixed(shape[dim]), *x.axes[dim + 1 :], fixed(shape[-1])), x.scale)


@rule("grid_sampler")
def grid_sampler(record: Record, node: Any, args: Arguments) -> Value:
    """Sampling of each channel at the same positions, whose number stays."""
    x, grid, shape = args["input"], args["grid"], shape_of(node)
    record.freeze_all((*x.axes[2:], *grid.axes), "places in an image")
    record.scales.pin(grid.scale)
    return Value(shape, (*x.axes[:2], *map(fixed, shape[2:])), x.scale)

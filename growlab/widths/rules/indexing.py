"""Rules for indexing, scattering and sorting along a dimension: it keeps its width, the others pass."""

from typing import TYPE_CHECKING, Any

import torch

from growlab.widths.atoms import STAYING, Runs, fixed
from growlab.widths.layout import Role
from growlab.widths.rules.registry import Arguments, Value, first_tensor, keep_full_width, rule, values_in

if TYPE_CHECKING:
    from growlab.widths.tracer import Tracer

_PICKED = "picked by index"


@rule("repeat", "tile", "repeat_interleave")
def repeat(tracer: "Tracer", node: Any, args: Arguments) -> Any:
    """Repetition of whole dimensions or of every entry (`repeat_interleave`).

    Dimensions of size 1 adopt the layout of axes that they meet after the repetition.
    """
    interleaved = tracer.operation(node) == "repeat_interleave"
    if interleaved and (args.get("dim") is None or not isinstance(args.get("repeats"), int)):
        return keep_full_width(tracer, node, args)
    x, shape = args["self"], tracer.shape(node)
    new = len(shape) - len(x.shape)
    axes = [tracer.atoms.of_constants(size) for size in shape]
    for index, (size, axis) in enumerate(zip(x.shape, x.axes, strict=True)):
        if size > 1:
            times = shape[new + index] // size
            axes[new + index] = tracer.atoms.nest(axis, *((1, times) if interleaved else (times, 1)))
    for size, axis in zip(shape, axes, strict=True):
        tracer.note_size(node, size, axis)
    return Value(shape, tuple(axes), x.scale)


@rule("index")
def index(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Indexing by tensors: indexed dimensions (of a table of position biases) keep their width; others (heads) pass."""
    x, picked = args["self"], _picked(node, args["indices"])
    if not picked:
        return keep_full_width(tracer, node, args)
    for axis in _axes_of(args["indices"]):
        tracer.atoms.freeze(axis, "positions to pick")
    for dim in picked:
        tracer.atoms.freeze(_counted_to(tracer, node, x, dim) if len(picked) == 1 else x.axes[dim], _PICKED)
    shape = tracer.shape(node)
    before, behind = x.axes[: picked[0]], x.axes[picked[-1] + 1 :]
    middle = shape[len(before) : len(shape) - len(behind)]
    if x.name is not None:
        for dim, axis in enumerate(x.axes):
            role: Role = "fixed" if dim in picked or x.shape[dim] == 1 else "out"
            if role == "fixed":
                tracer.atoms.freeze(axis, _PICKED)
            tracer.parameter_axis(x, role, axis, dimension=dim)
    return Value(shape, (*before, *map(fixed, middle), *behind), x.scale)


def _picked(node: Any, indices: Any) -> list[int]:
    """Return the indexed dimensions, of which a mask has as many as its own; [] if they are not adjacent."""
    picked, dim = list[int](), 0
    for positions, given in zip(indices, node.args[1], strict=True):
        is_mask = positions is not None and given.meta["val"].dtype in (torch.bool, torch.uint8)
        covered = len(positions.shape) if is_mask else 1
        picked += range(dim, dim + covered) if positions is not None else ()
        dim += covered
    return picked if picked and picked[-1] - picked[0] + 1 == len(picked) else []


def _counted_to(tracer: "Tracer", node: Any, x: Value, dim: int) -> Runs:
    """Return the part of a dimension that must be frozen because constant indices count through it from one end.

    `x[:, [-2]]` picks the same channel whatever precedes it. A parameter is frozen over the whole dimension.
    """
    numbers, size = tracer.numbers(node.args[1][dim]), x.shape[dim]
    if not numbers or x.name is not None or min(numbers) < 0 <= max(numbers):
        return x.axes[dim]
    last = max(numbers) + 1 if min(numbers) >= 0 else size + min(numbers)
    pieces = tracer.atoms.cut(x.axes[dim], [last, size - last])
    return pieces[0] if min(numbers) >= 0 else pieces[1]


def _axes_of(indices: Any) -> list[Any]:
    return [axis for positions in indices if positions is not None for axis in positions.axes]


@rule("index_put", "index_put_")
def index_put(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Assignment by index: the last dimensions of the values are those after the indexed ones."""
    x, values, picked = args["self"], args["values"], _picked(node, args["indices"])
    if not picked or x.name is not None:
        return keep_full_width(tracer, node, args)
    for axis in (*(x.axes[dim] for dim in picked), *_axes_of(args["indices"])):
        tracer.atoms.freeze(axis, _PICKED)
    behind = x.axes[picked[-1] + 1 :] if picked[0] == 0 else ()
    for position, axis in enumerate(reversed(values.axes)):
        if position < len(behind) and tracer.atoms.length(axis) > 1:
            tracer.atoms.unify(behind[-1 - position], axis, "put in the place of others")
        else:
            tracer.atoms.freeze(axis, "put in the place of others")
    if picked[0] != 0:
        for axis in x.axes:
            tracer.atoms.freeze(axis, _PICKED)
    tracer.scales.pin(values.scale)
    tracer.scales.pin(x.scale)
    return Value(x.shape, x.axes, tracer.scales.new(unit=True))


@rule("index_select")
def index_select(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Selection of rows by their indices."""
    x, dim = args["self"], args["dim"] % len(args["self"].shape)
    tracer.atoms.freeze(x.axes[dim], _PICKED)
    shape = tracer.shape(node)
    return Value(shape, (*x.axes[:dim], fixed(shape[dim]), *x.axes[dim + 1 :]), x.scale)


@rule("gather")
def gather(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Gathering, with an index for each entry of the result: other dimensions of input and index are the same."""
    x, dim, positions = args["self"], args["dim"] % len(args["self"].shape), args["index"]
    _same_beside(tracer, dim, x, positions)
    return Value(positions.shape, positions.axes, x.scale)


@rule("index_add", "index_add_", "index_copy", "index_copy_")
def index_add(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Addition or copying of rows by index: other dimensions of both tensors are the same."""
    x, dim, source = args["self"], args["dim"] % len(args["self"].shape), args["source"]
    _same_beside(tracer, dim, x, source)
    return Value(x.shape, x.axes, tracer.scales.union(x.scale, source.scale))


@rule("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_")
def scatter(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Scattering along a dimension: other dimensions of input, index and source are the same."""
    x, dim, positions, source = (
        args["self"],
        args["dim"] % len(args["self"].shape),
        args["index"],
        args.get("src"),
    )
    _same_beside(tracer, dim, x, positions)
    if isinstance(source, Value):
        _same_beside(tracer, dim, x, source)
        tracer.scales.pin(source.scale)
    tracer.scales.pin(x.scale)
    return Value(x.shape, x.axes, tracer.scales.new(unit=True))


def _same_beside(tracer: "Tracer", dim: int, x: Value, other: Value) -> None:
    """Unify all dimensions but `dim` of two tensors where their lengths are equal, and freeze the others."""
    for number, (mine, theirs) in enumerate(zip(x.axes, other.axes, strict=True)):
        if number != dim and x.shape[number] == other.shape[number]:
            tracer.atoms.unify(mine, theirs, f"entries at positions {STAYING}")
        else:
            tracer.atoms.freeze(mine, _PICKED)
            tracer.atoms.freeze(theirs, _PICKED)


@rule(
    *(
        "topk",
        "sort",
        "argsort",
        "cummax",
        "cummin",
        "kthvalue",
        "median",
        "nanmedian",
        "mode",
        "logcumsumexp",
    ),
    *("flip", "roll"),
)
def ordered(tracer: "Tracer", node: Any, args: Arguments) -> Value | list[Value]:
    """Sorting, flipping, rolling and the like along dimensions, which keep their width."""
    x = first_tensor(args)
    over_all = None if tracer.operation(node) in ("median", "nanmedian", "roll") else -1
    dims = args.get("dims", args.get("dim", over_all))
    chosen = [dims] if isinstance(dims, int) else dims or range(len(x.shape))
    places = {dim % len(x.shape) for dim in chosen}
    for dim in places:
        tracer.atoms.freeze(x.axes[dim], f"reordered by {tracer.operation(node)}")
    moved = tracer.operation(node) in ("flip", "roll")
    if not moved:
        tracer.scales.pin(x.scale)
    results = []
    for shape in tracer.shapes(node):
        axes = [fixed(size) if i in places else x.axes[i] for i, size in enumerate(shape)]
        if len(shape) < len(x.shape):
            axes = [axis for i, axis in enumerate(x.axes) if i not in places]
        results.append(Value(shape, tuple(axes), x.scale if moved else tracer.scales.new(unit=True)))
    return results if tracer.has_several_outputs(node) else results[0]


@rule("diff")
def difference(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Differences of neighbours along a dimension, which keeps its width, as do tensors put before or after it."""
    x, dim = args["self"], args.get("dim", -1) % len(args["self"].shape)
    shape = tracer.shape(node)
    for value in values_in(args):
        if value is not x:
            tracer.scales.pin(value.scale)
            for axis in value.axes:
                tracer.atoms.freeze(axis, "neighbours are subtracted")
    tracer.atoms.freeze(x.axes[dim], "neighbours are subtracted")
    return Value(shape, (*x.axes[:dim], fixed(shape[dim]), *x.axes[dim + 1 :]), x.scale)


@rule("argmax", "argmin")
def position_of_extreme(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Position of the maximum or minimum: dimensions that it is taken over keep their width."""
    x, dim, shape = args["self"], args.get("dim"), tracer.shape(node)
    tracer.scales.pin(x.scale)
    reduced = range(len(x.shape)) if dim is None else [dim % len(x.shape)]
    for place in reduced:
        tracer.atoms.freeze(x.axes[place], f"reduced by {tracer.operation(node)}")
    axes = [axis for place, axis in enumerate(x.axes) if place not in reduced]
    if args.get("keepdim"):
        axes = [fixed(1) if place in reduced else axis for place, axis in enumerate(x.axes)]
    return Value(shape, tuple(axes), tracer.scales.new(unit=True))


@rule("tril", "tril_", "triu", "triu_")
def triangle(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Upper or lower triangle: the last two dimensions keep their width."""
    x = args["self"]
    for axis in x.axes[-2:]:
        tracer.atoms.freeze(axis, "a triangle of a matrix")
    return Value(x.shape, x.axes, x.scale)


@rule("unfold")
def windows(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Sliding windows over one dimension, which keeps its width; positions in a window are a new last dimension."""
    x, dim = args["self"], args["dimension"] % len(args["self"].shape)
    tracer.atoms.freeze(x.axes[dim], "neighbouring channels are taken together")
    shape = tracer.shape(node)
    return Value(shape, (*x.axes[:dim], fixed(shape[dim]), *x.axes[dim + 1 :], fixed(shape[-1])), x.scale)


@rule("grid_sampler")
def grid_sampler(tracer: "Tracer", node: Any, args: Arguments) -> Value:
    """Sampling of each channel at the same positions, whose number stays."""
    x, places, shape = args["input"], args["grid"], tracer.shape(node)
    for axis in (*x.axes[2:], *places.axes):
        tracer.atoms.freeze(axis, "places in an image")
    tracer.scales.pin(places.scale)
    return Value(shape, (*x.axes[:2], *map(fixed, shape[2:])), x.scale)

"""Weights of a wider network of the same class that computes what a narrower one computes.

The layout of channels in the tensors comes from tracing the wider network (`growlab.widths.groupss`), the old widths
from the shapes of the old tensors. Each tensor is computed separately, in blocks of rows if it is large. Channels
outside of any statistics (heads, hidden layers of MLPs) are added by a growth method. For streams under layer or RMS
normalisation two ways are exact:

- **Copies** at a whole factor k: each channel k times, its consumers divided by k. Statistics stay the same.
- **Padding** at any factor D'/D, if every reader of the stream is a normalisation with a gain: all writes to it are
multiplied by s = sqrt(D'/D), new channels carry the mean of the old ones (zeros under RMS normalisation), so the
  variance over D' channels is what it was over D; gains are divided by s (average and zero expansion of LEMON, Wang et
  al. 2023, with a scale that keeps the weight of eps). Normalised, new channels are zero, and their consumers are free.
  A normalisation that itself writes to the stream (Gemma 2's behind attention and MLP) keeps its gain.

If the code multiplies embeddings by a function of its width (Gemma: the square root), their tables are divided by the
growth of that number, and the last normalisation before a tied table is multiplied by it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import sqrt
from typing import Any, Literal

import torch
from torch import Tensor

from growlab.base.errors import UserError, as_user_errors
from growlab.growth import HyperCloning, Lemon, Net2Net, PairGrowth
from growlab.growth.method import GrowthContext, GrowthMethod, NewWeights
from growlab.growth.rescale import with_attention_scale
from growlab.widen.checkpoint import Rows, Source
from growlab.widths import Axis, Layer, Part, WidthGraph, grid

#: Growth methods for channels that no statistics run over.
METHODS: Mapping[str, type[GrowthMethod]] = {
    "pairs": PairGrowth,
    "net2net": Net2Net,
    "hypercloning": HyperCloning,
    "lemon": Lemon,
}
#: Method and noise if none are given.
DEFAULT, NOISE_STD = "hypercloning", 0.1
Fill = Literal["copies", "mean", "zero"]
# Numbers of a block of rows.
_BLOCK = 1 << 19


@dataclass(frozen=True)
class Way:
    """A way to widen streams.

    Attributes:
        fill: values of new channels: copies of old ones, their mean, or zeros.
        by_code: growth of the number by which the code multiplies embeddings; None: the root of the stream's growth.
        factors: further factors on tensors, by name.
        by_root: attention divides products by the root of the head dimension.
    """

    fill: Fill
    by_code: float | None = 1.0
    factors: Mapping[str, float] = field(default_factory=dict)
    by_root: bool = True


@dataclass(frozen=True)
class Widening:
    """Computes a wider network's tensors from a narrower one's.

    Attributes:
        graph: layouts of the wider network.
        old: reads the narrower network's tensors by name.
        widths: width of each group in the narrower network.
        seed: of all random draws.
        method: for heads and hidden layers; `noise_std` is that of copies, of streams too.
        writing: paths of normalisations whose outputs are added to a stream.
    """

    graph: WidthGraph
    old: Source
    widths: Mapping[str, int]
    seed: int
    method: GrowthMethod
    writing: Collection[str] = ()

    def ways(self, computed: Collection[float] = ()) -> Iterator[Way]:
        """Yield candidate ways to widen exactly, the likeliest first.

        `computed` are ratios (wider over narrower) of numbers by which the code may multiply embeddings.
        """
        # A normalisation without a bias is mostly one by the root mean square, which zeros leave as it is.
        plain = all(norm.bias is None for norm in self.graph.channel_norms)
        fills: list[Fill] = ["zero", "mean"] if plain else ["mean", "zero"]
        if self.whole:
            fills.insert(0, "copies")
        if not self.streams:
            fills = ["copies"]
        for fill in fills:
            for by_code in (*computed, 1.0, None) if self.streams else (1.0,):
                for by_root in (True, False) if self._root_of_attention else (True,):
                    yield Way(fill, by_code, by_root=by_root)

    @cached_property
    def _root_of_attention(self) -> float | None:
        """Root of the growth of the head dimension; None if it stays."""
        roots = (
            sqrt(one.axis.length(self.graph.full_widths) / one.axis.length(self.widths))
            for one in self.graph.attentions
        )
        return next((root for root in roots if root != 1.0), None)

    @cached_property
    def streams(self) -> list[str]:
        """Groups that become wider and are covered by statistics."""
        full = self.graph.full_widths
        normed = {group for norm in self.graph.channel_norms for group in norm.axis.groups}
        return [group for group in self.graph.groups if group in normed and full[group] != self.widths[group]]

    @property
    def whole(self) -> bool:
        """True if all streams become wider by whole factors."""
        return all(self.graph.full_widths[group] % self.widths[group] == 0 for group in self.streams)

    def tensors(self, way: Way) -> dict[str, Tensor]:
        """Yield all tensors at full width."""
        made = {name: list(self.blocks(name, way)) for name in self.graph.axes}
        return {name: torch.cat(blocks) if blocks[1:] else blocks[0] for name, blocks in made.items()}

    def blocks(self, name: str, way: Way) -> Iterator[Tensor]:
        """Yield a tensor at full width in blocks of rows; float64 if it changes."""
        direction, axes = self.graph.lengths.get(name), self.graph.axes[name]
        if direction is not None and self._changes(direction, way):
            weight = torch.cat([*self.blocks(direction, way)])
            yield torch.norm_except_dim(weight, 2, self.graph.weight_norms[direction][1])
            return
        make = partial(self._made, name, way=way)
        if not axes or axes[0].groups:
            yield make(...)
        else:
            yield from blocks_of(make, self.graph.shape(name, self.graph.full_widths))

    def _made(self, name: str, rows: Rows, way: Way) -> Tensor:
        if not self._changes(name, way):
            return self.old(name, rows)
        old, factor = self._weight(name, rows), way.factors.get(name, 1.0)
        changes = self.graph.changes(name, self.widths, self.graph.full_widths)
        offset = self.graph.offsets.get(name, 0.0)
        tensor = (old.to(torch.complex128) if old.is_complex() else old.double()) + offset
        if changes:
            key = name if rows is ... else f"{name}[{rows.start}:{rows.stop}]"
            graph = self._alone(name, key, tensor)
            between = {**self.graph.full_widths, **{group: self.widths[group] for group in self.streams}}
            context = GrowthContext(graph, {key: tensor}, self.widths, between, self.seed, stage=1)
            grown = self.method.grow(context)
            tensor = (with_attention_scale(context, grown) if way.by_root else grown).tensors[key]
            if isinstance(self.method, HyperCloning) and key in (noise := self.method.noise(context)):
                tensor = tensor + noise[key].to(tensor)
            tensor = self._attending(name, key, tensor, context, way)
            for group in self.streams:
                if group in graph.groups:
                    tensor = self._streamed(name, key, tensor, graph, between, group, way)
                    between = {**between, group: self.graph.full_widths[group]}
        return tensor if factor == 1.0 and offset == 0.0 else tensor * factor - offset

    def _changes(self, name: str, way: Way) -> bool:
        return name in way.factors or self.graph.changes(name, self.widths, self.graph.full_widths)

    def _weight(self, name: str, rows: Rows) -> Tensor:
        """A saved tensor; in place of the direction of a normalised weight, the weight."""
        if name not in self.graph.weight_norms:
            return self.old(name, rows)
        length, dim = self.graph.weight_norms[name]
        return torch._weight_norm(self.old(name, ...).double(), self.old(length, ...).double(), dim)[rows]

    def _attending(self, name: str, key: str, tensor: Tensor, context: GrowthContext, way: Way) -> Tensor:
        """Widen queries and keys: new channels of keys are zero; queries compensate the scale 1 / sqrt(d)."""
        for attention in self.graph.attentions:
            before, after = (attention.axis.length(each) for each in (context.old_widths, context.new_widths))
            if name not in attention.fused or before == after:
                continue
            dim = next(dim for dim, axis in enumerate(self.graph.axes[name]) if axis.role == "out")
            kept = set(context.kept(key)[dim].tolist())
            new = [row for row in attention.key_rows if row not in kept]
            tensor = tensor.clone().index_fill_(dim, torch.tensor(new, dtype=torch.long), 0.0)
            if way.by_root:
                queries = torch.tensor(attention.query_rows)
                tensor.index_copy_(dim, queries, tensor.index_select(dim, queries) * sqrt(after / before))
        return tensor

    def _alone(self, name: str, key: str, block: Tensor) -> WidthGraph:
        """Restrict the graph to one tensor, or a block of its rows, to grow it separately."""
        axes = self.graph.axes[name]
        if key != name:
            axes = (Axis((Part(None, len(block)),), axes[0].role), *axes[1:])
        groups = {group for axis in axes for group in axis.groups}
        return replace(
            self.graph,
            axes={key: axes},
            groups={group: one for group, one in self.graph.groups.items() if group in groups},
            layers=tuple(replace(x, weight=key) if x.weight == name else x for x in self._layers.get(name, ())),
            attentions=tuple(replace(x, queries=(key,)) for x in self.graph.attentions if name in x.queries),
        )

    @cached_property
    def _layers(self) -> dict[str, list[Layer]]:
        found: dict[str, list[Layer]] = {}
        for layer in self.graph.layers:
            for name in {layer.weight, layer.bias, layer.offset, *layer.emitters} - {None}:
                found.setdefault(str(name), []).append(layer)
        return found

    def _streamed(
        self, name: str, key: str, tensor: Tensor, graph: WidthGraph, before: Mapping[str, int], group: str, way: Way
    ) -> Tensor:
        after = {**before, group: self.graph.full_widths[group]}
        scale = sqrt(after[group] / before[group])
        by_code = scale if way.by_code is None else way.by_code
        context = GrowthContext(graph, {key: tensor}, before, after, self.seed, stage=2)
        table = self._is_table(name)
        # In front of a tied table gain and bias are what consumes it.
        of_norm = self._of_a_norm(name, group)
        in_front = of_norm is not None and graph.axes[key][0].role == "in"
        if way.fill == "copies":
            cloning = HyperCloning(noise_std=self.method.noise_std)
            copied = cloning.grow(context).tensors[key]
            if key in (noise := cloning.noise(context)):
                copied = copied + noise[key].to(copied)
            return copied / by_code if table else copied * by_code if in_front else copied
        if of_norm is not None:
            return self._normed(name, key, tensor, context, of_norm, scale, scale / by_code if in_front else 1.0)
        kept = context.kept(key)
        reads = any(axis.role == "in" and group in axis.groups for axis in graph.axes[key])
        # What reads a stream is free where its new channels are zero.
        new = NewWeights().draw(context, key).to(tensor) if reads else tensor.new_zeros(context.new_shape(key))
        writes = [dim for dim, axis in enumerate(graph.axes[key]) if axis.role == "out" and group in axis.groups]
        factor = 1.0 if not writes else scale / by_code if table else scale
        new[grid(kept, new.device)] = tensor * factor
        for dim in writes:
            if len(graph.axes[key][dim].parts) > 1:
                raise UserError(f"channels of {group} share {name}; give --parts without stream.")
            beyond = torch.ones(new.shape[dim], dtype=torch.bool).index_fill_(0, kept[dim], False)
            rest = new.index_select(dim, kept[dim]).mean(dim) if way.fill == "mean" else 0.0
            new.movedim(dim, 0)[beyond] = rest
        return new

    def _normed(
        self, name: str, key: str, old: Tensor, context: GrowthContext, kind: str, scale: float, of_table: float
    ) -> Tensor:
        if name.rpartition(".")[0] in self.writing:
            # Normalised, what it reads is what it was: its sum with the stream is multiplied by gain and bias.
            factor = 1.0 / scale if kind == "bias" else 1.0
        else:
            factor = scale * of_table if kind == "gain" else of_table
        fresh = 0.0 if kind == "bias" else float((old / factor).mean())
        new = torch.full(context.new_shape(key), fresh, dtype=old.dtype)
        new[context.kept(key)[0]] = old / factor
        return new

    def _is_table(self, name: str) -> bool:
        roles = [axis.role for axis in self.graph.axes[name]]
        return roles == ["fixed", "out"] and all(x.weight != name for x in self._layers.get(name, ()))

    def _of_a_norm(self, name: str, group: str) -> str | None:
        """Return "gain" or "bias" if the tensor is that of a normalisation of the group's channels, else None."""
        path, _, own = name.rpartition(".")
        if not any(norm.name == path and group in norm.axis.groups for norm in self.graph.channel_norms):
            return None
        return "bias" if own.endswith("bias") else "gain"


def method_of(name: str, noise_std: float) -> GrowthMethod:
    """Create the growth method for heads and hidden layers; raise a UserError for other names or negative noise."""
    if name not in METHODS:
        raise UserError(f"there is no method {name!r} for --method; there are {', '.join(METHODS)}.")
    with as_user_errors():
        return METHODS[name](noise_std=noise_std)


def blocks_of(make: Callable[[Rows], Tensor], shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Split a tensor of this shape into blocks of rows if it is large."""
    if torch.Size(shape).numel() <= _BLOCK:
        yield make(...)
        return
    step = max(1, _BLOCK // torch.Size(shape[1:]).numel())
    for start in range(0, shape[0], step):
        yield make(slice(start, min(start + step, shape[0])))


def with_unused(graph: WidthGraph, shapes: Mapping[str, tuple[int, ...]], full: Mapping[str, Any]) -> WidthGraph:
    """Add tensors that the example's forward does not use and that change in one dimension as a stream does.

    Mask tokens, for which trained models keep a place, are such. Arguments as in `read_off`.
    """
    widths = graph.widths_of({name: shapes[name] for name in graph.axes})
    widths = {name: widths.get(name, group.full_width) for name, group in graph.groups.items()}
    streams = {(x.axis.length(widths), x.axis.length(graph.full_widths)): x.axis.parts for x in graph.channel_norms}
    axes = dict(graph.axes)
    for name, tensor in full.items():
        sizes = [*zip(shapes.get(name, ()), tensor.shape, strict=False)]
        changing = [pair for pair in sizes if pair[0] != pair[1]]
        if name not in axes and len(changing) == 1 and changing[0] in streams:
            channels, fixed = Axis(streams[changing[0]], "out"), (Axis((Part(None, n),), "fixed") for _, n in sizes)
            axes[name] = tuple(channels if pair in changing else axis for pair, axis in zip(sizes, fixed, strict=True))
    return replace(graph, axes=axes)


def read_off(graph: WidthGraph, shapes: Mapping[str, tuple[int, ...]], full: Mapping[str, Any]) -> dict[str, int]:
    """Infer the width of each group from the shapes of a narrower network's tensors, by name.

    `full` has the wider network's tensors.

    Raises:
        UserError: no widths explain a tensor's shape.
    """
    widths = graph.widths_of({name: shapes[name] for name in graph.axes})
    widths = {name: widths.get(name, group.full_width) for name, group in graph.groups.items()}
    misfits = [
        name
        for name, tensor in full.items()
        if name in shapes
        and tuple(shapes[name]) != (graph.shape(name, widths) if name in graph.axes else tuple(tensor.shape))
    ]
    known = {name: graph.fixed.get(name) or graph.fixed.get(name.rpartition(".")[0]) for name in misfits}
    # Tensors that become as wide as another one with a reason have the same.
    for name in sorted(misfits, key=lambda name: known[name] is None):
        raise UserError(
            f"{name.removeprefix('network.')} is {list(shapes[name])} and would be {list(full[name].shape)}, which "
            f"cannot be exact ({known[name] or 'growlab has no rule that makes it wider'}); give --parts mlp, or "
            "leave --width out."
        )
    return widths

"""Weights of a wider network that computes the same as a narrower network of its class.

The layout of channels in the tensors comes from tracing the wider network (`growlab.widths.groups`), the old widths
from the shapes of the old tensors. Each tensor is computed separately, in blocks of rows if it is large. Channels
outside of any statistics (heads, hidden layers of MLPs) are added by a growth method. For streams under layer or RMS
normalisation, two ways are exact:

- **Copies** at a whole factor k: every channel occurs k times, and its consumers are divided by k. Statistics stay.
- **Padding** at any factor D'/D, if only normalisations with a gain read the stream: all writes to it are multiplied by
  s = sqrt(D'/D), and new channels have the mean of the old channels (zeros under RMS normalisation), so the variance
  over D' channels is that over D channels before. Gains are divided by s (average and zero expansion of LEMON, Wang et
  al. 2023, with a scale that keeps the weight of eps). New channels are zero after normalisation, so their consumers
  are free. A normalisation that itself writes to the stream (Gemma 2's after attention and MLP) keeps its gain.

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
#: Default method and noise.
DEFAULT, NOISE_STD = "hypercloning", 0.1
Fill = Literal["copies", "mean", "zero"]
# Most entries of a block of rows.
_BLOCK = 1 << 19


@dataclass(frozen=True)
class Way:
    """A way to widen streams.

    Attributes:
        fill: values of new channels: copies of old channels, their mean, or zeros.
        by_code: growth of the number by which the code multiplies embeddings; None: the root of the stream's growth.
        factors: further factors on tensors, by name.
        by_root: True if attention divides products by the root of the head dimension.
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
        seed: seed of all random draws.
        method: growth method for heads and hidden layers; its `noise_std` also separates copies in streams.
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
        # Normalisations without a bias are mostly RMS normalisations, whose statistics zeros do not change.
        plain = all(norm.bias is None for norm in self.graph.channel_norms)
        padding: list[Fill] = ["zero", "mean"] if plain else ["mean", "zero"]
        copies: list[Fill] = ["copies"] if self.whole else []
        for fill in [*copies, *padding] if self.streams else copies:
            for by_code in (*computed, 1.0, None) if self.streams else (1.0,):
                for by_root in (True, False) if self._root_of_attention else (True,):
                    yield Way(fill, by_code, by_root=by_root)

    @cached_property
    def _root_of_attention(self) -> float | None:
        """Root of the growth of the head dimension; None if it stays."""
        axes = (attention.axis for attention in self.graph.attentions)
        roots = (sqrt(axis.length(self.graph.full_widths) / axis.length(self.widths)) for axis in axes)
        return next((root for root in roots if root != 1.0), None)

    @cached_property
    def streams(self) -> list[str]:
        """Groups that become wider and that normalisations take statistics over."""
        full = self.graph.full_widths
        normed = {group for norm in self.graph.channel_norms for group in norm.axis.groups}
        return [group for group in self.graph.groups if group in normed and full[group] != self.widths[group]]

    @property
    def whole(self) -> bool:
        """True if all streams become wider by whole factors."""
        return all(self.graph.full_widths[group] % self.widths[group] == 0 for group in self.streams)

    def tensors(self, way: Way) -> dict[str, Tensor]:
        """Compute all tensors at full width."""
        tensors = {name: list(self.blocks(name, way)) for name in self.graph.axes}
        return {name: torch.cat(blocks) if blocks[1:] else blocks[0] for name, blocks in tensors.items()}

    def blocks(self, name: str, way: Way) -> Iterator[Tensor]:
        """Yield a tensor at full width in blocks of rows, in float64 if it changes."""
        direction, axes = self.graph.lengths.get(name), self.graph.axes[name]
        if direction is not None and self._changes(direction, way):
            weight = torch.cat([*self.blocks(direction, way)])
            yield torch.norm_except_dim(weight, 2, self.graph.weight_norms[direction][1])
            return
        make = partial(self._compute, name, way=way)
        if not axes or axes[0].groups:
            yield make(...)
        else:
            yield from blocks_of(make, self.graph.shape(name, self.graph.full_widths))

    def _compute(self, name: str, rows: Rows, way: Way) -> Tensor:
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
        """Read a saved tensor; for the direction of a weight normalisation, the weight itself."""
        if name not in self.graph.weight_norms:
            return self.old(name, rows)
        length, dim = self.graph.weight_norms[name]
        return torch._weight_norm(self.old(name, ...).double(), self.old(length, ...).double(), dim)[rows]

    def _attending(self, name: str, key: str, tensor: Tensor, context: GrowthContext, way: Way) -> Tensor:
        """Widen fused queries and keys: new channels of keys are zero; queries compensate for the scale 1 / sqrt(d)."""
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
        """Restrict the graph to one tensor, or a block of its rows, which then grows separately."""
        axes = self.graph.axes[name]
        if key != name:
            axes = (Axis((Part(None, len(block)),), axes[0].role), *axes[1:])
        groups = {group for axis in axes for group in axis.groups}
        return replace(
            self.graph,
            axes={key: axes},
            groups={name: group for name, group in self.graph.groups.items() if name in groups},
            layers=tuple(replace(x, weight=key) if x.weight == name else x for x in self._layers.get(name, ())),
            attentions=tuple(replace(x, queries=(key,)) for x in self.graph.attentions if name in x.queries),
        )

    @cached_property
    def _layers(self) -> dict[str, list[Layer]]:
        """Layers by the names of their tensors."""
        layers: dict[str, list[Layer]] = {}
        for layer in self.graph.layers:
            for name in {layer.weight, layer.bias, layer.offset, *layer.emitters} - {None}:
                layers.setdefault(str(name), []).append(layer)
        return layers

    def _streamed(
        self, name: str, key: str, tensor: Tensor, graph: WidthGraph, before: Mapping[str, int], group: str, way: Way
    ) -> Tensor:
        after = {**before, group: self.graph.full_widths[group]}
        scale = sqrt(after[group] / before[group])
        by_code = scale if way.by_code is None else way.by_code
        context = GrowthContext(graph, {key: tensor}, before, after, self.seed, stage=2)
        table = self._is_table(name)
        kind = self._norm_parameter(name, group)
        # In front of a tied table, gain and bias consume the stream.
        in_front = kind is not None and graph.axes[key][0].role == "in"
        if way.fill == "copies":
            cloning = HyperCloning(noise_std=self.method.noise_std)
            copied = cloning.grow(context).tensors[key]
            if key in (noise := cloning.noise(context)):
                copied = copied + noise[key].to(copied)
            return copied / by_code if table else copied * by_code if in_front else copied
        if kind is not None:
            return self._normed(name, key, tensor, context, kind, scale, scale / by_code if in_front else 1.0)
        kept = context.kept(key)
        reads = any(axis.role == "in" and group in axis.groups for axis in graph.axes[key])
        # Weights that read the new channels are free, because these are zero.
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
            # Its input is multiplied by s and its statistics stay, so the same gain multiplies its output by s.
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

    def _norm_parameter(self, name: str, group: str) -> str | None:
        """Return "gain" or "bias" if the tensor belongs to a normalisation over the group's channels, else None."""
        path, _, parameter = name.rpartition(".")
        if not any(norm.name == path and group in norm.axis.groups for norm in self.graph.channel_norms):
            return None
        return "bias" if parameter.endswith("bias") else "gain"


def method_of(name: str, noise_std: float) -> GrowthMethod:
    """Create the growth method for heads and hidden layers; raise a UserError for other names or negative noise."""
    if name not in METHODS:
        raise UserError(f"there is no method {name!r} for --method; there are {', '.join(METHODS)}.")
    with as_user_errors():
        return METHODS[name](noise_std=noise_std)


def blocks_of(make: Callable[[Rows], Tensor], shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Yield a tensor of this shape, in blocks of rows if it is large; `make` returns given rows."""
    if torch.Size(shape).numel() <= _BLOCK:
        yield make(...)
        return
    step = max(1, _BLOCK // torch.Size(shape[1:]).numel())
    for start in range(0, shape[0], step):
        yield make(slice(start, min(start + step, shape[0])))


def with_unused(graph: WidthGraph, shapes: Mapping[str, tuple[int, ...]], full: Mapping[str, Any]) -> WidthGraph:
    """Add tensors that the forward does not use but that have one dimension with the sizes of a stream, such as masks.

    Arguments as in `read_off`.
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
    reasons = {name: graph.fixed.get(name) or graph.fixed.get(name.rpartition(".")[0]) for name in misfits}
    # Prefer a tensor with a reason, which explains the others too.
    for name in sorted(misfits, key=lambda name: reasons[name] is None):
        raise UserError(
            f"{name.removeprefix('network.')} is {list(shapes[name])} and would be {list(full[name].shape)}, which "
            f"cannot be exact ({reasons[name] or 'growlab has no rule that makes it wider'}); give --parts mlp, or "
            "leave --width out."
        )
    return widths

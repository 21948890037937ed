"""Weights of a wider network of the same class that computes what a narrower one computes.

Where channels lie in the tensors is read off the wider network's own program (`growlab.widths.layouts`), and the old
widths off the shapes of the old tensors. Channels that no statistics run over (heads, hidden layers of MLPs) are added
by a growth method. Streams under layer or RMS normalisation end as plain ones, so two things are exact:

- **Copies** at a whole factor k: each channel k times, its consumers divided by k. Statistics stay what they are.
- **Padding** at any factor D'/D, where every reader of the stream is a normalisation with a gain: all that writes to it
  is multiplied by s = sqrt(D'/D), new channels carry the mean of the old ones (zeros under RMS normalisation), so the
  variance over D' channels is what it was over D; gains are divided by s (average and zero expansion of LEMON, Wang et
  al. 2023, with a scale so that eps counts alike). Normalised, new channels are zero, and their consumers are free.
  Where the code multiplies embeddings by the root of its width (Gemma), their tables stay as they are.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from growlab.errors import UserError
from growlab.growth import HyperCloning, Lemon, Net2Net, PairGrowth
from growlab.growth.attention_scale import with_attention_scale
from growlab.growth.method import Expansion, GrowthMethod, NewWeights
from growlab.growth.offsets import as_applied, as_kept
from growlab.widths import WidthGraph, grid

#: Growth methods for channels that no statistics run over.
METHODS: Mapping[str, type[GrowthMethod]] = {
    "pairs": PairGrowth,
    "net2net": Net2Net,
    "hypercloning": HyperCloning,
    "lemon": Lemon,
}
Fill = Literal["mean", "zero"]


@dataclass(frozen=True)
class Widening:
    """A narrower network's tensors and where their channels lie.

    Attributes:
        graph: layouts of the wider network.
        old: the narrower one's tensors by name as its forward applies them, in float64.
        widths: width of each group in it.
        seed: of everything that is drawn.
    """

    graph: WidthGraph
    old: Mapping[str, Tensor]
    widths: Mapping[str, int]
    seed: int

    @classmethod
    def of(
        cls, graph: WidthGraph, kept: Mapping[str, Tensor], widths: Mapping[str, int], seed: int
    ) -> "Widening":
        """Of tensors as the narrower network keeps them."""
        return cls(graph, as_applied(graph, kept), widths, seed)

    def ways(self, computed: Collection[float] = ()) -> Iterator[dict[str, Tensor]]:
        """Tensors at full width as a network keeps them, by each way in which streams may become wider.

        Args:
            computed: numbers of the code's own that embeddings may be multiplied by, the wider network's over the
                narrower one's.
        """
        if self.whole:
            yield as_kept(self.graph, self._copies())
        for by_code in (1.0, None, *computed):
            for fill in get_args(Fill):
                yield as_kept(self.graph, self._all_padded(fill, by_code))

    @property
    def streams(self) -> list[str]:
        """Groups that become wider and that statistics run over."""
        full = self.graph.full_widths
        normed = {group for norm in self.graph.channel_norms for group in norm.axis.groups}
        return [group for group in self.graph.groups if group in normed and full[group] != self.widths[group]]

    @property
    def whole(self) -> bool:
        """Whether all streams become wider by whole factors."""
        return all(self.graph.full_widths[group] % self.widths[group] == 0 for group in self.streams)

    def heads_and_hidden(self, method: GrowthMethod) -> "Widening":
        """The same with all wider but the streams."""
        widths = {**self.graph.full_widths, **{group: self.widths[group] for group in self.streams}}
        expansion = self._expansion(widths, stage=1)
        growth = with_attention_scale(expansion, method.grow(expansion))
        return replace(self, old=dict(growth.tensors), widths=widths)

    def _copies(self) -> dict[str, Tensor]:
        return dict(Net2Net().grow(self._expansion(self.graph.full_widths, stage=2)).tensors)

    def _all_padded(self, fill: Fill, by_code: float | None) -> dict[str, Tensor]:
        """Tensors at full width, streams by padding.

        Args:
            fill: what new channels carry.
            by_code: factor by which the code multiplies embeddings more than it did; None: the stream's own.
        """
        padding = self
        for group in self.streams:
            widths = {**padding.widths, group: self.graph.full_widths[group]}
            tensors = {name: padding._padded(name, group, fill, by_code, widths) for name in padding.old}
            padding = replace(padding, old=tensors, widths=widths)
        return dict(padding.old)

    def _expansion(self, widths: Mapping[str, int], stage: int) -> Expansion:
        return Expansion(self.graph, self.old, self.widths, widths, self.seed, stage)

    def _padded(
        self, name: str, group: str, fill: Fill, by_code: float | None, widths: Mapping[str, int]
    ) -> Tensor:
        old, axes = self.old[name], self.graph.axes[name]
        places = [(dim, axis) for dim, axis in enumerate(axes) if group in axis.groups]
        if not places:
            return old
        expansion = self._expansion(widths, stage=2)
        scale, kept = sqrt(widths[group] / self.widths[group]), expansion.kept(name)
        table = 1.0 if by_code is None else scale / by_code
        norm_tensor = self._of_a_norm(name, group)
        if norm_tensor is not None:
            # In front of a tied table gain and bias are what consumes it.
            consumes = axes[0].role == "in"
            of_table = table if consumes else 1.0
            factor = {"gain": scale * of_table, "bias": of_table}[norm_tensor]
            fresh = 0.0 if norm_tensor == "bias" else float((old / factor).mean())
            new = torch.full(expansion.new_shape(name), fresh, dtype=old.dtype)
            new[kept[0]] = old / factor
            return new
        new = NewWeights().draw(expansion, name).to(old)
        writes = [dim for dim, axis in places if axis.role == "out"]
        factor = 1.0 if not writes else table if self._is_table(name) else scale
        new[grid(kept, new.device)] = old * factor
        for dim in writes:
            if len(axes[dim].parts) > 1:
                raise UserError(
                    f"channels of {group} lie beside others in {name}; give --parts without stream."
                )
            rows = new.index_select(dim, kept[dim])
            rest = rows.mean(dim, keepdim=True) if fill == "mean" else torch.zeros(1, dtype=new.dtype)
            new = rest.expand_as(new).clone().index_copy(dim, kept[dim], rows)
        return new

    def _is_table(self, name: str) -> bool:
        """Whether a tensor is an embedding's table."""
        roles = [axis.role for axis in self.graph.axes[name]]
        return roles == ["fixed", "out"] and all(layer.weight != name for layer in self.graph.layers)

    def _of_a_norm(self, name: str, group: str) -> str | None:
        """Whether a tensor is the gain or the bias of a normalisation of the group's channels."""
        path, _, own = name.rpartition(".")
        if not any(norm.name == path and group in norm.axis.groups for norm in self.graph.channel_norms):
            return None
        return "bias" if own.endswith("bias") else "gain"


def read_off(graph: WidthGraph, network: nn.Module, old: Mapping[str, Tensor]) -> dict[str, int]:
    """Width of each group, from the shapes of a narrower network's tensors.

    Args:
        graph: layouts of the wider network.
        network: the wider network.
        old: tensors of the narrower one by name.

    Raises:
        UserError: a tensor has a shape that no widths give.
    """
    widths = graph.widths_of({name: old[name].shape for name in graph.axes})
    widths = {name: widths.get(name, group.full_width) for name, group in graph.groups.items()}
    for name, tensor in network.state_dict().items():
        wanted = graph.shape(name, widths) if name in graph.axes else tuple(tensor.shape)
        if name in old and tuple(old[name].shape) != wanted:
            reason = graph.fixed.get(name.rpartition(".")[0], "growlab has no rule that makes it wider")
            raise UserError(
                f"{name.removeprefix('network.')} is {list(old[name].shape)} and would be {list(tensor.shape)}, "
                f"which cannot be exact ({reason}); give --parts mlp, or leave --width out."
            )
    return widths

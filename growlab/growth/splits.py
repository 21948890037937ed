"""Split neurons in two, and differentiate by the distance of the halves: for Splitting and FireFly."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from growlab.growth.data_driven import embedded
from growlab.growth.fans import Fans
from growlab.growth.method import Expansion
from growlab.widths import Carry


@dataclass(frozen=True)
class Split:
    """Network in which some channels have a copy behind all others; the two share the outgoing weights equally.

    Tensors before the split are called plain here. Where a plain row of a split channel moves by +d in the original and
    by -d in the copy, all such moves together are a tensor of the plain shape, `moves`.

    Attributes:
        plain: an event whose `old` are the plain tensors, and whose new widths are those with copies.
        copied: the channels that have a copy, by group, in the order of their copies.
    """

    plain: Expansion
    copied: Mapping[str, Tensor]

    @classmethod
    def of(cls, expansion: Expansion, tensors: Mapping[str, Tensor], copied: Mapping[str, Tensor]) -> "Split":
        """Split channels of a network.

        Args:
            expansion: an event whose new widths are those of the tensors.
            tensors: tensors of the network, by name.
            copied: channels that get a copy, by group.
        """
        before = expansion.new_widths
        after = {group: width + len(copied.get(group, ())) for group, width in before.items()}
        return cls(replace(expansion, old=tensors, old_widths=before, new_widths=after), copied)

    @property
    def widths(self) -> Mapping[str, int]:
        """Widths with copies."""
        return self.plain.new_widths

    @cached_property
    def sources(self) -> dict[str, Tensor]:
        """Source channel of each channel (itself, or the one that it copies), by group."""
        before = self.plain.old_widths
        return {
            group: torch.cat([torch.arange(before[group]), channels])
            for group, channels in self.copied.items()
        }

    def tensors(self, moves: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return every tensor of the split network; without moves it computes the plain network's function."""
        spread = {name: embedded(self.plain, name, self.sources) for name in self.plain.old}
        for name, move in self.signed(moves or {}).items():
            spread[name] = spread[name] + move
        return spread

    def signed(self, moves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return moves as changes of the split network's tensors: +d at originals, -d at copies."""
        return {name: self._spread(name, move, signed=True) for name, move in moves.items()}

    def by_moves(self, gradients: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
        """Convert gradients by the split network's tensors to gradients by moves."""
        return {name: self._gathered(name, gradients[name], signed=True) for name in names}

    def by_plain(self, gradients: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
        """Convert gradients by the split network's tensors to gradients by the plain tensors."""
        return {name: self._gathered(name, gradients[name], signed=False) for name in names}

    def _spread(self, name: str, plain: Tensor, signed: bool) -> Tensor:
        spread = embedded(replace(self.plain, old={name: plain}), name, self.sources)
        if not signed:
            return spread
        for dim, axis in enumerate(self.plain.axes(name)):
            if axis.role != "out":
                continue
            signs = {}
            for group in axis.groups:
                signs[group] = torch.zeros(self.widths[group], dtype=torch.double)
                if group in self.copied:
                    signs[group][self.copied[group]] = 1.0
                    signs[group][self.plain.old_widths[group] :] = -1.0
            sign = axis.spread(signs, self.widths, fixed=0.0).to(spread)
            spread = spread * sign.view(-1, *[1] * (spread.dim() - dim - 1))
        return spread

    def _gathered(self, name: str, gradient: Tensor, signed: bool) -> Tensor:
        # The adjoint of `_spread`, which is linear.
        with torch.enable_grad():
            plain = torch.zeros_like(self.plain.old[name], requires_grad=True)
            total = (self._spread(name, plain, signed) * gradient.to(plain)).sum()
            (found,) = torch.autograd.grad(total, plain)
        return found

    def carry(self, old_widths: Mapping[str, int]) -> Carry:
        """Return the `Carry` of gradients from a network with `old_widths`, the first channels of the plain one.

        Copies share the gradient of their original equally; new channels in between have no source.
        """
        sources, rows = {}, {}
        for group, source in self.sources.items():
            sources[group] = torch.where(source < old_widths[group], source, -1)
            counts = torch.bincount(source)
            rows[group] = 1.0 / counts[source].double()
        return Carry(sources, rows)


def names_of(groups: Sequence[Fans], *sides: str) -> list[str]:
    """Names of the groups' incoming ("into") or outgoing ("out") weights, without duplicates."""
    return list(dict.fromkeys(slot.name for fans in groups for side in sides for slot in getattr(fans, side)))


def lengths(rows: Tensor) -> Tensor:
    """Euclidean norm of each row, [N]."""
    return torch.linalg.vector_norm(rows, dim=1)


def unit(rows: Tensor) -> Tensor:
    """Normalise rows to length 1; zero rows stay zero."""
    return rows / lengths(rows).clamp(min=torch.finfo(rows.dtype).tiny)[:, None]


def directions(expansion: Expansion, name: str, like: Tensor) -> Tensor:
    """Draw random rows of length 1, the same on every rank and in a resumed run."""
    drawn = torch.randn(like.shape, generator=expansion.generator(name), dtype=torch.float32)
    return unit(drawn.to(like))

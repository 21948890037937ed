"""Carry gradients and optimizer moments over to new widths; change the basis of a group's channels."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from growlab.widths.groups import Axis, WidthGraph
from growlab.widths.resize import grid, resized, tensors_of


@dataclass(frozen=True)
class Carry:
    """Rule that computes the gradient of a grown network from the gradient g of the network before.

        g'[i, j, ...] = every * scale * rows[i] * g[sources(i), sources(j), ...]

    First moments follow the same rule, second moments with squared factors. Derivation: if a method writes the old
    parameters as p = p(p') with the loss unchanged, the gradient follows by the chain rule. Entries that the old
    network does not determine are zero.

    By default old entries keep their gradient, and new ones have none. That is exact for methods that preserve the
    function and do not change old entries.

    Attributes:
        sources: for each group, the old channel whose gradient each channel takes over, or -1 for none, int64 [new
            width]; a missing group keeps its first channels, and new ones have no source.
        rows: for each group, the factor on entries that produce a channel, [new width]; 1 for a missing group.
        scales: by name of a tensor, a factor on its old gradient: a number, or a tensor that broadcasts with it.
        bases: for each group whose basis was rotated, the matrix from old to new channels, [new width, old width],
            with orthonormal rows or rows of zeros; such a group needs no source. Gradients rotate with it. Second
            moments are not determined by the old ones alone: they are computed with the squared entries of the
            matrix, as if the gradients of different channels were uncorrelated. New channels, which have no gradient
            yet, take the mean of the old second moments, because 0 would make their first steps too long.
        every: a factor on the gradients of all parameters, including those that the event does not change.
    """

    sources: Mapping[str, Tensor] = field(default_factory=dict)
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    scales: Mapping[str, float | Tensor] = field(default_factory=dict)
    bases: Mapping[str, Tensor] = field(default_factory=dict)
    every: float = 1.0

    def carried(
        self,
        old: Tensor,
        name: str,
        graph: WidthGraph,
        widths_before: Mapping[str, int],
        widths_after: Mapping[str, int],
        power: int = 1,
    ) -> Tensor:
        """Carry a gradient or a moment of a parameter over to the new widths.

        Args:
            old: a gradient, or a moment of it.
            name: name of the parameter.
            graph: the network's width graph.
            widths_before: width of each group before the event.
            widths_after: width of each group after it.
            power: how the tensor scales with the gradient: 1, 2 for second moments, 0 for neither.
        """
        tensor = old if self.every == 1.0 else old * self.every**power
        if name in self.scales and power:
            scale = self.scales[name]
            scale = scale.to(old) if isinstance(scale, Tensor) else scale
            tensor = tensor * scale**power
        axes = graph.axes[name]
        if not self.bases and self.sources.keys().isdisjoint(group for axis in axes for group in axis.groups):
            result = resized(tensor, axes, widths_before, widths_after)
            return self._with_rows(result, axes, widths_after, power)
        if self.bases:
            maps = {group: _moment_map(basis, power) for group, basis in self.bases.items()}
            tensor = applied(tensor, axes, maps, widths_before)
            widths_before = {**widths_before, **{group: len(basis) for group, basis in self.bases.items()}}
        positions = []
        for axis in axes:
            maps = {group: self.source(group, widths_before, widths_after) for group in axis.groups}
            positions.append(axis.lift(maps, widths_after, widths_before))
        result = tensor[grid([p.clamp(min=0) for p in positions], tensor.device)].clone()
        for dim, position in enumerate(positions):
            if not bool((position >= 0).all()):
                result = result * (position >= 0).to(result).view(-1, *[1] * (result.dim() - dim - 1))
        return self._with_rows(result, axes, widths_after, power)

    def _with_rows(self, tensor: Tensor, axes: tuple[Axis, ...], widths_after: Mapping[str, int], power: int) -> Tensor:
        """Multiply entries that produce channels by the factors of `rows`."""
        for dim, axis in enumerate(axes):
            if axis.role == "out" and power and not self.rows.keys().isdisjoint(axis.groups):
                rows = {g: self.rows.get(g, torch.ones(widths_after[g])).double() for g in axis.groups}
                factor = axis.spread(rows, widths_after, fixed=1.0) ** power
                tensor = tensor * factor.to(tensor).view(-1, *[1] * (tensor.dim() - dim - 1))
        return tensor

    def extended(self, widths_after: Mapping[str, int]) -> "Carry":
        """Return the rule extended to channels that were appended since, which have no gradient.

        Args:
            widths_after: width of each group including them.
        """

        def padded(tensors: Mapping[str, Tensor], fill: float) -> dict[str, Tensor]:
            new = {group: (widths_after[group] - len(x), *x.shape[1:]) for group, x in tensors.items()}
            return {group: torch.cat([x, x.new_full(new[group], fill)]) for group, x in tensors.items()}

        return Carry(padded(self.sources, -1), padded(self.rows, 1.0), self.scales, padded(self.bases, 0.0), self.every)

    def source(self, group: str, before: Mapping[str, int], after: Mapping[str, int]) -> Tensor:
        """Return the old channel whose gradient each channel of a group takes over, or -1: int64 [new width]."""
        if group in self.sources:
            return self.sources[group]
        channels = torch.arange(after[group])
        return torch.where(channels < before[group], channels, -1)


def _moment_map(basis: Tensor, power: int) -> Tensor:
    """Return the matrix that a change of basis applies to first moments (1), second moments (2) or other state (0)."""
    if power == 1:
        return basis
    squares = basis.square()
    empty = squares.sum(1) == 0
    squares[empty] = 1.0 / basis.shape[1] if power == 2 else 0.0
    return squares


def applied(
    tensor: Tensor,
    axes: tuple[Axis, ...],
    maps: Mapping[str, Tensor],
    widths: Mapping[str, int],
    consuming: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Apply a linear map to the channels on every axis of a tensor, in float64.

    An orthogonal map R of a group gives R W for a weight that produces the channels, W R^T for a weight that consumes
    them, and R b for a bias. Together these preserve the function if everything between them commutes with R.

    Args:
        tensor: a parameter, a buffer, a gradient or a first moment.
        axes: its axes.
        maps: for each group that changes, [new width, width]; it may also drop channels.
        widths: width of each group now.
        consuming: maps for axes that consume the channels; None: the same as `maps`.

    Returns:
        The tensor at the new widths in its dtype; the same object if no axis has such a group.
    """
    result = tensor
    for dim, axis in enumerate(axes):
        chosen = consuming if consuming is not None and axis.role == "in" else maps
        if not any(group in chosen for group in axis.groups):
            continue
        pieces = list(result.double().split([part.length(widths) for part in axis.parts], dim))
        for index, part in enumerate(axis.parts):
            if part.group is not None and part.group in chosen:
                matrix = chosen[part.group].to(pieces[index])
                split = pieces[index].unflatten(dim, (part.outer, matrix.shape[1], part.inner))
                # A single matrix product, where `matrix @ ...` would compute one for every other position.
                product = torch.tensordot(split, matrix, dims=([dim + 1], [1])).movedim(-1, dim + 1)
                pieces[index] = product.flatten(dim, dim + 2)
        result = torch.cat(pieces, dim)
    return result.to(tensor.dtype).contiguous() if result is not tensor else tensor


def rotate(
    model: nn.Module, graph: WidthGraph, rotations: Mapping[str, Tensor], widths: Mapping[str, int] | None = None
) -> None:
    """Rotate the channels of isotropic groups in place; parameters stay the same objects, outputs do not change.

    Args:
        model: the network that `graph` was traced from.
        graph: its width graph, traced with `follow_norms`.
        rotations: an orthogonal matrix R [width, width] for each group; channels x become R x.
        widths: width of each group; None for full widths.

    Raises:
        ValueError: a group is not isotropic: some operation distinguishes its channels.
    """
    for group in rotations:
        if group not in graph.isotropic:
            reason = graph.basis_dependent.get(group, "no norm over these channels was followed by trace()")
            raise ValueError(f"the channels of {group} cannot be rotated: {reason}")
    for name, tensor in tensors_of(model, graph).items():
        tensor.copy_(applied(tensor, graph.axes[name], rotations, widths or graph.full_widths))

"""Tensors of an isotropic layer while neurons are added and removed (Bird, Sections 3.1-3.3)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import exp, sqrt

import torch
from torch import Tensor

from growlab.parts.isotropic.choices import Choices
from growlab.parts.isotropic.observation import Observation
from growlab.parts.isotropic.spectrum import SIDES, consumers, gain_columns, producers
from growlab.widths import Axis, WidthGraph, applied, resized
from growlab.widths.rules.rotation import LOG_LENGTH

# Root mean square of the entries of a small new column, as in the author's later code.
_SMALL = 0.01


@dataclass(frozen=True)
class Change:
    """Result of changing a layer's width.

    Attributes:
        tensors: every tensor that changed, by name.
        basis: new channels as combinations of old ones, [new width, old width]; zeros for a new neuron.
        rotation: basis that the layer was rotated to, [old width, old width].
        kept: indices of the remaining channels in that basis, [at most old width].
        removed: singular values of the neurons that were removed, ascending.
        removed_part: Frobenius norm of the removed part of the incoming weights relative to the whole.
        stand_in: coefficients by which remaining channels replace removed ones, [removed, kept]; None on growth.
    """

    tensors: dict[str, Tensor]
    basis: Tensor
    rotation: Tensor
    kept: Tensor
    removed: list[float] = field(default_factory=list)
    removed_part: float = 0.0
    stand_in: Tensor | None = None


@dataclass
class LayerTensors:
    """Tensors of an isotropic group in float64, changed in place.

    Attributes:
        graph: the width graph.
        widths: width of each group; that of the group is updated.
        group: the isotropic group.
        tensors: all tensors that depend on its channels, by name.
        choices: see `Choices`.
        observed: see `change_width`.
    """

    graph: WidthGraph
    widths: dict[str, int]
    group: str
    tensors: dict[str, Tensor]
    choices: Choices
    observed: Mapping[str, Observation]

    def deciding(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Weights [width, K] whose singular values decide on neurons, from `tensors` (or gradients of them)."""
        return SIDES[self.choices.direction](self.graph, self.group, tensors, self.widths)

    def turn(self, rotation: Tensor) -> None:
        """Rotate the basis of the channels."""
        self._apply(rotation, rotation)
        self.observed = {
            name: replace(seen, mean=rotation @ seen.mean, square=rotation @ seen.square @ rotation.T)
            for name, seen in self.observations().items()
        }

    def remove(self, kept: Tensor, removed: Tensor, leader: Change | None = None) -> Tensor:
        """Remove channels and compensate for their constant part; returns the coefficients `stand_in`."""
        seen = next(iter(self.observed.values()), None)
        identity = torch.eye(self.widths[self.group]).to(kept.device, torch.float64)
        stand_in = torch.zeros(len(removed), len(kept)).to(identity)
        if leader is not None and leader.stand_in is not None:
            stand_in = leader.stand_in
        elif self.choices.least_squares and seen is not None:
            covariance = seen.square - torch.outer(seen.mean, seen.mean)
            inverse = torch.linalg.pinv(covariance[kept][:, kept], hermitian=True, rtol=1e-9)
            stand_in = covariance[removed][:, kept] @ inverse
        constant, square = self.constants(seen)
        rest = constant[removed] - stand_in @ constant[kept]
        self._move_constant(rest, removed, +1)
        for name in self._lengths():
            self._lengthen(name, square[removed].sum())
        select = identity[kept]
        self._apply(select, select + stand_in.T @ identity[removed])
        return stand_in

    def add(
        self, count: int, generator: Callable[[str], torch.Generator], leader: Change | None = None
    ) -> None:
        """Append channels with zero incoming weights and, if chosen, a bias."""
        before, old = dict(self.widths), self.widths[self.group]
        self.widths[self.group] = old + count
        for name, axes in self.graph.axes.items():
            if name in self.tensors and any(self.group in axis.groups for axis in axes):
                self.tensors[name] = resized(self.tensors[name], axes, before, self.widths)
        for layer in consumers(self.graph, self.group):
            if leader is None:
                self._new_columns(layer.weight, old, generator(f"columns of {layer.weight}"))
            else:
                self._same_columns(layer.weight, old, leader.tensors[layer.weight])
        biases = self._new_biases(count)
        if not biases:
            return
        bias = next(one.bias for one in producers(self.graph, self.group) if one.bias is not None)
        new = torch.arange(old, old + count)
        axis = self.graph.axes[bias][0]
        for channel, value in zip(new.tolist(), biases, strict=True):
            self.tensors[bias][self._positions(axis, channel)] = value
        for name in self._lengths():
            self._lengthen(name, -self.tensors[bias].new_tensor(biases).square().sum())
        self._move_constant(self.tensors[bias].new_tensor(biases), new, -1)

    def constants(self, seen: Observation | None = None) -> tuple[Tensor, Tensor]:
        """Constant part of each channel, independent of the input, and its square, both [width]."""
        width = self.widths[self.group]
        nothing = next(iter(self.tensors.values())).new_zeros(width)
        if self.choices.correction == "none":
            return nothing, nothing
        backward = self.choices.direction == "backward"
        if (backward or self.choices.correction == "batch") and seen is not None:
            # In the rotated matrix a mean square of 0 may be slightly negative by rounding.
            return seen.mean, seen.square.diagonal().clamp(min=0)
        if self._centred():
            return nothing, nothing
        total = nothing.clone()
        for layer in producers(self.graph, self.group):
            if layer.bias is not None:
                # If the group is repeated on the axis, the mean of its biases.
                axis = self.graph.axes[layer.bias][0]
                places = [self._positions(axis, channel) for channel in range(width)]
                total += torch.stack([self.tensors[layer.bias][place].mean() for place in places])
        return total, total.square()

    # Parts ---------------------------------------------------------------------------------------------

    def _apply(self, matrix: Tensor, consuming: Tensor) -> None:
        for name, tensor in self.tensors.items():
            axes = self.graph.axes[name]
            self.tensors[name] = applied(
                tensor, axes, {self.group: matrix}, self.widths, {self.group: consuming}
            )
        self.widths[self.group] = len(matrix)

    def observations(self) -> dict[str, Observation]:
        """Observations of activations whose norm is over this group alone."""
        names = [radius.name for radius in self.graph.radii if radius.groups == (self.group,)]
        return {name: self.observed[name] for name in names if name in self.observed}

    def _lengths(self) -> list[str]:
        radii = [radius for radius in self.graph.radii if self.group in radius.groups]
        return [radius.length for radius in radii if radius.length is not None]

    def _length(self, name: str) -> float:
        """Return the intrinsic length o from its parameter."""
        value = float(self.tensors[name])
        return exp(value) if name.endswith(LOG_LENGTH) else value

    def _lengthen(self, name: str, more: Tensor) -> None:
        """Add `more`, which may be negative, to an intrinsic length."""
        held = self.tensors[name]
        if not name.endswith(LOG_LENGTH):
            self.tensors[name] = held + more
        elif more < 0:
            self.tensors[name] = held + torch.log1p(more / held.exp())
        else:
            self.tensors[name] = torch.logaddexp(held, more.log())

    def _centred(self) -> bool:
        """Return True if a mean is subtracted behind the layers, so that their biases have no effect."""
        biases = {layer.bias for layer in producers(self.graph, self.group)}
        return any(
            len(axes) == 1 and self.group in axes[0].groups and name not in biases
            for name, axes in self.graph.axes.items()
        )

    def _move_constant(self, constant: Tensor, channels: Tensor, sign: int) -> None:
        """Add (+1) or subtract (-1) U* c of channels in the weights of the gain, or E[g] U* c in the next biases."""
        seen = next(iter(self.observed.values()), None)
        gain = 1.0 if seen is None else seen.gain
        weights: set[str] = set()
        for layer in consumers(self.graph, self.group):
            reads_gain = gain_columns(self.graph, self.group, layer, self.widths)
            if layer.weight in weights if reads_gain else layer.bias is None:
                continue
            weights.add(layer.weight)
            weight, axis = self.tensors[layer.weight], self.graph.axes[layer.weight][1]
            shift = sum(
                value * weight.index_select(1, self._positions(axis, channel))
                for value, channel in zip(constant, channels.tolist(), strict=True)
            )
            if reads_gain:
                weight = self.tensors[layer.weight] = weight.clone()
                weight[:, reads_gain] += sign * shift
            elif layer.bias is not None:
                bias = self.tensors[layer.bias]
                self.tensors[layer.bias] = bias + sign * gain * shift.flatten(1).sum(1)

    def _new_biases(self, count: int) -> list[float] | None:
        """Return b* of each new channel, or None if it is 0."""
        if self.choices.bias == 0:
            return None
        lengths = self._lengths()
        has_bias = any(layer.bias is not None for layer in producers(self.graph, self.group))
        if not lengths or not has_bias or self._centred():
            raise ValueError(
                f"bias={self.choices.bias} needs an intrinsic length and a bias that reaches it, which "
                f"{self.group} has not; set bias=0."
            )
        length = min(self._length(name) for name in lengths)
        biases = []
        for _ in range(count):
            biases.append(self.choices.bias * sqrt(abs(length)))
            length -= biases[-1] ** 2
        return biases

    def _new_columns(self, name: str, old: int, source: torch.Generator) -> None:
        weight, axis = self.tensors[name], self.graph.axes[name][1]
        places = [self._positions(axis, channel) for channel in range(self.widths[self.group])]
        columns = torch.stack([weight.index_select(1, place).flatten() for place in places[:old]])
        norm = columns.square().sum(1).mean().sqrt()
        for channel, place in enumerate(places[old:]):
            if self.choices.columns == "zero":
                return
            if self.choices.columns == "copy":
                column = columns[channel % old]
            else:
                drawn = torch.randn(columns.shape[1], generator=source, dtype=torch.float64).to(columns)
                column = drawn
                if self.choices.columns == "orthogonal":
                    basis = torch.linalg.svd(columns, full_matrices=False)[2]
                    rank = int(torch.linalg.matrix_rank(columns))
                    column = drawn - basis[:rank].T @ (basis[:rank] @ drawn)
                    if rank == columns.shape[1]:
                        column = drawn
                size = _SMALL * len(drawn) ** 0.5 if self.choices.columns == "small" else norm
                column = column * (size / torch.linalg.vector_norm(column))
                columns = torch.cat([columns, column[None]])
            shape = (len(weight), len(place), *weight.shape[2:])
            weight.index_copy_(1, place, column.view(shape))

    def _same_columns(self, name: str, old: int, theirs: Tensor) -> None:
        axis = self.graph.axes[name][1]
        for channel in range(old, self.widths[self.group]):
            place = self._positions(axis, channel)
            self.tensors[name].index_copy_(1, place, theirs.to(self.tensors[name]).index_select(1, place))

    def _positions(self, axis: Axis, channel: int) -> Tensor:
        """Positions of a channel of the group along an axis."""
        marks = {
            group: torch.full((self.widths[group],), -1 if group != self.group else 0)
            for group in axis.groups
        }
        marks[self.group] = torch.arange(self.widths[self.group])
        found = axis.spread(marks, self.widths, fixed=-1) == channel
        return found.nonzero().flatten().to(next(iter(self.tensors.values())).device)

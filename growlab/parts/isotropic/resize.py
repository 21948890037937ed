"""Add neurons to an isotropic layer and remove them, as plain functions of tensors (Bird, Sections 3.1-3.3)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import exp, log, sqrt
from typing import Literal

import torch
from torch import Tensor

from growlab.parts.isotropic.observation import Observation
from growlab.parts.isotropic.spectrum import (
    consumers,
    decompose,
    gain_columns,
    gather_constant,
    incoming,
    producers,
)
from growlab.widths import Axis, WidthGraph, applied, resized

Columns = Literal["orthogonal", "zero", "copy", "random"]
Correction = Literal["bias", "batch", "none"]
COLUMNS = ("orthogonal", "zero", "copy", "random")
CORRECTIONS = ("bias", "batch", "none")


@dataclass(frozen=True)
class Choices:
    """What the paper leaves open.

    Attributes:
        columns: outgoing weights U* of a new neuron. "orthogonal": to those of all others (Gram-Schmidt), at their
            root mean square norm, a random direction where all are taken; "zero"; "copy": of the neuron with the
            largest singular value; "random": at that norm.
        bias: b* of a new neuron in units of sqrt(o), within (-1, 1). Not 0 with columns other than "zero", growth
            is exact only on average (E[g]), or with a gain channel.
        correction: where a removed neuron's constant part goes. "bias": b*^2 into the intrinsic length and
            E[g] U* b* into the next biases, as in the paper; where layers read a gain channel, U* b* into their
            weights for it, which is exact. "batch": the mean and the mean square of what the neuron carried on the
            batch take the place of b* and b*^2; the same where its singular value is 0. "none": it is lost.
        least_squares: let the others stand in for a removed neuron: the next weights are those that reproduce its
            linear contribution best on the batch (Eq. 30 with the batch's covariance in the place of a white
            input's, for which Eq. 30 is the plain deletion).

    Raises:
        ValueError: a choice is none of these.
    """

    columns: Columns = "orthogonal"
    bias: float = 0.0
    correction: Correction = "bias"
    least_squares: bool = False

    def __post_init__(self) -> None:
        for name, known in (("columns", COLUMNS), ("correction", CORRECTIONS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"growth.{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}."
                )
        if not -1 < self.bias < 1:
            raise ValueError(f"growth.bias must lie between -1 and 1 (b*^2 < o), not {self.bias}.")


@dataclass(frozen=True)
class Change:
    """A layer at another width.

    Attributes:
        tensors: every tensor that changed, by name.
        basis: [new width, old width]: the old channels that make up each new one; a row of zeros for a new neuron.
        rotation: [old width, old width]: the basis that the layer was turned to.
        kept: the channels in that basis that are left, [at most old width].
        removed: singular values of the neurons that were removed, ascending.
        removed_part: Frobenius norm of the removed part of the incoming weights relative to the whole.
        stand_in: [removed, kept]: by how much the others stand in for those that are removed; None on growth.
    """

    tensors: dict[str, Tensor]
    basis: Tensor
    rotation: Tensor
    kept: Tensor
    removed: list[float] = field(default_factory=list)
    removed_part: float = 0.0
    stand_in: Tensor | None = None


# Scores [n] of the neurons of a spectrum: (left [n, n], values [n], right [K, n], gradient [n, K] or None) -> [n].
Importance = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def singular_value(left: Tensor, values: Tensor, right: Tensor, gradient: Tensor | None) -> Tensor:
    """How much a neuron lets through: its singular value."""
    return values


def gradient_times_value(left: Tensor, values: Tensor, right: Tensor, gradient: Tensor | None) -> Tensor:
    """How much the loss would change to first order without the neuron: |s_i dL/ds_i|, dL/ds_i = u_i^T G v_i.

    Raises:
        ValueError: there is no gradient.
    """
    if gradient is None:
        raise ValueError(
            "growth.importance=gradient needs an optimizer that keeps a running mean of the gradient, such as "
            "adam or sgd with momentum, and one step of it."
        )
    return (values * ((left.T @ gradient.to(left)) * right.T).sum(1)).abs()


IMPORTANCES: dict[str, Importance] = {"singular_value": singular_value, "gradient": gradient_times_value}


def change_width(
    graph: WidthGraph,
    tensors: Mapping[str, Tensor],
    widths: Mapping[str, int],
    group: str,
    new_width: int,
    choices: Choices | None = None,
    importance: Importance = singular_value,
    gradients: Mapping[str, Tensor] | None = None,
    observed: Mapping[str, Observation] | None = None,
    generator: Callable[[str], torch.Generator] | None = None,
    rotate: bool = True,
    leader: Change | None = None,
) -> Change:
    """Diagonalise the layer that produces a group partially, then add or remove neurons (Sec. 3.3.1).

    With W1 = U S V^T the layer becomes S V^T, its bias U^T b1, and the next weights W2 U. A new neuron is a row of
    zeros and a column U*; one that is removed takes its row, bias b* and column U* with it, and

        o' = o - b*^2,  b2' = b2 - E[g] U* b*      on growth
        o' = o + b*^2,  b2' = b2 + E[g] U* b*      on removal

    **Preserves** the output exactly on growth with the default choices. A neuron whose singular value is 0 puts out
    g b*: a constant but for the gain, which depends on the others. Its removal is exact if b* = 0, if what reads the
    layer has a gain channel (psi' = psi + U* b*; no weights and biases of the other neurons can take its place), or
    if another neuron with the singular value 0 stays: such neurons are turned so that one of them has all of their
    bias. Else E[g] takes the place of g (on the project's test networks off by 3e-3 to 4.5e-2). Removal of one with a
    small singular value changes the output in proportion to it besides.

    Args:
        graph: a graph traced with `follow_norms`.
        tensors: parameters and buffers by name.
        widths: width of each group.
        group: an isotropic group with a producing layer.
        new_width: at least 1.
        choices: see there.
        importance: scores; those with the lowest are removed.
        gradients: gradients of parameters by name, for scores that need them.
        observed: for each isotropic activation by module path, what it did on a batch; without, E[g] counts as 1.
        generator: makes a generator for draws from a name; None for a fixed one.
        rotate: turn the basis on growth too; on removal it always is.
        leader: the change of the network that this one is an average of: it decides on the basis, on who goes, on who
            stands in for them and on the columns of new neurons, so that the average goes the same way.

    Raises:
        ValueError: there is no such layer, or a choice does not fit it.
    """
    choices, observed = choices or Choices(), observed or {}
    if group not in graph.isotropic or not producers(graph, group):
        raise ValueError(f"{group} is not an isotropic layer whose width could change")
    if new_width < 1:
        raise ValueError(f"{group} must keep at least one neuron, not {new_width}")
    width = widths[group]
    involved = [name for name, axes in graph.axes.items() if any(group in axis.groups for axis in axes)]
    involved += [layer.bias for layer in consumers(graph, group) if layer.bias is not None]
    involved += [r.length for r in graph.radii if group in r.groups and r.length is not None]
    work = {name: tensors[name].detach().double() for name in dict.fromkeys(involved)}
    layer = _Layer(graph, dict(widths), group, work, choices, observed)
    left, values, right = decompose(incoming(graph, group, work, widths))
    rotation = left.T if rotate or new_width < width else torch.eye(width).to(left)
    kept = torch.arange(width, device=left.device)
    part, gone, stand_in = 0.0, [], None
    if leader is not None:
        rotation, kept = leader.rotation, leader.kept
    elif new_width < width:
        gradient = None
        if gradients is not None and all(one.weight in gradients for one in producers(graph, group)):
            gradient = incoming(graph, group, gradients, widths)
        dtype = tensors[producers(graph, group)[0].weight].dtype
        rounding = torch.finfo(dtype).eps * max(width, len(right))
        left, values = gather_constant(left, values, layer.constants()[0], rounding)
        rotation = left.T
        scores = importance(left, values, right, gradient)
        kept = torch.argsort(scores, descending=True, stable=True)[:new_width].sort()[0]
    layer.turn(rotation)
    basis = rotation[kept]
    if new_width < width:
        others = torch.ones(width, dtype=torch.bool, device=kept.device)
        others[kept] = False
        removed = others.nonzero().flatten()
        norms = torch.linalg.vector_norm(incoming(graph, group, layer.tensors, widths), dim=1)
        whole = float(torch.linalg.vector_norm(norms))
        part = float(torch.linalg.vector_norm(norms[removed])) / whole if whole > 0 else 0.0
        gone = sorted(norms[removed].tolist())
        stand_in = layer.remove(kept, removed, leader)
    else:
        layer.add(new_width - width, generator or _fixed, leader)
        basis = torch.nn.functional.pad(basis, (0, 0, 0, new_width - width))
    changed = {
        name: tensor.to(tensors[name])
        for name, tensor in layer.tensors.items()
        if tensor.shape != tensors[name].shape or not torch.equal(tensor, tensors[name].double())
    }
    return Change(changed, basis, rotation, kept, gone, part, stand_in)


def _fixed(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(0)


@dataclass
class _Layer:
    """A group's tensors in float64 while they change."""

    graph: WidthGraph
    widths: dict[str, int]
    group: str
    tensors: dict[str, Tensor]
    choices: Choices
    observed: Mapping[str, Observation]

    def turn(self, rotation: Tensor) -> None:
        """Change the basis of the channels."""
        self._apply(rotation, rotation)
        self.observed = {
            name: replace(seen, mean=rotation @ seen.mean, square=rotation @ seen.square @ rotation.T)
            for name, seen in self._observations().items()
        }

    def remove(self, kept: Tensor, removed: Tensor, leader: Change | None = None) -> Tensor:
        """Take channels away and leave what was constant of them behind; gives by how much others stand in."""
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
            self.tensors[name] = torch.logaddexp(self.tensors[name], square[removed].sum().log())
        select = identity[kept]
        self._apply(select, select + stand_in.T @ identity[removed])
        return stand_in

    def add(
        self, count: int, generator: Callable[[str], torch.Generator], leader: Change | None = None
    ) -> None:
        """Append channels that carry nothing but their bias."""
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
            left_over = exp(float(self.tensors[name])) - sum(value**2 for value in biases)
            self.tensors[name] = torch.full_like(self.tensors[name], log(left_over))
        self._move_constant(self.tensors[bias].new_tensor(biases), new, -1)

    def constants(self, seen: Observation | None = None) -> tuple[Tensor, Tensor]:
        """What each channel carries whatever the input is, and its square, both [width]."""
        width = self.widths[self.group]
        nothing = next(iter(self.tensors.values())).new_zeros(width)
        if self.choices.correction == "none":
            return nothing, nothing
        if self.choices.correction == "batch" and seen is not None:
            # A mean square of 0 comes out of the turned matrix a rounding error above or below.
            return seen.mean, seen.square.diagonal().clamp(min=0)
        if self._centred():
            return nothing, nothing
        total = nothing.clone()
        for layer in producers(self.graph, self.group):
            if layer.bias is not None:
                # Repetitions of the group on one axis carry a bias each: their mean.
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

    def _observations(self) -> dict[str, Observation]:
        """Of the activations that see just this group: its own."""
        names = [radius.name for radius in self.graph.radii if radius.groups == (self.group,)]
        return {name: self.observed[name] for name in names if name in self.observed}

    def _lengths(self) -> list[str]:
        radii = [radius for radius in self.graph.radii if self.group in radius.groups]
        return [radius.length for radius in radii if radius.length is not None]

    def _centred(self) -> bool:
        """Whether a mean is subtracted behind the layers, so that their biases have no effect."""
        biases = {layer.bias for layer in producers(self.graph, self.group)}
        return any(
            len(axes) == 1 and self.group in axes[0].groups and name not in biases
            for name, axes in self.graph.axes.items()
        )

    def _move_constant(self, constant: Tensor, channels: Tensor, sign: int) -> None:
        """Move U* c of channels into (+1) or out of (-1) the weights of the gain, or E[g] U* c: of the next biases."""
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
        """b* of each new channel; None for zeros."""
        if self.choices.bias == 0:
            return None
        lengths = self._lengths()
        has_bias = any(layer.bias is not None for layer in producers(self.graph, self.group))
        if not lengths or not has_bias or self._centred():
            raise ValueError(
                f"growth.bias={self.choices.bias} needs an intrinsic length and a bias that reaches it, which "
                f"{self.group} has not; set growth.bias=0."
            )
        length = min(exp(float(self.tensors[name])) for name in lengths)
        biases = []
        for _ in range(count):
            biases.append(self.choices.bias * sqrt(length))
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
                column = column * (norm / torch.linalg.vector_norm(column))
                columns = torch.cat([columns, column[None]])
            shape = (len(weight), len(place), *weight.shape[2:])
            weight.index_copy_(1, place, column.view(shape))

    def _same_columns(self, name: str, old: int, theirs: Tensor) -> None:
        axis = self.graph.axes[name][1]
        for channel in range(old, self.widths[self.group]):
            place = self._positions(axis, channel)
            self.tensors[name].index_copy_(1, place, theirs.to(self.tensors[name]).index_select(1, place))

    def _positions(self, axis: Axis, channel: int) -> Tensor:
        """Where a channel of the group lies along an axis."""
        marks = {
            group: torch.full((self.widths[group],), -1 if group != self.group else 0)
            for group in axis.groups
        }
        marks[self.group] = torch.arange(self.widths[self.group])
        found = axis.spread(marks, self.widths, fixed=-1) == channel
        return found.nonzero().flatten().to(next(iter(self.tensors.values())).device)

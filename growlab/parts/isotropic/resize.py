"""Add and remove neurons of an isotropic layer, as functions of tensors (Bird, Sections 3.1-3.3)."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import exp, sqrt
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from growlab.base.settings import finite, flag, one_of
from growlab.growth.fans import ChannelView
from growlab.growth.outputs import positional, without_side_effects
from growlab.parts.isotropic.spectrum import (
    consumers,
    decompose,
    gain_columns,
    gather_constant,
    order_by_square,
    producers,
    weights_of,
)
from growlab.widths import Axis, WidthGraph, applied, resized
from growlab.widths.inputs import call_with
from growlab.widths.rules.norms import LOG_LENGTH

Columns = Literal["orthogonal", "zero", "copy", "random", "small"]
Compensation = Literal["bias", "batch", "none"]
Direction = Literal["forward", "backward"]
COLUMNS, DIRECTIONS = get_args(Columns), get_args(Direction)

# Scores [n] of the neurons of a spectrum: (left [n, n], values [n], right [K, n], gradient [n, K] or None) -> [n].
Importance = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def gradient_times_value(left: Tensor, values: Tensor, right: Tensor, gradient: Tensor | None) -> Tensor:
    """Score neurons by the first-order change of the loss without them: |s_i dL/ds_i|, dL/ds_i = u_i^T G v_i."""
    if gradient is None:
        raise ValueError(
            "importance='gradient' needs an optimizer that keeps a running mean of the gradient, such as "
            "adam or sgd with momentum, and one step of it."
        )
    return (values * ((left.T @ gradient.to(left)) * right.T).sum(1)).abs()


IMPORTANCES: dict[str, Importance] = {
    "singular_value": lambda left, values, right, gradient: values,
    "gradient": gradient_times_value,
}


@dataclass(frozen=True)
class Choices:
    """Options for details that the paper does not specify.

    Attributes:
        columns: outgoing weights U* of a new neuron. "orthogonal": orthogonal to those of all others (Gram-Schmidt),
            with their root mean square norm, or random if they span the space; "zero"; "copy": those of the existing
            neurons in order (with `rotate`, from the largest singular value on); "random": random with that norm;
            "small": random, 0.01 per weight, as in the author's later code.
        bias: b* of a new neuron in units of sqrt(o), within (-1, 1). If it is not 0 and columns are not "zero", growth
            is exact only on average (E[g]), or with a gain channel.
        removal_compensation: what replaces a removed neuron's constant part. "bias": b*^2 is added to the intrinsic
            length and E[g] U* b* to the next biases, as in the paper; if layers read a gain channel, U* b* is added to
            their weights psi, which is exact. "batch": the mean and mean square of the neuron's input on the batch are
            used instead of b* and b*^2; equal if its singular value is 0. "none": no compensation.
        least_squares: let the remaining neurons replace a removed one: the next weights reproduce its linear
            contribution best on the batch (Eq. 30 with the batch's covariance instead of that of white inputs, for
            which Eq. 30 is plain deletion).
        importance: score of a neuron, a name in `IMPORTANCES`; neurons with the lowest scores are removed.
        rotate: rotate the basis on growth too (optimizers such as Adam depend on the basis); on removal it is always
            rotated.
        direction: "forward": singular values of the incoming weights; "backward": of the outgoing ones (Section 2.3.2,
            the right-sided form). A neuron without outgoing weights still counts in the norm, so its removal is never
            exact: its mean square on the batch is added to the intrinsic length, also with the compensation "bias".
            Exact growth in this direction needs `columns="zero"` and a bias, without which such a neuron would have no
            gradient.

    Raises:
        ValueError: a choice is unknown, or `bias` is out of range.
    """

    columns: Columns = "orthogonal"
    bias: float = 0.0
    removal_compensation: Compensation = "bias"
    least_squares: bool = False
    importance: Literal["singular_value", "gradient"] = "singular_value"
    rotate: bool = True
    direction: Direction = "forward"

    def __post_init__(self) -> None:
        one_of(IMPORTANCES, importance=self.importance)
        one_of(COLUMNS, columns=self.columns)
        one_of(get_args(Compensation), removal_compensation=self.removal_compensation)
        one_of(DIRECTIONS, direction=self.direction)
        flag(least_squares=self.least_squares, rotate=self.rotate)
        finite(bias=self.bias)
        if not -1 < self.bias < 1:
            raise ValueError(f"bias must lie between -1 and 1 (b*^2 < o), not {self.bias}.")


@dataclass(frozen=True)
class Observation:
    """Statistics of an isotropic activation on a batch: the mean gain E[g]; E[x], [n]; E[x x^T], [n, n]."""

    gain: float
    mean: Tensor
    square: Tensor


def watch(model: nn.Module, graph: WidthGraph, probe: Tensor | Sequence[Tensor]) -> Mapping[str, Observation]:
    """Run a batch in eval mode and observe every activation whose norm is over a single group, by module path.

    Observations are in float64 on the activations' device. Modules whose output and first input differ in shape are
    left out, since they do more than apply an activation.
    """
    modules, observations = dict(model.named_modules()), dict[str, Observation]()
    with_gain = {radius.name for radius in graph.radii if radius.gain_channel}

    def record(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            x = inputs[0]
            if name in with_gain and isinstance(output, Tensor):
                output = output[:, :-1]
            if not isinstance(output, Tensor) or output.shape != x.shape:
                return
            x_BN, f_BN = (tensor.double().movedim(1, -1).flatten(0, -2) for tensor in (x, output))
            squares_B = x_BN.square().sum(1)
            gains_B = (f_BN * x_BN).sum(1)[squares_B > 0] / squares_B[squares_B > 0]
            gain = float(gains_B.mean()) if len(gains_B) else 1.0
            observations[name] = Observation(gain, x_BN.mean(0), x_BN.T @ x_BN / len(x_BN))

        return hook

    with ExitStack() as hooks:
        for name in [radius.name for radius in graph.radii if len(radius.groups) == 1 and radius.name in modules]:
            hooks.enter_context(modules[name].register_forward_hook(record(name)))
        hooks.enter_context(without_side_effects(model))
        model.eval()
        call_with(model, positional(probe))
    return observations


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
        removed: singular values of the removed neurons, ascending.
        removed_part: Frobenius norm of the removed part of the incoming weights relative to the whole.
        stand_in: coefficients with which remaining channels replace removed ones, [removed, kept]; None on growth.
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
    """Tensors of an isotropic group in float64, by name, changed in place with the group's width."""

    graph: WidthGraph
    widths: dict[str, int]
    group: str
    tensors: dict[str, Tensor]
    choices: Choices
    observed: Mapping[str, Observation]

    def deciding(self) -> Tensor:
        """Weights [width, K] whose singular values decide which neurons stay."""
        return weights_of(self.graph, self.group, self.tensors, self.widths, self.choices.direction == "forward")

    def turn(self, rotation: Tensor) -> None:
        """Rotate the basis of the channels."""
        self._apply(rotation, rotation)
        self.observed = {
            name: replace(seen, mean=rotation @ seen.mean, square=rotation @ seen.square @ rotation.T)
            for name, seen in self.observations().items()
        }

    def remove(self, kept: Tensor, removed: Tensor, leader: Change | None = None) -> Tensor:
        """Remove channels and compensate for their constant part; return the coefficients `stand_in`."""
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

    def add(self, count: int, generator: Callable[[str], torch.Generator], leader: Change | None = None) -> None:
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
        bias = next(layer.bias for layer in producers(self.graph, self.group) if layer.bias is not None)
        new, values = torch.arange(old, old + count), self.tensors[bias].new_tensor(biases)
        self.tensors[bias][self._places(self.graph.axes[bias][0])[old:]] = values[:, None]
        for name in self._lengths():
            self._lengthen(name, -values.square().sum())
        self._move_constant(values, new, -1)

    def constants(self, seen: Observation | None = None) -> tuple[Tensor, Tensor]:
        """Constant part of each channel, independent of the input, and its square, both [width]."""
        width = self.widths[self.group]
        total = next(iter(self.tensors.values())).new_zeros(width)
        if self.choices.removal_compensation == "none":
            return total, total
        backward = self.choices.direction == "backward"
        if (backward or self.choices.removal_compensation == "batch") and seen is not None:
            # Rounding may make a mean square of 0 slightly negative after the rotation.
            return seen.mean, seen.square.diagonal().clamp(min=0)
        if self._centred():
            return total, total
        for layer in producers(self.graph, self.group):
            if layer.bias is not None:
                # The mean of a channel's biases, if the group is repeated along the axis.
                places = self._places(self.graph.axes[layer.bias][0])
                total += torch.stack([self.tensors[layer.bias][place].mean() for place in places])
        return total, total.square()

    # Parts ---------------------------------------------------------------------------------------------

    def _apply(self, matrix: Tensor, consuming: Tensor) -> None:
        for name, tensor in self.tensors.items():
            axes = self.graph.axes[name]
            self.tensors[name] = applied(tensor, axes, {self.group: matrix}, self.widths, {self.group: consuming})
        self.widths[self.group] = len(matrix)

    def observations(self) -> dict[str, Observation]:
        """Observations of activations whose norm is over this group alone."""
        names = [radius.name for radius in self.graph.radii if radius.groups == (self.group,)]
        return {name: self.observed[name] for name in names if name in self.observed}

    def _lengths(self) -> list[str]:
        radii = [radius for radius in self.graph.radii if self.group in radius.groups]
        return [radius.length for radius in radii if radius.length is not None]

    def _length(self, name: str) -> float:
        value = float(self.tensors[name])
        return exp(value) if name.endswith(LOG_LENGTH) else value

    def _lengthen(self, name: str, more: Tensor) -> None:
        """Add `more`, which may be negative, to an intrinsic length."""
        length = self.tensors[name]
        if not name.endswith(LOG_LENGTH):
            self.tensors[name] = length + more
        elif more < 0:
            self.tensors[name] = length + torch.log1p(more / length.exp())
        else:
            self.tensors[name] = torch.logaddexp(length, more.log())

    def _centred(self) -> bool:
        """Return True if a mean is subtracted after the layers, so that their biases have no effect."""
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
            weight, places = self.tensors[layer.weight], self._places(self.graph.axes[layer.weight][1])
            moved = zip(constant, places[channels], strict=True)
            shift: Any = sum(value * weight.index_select(1, place) for value, place in moved)
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
                f"{self.group} does not have; set bias=0."
            )
        length = min(self._length(name) for name in lengths)
        biases = []
        for _ in range(count):
            biases.append(self.choices.bias * sqrt(abs(length)))
            length -= biases[-1] ** 2
        return biases

    def _new_columns(self, name: str, old: int, source: torch.Generator) -> None:
        weight, places = self.tensors[name], self._places(self.graph.axes[name][1])
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

    def _same_columns(self, name: str, old: int, source: Tensor) -> None:
        places = self._places(self.graph.axes[name][1])[old:].flatten()
        self.tensors[name].index_copy_(1, places, source.to(self.tensors[name]).index_select(1, places))

    def _places(self, axis: Axis) -> Tensor:
        """Positions of each channel of the group along an axis, [width, positions of one channel]."""
        places = ChannelView(self.graph, self.widths, self.widths).places(axis, self.group)
        return places.to(next(iter(self.tensors.values())).device)


def change_width(
    graph: WidthGraph,
    tensors: Mapping[str, Tensor],
    widths: Mapping[str, int],
    group: str,
    new_width: int,
    choices: Choices | None = None,
    gradients: Mapping[str, Tensor] | None = None,
    observed: Mapping[str, Observation] | None = None,
    generator: Callable[[str], torch.Generator] | None = None,
    leader: Change | None = None,
) -> Change:
    """Partially diagonalise the layer that produces a group, then add or remove neurons (Sec. 3.3.1).

    With W1 = U S V^T the layer becomes S V^T, its bias U^T b1, and the next weights W2 U. A new neuron is a row of
    zeros and a column U*; a removed one loses its row, bias b* and column U*, and

        o' = o - b*^2,  b2' = b2 - E[g] U* b*      on growth
        o' = o + b*^2,  b2' = b2 + E[g] U* b*      on removal

    **Preserves** the output exactly on growth with the default choices. A neuron whose singular value is 0 outputs g
    b*: a constant times the gain, which depends on the others. Its removal is exact if b* = 0, if the consumers read a
    gain channel (psi' = psi + U* b*), or if another neuron with the singular value 0 stays: such neurons are rotated so
    that one of them has all of their bias. Otherwise g is replaced by E[g] (an error of 3e-3 to 4.5e-2 on the project's
    test networks). Removing a neuron with a small singular value also changes the output in proportion to it.

    Args:
        graph: width graph traced with `follow_norms`.
        tensors: parameters and buffers by name.
        widths: width of each group.
        group: an isotropic group with a producing layer.
        new_width: new width of the group, at least 1.
        choices: see `Choices`.
        gradients: gradients of parameters by name, for scores that need them.
        observed: see `watch`; without observations E[g] is taken as 1.
        generator: maps a name to a generator for draws; None for a fixed seed.
        leader: if the tensors are an average, the change of the averaged network, for the average to follow.

    Raises:
        ValueError: the group is not such a layer, or a choice does not fit it.
    """
    if group not in graph.isotropic or not producers(graph, group):
        raise ValueError(f"{group} is not an isotropic layer whose width could change")
    if new_width < 1:
        raise ValueError(f"{group} must keep at least one neuron, not {new_width}")
    choices, width = choices or Choices(), widths[group]
    involved = [name for name, axes in graph.axes.items() if any(group in axis.groups for axis in axes)]
    involved += [layer.bias for layer in consumers(graph, group) if layer.bias is not None]
    involved += [r.length for r in graph.radii if group in r.groups and r.length is not None]
    work = {name: tensors[name].detach().double() for name in dict.fromkeys(involved)}
    layer = LayerTensors(graph, dict(widths), group, work, choices, observed or {})
    if leader is not None:
        rotation, kept = leader.rotation, leader.kept
    elif new_width < width:
        rotation, kept = _select_channels(layer, tensors, new_width, gradients or {})
    else:
        left = decompose(layer.deciding())[0]
        rotation = left.T if choices.rotate else torch.eye(width).to(left)
        kept = torch.arange(width, device=left.device)
    layer.turn(rotation)
    basis, removed_part, removed_values, stand_in = rotation[kept], 0.0, list[float](), None
    if new_width < width:
        others = torch.ones(width, dtype=torch.bool, device=kept.device)
        others[kept] = False
        removed = others.nonzero().flatten()
        norms = torch.linalg.vector_norm(layer.deciding(), dim=1)
        whole = float(torch.linalg.vector_norm(norms))
        removed_part = float(torch.linalg.vector_norm(norms[removed])) / whole if whole > 0 else 0.0
        removed_values = sorted(norms[removed].tolist())
        stand_in = layer.remove(kept, removed, leader)
    else:
        layer.add(new_width - width, generator or (lambda name: torch.Generator().manual_seed(0)), leader)
        basis = torch.nn.functional.pad(basis, (0, 0, 0, new_width - width))
    changed = {
        name: tensor.to(tensors[name])
        for name, tensor in layer.tensors.items()
        if tensor.shape != tensors[name].shape or not torch.equal(tensor, tensors[name].double())
    }
    return Change(changed, basis, rotation, kept, removed_values, removed_part, stand_in)


def gradient_of(
    graph: WidthGraph, group: str, gradients: Mapping[str, Tensor], widths: Mapping[str, int], forward: bool
) -> Tensor | None:
    """Gradient of `weights_of` a group; None if a layer's gradient is missing."""
    layers = producers(graph, group) if forward else consumers(graph, group)
    available = bool(gradients) and all(layer.weight in gradients for layer in layers)
    return weights_of(graph, group, gradients, widths, forward) if available else None


def _select_channels(
    layer: LayerTensors, tensors: Mapping[str, Tensor], new_width: int, gradients: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Choose the basis in which neurons are removed, and the channels of it that stay."""
    forward, graph = layer.choices.direction == "forward", layer.graph
    left, values, right = decompose(layer.deciding())
    gradient = gradient_of(graph, layer.group, gradients, layer.widths, forward)
    first, *_ = producers(graph, layer.group) if forward else consumers(graph, layer.group)
    dtype = tensors[first.weight].dtype
    rounding = torch.finfo(dtype).eps * max(layer.widths[layer.group], len(right))
    seen = next(iter(layer.observations().values()), None)
    if forward:
        left, values = gather_constant(left, values, layer.constants()[0], rounding)
    elif seen is not None:
        left, values = order_by_square(left, values, seen.square, rounding)
    scores = IMPORTANCES[layer.choices.importance](left, values, right, gradient)
    return left.T, torch.argsort(scores, descending=True, stable=True)[:new_width].sort()[0]

"""TINY: new neurons that reduce the expressivity bottleneck (Verbockhaven, Rudkiewicz, Charpiat, Chevallier, 2024)."""

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from growlab.base.settings import above, at_least, flag
from growlab.growth.data_driven import DataDriven, padded, upright
from growlab.growth.expressivity import RANK, bottleneck, cholesky, moments, refuses_bottleneck, solved, usual
from growlab.growth.fans import ChannelView, GroupTensors, TensorDim
from growlab.growth.measurement import Measurement, Pass
from growlab.growth.method import GrownTensors, GrowthContext, WeightRule
from growlab.widths import resized

# Neurons below this fraction of the largest singular value are drawn at random: they would get no gradient.
_LEAST = 1e-3


class Tiny(DataDriven):
    """Add the neurons that best follow the part of the functional gradient that existing weights cannot.

    With the producer's input h (1 for its bias), the consumer's input b and V = -dL/dz at its output z,

        dW = E[V b^T] E[b b^T]^-1                                   best update of old weights (Prop. 3.1)
        S = E[h h^T],  N = E[h (V - dW b)^T],  S^-1/2 N = U D W^T
        alpha_k = sqrt(d_k) S^-1/2 u_k,  omega_k = sqrt(d_k) w_k     incoming and outgoing weights (Prop. 3.2)

    of largest d_k first: among k neurons they reduce E|V - dW b - omega alpha^T h|^2 most. An amplitude gamma is then
    found by line search over the loss on held-out batches: new neurons get sqrt(gamma) on both sides, and old weights
    gamma dW if `update_old`. The search goes down from the largest amplitude and stops after the lowest loss.
    Convolutions: h and b are patches; S counts a patch as often as the consumer reads its position, as in GroMo, which
    ignores that the consumer's patches overlap (exact for 1x1).

    `ridge` times the mean of the diagonal is added to the diagonals of S and E[b b^T], so that |alpha_k|^2 is at most
    d_k / (ridge * mean of the diagonal). Without it a nearly singular S (small or nearly equal neurons) gives weights a
    hundred times as long as old ones, and the next steps diverge.

    **Preserves** nothing exactly: the function changes with gamma, to the lowest loss that the line search finds; the
    report has the loss before and after. New neurons alone need not lower it: they are optimal together with dW, and
    ReLU passes only half of their activations. If no amplitude lowers the loss, gamma is 0: the function stays the
    same, and new neurons get the incoming weights of gamma 1, from which they learn. Neurons beyond the rank of N (at
    most 10 for a layer with 10 outputs) have drawn incoming and zero outgoing weights, and learn too.
    **Departs from the paper**: N is measured in the network with candidates whose outgoing weights are 1 in one entry
    and whose incoming weights are zero, so that it includes pooling and flattening in between. A batch normalisation of
    new channels starts as the identity on the batches; an instance normalisation approximately, since its statistics
    are per sample. All layers change at once, with one gamma. The ridge, the held-out batches and drawn neurons are not
    in the paper.

    Args:
        batches: number of training batches used at an event: the first ones of the epoch that begins. The last quarter
            of them, rounded up, is held out for the line search; a single batch serves for both.
        update_old: move old weights of consumers by dW too.
        amplitudes: values of gamma for the line search, in any order. Above 1 new neurons overshoot the functional
            gradient, and training may diverge.
        ridge: added to the diagonal of second moments, relative to its mean.
        fallback: "pairs" grows unsupported groups by function-preserving pairs; None raises an error for them.
        gain: randomly drawn new hidden weights have variance gain / fan_in.
        new_weights: see `NewWeights`.
    """

    preserves = False

    def __init__(
        self,
        batches: int = 2,
        update_old: bool = False,
        amplitudes: Sequence[float] = (1.0, 0.25, 0.0625, 0.0156, 0.0039, 0.001),
        ridge: float = 1.0,
        fallback: Literal["pairs"] | None = None,
        gain: float = 2.0,
        new_weights: WeightRule = "fan_in",
    ) -> None:
        super().__init__(batches, fallback, gain, new_weights)
        if isinstance(amplitudes, str) or not isinstance(amplitudes, Sequence) or not amplitudes:
            raise ValueError(f"amplitudes must be a list of numbers above 0, not {amplitudes!r}.")
        flag(update_old=update_old)
        for amplitude in amplitudes:
            above(0, amplitudes=amplitude)
        at_least(0, ridge=ridge)
        self.update_old, self.amplitudes, self.ridge = update_old, tuple(amplitudes), ridge

    def refuses(self, fans: GroupTensors, before: int, after: int) -> str | None:
        """Refuse channels with several producers or consumers, and those that pass a depthwise convolution."""
        return refuses_bottleneck(fans)

    def grow_from_data(
        self, context: GrowthContext, data: Measurement, groups: Sequence[GroupTensors]
    ) -> tuple[GrownTensors, dict[str, str]]:
        """Compute every tensor at the new widths."""
        modules = dict(data.model.named_modules())
        refused = {
            fans.group: f"{layer.name} is neither nn.Linear nor an nn.Conv2d without groups and with zero padding"
            for fans in groups
            for layer in (*fans.producers, *fans.consumers)
            if not usual(modules.get(layer.name))
        } or {
            fans.group: f"{norm.name} normalises each sample, but is neither an InstanceNorm nor a GroupNorm of torch"
            for fans in groups
            for norm in fans.norms
            if norm.per_sample and not isinstance(modules.get(norm.name), (_InstanceNorm, nn.GroupNorm))
        }
        if refused:
            return GrownTensors({}), refused
        train, held_out = data.split()
        found_moments = moments(context, train, groups, modules)
        view = ChannelView(context.graph, context.old_widths, context.old_widths)
        refused = {
            fans.group: f"{layer.name} is called more than once"
            for fans in groups
            for layer in (fans.producers[0], fans.consumers[0])
            if float(found_moments[f"calls {layer.name}"]) != 1.0
        } or {
            fans.group: f"{fans.producers[0].name} has several rows for each of its channels"
            for fans in groups
            if view.size(fans.incoming, fans.group) != len(found_moments[f"input {fans.group}"])
        }
        if refused:
            return GrownTensors({}), refused
        updates = {
            fans.group: solved(found_moments[f"square {fans.group}"], found_moments[f"goal {fans.group}"], self.ridge)
            for fans in groups
        }
        products = bottleneck(self, context, train, groups, updates, modules)
        neurons = {}
        for fans in groups:
            count = context.new_widths[fans.group] - context.old_widths[fans.group]
            square = found_moments[f"input {fans.group}"]
            neurons[fans.group] = best_neurons(square, products[fans.group], count, self.ridge)
        return self._at_the_best_amplitude(context, train, held_out, groups, updates, neurons), {}

    def _at_the_best_amplitude(
        self,
        context: GrowthContext,
        train: Measurement,
        held_out: Measurement,
        groups: Sequence[GroupTensors],
        updates: Mapping[str, Tensor],
        neurons: Mapping[str, tuple[Tensor, Tensor, Tensor]],
    ) -> GrownTensors:
        view = ChannelView(context.graph, context.new_widths, context.old_widths)
        empty = padded(self, context)
        rows, drawn = self._rows(context, groups, neurons)
        unit = dict(empty)
        for fans in groups:
            view.write(unit, fans.incoming, fans.group, view.new(fans.group), rows[fans.group])
        statistics = _statistics(train, unit, groups)

        def at(gamma: float) -> dict[str, Tensor]:
            tensors = dict(empty)
            for fans in groups:
                new, omega = view.new(fans.group), neurons[fans.group][1]
                # Drawn neurons have zero outgoing weights, and at gamma 0 all new ones.
                scale = torch.where(drawn[fans.group], 1.0, sqrt(gamma or 1.0))
                view.write(tensors, fans.incoming, fans.group, new, rows[fans.group] * scale[:, None])
                outgoing_scale = torch.where(drawn[fans.group], 0.0, sqrt(gamma))
                view.write(tensors, fans.outgoing, fans.group, new, omega * outgoing_scale[:, None])
                if self.update_old:
                    _add_update(tensors, context, fans, updates[fans.group] * gamma)
                _identity(tensors, view, fans, new, statistics, scale)
            return tensors

        before = held_out.loss(context.old)
        amplitude, lowest, best = 0.0, before, None
        for gamma in sorted(self.amplitudes, reverse=True):
            tensors = at(gamma)
            loss = held_out.loss(tensors, finite=False)
            if loss < lowest:
                amplitude, lowest, best = gamma, loss, tensors
            elif amplitude:
                break
        report = {
            "amplitude": amplitude,
            "loss_before": before,
            "loss_after": lowest,
            "singular_values": {fans.group: neurons[fans.group][2].tolist() for fans in groups},
        }
        return GrownTensors(at(0.0) if best is None else best, report=report)

    def _rows(
        self,
        context: GrowthContext,
        groups: Sequence[GroupTensors],
        neurons: Mapping[str, tuple[Tensor, Tensor, Tensor]],
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Incoming weights of new neurons at gamma 1, [count, entries], and a mask of those that are drawn, [count]."""
        view = ChannelView(context.graph, context.new_widths, context.old_widths)
        rows, drawn = {}, {}
        for fans in groups:
            alpha, _, values = neurons[fans.group]
            drawn[fans.group] = values <= _LEAST * values[0]
            rows[fans.group] = alpha
            if bool(drawn[fans.group].any()):
                names = {slot.name for slot in fans.incoming}
                new = {name: self.new_weights.draw(context, name).to(alpha) for name in names}
                drawn_rows = view.read(new, fans.incoming, fans.group, view.new(fans.group))
                rows[fans.group] = torch.where(drawn[fans.group][:, None], drawn_rows, alpha)
        return rows, drawn


def best_neurons(square: Tensor, product: Tensor, count: int, ridge: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Neurons that minimise E|v - omega^T alpha h|^2, from S = E[h h^T], [I, I], and N = E[h v^T], [I, O].

    `ridge` is added to the diagonal of S, relative to its mean.

    Returns:
        alpha [count, I], omega [count, O] and singular values [count]; zero beyond the rank of the moments.
    """
    product = product.double()
    factor = cholesky(square, ridge)
    if factor is not None:
        # L^-1 N instead of S^-1/2 N: L^-1 is S^-1/2 up to a rotation, which L^-T undoes.
        left, sizes, right = torch.linalg.svd(
            torch.linalg.solve_triangular(factor, product, upper=False), full_matrices=False
        )
        left = torch.linalg.solve_triangular(factor.T, left, upper=True)
    else:
        values, vectors = torch.linalg.eigh(square.double())
        kept = values > RANK * values.max().clamp(min=torch.finfo(torch.float64).tiny)
        root = vectors[:, kept] @ torch.diag(values[kept].rsqrt()) @ vectors[:, kept].T
        left, sizes, right = torch.linalg.svd(root @ product, full_matrices=False)
        left = root @ left
    rank = min(count, len(sizes))
    scale = sizes[:rank].sqrt()
    alpha, omega, singular_values = (left.new_zeros(count, *n) for n in ([len(square)], [product.shape[1]], []))
    alpha[:rank] = (left[:, :rank] * scale).T
    omega[:rank] = right[:rank] * scale[:, None]
    singular_values[:rank] = sizes[:rank]
    signs = upright(alpha)
    return alpha * signs, omega * signs, singular_values


def _statistics(data: Measurement, tensors: Mapping[str, Tensor], groups: Sequence[GroupTensors]) -> dict[str, Tensor]:
    """Mean and variance of each norm's input over the batches, by the keys "mean NORM" and "var NORM".

    For norms with statistics per sample, the variance is within each sample.
    """
    norms = {norm.name: norm for fans in groups for norm in fans.norms}
    if not norms:
        return {}

    def visit(one: Pass) -> dict[str, Tensor]:
        means = {}
        for name, norm in norms.items():
            x = one.seen[name].x.double().movedim(1, 0).flatten(1)
            means[f"mean {name}"], means[f"square {name}"] = x.mean(1), x.square().mean(1)
            if norm.per_sample:
                means[f"var {name}"] = one.seen[name].x.double().flatten(2).var(2, correction=0).mean(0)
        return means

    statistics = data.run(tensors, visit, watched=list(norms), gradients=False)
    for name in norms:
        variance = (statistics.pop(f"square {name}") - statistics[f"mean {name}"].square()).clamp(min=0)
        statistics.setdefault(f"var {name}", variance)
    return statistics


def _identity(
    tensors: dict[str, Tensor],
    view: ChannelView,
    fans: GroupTensors,
    new: Tensor,
    statistics: Mapping[str, Tensor],
    scale: Tensor,
) -> None:
    """Set norms to the identity on new channels, whose inputs are `scale` [channels] times the measured ones."""
    for norm in fans.norms:
        first = norm.weight or norm.running_mean
        assert first is not None
        places = view.places(view.graph.axes[first][0], fans.group)[new].flatten()
        each = scale.repeat_interleave(len(places) // len(new))
        mean = statistics[f"mean {norm.name}"][places] * each
        variance = statistics[f"var {norm.name}"][places] * each**2
        for name, values in (
            (norm.weight, (variance + norm.eps).sqrt()),
            (norm.bias, mean),
            (norm.running_mean, mean),
            (norm.running_var, variance),
        ):
            if name is not None:
                view.write(tensors, [TensorDim(name, 0)], fans.group, new, values.view(len(new), -1))


def _add_update(tensors: dict[str, Tensor], context: GrowthContext, fans: GroupTensors, update: Tensor) -> None:
    """Add `update`, [entries of a row (and 1 for the bias), rows], to a consumer's old weight and bias."""
    layer = fans.consumers[0]
    start = 0
    for name in [layer.weight] if layer.bias is None else [layer.weight, layer.bias]:
        before = context.old[name]
        count = before[0].numel() if before.dim() > 1 else 1
        part = update[start : start + count].T.reshape(before.shape)
        start += count
        axes = context.axes(name)
        moved = resized(part.to(before), axes, context.old_widths, context.new_widths)
        tensors[name] = tensors[name] + moved

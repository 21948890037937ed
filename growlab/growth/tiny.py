"""TINY: new neurons that do best what the old ones cannot (Verbockhaven, Rudkiewicz, Charpiat, Chevallier, 2024)."""

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from growlab.growth.data_driven import DataDriven, padded, upright
from growlab.growth.fans import Fans, Slot, View
from growlab.growth.measurement import Measurement, Seen
from growlab.growth.method import Expansion, GrownTensors, WeightRule
from growlab.growth.moments import bottleneck, moments, usual
from growlab.settings import above, flag
from growlab.widths import resized

# Singular values of S below this part of the largest count as zero, as in GroMo.
_RANK = 1e-6


class Tiny(DataDriven):
    """Add the neurons that follow the functional gradient best where the weights that are there cannot.

    With h what the producer reads (1 for its bias), b what the consumer reads and V = -dL/dz of what it puts out,

        dW = E[V b^T] E[b b^T]^-1                                   the best that old weights can do (Prop. 3.1)
        S = E[h h^T],  N = E[h (V - dW b)^T],  S^-1/2 N = U D W^T
        alpha_k = sqrt(d_k) S^-1/2 u_k,  omega_k = sqrt(d_k) w_k     what leads into and out of neuron k (Prop. 3.2)

    of largest d_k first: among k neurons they reduce E|V - dW b - omega alpha^T h|^2 most. An amplitude gamma is then
    found by line search over the loss on the batches: new neurons get sqrt(gamma) on both sides, and old weights
    gamma dW if `update_old`. Convolutions: h and b are patches; S takes a patch as often as the consumer reads its
    position, as in GroMo, so that overlapping of the consumer's is left out of account (exact for 1x1).

    **Preserves** nothing exactly: the function moves by what gamma says, to the lowest loss that the line search
    finds; the report has the loss before and after. New neurons alone need not lower it: they do what is best beside
    dW, and ReLU passes half of what they were worked out for.
    **Departs from the paper**: N is measured in the network with candidates whose outgoing weights are 1 in one
    entry and whose incoming weights are zero, so that it passes pooling and flattening in between. A batch
    normalisation of new channels starts as the identity on the batches, an instance normalisation as what is nearest
    to it: statistics are of each sample. All layers move at once, with one gamma.

    Args:
        batches: training batches that it is shown at an event: the first ones of the epoch that begins.
        update_old: move old weights of consumers by dW too.
        amplitudes: gammas that the line search tries, each forward passes over the batches.
        fallback: "pairs" lets function-preserving pairs grow the groups for which the method is not defined; None
            refuses them.
        gain: of new hidden weights that are drawn, variance gain / fan_in.
        new_weights: see `NewWeights`.
    """

    preserves = False

    def __init__(
        self,
        batches: int = 1,
        update_old: bool = False,
        amplitudes: Sequence[float] = (256.0, 64.0, 16.0, 4.0, 1.0, 0.25, 0.0625, 0.0156, 0.0039, 0.001),
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
        self.update_old, self.amplitudes = update_old, tuple(amplitudes)

    def refuses(self, fans: Fans, before: int, after: int) -> str | None:
        """Channels that more than one layer puts out or takes, or that pass a depthwise convolution."""
        for layers, what in ((fans.producers, "put out"), (fans.consumers, "taken")):
            if len({layer.weight for layer in layers}) != 1:
                names = ", ".join(layer.name for layer in layers[:2]) or "no layer"
                return f"its channels are {what} by {names}{' and others' if len(layers) > 2 else ''}, not one layer"
        if fans.depthwise:
            return f"{fans.depthwise[0].name} maps each channel by its own filter"
        if len(fans.into) > 2 or len(fans.out) > 1:
            return f"{fans.producers[0].name} has its channels on several axes"
        if fans.producers[0].transposed or fans.consumers[0].transposed:
            return f"{fans.producers[0].name} or {fans.consumers[0].name} is a transposed convolution"
        return None

    def grow_from_data(
        self, expansion: Expansion, data: Measurement, groups: Sequence[Fans]
    ) -> tuple[GrownTensors, dict[str, str]]:
        """Compute every tensor at the new widths."""
        modules = dict(data.model.named_modules())
        refused = {
            fans.group: f"{layer.name} is no linear layer or 2d convolution without groups and with zero padding"
            for fans in groups
            for layer in (*fans.producers, *fans.consumers)
            if not usual(modules.get(layer.name))
        }
        if refused:
            return GrownTensors({}), refused
        refused = {
            fans.group: f"{norm.name} normalises each sample, and is no module of torch that does nothing else"
            for fans in groups
            for norm in fans.norms
            if norm.per_sample and not isinstance(modules.get(norm.name), (_InstanceNorm, nn.GroupNorm))
        }
        if refused:
            return GrownTensors({}), refused
        found_moments = moments(expansion, data, groups, modules)
        refused = {
            fans.group: f"{layer.name} is called more than once"
            for fans in groups
            for layer in (fans.producers[0], fans.consumers[0])
            if float(found_moments[f"calls {layer.name}"]) != 1.0
        }
        if refused:
            return GrownTensors({}), refused
        view = View(expansion.graph, expansion.old_widths, expansion.old_widths)
        refused = {
            fans.group: f"{fans.producers[0].name} has several rows for each of its channels"
            for fans in groups
            if view.size(fans.into, fans.group) != len(found_moments[f"input {fans.group}"])
        }
        if refused:
            return GrownTensors({}), refused
        updates = {
            fans.group: solved(found_moments[f"square {fans.group}"], found_moments[f"goal {fans.group}"])
            for fans in groups
        }
        products = bottleneck(self, expansion, data, groups, updates, modules)
        found = {}
        for fans in groups:
            count = expansion.new_widths[fans.group] - expansion.old_widths[fans.group]
            found[fans.group] = best_neurons(
                found_moments[f"input {fans.group}"], products[fans.group], count
            )
        return self._at_the_best_amplitude(expansion, data, groups, updates, found), {}

    def _at_the_best_amplitude(
        self,
        expansion: Expansion,
        data: Measurement,
        groups: Sequence[Fans],
        updates: Mapping[str, Tensor],
        found: Mapping[str, tuple[Tensor, Tensor, Tensor]],
    ) -> GrownTensors:
        view = View(expansion.graph, expansion.new_widths, expansion.old_widths)
        empty = padded(self, expansion)
        unit = dict(empty)
        for fans in groups:
            new = _new(expansion, fans)
            view.write(unit, fans.into, fans.group, new, found[fans.group][0])
        statistics = _statistics(data, unit, groups)

        def at(gamma: float) -> dict[str, Tensor]:
            tensors = dict(empty)
            for fans in groups:
                alpha, omega, _ = found[fans.group]
                new = _new(expansion, fans)
                view.write(tensors, fans.into, fans.group, new, alpha * sqrt(gamma))
                view.write(tensors, fans.out, fans.group, new, omega * sqrt(gamma))
                if self.update_old:
                    _add_update(tensors, expansion, fans, updates[fans.group] * gamma)
                _identity(tensors, view, fans, new, statistics, sqrt(gamma))
            return tensors

        before = data.loss(expansion.old)
        losses = [data.loss(at(gamma)) for gamma in self.amplitudes]
        best = min(range(len(losses)), key=lambda place: losses[place])
        report = {
            "amplitude": self.amplitudes[best],
            "loss_before": before,
            "loss_after": losses[best],
            "singular_values": {fans.group: found[fans.group][2].tolist() for fans in groups},
        }
        return GrownTensors(at(self.amplitudes[best]), report=report)


def best_neurons(square: Tensor, product: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The neurons that reduce E|v - omega^T alpha h|^2 most, from second moments.

    Args:
        square: S = E[h h^T], [I, I].
        product: N = E[h v^T], [I, O].
        count: of neurons.

    Returns:
        alpha [count, I], omega [count, O] and singular values [count]; zero where the moments have no more to give.
    """
    values, vectors = torch.linalg.eigh(square.double())
    known = values > _RANK * values.max().clamp(min=torch.finfo(torch.float64).tiny)
    root = vectors[:, known] @ torch.diag(values[known].rsqrt()) @ vectors[:, known].T
    left, sizes, right = torch.linalg.svd(root @ product.double(), full_matrices=False)
    kept = min(count, len(sizes))
    scale = sizes[:kept].sqrt()
    alpha, omega = torch.zeros(count, len(square)).to(root), torch.zeros(count, product.shape[1]).to(root)
    alpha[:kept] = (root @ left[:, :kept] * scale).T
    omega[:kept] = right[:kept] * scale[:, None]
    result = torch.zeros(count).to(root)
    result[:kept] = sizes[:kept]
    signs = upright(alpha)
    return alpha * signs, omega * signs, result


def solved(square: Tensor, product: Tensor) -> Tensor:
    """S^-1 M with the directions left out that the batches do not tell, [I, O]."""
    inverse = torch.linalg.pinv(square.double(), hermitian=True, rtol=_RANK)
    return inverse @ product.double()


def _statistics(
    data: Measurement, tensors: Mapping[str, Tensor], groups: Sequence[Fans]
) -> dict[str, Tensor]:
    """Mean and variance over the batches of what each norm reads, "mean NORM" and "var NORM".

    The variance is that within each sample where the norm takes it so.
    """
    norms = {norm.name: norm for fans in groups for norm in fans.norms}
    if not norms:
        return {}

    def visit(parameters: Mapping[str, Tensor], loss: Tensor, seen: Mapping[str, Seen]) -> dict[str, Tensor]:
        found = {}
        for name, norm in norms.items():
            x = seen[name].x.double().movedim(1, 0).flatten(1)
            found[f"mean {name}"], found[f"square {name}"] = x.mean(1), x.square().mean(1)
            if norm.per_sample:
                found[f"var {name}"] = seen[name].x.double().flatten(2).var(2, correction=0).mean(0)
        return found

    found = data.run(tensors, visit, watched=list(norms), gradients=False)
    for name in norms:
        variance = (found.pop(f"square {name}") - found[f"mean {name}"].square()).clamp(min=0)
        found.setdefault(f"var {name}", variance)
    return found


def _identity(
    tensors: dict[str, Tensor],
    view: View,
    fans: Fans,
    new: Tensor,
    statistics: Mapping[str, Tensor],
    scale: float,
) -> None:
    """Let norms pass new channels, `scale` times those of the statistics, as they are."""
    for norm in fans.norms:
        first = norm.weight or norm.running_mean
        assert first is not None
        places = view.places(view.graph.axes[first][0], fans.group)[new].flatten()
        mean = statistics[f"mean {norm.name}"][places] * scale
        variance = statistics[f"var {norm.name}"][places] * scale**2
        for name, values in (
            (norm.weight, (variance + norm.eps).sqrt()),
            (norm.bias, mean),
            (norm.running_mean, mean),
            (norm.running_var, variance),
        ):
            if name is not None:
                view.write(tensors, [Slot(name, 0)], fans.group, new, values.view(len(new), -1))


def _add_update(tensors: dict[str, Tensor], expansion: Expansion, fans: Fans, update: Tensor) -> None:
    """Add to a consumer's old weights and bias, [entries of a row (and 1 for the bias), rows]."""
    layer = fans.consumers[0]
    pieces = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
    start = 0
    for name in pieces:
        before = expansion.old[name]
        count = before[0].numel() if before.dim() > 1 else 1
        part = update[start : start + count].T.reshape(before.shape)
        start += count
        axes = expansion.axes(name)
        moved = resized(part.to(before), axes, expansion.old_widths, expansion.new_widths)
        tensors[name] = tensors[name] + moved


def _new(expansion: Expansion, fans: Fans) -> Tensor:
    return torch.arange(expansion.old_widths[fans.group], expansion.new_widths[fans.group])

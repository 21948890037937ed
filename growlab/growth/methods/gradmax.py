"""GradMax: new neurons with the largest gradient (Evci et al., ICLR 2022)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from growlab.base.settings import above, one_of, whole
from growlab.growth.data_driven import Candidates, DataDriven, lengths, padded, unit, upright
from growlab.growth.fans import ChannelView, GroupTensors, names_of
from growlab.growth.measurement import Measurement, right_derivatives
from growlab.growth.method import GrownTensors, GrowthContext, WeightRule

SIDES = ("auto", "fan_in", "fan_out")
# Relative change of the loss that counts as rounding if new channels should not contribute.
_ROUNDING = 1e-4
# Incoming weights tried for new channels, in units of `near_zero`: zero, then just above and below it.
_RESTS = (0.0, 1.0, -1.0)
# Fractions of the predicted gradient norm: enough to stop searching, and the least that is accepted.
_ENOUGH, _LEAST = 0.99, 1e-3


class GradMax(DataDriven):
    """Add neurons that leave the function unchanged and get the largest gradient.

    Without a batch or instance normalisation of the new channels, their incoming weights are zero and their outgoing
    weights Z maximise the norm of the gradient of the incoming ones. With f(0) = 0, f'(0) = 1 that gradient is Z^T G,

        G = E[dL/dz_next h^T]        [outgoing entries, incoming entries]

    with h the producers' input and z_next the consumers' output (Eq. 8). Columns of Z are the first left singular
    vectors u_1, ..., u_k of G (Eq. 11), scaled to c, `scale` times the mean length of old columns: of all Z with
    orthogonal columns of length c it has the largest gradient, c sqrt(sigma_1^2 + ... + sigma_k^2).

    Such a normalisation would amplify these channels by 1 / sqrt(eps) in the first step. There the outgoing weights are
    zero, and the incoming ones maximise the norm of the outgoing ones' gradient, by `steps` steps of normalised
    gradient ascent from drawn weights of the usual length ("GradMaxOpt"); `zero="fan_out"` does so everywhere.

    torch's ReLU has the derivative 0 at 0, so new channels there would never learn. If the grown network does not have
    the predicted gradient, they start next to zero: their biases are 2^-100, or without a bias their rows have that
    length. In half precision it is 2^-23.

    **Preserves** exactly, in eval and train mode; in half precision up to rounding.
    **Departs from the paper**: G is measured without hooks on layers: for each outgoing entry a candidate channel with
    a 1 there is added to the network, and the gradient of its incoming weights is a row of G. So G is defined for
    several producers and consumers (residual streams), and for pooling, flattening and depthwise convolutions in
    between, as long as zero inputs give zero channels. The ascent keeps the best weights of each channel.

    Args:
        batches: number of training batches used at an event: the first ones of the epoch that begins.
        zero: "fan_in", "fan_out", or "auto": "fan_out" if a batch or instance normalisation takes the channels, else
            "fan_in".
        scale: length of a new channel's outgoing weights relative to the mean of the old ones.
        steps: number of ascent steps, two passes each.
        rate: length of an ascent step relative to the weights, falling linearly to 0.
        fallback: "pairs" grows unsupported groups by function-preserving pairs; None raises an error for them.
        gain: randomly drawn new hidden weights have variance gain / fan_in.
        new_weights: see `NewWeights`.
    """

    def __init__(
        self,
        batches: int = 1,
        zero: Literal["auto", "fan_in", "fan_out"] = "auto",
        scale: float = 1.0,
        steps: int = 20,
        rate: float = 0.5,
        fallback: Literal["pairs"] | None = None,
        gain: float = 2.0,
        new_weights: WeightRule = "fan_in",
    ) -> None:
        super().__init__(batches, fallback, gain, new_weights)
        one_of(SIDES, zero=zero)
        above(0, scale=scale, rate=rate)
        whole(1, steps=steps)
        self.zero, self.scale, self.steps, self.rate = zero, scale, steps, rate

    def refuses(self, fans: GroupTensors, before: int, after: int) -> str | None:
        """Refuse channels without a producer or consumer, or normalised ones if `zero="fan_in"`."""
        if not fans.incoming or not fans.outgoing:
            return f"no layer {'consumes' if fans.incoming else 'produces'} its channels"
        if fans.norms and self.zero == "fan_in":
            return f"{fans.norms[0].name} would divide new channels that are zero by sqrt(eps)"
        return None

    def grow_from_data(
        self, context: GrowthContext, data: Measurement, groups: Sequence[GroupTensors]
    ) -> tuple[GrownTensors, dict[str, str]]:
        """Compute every tensor at the new widths."""
        ascended = [fans for fans in groups if self.zero == "fan_out" or (self.zero == "auto" and fans.norms)]
        solved = [fans for fans in groups if fans not in ascended]
        report: dict[str, dict[str, object]] = {fans.group: {} for fans in groups}
        matrices: dict[str, Tensor] = {}
        predicted: dict[str, float] = {}
        if solved:
            matrices, loss = accumulated(self, context, data, solved)
            if infinite := [group for group, matrix in matrices.items() if not bool(matrix.isfinite().all())]:
                reason = "the gradient of its incoming weights is NaN or infinite while its channels are zero"
                return GrownTensors({}), dict.fromkeys(infinite, reason)
            flat = [fans for fans in solved if not bool(matrices[fans.group].any())]
            if flat:
                return GrownTensors({}), _not_zero(self, context, data, solved) or _why_flat(context, data, flat)
        tensors = padded(self, context)
        view = ChannelView(context.graph, context.new_widths, context.old_widths)
        for fans in solved:
            old, new = view.old(fans.group), view.new(fans.group)
            directions, values, _ = torch.linalg.svd(matrices[fans.group], full_matrices=False)
            chosen = directions[:, torch.arange(len(new)) % directions.shape[1]].T
            length = self.scale * _mean_length(view.read(tensors, fans.outgoing, fans.group, old))
            view.write(tensors, fans.outgoing, fans.group, new, chosen * upright(chosen) * length)
            # A singular vector that is used twice counts twice.
            kept = values[torch.arange(len(new)) % len(values)]
            predicted[fans.group] = length * float(torch.linalg.vector_norm(kept))
            report[fans.group] = {"zero": "fan_in", "singular_values": kept.tolist()}
        if solved:
            measured, at_zero = self._write_incoming(context, data, solved, tensors, view, predicted)
            # The outgoing weights of channels that are zero do not matter.
            if _differ(at_zero, loss) and (refused := _not_zero(self, context, data, solved)):
                return GrownTensors({}), refused
            refused = {
                group: "no gradient reaches its incoming weights (does an activation have the derivative 0 at 0?)"
                for group, norm in measured.items()
                if norm < _LEAST * predicted[group]
            }
            if refused:
                return GrownTensors({}), refused
            for group, norm in measured.items():
                report[group] |= {"gradient_norm": norm, "gradient_norm_bound": predicted[group]}
        if ascended:
            for group, norms in self._ascend(context, data, ascended, tensors, view).items():
                report[group] = {"zero": "fan_out", "gradient_norm": norms[-1], "gradient_norm_drawn": norms[0]}
        return GrownTensors(tensors, report={"groups": report}), {}

    def _write_incoming(
        self,
        context: GrowthContext,
        data: Measurement,
        groups: Sequence[GroupTensors],
        tensors: dict[str, Tensor],
        view: ChannelView,
        predicted: Mapping[str, float],
    ) -> tuple[dict[str, float], float]:
        """Write incoming weights at or near zero for which the network has the `predicted` gradient.

        Return the norm of the actual gradient, by group, and the mean loss at zero weights.
        """
        best: dict[str, float] = {}
        losses: list[float] = []
        chosen: dict[str, Tensor] = {}
        names = names_of(groups, "incoming")
        for side in _RESTS:
            trying = [fans for fans in groups if best.get(fans.group, -1.0) < _ENOUGH * predicted[fans.group]]
            if not trying:
                break
            rests = {fans.group: _next_to_zero(context, fans, view, data.near_zero) * side for fans in trying}
            for fans in trying:
                view.write(tensors, fans.incoming, fans.group, view.new(fans.group), rests[fans.group])
            gradients = data.gradients(tensors, names)
            losses.append(float(gradients[""]))
            for fans in trying:
                rows = view.read(gradients, fans.incoming, fans.group, view.new(fans.group))
                norm = float(torch.linalg.vector_norm(rows.double()))
                if norm > best.get(fans.group, -1.0):
                    best[fans.group], chosen[fans.group] = norm, rests[fans.group]
        for fans in groups:
            view.write(tensors, fans.incoming, fans.group, view.new(fans.group), chosen[fans.group])
        return best, losses[0]

    def _ascend(
        self,
        context: GrowthContext,
        data: Measurement,
        groups: Sequence[GroupTensors],
        tensors: dict[str, Tensor],
        view: ChannelView,
    ) -> dict[str, tuple[float, float]]:
        """Write incoming weights of new channels that maximise the gradient of their outgoing ones.

        Return the norm of that gradient by group: with drawn weights, and after the ascent.
        """
        ascents = [_Ascent.start(self, context, fans, tensors, view) for fans in groups]
        for ascent in ascents:
            ascent.write(tensors, view)
        outgoing = names_of(groups, "outgoing")
        incoming = list(dict.fromkeys(slot.name for fans in groups for slot in _weights(fans)))
        started: dict[str, float] = {}
        for step in range(self.steps + 1):
            gradients = data.gradients(tensors, outgoing)
            directions = {name: torch.zeros_like(tensors[name]) for name in outgoing}
            for ascent in ascents:
                rows = view.read(gradients, ascent.fans.outgoing, ascent.fans.group, ascent.new)
                ascent.keep_best(lengths(rows))
                started.setdefault(ascent.fans.group, float(torch.linalg.vector_norm(ascent.best)))
                view.write(directions, ascent.fans.outgoing, ascent.fans.group, ascent.new, rows)
            if step == self.steps:
                break
            # d/dw ||g||^2 / 2 = (dg/dw)^T g: g is a mean over batches, so a second pass keeps it fixed.
            slopes = data.products(tensors, directions, incoming)
            for ascent in ascents:
                slope = view.read(slopes, _weights(ascent.fans), ascent.fans.group, ascent.new)
                ascent.step(slope, self.rate * (1 - step / self.steps))
                ascent.write(tensors, view)
        for ascent in ascents:
            ascent.weights = ascent.best_weights
            ascent.write(tensors, view)
        return {
            ascent.fans.group: (started[ascent.fans.group], float(torch.linalg.vector_norm(ascent.best)))
            for ascent in ascents
        }


@dataclass
class _Ascent:
    """Gradient ascent on the incoming weights of a group's new channels, [channels, entries]."""

    fans: GroupTensors
    new: Tensor
    weights: Tensor
    best_weights: Tensor
    best: Tensor
    length: float

    @classmethod
    def start(
        cls,
        method: DataDriven,
        context: GrowthContext,
        fans: GroupTensors,
        tensors: Mapping[str, Tensor],
        view: ChannelView,
    ) -> "_Ascent":
        old, new = view.old(fans.group), view.new(fans.group)
        weights = _weights(fans)
        names = dict.fromkeys(slot.name for slot in weights)
        drawn = {name: method.new_weights.draw(context, name).to(tensors[name]) for name in names}
        length = _mean_length(view.read(tensors, weights, fans.group, old))
        start = _at_length(view.read(drawn, weights, fans.group, new), length)
        return cls(fans, new, start, start, torch.full((len(new),), -1.0).to(start), length)

    def keep_best(self, norms: Tensor) -> None:
        better = norms > self.best
        self.best_weights = torch.where(better[:, None], self.weights, self.best_weights)
        self.best = torch.where(better, norms, self.best)

    def step(self, slope: Tensor, rate: float) -> None:
        step = rate * _at_length(slope.to(self.weights), self.length)
        self.weights = _at_length(self.weights + step, self.length)

    def write(self, tensors: dict[str, Tensor], view: ChannelView) -> None:
        view.write(tensors, _weights(self.fans), self.fans.group, self.new, self.weights)


def accumulated(
    method: DataDriven, context: GrowthContext, data: Measurement, groups: Sequence[GroupTensors]
) -> tuple[dict[str, Tensor], float]:
    """Measure the matrix G of each group, [outgoing entries, incoming entries], float64, and the mean loss.

    All groups are measured at once: new channels are zero and so do not affect one another.
    """
    names = names_of(groups, "incoming")
    rows: dict[str, list[Tensor]] = {fans.group: [] for fans in groups}
    growth = {group: context.new_widths[group] - width for group, width in context.old_widths.items()}
    for candidates in Candidates.of_each_entry(method, context, groups, growth):
        view, gradients = candidates.view, data.gradients(candidates.tensors, names, [right_derivatives()])
        for fans in groups:
            rows[fans.group].append(
                view.read(gradients, fans.incoming, fans.group, candidates.new[fans.group]).double()
            )
    return {group: torch.cat(parts) for group, parts in rows.items()}, float(gradients[""])


def _why_flat(context: GrowthContext, data: Measurement, groups: Sequence[GroupTensors]) -> dict[str, str]:
    """Return why no gradient reaches the incoming weights of new channels, by group."""
    gradients = data.gradients(context.old, names_of(groups, "incoming"))
    return {
        fans.group: (
            "the gradient of its incoming weights is zero while its channels are zero (are they multiplied?)"
            if any(bool(gradients[slot.name].any()) for slot in fans.incoming)
            else "its old channels get no gradient either: the network no longer learns (lower optimizer.lr)"
        )
        for fans in groups
    }


def _not_zero(
    method: DataDriven, context: GrowthContext, data: Measurement, groups: Sequence[GroupTensors]
) -> dict[str, str]:
    """Return groups whose new channels change the loss although their incoming weights are zero, with reasons."""

    def loss(chosen: Sequence[GroupTensors]) -> float:
        grown = {fans.group: context.old_widths[fans.group] + 1 for fans in chosen}
        wider = replace(context, new_widths={**context.old_widths, **grown})
        view = ChannelView(context.graph, wider.new_widths, context.old_widths)
        tensors = padded(method, wider)
        for fans in chosen:
            source = context.generator(f"trial of {fans.group}")
            drawn = torch.randn(1, view.size(fans.outgoing, fans.group), generator=source)
            view.write(tensors, fans.outgoing, fans.group, view.new(fans.group), drawn)
        return data.loss(tensors)

    plain = data.loss(context.old)

    def differs(chosen: Sequence[GroupTensors]) -> bool:
        return _differ(loss(chosen), plain)

    if not differs(groups):
        return {}
    alone = [fans for fans in groups if differs([fans])] or groups
    return {
        fans.group: f"behind {fans.producers[0].name} its channels are not zero although their incoming weights are"
        for fans in alone
    }


def _differ(one: float, other: float) -> bool:
    return abs(one - other) > _ROUNDING * (abs(other) + 1e-3)


def _next_to_zero(context: GrowthContext, fans: GroupTensors, view: ChannelView, near_zero: float) -> Tensor:
    """Incoming weights next to zero, [channels, entries]; the same for all new channels."""
    pieces = []
    biased = {layer.weight for layer in fans.producers if layer.bias in {slot.name for slot in fans.incoming}}
    for slot in fans.incoming:
        row = torch.zeros(view.size([slot], fans.group))
        if slot not in _weights(fans):
            row += near_zero
        elif slot.name not in biased:
            source = context.generator(f"rest of {fans.group} at {slot.name}")
            row = unit(torch.randn(1, len(row), generator=source))[0] * near_zero
        pieces.append(row)
    return torch.cat(pieces).expand(len(view.new(fans.group)), -1)


def _weights(fans: GroupTensors) -> list:
    biases = {layer.bias for layer in fans.producers}
    return [slot for slot in fans.incoming if slot.name not in biases]


def _mean_length(rows: Tensor) -> float:
    return float(lengths(rows.double()).mean())


def _at_length(rows: Tensor, length: float) -> Tensor:
    return unit(rows) * length

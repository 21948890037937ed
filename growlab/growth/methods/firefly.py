"""FireFly: grow a neighbourhood of the network and keep the best of it (Wu, Liu, Stone, Liu, NeurIPS 2020)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

import torch
from torch import Tensor

from growlab.base.settings import above, at_least, whole
from growlab.growth.data_driven import DataDriven, lengths, padded, unit
from growlab.growth.fans import ChannelView, GroupTensors, names_of
from growlab.growth.measurement import Measurement
from growlab.growth.method import GrownTensors, GrowthContext, WeightRule
from growlab.growth.methods.splitting import Split, directions, refuses_to_split
from growlab.widths import resized

# If everything behind a neuron is linear, the gradients of its halves are equal. A difference below this many rounding
# errors counts as 0, since steps of a fixed length would turn rounding into a direction.
_ROUNDINGS = 100.0


class FireFly(DataDriven):
    """Over-grow with many small candidate neurons, and keep those that lower the loss most to first order.

    Candidates of a group are a split of each neuron, theta +- e d, each half with half of the outgoing weights, and new
    neurons with drawn rows a and columns e b (Eq. 3). First d, a and b descend on the loss with e fixed (step one of
    Algorithm 1), `steps` steps at fixed lengths: |d| = |theta|, columns b of the mean length of old ones. Then each
    candidate is scored by the integral of dL/de from 0 to e, by the midpoint rule: the predicted decrease of the loss
    (step two, Eqs. 6 and 7). In each group the candidates with the largest decrease are kept, with the sign of e that
    gives it.

    **Preserves** up to epsilon; the report has the predicted change of the loss.
    **Departs from the paper**: the schedule says how many neurons each group gets, so candidates compete within a
    group. Steps are normalised, since candidates' gradients are of any size.

    Args:
        batches: number of training batches used at an event: the first ones of the epoch that begins.
        new_candidates: number of new neurons tried for each neuron that the group gets; 0 splits only (FireFly-split).
        steps: number of descent steps, one pass each.
        rate: length of a step relative to the vector that it moves, falling linearly to 0.
        epsilon: size e of the candidates.
        fallback: "pairs" grows unsupported groups by function-preserving pairs; None raises an error for them.
        gain: randomly drawn new hidden weights have variance gain / fan_in.
        new_weights: see `NewWeights`.
    """

    preserves = False

    def __init__(
        self,
        batches: int = 1,
        new_candidates: float = 2.0,
        steps: int = 8,
        rate: float = 0.5,
        epsilon: float = 0.01,
        fallback: Literal["pairs"] | None = None,
        gain: float = 2.0,
        new_weights: WeightRule = "fan_in",
    ) -> None:
        super().__init__(batches, fallback, gain, new_weights)
        at_least(0, new_candidates=new_candidates)
        whole(0, steps=steps)
        above(0, rate=rate, epsilon=epsilon)
        self.new_candidates, self.steps, self.rate, self.epsilon = new_candidates, steps, rate, epsilon

    @property
    def name(self) -> str:
        """Name of the method in growth events and tables."""
        return "FireFly" if self.new_candidates else "FireFlySplit"

    def refuses(self, fans: GroupTensors, before: int, after: int) -> str | None:
        """Refuse more new neurons than candidates, and channels without a producer or consumer."""
        if self.new_candidates < 1:
            return refuses_to_split(fans, before, after)
        return None if fans.incoming and fans.outgoing else "no layer produces, or none consumes, its channels"

    def grow_from_data(
        self, context: GrowthContext, data: Measurement, groups: Sequence[GroupTensors]
    ) -> tuple[GrownTensors, dict[str, str]]:
        """Compute every tensor at the new widths."""
        neighbourhood = _Neighbourhood.drawn(self, context, groups)
        for step in range(self.steps):
            neighbourhood.descend(data, self.rate * (1 - step / self.steps))
        decreases, signs = neighbourhood.scores(data)
        grown, report = {}, {}
        for fans in groups:
            group = fans.group
            count = context.new_widths[group] - context.old_widths[group]
            kept = torch.argsort(decreases[group], descending=True, stable=True)[:count]
            old = context.old_widths[group]
            grown[group] = kept[kept < old].sort()[0].cpu(), kept[kept >= old].sort()[0].cpu() - old
            report[group] = {
                "splits": len(grown[group][0]),
                "new": len(grown[group][1]),
                "predicted_change": -float(decreases[group][kept].sum()),
                "decreases": decreases[group].tolist(),
            }
        return neighbourhood.result(grown, signs, {"groups": report}), {}


@dataclass
class _Neighbourhood:
    """All candidates of an event: `moves` of the splits, and new channels after the old ones in `tensors`."""

    method: FireFly
    context: GrowthContext
    groups: Sequence[GroupTensors]
    wider: GrowthContext
    tensors: dict[str, Tensor]
    moves: dict[str, Tensor]

    @classmethod
    def drawn(cls, method: FireFly, context: GrowthContext, groups: Sequence[GroupTensors]) -> "_Neighbourhood":
        old, after = context.old_widths, context.new_widths
        extra = {fans.group: ceil(method.new_candidates * (after[fans.group] - old[fans.group])) for fans in groups}
        widths = {group: width + extra.get(group, 0) for group, width in old.items()}
        wider = replace(context, new_widths=widths)
        tensors = padded(method, wider)
        names = names_of(groups, "incoming")
        moves = {name: torch.zeros_like(tensors[name]) for name in names}
        self = cls(method, context, groups, wider, tensors, moves)
        view, weights = self._view, {producer.weight for fans in groups for producer in fans.producers}
        rows = {
            name: method.new_weights.draw(wider, name).to(tensors[name]) if name in weights else tensors[name]
            for name in names
        }
        for fans in groups:
            group, channels = fans.group, torch.arange(old[fans.group])
            theta = view.read(tensors, fans.incoming, group, channels)
            away = directions(context, f"splits of {group}", theta)
            view.write(moves, fans.incoming, group, channels, away * lengths(theta)[:, None] * method.epsilon)
            new = view.new(group)
            if not len(new):
                continue
            view.write(tensors, fans.incoming, group, new, view.read(rows, fans.incoming, group, new))
            length = lengths(view.read(tensors, fans.outgoing, group, channels)).mean()
            columns = view.read(tensors, fans.outgoing, group, new)
            columns = directions(context, f"columns of {group}", columns) * length * method.epsilon
            view.write(tensors, fans.outgoing, group, new, columns)
        return self

    @property
    def _view(self) -> ChannelView:
        return ChannelView(self.context.graph, self.wider.new_widths, self.context.old_widths)

    def _split(self) -> Split:
        every = {fans.group: torch.arange(self.context.old_widths[fans.group]) for fans in self.groups}
        return Split.of(self.wider, self.tensors, every)

    def descend(self, data: Measurement, rate: float) -> None:
        """Move all candidates by one normalised gradient step, of length `rate` relative to each vector."""
        moved, plain = self._gradients(data)
        for fans in self.groups:
            old, new = self._view.old(fans.group), self._view.new(fans.group)
            self._step(self.moves, moved, fans, "incoming", old, rate)
            if len(new):
                self._step(self.tensors, plain, fans, "incoming", new, rate)
                self._step(self.tensors, plain, fans, "outgoing", new, rate)

    def _step(
        self,
        tensors: dict[str, Tensor],
        gradients: dict[str, Tensor],
        fans: GroupTensors,
        side: str,
        channels: Tensor,
        rate: float,
    ) -> None:
        slots, view = getattr(fans, side), self._view
        rows = view.read(tensors, slots, fans.group, channels)
        length = lengths(rows)[:, None]
        slope = unit(view.read(gradients, slots, fans.group, channels)) * length
        view.write(tensors, slots, fans.group, channels, unit(rows - rate * slope) * length)

    def _gradients(self, data: Measurement) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the gradients by moves, and those by the tensors that contain new channels."""
        split = self._split()
        names, incoming = names_of(self.groups, "incoming", "outgoing"), names_of(self.groups, "incoming")
        gradients = data.gradients(split.tensors(self.moves), names)
        moved = split.by_moves(gradients, incoming)
        sizes = split.by_plain({name: gradients[name].abs() for name in incoming}, incoming)
        for fans in self.groups:
            self._zero_rounding(moved, sizes, fans)
        return moved, split.by_plain(gradients, names)

    def _zero_rounding(self, moved: dict[str, Tensor], sizes: Mapping[str, Tensor], fans: GroupTensors) -> None:
        """Zero rows of gradients by moves that are no larger than the rounding error of their difference."""
        channels, view = torch.arange(self.context.old_widths[fans.group]), self._view
        rows, size = (view.read(tensors, fans.incoming, fans.group, channels) for tensors in (moved, sizes))
        rounding = _ROUNDINGS * torch.finfo(rows.dtype).eps * lengths(size)
        rows = torch.where((lengths(rows) > rounding)[:, None], rows, torch.zeros_like(rows))
        view.write(moved, fans.incoming, fans.group, channels, rows)

    def scores(self, data: Measurement) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the predicted decrease of the loss for each candidate (splits first), and the signs of new columns."""
        half = _at_half(self)
        moved, plain = half._gradients(data)
        view, decreases, signs = self._view, {}, {}
        for fans in self.groups:
            group, new = fans.group, view.new(fans.group)
            channels = torch.arange(self.context.old_widths[group])
            away = view.read(self.moves, fans.incoming, group, channels)
            splits = -(view.read(moved, fans.incoming, group, channels) * away).sum(1)
            columns = view.read(self.tensors, fans.outgoing, group, new)
            change = (view.read(plain, fans.outgoing, group, new) * columns).sum(1)
            decreases[group], signs[group] = torch.cat([splits, change.abs()]), -change.sign()
        return decreases, signs

    def result(
        self, grown: dict[str, tuple[Tensor, Tensor]], signs: dict[str, Tensor], report: dict[str, object]
    ) -> GrownTensors:
        """Build the grown tensors: old channels, chosen new ones, then copies of splits."""
        old, view = self.context.old_widths, self._view
        widths = {group: width + len(grown[group][1]) if group in grown else width for group, width in old.items()}
        plain = replace(self.context, new_widths=widths)
        target = ChannelView(self.context.graph, widths, old)
        before = self.wider.new_widths
        tensors, moves = (
            {name: resized(tensor, self.context.axes(name), before, widths) for name, tensor in by_name.items()}
            for by_name in (self.tensors, self.moves)
        )
        for fans in self.groups:
            group, chosen = fans.group, grown[fans.group][1]
            if not len(chosen):
                continue
            channels = torch.arange(old[group], widths[group])
            for side in ("incoming", "outgoing"):
                values = view.read(self.tensors, getattr(fans, side), group, old[group] + chosen)
                if side == "outgoing":
                    values = values * signs[group][chosen.to(values.device)][:, None]
                target.write(tensors, getattr(fans, side), group, channels, values)
        split = Split.of(plain, tensors, {group: chosen for group, (chosen, _) in grown.items()})
        return GrownTensors(split.tensors(moves), carry=split.carry(old), report=report)


def _at_half(neighbourhood: _Neighbourhood) -> _Neighbourhood:
    tensors, view = dict(neighbourhood.tensors), neighbourhood._view
    for fans in neighbourhood.groups:
        new = view.new(fans.group)
        values = view.read(tensors, fans.outgoing, fans.group, new)
        view.write(tensors, fans.outgoing, fans.group, new, values / 2)
    moves = {name: move / 2 for name, move in neighbourhood.moves.items()}
    return replace(neighbourhood, tensors=tensors, moves=moves)

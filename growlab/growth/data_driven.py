"""What growth methods share that look at training data: when they refuse, what stands in, how averages follow."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from growlab.base.errors import UserError
from growlab.base.settings import one_of, whole
from growlab.growth.attention_scale import attention_factors, with_attention_scale
from growlab.growth.fans import Fans, fans_of
from growlab.growth.measurement import Measurement
from growlab.growth.method import Expansion, GrownTensors, GrowthMethod, WeightRule
from growlab.growth.methods.net2net import replicate
from growlab.growth.methods.pairs import PairGrowth
from growlab.widths import Carry, WidthGraph, grid, resized

FALLBACKS = ("pairs",)


class DataDriven(GrowthMethod):
    """A method that decides by what the network does on a few training batches.

    Args:
        batches: training batches that it is shown at an event: the first ones of the epoch that begins.
        fallback: "pairs" lets function-preserving pairs grow the groups for which the method is not defined; the
            event's report names them. None refuses them.
        gain: of new hidden weights that are drawn, variance gain / fan_in.
        new_weights: see `NewWeights`.

    Raises:
        ValueError: a value cannot be used.
    """

    output_multiplier = False

    def __init__(
        self,
        batches: int = 1,
        fallback: Literal["pairs"] | None = None,
        gain: float = 2.0,
        new_weights: WeightRule = "fan_in",
    ) -> None:
        super().__init__(0.0, gain, new_weights)
        whole(1, batches=batches)
        one_of((None, *FALLBACKS), fallback=fallback)
        self.batches, self.fallback = batches, fallback

    @abstractmethod
    def refuses(self, fans: Fans, before: int, after: int) -> str | None:
        """Why the method is not defined for a group that grows between these widths; None if it is.

        What stands behind "growth=NAME cannot grow GROUP: " in a message to the user.
        """

    @abstractmethod
    def grow_from_data(
        self, expansion: Expansion, data: Measurement, groups: Sequence[Fans]
    ) -> tuple[GrownTensors, dict[str, str]]:
        """Compute every tensor at the new widths.

        Args:
            expansion: an event in which these groups alone grow.
            data: training batches.
            groups: what makes and takes the channels of each.

        Returns:
            The tensors; and groups for which the data have shown that the method is not defined, with the reason:
            it then grows anew without them.
        """

    def grow(self, expansion: Expansion) -> GrownTensors:
        """Compute every tensor at the new widths.

        Raises:
            UserError: the method is not defined for a group, or there are no data.
        """
        before, after = expansion.old_widths, expansion.new_widths
        growing = [group for group in expansion.graph.groups if before[group] != after[group]]
        if not growing:
            return GrownTensors(dict(expansion.old))
        if expansion.leading is not None:
            return self._follow(expansion, expansion.leading)
        if expansion.data is None:
            raise UserError(f"{self.name} decides by training data; hand `grow` some with `data=`.")
        # Blocks that are yet to come (depth) have no tensors: their groups merely change their numbers.
        absent = {group for group in growing if not _present(expansion, group)}
        fans = {group: fans_of(expansion.graph, group) for group in growing}
        here = [fans[group] for group in growing if group not in absent]
        refused = self._refused(expansion.graph, here, before, after)
        while True:
            self._check(refused)
            first, second = _in_two(expansion, {*refused, *absent})
            pairs = PairGrowth(gain=self.new_weights.gain, new_weights=self.new_weights.rule)
            base = with_attention_scale(first, pairs.grow(first)).tensors
            factors = attention_factors(first)
            groups = [fans[group] for group in growing if group not in refused and group not in absent]
            if not groups:
                return GrownTensors(
                    _divided(base, factors), report={"grown_by_pairs": refused} if refused else {}
                )
            growth, found = self.grow_from_data(replace(second, old=base), expansion.data, groups)
            if not found:
                break
            refused |= found
        # Ranks have averaged what they measured; should one still decide otherwise, rank 0's word counts.
        share = expansion.data.share
        return replace(
            growth,
            tensors={
                name: new if new is expansion.old[name] else share(new)
                # The event will multiply queries again, which have been measured as they will be.
                for name, new in _divided(growth.tensors, factors).items()
            },
            carry=replace(
                growth.carry, sources={group: share(one) for group, one in growth.carry.sources.items()}
            ),
            report={**growth.report, **({"grown_by_pairs": refused} if refused else {})},
        )

    def check(self, graph: WidthGraph, stages: Sequence[Mapping[str, int]]) -> None:
        """Refuse groups for which the method is not defined before training, where their widths tell.

        Raises:
            UserError: naming the first, unless something stands in for it.
        """
        for before, after in pairwise(stages):
            growing = [
                fans_of(graph, group) for group in graph.groups if before.get(group) != after.get(group)
            ]
            self._check(self._refused(graph, growing, before, after))

    def _refused(
        self, graph: WidthGraph, growing: Sequence[Fans], before: Mapping[str, int], after: Mapping[str, int]
    ) -> dict[str, str]:
        """Groups for which the method is not defined, and why."""
        reasons = {
            fans.group: _tied(graph, fans.group)
            or _constant(graph, fans.group)
            or self.refuses(fans, before[fans.group], after[fans.group])
            for fans in growing
        }
        return {group: reason for group, reason in reasons.items() if reason is not None}

    def _check(self, refused: Mapping[str, str]) -> None:
        if refused and self.fallback is None:
            group, reason = next(iter(refused.items()))
            more = f" (and {len(refused) - 1} more groups)" if len(refused) > 1 else ""
            raise UserError(
                f"{self.name} cannot grow {group}{more}: {reason}; set fallback='pairs' to grow such groups by "
                "function-preserving pairs."
            )

    def _follow(self, expansion: Expansion, leading: "tuple[Mapping[str, Tensor], Carry]") -> GrownTensors:
        """Let an average of networks go through the affine map that the network went through."""
        grown, carry = leading
        assert expansion.leader is not None
        tensors = {}
        for name, old in expansion.old.items():
            if name not in grown:
                tensors[name] = old
                continue
            own, theirs = (
                embedded(replace(expansion, old={name: tensor}), name, carry.sources)
                for tensor in (old, expansion.leader[name])
            )
            tensors[name] = own + (grown[name].to(theirs) - theirs)
        return GrownTensors(tensors, carry=carry)


def _present(expansion: Expansion, group: str) -> bool:
    """Whether any tensor has a group's channels."""
    return any(group in axis.groups for name in expansion.old for axis in expansion.graph.axes.get(name, ()))


def _tied(graph: WidthGraph, group: str) -> str | None:
    """Why no new channel stands alone in a group: what one does depends on how many others there are."""
    for norm in graph.channel_norms:
        if group in norm.axis.groups:
            return f"{norm.name} takes its statistics over its channels"
    for attention in graph.attentions:
        if group in attention.axis.groups:
            return "attention sums over its channels"
    return None


def _constant(graph: WidthGraph, group: str) -> str | None:
    """Why a group's channels are not what the layers before them make."""
    name = next((name for name, told in graph.constants.items() if group in told), None)
    return None if name is None else f"{name}, which is not trained, tells its channels apart"


def _divided(tensors: Mapping[str, Tensor], factors: Mapping[str, float]) -> dict[str, Tensor]:
    return {name: one / factors[name] if name in factors else one for name, one in tensors.items()}


def embedded(expansion: Expansion, name: str, sources: Mapping[str, Tensor]) -> Tensor:
    """A tensor at the new widths where channels are copies of old ones, and new ones (-1) are zero.

    Columns of copies are divided by their number, as Net2Net does.
    """
    if not expansion.changes(name):
        return expansion.old[name]
    before, after = expansion.old_widths, expansion.new_widths
    maps, counts = {}, {}
    for group in {group for axis in expansion.axes(name) for group in axis.groups}:
        channels = torch.arange(after[group])
        maps[group] = sources.get(group, torch.where(channels < before[group], channels, -1))
        known = maps[group].clamp(min=0)
        number = torch.bincount(maps[group][maps[group] >= 0], minlength=before[group])
        counts[group] = number[known].clamp(min=1).double()
    copies = {group: chosen.clamp(min=0) for group, chosen in maps.items()}
    new = replicate(expansion, name, copies, counts)
    for dim, axis in enumerate(expansion.axes(name)):
        lifted = axis.lift(maps, after, before) >= 0
        if not bool(lifted.all()):
            new = new * lifted.to(new).view(-1, *[1] * (new.dim() - dim - 1))
    return new


def upright(rows: Tensor) -> Tensor:
    """A sign for each row, [rows, 1], with which its largest entry is positive.

    Singular vectors are known up to their sign, and a ReLU tells the two apart: without this rounding would choose.
    """
    largest = rows.gather(1, rows.abs().argmax(1, keepdim=True))
    return torch.where(largest < 0, -1.0, 1.0).to(rows)


def padded(method: GrowthMethod, expansion: Expansion) -> dict[str, Tensor]:
    """Every tensor at the new widths with new channels that neither take nor give anything.

    Rows, columns and biases of layers are zero. What belongs to a channel alone is as the method draws it, alike for
    all new channels of a group: a norm's parameters, a depthwise filter, a bare parameter.
    """
    zero = {
        slot.name for group in expansion.graph.groups for slot in _mixing(fans_of(expansion.graph, group))
    }
    tensors = {}
    for name, old in expansion.old.items():
        if not expansion.changes(name):
            tensors[name] = old
            continue
        before, after = expansion.old_widths, expansion.new_widths
        if name in zero:
            tensors[name] = resized(old, expansion.axes(name), before, after)
            continue
        new = method.new_weights.draw(expansion, name).to(old)
        new[grid(expansion.kept(name), new.device)] = old
        for dim, axis in enumerate(expansion.axes(name)):
            first = {group: torch.arange(after[group]).clamp(max=before[group]) for group in axis.groups}
            positions = axis.lift(first, after, after)
            new = new.index_select(dim, positions.to(new.device))
        tensors[name] = new
    return tensors


def _mixing(fans: Fans) -> list:
    return [*fans.into, *fans.out]


def _in_two(expansion: Expansion, first: set[str]) -> tuple[Expansion, Expansion]:
    """An event as one in which these groups grow, and one in which the others do."""
    between = {
        group: expansion.new_widths[group] if group in first else width
        for group, width in expansion.old_widths.items()
    }
    return replace(expansion, new_widths=between), replace(expansion, old_widths=between)

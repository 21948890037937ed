"""Base class of growth methods that use training data: unsupported groups, their fallback, averaged networks."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from growlab.base.errors import UserError
from growlab.base.settings import one_of, whole
from growlab.growth.fans import ChannelView, GroupTensors, group_tensors, names_of
from growlab.growth.measurement import Measurement
from growlab.growth.method import GrownTensors, GrowthContext, GrowthMethod, WeightRule
from growlab.growth.methods.net2net import replicate
from growlab.growth.methods.pairs import PairGrowth
from growlab.growth.rescale import attention_factors, with_attention_scale
from growlab.widths import Carry, WidthGraph, grid, resized

# Candidates measured in one pass, in multiples of a group's width: a pass then costs about three plain ones.
_AT_ONCE = 2
# Least number of candidates per pass: in a narrow group they cost nothing extra.
_FEW = 32


class DataDriven(GrowthMethod):
    """Base class of methods that compute new weights from a few training batches.

    Args:
        batches: number of training batches used at an event: the first ones of the epoch that begins.
        fallback: "pairs" grows unsupported groups by function-preserving pairs, and the event's report names them; None
            raises an error for them.
        gain: randomly drawn new hidden weights have variance gain / fan_in.
        new_weights: see `NewWeights`.

    Raises:
        ValueError: an argument is out of range.
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
        one_of((None, "pairs"), fallback=fallback)
        self.batches, self.fallback = batches, fallback

    @abstractmethod
    def refuses(self, fans: GroupTensors, before: int, after: int) -> str | None:
        """Return why the method cannot grow a group, as the end of "NAME cannot grow GROUP: "; None if it can."""

    @abstractmethod
    def grow_from_data(
        self, context: GrowthContext, data: Measurement, groups: Sequence[GroupTensors]
    ) -> tuple[GrownTensors, dict[str, str]]:
        """Compute every tensor at the new widths of an event in which only these groups grow.

        Returns:
            The tensors, and a reason for each group that turned out to be unsupported on the data. If there are any,
            this method is called again without them.
        """

    def grow(self, context: GrowthContext) -> GrownTensors:
        """Compute every tensor at the new widths.

        Raises:
            UserError: the method is not defined for a group and there is no fallback, or there are no data.
        """
        before, after = context.old_widths, context.new_widths
        growing = [group for group in context.graph.groups if before[group] != after[group]]
        if not growing:
            return GrownTensors(dict(context.old))
        if context.averaged_event is not None:
            return self._follow(context, context.averaged_event)
        if context.data is None:
            raise UserError(f"{self.name} needs training data: pass a Measurement to `grow` as `data=`.")
        # Blocks that are not inserted yet (depth) have no tensors: for their groups only the recorded widths change.
        absent = {group for group in growing if not _present(context, group)}
        fans = {group: group_tensors(context.graph, group) for group in growing}
        here = [fans[group] for group in growing if group not in absent]
        refused = self._refused(context.graph, here, before, after)
        while True:
            self._check(refused)
            # First refused groups grow by pairs, then the others from data.
            between = {g: after[g] if g in refused or g in absent else width for g, width in before.items()}
            first, second = replace(context, new_widths=between), replace(context, old_widths=between)
            pairs = PairGrowth(gain=self.new_weights.gain, new_weights=self.new_weights.rule)
            base = with_attention_scale(first, pairs.grow(first)).tensors
            factors = attention_factors(first)
            groups = [fans[group] for group in growing if group not in refused and group not in absent]
            if not groups:
                return GrownTensors(_divided(base, factors), report={"grown_by_pairs": refused} if refused else {})
            with context.data.session():
                growth, unsupported = self.grow_from_data(replace(second, old=base), context.data, groups)
            if not unsupported:
                break
            refused |= unsupported
        # Ranks average their measurements; rounding may still differ, so all take the tensors of rank 0.
        share = context.data.share
        return replace(
            growth,
            tensors={
                name: new if new is context.old[name] else share(new)
                # Queries were measured at their final scale, by which the event multiplies them again.
                for name, new in _divided(growth.tensors, factors).items()
            },
            carry=replace(
                growth.carry, sources={group: share(source) for group, source in growth.carry.sources.items()}
            ),
            report={**growth.report, **({"grown_by_pairs": refused} if refused else {})},
        )

    def check(self, graph: WidthGraph, stages: Sequence[Mapping[str, int]]) -> None:
        """Check before training that the method is defined for every group that grows.

        Raises:
            UserError: it is not, and there is no fallback; the message names the first such group.
        """
        for before, after in pairwise(stages):
            growing = [group_tensors(graph, group) for group in graph.groups if before.get(group) != after.get(group)]
            self._check(self._refused(graph, growing, before, after))

    def _refused(
        self, graph: WidthGraph, growing: Sequence[GroupTensors], before: Mapping[str, int], after: Mapping[str, int]
    ) -> dict[str, str]:
        """Return the groups for which the method is not defined, each with the reason."""
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

    def _follow(self, context: GrowthContext, averaged_event: "tuple[Mapping[str, Tensor], Carry]") -> GrownTensors:
        """Grow an average of the network's weights by the affine map that the network itself went through."""
        grown, carry = averaged_event
        assert context.averaged is not None
        tensors = dict(context.old)
        for name in [name for name in tensors if name in grown]:
            average, network = (
                embedded(replace(context, old={name: tensor}), name, carry.sources)
                for tensor in (tensors[name], context.averaged[name])
            )
            tensors[name] = average + (grown[name].to(network) - network)
        return GrownTensors(tensors, carry=carry)


def _present(context: GrowthContext, group: str) -> bool:
    return any(group in axis.groups for name in context.old for axis in context.graph.axes.get(name, ()))


def _tied(graph: WidthGraph, group: str) -> str | None:
    """Return the operation over all of a group's channels, whose result depends on their number, or None."""
    for norm in graph.channel_norms:
        if group in norm.axis.groups:
            return f"{norm.name} takes its statistics over its channels"
    for attention in graph.attentions:
        if group in attention.axis.groups:
            return "attention sums over its channels"
    return None


def _constant(graph: WidthGraph, group: str) -> str | None:
    """Return the untrained constant that a group's channels depend on, or None."""
    name = next((name for name, groups in graph.constants.items() if group in groups), None)
    return None if name is None else f"{name}, which is not trained, distinguishes its channels"


def _divided(tensors: Mapping[str, Tensor], factors: Mapping[str, float]) -> dict[str, Tensor]:
    return {name: tensor / factors[name] if name in factors else tensor for name, tensor in tensors.items()}


def embedded(context: GrowthContext, name: str, sources: Mapping[str, Tensor]) -> Tensor:
    """Return a tensor at the new widths: channels copy their sources, those without one (-1) are zero.

    Columns of copies are divided by the number of copies, as in Net2Net.
    """
    if not context.changes(name):
        return context.old[name]
    before, after = context.old_widths, context.new_widths
    maps, counts = {}, {}
    for group in {group for axis in context.axes(name) for group in axis.groups}:
        channels = torch.arange(after[group])
        maps[group] = sources.get(group, torch.where(channels < before[group], channels, -1))
        copies_of = torch.bincount(maps[group][maps[group] >= 0], minlength=before[group])
        counts[group] = copies_of[maps[group].clamp(min=0)].clamp(min=1).double()
    copies = {group: source.clamp(min=0) for group, source in maps.items()}
    new = replicate(context, name, copies, counts)
    for dim, axis in enumerate(context.axes(name)):
        has_source = axis.lift(maps, after, before) >= 0
        if not bool(has_source.all()):
            new = new * has_source.to(new).view(-1, *[1] * (new.dim() - dim - 1))
    return new


def upright(rows: Tensor) -> Tensor:
    """Sign of each row, [rows, 1], that makes its entry of largest magnitude positive.

    Singular vectors are unique only up to their sign, which matters before a ReLU and must not depend on rounding.
    """
    largest = rows.gather(1, rows.abs().argmax(1, keepdim=True))
    return torch.where(largest < 0, -1.0, 1.0).to(rows)


def padded(method: GrowthMethod, context: GrowthContext) -> dict[str, Tensor]:
    """Return every tensor at the new widths, with new channels disconnected.

    Their rows, columns and biases in layers are zero. Entries of a single channel (a norm's parameters, a depthwise
    filter, a bare parameter) are drawn by the method, and are the same for all new channels of a group.
    """
    fans = [group_tensors(context.graph, group) for group in context.graph.groups]
    zero, before, after = {*names_of(fans, "incoming", "outgoing")}, context.old_widths, context.new_widths
    tensors = dict(context.old)
    for name in filter(context.changes, context.old):
        old = context.old[name]
        if name in zero:
            tensors[name] = resized(old, context.axes(name), before, after)
            continue
        new = method.new_weights.draw(context, name).to(old)
        new[grid(context.kept_runs(name), new.device)] = old
        for dim, axis in enumerate(context.axes(name)):
            first = {group: torch.arange(after[group]).clamp(max=before[group]) for group in axis.groups}
            positions = axis.lift(first, after, after)
            new = new.index_select(dim, positions.to(new.device))
        tensors[name] = new
    return tensors


@dataclass(frozen=True)
class Candidates:
    """Candidate channels of one pass, each with a single outgoing weight of 1 and zero incoming weights.

    `new` has the positions of each group's candidates in the tensors; there may be none.
    """

    view: ChannelView
    tensors: dict[str, Tensor]
    new: Mapping[str, Tensor]

    @classmethod
    def of_each_entry(
        cls, method: GrowthMethod, context: GrowthContext, groups: Sequence[GroupTensors], least: Mapping[str, int]
    ) -> "Iterator[Candidates]":
        """Yield candidates for all outgoing entries of each group, at least `least` of a group at a time."""
        graph, old = context.graph, context.old_widths
        total = {fans.group: ChannelView(graph, old, old).size(fans.outgoing, fans.group) for fans in groups}
        at_once = {
            group: min(count, max(_AT_ONCE * old[group], least.get(group, 0), _FEW)) for group, count in total.items()
        }
        for number in range(max(-(-total[group] // at_once[group]) for group in total)):
            parts = {
                group: torch.arange(count)[number * at_once[group] : (number + 1) * at_once[group]]
                for group, count in total.items()
            }
            widths = {**old, **{group: old[group] + len(part) for group, part in parts.items()}}
            view, tensors = ChannelView(graph, widths, old), padded(method, replace(context, new_widths=widths))
            new = {group: old[group] + torch.arange(len(part)) for group, part in parts.items()}
            for fans in groups:
                part = parts[fans.group]
                ones = torch.zeros(len(part), total[fans.group])
                ones[torch.arange(len(part)), part] = 1.0
                view.write(tensors, fans.outgoing, fans.group, new[fans.group], ones)
            yield cls(view, tensors, new)


def lengths(rows: Tensor) -> Tensor:
    """Euclidean norm of each row, [N]."""
    return torch.linalg.vector_norm(rows, dim=1)


def unit(rows: Tensor) -> Tensor:
    """Normalise rows to length 1; zero rows stay zero."""
    return rows / lengths(rows).clamp(min=torch.finfo(rows.dtype).tiny)[:, None]

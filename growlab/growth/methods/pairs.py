"""Function-preserving growth by pairs of channels (Yuan et al. 2023, Section 3.1, Eqs. 2-4)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from growlab.base.pieces import OneByOne
from growlab.growth.method import GrownTensors, GrowthContext, GrowthMethod
from growlab.widths import Axis, as_run, grid


class PairGrowth(GrowthMethod):
    """Add channels in pairs with equal producers and opposite consumers.

    A group that grows by 2h channels gets h drawn ones, V, and their twins:

        rows that produce them:      [W; V; V]
        columns that consume them:   [W, +Z, -Z]   in old rows; new rows are drawn freely

    (Eqs. 2-4, Fig. 2). Twins have equal activations through element-wise functions, pooling, batch normalisation and
    residual sums, so their contributions cancel. They differ from the first update on, since their consumers' signs
    give them opposite gradients. Normalisations over channels ignore new channels in their statistics at first, so the
    activations of new channels are not bounded, and gates would square them from block to block: there new rows get
    +Z, -Z too, and new channels depend only on old ones. If the number is odd, the last channel gets zero outgoing
    weights in old rows, as does each new one where channels differ by constants (`GrowthContext.unlike`).

    **Preserves** exactly, in eval and train mode, over residual streams, concatenation and flattening.
    """

    def grow(self, context: GrowthContext) -> GrownTensors:
        """Compute every tensor at the new widths."""
        old = context.old
        return GrownTensors(OneByOne(old, lambda name: self.expand(context, name, old[name])))

    def expand(self, context: GrowthContext, name: str, old: Tensor) -> Tensor:
        """Return one tensor at the new widths, with `old` (rescaled or not) at the old positions."""
        if not context.changes(name):
            return old
        new = self.new_weights.draw(context, name).to(old)
        axes = context.axes(name)
        twins = [context.of_axis(_twins, axis) for axis in axes]
        normed = {group for norm in context.graph.channel_norms for group in norm.axis.groups}
        new[grid(context.kept_runs(name), new.device)] = old
        for dim, axis in enumerate(axes):
            if axis.role == "in":
                free = normed.isdisjoint(axis.groups)
                kept = context.kept_runs(name)
                rows = [kept[d] if a.role == "out" and free else slice(0, new.shape[d]) for d, a in enumerate(axes)]
                first, second, alone = twins[dim]
                if name in context.graph.emitters:
                    new[_at(rows, dim, second, new)] = new[_at(rows, dim, first, new)]
                    continue
                new[_at(rows, dim, second, new)] = -new[_at(rows, dim, first, new)]
                new[_at(rows, dim, alone, new)] = 0.0
        for dim, axis in enumerate(axes):
            if axis.role == "out":
                everywhere = [slice(0, size) for size in new.shape]
                first, second, _ = twins[dim]
                new[_at(everywhere, dim, second, new)] = new[_at(everywhere, dim, first, new)]
        return new


_Run = Tensor | slice


def _twins(axis: Axis, context: GrowthContext) -> tuple[_Run, _Run, _Run]:
    """Positions of the first channel of each pair, of their twins in the same order, and of channels without a twin."""
    to_twin, alone = {}, {}
    for group in axis.groups:
        before, after = context.old_widths[group], context.new_widths[group]
        half = 0 if group in context.unlike else (after - before) // 2
        twin = torch.full((after,), -1)
        twin[before : before + half] = torch.arange(before + half, before + 2 * half)
        to_twin[group] = twin
        alone[group] = (torch.arange(after) >= before + 2 * half).long()
    if not axis.groups:
        return slice(0, 0), slice(0, 0), slice(0, 0)
    positions = axis.lift(to_twin, context.new_widths, context.new_widths)
    grows = axis.spread(
        {g: torch.ones(context.new_widths[g]).long() for g in axis.groups}, context.new_widths, fixed=0
    ).bool()
    first = ((positions >= 0) & grows).nonzero().flatten()
    without_twin = axis.spread(alone, context.new_widths, fixed=0).nonzero().flatten()
    return as_run(first), as_run(positions[first]), as_run(without_twin)


def _at(positions: Sequence[_Run], dim: int, chosen: _Run, tensor: Tensor) -> tuple[Tensor | slice, ...]:
    return grid([chosen if d == dim else p for d, p in enumerate(positions)], tensor.device)

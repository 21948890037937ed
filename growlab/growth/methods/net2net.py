"""Net2Net's Net2WiderNet (Chen, Goodfellow, Shlens, ICLR 2016)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from growlab.base.pieces import OneByOne
from growlab.growth.method import GrownTensors, GrowthContext, GrowthMethod
from growlab.widths import Carry


class Net2Net(GrowthMethod):
    """Widen by replicating channels.

    Each new channel j copies an old one pi(j), drawn uniformly; pi(j) = j for old channels. With n(c) the
    number of copies of c,

        W'[i, j] = W[pi(i), pi(j)] / n(pi(j))

    (Net2Net, Eq. 2 and Algorithm 1): rows are copied, columns are copied and divided. Biases, norm parameters and
    statistics are copied. Without noise this is also bert2BERT's function-preserving initialisation (Chen et al., ACL
    2022, Section 3.2: g_in and g_out are pi; whole heads are copied), `growth=bert2bert_fpi`.

    **Preserves** exactly, in eval and train mode, residual streams included.
    **Gradients** follow exactly: the copies of c share the gradient of its activation equally, so rows are copied
    and divided by n, columns copied: g'[i, j] = g[pi(i), pi(j)] / n(pi(i)).
    **Departs from the paper**: pi is drawn once for a whole width group, which residual streams need. Under layer,
    RMS or group normalisation every channel gets equally many copies if the factor is a whole number, which preserves
    the plain statistics; otherwise copies share their channel's weight in the statistics (`weighted_norms`). Where
    channels differ by constants, no copy can equal its original: it gets zero outgoing weights (`divided`).
    """

    def grow(self, context: GrowthContext) -> GrownTensors:
        """Compute every tensor at the new widths."""
        sources, counts = replicas(context)
        divisors, carry = divided(context, sources, counts)
        tensors = OneByOne(context.old, lambda name: replicate(context, name, sources, divisors))
        return GrownTensors(tensors, carry=carry)


def replicas(context: GrowthContext) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Draw, for each group, the old channel that each channel copies, and the number of its copies: [new width]."""
    sources, counts = {}, {}
    normed = {group for norm in context.graph.channel_norms for group in norm.axis.groups}
    for group in context.graph.groups:
        before, after = context.old_widths[group], context.new_widths[group]
        source = context.generator(f"replicas of {group}")
        if group in normed and after % before == 0:
            # Equally many copies of each channel preserve statistics over channels.
            drawn = torch.arange(before).repeat(after // before - 1)
            drawn = drawn[torch.randperm(after - before, generator=source)]
        else:
            drawn = torch.randint(before, (after - before,), generator=source)
        sources[group] = torch.cat([torch.arange(before), drawn])
        counts[group] = copies(sources[group])
    return sources, counts


def copies(source: Tensor) -> Tensor:
    """For each channel the number of channels with the same source, float64 [new width]."""
    return torch.bincount(source)[source].double()


def divided(
    context: GrowthContext, sources: Mapping[str, Tensor], divisors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], Carry]:
    """Return the divisors of columns, [new width] by group, and the rule for gradients.

    Where channels differ by constants (`GrowthContext.unlike`), columns of copies are zero, those of old channels stay.
    """
    sources, divisors = dict(sources), dict(divisors)
    for group in context.unlike:
        new = torch.arange(context.new_widths[group]) >= context.old_widths[group]
        divisors[group] = torch.where(new, torch.inf, 1.0).double()
        sources[group] = torch.where(new, -1, sources[group])
    return divisors, Carry(sources, {group: 1.0 / divisor for group, divisor in divisors.items()})


def replicate(
    context: GrowthContext,
    name: str,
    sources: Mapping[str, Tensor],
    counts: Mapping[str, Tensor],
    upper: str | None = None,
) -> Tensor:
    """Return a tensor at the new widths whose channels copy old ones, by their `sources`, [new width] by group.

    Columns are divided by `counts`. A tensor `upper` of the same shape may be copied instead.
    """
    tensor = context.old[upper or name]
    if not context.changes(name):
        return tensor
    for dim, axis in enumerate(context.axes(name)):
        if not any(context.old_widths[group] != context.new_widths[group] for group in axis.groups):
            continue
        positions = axis.lift(sources, context.new_widths, context.old_widths)
        tensor = tensor.index_select(dim, positions.to(tensor.device))
        if axis.role == "in" and name not in context.graph.emitters:
            count = axis.spread(counts, context.new_widths, fixed=1.0).to(tensor)
            tensor = tensor / count.view(-1, *[1] * (tensor.dim() - dim - 1))
    return tensor

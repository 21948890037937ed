"""HyperCloning (Samragh et al., "Scaling Smart", arXiv 2409.12903)."""

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from growlab.base.pieces import OneByOne
from growlab.base.settings import one_of
from growlab.growth.method import GrownTensors, GrowthContext, GrowthMethod, WeightRule, normal
from growlab.growth.methods.net2net import copies, divided, replicate
from growlab.widths import Axis

Form = Literal["symmetric", "diagonal"]


class HyperCloning(GrowthMethod):
    """Clone all channels in order, n times: a weight becomes n x n blocks.

        symmetric:  W' = 1/n [W W; W W]        diagonal:  W' = [W 0; 0 W]

    (Section 3.2 and Figure 2, for n = 2). Rows that do not grow are [W W] / n in both forms, columns that do not grow
    [W; W]. Biases, norm parameters, statistics, embeddings and whole heads are cloned. Noise, of standard deviation
    `noise_std` relative to the initialisation's, is added to one clone of a column and subtracted from the other
    (Figure 2, noisy forms). Its mean over the clones of a channel is subtracted, so that it changes no output.

    **Preserves** exactly, in eval and train mode, noise included. Layer and RMS normalisation stay plain at whole n.
    **Gradients** follow exactly without noise: clones share the gradient of their channel's activation equally, so that
    rows are copied and divided by n, columns copied. In a diagonal weight this applies to its blocks; off-diagonal
    zeros take the same share, which is their gradient.
    **Departs from the paper**: widths need not be multiples: channel j is a clone of j mod D, divided by the number of
    its clones; statistics over channels are then weighted for a while (`weighted_norms`). A weight whose rows and
    columns do not grow by the same whole n is cloned symmetrically. Where channels differ by constants, clones get zero
    outgoing weights, as in `Net2Net`.
    **Equals** `Net2Net` with clones in order instead of drawn ones, except for the diagonal form and the noise.

    Args:
        form: "symmetric" or "diagonal".
        noise_std: see above.
        gain: see `NewWeights`.
        new_weights: rule of `NewWeights`.

    Raises:
        ValueError: the form is unknown.
    """

    def __init__(
        self, form: Form = "symmetric", noise_std: float = 0.0, gain: float = 2.0, new_weights: WeightRule = "fan_in"
    ) -> None:
        super().__init__(noise_std, gain, new_weights)
        one_of(get_args(Form), form=form)
        self.form = form

    def grow(self, context: GrowthContext) -> GrownTensors:
        """Compute every tensor at the new widths."""
        sources = cloned(context)
        counts = {group: copies(source) for group, source in sources.items()}
        divisors, carry = divided(context, sources, counts)

        def clone(name: str) -> Tensor:
            tensor = replicate(context, name, sources, divisors)
            return _diagonal(context, name, tensor) if self.form == "diagonal" else tensor

        return GrownTensors(OneByOne(context.old, clone), carry=carry)

    def noise(self, context: GrowthContext) -> Mapping[str, Tensor]:
        """Noise that changes no output, by name: it sums to zero over the clones of each column."""
        sources, plain = cloned(context), self.plain_noise(context)

        def balanced(name: str) -> Tensor:
            noise = plain[name]
            for dim, axis in enumerate(context.axes(name)):
                if axis.role == "in":
                    positions = axis.lift(sources, context.new_widths, context.old_widths)
                    noise = noise.sub_(_mean_of_clones(noise, dim, positions))
                    copied = {g: torch.full_like(s, g not in context.unlike) for g, s in sources.items()}
                    copied_N = axis.spread(copied, context.new_widths, fixed=1)
                    if not bool(copied_N.all()):
                        noise.mul_(copied_N.view(-1, *[1] * (noise.dim() - dim - 1)))
            return noise

        return OneByOne(plain, balanced)

    def plain_noise(self, context: GrowthContext) -> Mapping[str, Tensor]:
        """Uncorrected noise on all entries of weights whose columns grow, by name."""
        if self.noise_std == 0:
            return {}

        def noise(name: str) -> Tensor:
            source = context.generator(f"noise of {name}")
            noise = normal(context.new_shape(name), source).double()
            return noise.mul_(self.noise_std).mul_(self.new_weights.std(context, context.layers[name]))

        before, after = context.old_widths, context.new_widths
        columns = {name: [axis for axis in context.axes(name) if axis.role == "in"] for name in context.layers}
        wider = (n for n, axes in columns.items() if any(before[g] != after[g] for axis in axes for g in axis.groups))
        return OneByOne(wider, noise)


def cloned(context: GrowthContext) -> dict[str, Tensor]:
    """Old channel that each channel is a clone of, j mod D, by group: [new width]."""
    return {
        group: torch.arange(context.new_widths[group]) % context.old_widths[group] for group in context.graph.groups
    }


def _mean_of_clones(noise: Tensor, dim: int, positions: Tensor) -> Tensor:
    number = torch.bincount(positions)
    totals = noise.new_zeros([*noise.shape[:dim], len(number), *noise.shape[dim + 1 :]])
    means = totals.index_add_(dim, positions, noise).div_(number.view(-1, *[1] * (noise.dim() - dim - 1)))
    return means.index_select(dim, positions)


def _diagonal(context: GrowthContext, name: str, tensor: Tensor) -> Tensor:
    """Move the blocks of a symmetrically cloned weight to the diagonal, if it has n x n of them."""
    axes = context.axes(name)
    out = [dim for dim, axis in enumerate(axes) if axis.role == "out"]
    if len(out) != 1 or not context.changes(name):
        return tensor
    dims = tensor.dim()
    for dim, axis in enumerate(axes):
        if axis.role == "in" and name not in context.graph.emitters:
            block, factor = _blocks(context, axes[out[0]], out[0], dims)
            column_block, column_factor = _blocks(context, axis, dim, dims)
            share = torch.where(block == column_block, factor.double(), 0.0)
            both = (factor == column_factor) & (factor > 1)
            tensor = tensor * torch.where(both, share, 1.0).to(tensor)
    return tensor


def _blocks(context: GrowthContext, axis: Axis, dim: int, num_dims: int) -> tuple[Tensor, Tensor]:
    """Clone index of each position along `dim`, and the number of clones (1 if the factor is not whole)."""
    numbers: Mapping[str, Tensor] = {
        group: torch.arange(context.new_widths[group]) // context.old_widths[group] for group in axis.groups
    }
    factors = {}
    for group, number in numbers.items():
        factor, rest = divmod(context.new_widths[group], context.old_widths[group])
        factors[group] = torch.full_like(number, 1 if rest or group in context.unlike else factor)
    shape = [-1 if d == dim else 1 for d in range(num_dims)]
    return (
        axis.spread(numbers, context.new_widths, fixed=0).long().view(shape),
        axis.spread(factors, context.new_widths, fixed=1).long().view(shape),
    )

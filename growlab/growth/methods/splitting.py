"""Splitting steepest descent (Liu, Wu, Wang, NeurIPS 2019), and its fast form (Wang et al. 2019)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from growlab.base.settings import above, not_none, whole
from growlab.growth.data_driven import DataDriven, embedded, lengths, unit, upright
from growlab.growth.fans import ChannelView, GroupTensors, names_of
from growlab.growth.measurement import Measurement, smooth
from growlab.growth.method import GrownTensors, GrowthContext, WeightRule
from growlab.widths import Carry


class Splitting(DataDriven):
    """Split the neurons whose splitting lowers the loss most, along the steepest directions.

    Splitting a neuron theta into theta + e v and theta - e v, each with half of the outgoing weights, changes the loss
    by

        e^2 / 2 v^T S v + o(e^2),      S = E[dL/dsigma nabla^2 sigma(theta)]      (Theorem 2.2)

    with the splitting matrix S. In each group, the neurons with the smallest eigenvalues of S are split, along the
    eigenvectors v, by e = epsilon |theta|.

    With `iterations=None` S is assembled from its products with each basis vector, one pass per incoming entry, and
    decomposed. With a number the smallest eigenvalue is estimated without S (Wang et al. 2019), from that many
    products: the smallest Rayleigh quotient in the space that they span.

    **Preserves** up to epsilon^2; the report has the predicted change of the loss.
    **Departs from the paper**: products with S are measured for all neurons of all groups at once, on a network in
    which each has a copy: to second order, halves that move apart do not affect other neurons. So it is defined for
    shared channels (residual streams), where theta is all incoming weights of a neuron, and for any operation in
    between. The fast form uses the Lanczos process where Wang et al. use gradient descent on the Rayleigh quotient.

    Args:
        batches: number of training batches used at an event: the first ones of the epoch that begins.
        iterations: number of products with S used for the smallest eigenvalue of each neuron; None: assemble S.
        epsilon: distance of halves from the original, relative to its length.
        softplus_beta: ReLU, which has no second derivative, is replaced by softplus with this beta.
        fallback: "pairs" grows unsupported groups by function-preserving pairs; None raises an error for them.
        gain: randomly drawn new hidden weights have variance gain / fan_in.
        new_weights: see `NewWeights`.
    """

    preserves = False

    def __init__(
        self,
        batches: int = 1,
        iterations: int | None = 8,
        epsilon: float = 0.01,
        softplus_beta: float = 3.0,
        fallback: Literal["pairs"] | None = None,
        gain: float = 2.0,
        new_weights: WeightRule = "fan_in",
    ) -> None:
        super().__init__(batches, fallback, gain, new_weights)
        whole(1, **not_none(iterations=iterations))
        above(0, epsilon=epsilon, softplus_beta=softplus_beta)
        self.iterations, self.epsilon, self.softplus_beta = iterations, epsilon, softplus_beta

    def refuses(self, fans: GroupTensors, before: int, after: int) -> str | None:
        """Refuse more copies than originals, and channels without a producer."""
        return refuses_to_split(fans, before, after)

    def grow_from_data(
        self, context: GrowthContext, data: Measurement, groups: Sequence[GroupTensors]
    ) -> tuple[GrownTensors, dict[str, str]]:
        """Compute every tensor at the new widths."""
        eigenpairs = splitting_eigen(context, data, groups, self.iterations, self.softplus_beta)
        view = ChannelView(context.graph, context.old_widths, context.old_widths)
        chosen, report = {}, {}
        moves = {name: torch.zeros_like(context.old[name]) for name in names_of(groups, "incoming")}
        for fans in groups:
            group = fans.group
            values, vectors = eigenpairs[group]
            count = context.new_widths[group] - context.old_widths[group]
            chosen[group] = torch.argsort(values, stable=True)[:count].cpu()
            every = torch.arange(context.old_widths[group])
            sizes = self.epsilon * lengths(view.read(context.old, fans.incoming, group, every).double())
            view.write(moves, fans.incoming, group, every, vectors * sizes[:, None])
            kept = chosen[group].to(values.device)
            report[group] = {
                "eigenvalues": values.tolist(),
                "split": chosen[group].tolist(),
                "predicted_change": float((sizes[kept].square() * values[kept]).sum() / 2),
            }
        split = Split.of(_unchanged(context), context.old, chosen)
        carry = split.carry(context.old_widths)
        return GrownTensors(split.tensors(moves), carry=carry, report={"groups": report}), {}


def refuses_to_split(fans: GroupTensors, before: int, after: int) -> str | None:
    """Refuse more copies than originals, and channels without a producer."""
    if not fans.incoming:
        return "no layer produces its channels"
    if after > 2 * before:
        return f"splitting makes at most twice as many channels of {before}, not {after}"
    return None


def splitting_eigen(
    context: GrowthContext,
    data: Measurement,
    groups: Sequence[GroupTensors],
    iterations: int | None,
    softplus_beta: float,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Smallest eigenvalue of each neuron's splitting matrix, [C], and its eigenvector, [C, entries]; float64."""
    widths = context.old_widths
    every = {fans.group: torch.arange(widths[fans.group]) for fans in groups}
    split = Split.of(_unchanged(context), context.old, every)
    tensors, names = split.tensors(), names_of(groups, "incoming")
    view = ChannelView(context.graph, widths, widths)

    def products(vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return S v of every neuron, for one v per neuron."""
        moves = {name: torch.zeros_like(context.old[name]) for name in names}
        for fans in groups:
            view.write(moves, fans.incoming, fans.group, every[fans.group], vectors[fans.group])
        by_moves = split.by_moves(data.products(tensors, split.signed(moves), names, [smooth(softplus_beta)]), names)
        return {
            fans.group: view.read(by_moves, fans.incoming, fans.group, every[fans.group]).double() for fans in groups
        }

    starts = {
        fans.group: directions(
            context,
            f"directions of {fans.group}",
            view.read(context.old, fans.incoming, fans.group, every[fans.group]).double(),
        )
        for fans in groups
    }
    pairs = _assembled(products, starts) if iterations is None else _lanczos(products, starts, iterations)
    return {group: (values, vectors * upright(vectors)) for group, (values, vectors) in pairs.items()}


def _assembled(
    products: Callable[[Mapping[str, Tensor]], dict[str, Tensor]], starts: Mapping[str, Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Smallest eigenpair of each neuron's matrix, assembled from its products with each basis vector."""
    columns: dict[str, list[Tensor]] = {group: [] for group in starts}
    for entry in range(max(start.shape[1] for start in starts.values())):
        basis = {group: torch.zeros_like(start) for group, start in starts.items()}
        for vectors in basis.values():
            if entry < vectors.shape[1]:
                vectors[:, entry] = 1.0
        for group, column in products(basis).items():
            if entry < column.shape[1]:
                columns[group].append(column)
    result = {}
    for group, of_group in columns.items():
        matrix = torch.stack(of_group, 2)
        values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
        result[group] = values[:, 0], vectors[:, :, 0]
    return result


def _lanczos(
    products: Callable[[Mapping[str, Tensor]], dict[str, Tensor]], starts: Mapping[str, Tensor], iterations: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Smallest Ritz pair of each neuron, in one Krylov space per neuron, reorthogonalised twice."""
    bases = {group: [start] for group, start in starts.items()}
    images: dict[str, list[Tensor]] = {group: [] for group in starts}
    for step in range(iterations):
        for group, product in products({group: basis[-1] for group, basis in bases.items()}).items():
            images[group].append(product)
            if step + 1 == iterations:
                continue
            rest = product
            for _ in range(2):
                for vector in bases[group]:
                    rest = rest - (rest * vector).sum(1, keepdim=True) * vector
            # Once a space is exhausted, the remainder is rounding error.
            empty = lengths(rest) <= 1e-10 * lengths(product)
            bases[group].append(torch.where(empty[:, None], torch.zeros_like(rest), unit(rest)))
    result = {}
    for group, basis in bases.items():
        q, image = torch.stack(basis, 2), torch.stack(images[group], 2)
        small = q.mT @ image
        # Basis vectors of zeros must not yield an eigenvalue 0: give them a large one.
        absent = (q.square().sum(1) == 0).to(small)
        small = (small + small.mT) / 2 + torch.diag_embed(absent * (small.abs().amax((1, 2)) + 1.0)[:, None] * 2)
        values, vectors = torch.linalg.eigh(small)
        result[group] = values[:, 0], unit((q @ vectors[:, :, :1])[:, :, 0])
    return result


def _unchanged(context: GrowthContext) -> GrowthContext:
    return replace(context, new_widths=context.old_widths)


@dataclass(frozen=True)
class Split:
    """Network in which some channels have a copy, placed after all others; the two share outgoing weights equally.

    Tensors before the split are called plain. If rows of split channels move by +d in the original and by -d in the
    copy, the tensors of all d, in the plain shapes, are called `moves`.

    Attributes:
        plain: an event whose `old` are the plain tensors, and whose new widths are those with copies.
        copied: the channels that have a copy, by group, in the order of their copies.
    """

    plain: GrowthContext
    copied: Mapping[str, Tensor]

    @classmethod
    def of(cls, context: GrowthContext, tensors: Mapping[str, Tensor], copied: Mapping[str, Tensor]) -> "Split":
        """Split the channels `copied`, by group, of plain `tensors` at an event's new widths."""
        before = context.new_widths
        after = {group: width + len(copied.get(group, ())) for group, width in before.items()}
        return cls(replace(context, old=tensors, old_widths=before, new_widths=after), copied)

    @property
    def widths(self) -> Mapping[str, int]:
        """Widths with copies."""
        return self.plain.new_widths

    @cached_property
    def sources(self) -> dict[str, Tensor]:
        """Source channel of each channel (itself, or the one that it copies), by group."""
        before = self.plain.old_widths
        return {group: torch.cat([torch.arange(before[group]), channels]) for group, channels in self.copied.items()}

    def tensors(self, moves: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return every tensor of the split network; without moves it computes the plain network's function."""
        spread = {name: embedded(self.plain, name, self.sources) for name in self.plain.old}
        for name, move in self.signed(moves or {}).items():
            spread[name] = spread[name] + move
        return spread

    def signed(self, moves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return moves as changes of the split network's tensors: +d at originals, -d at copies."""
        return {name: self._spread(name, move, signed=True) for name, move in moves.items()}

    def by_moves(self, gradients: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
        """Convert gradients by the split network's tensors to gradients by moves."""
        return {name: self._gathered(name, gradients[name], signed=True) for name in names}

    def by_plain(self, gradients: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
        """Convert gradients by the split network's tensors to gradients by the plain tensors."""
        return {name: self._gathered(name, gradients[name], signed=False) for name in names}

    def _spread(self, name: str, plain: Tensor, signed: bool) -> Tensor:
        spread = embedded(replace(self.plain, old={name: plain}), name, self.sources)
        if not signed:
            return spread
        for dim, axis in enumerate(self.plain.axes(name)):
            if axis.role != "out":
                continue
            signs = {}
            for group in axis.groups:
                signs[group] = torch.zeros(self.widths[group], dtype=torch.double)
                if group in self.copied:
                    signs[group][self.copied[group]] = 1.0
                    signs[group][self.plain.old_widths[group] :] = -1.0
            sign = axis.spread(signs, self.widths, fixed=0.0).to(spread)
            spread = spread * sign.view(-1, *[1] * (spread.dim() - dim - 1))
        return spread

    def _gathered(self, name: str, gradient: Tensor, signed: bool) -> Tensor:
        # The adjoint of `_spread`, which is linear.
        with torch.enable_grad():
            plain = torch.zeros_like(self.plain.old[name], requires_grad=True)
            total = (self._spread(name, plain, signed) * gradient.to(plain)).sum()
            (gathered,) = torch.autograd.grad(total, plain)
        return gathered

    def carry(self, old_widths: Mapping[str, int]) -> Carry:
        """Return the `Carry` of gradients from a network with `old_widths`, the first channels of the plain one.

        Copies share the gradient of their original equally; new channels in between have no source.
        """
        sources, rows = {}, {}
        for group, source in self.sources.items():
            sources[group] = torch.where(source < old_widths[group], source, -1)
            counts = torch.bincount(source)
            rows[group] = 1.0 / counts[source].double()
        return Carry(sources, rows)


def directions(context: GrowthContext, name: str, like: Tensor) -> Tensor:
    """Draw random rows of length 1, the same on every rank and in a resumed run."""
    drawn = torch.randn(like.shape, generator=context.generator(name), dtype=torch.float32)
    return unit(drawn.to(like))

"""bert2BERT's advanced knowledge initialisation (Chen et al., ACL 2022)."""

import re
from collections.abc import Collection

import torch
from torch import Tensor

from growlab.base.pieces import OneByOne
from growlab.growth.method import GrownTensors, GrowthContext, GrowthMethod
from growlab.growth.methods.net2net import divided, replicas, replicate
from growlab.widths import grid


class Bert2Bert(GrowthMethod):
    """Copy channels; take the new rows of a layer from the same layer in the next block.

    With pi and n as in `Net2Net`, and U(V)[i, j] = V[i, pi(j)] / n(pi(j)) for the weights V of blocks l and l + 1,

        W'_l[i] = U(W_l)[i] for old rows i,    W'_l[i] = U(W_(l+1))[pi(i)] for new ones

    (Section 3.3, AKI). A bias follows its weight's rows. Embeddings, norm parameters, layers of the last block and
    layers without a counterpart in a next block take their own rows, which is the paper's FPI.

    **Preserves** nothing exactly: units of the next block read the stream of this one. The change is small if adjacent
    blocks compute similar functions, which is the paper's argument; the receipt shows it. Without counterparts the
    method is `Net2Net`, exact.
    **Gradients** do not follow from the old network's. Optimizer state is mapped as for `Net2Net`.
    **Departs from the paper**: the next block is found by names (`layers.3.` and `layers.4.`) and equal shapes; under
    normalisations over channels copies share their channel's weight in the statistics (`weighted_norms`).
    """

    preserves = False

    def grow(self, context: GrowthContext) -> GrownTensors:
        """Compute every tensor at the new widths."""
        sources, counts = replicas(context)
        counts, carry = divided(context, sources, counts)
        taken = _rows_of_the_next_block(context)

        def advanced(name: str) -> Tensor:
            own = replicate(context, name, sources, counts)
            if name not in taken:
                return own
            return _with_old_rows(context, name, own, replicate(context, name, sources, counts, taken[name]))

        report = {"rows_of_the_next_block": taken} if taken else {}
        return GrownTensors(OneByOne(context.old, advanced), carry=carry, report=report)


def _with_old_rows(context: GrowthContext, name: str, own: Tensor, upper: Tensor) -> Tensor:
    positions = [
        axis.kept(context.old_widths, context.new_widths) if axis.role == "out" else torch.arange(own.shape[dim])
        for dim, axis in enumerate(context.axes(name))
    ]
    old_rows, result = grid(positions, own.device), upper.clone()
    result[old_rows] = own[old_rows]
    return result


def _rows_of_the_next_block(context: GrowthContext) -> dict[str, str]:
    """Map each weight (and its bias) to the tensor of the next block that it takes new rows from."""
    layers, taken = context.graph.layers, {}
    for layer in layers:
        same_kind = [o for o in layers if (o.depthwise, o.transposed) == (layer.depthwise, layer.transposed)]
        upper = _above(context, layer.weight, {other.weight for other in same_kind})
        if upper is None or not context.changes(layer.weight):
            continue
        taken[layer.weight] = upper
        biases = {other.bias for other in same_kind if other.weight == upper}
        upper = None if layer.bias is None else _above(context, layer.bias, biases)
        if layer.bias is not None and upper is not None and context.changes(layer.bias):
            taken[layer.bias] = upper
    return {name: taken[name] for name in context.old if name in taken}


def _above(context: GrowthContext, name: str, layers: Collection[str | None]) -> str | None:
    """Name of the same tensor one block higher, or None: increments the first index in the path that leads to one."""
    for number in re.finditer(r"(?<=\.)\d+(?=\.)", f".{name}"):
        start, end = number.start() - 1, number.end() - 1
        upper = f"{name[:start]}{int(number[0]) + 1}{name[end:]}"
        if upper in layers and upper in context.old and _form(context, upper) == _form(context, name):
            return upper
    return None


def _form(context: GrowthContext, name: str) -> tuple[tuple[object, ...], ...]:
    """Roles and parts of a tensor's axes, with groups' widths in place of their names, for comparison."""
    return tuple(
        (
            axis.role,
            *(
                (part.outer, part.inner, None if part.group is None else context.old_widths[part.group])
                for part in axis.parts
            ),
        )
        for axis in context.axes(name)
    )

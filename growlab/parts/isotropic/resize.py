"""Add and remove neurons of an isotropic layer, as functions of tensors (Bird, Sections 3.1-3.3)."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from growlab.parts.isotropic.choices import IMPORTANCES, Choices
from growlab.parts.isotropic.layer import Change, LayerTensors
from growlab.parts.isotropic.observation import Observation
from growlab.parts.isotropic.spectrum import (
    consumers,
    decompose,
    gather_constant,
    order_by_square,
    producers,
)
from growlab.widths import WidthGraph


def change_width(
    graph: WidthGraph,
    tensors: Mapping[str, Tensor],
    widths: Mapping[str, int],
    group: str,
    new_width: int,
    choices: Choices | None = None,
    gradients: Mapping[str, Tensor] | None = None,
    observed: Mapping[str, Observation] | None = None,
    generator: Callable[[str], torch.Generator] | None = None,
    leader: Change | None = None,
) -> Change:
    """Partially diagonalise the layer that produces a group, then add or remove neurons (Sec. 3.3.1).

    With W1 = U S V^T the layer becomes S V^T, its bias U^T b1, and the next weights W2 U. A new neuron is a row of
    zeros and a column U*; a removed one loses its row, bias b* and column U*, and

        o' = o - b*^2,  b2' = b2 - E[g] U* b*      on growth
        o' = o + b*^2,  b2' = b2 + E[g] U* b*      on removal

    **Preserves** the output exactly on growth with the default choices. A neuron whose singular value is 0 outputs g
    b*: a constant times the gain, which depends on the others. Its removal is exact if b* = 0, if the consumers read a
    gain channel (psi' = psi + U* b*; weights and biases of other neurons cannot replace it), or if another neuron with
    the singular value 0 stays: such neurons are rotated so that one of them has all of their bias. Otherwise g is
    replaced by E[g] (an error of 3e-3 to 4.5e-2 on the project's test networks). Removing a neuron with a small
    singular value also changes the output in proportion to it.

    Args:
        graph: width graph traced with `follow_norms`.
        tensors: parameters and buffers by name.
        widths: width of each group.
        group: an isotropic group with a producing layer.
        new_width: new width of the group, at least 1.
        choices: see `Choices`.
        gradients: gradients of parameters by name, for scores that need them.
        observed: observations of isotropic activations on a batch, by module path; without them E[g] is taken as 1.
        generator: maps a name to a generator for draws; None for a fixed seed.
        leader: if the tensors are an average, the change of the averaged network; its basis, removed neurons,
            replacements and columns of new neurons are used.

    Raises:
        ValueError: the group is not such a layer, or a choice does not fit it.
    """
    choices = choices or Choices()
    layer = _layer(graph, tensors, widths, group, new_width, choices, observed or {})
    width = widths[group]
    if leader is not None:
        rotation, kept = leader.rotation, leader.kept
    elif new_width < width:
        rotation, kept = _decided(layer, tensors, new_width, gradients)
    else:
        left = decompose(layer.deciding(layer.tensors))[0]
        rotation = left.T if choices.rotate else torch.eye(width).to(left)
        kept = torch.arange(width, device=left.device)
    layer.turn(rotation)
    basis, part, gone, stand_in = rotation[kept], 0.0, list[float](), None
    if new_width < width:
        others = torch.ones(width, dtype=torch.bool, device=kept.device)
        others[kept] = False
        removed = others.nonzero().flatten()
        norms = torch.linalg.vector_norm(layer.deciding(layer.tensors), dim=1)
        whole = float(torch.linalg.vector_norm(norms))
        part = float(torch.linalg.vector_norm(norms[removed])) / whole if whole > 0 else 0.0
        gone = sorted(norms[removed].tolist())
        stand_in = layer.remove(kept, removed, leader)
    else:
        layer.add(new_width - width, generator or _fixed, leader)
        basis = torch.nn.functional.pad(basis, (0, 0, 0, new_width - width))
    changed = {
        name: tensor.to(tensors[name])
        for name, tensor in layer.tensors.items()
        if tensor.shape != tensors[name].shape or not torch.equal(tensor, tensors[name].double())
    }
    return Change(changed, basis, rotation, kept, gone, part, stand_in)


def _layer(
    graph: WidthGraph,
    tensors: Mapping[str, Tensor],
    widths: Mapping[str, int],
    group: str,
    new_width: int,
    choices: Choices,
    observed: Mapping[str, Observation],
) -> LayerTensors:
    """Collect all tensors that depend on a group's channels, in float64."""
    if group not in graph.isotropic or not producers(graph, group):
        raise ValueError(f"{group} is not an isotropic layer whose width could change")
    if new_width < 1:
        raise ValueError(f"{group} must keep at least one neuron, not {new_width}")
    involved = [name for name, axes in graph.axes.items() if any(group in axis.groups for axis in axes)]
    involved += [layer.bias for layer in consumers(graph, group) if layer.bias is not None]
    involved += [r.length for r in graph.radii if group in r.groups and r.length is not None]
    work = {name: tensors[name].detach().double() for name in dict.fromkeys(involved)}
    return LayerTensors(graph, dict(widths), group, work, choices, observed)


def _decided(
    layer: LayerTensors, tensors: Mapping[str, Tensor], new_width: int, gradients: Mapping[str, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Choose the basis in which neurons are removed, and the channels in it that stay."""
    graph, group, forward = layer.graph, layer.group, layer.choices.direction == "forward"
    known = producers(graph, group) if forward else consumers(graph, group)
    left, values, right = decompose(layer.deciding(layer.tensors))
    gradient = None
    if gradients is not None and all(one.weight in gradients for one in known):
        gradient = layer.deciding(gradients)
    dtype = tensors[known[0].weight].dtype
    rounding = torch.finfo(dtype).eps * max(layer.widths[group], len(right))
    seen = next(iter(layer.observations().values()), None)
    if forward:
        left, values = gather_constant(left, values, layer.constants()[0], rounding)
    elif seen is not None:
        left, values = order_by_square(left, values, seen.square, rounding)
    scores = IMPORTANCES[layer.choices.importance](left, values, right, gradient)
    return left.T, torch.argsort(scores, descending=True, stable=True)[:new_width].sort()[0]


def _fixed(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(0)

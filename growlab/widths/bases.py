"""Change the basis of a group's channels: the same linear map along every axis that carries them."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from growlab.widths.groups import WidthGraph
from growlab.widths.layout import Axis
from growlab.widths.resize import tensors_of


def applied(
    tensor: Tensor,
    axes: tuple[Axis, ...],
    maps: Mapping[str, Tensor],
    widths: Mapping[str, int],
    consuming: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Apply a linear map to the channels on every axis of a tensor, in float64.

    For an orthogonal map R of a group, that is R W for a weight that produces the channels, W R^T for one that
    consumes them, R b for a bias: together they change nothing where everything between them commutes with R.

    Args:
        tensor: a parameter, a buffer, a gradient or a first moment.
        axes: its axes.
        maps: for each group that changes, [new width, width]; it may also drop channels.
        widths: width of each group now.
        consuming: other maps for axes that consume the channels; None for the same.

    Returns:
        The tensor at the new widths in its dtype; the same object if no axis carries such a group.
    """
    result = tensor
    for dim, axis in enumerate(axes):
        chosen = consuming if consuming is not None and axis.role == "in" else maps
        if not any(group in chosen for group in axis.groups):
            continue
        pieces = []
        for part, piece in zip(
            axis.parts,
            result.double().split([part.length(widths) for part in axis.parts], dim),
            strict=True,
        ):
            if part.group is not None and part.group in chosen:
                matrix = chosen[part.group].to(piece)
                split = piece.unflatten(dim, (part.outer, matrix.shape[1], part.inner))
                # A single matrix product; `matrix @ ...` would compute one for every other position.
                turned = torch.tensordot(split, matrix, dims=([dim + 1], [1])).movedim(-1, dim + 1)
                piece = turned.flatten(dim, dim + 2)
            pieces.append(piece)
        result = torch.cat(pieces, dim)
    return result.to(tensor.dtype).contiguous() if result is not tensor else tensor


def rotate(
    model: nn.Module,
    graph: WidthGraph,
    rotations: Mapping[str, Tensor],
    widths: Mapping[str, int] | None = None,
) -> None:
    """Rotate the channels of isotropic groups in place; parameters stay the same objects, outputs do not change.

    Args:
        model: the network that `graph` was traced from.
        graph: its width graph, traced with `follow_norms`.
        rotations: for each group an orthogonal matrix R [width, width]: channels x become R x.
        widths: width of each group; None for full widths.

    Raises:
        ValueError: a group is not isotropic: some operation distinguishes its channels.
    """
    for group in rotations:
        if group not in graph.isotropic:
            reason = graph.individuated.get(group, "no norm over these channels was followed by trace()")
            raise ValueError(f"the channels of {group} cannot be rotated: {reason}")
    for name, tensor in tensors_of(model, graph).items():
        tensor.copy_(applied(tensor, graph.axes[name], rotations, widths or graph.full_widths))

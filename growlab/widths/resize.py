"""Change a network's widths in place: the only code that replaces parameters and buffers.

The module's own bookkeeping (`in_channels`, `num_features`, ...) follows, so that the narrowed network is an
ordinary module of its class at other widths.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from growlab.widths.groups import WidthGraph
from growlab.widths.layout import Axis

# Module class, attribute that tells its size, the tensor and dimension that it is read from.
_BOOKKEEPING: tuple[tuple[type[nn.Module], str, str, int], ...] = (
    (nn.Linear, "in_features", "weight", 1),
    (nn.Linear, "out_features", "weight", 0),
    (nn.Conv1d, "out_channels", "weight", 0),
    (nn.Conv2d, "out_channels", "weight", 0),
    (nn.Conv3d, "out_channels", "weight", 0),
    (nn.PReLU, "num_parameters", "weight", 0),
)


def replace_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Put new tensors in the place of parameters and buffers.

    Parameters become new `nn.Parameter`s (autograd keeps the old shape of an old one), with the old one's
    `requires_grad`, dtype, device and memory format; a tensor shared by several modules stays shared.

    Args:
        model: changed in place.
        tensors: new content by name; an `nn.Parameter` is put in place as it is.

    Returns:
        Old and new tensor by name.

    Raises:
        KeyError: the model has no tensor of that name.
    """
    places = dict(_named_tensor_places(model))
    aliases: dict[int, list[str]] = {}
    for name, (module, attribute) in places.items():
        aliases.setdefault(id(getattr(module, attribute)), []).append(name)
    replaced: dict[str, tuple[Tensor, Tensor]] = {}
    touched: set[nn.Module] = set()
    for name, content in tensors.items():
        module, attribute = places[name]
        old = getattr(module, attribute)
        new = content if isinstance(content, nn.Parameter) else _like(content, old)
        for alias in aliases[id(old)]:
            owner, key = places[alias]
            setattr(owner, key, new)
            touched.add(owner)
        replaced[name] = (old, new)
    for module in touched:
        _update_bookkeeping(module)
    return replaced


def resize(
    model: nn.Module, graph: WidthGraph, widths: Mapping[str, int], new_widths: Mapping[str, int]
) -> None:
    """Give every group a new width, in place: first channels are kept, added ones are zero.

    Args:
        model: the network that `graph` was traced from, at `widths`.
        graph: its width graph.
        widths: width of each group now.
        new_widths: width of each group afterwards; may be above the full width.

    Raises:
        ValueError: a new width is below 1.
    """
    for name in graph.groups:
        if new_widths[name] < 1:
            raise ValueError(f"width {new_widths[name]} of {name} leaves no channel; take at least 1")
    tensors = tensors_of(model, graph)
    replace_tensors(
        model, {name: resized(t, graph.axes[name], widths, new_widths) for name, t in tensors.items()}
    )


def resized(
    tensor: Tensor, axes: tuple[Axis, ...], widths: Mapping[str, int], new_widths: Mapping[str, int]
) -> Tensor:
    """A tensor at new widths: entries of kept channels in their new places, zeros elsewhere."""
    result = tensor.new_zeros([axis.length(new_widths) for axis in axes])
    sources, targets = [], []
    for axis in axes:
        kept = axis.kept(widths, new_widths)
        sources.append((kept >= 0).nonzero().flatten())
        targets.append(kept[kept >= 0])
    result[grid(targets, result.device)] = tensor[grid(sources, tensor.device)]
    return result


def grid(positions: Sequence[Tensor], device: torch.device | None = None) -> tuple[Tensor, ...]:
    """Index of the sub-tensor at the given positions of each dimension, for reading and writing."""
    last = len(positions) - 1
    return tuple(p.to(device).view(-1, *[1] * (last - dim)) for dim, p in enumerate(positions))


def tensors_of(model: nn.Module, graph: WidthGraph) -> dict[str, Tensor]:
    """The parameters and buffers that depend on a width, by name."""
    places = dict(_named_tensor_places(model))
    return {name: getattr(*places[name]).detach() for name in graph.axes}


def _like(content: Tensor, old: Tensor) -> Tensor:
    new = content.detach().to(device=old.device, dtype=old.dtype)
    if old.dim() == 4 and not old.is_contiguous():
        new = new.contiguous(memory_format=torch.channels_last)
    if new.data_ptr() == content.data_ptr():
        new = new.clone()
    return nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new


def _named_tensor_places(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute in (*module._parameters, *module._buffers):
            if getattr(module, attribute) is not None:
                yield (f"{prefix}.{attribute}" if prefix else attribute), (module, attribute)


def _update_bookkeeping(module: nn.Module) -> None:
    for kind, attribute, tensor, dim in _BOOKKEEPING:
        if isinstance(module, kind):
            setattr(module, attribute, getattr(module, tensor).shape[dim])
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        if module.groups > 1 and module.weight.shape[1] == 1:
            module.groups = module.out_channels
        module.in_channels = module.weight.shape[1] * module.groups
    if isinstance(module, nn.modules.batchnorm._NormBase):
        known = module.running_mean if module.weight is None else module.weight
        if known is not None:
            module.num_features = known.shape[0]

"""How a block begins that comes into a network: as nothing, as the identity, or as a copy of the one before it."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from growlab.errors import UserError
from growlab.growth.multipliers import fold_multipliers
from growlab.growth.parity import buffers_kept, quietly
from growlab.widths import WidthGraph

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_AFFINE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Site:
    """Where a block has just come in.

    Attributes:
        network: with the block.
        paths: of the block's modules.
        graph: width graph of the block's tensors.
        stream: groups that run through the block and past it.
        probe: positional inputs of the network.
    """

    network: nn.Module
    paths: Sequence[str]
    graph: WidthGraph
    stream: frozenset[str]
    probe: tuple[Any, ...]

    @property
    def modules(self) -> list[nn.Module]:
        """The block's modules, those inside of others too."""
        return [m for path in self.paths for m in self.network.get_submodule(path).modules()]


Start = Callable[[Site], None]


def zero(site: Site) -> None:
    """Let a residual block add nothing: its last batch normalisation, or all that writes to the stream, is zero.

    Weight and bias of the last batch normalisation of the block, as is usual for residual networks (Goyal et al.
    2017, Section 5.1); in a block without one, of every layer whose rows are the stream's channels: both branches of a
    Transformer's layer.

    **Preserves** exactly, where the block hands its input on beside them. They learn from the first step; what lies
    before them from the second.
    """
    modules = site.modules
    norms = [m for m in modules if isinstance(m, _BATCH_NORMS) and m.weight is not None]
    if norms:
        tensors = [norms[-1].weight, norms[-1].bias]
    else:
        tensors = []
        for layer in site.graph.layers:
            if not layer.depthwise and site.stream & set(site.graph.axes[layer.weight][0].groups):
                names = [layer.weight, *([] if layer.bias is None else [layer.bias])]
                tensors += [site.network.get_parameter(name) for name in names]
    if not tensors:
        raise UserError(f"depth.start=zero: nothing in {', '.join(site.paths)} writes to a residual stream.")
    for tensor in tensors:
        tensor.zero_()


def identity(site: Site) -> None:
    """Net2Deeper: let a layer, its batch normalisation and its activation be the identity (Chen et al. 2016).

    The weight is the identity matrix, or the kernel that shifts by nothing; a batch normalisation undoes itself, with
    the mean and variance of the probe batch as its statistics.

    **Preserves** exactly where the activation maps its own outputs to themselves, as ReLU does. In train mode a batch
    normalisation is the identity on the probe batch, and on another one up to how far its statistics differ.
    """
    seen: list[Tensor] = []
    first = site.network.get_submodule(site.paths[0])
    handle = first.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach()))
    try:
        with quietly(site.network), buffers_kept(site.network):
            site.network.train()
            site.network(*site.probe)
    finally:
        handle.remove()
    modules = site.modules
    affine = [m for m in modules if isinstance(m, _AFFINE)]
    if len(affine) != 1 or affine[0].weight.shape[0] != affine[0].weight.shape[1]:
        raise UserError(
            f"depth.start=identity is for blocks of one layer with as many outputs as inputs, such as a convolution "
            f"with its batch normalisation and ReLU; {', '.join(site.paths)} holds {len(affine)} layers."
        )
    layer = affine[0]
    if isinstance(layer, nn.Linear):
        nn.init.eye_(layer.weight)
    else:
        nn.init.dirac_(layer.weight)
    if layer.bias is not None:
        layer.bias.zero_()
    for norm in modules:
        if not isinstance(norm, _BATCH_NORMS):
            continue
        x = seen[0]
        dims = [dim for dim in range(x.dim()) if dim != 1]
        variance, mean = torch.var_mean(x, dims, correction=0)
        if norm.weight is None or norm.running_mean is None or norm.running_var is None:
            raise UserError(
                f"depth.start=identity needs a batch normalisation with weights and statistics in {site.paths[0]}."
            )
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(variance)
        norm.weight.copy_((variance + norm.eps).sqrt())
        norm.bias.copy_(mean)


def stack(site: Site) -> None:
    """Progressive stacking: copy the block before it in its sequence (Gong et al. 2019, for Transformers).

    **Preserves** nothing.
    """
    for path in site.paths:
        parent, _, place = path.rpartition(".")
        before = f"{parent}.{int(place) - len(site.paths)}".lstrip(".") if place.isdigit() else ""
        known = dict(site.network.named_modules())
        source = {}
        if before in known:
            # The copy computes what the block does whose rows the network multiplies.
            block = copy.deepcopy(known[before])
            fold_multipliers(block)
            source = _tensors(block)
        own = _tensors(known[path])
        if not own.keys() == source.keys() or any(own[name].shape != source[name].shape for name in own):
            raise UserError(
                f"depth.start=stack: there is no block of the same shape before {path} to copy; let blocks come in "
                "behind one of their kind, in order."
            )
        for name, tensor in own.items():
            tensor.copy_(source[name])


def _tensors(block: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, without the weights of channels in statistics that a state_dict may hold."""
    return {name: t.detach() for name, t in (*block.named_parameters(), *block.named_buffers())}


STARTS: dict[str, Start] = {"zero": zero, "identity": identity, "stack": stack}
#: Those that leave the outputs as they are.
START_PRESERVES = frozenset({"zero", "identity"})

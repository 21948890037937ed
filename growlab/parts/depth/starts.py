"""How a block begins that comes into a network: as nothing, as the identity, or as a copy of the one before it."""

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from growlab.base.errors import UserError
from growlab.growth.multipliers import fold_multipliers
from growlab.growth.outputs import quietly
from growlab.parts.depth.finding import Block
from growlab.widths.inputs import call_with

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_AFFINE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Site:
    """Where a block has just come in.

    Attributes:
        network: with the block.
        block: that came in.
        probe: positional inputs of the network.
        twin: paths of modules of the same shapes that are there, in the order of the block's; empty if there are none.
        own: names of tensors whose values stay: parameters that other modules share, and constants.
    """

    network: nn.Module
    block: Block
    probe: tuple[Any, ...]
    twin: tuple[str, ...] = ()
    own: Collection[str] = ()

    @property
    def modules(self) -> list[nn.Module]:
        """The block's modules, those inside of others too."""
        return [m for path in self.block.paths for m in self.network.get_submodule(path).modules()]

    @property
    def copied(self) -> dict[str, str]:
        """Which parameter each of the block's may be a copy of, by name."""
        return {
            f"{path}.{name}": f"{source}.{name}"
            for path, source in zip(self.block.paths, self.twin, strict=False)
            for name, _ in self.network.get_submodule(path).named_parameters()
            if f"{path}.{name}" not in self.own
        }


Start = Callable[[Site], None]


def zero(site: Site) -> None:
    """Let a residual block add nothing: what lies last with parameters in each of its branches is zero.

    Weight and bias of a batch normalisation that ends a branch, as is usual for residual networks (Goyal et al. 2017,
    Section 5.1), a layer scale, or the projection that puts the branch out, as of both branches of a pre-norm
    Transformer's layer.

    **Preserves** exactly, where the block hands its input on beside them. They learn from the first step; what lies
    before them from the second.
    """
    for name in site.block.zeroed or ():
        owner, _, attribute = name.rpartition(".")
        module = site.network.get_submodule(owner)
        _assign(module, attribute, torch.zeros_like(getattr(module, attribute)))


def identity(site: Site) -> None:
    """Net2Deeper: let a layer, its batch normalisation and its activation be the identity (Chen et al. 2016).

    The weight is the identity matrix, or the kernel that shifts by nothing; a batch normalisation undoes itself, with
    the mean and variance of the probe batch as its statistics.

    **Preserves** exactly where the activation maps its own outputs to themselves, as ReLU does, or has a method
    `become_identity`, which is called. In train mode a batch normalisation is the identity on the probe batch, and on
    another one up to how far its statistics differ.
    """
    seen: list[Tensor] = []
    paths = site.block.paths
    first = site.network.get_submodule(paths[0])
    handle = first.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach().clone()))
    try:
        with quietly(site.network):
            site.network.train()
            call_with(site.network, site.probe)
    finally:
        handle.remove()
    modules = site.modules
    affine = [m for m in modules if isinstance(m, _AFFINE)]
    if len(affine) != 1 or affine[0].weight.shape[0] != affine[0].weight.shape[1]:
        raise UserError(
            f"start='identity' is for blocks of one layer with as many outputs as inputs, such as a convolution "
            f"with its batch normalisation and ReLU; {', '.join(paths)} holds {len(affine)} layers."
        )
    layer = affine[0]
    weight = torch.empty_like(layer.weight)
    (nn.init.eye_ if isinstance(layer, nn.Linear) else nn.init.dirac_)(weight)
    _assign(layer, "weight", weight)
    if layer.bias is not None:
        layer.bias.zero_()
    for module in modules:
        if callable(become := getattr(module, "become_identity", None)):
            become()
    for norm in modules:
        if not isinstance(norm, _BATCH_NORMS):
            continue
        x = seen[0]
        dims = [dim for dim in range(x.dim()) if dim != 1]
        variance, mean = torch.var_mean(x, dims, correction=0)
        if norm.weight is None or norm.running_mean is None or norm.running_var is None:
            raise UserError(
                f"start='identity' needs a batch normalisation with weights and statistics in {paths[0]}."
            )
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(variance)
        norm.weight.copy_((variance + norm.eps).sqrt())
        norm.bias.copy_(mean)


def stack(site: Site) -> None:
    """Copy the block before it, and let what lies last in each branch be zero.

    The copied layers begin with what training has made of their neighbour's (progressive stacking, Gong et al. 2019,
    with the zeros of `zero`).

    **Preserves** exactly, as `zero` does.
    """
    gstack(site)
    zero(site)


def gstack(site: Site) -> None:
    """Copy the block before it as it is: the operator G_stack (Du et al. 2024, arXiv 2405.15319, Section 3).

    **Preserves** nothing.
    """
    if not site.twin:
        raise UserError(
            f"there is no block of the same shape before {site.block.name} to copy; let blocks come in "
            "behind one of their kind, in order."
        )
    for path, twin in zip(site.block.paths, site.twin, strict=True):
        # The copy computes what the block does whose rows the network multiplies.
        source = copy.deepcopy(site.network.get_submodule(twin))
        fold_multipliers(source)
        known = _tensors(source)
        for name, tensor in _tensors(site.network.get_submodule(path)).items():
            if f"{path}.{name}" not in site.own:
                tensor.copy_(known[name])


def _assign(module: nn.Module, name: str, value: Tensor) -> None:
    """Give a parameter, or what a tensor is computed from, such a value."""
    if not is_parametrized(module, name):
        module.get_parameter(name).copy_(value)
        return
    setattr(module, name, value)
    if not torch.allclose(getattr(module, name), value, atol=1e-6):
        raise UserError(
            "a weight that is computed from others cannot take every value, so the block cannot begin as it should; "
            "take start='zero' or start='stack'."
        )


def _tensors(block: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a state_dict, which may also have the weights of channels in statistics."""
    saved = block.state_dict().keys()
    named = (*block.named_parameters(), *block.named_buffers())
    return {name: tensor.detach() for name, tensor in named if name in saved}


STARTS: dict[str, Start] = {"zero": zero, "identity": identity, "stack": stack, "gstack": gstack}
#: Those that leave the outputs as they are.
START_PRESERVES = frozenset({"zero", "identity", "stack"})
#: Those that need a residual branch.
ZEROING = frozenset({"zero", "stack"})
#: Those that need a block of the same shapes.
COPYING = frozenset({"stack", "gstack"})

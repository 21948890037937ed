"""Initialisation of inserted blocks: zero branch, identity (Net2Deeper), or copy of the previous block (stacking)."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from growlab.base.errors import UserError
from growlab.base.pieces import whole
from growlab.growth.multipliers import multiplied_weights
from growlab.growth.outputs import without_side_effects
from growlab.parts.depth.finding import Block
from growlab.widths.inputs import call_with

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_AFFINE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Insertion:
    """Context of a start: the network and the block that was just inserted.

    Attributes:
        twin: paths of earlier modules with the same shapes, in the order of the block's; empty if there are none.
        own: names of tensors whose values are kept: parameters shared with other modules, and constants.
    """

    network: nn.Module
    block: Block
    probe: tuple[Any, ...]
    twin: tuple[str, ...] = ()
    own: Collection[str] = ()

    @property
    def modules(self) -> list[nn.Module]:
        """All modules of the block, including nested ones."""
        return [m for path in self.block.paths for m in self.network.get_submodule(path).modules()]

    @property
    def copied(self) -> dict[str, str]:
        """Maps each of the block's parameters that may be copied to the twin's parameter, by name."""
        return {
            f"{path}.{name}": f"{source}.{name}"
            for path, source in zip(self.block.paths, self.twin, strict=False)
            for name, _ in self.network.get_submodule(path).named_parameters()
            if f"{path}.{name}" not in self.own
        }


Start = Callable[[Insertion], None]


def zero(insertion: Insertion) -> None:
    """Zero the last operation with parameters in each branch of a residual block, so that it adds nothing.

    This is the weight and bias of a batch normalisation at the end of a branch, as usual in residual networks (Goyal et
    al. 2017, Section 5.1), a layer scale, or the output projection, as in both branches of a pre-norm Transformer
    layer.

    **Preserves** exactly if the block passes its input on around the branches. The zeroed parameters learn from the
    first step, those before them from the second.
    """
    for name in insertion.block.zeroed or ():
        owner, _, attribute = name.rpartition(".")
        module = insertion.network.get_submodule(owner)
        _assign(module, attribute, torch.zeros_like(getattr(module, attribute)))


def identity(insertion: Insertion) -> None:
    """Net2Deeper: initialise a layer, its batch normalisation and its activation as the identity (Chen et al. 2016).

    The weight is the identity matrix or a Dirac kernel; a batch normalisation is the identity for the probe batch's
    mean and variance, which are its statistics.

    **Preserves** exactly if the activation is idempotent, like ReLU, or has a method `become_identity`, which is
    called. In train mode a batch normalisation is the identity on the probe batch, and on others up to the difference
    of their statistics.
    """
    block_inputs: list[Tensor] = []
    paths = insertion.block.paths
    first = insertion.network.get_submodule(paths[0])
    hook = first.register_forward_pre_hook(lambda module, inputs: block_inputs.append(inputs[0].detach().clone()))
    with hook, without_side_effects(insertion.network):
        insertion.network.train()
        call_with(insertion.network, insertion.probe)
    modules = insertion.modules
    affine = [m for m in modules if isinstance(m, _AFFINE)]
    if len(affine) != 1 or affine[0].weight.shape[0] != affine[0].weight.shape[1]:
        raise UserError(
            f"start='identity' is for blocks of one layer with as many outputs as inputs, such as a convolution "
            f"with its batch normalisation and ReLU; {', '.join(paths)} has {len(affine)} layers."
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
        x = block_inputs[0]
        dims = [dim for dim in range(x.dim()) if dim != 1]
        variance, mean = torch.var_mean(x, dims, correction=0)
        if norm.weight is None or norm.running_mean is None or norm.running_var is None:
            raise UserError(f"start='identity' needs a batch normalisation with weights and statistics in {paths[0]}.")
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(variance)
        norm.weight.copy_((variance + norm.eps).sqrt())
        norm.bias.copy_(mean)


def stack(insertion: Insertion) -> None:
    """Copy the previous block, and zero the last operation with parameters in each branch.

    The layers start from the trained weights of the previous block (progressive stacking, Gong et al. 2019, with the
    zeros of `zero`). If no earlier block has the same shapes, as after a strided one, weights are drawn.

    **Preserves** exactly, as `zero` does.
    """
    if insertion.twin:
        gstack(insertion)
    zero(insertion)


def gstack(insertion: Insertion) -> None:
    """Copy the previous block unchanged: the operator G_stack (Du et al. 2024, arXiv 2405.15319, Section 3).

    **Preserves** nothing.
    """
    if not insertion.twin:
        raise UserError(
            f"there is no block of the same shape before {insertion.block.name} to copy; insert blocks after one of "
            "their kind, in order."
        )
    for path, twin in zip(insertion.block.paths, insertion.twin, strict=True):
        # Multipliers of the original's rows are folded into the copy.
        source = insertion.network.get_submodule(twin)
        values = {**_tensors(source), **multiplied_weights(source)}
        for name, tensor in _tensors(insertion.network.get_submodule(path)).items():
            if f"{path}.{name}" not in insertion.own:
                tensor.copy_(whole(values[name]))


def _assign(module: nn.Module, name: str, value: Tensor) -> None:
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
    """Parameters and persistent buffers by name, without growlab's extra state_dict entries."""
    saved = block.state_dict().keys()
    named = (*block.named_parameters(), *block.named_buffers())
    return {name: tensor.detach() for name, tensor in named if name in saved}


STARTS: dict[str, Start] = {"zero": zero, "identity": identity, "stack": stack, "gstack": gstack}
#: Starts that preserve the outputs.
START_PRESERVES = frozenset({"zero", "identity", "stack"})
#: Starts that need a residual branch.
ZEROING = frozenset({"zero", "stack"})
#: Starts that copy an earlier block of the same shapes.
COPYING = frozenset({"stack", "gstack"})

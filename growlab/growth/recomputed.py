"""Detect activation checkpointing, custom autograd.Functions and DataParallel, which bypass growlab's hooks."""

import torch
from torch import nn

from growlab.base.errors import UserError
from growlab.widths.apart import called_apart


def check_whole(module: nn.Module) -> None:
    """Raise an error if a module is a replica made by `nn.DataParallel`; called from the module's hooks.

    Its weights are other tensors, which the hook does not know, and several devices would share the hooks' state.

    Raises:
        UserError: the module is a replica.
    """
    # There is no public attribute for this; a test makes such a replica.
    if getattr(module, "_is_replica", False):
        raise UserError(
            f"torch.nn.DataParallel copies {type(module).__name__} to several devices in each step, which growth "
            "cannot follow: use DistributedDataParallel with a process for each device."
        )


def check_reached(module: nn.Module, what: str) -> None:
    """Raise an error if the hooked module calls an operation where backward would bypass the hook.

    Args:
        module: the module whose forward runs.
        what: the operand of the operation, for the message.

    Raises:
        UserError: the operation is called inside activation checkpointing or a custom `autograd.Function` in that
            forward.
    """
    if torch.compiler.is_compiling():
        return
    _, apart = called_apart(module)
    if apart:
        raise UserError(
            f"{type(module).__name__} takes {what} inside {apart}, whose backward pass does not see what growth "
            "does to it: let it call a submodule there that has it, such as nn.Linear or nn.LayerNorm."
        )

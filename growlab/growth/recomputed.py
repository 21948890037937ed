"""What hooks change in a module's forward, and code in it whose backward pass runs without those hooks."""

import torch
from torch import nn

from growlab.base.errors import UserError
from growlab.widths.apart import called_apart


def check_whole(module: nn.Module) -> None:
    """Refuse a copy of a module that `nn.DataParallel` makes for a device, from a hook of the module's.

    Its weights are other tensors, which the hook would not know; and several devices would share what hooks keep.

    Raises:
        UserError: it is one.
    """
    # No public name says so; a test makes such a copy.
    if getattr(module, "_is_replica", False):
        raise UserError(
            f"torch.nn.DataParallel copies {type(module).__name__} to several devices in each step, which growth "
            "cannot follow: use DistributedDataParallel with a process for each device."
        )


def check_reached(module: nn.Module, what: str) -> None:
    """Refuse an operation whose gradient would be another, called from a hook of the module around its forward.

    Args:
        module: whose forward runs.
        what: the operation takes, for the message.

    Raises:
        UserError: it is called inside a checkpoint, or a function with a backward pass of its own, in that forward.
    """
    if torch.compiler.is_compiling():
        return
    _, apart = called_apart(module)
    if apart:
        raise UserError(
            f"{type(module).__name__} takes {what} inside {apart}, whose backward pass does not see what growth "
            "does to it: let it call a submodule there that has it, such as nn.Linear or nn.LayerNorm."
        )
